"""What waits on one connection comes out in the order in which it came in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.brokers.activemq.broker import PrefetchBuffer, StompMessage
from router.brokers.activemq.connection import Frame
from router.brokers.kit.consuming import NEVER
from router.brokers.kit.retries import RetryHistory


def arrival(place: int) -> StompMessage:
    return StompMessage(place, Frame("MESSAGE", {}), RetryHistory(str(place)))


def places(arrivals: list[StompMessage]) -> list[int]:
    return [each.place for each in arrivals]


@pytest.mark.rule("P3")
@given(st.lists(st.integers(0, 1000), unique=True), st.integers(0, 10))
def test_what_is_due_comes_in_the_order_of_arrival(put: list[int], limit: int) -> None:
    prefetched = PrefetchBuffer()
    for place in put:
        prefetched.put(arrival(place))

    first = places(prefetched.take(limit, now=0.0))
    rest = places(prefetched.take(len(put), now=0.0))

    assert first + rest == sorted(put)
    assert len(first) == min(limit, len(put))


@pytest.mark.rule("BRK-4")
@given(st.lists(st.floats(0, 100), max_size=20), st.floats(0, 100))
def test_nothing_comes_before_its_time_and_everything_at_it(until: list[float], now: float) -> None:
    prefetched = PrefetchBuffer()
    for place, due in enumerate(until):
        prefetched.hold_back(arrival(place), due)

    taken = places(prefetched.take(len(until), now))

    assert taken == [place for place, due in enumerate(until) if due <= now]
    assert prefetched.next_due() == min((due for due in until if due > now), default=NEVER)


@pytest.mark.rule("P3")
def test_what_was_put_back_goes_before_what_came_later() -> None:
    prefetched = PrefetchBuffer()
    for place in (1, 2, 3):
        prefetched.put(arrival(place))
    first, second = prefetched.take(2, now=0.0)
    prefetched.hold_back(second, until=0.0)
    prefetched.hold_back(first, until=0.0)

    assert places(prefetched.take(3, now=0.0)) == [1, 2, 3]
