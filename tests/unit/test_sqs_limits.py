"""What is said to SQS, and what it allows: how long a message may be hidden, what fits a call."""

from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.brokers.sqs.broker import (
    HELD_LEASE_SECONDS,
    MAX_HOLD_SECONDS,
    Receipt,
    SqsBroker,
    SqsQueue,
    received_message,
    releases,
)
from router.brokers.sqs.client import (
    MAX_ENTRIES,
    RECEIVE_MESSAGE,
    SendEntry,
    SqsClient,
    SqsMessage,
    SystemAttributes,
    answer_of,
)
from router.brokers.sqs.publisher import MAX_BYTES, batches, plain, send_entry
from router.core.message import Message
from router.ports import Disconnected, Publication

AGES = st.floats(0, 50_000)
DELAYS = st.floats(0, 43_200)


def publication(size: int) -> Publication:
    return Publication(Message(id="a", target="https://svc.example/"), b"x" * size, "a")


@pytest.mark.rule("BRK-4", "BRK-5")
@given(age=AGES, delay=DELAYS)
def test_a_delay_is_as_long_as_asked_and_never_longer_than_allowed(
    age: float, delay: float
) -> None:
    hidden = Receipt("handle", 0.0, 0.0).hidden_for(delay, age)

    assert 0 <= hidden <= max(MAX_HOLD_SECONDS - age, 0)
    assert hidden >= min(delay, MAX_HOLD_SECONDS - age - 1)
    assert hidden <= delay + 1


@pytest.mark.rule("BRK-5")
@given(age=AGES, seconds=st.integers(1, 43_200))
def test_an_extension_is_allowed_within_twelve_hours_of_the_receive(
    age: float, seconds: int
) -> None:
    assert Receipt("handle", 0.0, 0.0).may_last(seconds, age) == (age + seconds <= MAX_HOLD_SECONDS)


@pytest.mark.rule("BRK-3")
def test_ten_acks_fill_a_call_and_wait_for_no_others() -> None:
    queue = SqsQueue("https://sqs/1/q", is_fifo=False, lease=30, most=10, wait=20)
    broker = SqsBroker(queue, cast("SqsClient", None), cast("SqsClient", None))

    assert broker.traits.acks_per_call == MAX_ENTRIES == 10


@pytest.mark.rule("ROUTE-5", "BRK-5")
@pytest.mark.parametrize("counts_receives", [True, False])
def test_messages_are_deferred_or_held_for_long_by_whether_a_redrive_policy_counts_receives(
    *, counts_receives: bool
) -> None:
    queue = SqsQueue("https://sqs/1/q", False, 30, 10, 20, counts_receives)
    broker = SqsBroker(queue, cast("SqsClient", None), cast("SqsClient", None))

    assert broker.traits.defers is not counts_receives
    assert broker.traits.held_lease_seconds == (HELD_LEASE_SECONDS if counts_receives else None)


@pytest.mark.rule("BRK-3")
@given(sizes=st.lists(st.integers(0, MAX_BYTES * 2), max_size=40))
def test_calls_are_full_but_not_too_full_and_in_order(sizes: list[int]) -> None:
    items = [publication(size) for size in sizes]

    split = list(batches(items))

    assert [item for batch in split for item in batch] == items
    for batch in split:
        assert 1 <= len(batch) <= MAX_ENTRIES
        assert len(batch) == 1 or sum(len(item.body) for item in batch) <= MAX_BYTES


@pytest.mark.rule("WQ-1")
@given(one=st.text(min_size=1, max_size=600), other=st.text(min_size=1, max_size=600))
def test_a_name_that_sqs_refuses_becomes_one_that_it_takes_and_stays_its_own(
    one: str, other: str
) -> None:
    names = plain(one), plain(other)

    assert all(name.isascii() and name.isprintable() and " " not in name for name in names)
    assert all(1 <= len(name) <= 128 for name in names)
    assert (names[0] == names[1]) == (one == other)


@pytest.mark.rule("BRK-3")
def test_a_plain_name_stays_as_it_is() -> None:
    assert plain("order-12345") == "order-12345"


@pytest.mark.rule("OPS-4", "P3")
def test_what_a_last_poll_brought_is_released_from_its_end() -> None:
    entries = releases([SqsMessage(name, f"handle of {name}") for name in "abc"])

    assert [entry.receipt_handle[-1] for entry in entries] == ["c", "b", "a"]
    assert {entry.visibility_timeout for entry in entries} == {0}
    assert len({entry.id for entry in entries}) == 3


@pytest.mark.rule("P3", "WQ-1")
@pytest.mark.parametrize(
    ("group", "is_fifo", "entry"),
    [
        ("g", True, SendEntry("0", "text", "g", "key")),
        (None, True, SendEntry("0", "text", "a", "key")),
        ("two words", True, SendEntry("0", "text", plain("two words"), "key")),
        ("g", False, SendEntry("0", "text")),
    ],
)
def test_a_message_is_sent_with_its_group_where_the_queue_has_groups(
    group: str | None, entry: SendEntry, *, is_fifo: bool
) -> None:
    message = Message(id="a", target="https://svc.example/", group=group)

    assert send_entry(0, Publication(message, b"text", "key"), is_fifo=is_fifo, now=0.0) == entry


@pytest.mark.rule("CMD-5")
@pytest.mark.parametrize(
    ("not_before", "is_fifo", "delay"),
    [
        (None, False, None),
        (99.0, False, None),
        (100.5, False, 1),
        (1000.0, False, 900),
        (9999.0, False, 900),
        (110.0, True, None),
    ],
)
def test_a_standard_queue_holds_a_new_message_back_for_15_minutes_at_most(
    not_before: float | None, delay: int | None, *, is_fifo: bool
) -> None:
    message = Message(id="a", target="https://svc.example/")
    item = Publication(message, b"text", "key", not_before)

    assert send_entry(0, item, is_fifo=is_fifo, now=100.0).delay_seconds == delay


@pytest.mark.rule("BRK-6")
@pytest.mark.parametrize(
    "body",
    [b"<html>", b'{"message": "\xff", "Messages": "\xff"}', b'{"Messages": ' + b"[" * 5000],
)
@pytest.mark.parametrize("status", [200, 503])
def test_an_answer_that_is_not_of_sqs_is_a_lost_connection(status: int, body: bytes) -> None:
    with pytest.raises(Disconnected, match="as SQS does"):
        answer_of(RECEIVE_MESSAGE, status, body)


@pytest.mark.rule("BRK-2")
@pytest.mark.parametrize(("said", "count"), [("2", 2), ("", None), ("x", None), ("9" * 5000, None)])
def test_a_count_that_cannot_be_is_no_count(said: str, count: int | None) -> None:
    message = SqsMessage("id", "receipt", "{}", SystemAttributes(said))

    assert received_message(message, 0.0, 30.0).receive_count == count
