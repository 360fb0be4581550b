"""How many deliveries of a pool may run at once; a permit is free between two tries (MED-2)."""

import asyncio
from collections import deque
from collections.abc import Callable


class Permits:
    __slots__ = ("limit", "on_free", "out", "returning")

    def __init__(self, limit: int, on_free: Callable[[], None] = lambda: None) -> None:
        self.limit = limit
        self.out = 0
        self.returning: deque[asyncio.Future[None]] = deque()  # lent one and want it again
        self.on_free = on_free

    @property
    def free(self) -> int:
        """How many can be had now: 0 while more are out than a lowered limit allows."""
        return max(self.limit - self.out, 0)

    @property
    def is_free(self) -> bool:
        """Whether one can be had now. Then nobody waits for one."""
        return self.out < self.limit

    def may_be_kept(self) -> bool:
        """Whether a worker may go on to the next message on the permit that it has."""
        return self.out <= self.limit and not self.returning

    def take(self) -> None:
        self.out += 1

    def release(self) -> None:
        self.out -= 1
        if self.returning:
            self._admit_some()

    def lend(self) -> None:
        """Release it for a while, and tell whoever has use for it."""
        self.release()
        self.on_free()

    async def take_again(self) -> None:
        """Wait for a permit ahead of all who never had one."""
        if self.is_free:
            self.out += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.returning.append(turn)
        await turn  # whoever ends it has taken the permit for us

    def resize(self, limit: int) -> None:
        """More: at once. Less: for new work at once, running deliveries finish (POOL-6)."""
        self.limit = limit
        self._admit_some()
        self.on_free()

    def admit_all(self) -> None:
        """Let everybody go on who waits: nothing will be sent any more."""
        while self.returning:
            self._admit()

    def _admit_some(self) -> None:
        while self.returning and self.out < self.limit:
            self._admit()

    def _admit(self) -> None:
        turn = self.returning.popleft()
        if not turn.cancelled():
            self.out += 1
            turn.set_result(None)
