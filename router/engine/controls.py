"""Changes that operators may make while the router runs."""

import asyncio

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from router.core.state import PoolState
from router.engine.breaker import Breakers
from router.engine.queue_manager import QueueManager
from router.engine.state import pool_state
from router.ports import Unknown


class PoolSetting(Struct, frozen=True, kw_only=True):
    """A field that is left out stays as it is."""

    concurrency: int | None = None
    rate_per_minute: int | UnsetType | None = UNSET  # None: no limit


class Controls:
    def __init__(self, manager: QueueManager, breakers: Breakers) -> None:
        self._manager = manager
        self._breakers = breakers

    def change_pool(self, code: str, change: PoolSetting) -> PoolState:
        """Change it at once, until the next sync. Raises Unknown, also while it is drained."""
        pool = self._manager.pools.get(code)
        if pool is None:
            raise Unknown("there is no such pool")
        config = replace(pool.config, concurrency=change.concurrency or pool.config.concurrency)
        if change.rate_per_minute is not UNSET:
            config = replace(config, rate_per_minute=change.rate_per_minute)
        pool.change(config)
        return pool_state(pool, asyncio.get_running_loop().time())

    def reset_breaker(self, name: str) -> None:
        """Let calls through to this origin again. Raises Unknown."""
        breaker = next((each for each in self._breakers.all() if each.name == name), None)
        if breaker is None:
            raise Unknown("there is no such circuit breaker")
        breaker.reset(asyncio.get_running_loop().time())
        self._manager.deps.targets.reset(None if self._breakers.are_one else name)

    def reset_breakers(self) -> int:
        """Let calls through to all origins again. Return how many there are."""
        breakers, now = self._breakers.all(), asyncio.get_running_loop().time()
        for breaker in breakers:
            breaker.reset(now)
        self._manager.deps.targets.reset()
        return len(breakers)

    def reset_target(self, origin: str) -> None:
        """Close its circuit, and forget its silence and its limit. Raises Unknown.

        Those who share its breaker are reset, too.
        """
        target = self._manager.deps.targets.find(origin)
        if target is None or target.is_local:
            raise Unknown("there is no such target")
        self.reset_breaker(target.breaker.name)

    def reset_targets(self) -> int:
        """Reset all targets. Return how many there are."""
        self.reset_breakers()
        return sum(not each.is_local for each in self._manager.deps.targets)
