"""A leader lock in memory, by the loop's clock, with a server that can fail."""

import asyncio
from dataclasses import dataclass, field

from router.ports import LockState, LockUnavailable
from tests.support.virtual_time import now


@dataclass
class LockServer:
    """What all of its clients see."""

    ttl: float
    owner: str | None = None
    fence: int = 0
    refreshed_at: float = 0.0
    is_new: bool = False  # it lets nobody have the lock: it may have forgotten who has
    takes: float = 0.0  # seconds until it answers
    swallows: bool = False  # its client loses a cancellation while it waits for the answer
    trouble: Exception | None = None  # what every call meets
    refreshes: list[float] = field(default_factory=list)  # when

    def fail(self) -> None:
        self.trouble = LockUnavailable("unplugged")

    def recover(self) -> None:
        self.trouble = None

    def refresh(self) -> None:
        self.refreshed_at = now()
        self.refreshes.append(now())

    @property
    def is_free(self) -> bool:
        if self.is_new:
            return False
        return self.owner is None or now() >= self.refreshed_at + self.ttl


@dataclass
class FakeLock:
    server: LockServer
    name: str

    async def acquire(self) -> LockState:
        server = self.server
        self._fail()
        if server.is_free:
            server.owner, server.fence = self.name, server.fence + 1
        if server.owner == self.name:
            server.refresh()
        state = LockState(
            holder=server.owner,
            is_ours=server.owner == self.name,
            fence=server.fence,
            age=now() - server.refreshed_at,
        )
        await asyncio.sleep(server.takes)
        return state

    async def renew(self, fence: int) -> bool:
        self._fail()
        is_ours = (self.server.owner, self.server.fence) == (self.name, fence)
        if is_ours:
            self.server.refresh()
        try:
            await asyncio.sleep(self.server.takes)
        except asyncio.CancelledError:
            if not self.server.swallows:
                raise
        return is_ours

    async def release(self) -> None:
        self._fail()
        if self.server.owner == self.name:
            self.server.owner = None
        await asyncio.sleep(self.server.takes)

    def _fail(self) -> None:
        if self.server.trouble is not None:
            raise self.server.trouble
