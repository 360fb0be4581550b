"""What waits on one connection comes out in the order in which it came in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.brokers.activemq_frames import Frame
from router.brokers.activemq_retry import History
from router.brokers.activemq_shelf import NEVER, Arrival, Shelf

pytestmark = pytest.mark.rule("P3", "BRK-4")


def arrival(place: int) -> Arrival:
    return Arrival(place, Frame("MESSAGE", {}), History(str(place)))


def places(arrivals: list[Arrival]) -> list[int]:
    return [each.place for each in arrivals]


@given(st.lists(st.integers(0, 1000), unique=True), st.integers(0, 10))
def test_what_is_due_comes_in_the_order_of_arrival(put: list[int], limit: int) -> None:
    shelf = Shelf()
    for place in put:
        shelf.put(arrival(place))

    first = places(shelf.take(limit, now=0.0))
    rest = places(shelf.take(len(put), now=0.0))

    assert first + rest == sorted(put)
    assert len(first) == min(limit, len(put))


@given(st.lists(st.floats(0, 100), max_size=20), st.floats(0, 100))
def test_nothing_comes_before_its_time_and_everything_at_it(until: list[float], now: float) -> None:
    shelf = Shelf()
    for place, due in enumerate(until):
        shelf.put_off(arrival(place), due)

    taken = places(shelf.take(len(until), now))

    assert taken == [place for place, due in enumerate(until) if due <= now]
    assert shelf.next_due == min((due for due in until if due > now), default=NEVER)


def test_what_was_put_back_goes_before_what_came_later() -> None:
    shelf = Shelf()
    for place in (1, 2, 3):
        shelf.put(arrival(place))
    first, second = shelf.take(2, now=0.0)
    shelf.put_off(second, until=0.0)
    shelf.put_off(first, until=0.0)

    assert places(shelf.take(3, now=0.0)) == [1, 2, 3]
