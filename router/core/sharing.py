"""How several routers share the limits of a configuration (LIM-1, LIM-2)."""

import math
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from router.core.config import PoolConfig, RoutingConfig, TargetConfig

MINUTE: Final = 60.0
PORTION_SECONDS: Final = 0.1  # of a rate: what a router reserves at once


class RateTerms(Struct, frozen=True):
    """The subject of a shared rate limit."""

    interval: float  # seconds from one slot to the next
    burst: int  # slots at once, after a pause
    portion: int  # slots that a router may always reserve at once

    @classmethod
    def of(cls, rate_per_minute: int, burst: int | None) -> "RateTerms":
        interval = MINUTE / rate_per_minute
        at_once = min(burst or rate_per_minute, rate_per_minute)
        return cls(interval, at_once, max(int(PORTION_SECONDS / interval), 1))


class Slots(Struct):
    """Slots that this router has reserved and not used. Times are those of its event loop.

    A slot is lost if it was not used within a tenth of a second: saved for later, it would let some
    minute exceed the limit.
    """

    first: float  # when the next one begins: what came from a pause begins in the past
    interval: float
    count: int
    since: float  # when they were reserved: they cannot be used sooner

    def next_at(self, now: float) -> float | None:
        """Return when the next one may be used; None: none is left."""
        self._drop_lost(now)
        return max(self.first, self.since) if self.count else None

    def use(self) -> None:
        self._drop(1)

    def _drop_lost(self, now: float) -> None:
        oldest = now - PORTION_SECONDS
        if self.since < oldest and self.first < oldest:
            self._drop(min(math.ceil((oldest - self.first) / self.interval), self.count))

    def _drop(self, count: int) -> None:
        self.first += count * self.interval
        self.count -= count


class RateShare(Struct, frozen=True):
    """A part of a rate, for one of several routers."""

    rate_per_minute: float | None
    burst: int | None

    @classmethod
    def of(cls, config: PoolConfig, routers: int) -> "RateShare":
        rate, burst = config.rate_per_minute, config.burst
        if rate is None:
            return cls(None, None)
        return cls(rate / routers, max(min(burst or rate, rate) // routers, 1))


def divided(config: RoutingConfig, routers: int, *, rates: bool) -> RoutingConfig:
    """Return the share of one of several routers: each limit by their number, at least 1.

    `rates`: those of pools, too. Without, they are shared in another way.
    """
    if routers == 1:
        return config
    return replace(
        config,
        pools=tuple(_pool_share(pool, routers, rates=rates) for pool in config.pools),
        targets=tuple(_target_share(target, routers) for target in config.targets),
    )


def _pool_share(pool: PoolConfig, routers: int, *, rates: bool) -> PoolConfig:
    share = replace(pool, concurrency=max(pool.concurrency // routers, 1))
    if not rates:
        return share
    return replace(
        share,
        rate_per_minute=_part(pool.rate_per_minute, routers),
        burst=_part(pool.burst, routers),
    )


def _target_share(target: TargetConfig, routers: int) -> TargetConfig:
    return replace(
        target,
        concurrency=_part(target.concurrency, routers),
        rate_per_minute=_part(target.rate_per_minute, routers),
    )


def _part(limit: int | None, routers: int) -> int | None:
    return None if limit is None else max(limit // routers, 1)
