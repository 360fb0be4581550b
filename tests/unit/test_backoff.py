from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.config import RetryPolicy
from router.core.returning import reconnect_delays, retry_delay


def longest(_low: float, high: float) -> float:
    return high


def shortest(low: float, _high: float) -> float:
    return low


@pytest.mark.rule("BRK-6")
def test_reconnects_double_up_to_thirty_seconds() -> None:
    delays = list(islice(reconnect_delays(longest), 9))

    assert delays == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]


@pytest.mark.rule("BRK-6", "WQ-5")
def test_full_jitter_begins_at_zero() -> None:
    assert next(reconnect_delays(shortest)) == 0
    assert retry_delay(RetryPolicy(), 5, shortest) == 0


@pytest.mark.rule("WQ-5")
def test_an_exponential_policy_starts_with_half_a_second_for_the_first_retry() -> None:
    delays = [retry_delay(RetryPolicy(), failures, longest) for failures in range(1, 9)]

    assert delays == [0.5, 1, 2, 4, 8, 16, 30, 30]


@pytest.mark.rule("WQ-5")
def test_a_schedule_is_followed_and_its_last_value_repeats() -> None:
    policy = RetryPolicy(schedule=(10.0, 60.0, 300.0))

    delays = [retry_delay(policy, failures, longest) for failures in range(1, 6)]

    assert delays == [10, 60, 300, 300, 300]


@pytest.mark.rule("WQ-5")
def test_an_empty_schedule_means_thirty_seconds() -> None:
    assert retry_delay(RetryPolicy(schedule=()), 1, longest) == 30


@pytest.mark.rule("WQ-5", "BRK-6")
@given(failures=st.integers(1, 10**9), share=st.floats(0, 1))
def test_no_retry_is_ever_more_than_thirty_seconds_away(failures: int, share: float) -> None:
    delay = retry_delay(RetryPolicy(), failures, lambda low, high: low + share * (high - low))

    assert 0 <= delay <= 30
