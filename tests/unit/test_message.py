"""What is a message, and what is none (CONTRACTS §4)."""

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.message import MAX_BODY, Malformed, Mode, parse
from router.engine.courier import longest_delivery

pytestmark = pytest.mark.rule("BRK-2")

TARGET = "http://svc/hook"


def body(**fields: object) -> bytes:
    return json.dumps({"id": "a", "mediationTarget": TARGET, **fields}).encode()


def test_the_smallest_message_needs_an_id_and_a_target() -> None:
    message = parse(body())

    assert (message.id, message.target) == ("a", TARGET)
    assert (message.pool, message.group, message.token) == (None, None, None)
    assert message.mode is Mode.BLOCK_ON_ERROR
    assert not message.high_priority


def test_null_and_blank_mean_absent_and_unknown_keys_are_ignored() -> None:
    message = parse(body(poolCode=" ", messageGroupId=None, highPriority=None, somethingElse=[1]))

    assert (message.pool, message.group, message.high_priority) == (None, None, None)


@pytest.mark.rule("POOL-7")
def test_an_unknown_dispatch_mode_counts_as_absent_and_is_noticed() -> None:
    message = parse(body(dispatchMode="LATER"))

    assert message.mode is Mode.BLOCK_ON_ERROR
    assert message.has_unknown_mode


@pytest.mark.parametrize(
    "broken",
    [
        b"",
        b"nonsense",
        b"[]",
        b'"text"',
        b"null",
        b'{"id": "a"}',
        b'{"mediationTarget": "http://svc/"}',
        body(id=""),
        body(id=1),
        body(id="x" * 513),
        body(id="a\nb"),
        body(id="a\x7fb"),
        body(mediationTarget=""),
        body(mediationTarget="svc/hook"),
        body(mediationTarget="http://svc/ a"),
        body(mediationTarget="http://svc/\r\nHost: evil"),
        body(mediationTarget="http://svc/" + "x" * 4096),
        body(authToken="tok\r\nX-Evil: 1"),
        body(authToken="törn"),
        body(authToken="x" * (16 * 1024 + 1)),
        body(poolCode=7),
        body(poolCode="x" * 513),
        body(messageGroupId=["g"]),
        body(mediationType="SMTP"),
        body(highPriority="yes"),
        body(dispatchMode=1),
        body(signingSecret=1),
        b'{"id": "\xff", "mediationTarget": "http://svc/"}',
        b'{"id": "a", "mediationTarget": "http://svc/", "other": "\xff"}',
        b'{"id": "\\ud800", "mediationTarget": "http://svc/"}',
        body(deep=json.loads("[" * 64 + "]" * 64)),
        body(long="x" * MAX_BODY),
    ],
)
def test_what_is_no_message_is_malformed(broken: bytes) -> None:
    with pytest.raises(Malformed):
        parse(broken)


def test_brackets_in_strings_are_no_nesting() -> None:
    assert parse(body(text="[" * 100, list=[[]] * 40)).id == "a"


def test_a_message_is_shown_without_its_token_and_secret() -> None:
    shown = repr(parse(body(authToken="hunter2", signingSecret="hunter3")))

    assert "hunter" not in shown
    assert "'a'" in shown


@given(st.binary(max_size=200))
def test_no_bytes_do_worse_than_being_malformed(noise: bytes) -> None:
    with suppress(Malformed):
        assert parse(noise).id


@pytest.mark.rule("MED-2")
def test_the_longest_delivery_is_three_tries_and_the_pauses_between() -> None:
    assert longest_delivery(10) == 33
