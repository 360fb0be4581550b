"""The limits of a pool: its permits, one for each delivery at once, and its rate."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from router.signal import Signal

MINUTE: Final = 60.0
# A sum of floats may fall short of a whole permit: no spinning.
MIN_WAIT_SECONDS: Final = 0.001


class Permits:
    __slots__ = ("admitted", "limit", "on_free", "out", "returning")

    def __init__(self, limit: int, on_free: Callable[[], None] = lambda: None) -> None:
        self.limit = limit
        self.out = 0
        self.admitted = 0  # of these: taken for somebody who has not gone on yet
        self.returning: deque[asyncio.Future[None]] = deque()  # lent one and want it again
        self.on_free = on_free

    @property
    def free(self) -> int:
        """How many can be had now: 0 while more are out than a lowered limit allows."""
        return max(self.limit - self.out, 0)

    @property
    def is_free(self) -> bool:
        """Whether one can be had now. Then no delivery waits for one."""
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

    def release_for_pause(self) -> None:
        """Release it for a while, so that others can use it."""
        self.release()
        self.on_free()

    async def take_again(self) -> None:
        """Wait for a permit ahead of all who never had one."""
        if self.is_free:
            self.out += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.returning.append(turn)
        await turn  # its end means that the permit was taken for us
        self.admitted -= 1

    def resize(self, limit: int) -> None:
        """Change the limit. A lower one holds for new work; open deliveries finish (POOL-6)."""
        self.limit = limit
        self._admit_some()
        self.on_free()

    def admit_all(self) -> None:
        """Wake all who wait: nothing more will be sent."""
        while self.returning:
            self._admit()

    def _admit_some(self) -> None:
        while self.returning and self.out < self.limit:
            self._admit()

    def _admit(self) -> None:
        turn = self.returning.popleft()
        if not turn.cancelled():
            self.out += 1
            self.admitted += 1
            turn.set_result(None)


class RateConfig(Protocol):
    """The source of a rate limit: part of a pool's or a target's configuration, or a share."""

    @property
    def rate_per_minute(self) -> float | None: ...

    @property
    def burst(self) -> int | None:
        """How many may be sent at once; None: a minute's worth."""


class RateLimiter:
    """A leaky bucket: a minute's worth (or the burst) at once, then evenly."""

    __slots__ = ("_capacity", "_changed", "_leaked_at", "_level", "_per_second", "is_limited")

    def __init__(self, config: RateConfig) -> None:
        self._level = 0.0  # permits that were used and have not leaked yet
        self._leaked_at = 0.0  # loop time
        self._capacity = self._per_second = 0.0
        self._changed = Signal()
        self._configure(config)

    @property
    def seconds_to_wait(self) -> float:
        """Return the seconds until one more may be sent."""
        if not self.is_limited:
            return 0.0
        self._leak()
        return max(0.0, (self._level + 1 - self._capacity) / self._per_second)

    def change(self, config: RateConfig) -> None:
        """Reach those that wait, and grant no new burst: what was used stays used."""
        self._leak()
        self._configure(config)
        self._changed.ring()

    async def pass_one(self, of: int = 1) -> None:  # noqa: ARG002  as SharedRate has it
        """Wait until one more may be sent, and count it. `of`: how many could be sent now."""
        while (seconds := self.seconds_to_wait) > 0:
            await self._changed.wait(at_most=max(seconds, MIN_WAIT_SECONDS))
        self.spend()

    def spend(self) -> None:
        """Count one that is sent."""
        if self.is_limited:
            self._level += 1

    def use_up(self) -> None:
        """Count as many as may be sent at once."""
        self._leak()
        self._level = self._capacity

    def _configure(self, config: RateConfig) -> None:
        rate = config.rate_per_minute
        self.is_limited = rate is not None
        if rate is not None:  # else the level leaks on as before, for a limit that comes back
            # A share of a rate may be less than one a minute.
            self._capacity = max(min(config.burst or rate, rate), 1)
            self._per_second = rate / MINUTE
            self._level = min(self._level, self._capacity)

    def _leak(self) -> None:
        now = asyncio.get_running_loop().time()
        self._level = max(0.0, self._level - (now - self._leaked_at) * self._per_second)
        self._leaked_at = now
