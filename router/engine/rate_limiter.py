"""A pool's rate limit, which can change under those that wait for it (SPEC §9)."""

import asyncio
from typing import Final

from router.core.config import PoolConfig
from router.signal import Signal

MINUTE: Final = 60.0
_SHORTEST_WAIT: Final = 0.001  # a sum of floats may fall short of a whole permit: no spinning


class RateLimiter:
    """A leaky bucket: a minute's worth (or the burst) at once, then evenly."""

    __slots__ = ("_capacity", "_changed", "_leaked_at", "_level", "_per_second", "is_limited")

    def __init__(self, config: PoolConfig) -> None:
        self._level = 0.0  # permits that were used and have not leaked yet
        self._leaked_at = 0.0  # loop time
        self._capacity = self._per_second = 0.0
        self._changed = Signal()
        self._configure(config)

    @property
    def must_wait(self) -> bool:
        """Whether the next one cannot be sent at once."""
        return self.seconds_to_wait > 0

    @property
    def seconds_to_wait(self) -> float:
        """Return the seconds until one more may be sent."""
        if not self.is_limited:
            return 0.0
        self._leak()
        return max(0.0, (self._level + 1 - self._capacity) / self._per_second)

    def change(self, config: PoolConfig) -> None:
        """Reach those that wait, and grant no new burst: what was used stays used."""
        self._leak()
        self._configure(config)
        self._changed.ring()

    async def pass_one(self) -> None:
        """Wait until one more may be sent, and count it."""
        while (seconds := self.seconds_to_wait) > 0:
            await self._changed.wait(at_most=max(seconds, _SHORTEST_WAIT))
        if self.is_limited:
            self._level += 1

    def _configure(self, config: PoolConfig) -> None:
        rate = config.rate_per_minute
        self.is_limited = rate is not None
        if rate is not None:  # else the level leaks on as before, for a limit that comes back
            self._capacity = min(config.burst or rate, rate)
            self._per_second = rate / MINUTE
            self._level = min(self._level, self._capacity)

    def _leak(self) -> None:
        now = asyncio.get_running_loop().time()
        self._level = max(0.0, self._level - (now - self._leaked_at) * self._per_second)
        self._leaked_at = now
