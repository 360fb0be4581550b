"""Counting outcomes for operators: plain integers, read when somebody asks.

Three periods: since the start, the last 5 minutes, the last 30.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import Struct

from router.core.histogram import BUCKETS, bucket_of, quantile
from router.core.outcome import Metric
from router.core.rolling import Rolling

SHORT: Final = 5  # minutes
LONG: Final = 30  # minutes
_MICROSECONDS: Final = 1_000_000

# The places of the totals; outcomes come first for both pools and queues.
_SUCCEEDED, _FAILED, _TRANSIENT = 0, 1, 2
_PLACES: Final[Mapping[Metric, int]] = {
    Metric.SUCCESS: _SUCCEEDED,
    Metric.FAILURE: _FAILED,
    Metric.TRANSIENT: _TRANSIENT,
}
_UNSENT, _RECEIVED, _QUEUE_TOTALS = 3, 4, 5
_LIMITED, _TIME, _FIRST_BUCKET = 3, 4, 5
_POOL_TOTALS: Final = _FIRST_BUCKET + BUCKETS


class Latency(Struct, frozen=True, kw_only=True):
    """Seconds that a request took, or 0 if there was none."""

    mean: float = 0.0
    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0


class PoolPeriod(Struct, frozen=True, kw_only=True):
    """What a pool did in a period."""

    succeeded: int = 0
    failed: int = 0
    transient: int = 0
    rate_limited: int = 0
    latency: Latency = Latency()

    @property
    def processed(self) -> int:
        return self.succeeded + self.failed + self.transient

    @property
    def success_rate(self) -> float:
        return _rate(self.succeeded, self.failed)


class QueuePeriod(Struct, frozen=True, kw_only=True):
    """How messages of a queue ended in a period."""

    received: int = 0  # hand-overs by the broker
    consumed: int = 0  # accepted by their targets, and acknowledged
    failed: int = 0
    deferred: int = 0  # returned for later: the target asked for it, or it was never sent

    @property
    def success_rate(self) -> float:
        return _rate(self.consumed, self.failed)


class Outcomes(Rolling):
    """Totals that begin with one for each outcome."""

    __slots__ = ()

    @property
    def by_metric(self) -> Mapping[Metric, int]:
        return {metric: self.totals[place] for metric, place in _PLACES.items()}

    def success_rate(self, now: float) -> float:
        """Of the last 30 minutes. Every health check asks every pool, and most never failed."""
        totals = self.totals
        if not totals[_FAILED]:
            return 1.0
        before = self.as_of(LONG, now)
        return _rate(
            totals[_SUCCEEDED] - before[_SUCCEEDED],
            totals[_FAILED] - before[_FAILED],
        )


class Counts(Outcomes):
    """How the messages of one queue ended, and how its broker answered."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        super().__init__(_QUEUE_TOTALS)
        self.calls: Counter[tuple[str, str]] = Counter()  # (verb, result)

    def receive(self, hand_overs: int, now: float) -> None:
        self.at(now)[_RECEIVED] += hand_overs

    def record(self, metric: Metric | None, now: float, hand_overs: int = 1) -> None:
        """Count messages that have ended. None: they were never sent."""
        self.at(now)[_UNSENT if metric is None else _PLACES[metric]] += hand_overs

    def call(self, verb: str, result: str) -> None:
        """Count one call of the broker."""
        self.calls[verb, result] += 1

    @property
    def unsent(self) -> int:
        return self.totals[_UNSENT]

    def total(self) -> QueuePeriod:
        return _queue_period(self.totals)

    def last(self, minutes: int, now: float) -> QueuePeriod:
        return _queue_period(self.growth(minutes, now))


class Deliveries(Outcomes):
    """How the deliveries of one pool ended, and how long its requests took."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(_POOL_TOTALS)

    def record(self, metric: Metric, now: float) -> None:
        self.at(now)[_PLACES[metric]] += 1

    def time(self, seconds: float, now: float) -> None:
        """Count one request that took so long."""
        totals = self.at(now)
        totals[_TIME] += int(seconds * _MICROSECONDS)
        totals[_FIRST_BUCKET + bucket_of(seconds)] += 1

    def limit(self, now: float) -> None:
        """Count a message that has to wait for the rate limit."""
        self.at(now)[_LIMITED] += 1

    @property
    def seconds(self) -> float:
        """Of all requests together."""
        return self.totals[_TIME] / _MICROSECONDS

    @property
    def buckets(self) -> Sequence[int]:
        """Requests by how long they took."""
        return self.totals[_FIRST_BUCKET:]

    def total(self) -> PoolPeriod:
        return _pool_period(self.totals)

    def last(self, minutes: int, now: float) -> PoolPeriod:
        return _pool_period(self.growth(minutes, now))


def _pool_period(totals: Sequence[int]) -> PoolPeriod:
    succeeded, failed, transient, limited, microseconds = totals[:_FIRST_BUCKET]
    buckets, latency = totals[_FIRST_BUCKET:], Latency()
    if requests := sum(buckets):
        latency = Latency(
            mean=microseconds / _MICROSECONDS / requests,
            p50=quantile(buckets, 0.5),
            p95=quantile(buckets, 0.95),
            p99=quantile(buckets, 0.99),
        )
    return PoolPeriod(
        succeeded=succeeded,
        failed=failed,
        transient=transient,
        rate_limited=limited,
        latency=latency,
    )


def _queue_period(totals: Sequence[int]) -> QueuePeriod:
    succeeded, failed, transient, unsent, received = totals
    return QueuePeriod(
        received=received, consumed=succeeded, failed=failed, deferred=transient + unsent
    )


def _rate(successes: int, failures: int) -> float:
    """Return 0…1, and 1 without traffic. Transient outcomes do not count."""
    return successes / (successes + failures) if successes + failures else 1.0
