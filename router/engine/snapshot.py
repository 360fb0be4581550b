"""What the dashboard shows of the engine, at one instant, bounded whatever the router holds.

Reading it changes nothing. Times are Unix seconds; rates are 0…1. Lists that people page and search
(messages, warnings, dead letters, the configuration) are not in here: marks tell when they changed.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import nlargest
from itertools import islice
from typing import Final

from msgspec import Struct

from router.core.health import Vitals, assess
from router.core.job import Fate, Job, State
from router.core.lanes import Lane
from router.core.outcome import Metric
from router.core.stats import SHORT
from router.core.warnings import WarningBook
from router.engine.breaker import Breaker, Breakers, BreakerState
from router.engine.chores import Chores
from router.engine.intake import Intake
from router.engine.process_pool import ProcessPool
from router.engine.queue_manager import QueueManager

MOST_POOLS: Final = 100
MOST_QUEUES: Final = 100
MOST_BREAKERS: Final = 50
MOST_GROUPS: Final = 10
SCANNED: Final = 5000  # messages that are looked at for groups that wait, the oldest ones
_WAITING: Final = frozenset({State.QUEUED, State.WAITING})


class QueueRow(Struct, frozen=True, kw_only=True, rename="camel"):
    name: str
    waiting: int | None  # in the broker; None: not known
    succeeded: int
    failed: int
    transient: int
    success_rate: float
    connections: int
    healthy: bool
    restarts: int


class PoolRow(Struct, frozen=True, kw_only=True, rename="camel"):
    code: str
    draining: bool
    workers: int  # open POSTs
    limit: int
    queued: int
    capacity: int
    groups: int
    rate_per_minute: float | None
    waits_for_rate: bool
    retrying: int
    succeeded: int
    failed: int
    transient: int
    success_rate: float
    requests: int
    request_seconds: float  # of all of them together
    p50_ms: float  # of the last 5 minutes
    p95_ms: float


class GroupRow(Struct, frozen=True, kw_only=True, rename="camel"):
    """A group whose first waiting message has waited long, and what for."""

    pool: str
    group: str
    waiting: int
    since: float
    message_id: str
    reason: str


class BreakerRow(Struct, frozen=True, kw_only=True, rename="camel"):
    name: str
    state: str
    successes: int
    failures: int
    rejections: int
    failure_rate: float


class Totals(Struct, frozen=True, kw_only=True, rename="camel"):
    """How many there are, shown or not."""

    queues: int
    pools: int
    breakers: int
    held: int
    received: int
    delivered: int
    dead_lettered: int
    returned: int


class Marks(Struct, frozen=True, kw_only=True, rename="camel"):
    """Each changes when the list it stands for does."""

    warnings: str
    letters: int


class Snapshot(Struct, frozen=True, kw_only=True, rename="camel"):
    started_at: float
    synced_at: float | None  # the configuration
    status: str
    healthy: bool
    issues: Sequence[str]
    role: str
    shutting_down: bool
    totals: Totals
    queues: Sequence[QueueRow]
    pools: Sequence[PoolRow]
    groups: Sequence[GroupRow]
    breakers: Sequence[BreakerRow]
    warnings: Mapping[str, int]  # severity → those that nobody has acknowledged
    marks: Marks


class Snapshots:
    """Where they are taken."""

    def __init__(
        self,
        manager: QueueManager,
        breakers: Breakers,
        chores: Chores,
        warnings: WarningBook,
        wall: Callable[[], float],
    ) -> None:
        self._manager = manager
        self._breakers = breakers
        self._chores = chores
        self._warnings = warnings
        self._wall = wall
        # Fixed, so that the same instant is always told by the same number.
        self._loop_to_wall = wall() - _now()

    def take(self, vitals: Vitals, synced_at: float | None) -> Snapshot:
        warnings = self._warnings.summary(self._wall())
        health = assess(vitals, warnings)
        breakers = self._breakers.all()
        return Snapshot(
            started_at=round(self._loop_to_wall + _now() - vitals.uptime, 1),
            synced_at=synced_at,
            status=health.status.value,
            healthy=health.healthy,
            issues=health.issues,
            role="PRIMARY" if vitals.primary else "STANDBY",
            shutting_down=vitals.shutting_down,
            totals=self._totals(len(breakers)),
            queues=self._queues(),
            pools=self._pools(),
            groups=tuple(islice(self._groups(), MOST_GROUPS)),
            breakers=[_breaker(each) for each in nlargest(MOST_BREAKERS, breakers, _trouble)],
            warnings={severity.name: count for severity, count in warnings.active.items()},
            marks=Marks(
                warnings=self._warnings_mark(),
                letters=self._manager.routing.ledger.ended[Fate.DEAD_LETTERED],
            ),
        )

    def _totals(self, breakers: int) -> Totals:
        manager, ended = self._manager, self._manager.routing.ledger.ended
        return Totals(
            queues=len(manager.intakes),
            pools=len(manager.pools) + len(manager.draining_pools),
            breakers=breakers,
            held=manager.routing.held,
            received=manager.routing.ledger.received,
            delivered=ended[Fate.DELIVERED],
            dead_lettered=ended[Fate.DEAD_LETTERED],
            returned=ended[Fate.RETURNED],
        )

    def _queues(self) -> Sequence[QueueRow]:
        depths, now = self._chores.depths, _now()
        shown = nlargest(
            MOST_QUEUES,
            self._manager.intakes.values(),
            lambda intake: depths.get(intake.queue.name, 0),
        )
        shown.sort(key=lambda intake: intake.queue.name)
        return [_queue(intake, depths.get(intake.queue.name), now) for intake in shown]

    def _pools(self) -> Sequence[PoolRow]:
        manager, now = self._manager, _now()
        everyone = (*manager.pools.values(), *manager.draining_pools.values())
        shown = nlargest(MOST_POOLS, everyone, lambda pool: pool.held)
        shown.sort(key=lambda pool: pool.code)
        return [_pool(pool, now) for pool in shown]

    def _groups(self) -> Iterator[GroupRow]:
        """Longest first: the tracker has its messages in the order in which they came."""
        seen: set[Lane] = set()
        for job in islice(self._manager.routing.tracker, SCANNED):
            pool = job.keeper
            if job.state not in _WAITING or not isinstance(pool, ProcessPool):
                continue
            lane = pool.lane_of(job)
            if lane is not None and lane not in seen:
                seen.add(lane)
                yield self._group(pool, lane, job)

    def _group(self, pool: ProcessPool, lane: Lane, job: Job) -> GroupRow:
        return GroupRow(
            pool=pool.code,
            group=job.group,
            waiting=len(lane) + (lane.current is job),  # which is in its lane no more
            since=round(self._loop_to_wall + job.tracked_at, 1),
            message_id=job.message.id,
            reason=_reason(pool, lane, job),
        )

    def _warnings_mark(self) -> str:
        notices = self._warnings.list(now=self._wall())
        newest = notices[0].id if notices else ""
        raised = sum(notice.count for notice in notices)
        acknowledged = sum(notice.acknowledged for notice in notices)
        return f"{newest} {len(notices)} {raised} {acknowledged}"


def _queue(intake: Intake, waiting: int | None, now: float) -> QueueRow:
    counts = intake.counts.by_metric
    return QueueRow(
        name=intake.queue.name,
        waiting=waiting,
        succeeded=counts[Metric.SUCCESS],
        failed=counts[Metric.FAILURE],
        transient=counts[Metric.TRANSIENT],
        success_rate=round(intake.counts.success_rate(now), 4),
        connections=len(intake.connections),
        healthy=intake.is_healthy(now),
        restarts=intake.restarts,
    )


def _pool(pool: ProcessPool, now: float) -> PoolRow:
    courier, config = pool.courier, pool.config
    deliveries = courier.deliveries
    counts, latency = deliveries.by_metric, deliveries.last(SHORT, now).latency
    return PoolRow(
        code=pool.code,
        draining=pool.draining,
        workers=courier.open_posts,
        limit=config.concurrency,
        queued=pool.queued,
        capacity=pool.capacity,
        groups=pool.groups,
        rate_per_minute=config.rate_per_minute,
        waits_for_rate=pool.waits_for_rate,
        retrying=courier.pausing,
        succeeded=counts[Metric.SUCCESS],
        failed=counts[Metric.FAILURE],
        transient=counts[Metric.TRANSIENT],
        success_rate=round(deliveries.success_rate(now), 4),
        requests=sum(deliveries.buckets),
        request_seconds=round(deliveries.seconds, 6),
        p50_ms=round(latency.p50 * 1000, 1),
        p95_ms=round(latency.p95 * 1000, 1),
    )


def _reason(pool: ProcessPool, lane: Lane, job: Job) -> str:
    """Why the group's first waiting message is not on its way, in one word."""
    if pool.draining:
        return "DRAINING"
    if job.state is State.WAITING:
        return "RETRY"
    if lane.current is not None:
        return "GROUP"
    return "RATE" if pool.waits_for_rate else "PERMIT"


def _breaker(breaker: Breaker) -> BreakerRow:
    calls, failed = breaker.buffered
    return BreakerRow(
        name=breaker.name,
        state=breaker.state.name,
        successes=breaker.successes,
        failures=breaker.failures,
        rejections=breaker.rejections,
        failure_rate=round(failed / calls, 4) if calls else 0.0,
    )


def _trouble(breaker: Breaker) -> tuple[bool, int, float]:
    return breaker.state is not BreakerState.CLOSED, breaker.buffered[1], breaker.last_used


def _now() -> float:
    return asyncio.get_running_loop().time()
