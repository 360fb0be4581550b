"""Reading the engine's figures. Nothing here changes any of them.

Iterators read each pool as they come to it, so that whoever walks ten thousand of them can let
deliveries go on in between.
"""

import asyncio
from collections.abc import Iterator, Mapping
from heapq import nsmallest
from typing import Final

from router.core.figures import (
    BreakerFigures,
    PoolFigures,
    PoolLoad,
    PoolMeters,
    QueueFigures,
    QueueMeters,
    RouterMeters,
    Throughput,
)
from router.core.rolling import covered
from router.core.stats import LONG, SHORT, Counts
from router.engine.breaker import WINDOW, Breaker, Breakers, BreakerState
from router.engine.intake import Intake
from router.engine.letters import Letters
from router.engine.loop_lag import LoopLag
from router.engine.process_pool import ProcessPool
from router.engine.queue_manager import QueueManager
from router.ports import Tracer

MAX_ORIGINS: Final = 100  # a label with more values costs every scrape, for ever
OTHERS: Final = "(others)"
_GRAVITY: Final[Mapping[BreakerState, int]] = {
    BreakerState.CLOSED: 0,
    BreakerState.HALF_OPEN: 1,
    BreakerState.OPEN: 2,
}


class Statistics:
    def __init__(
        self,
        manager: QueueManager,
        breakers: Breakers,
        letters: Letters,
        lag: LoopLag,
        tracer: Tracer | None = None,
    ) -> None:
        self._manager = manager
        self._breakers = breakers
        self._letters = letters
        self._lag = lag
        self._tracer = tracer
        self._started = _now()

    def pools(self) -> Iterator[PoolFigures]:
        return (pool_figures(pool) for pool in self._all_pools())

    def pool_meters(self) -> Iterator[PoolMeters]:
        return (_pool_meters(pool) for pool in self._all_pools())

    def queues(self) -> Iterator[QueueFigures]:
        uptime = _now() - self._started
        return (_queue_figures(intake, uptime) for intake in self._all_intakes())

    def queue_meters(self) -> Iterator[QueueMeters]:
        unknown_pools = self._manager.unknown_pools
        return (
            _queue_meters(intake, unknown_pools[intake.queue.name])
            for intake in self._all_intakes()
        )

    def breakers(self) -> Iterator[BreakerFigures]:
        return (breaker_figures(breaker) for breaker in self._breakers.all())

    def router_meters(self) -> RouterMeters:
        routing = self._manager.routing
        ended = {fate.name.lower(): count for fate, count in routing.ledger.ended.items()}
        return RouterMeters(
            ledger={"received": routing.ledger.received, **ended},
            unaccounted=routing.unaccounted,
            dead_letters={reason.value: count for reason, count in self._letters.kept.items()},
            breakers=_breaker_states(self._breakers),
            loop_lag=self._lag.seconds,
            spans={} if self._tracer is None else self._tracer.counts,
        )

    def _all_pools(self) -> list[ProcessPool]:
        """A draining one counts until it is gone (§7)."""
        return [*self._manager.pools.values(), *self._manager.draining_pools.values()]

    def _all_intakes(self) -> list[Intake]:
        """A stopping one counts until it is gone, or replaced: then its counts live on."""
        stopping = {intake.queue.name: intake for intake in self._manager.stopping_intakes}
        return list({**stopping, **self._manager.intakes}.values())


def pool_figures(pool: ProcessPool) -> PoolFigures:
    now, deliveries = _now(), pool.courier.deliveries
    return PoolFigures(
        load=_load(pool),
        total=deliveries.total(),
        last_5min=deliveries.last(SHORT, now),
        last_30min=deliveries.last(LONG, now),
    )


def breaker_figures(breaker: Breaker) -> BreakerFigures:
    buffered, failures = breaker.buffered
    return BreakerFigures(
        name=breaker.name,
        state=breaker.state.name,
        successes=breaker.successes,
        failures=breaker.failures,
        rejections=breaker.rejections,
        buffered=buffered,
        buffered_failures=failures,
        buffer_size=WINDOW,
    )


def _load(pool: ProcessPool) -> PoolLoad:
    return PoolLoad(
        code=pool.code,
        in_flight=pool.courier.open_posts,
        concurrency=pool.config.concurrency,
        free=pool.free_permits,
        capacity=pool.capacity,
        queued=pool.queued,
        groups=pool.groups,
        waiting=pool.waiting,
    )


def _pool_meters(pool: ProcessPool) -> PoolMeters:
    deliveries = pool.courier.deliveries
    return PoolMeters(
        load=_load(pool),
        outcomes={metric.value: count for metric, count in deliveries.by_metric.items()},
        buckets=deliveries.buckets,
        seconds=deliveries.seconds,
    )


def _queue_figures(intake: Intake, uptime: float) -> QueueFigures:
    now, counts, depth = _now(), intake.counts, intake.last_depth
    return QueueFigures(
        name=intake.queue.name,
        total=counts.total(),
        last_5min=counts.last(SHORT, now),
        last_30min=counts.last(LONG, now),
        throughput=_throughput(counts, now, uptime),
        waiting=None if depth is None else depth.waiting,
        handed_out=None if depth is None else depth.in_flight,
    )


def _throughput(counts: Counts, now: float, uptime: float) -> Throughput:
    def recent(minutes: int) -> float:
        seconds = min(covered(minutes, now), uptime)
        return _per(counts.last(minutes, now).consumed, seconds)

    return Throughput(
        total=_per(counts.total().consumed, uptime),
        last_5min=recent(SHORT),
        last_30min=recent(LONG),
    )


def _per(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def _queue_meters(intake: Intake, unknown_pools: int) -> QueueMeters:
    now, counts, depth = _now(), intake.counts, intake.last_depth
    outcomes = {metric.value: count for metric, count in counts.by_metric.items()}
    return QueueMeters(
        name=intake.queue.name,
        outcomes={**outcomes, "unsent": counts.unsent},
        unknown_pools=unknown_pools,
        calls=dict(counts.calls),
        depth=None if depth is None else depth.waiting,
        since_poll=max(now - connection.last_poll for connection in intake.connections),
    )


def _breaker_states(breakers: Breakers) -> Mapping[str, int]:
    """The worst ones first, then by name, so that the same ones are shown each time."""
    all_of_them = breakers.all()
    shown = nsmallest(MAX_ORIGINS, all_of_them, key=lambda each: (-_gravity(each), each.name))
    states = {breaker.name: _gravity(breaker) for breaker in shown}
    if len(all_of_them) > MAX_ORIGINS:
        # None of the others is worse than the last one shown: that is all there is to say.
        states[OTHERS] = max(_gravity(each) for each in all_of_them if each.name not in states)
    return states


def _gravity(breaker: Breaker) -> int:
    return _GRAVITY[breaker.state]


def _now() -> float:
    return asyncio.get_running_loop().time()
