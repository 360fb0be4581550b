"""Durations in buckets: cheap to count, good enough to judge by."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.stats import (
    BOUNDS_SECONDS,
    BUCKETS,
    SHOWN_BOUNDS_SECONDS,
    bucket_of,
    cumulative,
    quantile,
)

DURATIONS = st.lists(st.floats(0, 1000), min_size=1, max_size=200)


def counted(durations: list[float]) -> list[int]:
    counts = [0] * BUCKETS
    for seconds in durations:
        counts[bucket_of(seconds)] += 1
    return counts


@pytest.mark.rule("OPS-3")
def test_bounds_rise_evenly_from_a_millisecond_to_beyond_the_longest_time_out() -> None:
    steps = [after / before for before, after in pairwise(BOUNDS_SECONDS)]

    assert (BOUNDS_SECONDS[0], BOUNDS_SECONDS[-1]) == (0.001, 1000.0)
    assert all(1.3 < step < 1.7 for step in steps)


@pytest.mark.rule("OPS-3")
@pytest.mark.parametrize(
    ("seconds", "bucket"), [(0.0, 0), (0.001, 0), (0.0011, 1), (1000.0, 36), (1000.1, 37)]
)
def test_a_bucket_includes_its_upper_bound(seconds: float, bucket: int) -> None:
    assert bucket_of(seconds) == bucket


@pytest.mark.rule("OPS-3")
def test_without_durations_a_quantile_is_zero() -> None:
    assert quantile([0] * BUCKETS, 0.99) == 0.0


@pytest.mark.rule("OPS-3")
def test_what_is_beyond_the_last_bound_counts_as_it() -> None:
    assert quantile(counted([5000.0]), 0.5) == 1000.0


@pytest.mark.rule("OPS-3")
@given(DURATIONS, st.sampled_from([0.5, 0.95, 0.99]))
def test_a_quantile_lies_in_the_bucket_of_the_true_one(
    durations: list[float], share: float
) -> None:
    found = quantile(counted(durations), share)

    true = sorted(durations)[max(math.ceil(len(durations) * share) - 1, 0)]
    assert bucket_of(true) == bucket_of(found)


@pytest.mark.rule("OPS-3")
@given(DURATIONS)
def test_the_shown_bounds_count_all_that_took_no_longer(durations: list[float]) -> None:
    shown = cumulative(counted(durations))

    assert shown == [
        (bound, sum(seconds <= bound for seconds in durations)) for bound in SHOWN_BOUNDS_SECONDS
    ]
