"""When two hand-overs are the same message."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.identity import (
    MessageKey,
    dedup_key_of,
    digest_of,
    key_of,
    proof_of_copy,
    shown_id,
)
from router.core.message import ReceivedMessage


def delivered(
    body: bytes, broker_id: str | None = None, claimed_id: str | None = None
) -> ReceivedMessage:
    return ReceivedMessage(body, object(), broker_id, claimed_id=claimed_id)


@pytest.mark.rule("ID-1")
def test_an_id_made_by_the_broker_is_the_key_whatever_others_call_the_message() -> None:
    assert key_of("q", delivered(b"a", "1", "theirs"), "app") == MessageKey("q", "1")


@pytest.mark.rule("ID-1")
@pytest.mark.parametrize(("claimed", "expected"), [("theirs", "theirs"), (None, "app")])
def test_without_one_the_body_is_part_of_the_key(claimed: str | None, expected: str) -> None:
    key = key_of("q", delivered(b"a", None, claimed), "app")

    assert key == MessageKey("q", expected, digest_of(b"a"))
    assert key != key_of("q", delivered(b"b", None, claimed), "app")


@pytest.mark.rule("ID-1")
def test_the_digest_is_blake2b_of_16_bytes() -> None:
    assert digest_of(b"") == "cae66941d9efbd404e4d88758ea67670"


@pytest.mark.rule("BRK-3", "ID-3")
def test_only_an_id_of_the_broker_proves_that_a_delivery_is_that_very_copy() -> None:
    assert proof_of_copy("q", delivered(b"a", None, "theirs")) is None
    proofs = {
        proof_of_copy(queue, delivered(body, broker_id))
        for queue in "qr"
        for body in (b"a", b"b")
        for broker_id in "12"
    }
    assert len(proofs) == 8


@pytest.mark.rule("DLQ-1", "ID-2")
@given(st.lists(st.tuples(st.text(), st.text(), st.binary()), min_size=2, max_size=2, unique=True))
def test_the_fingerprints_of_different_messages_differ(
    messages: list[tuple[str, str, bytes]],
) -> None:
    first, second = [MessageKey(queue, id_).fingerprint(body) for queue, id_, body in messages]

    assert first != second


@pytest.mark.rule("ID-3")
def test_a_fingerprint_tells_where_an_id_ends_and_the_body_begins() -> None:
    messages = [("q", "12", b"3"), ("q", "1", b"23"), ("q1", "2", b"3"), ("q", "", b"123")]

    assert len({MessageKey(queue, id_).fingerprint(body) for queue, id_, body in messages}) == 4


@pytest.mark.rule("WQ-1")
def test_a_publication_is_the_same_by_its_explicit_key_or_by_id_and_body() -> None:
    keys = [
        dedup_key_of("k", "a", b"1"),
        dedup_key_of("k", "b", b"2"),
        dedup_key_of(None, "a", b"1"),
        dedup_key_of(None, "a", b"2"),
        dedup_key_of(None, "b", b"1"),
        dedup_key_of(dedup_key_of(None, "a", b"1"), "a", b"1"),
    ]

    assert keys[0] == keys[1]
    assert len(set(keys)) == 5


@pytest.mark.rule("ID-1")
def test_people_are_shown_the_id_that_a_message_has_at_its_broker() -> None:
    assert shown_id(MessageKey("q", "1"), "app") == "1"
    assert shown_id(MessageKey("q", "theirs", "d"), "app") == "theirs"
    assert shown_id(MessageKey("q", "app", "d"), "app") is None


@pytest.mark.rule("ID-1", "OPS-3")
@pytest.mark.parametrize(
    ("key", "shown"),
    [
        (MessageKey("q", "a"), "a"),  # the broker's own, even if it looks like the publisher's
        (MessageKey("q", "b", "digest"), "b"),
        (MessageKey("q", "a", "digest"), None),
    ],
)
def test_an_id_is_shown_as_the_brokers_unless_it_is_only_the_publishers(
    key: MessageKey, shown: str | None
) -> None:
    assert shown_id(key, "a") == shown
