"""Totals, and how much of them is recent."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.stats import LONG_MINUTES, RollingTotals

MINUTE = 60.0
Steps = list[tuple[float, int]]  # pause before it, which total grows
STEPS = st.lists(st.tuples(st.floats(0, 20 * MINUTE), st.integers(0, 2)), max_size=60)


@pytest.mark.rule("OPS-3")
def test_what_never_grew_has_not_grown_lately() -> None:
    assert RollingTotals(2).growth(30, now=1e6) == [0, 0]


@pytest.mark.rule("OPS-3")
def test_totals_never_forget() -> None:
    rolling = RollingTotals(1)
    for minute in range(100):
        rolling.at(minute * MINUTE)[0] += 1

    assert list(rolling.totals) == [100]


@pytest.mark.rule("OPS-3")
def test_what_is_older_than_the_window_is_left_out() -> None:
    rolling = RollingTotals(1)
    rolling.at(0.0)[0] += 1
    rolling.at(10 * MINUTE)[0] += 1

    grown = [rolling.growth(30, now)[0] for now in (30 * MINUTE - 1, 30 * MINUTE, 40 * MINUTE)]

    assert grown == [2, 1, 0]


@pytest.mark.rule("OPS-3")
def test_reading_changes_nothing() -> None:
    rolling = RollingTotals(1)
    rolling.at(0.0)[0] += 1

    rolling.growth(30, now=1e6)

    assert rolling.growth(30, now=1.0) == [1]


@pytest.mark.rule("OPS-3")
@given(STEPS, st.sampled_from([1, 5, 30]), st.floats(0, 40 * MINUTE))
def test_a_window_holds_what_a_list_of_all_events_would_say(
    steps: Steps, minutes: int, pause: float
) -> None:
    rolling, now, events = RollingTotals(3), 0.0, []
    for wait, place in steps:
        now += wait
        rolling.at(now)[place] += 1
        events.append((now, place))
    now += pause

    grown = rolling.growth(minutes, now)

    recent = [place for at, place in events if now // MINUTE - at // MINUTE < minutes]
    assert grown == [recent.count(place) for place in range(3)]


@pytest.mark.rule("P4")
def test_however_long_it_counts_it_keeps_half_an_hour_of_notes() -> None:
    rolling = RollingTotals(1)
    for minute in range(1000):
        rolling.at(minute * MINUTE)[0] += 1

    assert len(rolling._notes) == LONG_MINUTES
