"""A pool's rate limit, which can change under those that wait for it (SPEC §9)."""

from typing import Final

from aiolimiter import AsyncLimiter

from router.core.config import PoolConfig
from router.engine.bell import Bell

MINUTE: Final = 60.0
_SHORTEST_WAIT: Final = 0.001  # a sum of floats may fall short of a whole permit: no spinning


class RateGate:
    """aiolimiter's leaky bucket: a minute's worth (or the burst) at once, then evenly."""

    __slots__ = ("_before", "_bucket", "_changed", "is_limited")

    def __init__(self, config: PoolConfig) -> None:
        self._bucket = _bucket(config)
        self.is_limited = self._bucket is not None
        self._before: _Bucket | None = None  # the last one; no limit replaces no bucket
        self._changed = Bell()

    @property
    def must_wait(self) -> bool:
        """Whether the next one cannot be sent at once."""
        return self.seconds_to_wait > 0

    def change(self, config: PoolConfig) -> None:
        """Reach those that wait, and grant no new burst: what was used stays used."""
        bucket = _bucket(config)
        before = self._before = self._bucket or self._before
        if bucket is not None and before is not None:
            bucket.fill(before.level)
        self._bucket = bucket
        self.is_limited = bucket is not None
        self._changed.ring()

    async def pass_one(self) -> None:
        """Wait until one more may be sent."""
        while (seconds := self.seconds_to_wait) > 0:
            await self._changed.wait(at_most=max(seconds, _SHORTEST_WAIT))
        if self._bucket is not None:
            await self._bucket.acquire()

    @property
    def seconds_to_wait(self) -> float:
        return 0.0 if self._bucket is None else self._bucket.seconds_to_wait


class _Bucket(AsyncLimiter):
    """It tells how full it is, and can start as full as the one before it was."""

    __slots__ = ()

    @property
    def level(self) -> float:
        self._leak()
        return self._level

    @property
    def seconds_to_wait(self) -> float:
        if self.has_capacity():
            return 0.0
        return (self._level + 1 - self.max_rate) * self.time_period / self.max_rate

    def fill(self, level: float) -> None:
        self._leak()
        self._level = min(level, self.max_rate)


def _bucket(config: PoolConfig) -> _Bucket | None:
    rate = config.rate_per_minute
    if rate is None:
        return None
    burst = min(config.burst or rate, rate)
    return _Bucket(burst, MINUTE * burst / rate)
