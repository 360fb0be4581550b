"""What operators may turn while the router runs."""

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from router.core.figures import PoolFigures
from router.engine.breaker import Breaker, Breakers
from router.engine.queue_manager import QueueManager
from router.engine.statistics import pool_figures


class UnknownPool(Exception):
    """There is no such pool, or it is being drained."""


class UnknownBreaker(Exception):
    """Nothing was sent to such an origin lately."""


class PoolChange(Struct, frozen=True, kw_only=True):
    """What is left out stays as it is."""

    concurrency: int | None = None
    rate_per_minute: int | UnsetType | None = UNSET  # None: no limit


class Controls:
    def __init__(self, manager: QueueManager, breakers: Breakers) -> None:
        self._manager = manager
        self._breakers = breakers

    def change_pool(self, code: str, change: PoolChange) -> PoolFigures:
        """At once, and until the next sync. Raises UnknownPool."""
        pool = self._manager.pools.get(code)
        if pool is None:
            raise UnknownPool("there is no such pool")
        config = replace(pool.config, concurrency=change.concurrency or pool.config.concurrency)
        if change.rate_per_minute is not UNSET:
            config = replace(config, rate_per_minute=change.rate_per_minute)
        self._manager.change_pool(config)
        return pool_figures(pool)

    def reset_breaker(self, name: str) -> None:
        """Let calls through to this origin again. Raises UnknownBreaker."""
        self._breaker(name).reset()

    def reset_breakers(self) -> int:
        """How many there are."""
        breakers = self._breakers.all()
        for breaker in breakers:
            breaker.reset()
        return len(breakers)

    def _breaker(self, name: str) -> Breaker:
        for breaker in self._breakers.all():
            if breaker.name == name:
                return breaker
        raise UnknownBreaker("there is no such circuit breaker")
