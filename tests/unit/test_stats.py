"""What is counted of a pool and of a queue, and what is answered of it."""

import pytest

from router.core.outcome import Metric
from router.core.stats import (
    LONG_MINUTES,
    SHORT_MINUTES,
    Counts,
    Deliveries,
    Latency,
    PoolPeriod,
    QueuePeriod,
)

MINUTE = 60.0


@pytest.mark.rule("OPS-3")
@pytest.mark.parametrize("counts", [Counts(), Deliveries()])
def test_without_traffic_everything_is_fine(counts: Counts | Deliveries) -> None:
    assert counts.success_rate(now=1e6) == 1.0
    assert counts.total().success_rate == counts.last(LONG_MINUTES, now=1e6).success_rate == 1.0


@pytest.mark.rule("OPS-3")
@pytest.mark.parametrize("counts", [Counts(), Deliveries()])
def test_the_rate_is_the_share_of_successes_and_transient_ones_do_not_count(
    counts: Counts | Deliveries,
) -> None:
    for metric in (*[Metric.SUCCESS] * 3, Metric.FAILURE, Metric.TRANSIENT):
        counts.record(metric, now=100.0)

    assert counts.by_metric == {Metric.SUCCESS: 3, Metric.FAILURE: 1, Metric.TRANSIENT: 1}
    assert counts.success_rate(now=100.0) == 0.75
    assert counts.total().success_rate == counts.last(LONG_MINUTES, now=100.0).success_rate == 0.75


@pytest.mark.rule("OPS-3")
@pytest.mark.parametrize("counts", [Counts(), Deliveries()])
def test_a_failure_is_forgiven_after_half_an_hour(counts: Counts | Deliveries) -> None:
    counts.record(Metric.FAILURE, now=0.0)

    assert counts.success_rate(now=30 * MINUTE - 1) == 0.0
    assert counts.success_rate(now=30 * MINUTE) == 1.0


@pytest.mark.rule("OPS-3")
def test_a_pool_counts_outcomes_waits_and_the_time_of_its_requests() -> None:
    deliveries = Deliveries()
    for metric in (Metric.SUCCESS, Metric.SUCCESS, Metric.FAILURE, Metric.TRANSIENT):
        deliveries.record(metric, now=0.0)
    deliveries.limit(now=0.0)
    deliveries.time(0.5, now=0.0)
    deliveries.time(1.5, now=0.0)

    total = deliveries.total()

    assert (total.succeeded, total.failed, total.transient) == (2, 1, 1)
    assert (total.processed, total.rate_limited) == (4, 1)
    assert (total.latency.mean, deliveries.seconds) == (1.0, 2.0)
    assert 0.3 < total.latency.p50 <= 0.5
    assert 1.0 < total.latency.p95 <= total.latency.p99 <= 1.5
    assert sum(deliveries.buckets) == 2


@pytest.mark.rule("OPS-3")
def test_a_pools_windows_hold_what_is_recent() -> None:
    deliveries = Deliveries()
    deliveries.record(Metric.SUCCESS, now=0.0)
    deliveries.time(100.0, now=0.0)
    deliveries.record(Metric.FAILURE, now=10 * MINUTE)

    periods = [
        deliveries.last(minutes, now=12 * MINUTE) for minutes in (SHORT_MINUTES, LONG_MINUTES)
    ]

    assert periods[0] == PoolPeriod(failed=1)
    assert (periods[1].succeeded, periods[1].failed) == (1, 1)
    assert periods[1].latency == Latency(
        mean=100.0, p50=periods[1].latency.p50, p95=periods[1].latency.p95, p99=99.7
    )


@pytest.mark.rule("OPS-3")
def test_a_queue_counts_hand_overs_and_what_became_of_them() -> None:
    counts = Counts()
    counts.receive(5, now=0.0)
    for metric in (Metric.SUCCESS, Metric.FAILURE, Metric.TRANSIENT, None):
        counts.record(metric, now=0.0)

    assert counts.total() == QueuePeriod(received=5, consumed=1, failed=1, returned=2)
    assert counts.last(SHORT_MINUTES, now=0.0) == counts.total()
    assert counts.last(SHORT_MINUTES, now=5 * MINUTE) == QueuePeriod()
    assert counts.unsent == 1
