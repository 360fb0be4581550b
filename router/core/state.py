"""The router's state at one instant, as values, and what it says about the router's health (OPS-3).

`engine/state.py` reads it once per request. Health, metrics, monitoring, the dashboard and the
command line are projections of it. Lists that may be long are iterables whose items are read when
they are reached, so that a long answer can be written in steps between which deliveries go on.

Health answers two questions: can the router itself work (`healthy`, which becomes the HTTP status),
and does anything need attention (`status`). Failing targets affect only the second.
"""

from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import cached_property
from typing import Final

from msgspec import Struct

from router.core.history import HeldGroup, WaitReason
from router.core.stats import (
    LONG_MINUTES,
    SHORT_MINUTES,
    Counts,
    Deliveries,
    PoolPeriod,
    QueuePeriod,
    covered,
)
from router.core.warnings import WarningSummary

GOOD_SHARE: Final = 0.9
STUCK_SECONDS: Final = 120.0
UNREACHABLE_SECONDS: Final = 60.0
TOLERATED_WARNINGS: Final = 5
NAMES_SHOWN: Final = 10  # there may be thousands of pools

NOT_INITIALIZED: Final = "not initialized yet"
SHUTTING_DOWN: Final = "shutting down"
NO_STORAGE: Final = "the storage of every queue refuses writes"
NO_CONSUMER: Final = "every consumer is unhealthy"
ALL_STUCK: Final = "every pool that has work is stuck"


class ConsumerState(Struct, frozen=True, kw_only=True):
    """One connection to one queue."""

    queue: str
    connection: int = 1
    running: bool = True
    healthy: bool  # also while it reconnects or is held back by full pools
    restarts: int = 0
    since_poll: float | None = None  # seconds; None: the broker has not answered yet
    last_poll: float | None = None  # Unix seconds


class QueueState(Struct, frozen=True, kw_only=True, dict=True):
    name: str
    partition_of: str | None = None  # the entry that it is a partition of (PART-3)
    counts: Counts  # live: read them before the event loop goes on
    now: float  # on the clock of `counts`
    uptime: float = 0.0
    stopping: bool = False
    waiting: int | None = None  # in the broker; None: it does not say
    handed_out: int | None = None  # by the broker and not settled
    unknown_pools: int = 0  # messages that named a pool that does not exist
    unknown_fields: int = 0  # messages with fields that were ignored
    since_poll: float = 0.0  # seconds, of the connection that is silent for longest
    connected: bool = True  # at least one of its connections
    connections: int = 1
    healthy: bool = True
    restarts: int = 0
    held: int = 0  # by the router, because their pools are full
    deferred: int = 0  # in the broker
    look_ahead_used_up: bool = False  # messages wait behind those of a full pool
    stored: int | None = None  # messages in its order store; None: it has none (ORD-4)
    stored_bytes: int = 0  # of their bodies
    stored_oldest: float = 0.0  # seconds since the first of them was stored
    held_groups: int = 0  # by dead letters (ORD-11)
    refuses_writes: bool = False  # its storage: the disk is full, for example (WQ-13)

    @cached_property
    def total(self) -> QueuePeriod:
        return self.counts.total()

    @cached_property
    def last_5min(self) -> QueuePeriod:
        return self.counts.last(SHORT_MINUTES, self.now)

    @cached_property
    def last_30min(self) -> QueuePeriod:
        return self.counts.last(LONG_MINUTES, self.now)

    @property
    def success_rate(self) -> float:
        """Of the last 30 minutes, 0…1."""
        return self.counts.success_rate(self.now)

    @property
    def is_unreachable(self) -> bool:
        return not self.connected and self.since_poll >= UNREACHABLE_SECONDS

    @property
    def outcomes(self) -> Mapping[str, int]:
        counts = {metric.value: count for metric, count in self.counts.by_metric.items()}
        return {**counts, "unsent": self.counts.unsent}

    @property
    def throughput(self) -> float:
        """Accepted messages per second since the start."""
        return self._per_second(self.total, self.uptime)

    @property
    def throughput_5min(self) -> float:
        return self._per_second(self.last_5min, covered(SHORT_MINUTES, self.now))

    @property
    def throughput_30min(self) -> float:
        return self._per_second(self.last_30min, covered(LONG_MINUTES, self.now))

    @property
    def size(self) -> int | None:
        """All messages in the broker, handed out or not."""
        return None if self.waiting is None else self.waiting + (self.handed_out or 0)

    def _per_second(self, period: QueuePeriod, seconds: float) -> float:
        seconds = min(seconds, self.uptime)
        return period.consumed / seconds if seconds > 0 else 0.0


class PoolState(Struct, frozen=True, kw_only=True, dict=True):
    code: str
    deliveries: Deliveries  # live: read them before the event loop goes on
    now: float  # on the clock of `deliveries`
    draining: bool = False
    in_flight: int = 0  # open requests
    concurrency: int = 1
    free_permits: int = 0
    queued: int = 0  # messages without an open request
    capacity: int = 0
    groups: int = 0
    rate_per_minute: float | None = None
    waits_for_rate: bool = False
    waits_for_target: bool = False
    retrying: int = 0  # messages between two tries
    idle_seconds: float | None = None  # since a request started; None: none has
    # What the queued messages wait for. Counted when called, because it looks at every group.
    waiting: Callable[[], Mapping[WaitReason, int]] = dict

    @cached_property
    def total(self) -> PoolPeriod:
        return self.deliveries.total()

    @cached_property
    def last_5min(self) -> PoolPeriod:
        return self.deliveries.last(SHORT_MINUTES, self.now)

    @cached_property
    def last_30min(self) -> PoolPeriod:
        return self.deliveries.last(LONG_MINUTES, self.now)

    @property
    def success_rate(self) -> float:
        """Of the last 30 minutes, 0…1."""
        return self.deliveries.success_rate(self.now)

    @property
    def outcomes(self) -> Mapping[str, int]:
        return {metric.value: count for metric, count in self.deliveries.by_metric.items()}

    @property
    def has_work(self) -> bool:
        return bool(self.queued or self.in_flight or self.retrying or self.waits_for_rate)

    def is_stuck(self, uptime: float) -> bool:
        """Return whether it has work, waits for nothing outside and still does nothing."""
        idle = uptime if self.idle_seconds is None else self.idle_seconds
        waits = self.waits_for_rate or self.waits_for_target
        busy = self.in_flight or self.retrying or waits
        return bool(self.queued and not busy and idle >= STUCK_SECONDS)


class Circuit(Struct, frozen=True, kw_only=True):
    """The circuit breaker of a target's origin."""

    name: str
    state: str = "CLOSED"
    successes: int = 0
    failures: int = 0
    rejections: int = 0
    buffered: int = 0  # calls that it judges by
    buffered_failures: int = 0
    buffer_size: int = 0
    retry_at: float | None = None  # Unix seconds, when an open one admits a probe
    since: float | None = None  # Unix seconds, when the outage began; None: it is closed
    fault: str | None = None  # whose, by the latest failure of this outage

    @property
    def is_closed(self) -> bool:
        return self.state == "CLOSED"

    @property
    def failure_rate(self) -> float:
        """Of the buffered calls, 0…1."""
        return self.buffered_failures / self.buffered if self.buffered else 0.0


class TargetState(Struct, frozen=True, kw_only=True):
    """A target's origin: what it gets now, and why it gets no more."""

    origin: str
    now: float = 0.0  # Unix seconds
    open: int = 0  # requests
    limit: int | None = None  # of requests at once; None: it has refused nothing lately
    silent_until: float | None = None  # Unix seconds; None: it did not ask for silence
    waiting: int = 0  # messages that its limit or its silence holds back
    refusals: int = 0  # since the start
    circuit: Circuit

    @property
    def is_held_back(self) -> bool:
        """Return whether it gets less than the pools would send."""
        return self.limit is not None or self.silent_until is not None

    @property
    def silent_seconds(self) -> float | None:
        """Return how long its silence still lasts."""
        return None if self.silent_until is None else max(self.silent_until - self.now, 0.0)


class CredentialState(Struct, frozen=True, kw_only=True):
    """The state of the router's credentials for some targets. Never a secret (TGT-6)."""

    name: str
    type: str
    hosts: tuple[str, ...]
    ok: bool
    error: str = ""
    uses: int = 0  # requests since the start
    expires_at: float | None = None  # Unix seconds, of a token
    certificate_expires_at: float | None = None  # Unix seconds


class SyncCounts(Struct, frozen=True):
    """How the syncs of the configuration went."""

    succeeded: int = 0
    failed: int = 0
    last_success: float | None = None  # Unix seconds; None: nothing was applied yet


class LeaseState(Struct, frozen=True, kw_only=True):
    """The lease of a queue, as this router sees it (CFG-10)."""

    queue: str
    phase: str  # WAITING, HELD or DRAINING
    holder: str | None  # None: none, as far as is known
    fence: int  # grows with every new holder
    last_refresh: float | None = None  # Unix seconds


class StandbyStatus(Struct, frozen=True, kw_only=True):
    enabled: bool = False
    instance: str = ""
    primary: bool = True
    lock_holder: str | None = None
    last_refresh: float | None = None  # Unix seconds
    leases: tuple[LeaseState, ...] | None = None  # of queues; None: there are none (CFG-10)

    @property
    def role(self) -> str:
        """PRIMARY, STANDBY, or ACTIVE: it works on the queues whose leases it has."""
        if self.leases is not None:
            return "ACTIVE"
        return "PRIMARY" if self.primary else "STANDBY"


class RouterState(Struct, frozen=True, kw_only=True):
    initialized: bool
    shutting_down: bool = False
    now: float = 0.0  # Unix seconds
    started_at: float = 0.0  # Unix seconds
    uptime: float = 0.0
    consumers: Iterable[ConsumerState] = ()
    queues: Iterable[QueueState] = ()  # those that are being stopped included
    pool_count: int = 0  # without draining ones
    draining_pools: int = 0
    pools: Iterable[PoolState] = ()  # draining ones included
    active_pools: Iterable[PoolState] = ()  # without draining ones; those that have work or fail
    busiest_pools: Iterable[PoolState] = ()  # a bounded number, draining ones included
    groups: Iterable[HeldGroup] = ()  # that wait, the longest first
    breakers: Iterable[Circuit] = ()
    open_breakers: int = 0
    failures: Mapping[tuple[str, ...], int] = {}  # requests, by origin and whose fault they were
    refusals: Mapping[tuple[str, ...], int] = {}  # requests, by origin
    target_count: int = 0
    targets: Iterable[TargetState] = ()  # a bounded number, those in trouble first
    credentials: tuple[CredentialState, ...] = ()
    held: int = 0  # messages
    ledger: Mapping[str, int] = {}  # hand-overs: received, and by how they ended
    unaccounted: int = 0  # received, but neither ended nor held
    dead_letters: Mapping[str, int] = {}  # by reason
    loop_lag: float = 0.0  # seconds
    loop_stalls: int = 0
    loop_stalled_seconds: float = 0.0
    dropped_logs: int = 0  # lines
    spans: Mapping[str, int] = {}  # by what became of them; empty: traces are off
    warnings: WarningSummary = WarningSummary({}, 0)
    syncs: SyncCounts = SyncCounts()
    standby: StandbyStatus = StandbyStatus()

    @property
    def role(self) -> str:
        return self.standby.role


class Status(Enum):
    HEALTHY = "HEALTHY"
    WARNING = "WARNING"
    DEGRADED = "DEGRADED"


class Health(Struct, frozen=True):
    healthy: bool  # whether the router itself can work
    status: Status
    issues: tuple[str, ...] = ()

    @property
    def message(self) -> str:
        return self.issues[0] if self.issues else "healthy"


class Probe(Struct, frozen=True):
    issues: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.issues


def assess(state: RouterState) -> Health:
    """Judge the router: can it work, and does anything need attention."""
    warnings, active_pools = state.warnings, list(state.active_pools)
    queues = [queue for queue in state.queues if not queue.stopping]
    consumers = list(state.consumers)
    failing_queues = [queue.name for queue in queues if queue.success_rate < GOOD_SHARE]
    failing_pools = [pool.code for pool in active_pools if pool.success_rate < GOOD_SHARE]
    unreachable = [queue.name for queue in queues if queue.is_unreachable]
    used_up = [queue.name for queue in queues if queue.look_ahead_used_up]
    refusing = [queue.name for queue in queues if queue.refuses_writes]
    unhealthy = [consumer.queue for consumer in consumers if not consumer.healthy]
    all_unhealthy = 0 < len(consumers) == len(unhealthy)
    with_work = [pool for pool in active_pools if pool.has_work]

    failures = _said(
        (not state.initialized, NOT_INITIALIZED),
        (all_unhealthy, NO_CONSUMER),
        (0 < len(queues) == len(refusing), NO_STORAGE),
        (with_work and all(pool.is_stuck(state.uptime) for pool in with_work), ALL_STUCK),
    )
    degradations = _said(
        (warnings.fresh_critical, f"critical warnings that need a look: {warnings.fresh_critical}"),
        (state.open_breakers, f"open circuit breakers: {state.open_breakers}"),
        (
            0 < len(refusing) < len(queues),
            f"the storage of queues refuses writes: {_listed(refusing)}",
        ),
        (0 < len(queues) == len(unreachable), "no queue is connected"),
        (0 < len(queues) == len(failing_queues), "every queue is below 90 % success"),
        (0 < state.pool_count == len(failing_pools), "every pool is below 90 % success"),
    )
    concerns = _said(
        (0 < len(unreachable) < len(queues), f"not connected: queues {_listed(unreachable)}"),
        (
            0 < len(failing_queues) < len(queues),
            f"below 90 % success: queues {_listed(failing_queues)}",
        ),
        (
            0 < len(failing_pools) < state.pool_count,
            f"below 90 % success: pools {_listed(failing_pools)}",
        ),
        (0 < len(unhealthy) < len(consumers), f"unhealthy consumers: {_listed(unhealthy)}"),
        (used_up, f"messages wait behind those of a full pool: queues {_listed(used_up)}"),
        (warnings.total > TOLERATED_WARNINGS, f"active warnings: {warnings.total}"),
    )
    if failures or degradations:
        status = Status.DEGRADED
    else:
        status = Status.WARNING if concerns else Status.HEALTHY
    return Health(healthy=not failures, status=status, issues=(*failures, *degradations, *concerns))


def readiness(state: RouterState) -> Probe:
    """Judge whether to count on this router. A standby is ready, although it consumes nothing."""
    consumers = list(state.consumers)
    return Probe(
        _said(
            (not state.initialized, NOT_INITIALIZED),
            (state.shutting_down, SHUTTING_DOWN),
            (consumers and not any(consumer.healthy for consumer in consumers), NO_CONSUMER),
        )
    )


def startup(state: RouterState) -> Probe:
    return Probe(_said((not state.initialized, NOT_INITIALIZED)))


def _said(*issues: tuple[object, str]) -> tuple[str, ...]:
    return tuple(text for is_so, text in issues if is_so)


def _listed(names: Iterable[str]) -> str:
    unique = list(dict.fromkeys(names))
    more = f" and {len(unique) - NAMES_SHOWN} more" if len(unique) > NAMES_SHOWN else ""
    return ", ".join(unique[:NAMES_SHOWN]) + more
