"""Counting outcomes and durations for operators: plain integers, read when somebody asks.

Three periods: since the start, the last 5 minutes, the last 30.
"""

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Final

from msgspec import Struct

from router.core.outcome import Metric

MINUTE_SECONDS: Final = 60.0
MAX_COUNTED_ORIGINS: Final = 100  # a label with more values makes every later scrape expensive
COUNTED_SECONDS: Final = 3600.0  # how long an idle origin keeps a count of its own
OTHERS: Final = "(others)"
_INTEGERS: Final = "q"  # of 8 bytes each: the notes of ten thousand pools are millions of them
_STEPS: Final = ("1", "1.5", "2", "3", "5", "7")
BOUNDS_SECONDS: Final = (
    *(float(f"{step}e{decade}") for decade in range(-3, 3) for step in _STEPS),
    1000.0,
)  # seconds, each the upper end of its bucket
_EDGES: Final = (0.0, *BOUNDS_SECONDS)
BUCKETS: Final = len(BOUNDS_SECONDS) + 1  # the last one is open above
# In metrics:
SHOWN_BOUNDS_SECONDS: Final = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
_SHOWN_PLACES: Final = tuple((bound, BOUNDS_SECONDS.index(bound)) for bound in SHOWN_BOUNDS_SECONDS)
SHORT_MINUTES: Final = 5
LONG_MINUTES: Final = 30
_MICROSECONDS: Final = 1_000_000

# The places of the totals; outcomes come first for both pools and queues.
_SUCCEEDED, _FAILED, _TRANSIENT, _UNSENT = range(4)
_PLACES: Final[Mapping[Metric | None, int]] = {
    Metric.SUCCESS: _SUCCEEDED,
    Metric.FAILURE: _FAILED,
    Metric.TRANSIENT: _TRANSIENT,
    None: _UNSENT,
}
_RECEIVED, _QUEUE_TOTALS = 4, 5
_LIMITED, _TIME, _FIRST_BUCKET = 4, 5, 6
_POOL_TOTALS: Final = _FIRST_BUCKET + BUCKETS


class RollingTotals:
    """A fixed number of totals. Their values are noted once in each minute that changes them.

    So counting costs a comparison and an addition, a period is the difference of two notes, and
    totals that do not change cost nothing. Reading changes nothing.
    """

    __slots__ = ("_noted_until", "_notes", "totals")

    def __init__(self, size: int) -> None:
        self.totals = [0] * size  # counting in a list costs half of counting in an array
        self._noted_until = 0.0  # the end of the minute of the latest note
        self._notes: list[tuple[int, array[int]]] = []  # minute, and the totals as it began

    def at(self, now: float) -> list[int]:
        """Return the totals for adding to them at this instant."""
        if now >= self._noted_until:
            minute = int(now // MINUTE_SECONDS)
            self._noted_until = (minute + 1) * MINUTE_SECONDS
            self._notes.append((minute, array(_INTEGERS, self.totals)))
            del self._notes[:-LONG_MINUTES]
        return self.totals

    def growth(self, minutes: int, now: float) -> Sequence[int]:
        """Return how much each total grew in the last minutes, the current one included."""
        before = self.as_of(minutes, now)
        return [total - earlier for total, earlier in zip(self.totals, before, strict=True)]

    def as_of(self, minutes: int, now: float) -> Sequence[int]:
        """Return the totals at the start of the first of the last minutes."""
        first = int(now // MINUTE_SECONDS) - minutes + 1
        if not self._notes or self._notes[-1][0] < first:
            return self.totals  # nothing has changed since
        return next(totals for minute, totals in self._notes if minute >= first)


def covered(minutes: int, now: float) -> float:
    """Return the seconds in the last minutes; of the current minute only what has passed."""
    return (minutes - 1) * MINUTE_SECONDS + now % MINUTE_SECONDS


bucket_of: Final[Callable[[float], int]] = partial(bisect_left, BOUNDS_SECONDS)  # by seconds


def quantile(counts: Sequence[int], share: float) -> float:
    """Return the seconds within which this share of all ended, or 0 if there were none.

    Exact up to the bucket, within which they are assumed to be spread evenly. Durations beyond the
    last bound count as the last bound.
    """
    wanted = sum(counts) * share
    below = 0
    for bucket, count in enumerate(counts):
        if count and below + count >= wanted:
            lower, upper = _EDGES[bucket], _EDGES[min(bucket + 1, len(BOUNDS_SECONDS))]
            return lower + (upper - lower) * ((wanted - below) / count)
        below += count
    return 0.0


def cumulative(counts: Sequence[int]) -> Sequence[tuple[float, int]]:
    """Return how many took no longer, for each bound that metrics show."""
    sums = list(accumulate(counts))
    return [(bound, sums[place]) for bound, place in _SHOWN_PLACES]


class Latency(Struct, frozen=True, kw_only=True):
    """Seconds that a request took, or 0 if there was none."""

    mean: float = 0.0
    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0


class PoolPeriod(Struct, frozen=True, kw_only=True):
    """The counts of a pool over a period."""

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
    returned: int = 0  # for later: the target asked for it, or it was never sent

    @property
    def success_rate(self) -> float:
        return _rate(self.consumed, self.failed)


class Outcomes(RollingTotals):
    """Totals that begin with one for each outcome."""

    __slots__ = ()

    def record(self, metric: Metric | None, now: float, hand_overs: int = 1) -> None:
        """Count messages that have ended so. None: they were never sent."""
        self.at(now)[_PLACES[metric]] += hand_overs

    @property
    def by_metric(self) -> Mapping[Metric, int]:
        return {metric: self.totals[_PLACES[metric]] for metric in Metric}

    def success_rate(self, now: float) -> float:
        """Return the share of successes in the last 30 minutes; quickly, if nothing ever failed."""
        totals = self.totals
        if not totals[_FAILED]:
            return 1.0
        before = self.as_of(LONG_MINUTES, now)
        return _rate(
            totals[_SUCCEEDED] - before[_SUCCEEDED],
            totals[_FAILED] - before[_FAILED],
        )


class Counts(Outcomes):
    """How the messages of one queue ended, and how its broker answered."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        super().__init__(_QUEUE_TOTALS)
        self.calls: Counter[tuple[str, str]] = Counter()  # of the broker, by verb and result

    def receive(self, hand_overs: int, now: float) -> None:
        self.at(now)[_RECEIVED] += hand_overs

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

    def time(self, seconds: float, now: float) -> None:
        """Count one request, by how long it took."""
        totals = self.at(now)
        totals[_TIME] += int(seconds * _MICROSECONDS)
        totals[_FIRST_BUCKET + bucket_of(seconds)] += 1

    def per_second(self, minutes: int, now: float, since: float) -> float:
        """Return how many deliveries ended in a second, over some minutes or since a start."""
        grown = self.growth(minutes, now)
        seconds = min(covered(minutes, now), max(now - since, 1.0))
        return (grown[_SUCCEEDED] + grown[_FAILED] + grown[_TRANSIENT]) / seconds

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
    succeeded, failed, transient, _, limited, microseconds = totals[:_FIRST_BUCKET]
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
        received=received, consumed=succeeded, failed=failed, returned=transient + unsent
    )


def _rate(successes: int, failures: int) -> float:
    """Return 0…1, and 1 without traffic. Transient outcomes do not count."""
    return successes / (successes + failures) if successes + failures else 1.0


class OriginCounts:
    """Counts of what happened at targets, by origin and by further labels. They only grow.

    The first hundred origins have counts of their own. What is idle for an hour joins the others,
    so that messages with made-up targets do not take these places for good.
    """

    def __init__(self) -> None:
        self._counts: dict[str, Counter[tuple[str, ...]]] = {}
        self._last: dict[str, float] = {}  # when each of them was counted
        self._others: Counter[tuple[str, ...]] = Counter()

    def count(self, now: float, origin: str, *labels: str) -> None:
        counts = self._counts.get(origin)
        if counts is None:
            if len(self._counts) >= MAX_COUNTED_ORIGINS:
                self._others[labels] += 1
                return
            counts = self._counts[origin] = Counter()
        counts[labels] += 1
        self._last[origin] = now

    def drop_idle(self, now: float) -> None:
        idle = [origin for origin, at in self._last.items() if now - at >= COUNTED_SECONDS]
        for origin in idle:
            del self._last[origin]
            self._others += self._counts.pop(origin)

    def read(self) -> Mapping[tuple[str, ...], int]:
        """Return the counts by origin and labels."""
        found = {**self._counts, OTHERS: self._others}
        return {(origin, *labels): n for origin, by in found.items() for labels, n in by.items()}
