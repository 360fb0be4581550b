"""Counting how deliveries went, for operators: plain integers, read when somebody asks.

Three stretches of time: since the start, the last 5 minutes, the last 30.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import Struct

from router.core.histogram import BUCKETS, bucket_of, quantile
from router.core.outcome import Metric
from router.core.rolling import Rolling

SHORT: Final = 5  # minutes
LONG: Final = 30
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
    """Seconds that a request took. All 0: there was none."""

    mean: float = 0.0
    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0


class PoolPeriod(Struct, frozen=True, kw_only=True):
    """What a pool did in some stretch of time."""

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
    """What became of a queue's messages in some stretch of time."""

    received: int = 0  # hand-overs by the broker
    consumed: int = 0  # accepted by their targets, and acknowledged
    failed: int = 0
    deferred: int = 0  # given back for later: asked for by the target, or never sent

    @property
    def success_rate(self) -> float:
        return _rate(self.consumed, self.failed)


class Calling:
    """As long as a call of a broker takes."""

    __slots__ = ("_calls", "_verb")

    def __init__(self, calls: Counter[tuple[str, str]], verb: str) -> None:
        self._calls = calls
        self._verb = verb

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._calls[self._verb, "ok"] += 1
        elif issubclass(kind, Exception):
            self._calls[self._verb, "error"] += 1


class Counts(Rolling):
    """What became of the messages of one queue, and how its broker answered."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        super().__init__(_QUEUE_TOTALS)
        self.calls: Counter[tuple[str, str]] = Counter()  # (verb, result)

    def receive(self, hand_overs: int, now: float) -> None:
        self.at(now)[_RECEIVED] += hand_overs

    def record(self, metric: Metric | None, now: float, hand_overs: int = 1) -> None:
        """So many have ended. None: they were never sent."""
        self.at(now)[_UNSENT if metric is None else _PLACES[metric]] += hand_overs

    def calling(self, verb: str) -> "Calling":
        """Count one call of the broker. One that is cancelled says nothing about it."""
        return Calling(self.calls, verb)

    @property
    def by_metric(self) -> Mapping[Metric, int]:
        return {metric: self.totals[place] for metric, place in _PLACES.items()}

    @property
    def unsent(self) -> int:
        return self.totals[_UNSENT]

    def total(self) -> QueuePeriod:
        return _queue_period(self.totals)

    def last(self, minutes: int, now: float) -> QueuePeriod:
        return _queue_period(self.growth(minutes, now))

    def success_rate(self, now: float) -> float:
        return _recent_rate(self, now)


class Deliveries(Rolling):
    """How the deliveries of one pool went, and how long its requests took."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(_POOL_TOTALS)

    def record(self, metric: Metric, now: float) -> None:
        self.at(now)[_PLACES[metric]] += 1

    def succeed(self, seconds: float, now: float) -> None:
        """One, by a request that took so long."""
        totals = self.at(now)
        totals[_SUCCEEDED] += 1
        _add_time(totals, seconds)

    def time(self, seconds: float, now: float) -> None:
        """One request that did not end well."""
        _add_time(self.at(now), seconds)

    def limit(self, now: float) -> None:
        """One message has to wait for the rate limit."""
        self.at(now)[_LIMITED] += 1

    @property
    def by_metric(self) -> Mapping[Metric, int]:
        return {metric: self.totals[place] for metric, place in _PLACES.items()}

    @property
    def limited(self) -> int:
        return self.totals[_LIMITED]

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

    def success_rate(self, now: float) -> float:
        return _recent_rate(self, now)


def _add_time(totals: list[int], seconds: float) -> None:
    totals[_TIME] += int(seconds * _MICROSECONDS)
    totals[_FIRST_BUCKET + bucket_of(seconds)] += 1


def _pool_period(totals: Sequence[int]) -> PoolPeriod:
    succeeded, failed, transient, limited, time = totals[:_FIRST_BUCKET]
    return PoolPeriod(
        succeeded=succeeded,
        failed=failed,
        transient=transient,
        rate_limited=limited,
        latency=_latency(time / _MICROSECONDS, totals[_FIRST_BUCKET:]),
    )


def _latency(seconds: float, buckets: Sequence[int]) -> Latency:
    requests = sum(buckets)
    if not requests:
        return Latency()
    return Latency(
        mean=seconds / requests,
        p50=quantile(buckets, 0.5),
        p95=quantile(buckets, 0.95),
        p99=quantile(buckets, 0.99),
    )


def _queue_period(totals: Sequence[int]) -> QueuePeriod:
    succeeded, failed, transient, unsent, received = totals
    return QueuePeriod(
        received=received, consumed=succeeded, failed=failed, deferred=transient + unsent
    )


def _recent_rate(rolling: Rolling, now: float) -> float:
    """Of the last 30 minutes. Asked for every pool whenever health is, and most never failed."""
    totals = rolling.totals
    if not totals[_FAILED]:
        return 1.0
    before = rolling.as_of(LONG, now)
    return _rate(
        totals[_SUCCEEDED] - before[_SUCCEEDED],
        totals[_FAILED] - before[_FAILED],
    )


def _rate(successes: int, failures: int) -> float:
    """0…1; without traffic 1; transient outcomes do not count in it (CONTRACTS §6)."""
    return successes / (successes + failures) if successes + failures else 1.0
