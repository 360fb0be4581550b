"""What operators are shown of the router at one instant. Nothing in it can change."""

from collections.abc import Mapping, Sequence
from enum import StrEnum

from msgspec import Struct

from router.core.stats import PoolPeriod, QueuePeriod


class Wait(StrEnum):
    """What a message in a pool waits for. An open circuit is not among them: it gives back."""

    RATE = "rate"
    PERMIT = "permit"
    GROUP = "group"  # for those before it in its group
    RETRY = "retry"  # between two tries
    SETTLE = "settle"  # for its ACK or NACK to go through


class PoolLoad(Struct, frozen=True, kw_only=True):
    """How busy a pool is."""

    code: str
    in_flight: int  # open requests
    concurrency: int
    free: int  # permits
    capacity: int
    queued: int
    groups: int
    waiting: Mapping[Wait, int]  # together they are `queued`


class PoolFigures(Struct, frozen=True, kw_only=True):
    load: PoolLoad
    total: PoolPeriod
    last_5min: PoolPeriod
    last_30min: PoolPeriod


class PoolMeters(Struct, frozen=True, kw_only=True):
    """A pool's counters as they are, for metrics."""

    load: PoolLoad
    outcomes: Mapping[str, int]
    buckets: Sequence[int]  # requests by how long they took
    seconds: float  # of all of them together


class Throughput(Struct, frozen=True, kw_only=True):
    """Accepted messages per second."""

    total: float
    last_5min: float
    last_30min: float


class QueueFigures(Struct, frozen=True, kw_only=True):
    name: str
    total: QueuePeriod
    last_5min: QueuePeriod
    last_30min: QueuePeriod
    throughput: Throughput
    waiting: int | None  # in the broker; None: it does not tell
    handed_out: int | None  # by the broker and not settled, ditto


class QueueMeters(Struct, frozen=True, kw_only=True):
    name: str
    outcomes: Mapping[str, int]
    unknown_pools: int  # messages for a pool that is not there
    calls: Mapping[tuple[str, str], int]  # (verb, result)
    depth: int | None
    since_poll: float  # seconds, of the connection that is silent for longest


class BreakerFigures(Struct, frozen=True, kw_only=True):
    name: str
    state: str
    successes: int
    failures: int
    rejections: int
    buffered: int
    buffered_failures: int
    buffer_size: int

    @property
    def failure_rate(self) -> float:
        return self.buffered_failures / self.buffered if self.buffered else 0.0


class RouterMeters(Struct, frozen=True, kw_only=True):
    """What concerns no pool and no queue alone, read in one instant: the ledger must balance."""

    ledger: Mapping[str, int]
    unaccounted: int
    dead_letters: Mapping[str, int]
    breakers: Mapping[str, int]  # origin → 0 closed, 1 half open, 2 open
    loop_lag: float  # seconds
    spans: Mapping[str, int] = {}  # by what became of them; empty: traces are off


class StandbyStatus(Struct, frozen=True, kw_only=True):
    enabled: bool
    instance: str
    primary: bool
    lock_holder: str | None = None
    last_refresh: float | None = None  # Unix seconds
