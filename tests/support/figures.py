"""Figures made by hand, and a router's controls that only take notes."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from router.core.figures import (
    BreakerFigures,
    PoolFigures,
    PoolLoad,
    PoolMeters,
    QueueFigures,
    QueueMeters,
    RouterMeters,
    Throughput,
    Wait,
)
from router.core.histogram import BUCKETS
from router.core.stats import Latency, PoolPeriod, QueuePeriod
from router.engine.controls import PoolChange, UnknownBreaker, UnknownPool

ORIGIN = "https://svc.test:8443"
NO_REQUESTS = (0,) * BUCKETS


def load(code: str = "POOL-A") -> PoolLoad:
    return PoolLoad(
        code=code,
        in_flight=3,
        concurrency=10,
        free=7,
        capacity=200,
        queued=5,
        groups=4,
        waiting={Wait.RATE: 0, Wait.GROUP: 5},
    )


def pool_figures(code: str = "POOL-A") -> PoolFigures:
    return PoolFigures(
        load=load(code),
        total=PoolPeriod(
            succeeded=6,
            failed=2,
            transient=1,
            rate_limited=4,
            latency=Latency(mean=0.5, p50=0.25, p95=1.5, p99=2.0001),
        ),
        last_5min=PoolPeriod(),
        last_30min=PoolPeriod(succeeded=1, failed=1),
    )


def pool_meters(code: str = "POOL-A") -> PoolMeters:
    return PoolMeters(
        load=load(code),
        outcomes={"success": 6, "failure": 2, "transient": 1},
        buckets=(2, *NO_REQUESTS[2:], 1),
        seconds=1000.002,
    )


def queue_figures(name: str = "orders", waiting: int | None = 25) -> QueueFigures:
    return QueueFigures(
        name=name,
        total=QueuePeriod(received=10, consumed=6, failed=2, deferred=1),
        last_5min=QueuePeriod(),
        last_30min=QueuePeriod(received=2, consumed=1, failed=1),
        throughput=Throughput(total=0.5, last_5min=0.0, last_30min=1 / 3),
        waiting=waiting,
        handed_out=None if waiting is None else 12,
    )


def queue_meters(name: str = "orders", depth: int | None = 25) -> QueueMeters:
    return QueueMeters(
        name=name,
        outcomes={"success": 6, "failure": 2, "transient": 1, "unsent": 0},
        unknown_pools=7,
        calls={("receive", "ok"): 9, ("ack", "error"): 1},
        depth=depth,
        since_poll=1.5,
    )


def breaker_figures(name: str = ORIGIN) -> BreakerFigures:
    return BreakerFigures(
        name=name,
        state="HALF_OPEN",
        successes=9,
        failures=5,
        rejections=3,
        buffered=4,
        buffered_failures=1,
        buffer_size=10,
    )


@dataclass
class HandMadeStatistics:
    """What a test says the router's figures are."""

    pool_codes: Iterable[str] = ("POOL-A",)
    queue_names: Iterable[str] = ("orders",)
    depth: int | None = 25
    breaker_names: Iterable[str] = (ORIGIN,)

    def pools(self) -> Iterable[PoolFigures]:
        return map(pool_figures, self.pool_codes)

    def pool_meters(self) -> Iterable[PoolMeters]:
        return map(pool_meters, self.pool_codes)

    def queues(self) -> Iterable[QueueFigures]:
        return (queue_figures(name, self.depth) for name in self.queue_names)

    def queue_meters(self) -> Iterable[QueueMeters]:
        return (queue_meters(name, self.depth) for name in self.queue_names)

    def breakers(self) -> Iterable[BreakerFigures]:
        return map(breaker_figures, self.breaker_names)

    def router_meters(self) -> RouterMeters:
        return RouterMeters(
            ledger={"received": 10, "delivered": 6, "dead_lettered": 2},
            unaccounted=0,
            dead_letters={"CONFIG_ERROR": 2, "MALFORMED": 0},
            breakers={ORIGIN: 1},
            loop_lag=0.002,
            spans={"exported": 4, "failed": 0, "dropped": 1},
        )


@dataclass
class NotingControls:
    """Has one pool and one breaker."""

    changes: list[tuple[str, PoolChange]] = field(default_factory=list)
    resets: list[str] = field(default_factory=list)

    def change_pool(self, code: str, change: PoolChange) -> PoolFigures:
        if code not in ("POOL-A", "EU/ä"):
            raise UnknownPool("there is no such pool")
        self.changes.append((code, change))
        return pool_figures(code)

    def reset_breaker(self, name: str) -> None:
        if name != ORIGIN:
            raise UnknownBreaker("there is no such circuit breaker")
        self.resets.append(name)

    def reset_breakers(self) -> int:
        self.resets.append("*")
        return 2
