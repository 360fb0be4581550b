"""Counting how deliveries went: totals, and a rolling half hour at constant cost and memory."""

from typing import Final

from router.core.outcome import Metric

BUCKET_SECONDS: Final = 60.0
BUCKETS: Final = 30


class Rolling:
    """Successes and failures of the last 30 minutes, by the minute."""

    __slots__ = ("_failures", "_minute", "_successes")

    def __init__(self) -> None:
        self._minute = 0
        self._successes = [0] * BUCKETS
        self._failures = [0] * BUCKETS

    def add(self, *, success: bool, now: float) -> None:
        minute = int(now // BUCKET_SECONDS)
        if minute != self._minute:
            self._forget(minute)
        (self._successes if success else self._failures)[minute % BUCKETS] += 1

    def success_rate(self, now: float) -> float:
        """0…1; without traffic 1. Reading changes no figure."""
        self._forget(int(now // BUCKET_SECONDS))
        successes, failures = sum(self._successes), sum(self._failures)
        return successes / (successes + failures) if successes + failures else 1.0

    def _forget(self, minute: int) -> None:
        for old in range(self._minute + 1, min(minute, self._minute + BUCKETS) + 1):
            self._successes[old % BUCKETS] = self._failures[old % BUCKETS] = 0
        self._minute = minute


class Counts:
    """How the deliveries of a pool or a queue went."""

    __slots__ = ("by_metric", "rolling")

    def __init__(self) -> None:
        self.by_metric: dict[Metric, int] = dict.fromkeys(Metric, 0)
        self.rolling = Rolling()

    def record(self, metric: Metric, now: float) -> None:
        self.by_metric[metric] += 1
        if metric is not Metric.TRANSIENT:  # these do not count in a rate (CONTRACTS §6)
            self.rolling.add(success=metric is Metric.SUCCESS, now=now)
