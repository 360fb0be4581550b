"""`/metrics`: the engine's counters as Prometheus reads them, collected when it asks.

Every metric is one line of a table below; the names are those of CONTRACTS §7.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final, Generic, Literal, Protocol, TypeVar

from fastapi import APIRouter, Response

from router.api.router_api import RouterApi
from router.api.slices import sliced
from router.core.figures import PoolMeters, QueueMeters, RouterMeters
from router.core.histogram import SHOWN, cumulative
from router.core.warnings import Severity, WarningSummary
from router.engine.config_sync import SyncCounts

PREFIX: Final = "message_router_"
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_DESCRIPTION: Final = {
    "description": "The metrics",
    "content": {
        "text/plain": {
            "schema": {"type": "string"},
            "example": 'message_router_in_flight{pool="POOL-A"} 3.0\n',
        }
    },
}

T = TypeVar("T")
M_contra = TypeVar("M_contra", contravariant=True)
Kind = Literal["counter", "gauge", "histogram"]
Samples = Iterable[tuple[Sequence[str], float]]  # label values, and the figure


class Metric(Protocol[M_contra]):
    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> Kind: ...

    @property
    def meaning(self) -> str: ...

    def lines(self, measured: M_contra) -> Iterable[str]: ...


class Meter(Generic[T]):
    """One metric, and how it is read from what is measured."""

    def __init__(
        self,
        kind: Kind,
        name: str,
        meaning: str,
        read: Callable[[T], Samples],
        labels: Sequence[str] = (),
    ) -> None:
        self.kind: Final = kind
        self.name: Final = PREFIX + name
        self.meaning: Final = meaning
        self._read = read
        self._line = self.name + _braced(*(f'{label}="%s"' for label in labels)) + " %r\n"

    def lines(self, measured: T) -> Iterable[str]:
        return [
            self._line % (*map(_escaped, labels), float(value))
            for labels, value in self._read(measured)
        ]


class DeliverySeconds:
    """The one histogram. A pool that has sent nothing yet is left out."""

    kind: Final = "histogram"
    name: Final = PREFIX + "delivery_seconds"
    meaning: Final = "How long one request to a target took"

    def __init__(self) -> None:
        bounds = (*map(str, SHOWN), "+Inf")
        names = [
            *(f'_bucket{{le="{bound}",pool="%s"}}' for bound in bounds),
            '_count{pool="%s"}',
            '_sum{pool="%s"}',
        ]
        self._lines = "".join(f"{self.name}{each} %r\n" for each in names)

    def lines(self, measured: PoolMeters) -> Iterable[str]:
        count = sum(measured.buckets)
        if not count:
            return ()
        below = (figure for _, figure in cumulative(measured.buckets))
        pool, figures = _escaped(measured.load.code), (*below, count, count, measured.seconds)
        return (self._lines % (*(each for figure in figures for each in (pool, float(figure))),),)


def _braced(*labels: str) -> str:
    return f"{{{','.join(labels)}}}" if labels else ""


def _escaped(value: str) -> str:
    """Few need it, and looking is quicker than doing."""
    if '"' in value or "\\" in value or "\n" in value:
        return value.translate(_ESCAPES)
    return value


def _by_label(figures: Mapping[str, int]) -> Samples:
    return (((label,), count) for label, count in figures.items())


ROUTER_METRICS: Final[Sequence[Metric[RouterMeters]]] = (
    Meter(
        "counter",
        "ledger_total",
        "Hand-overs by the brokers: received, and how each of them ended",
        lambda router: _by_label(router.ledger),
        ("state",),
    ),
    Meter(
        "gauge",
        "unaccounted_messages",
        "Received, but neither ended nor held: 0, always",
        lambda router: [((), router.unaccounted)],
    ),
    Meter(
        "counter",
        "dead_letters_total",
        "Messages kept as dead letters",
        lambda router: _by_label(router.dead_letters),
        ("reason",),
    ),
    Meter(
        "gauge",
        "breaker_state",
        "Circuit breaker of a target: 0 closed, 1 half open, 2 open",
        lambda router: _by_label(router.breakers),
        ("origin",),
    ),
    Meter(
        "gauge",
        "event_loop_lag_seconds",
        "The worst delay of the event loop in the last half minute or minute",
        lambda router: [((), router.loop_lag)],
    ),
    Meter(
        "counter",
        "spans_total",
        "Spans of traces, by what became of them; missing: traces are off",
        lambda router: _by_label(router.spans),
        ("result",),
    ),
)
KEEPING_METRICS: Final[Sequence[Metric[RouterApi]]] = (
    Meter(
        "gauge",
        "warnings",
        "Warnings that nobody has acknowledged",
        lambda router: _warnings(router.warnings.summary(router.now())),
        ("severity",),
    ),
    Meter(
        "counter",
        "config_sync_total",
        "Synchronisations of the configuration",
        lambda router: _syncs(router.sync_counts()),
        ("result",),
    ),
    Meter(
        "gauge",
        "config_last_sync_timestamp_seconds",
        "When the configuration was last synchronised; missing: not yet",
        lambda router: _last_sync(router.sync_counts()),
    ),
)
QUEUE_METRICS: Final[Sequence[Metric[QueueMeters]]] = (
    Meter(
        "counter",
        "messages_total",
        "Messages of a queue that are done with, by how their delivery went",
        lambda queue: (((outcome, queue.name), n) for outcome, n in queue.outcomes.items()),
        ("outcome", "queue"),
    ),
    Meter(
        "counter",
        "unknown_pool_total",
        "Messages of a queue that named an unknown pool and went to DEFAULT-POOL",
        lambda queue: [((queue.name,), queue.unknown_pools)],
        ("queue",),
    ),
    Meter(
        "counter",
        "broker_calls_total",
        "Calls of a queue's broker",
        lambda queue: (((verb, queue.name, how), n) for (verb, how), n in queue.calls.items()),
        ("call", "queue", "result"),
    ),
    Meter(
        "gauge",
        "queue_depth",
        "Messages that wait in the broker, where it tells",
        lambda queue: [] if queue.depth is None else [((queue.name,), queue.depth)],
        ("queue",),
    ),
    Meter(
        "gauge",
        "seconds_since_poll",
        "Since the broker last answered a receive, by the most silent connection",
        lambda queue: [((queue.name,), queue.since_poll)],
        ("queue",),
    ),
)
POOL_METRICS: Final[Sequence[Metric[PoolMeters]]] = (
    Meter(
        "counter",
        "deliveries_total",
        "Deliveries of a pool, each with all its tries, by outcome",
        lambda pool: (((outcome, pool.load.code), n) for outcome, n in pool.outcomes.items()),
        ("outcome", "pool"),
    ),
    DeliverySeconds(),
    Meter(
        "gauge",
        "waiting",
        "Messages in a pool without an open request, by what they wait for; missing: none does",
        lambda pool: (((pool.load.code, why), n) for why, n in pool.load.waiting.items() if n),
        ("pool", "reason"),
    ),
    Meter(
        "gauge",
        "in_flight",
        "Open requests of a pool",
        lambda pool: [((pool.load.code,), pool.load.in_flight)],
        ("pool",),
    ),
    Meter(
        "gauge",
        "pool_concurrency",
        "Requests that a pool may have open at once",
        lambda pool: [((pool.load.code,), pool.load.concurrency)],
        ("pool",),
    ),
    Meter(
        "gauge",
        "pool_capacity",
        "Messages that a pool may hold without an open request",
        lambda pool: [((pool.load.code,), pool.load.capacity)],
        ("pool",),
    ),
    Meter(
        "gauge",
        "pool_queued",
        "Messages that a pool holds without an open request",
        lambda pool: [((pool.load.code,), pool.load.queued)],
        ("pool",),
    ),
)
METRICS: Final[Sequence[Metric[Any]]] = (
    *QUEUE_METRICS,
    *POOL_METRICS,
    *ROUTER_METRICS,
    *KEEPING_METRICS,
)


def metrics_routes(router: RouterApi) -> APIRouter:
    routes = APIRouter(tags=["metrics"])

    @routes.get("/metrics", response_class=Response, responses={HTTPStatus.OK: _DESCRIPTION})
    async def metrics() -> Response:
        """For Prometheus, in its text format."""
        return Response(await _page(router), media_type=CONTENT_TYPE)

    return routes


async def _page(router: RouterApi) -> bytes:
    page = _Page()
    page.add(ROUTER_METRICS, [router.statistics.router_meters()])
    page.add(KEEPING_METRICS, [router])
    async for queues in sliced(router.statistics.queue_meters()):
        page.add(QUEUE_METRICS, queues)
    async for pools in sliced(router.statistics.pool_meters()):
        page.add(POOL_METRICS, pools)
    return page.text()


class _Page:
    """What is added later to a metric joins what is there: its heading stands once.

    The lines are written here, and not by the library, whose own writer takes ten times as long:
    a scrape shares the event loop with the deliveries.
    """

    def __init__(self) -> None:
        self._parts: dict[str, list[bytes]] = {
            metric.name: [
                f"# HELP {metric.name} {metric.meaning}\n".encode(),
                f"# TYPE {metric.name} {metric.kind}\n".encode(),
            ]
            for metric in METRICS
        }

    def add(self, metrics: Sequence[Metric[T]], measured: Sequence[T]) -> None:
        for metric in metrics:
            lines = (line for each in measured for line in metric.lines(each))
            self._parts[metric.name].append("".join(lines).encode())

    def text(self) -> bytes:
        return b"".join(part for parts in self._parts.values() for part in parts)


def _warnings(summary: WarningSummary) -> Samples:
    return (((severity.name,), summary.active.get(severity, 0)) for severity in Severity)


def _syncs(counts: SyncCounts) -> Samples:
    return ((("ok",), counts.succeeded), (("failed",), counts.failed))


def _last_sync(counts: SyncCounts) -> Samples:
    return () if counts.last_success is None else (((), counts.last_success),)
