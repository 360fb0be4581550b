"""`/metrics`: the router's state as Prometheus reads it, collected when it asks.

Every metric is one entry of a table below; the names are those of the specification.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import nsmallest
from http import HTTPStatus
from typing import Any, Final, Generic, TypeVar

from fastapi import APIRouter, Response

from router.api.kit import CurrentRouter, sliced
from router.core.state import Circuit, PoolState, QueueState, RouterState, TargetState
from router.core.stats import OTHERS, SHOWN_BOUNDS_SECONDS, cumulative
from router.core.warnings import Severity

PREFIX: Final = "message_router_"
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
MAX_ORIGINS: Final = 100  # a label with more values makes every later scrape expensive
_BREAKER_STATES: Final = {"CLOSED": 0, "HALF_OPEN": 1, "OPEN": 2}
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
Samples = Iterable[tuple[Sequence[str], float]]  # label values, and the figure


class Family(Generic[T]):
    """One metric, and how to read it from a part of the state."""

    def __init__(self, spec: str, meaning: str, read: Callable[[T], Samples]) -> None:
        """`spec`: kind, name and labels, as in "counter messages_total{outcome,queue}"."""
        self.kind, _, series = spec.partition(" ")
        name, _, labels = series.removesuffix("}").partition("{")
        self.name: Final = PREFIX + name
        self.meaning: Final = meaning
        self._read = read
        values = ",".join(f'{label}="%s"' for label in labels.split(","))
        self._line = f"{self.name}{{{values}}} %r\n" if labels else f"{self.name} %r\n"

    def lines(self, state: T) -> Iterable[str]:
        return [
            self._line % (*map(_escaped, labels), float(value))
            for labels, value in self._read(state)
        ]


class DeliverySeconds(Family[PoolState]):
    """The one histogram. A pool that has not sent anything yet is left out."""

    def __init__(self) -> None:
        meaning = "How long one request to a target took"
        super().__init__("histogram delivery_seconds", meaning, lambda _: ())
        names = [
            *(
                f'_bucket{{le="{bound}",pool="%s"}}'
                for bound in (*map(str, SHOWN_BOUNDS_SECONDS), "+Inf")
            ),
            '_count{pool="%s"}',
            '_sum{pool="%s"}',
        ]
        self._lines = "".join(f"{self.name}{each} %r\n" for each in names)

    def lines(self, state: PoolState) -> Iterable[str]:
        buckets = state.deliveries.buckets
        count = sum(buckets)
        if not count:
            return ()
        below = (figure for _, figure in cumulative(buckets))
        pool, figures = _escaped(state.code), (*below, count, count, state.deliveries.seconds)
        return (self._lines % (*(each for figure in figures for each in (pool, float(figure))),),)


def _escaped(value: str) -> str:
    """Escape a label value. Few need it, and looking is faster than translating."""
    if '"' in value or "\\" in value or "\n" in value:
        return value.translate(_ESCAPES)
    return value


def _by_label(figures: Mapping[str, int]) -> Samples:
    return (((label,), count) for label, count in figures.items())


def breaker_states(state: RouterState) -> Mapping[str, int]:
    """Return the worst ones first, then by name, so that the same ones are shown each time."""
    states = ((breaker.name, _BREAKER_STATES[breaker.state]) for breaker in state.breakers)
    worst = nsmallest(MAX_ORIGINS + 1, states, key=lambda each: (-each[1], each[0]))
    if len(worst) > MAX_ORIGINS:
        worst[-1] = OTHERS, worst[-1][1]  # none of the others is worse than this one
    return dict(worst)


def held_back(state: RouterState) -> Sequence[TargetState]:
    """Return the targets that get less than the pools would send, the worst first.

    What is beyond the bound is one target: with the least limit and the longest silence of them.
    """
    found = [target for target in state.targets if target.is_held_back]
    shown, rest = found[:MAX_ORIGINS], found[MAX_ORIGINS:]
    if rest:
        others = TargetState(
            origin=OTHERS,
            now=rest[0].now,
            limit=min((each.limit for each in rest if each.limit is not None), default=None),
            silent_until=max(
                (each.silent_until for each in rest if each.silent_until is not None), default=None
            ),
            circuit=Circuit(name=OTHERS),
        )
        shown.append(others)
    return shown


def _known(label: str, figure: float | None) -> Samples:
    return () if figure is None else (((label,), figure),)


ROUTER_METRICS: Final[Sequence[Family[RouterState]]] = (
    Family(
        "counter ledger_total{state}",
        "Messages received from brokers, and how each hand-over ended",
        lambda router: _by_label(router.ledger),
    ),
    Family(
        "gauge unaccounted_messages",
        "Messages received that neither ended nor are held; always 0",
        lambda router: [((), router.unaccounted)],
    ),
    Family(
        "counter dead_letters_total{reason}",
        "Messages stored as dead letters",
        lambda router: _by_label(router.dead_letters),
    ),
    Family(
        "gauge breaker_state{origin}",
        "Circuit breaker of a target: 0 closed, 1 half open, 2 open",
        lambda router: _by_label(breaker_states(router)),
    ),
    Family(
        "counter failures_total{origin,fault}",
        "Requests without a good answer, by whose fault it was: target, network or router",
        lambda router: router.failures.items(),
    ),
    Family(
        "counter target_refusals_total{origin}",
        "Requests that a target refused because it is busy: 429, 502, 503, 504 or a timeout",
        lambda router: router.refusals.items(),
    ),
    Family(
        "gauge credentials_ok{name}",
        "Whether credentials for targets can be used: 1 or 0",
        lambda router: (((each.name,), int(each.ok)) for each in router.credentials),
    ),
    Family(
        "gauge certificate_expiry_timestamp_seconds{name}",
        "When the client certificate of credentials expires",
        lambda router: (
            ((each.name,), each.certificate_expires_at)
            for each in router.credentials
            if each.certificate_expires_at is not None
        ),
    ),
    Family(
        "gauge event_loop_lag_seconds",
        "Longest delay of the event loop in the last 30 to 60 seconds",
        lambda router: [((), router.loop_lag)],
    ),
    Family(
        "counter loop_stalls_total",
        "Turns of the event loop that took longer than 250 ms",
        lambda router: [((), router.loop_stalls)],
    ),
    Family(
        "counter loop_stall_seconds_total",
        "Seconds that the event loop was held up in such turns",
        lambda router: [((), router.loop_stalled_seconds)],
    ),
    Family(
        "counter log_lines_dropped_total",
        "Log lines that were dropped because standard output was not read",
        lambda router: [((), router.dropped_logs)],
    ),
    Family(
        "counter spans_total{result}",
        "Trace spans by result; missing if tracing is off",
        lambda router: _by_label(router.spans),
    ),
    Family(
        "gauge warnings{severity}",
        "Warnings that are not acknowledged",
        lambda router: (((each.name,), router.warnings.active.get(each, 0)) for each in Severity),
    ),
    Family(
        "counter config_sync_total{result}",
        "Syncs of the configuration",
        lambda router: ((("ok",), router.syncs.succeeded), (("failed",), router.syncs.failed)),
    ),
    Family(
        "gauge config_last_sync_timestamp_seconds",
        "Time of the last successful configuration sync; missing if there was none",
        lambda router: (
            () if router.syncs.last_success is None else (((), router.syncs.last_success),)
        ),
    ),
)
QUEUE_METRICS: Final[Sequence[Family[QueueState]]] = (
    Family(
        "counter messages_total{outcome,queue}",
        "Messages of a queue that are finished, by how their delivery went",
        lambda queue: (((outcome, queue.name), n) for outcome, n in queue.outcomes.items()),
    ),
    Family(
        "counter unknown_pool_total{queue}",
        "Messages of a queue that named an unknown pool and went to DEFAULT-POOL",
        lambda queue: [((queue.name,), queue.unknown_pools)],
    ),
    Family(
        "counter unknown_fields_total{queue}",
        "Messages of a queue with fields that no message has, which were ignored",
        lambda queue: [((queue.name,), queue.unknown_fields)],
    ),
    Family(
        "counter broker_calls_total{call,queue,result}",
        "Calls to a queue's broker",
        lambda queue: (
            ((verb, queue.name, how), n) for (verb, how), n in queue.counts.calls.items()
        ),
    ),
    Family(
        "gauge queue_depth{queue}",
        "Messages waiting in the broker, if it reports them",
        lambda queue: [] if queue.waiting is None else [((queue.name,), queue.waiting)],
    ),
    Family(
        "gauge seconds_since_poll{queue}",
        "Seconds since the broker last answered a receive, on the most silent connection",
        lambda queue: [((queue.name,), queue.since_poll)],
    ),
    Family(
        "gauge look_ahead{queue,state}",
        "Messages of full pools that were taken to reach others, held here or deferred",
        lambda queue: (
            ((queue.name, "held"), queue.held),
            ((queue.name, "deferred"), queue.deferred),
        ),
    ),
    Family(
        "gauge look_ahead_used_up{queue}",
        "Whether messages of other pools wait behind those of a full one: 1 or 0",
        lambda queue: [((queue.name,), queue.look_ahead_used_up)],
    ),
    Family(
        "gauge order_store_messages{queue}",
        "Messages of a strict queue in its order store; missing if it has none",
        lambda queue: _known(queue.name, queue.stored),
    ),
    Family(
        "gauge order_store_bytes{queue}",
        "Bytes of their bodies",
        lambda queue: _known(queue.name, None if queue.stored is None else queue.stored_bytes),
    ),
    Family(
        "gauge order_store_oldest_seconds{queue}",
        "Seconds since the first of them was stored",
        lambda queue: _known(queue.name, queue.stored_oldest if queue.stored else None),
    ),
    Family(
        "gauge held_groups{queue}",
        "Groups of a queue that dead letters hold; missing if there are none",
        lambda queue: _known(queue.name, queue.held_groups or None),
    ),
)
TARGET_METRICS: Final[Sequence[Family[TargetState]]] = (
    Family(
        "gauge target_limit{origin}",
        "Requests at once that a target takes; missing if it has refused none lately",
        lambda target: _known(target.origin, target.limit),
    ),
    Family(
        "gauge target_silent_seconds{origin}",
        "Seconds until the end of the silence that a target asked for; missing if it did not",
        lambda target: _known(target.origin, target.silent_seconds),
    ),
)
POOL_METRICS: Final[Sequence[Family[PoolState]]] = (
    Family(
        "counter deliveries_total{outcome,pool}",
        "Deliveries of a pool by outcome; all tries of a delivery count once",
        lambda pool: (((outcome, pool.code), n) for outcome, n in pool.outcomes.items()),
    ),
    DeliverySeconds(),
    Family(
        "gauge waiting{pool,reason}",
        "Messages in a pool without an open request, by what they wait for; missing if none",
        lambda pool: (((pool.code, why), n) for why, n in pool.waiting().items() if n),
    ),
    Family(
        "gauge in_flight{pool}",
        "Open requests of a pool",
        lambda pool: [((pool.code,), pool.in_flight)],
    ),
    Family(
        "gauge pool_concurrency{pool}",
        "Requests that a pool may have open at once",
        lambda pool: [((pool.code,), pool.concurrency)],
    ),
    Family(
        "gauge pool_capacity{pool}",
        "Messages that a pool may hold without an open request",
        lambda pool: [((pool.code,), pool.capacity)],
    ),
    Family(
        "gauge pool_queued{pool}",
        "Messages that a pool holds without an open request",
        lambda pool: [((pool.code,), pool.queued)],
    ),
)
METRICS: Final[Sequence[Family[Any]]] = (
    *QUEUE_METRICS,
    *POOL_METRICS,
    *TARGET_METRICS,
    *ROUTER_METRICS,
)


routes = APIRouter(tags=["metrics"])


@routes.get("/metrics", response_class=Response, responses={HTTPStatus.OK: _DESCRIPTION})
async def metrics(router: CurrentRouter) -> Response:
    """Return all metrics in the text format of Prometheus."""
    return Response(await metrics_page(router.state()), media_type=CONTENT_TYPE)


async def metrics_page(state: RouterState) -> bytes:
    """Write all metrics of one moment."""
    page = _Page()
    page.add(ROUTER_METRICS, [state])
    page.add(TARGET_METRICS, held_back(state))
    async for queues in sliced(state.queues):
        page.add(QUEUE_METRICS, queues)
    async for pools in sliced(state.pools):
        page.add(POOL_METRICS, pools)
    return page.text()


class _Page:
    """Samples that are added later join those of the same metric: its heading appears once.

    The lines are written here and not by the Prometheus library, whose writer takes ten times as
    long: a scrape shares the event loop with the deliveries.
    """

    def __init__(self) -> None:
        self._parts: dict[str, list[bytes]] = {
            family.name: [
                f"# HELP {family.name} {family.meaning}\n".encode(),
                f"# TYPE {family.name} {family.kind}\n".encode(),
            ]
            for family in METRICS
        }

    def add(self, families: Sequence[Family[T]], states: Sequence[T]) -> None:
        for family in families:
            lines = (line for each in states for line in family.lines(each))
            self._parts[family.name].append("".join(lines).encode())

    def text(self) -> bytes:
        return b"".join(part for parts in self._parts.values() for part in parts)
