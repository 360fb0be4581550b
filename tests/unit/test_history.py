import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.history import Fate, HandOver, PastWait, Try, WaitReason, past_waits
from router.core.identity import MessageKey

KEY = MessageKey("q", "a", "digest")
DELIVERED = HandOver(
    message_id="a",
    key=MessageKey("q", "7"),
    queue="q",
    pool="P",
    group="g",
    target="http://t.test/",
    received_at=10.0,
    tries=(Try(12.0, 1.0, 503, "HttpError"), Try(14.0, 0.5, 200)),
    ended_at=15.0,
    fate=Fate.DELIVERED,
)
RETURNED = HandOver("a", KEY, "q", "P", "g", "t", 10.0, (), 11.0, Fate.RETURNED, returned_for=30.0)


@pytest.mark.rule("OPS-5")
def test_the_waits_of_a_hand_over_are_the_times_in_which_nothing_was_sent() -> None:
    found = list(past_waits(DELIVERED.received_at, DELIVERED.tries, DELIVERED.ended_at))

    assert found == [
        PastWait(WaitReason.QUEUED, 10.0, 12.0),
        PastWait(WaitReason.RETRY, 13.0, 14.0),
        PastWait(WaitReason.SETTLE, 14.5, 15.0),
    ]


@pytest.mark.rule("OPS-5")
def test_what_was_never_sent_waited_all_the_time() -> None:
    assert list(past_waits(10.0, (), 11.0)) == [PastWait(WaitReason.QUEUED, 10.0, 11.0)]
    assert list(past_waits(10.0, (), None)) == [PastWait(WaitReason.QUEUED, 10.0, None)]


@pytest.mark.rule("OPS-5")
def test_an_open_request_is_no_wait() -> None:
    found = list(past_waits(10.0, (Try(12.0, None),), None))

    assert found == [PastWait(WaitReason.QUEUED, 10.0, 12.0)]


@pytest.mark.rule("OPS-5")
def test_only_a_returned_message_is_due_again() -> None:
    assert DELIVERED.due_at is None
    assert RETURNED.due_at == 41.0


@pytest.mark.rule("OPS-5")
@given(st.floats(-1e9, 1e9))
def test_another_clock_changes_no_duration(seconds: float) -> None:
    moved = DELIVERED.moved(seconds)

    assert moved.ended_at - moved.received_at == pytest.approx(5.0, abs=1e-6)
    assert moved.tries[0].started_at - moved.received_at == pytest.approx(2.0, abs=1e-6)
    assert [each.seconds for each in moved.tries] == [1.0, 0.5]
