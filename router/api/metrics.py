"""`/metrics`: the engine's counters as Prometheus reads them, collected when it asks.

Every metric is one line of a table below; the names are those of CONTRACTS §7.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final, Generic, Protocol, TypeVar

from fastapi import APIRouter, Response
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.samples import Sample

from router.api.router_api import RouterApi
from router.api.slices import sliced
from router.core.figures import PoolMeters, QueueMeters, RouterMeters
from router.core.histogram import cumulative
from router.core.warnings import Severity, WarningSummary
from router.engine.config_sync import SyncCounts

PREFIX: Final = "message_router_"
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
Kind = type[CounterMetricFamily] | type[GaugeMetricFamily]
Samples = Iterable[tuple[Sequence[str], float]]  # label values, and the figure


class Metric(Protocol[M_contra]):
    @property
    def name(self) -> str: ...

    @property
    def meaning(self) -> str: ...

    def family(self, measured: Iterable[M_contra]) -> Family: ...


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
        self.name = PREFIX + name
        self.meaning = meaning
        self._kind = kind
        self._labels = labels
        self._read = read

    def family(self, measured: Iterable[T]) -> Family:
        family = self._kind(self.name, self.meaning, labels=self._labels)
        for each in measured:
            for labels, value in self._read(each):
                family.add_metric(labels, value)
        return family


class DeliverySeconds:
    """The one histogram. A pool that has sent nothing yet is left out."""

    name: Final = PREFIX + "delivery_seconds"
    meaning: Final = "How long one request to a target took"

    def family(self, measured: Iterable[PoolMeters]) -> Family:
        family = HistogramMetricFamily(self.name, self.meaning, labels=("pool",))
        for pool in measured:
            count = sum(pool.buckets)
            if count:
                buckets = [(str(bound), below) for bound, below in cumulative(pool.buckets)]
                family.add_metric((pool.load.code,), [*buckets, ("+Inf", count)], pool.seconds)
        return family


def _by_label(figures: Mapping[str, int]) -> Samples:
    return (((label,), count) for label, count in figures.items())


ROUTER_METRICS: Final[Sequence[Metric[RouterMeters]]] = (
    Meter(
        CounterMetricFamily,
        "ledger_total",
        "Hand-overs by the brokers: received, and how each of them ended",
        lambda router: _by_label(router.ledger),
        ("state",),
    ),
    Meter(
        GaugeMetricFamily,
        "unaccounted_messages",
        "Received, but neither ended nor held: 0, always",
        lambda router: [((), router.unaccounted)],
    ),
    Meter(
        CounterMetricFamily,
        "dead_letters_total",
        "Messages kept as dead letters",
        lambda router: _by_label(router.dead_letters),
        ("reason",),
    ),
    Meter(
        GaugeMetricFamily,
        "breaker_state",
        "Circuit breaker of a target: 0 closed, 1 half open, 2 open",
        lambda router: _by_label(router.breakers),
        ("origin",),
    ),
    Meter(
        GaugeMetricFamily,
        "event_loop_lag_seconds",
        "The worst delay of the event loop in the last half minute or minute",
        lambda router: [((), router.loop_lag)],
    ),
    Meter(
        CounterMetricFamily,
        "spans_total",
        "Spans of traces, by what became of them; missing: traces are off",
        lambda router: _by_label(router.spans),
        ("result",),
    ),
)
KEEPING_METRICS: Final[Sequence[Metric[RouterApi]]] = (
    Meter(
        GaugeMetricFamily,
        "warnings",
        "Warnings that nobody has acknowledged",
        lambda router: _warnings(router.warnings.summary(router.now())),
        ("severity",),
    ),
    Meter(
        CounterMetricFamily,
        "config_sync_total",
        "Synchronisations of the configuration",
        lambda router: _syncs(router.sync_counts()),
        ("result",),
    ),
    Meter(
        GaugeMetricFamily,
        "config_last_sync_timestamp_seconds",
        "When the configuration was last synchronised; missing: not yet",
        lambda router: _last_sync(router.sync_counts()),
    ),
)
QUEUE_METRICS: Final[Sequence[Metric[QueueMeters]]] = (
    Meter(
        CounterMetricFamily,
        "messages_total",
        "Messages of a queue that are done with, by how their delivery went",
        lambda queue: (((queue.name, outcome), n) for outcome, n in queue.outcomes.items()),
        ("queue", "outcome"),
    ),
    Meter(
        CounterMetricFamily,
        "broker_calls_total",
        "Calls of a queue's broker",
        lambda queue: (((queue.name, *call), n) for call, n in queue.calls.items()),
        ("queue", "call", "result"),
    ),
    Meter(
        GaugeMetricFamily,
        "queue_depth",
        "Messages that wait in the broker, where it tells",
        lambda queue: [] if queue.depth is None else [((queue.name,), queue.depth)],
        ("queue",),
    ),
    Meter(
        GaugeMetricFamily,
        "seconds_since_poll",
        "Since the broker last answered a receive, by the most silent connection",
        lambda queue: [((queue.name,), queue.since_poll)],
        ("queue",),
    ),
)
POOL_METRICS: Final[Sequence[Metric[PoolMeters]]] = (
    Meter(
        CounterMetricFamily,
        "deliveries_total",
        "Deliveries of a pool, each with all its tries, by outcome",
        lambda pool: (((pool.load.code, outcome), n) for outcome, n in pool.outcomes.items()),
        ("pool", "outcome"),
    ),
    DeliverySeconds(),
    Meter(
        GaugeMetricFamily,
        "waiting",
        "Messages in a pool without an open request, by what they wait for; missing: none does",
        lambda pool: (((pool.load.code, why), n) for why, n in pool.load.waiting.items() if n),
        ("pool", "reason"),
    ),
    Meter(
        GaugeMetricFamily,
        "in_flight",
        "Open requests of a pool",
        lambda pool: [((pool.load.code,), pool.load.in_flight)],
        ("pool",),
    ),
    Meter(
        GaugeMetricFamily,
        "pool_concurrency",
        "Requests that a pool may have open at once",
        lambda pool: [((pool.load.code,), pool.load.concurrency)],
        ("pool",),
    ),
    Meter(
        GaugeMetricFamily,
        "pool_capacity",
        "Messages that a pool may hold without an open request",
        lambda pool: [((pool.load.code,), pool.load.capacity)],
        ("pool",),
    ),
    Meter(
        GaugeMetricFamily,
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
        return Response(await _page(router), media_type=CONTENT_TYPE_PLAIN_0_0_4)

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

    The lines are written here: with the library's own writer a scrape costs about twice as much.
    """

    def __init__(self) -> None:
        self._lines: dict[str, list[str]] = {}

    def add(self, metrics: Sequence[Metric[T]], measured: Sequence[T]) -> None:
        for metric in metrics:
            family = metric.family(measured)
            lines = self._lines.setdefault(metric.name, [])
            if not lines:
                lines.append(f"# HELP {metric.name} {metric.meaning}\n")
                lines.append(f"# TYPE {metric.name} {family.type}\n")
            lines.extend(map(_line, family.samples))

    def text(self) -> bytes:
        return "".join(line for lines in self._lines.values() for line in lines).encode()


def _line(sample: Sample) -> str:
    labels = ",".join(
        [f'{name}="{value.translate(_ESCAPES)}"' for name, value in sorted(sample.labels.items())]
    )
    braced = f"{{{labels}}}" if labels else ""
    return f"{sample.name}{braced} {float(sample.value)!r}\n"


def _warnings(summary: WarningSummary) -> Samples:
    return (((severity.name,), summary.active.get(severity, 0)) for severity in Severity)


def _syncs(counts: SyncCounts) -> Samples:
    return ((("ok",), counts.succeeded), (("failed",), counts.failed))


def _last_sync(counts: SyncCounts) -> Samples:
    return () if counts.last_success is None else (((), counts.last_success),)
