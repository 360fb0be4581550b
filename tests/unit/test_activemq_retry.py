"""A copy is the same message still: what it carries along, and what it leaves behind."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.brokers.activemq.connection import Frame
from router.brokers.activemq.retry import copy_of, history_of
from router.brokers.kit.retries import RetryHistory
from router.core.message import Tally
from router.core.returning import MAX_DELAY_SECONDS

DESTINATION = "/queue/orders"
counts = st.integers(0, 10**6)
histories = st.builds(
    RetryHistory,
    first_id=st.text(min_size=1),
    tally=st.builds(Tally, counts, counts),
    receive_count=counts,
    due_at=st.integers(0, 10**12).map(lambda milliseconds: milliseconds / 1000),
)


def handed_out(copy: Frame) -> Frame:
    """As the broker hands it out: under an id of its own."""
    return Frame("MESSAGE", {**copy.headers, "message-id": "ID:2", "ack": "9"}, copy.body)


@pytest.mark.rule("WQ-5")
@given(histories)
def test_a_copy_tells_all_that_its_original_went_through(history: RetryHistory) -> None:
    original = Frame("MESSAGE", {"message-id": "ID:1", "ack": "1"}, b"{}")

    copy = copy_of(original, history, DESTINATION, 30.0)
    second = copy_of(handed_out(copy), history, DESTINATION, 30.0)

    assert history_of(handed_out(copy)) == history
    assert second == copy


@pytest.mark.rule("ID-1")
def test_a_first_delivery_is_known_by_the_id_that_the_broker_gave_it() -> None:
    first = history_of(Frame("MESSAGE", {"message-id": "ID:1"}))
    returned = history_of(Frame("MESSAGE", {"message-id": "ID:1", "redelivered": "true"}))

    assert first == RetryHistory("ID:1")
    assert returned == RetryHistory("ID:1", receive_count=1)


@pytest.mark.rule("BRK-4")
def test_what_the_broker_wrote_on_the_original_is_left_behind() -> None:
    original = Frame(
        "MESSAGE",
        {
            "message-id": "ID:1",
            "ack": "1",
            "subscription": "queue",
            "expires": "5",
            "timestamp": "5",
            "redelivered": "true",
            "scheduledJobId": "7",
            "AMQ_SCHEDULED_REPEAT": "9",
            "content-length": "2",
            "colour": "blue",
        },
        b"{}",
    )

    copy = copy_of(original, RetryHistory("ID:1", due_at=60.0), DESTINATION, 30.0)

    assert copy.headers == {
        "colour": "blue",
        "persistent": "true",
        "content-length": "2",
        "destination": "/queue/orders",
        "AMQ_SCHEDULED_DELAY": "30000",
        "x-message-router-id": "ID:1",
        "x-message-router-attempts": "0",
        "x-message-router-posts": "0",
        "x-message-router-deliveries": "0",
        "x-message-router-not-before": "60000",
    }


@pytest.mark.rule("FIFO-1")
@pytest.mark.parametrize(
    ("body", "headers", "group"),
    [
        (b'{"messageGroupId": "g"}', {}, "g"),
        (b'{"messageGroupId": "g"}', {"JMSXGroupID": "told"}, "told"),
        (b'{"messageGroupId": null}', {}, None),
        (b'{"messageGroupId": 7}', {}, None),
        (b"\xff not json", {}, None),
    ],
)
def test_the_group_of_a_copy_is_that_of_its_message(
    body: bytes, headers: dict[str, str], group: str | None
) -> None:
    copy = copy_of(Frame("MESSAGE", headers, body), RetryHistory("ID:1"), DESTINATION, 1.0)

    assert copy.headers.get("JMSXGroupID") == group


@pytest.mark.rule("P5")
@pytest.mark.parametrize("told", ["", "-1", "many", "½", "9" * 400])
def test_whatever_others_write_into_our_headers_is_survived(told: str) -> None:
    headers = {
        "message-id": "ID:1",
        "x-message-router-not-before": told,
        "x-message-router-attempts": told,
    }

    assert history_of(Frame("MESSAGE", headers)) == RetryHistory("ID:1")


@pytest.mark.rule("BRK-4")
@pytest.mark.parametrize(
    ("due_at", "wait"),
    [
        (0.0, 0.0),
        (99.0, 0.0),
        (100.5, 0.5),
        (100.0 + MAX_DELAY_SECONDS, MAX_DELAY_SECONDS),
        (10**9, 0.0),
    ],
)
def test_only_a_time_that_we_could_have_set_is_waited_for(due_at: float, wait: float) -> None:
    assert RetryHistory("ID:1", due_at=due_at).wait(now=100.0) == wait
