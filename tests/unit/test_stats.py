"""Totals, and a rolling half hour."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.outcome import Metric
from router.core.stats import Counts, Rolling

pytestmark = pytest.mark.rule("OPS-3")

MINUTE = 60.0


def test_without_traffic_everything_is_fine() -> None:
    assert Rolling().success_rate(now=1e6) == 1.0


def test_the_rate_is_the_share_of_successes() -> None:
    rolling = Rolling()
    for success in (True, True, True, False):
        rolling.add(success=success, now=100.0)

    assert rolling.success_rate(now=100.0) == 0.75


def test_what_is_older_than_half_an_hour_is_forgotten() -> None:
    rolling = Rolling()
    rolling.add(success=False, now=0.0)
    rolling.add(success=True, now=10 * MINUTE)

    just_before, just_after = (rolling.success_rate(now) for now in (30 * MINUTE - 1, 30 * MINUTE))

    assert (just_before, just_after) == (0.5, 1.0)


def test_reading_changes_nothing() -> None:
    rolling = Rolling()
    rolling.add(success=False, now=5.0)

    rates = [rolling.success_rate(now=5.0) for _ in range(3)]

    assert rates == [0.0, 0.0, 0.0]


@given(st.lists(st.tuples(st.floats(0, 20 * MINUTE), st.booleans()), max_size=30))
def test_it_counts_as_a_list_of_all_results_would(steps: list[tuple[float, bool]]) -> None:
    rolling, now, results = Rolling(), 0.0, [(0.0, True)]
    rolling.add(success=True, now=0.0)
    for pause, success in steps:
        now += pause
        rolling.add(success=success, now=now)
        results.append((now, success))

    rate = rolling.success_rate(now)

    recent = [success for at, success in results if now // MINUTE - at // MINUTE < 30]
    assert rate == sum(recent) / len(recent)


def test_transient_outcomes_are_counted_but_not_in_the_rate() -> None:
    counts = Counts()
    for metric in (Metric.SUCCESS, Metric.TRANSIENT, Metric.TRANSIENT, Metric.FAILURE):
        counts.record(metric, now=0.0)

    assert counts.by_metric == {Metric.SUCCESS: 1, Metric.TRANSIENT: 2, Metric.FAILURE: 1}
    assert counts.rolling.success_rate(now=0.0) == 0.5
