"""Commands of a command bus as messages, and replies in its field names."""

import json

import pytest

from router.brokers.pgmq.envelope import Envelope, command_reply
from router.core.config import QueueConfig, Route
from router.core.message import parse

COMMAND_ID = "7f8d9e0a-1b2c-4d5e-8f90-a1b2c3d4e5f6"
QUEUE = QueueConfig(
    name="payments",
    uri="pgmq://h/app?queue=payments__commands",
    envelope="command-bus",
    routes=(
        (
            "DebitAccount",
            Route(
                target="https://svc.example/debit",
                pool="PAYMENTS",
                group_field="account_id",
                token="tok",
            ),
        ),
        ("Ping", Route(target="https://svc.example/ping")),
    ),
    reply_names=(("payments__replies", "replies"),),
)


def opened(command: object) -> tuple[bytes, str | None]:
    return Envelope(QUEUE).open(json.dumps(command).encode())


@pytest.mark.rule("CMD-7")
def test_a_command_becomes_a_message_for_the_target_of_its_type() -> None:
    body, flaw = opened(
        {
            "command_id": COMMAND_ID,
            "command_type": "DebitAccount",
            "domain": "payments",
            "data": {"account_id": "A-1", "amount": 12.50},
            "correlation_id": "c-1",
            "reply_to": "Payments__Replies",
            "metadata": {"ignored": True},
        }
    )

    message = parse(body)
    assert flaw is None
    assert (message.id, message.target) == (COMMAND_ID, "https://svc.example/debit")
    assert (message.pool, message.group, message.token) == ("PAYMENTS", "A-1", "tok")
    assert bytes(message.payload) == b'{"account_id": "A-1", "amount": 12.5}'
    assert (message.correlation_id, message.reply_to) == ("c-1", "replies")


@pytest.mark.rule("CMD-7")
def test_all_but_id_and_type_may_be_missing_or_null() -> None:
    for rest in ({}, {"data": None, "correlation_id": None, "reply_to": None}, {"reply_to": " "}):
        body, flaw = opened({"command_id": "1", "command_type": "Ping", **rest})

        assert flaw is None
        assert json.loads(body) == {"id": "1", "mediationTarget": "https://svc.example/ping"}


@pytest.mark.rule("CMD-7")
def test_a_reply_queue_that_the_router_does_not_know_keeps_its_name() -> None:
    body, _ = opened({"command_id": "1", "command_type": "Ping", "reply_to": "elsewhere"})

    assert parse(body).reply_to == "pgmq:elsewhere"


@pytest.mark.rule("CMD-7")
@pytest.mark.parametrize(
    ("group", "said"), [("A-1", "A-1"), (42, "42"), (None, None), (" ", None), ([1], None)]
)
def test_a_group_is_a_text_or_a_number_in_the_data(group: object, said: str | None) -> None:
    command = {"command_id": "1", "command_type": "DebitAccount", "data": {"account_id": group}}

    body, flaw = opened(command)

    if said is None:
        assert flaw == "`data` has no field 'account_id' with the group"
        assert json.loads(body) == command
    else:
        assert parse(body).group == said


@pytest.mark.rule("CMD-7")
@pytest.mark.parametrize(
    ("command", "why"),
    [
        ({"command_id": "1", "command_type": "Unheard"}, "no route for commands of type 'Unheard'"),
        ({"command_type": "Ping"}, "missing required field `command_id`"),
        (
            {"command_id": 1, "command_type": "Ping"},
            "Expected `str`, got `int` - at `$.command_id`",
        ),
        ({"command_id": "1", "command_type": ["Ping"]}, "at `$.command_type`"),
        ({"command_id": "1", "command_type": "DebitAccount"}, "no field 'account_id'"),
        ({"command_id": "1", "command_type": "DebitAccount", "data": 7}, "no field 'account_id'"),
        (["Ping"], "Expected `object`, got `array`"),
    ],
)
def test_what_cannot_be_delivered_stays_as_it_is_with_the_reason(command: object, why: str) -> None:
    body, flaw = opened(command)

    assert json.loads(body) == command
    assert flaw is not None
    assert why in flaw


@pytest.mark.rule("CMD-7")
@pytest.mark.parametrize(
    "body",
    [
        b'{"id": "1", "mediationTarget": "http://s/"}',
        b"{}",
        b"not JSON",
        b'{"command_id": "\xff", "command_type": "Ping"}',
        b'{"command_id": "1", "command_type": "Ping", "data": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
)
def test_what_is_no_command_is_left_to_the_parser(body: bytes) -> None:
    assert Envelope(QUEUE).open(body) == (body, None)


@pytest.mark.rule("CMD-7")
@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (
            {"messageId": "1", "correlationId": "c", "outcome": "SUCCESS", "result": {"a": [1]}},
            {"command_id": "1", "correlation_id": "c", "outcome": "SUCCESS", "result": {"a": [1]}},
        ),
        (
            {"messageId": "1", "outcome": "SUCCESS", "resultOmitted": True},
            {"command_id": "1", "outcome": "SUCCESS", "result_omitted": True},
        ),
        (
            {"messageId": "1", "outcome": "FAILED", "errorCode": "HTTP_422", "errorMessage": "no"},
            {
                "command_id": "1",
                "outcome": "FAILED",
                "error_code": "HTTP_422",
                "error_message": "no",
            },
        ),
        ({"id": "1", "mediationTarget": "http://s/"}, {"id": "1", "mediationTarget": "http://s/"}),
    ],
)
def test_a_reply_has_the_field_names_of_the_command_bus(reply: object, said: object) -> None:
    assert json.loads(command_reply(json.dumps(reply).encode())) == said


@pytest.mark.rule("CMD-7")
@pytest.mark.parametrize("body", [b'{"messageId": "\xff", "outcome": "x"}', b'{"a":' * 5000])
def test_what_is_no_reply_stays_as_it_is(body: bytes) -> None:
    assert command_reply(body) == body
