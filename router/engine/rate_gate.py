"""A pool's rate limit, which can change under those that wait for it (SPEC §9)."""

from typing import Final

from aiolimiter import AsyncLimiter

from router.core.config import PoolConfig

MINUTE: Final = 60.0
_PRECISION: Final = 1 / 1024  # of a permit, when a level is carried over


class RateGate:
    """aiolimiter's leaky bucket: a minute's worth (or the burst) at once, then evenly."""

    def __init__(self, config: PoolConfig) -> None:
        self.waits = 0  # messages that had to wait so far
        self._bucket = _bucket(config)
        self._carried = 0.0  # what the bucket before this one still held

    @property
    def is_limited(self) -> bool:
        return self._bucket is not None

    def change(self, config: PoolConfig) -> None:
        """A new limit grants no new burst: what was used stays used."""
        self._carried = _level(self._bucket)
        self._bucket = _bucket(config)

    async def pass_one(self) -> None:
        """Wait until one more may be sent. Who waits while the limit changes must ask anew."""
        bucket = self._bucket
        if bucket is None:
            return
        if self._carried:
            carried, self._carried = min(self._carried, bucket.max_rate), 0.0
            await bucket.acquire(carried)
        if not bucket.has_capacity():
            self.waits += 1
        await bucket.acquire()


def _bucket(config: PoolConfig) -> AsyncLimiter | None:
    rate = config.rate_per_minute
    if rate is None:
        return None
    burst = min(config.burst or rate, rate)
    return AsyncLimiter(burst, MINUTE * burst / rate)


def _level(bucket: AsyncLimiter | None) -> float:
    """How full it is. aiolimiter only tells whether an amount would fit, so ask by halves."""
    if bucket is None:
        return 0.0
    fits, too_much = 0.0, bucket.max_rate + _PRECISION
    while too_much - fits > _PRECISION:
        middle = (fits + too_much) / 2
        if bucket.has_capacity(middle):
            fits = middle
        else:
            too_much = middle
    return max(bucket.max_rate - fits, 0.0)
