"""What the engine looks like from outside, at one instant. Reading it changes nothing."""

import asyncio
from collections.abc import Iterator

from router.core.health import GOOD_RATE, ConsumerVitals, PoolVitals, QueueVitals, Vitals
from router.engine.breaker import Breakers, BreakerState
from router.engine.intake import Intake
from router.engine.process_pool import ProcessPool
from router.engine.queue_manager import QueueManager


class View:
    def __init__(self, manager: QueueManager, breakers: Breakers) -> None:
        self.initialized = False
        self.shutting_down = False
        self.primary = True
        self._manager = manager
        self._breakers = breakers
        self._started = asyncio.get_running_loop().time()

    def vitals(self) -> Vitals:
        now = asyncio.get_running_loop().time()
        manager = self._manager
        pools = tuple(self._pools(now))
        return Vitals(
            initialized=self.initialized,
            shutting_down=self.shutting_down,
            primary=self.primary,
            uptime=now - self._started,
            consumers=tuple(
                vitals for intake in manager.intakes.values() for vitals in _consumers(intake, now)
            ),
            pools=pools,
            idle_pools=len(manager.pools) - len(pools),
            queues=tuple(
                QueueVitals(name=name, success_rate_30min=intake.counts.success_rate(now))
                for name, intake in manager.intakes.items()
            ),
            open_breakers=sum(
                breaker.state is BreakerState.OPEN for breaker in self._breakers.all()
            ),
        )

    def _pools(self, now: float) -> Iterator[PoolVitals]:
        """Those that have work, or fail. Of ten thousand, most cost no more than a glance."""
        for pool in self._manager.pools.values():
            rate = pool.courier.deliveries.success_rate(now)
            if pool.held or rate < GOOD_RATE:
                yield self._pool(pool, now, rate)

    def _pool(self, pool: ProcessPool, now: float, rate: float) -> PoolVitals:
        last_start = pool.courier.last_start
        return PoolVitals(
            code=pool.code,
            queued=pool.queued,
            delivering=pool.courier.open_posts,
            waiting_elsewhere=pool.courier.pausing + pool.waits_for_rate,
            idle_seconds=now - (self._started if last_start is None else last_start),
            success_rate_30min=rate,
        )


def _consumers(intake: Intake, now: float) -> Iterator[ConsumerVitals]:
    for number, connection in enumerate(intake.connections):
        yield ConsumerVitals(
            queue=intake.queue.name,
            connection=number,
            running=connection.is_running,
            healthy=connection.is_healthy(now),
            restarts=intake.restarts,
            last_poll=now - connection.last_poll if connection.has_polled else None,
        )
