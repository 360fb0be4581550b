"""Commands of a command bus as messages, and replies in its field names."""

import json

import pytest
from msgspec.structs import replace

from router.core.commands import reply_body
from router.core.config import QueueConfig, Route
from router.core.envelope import CommandReader, asker_of, id_of_unread, reader_of
from router.core.message import Malformed, Message, Origin, ReceivedMessage, Source, parse
from router.core.outcome import ACCEPTED, Ending, Failure

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
        ("Render", Route(target="process:render")),
        ("Mail", Route(target="handler:mail")),
    ),
    reply_names=(("payments__replies", "replies"),),
)
PING = {"command_id": "1", "command_type": "Ping"}


def read(command: object, queue: QueueConfig = QUEUE) -> Message:
    return CommandReader(queue).read(json.dumps(command).encode())


@pytest.mark.rule("CMD-7")
def test_a_command_becomes_a_message_for_the_target_of_its_type() -> None:
    message = read(
        {
            "command_id": COMMAND_ID,
            "command_type": "DebitAccount",
            "domain": "payments",
            "data": {"account_id": "A-1", "amount": 12.50},
            "correlation_id": "c-1",
            "reply_to": "Payments__Replies",
            "created_at": "2026-01-31T08:15:30Z",
            "metadata": {"ignored": True},
        }
    )

    assert (message.id, message.target) == (COMMAND_ID, "https://svc.example/debit")
    assert (message.pool, message.group, message.token) == ("PAYMENTS", "A-1", "tok")
    assert bytes(message.payload) == b'{"account_id": "A-1", "amount": 12.5}'
    assert (message.correlation_id, message.reply_to) == ("c-1", "replies")
    assert message.origin == Origin("DebitAccount", "payments", "2026-01-31T08:15:30Z")


@pytest.mark.rule("CMD-7")
def test_all_but_id_and_type_may_be_missing_or_null() -> None:
    for rest in ({}, {"data": None, "correlation_id": None, "reply_to": None}, {"reply_to": " "}):
        message = read({**PING, **rest})

        assert (message.id, message.target) == ("1", "https://svc.example/ping")
        assert (message.group, message.correlation_id, message.reply_to) == (None, None, None)
        assert not message.has_payload
        assert message.origin == Origin("Ping")


@pytest.mark.rule("CMD-7")
@pytest.mark.parametrize("odd", [7, None, ["a"], " ", "a\nb", "a" * 513])
def test_a_domain_or_a_time_that_makes_no_sense_counts_as_absent(odd: object) -> None:
    assert read({**PING, "domain": odd, "created_at": odd}).origin == Origin("Ping")


@pytest.mark.rule("CMD-7", "CMD-8")
def test_a_route_may_lead_to_a_process_or_a_handler() -> None:
    process = read({"command_id": "1", "command_type": "Render"})
    handler = read({"command_id": "1", "command_type": "Mail"})

    assert (process.target, process.is_process) == ("process:render", True)
    assert (handler.target, handler.is_process) == ("handler:mail", False)


@pytest.mark.rule("CMD-7", "CMD-9")
def test_in_the_library_a_command_without_a_route_is_for_the_handler_of_its_type() -> None:
    library = replace(QUEUE, has_handlers=True, routes=())

    assert read(PING, library).target == "handler:Ping"
    with pytest.raises(Malformed, match="no route for commands of type 'a b'"):
        read({**PING, "command_type": "a b"}, library)


@pytest.mark.rule("CMD-7", "BRK-2")
def test_a_command_without_its_type_is_told_what_it_needs() -> None:
    with pytest.raises(Malformed, match="a command needs a `command_type`; as a message: "):
        read({"command_id": "1", "data": {}})


@pytest.mark.rule("CMD-7")
def test_a_reply_queue_that_the_router_does_not_know_keeps_its_name() -> None:
    assert read({**PING, "reply_to": "elsewhere"}).reply_to == "beside:elsewhere"


@pytest.mark.rule("CMD-7", "CMD-3")
def test_where_databases_have_no_names_of_their_own_a_reply_queue_has_that_of_the_document() -> (
    None
):
    queue = replace(QUEUE, uri="sqs://commands", reply_names=None)

    assert read({**PING, "reply_to": "replies"}, queue).reply_to == "replies"


@pytest.mark.rule("CMD-7")
@pytest.mark.parametrize(
    ("group", "said"), [("A-1", "A-1"), (42, "42"), (None, None), (" ", None), ([1], None)]
)
def test_a_group_is_a_text_or_a_number_in_the_data(group: object, said: str | None) -> None:
    command = {"command_id": "1", "command_type": "DebitAccount", "data": {"account_id": group}}

    if said is None:
        with pytest.raises(Malformed, match="`data` has no field 'account_id' with the group"):
            read(command)
    else:
        assert read(command).group == said


@pytest.mark.rule("CMD-7")
@pytest.mark.parametrize(
    ("command", "why"),
    [
        ({"command_id": "1", "command_type": "Unheard"}, "no route for commands of type 'Unheard'"),
        ({"command_type": "Ping"}, "missing required field `command_id`"),
        (
            {"command_id": 1, "command_type": "Ping"},
            r"Expected `str`, got `int` - at `\$.command_id`",
        ),
        ({"command_id": "1", "command_type": ["Ping"]}, r"at `\$.command_type`"),
        ({"command_id": "1", "command_type": "DebitAccount"}, "no field 'account_id'"),
        ({"command_id": "1", "command_type": "DebitAccount", "data": 7}, "no field 'account_id'"),
        ({"command_id": "", "command_type": "Ping"}, r"length >= 1 - at `\$.id`"),
        (["command_type"], "Expected `object`, got `array`"),
    ],
)
def test_what_cannot_be_delivered_is_malformed_for_this_reason(command: object, why: str) -> None:
    with pytest.raises(Malformed, match=why):
        read(command)


@pytest.mark.rule("CMD-7")
@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b"not JSON",
        b'{"command_id": "\xff", "command_type": "Ping"}',
        b'{"command_type": null}',
        b'{"command_id": "\\ud800", "command_type": "Ping"}',
        b'{"command_id": "1", "command_type": "Ping", "data": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"command_id": "1", "command_type": "Ping", "data": "' + b"a" * 1024 * 1024 + b'"}',
        b'{"command_type": "Ping", "data": [1, 2,}',
    ],
)
def test_what_is_no_command_is_left_to_the_parser(body: bytes) -> None:
    with pytest.raises(Malformed) as expected:
        parse(body)
    with pytest.raises(Malformed) as raised:
        CommandReader(QUEUE).read(body)

    assert str(raised.value) == str(expected.value)


@pytest.mark.rule("CMD-7")
def test_a_plain_message_is_read_as_one() -> None:
    message = read({"id": "1", "mediationTarget": "http://s/", "headers": {"X-A": '"'}})

    assert (message.id, message.target, message.origin) == ("1", "http://s/", None)
    assert reader_of(replace(QUEUE, envelope=None)) is parse


@pytest.mark.rule("CMD-7")
@pytest.mark.parametrize(
    ("ending", "said"),
    [
        (Ending(result=b'{"a":[1]}'), {"outcome": "SUCCESS", "result": {"a": [1]}}),
        (Ending(result_omitted=True), {"outcome": "SUCCESS", "result_omitted": True}),
        (ACCEPTED, {"outcome": "SUCCESS"}),
        (
            Ending(Failure("HTTP_422", "no")),
            {"outcome": "FAILED", "error_code": "HTTP_422", "error_message": "no"},
        ),
    ],
)
def test_a_reply_has_the_field_names_of_the_command_bus(ending: Ending, said: object) -> None:
    message = read({**PING, "correlation_id": "c"})

    assert json.loads(reply_body(message, ending)) == {
        "command_id": "1",
        "correlation_id": "c",
        **said,  # type: ignore[dict-item]
    }


@pytest.mark.rule("CMD-3", "CMD-7")
@pytest.mark.parametrize(
    ("command", "asker"),
    [
        ({**PING, "reply_to": "payments__replies", "correlation_id": "c"}, ("1", "replies", "c")),
        ({**PING, "reply_to": "elsewhere", "correlation_id": 7}, ("1", "beside:elsewhere", None)),
        (PING, None),
        ({"command_type": "Ping", "reply_to": "payments__replies"}, None),
        ({"command_id": 7, "reply_to": "e", "correlation_id": "c"}, ("", "beside:e", "c")),
        ({"reply_to": "e", "correlation_id": "c"}, ("", "beside:e", "c")),
        ("nothing", None),
        ({**PING, "command_type": 7, "reply_to": "payments__replies"}, ("1", "replies", None)),
    ],
)
def test_who_waits_for_a_command_that_makes_no_message(command: object, asker: object) -> None:
    found = asker_of(QUEUE, json.dumps(command).encode())

    assert (found and (found.id, found.reply_to, found.correlation_id)) == asker
    assert found is None or found.origin is not None


@pytest.mark.rule("CMD-3")
@pytest.mark.parametrize(
    ("body", "asker"),
    [
        (b'{"id": "a", "replyTo": "r", "correlationId": "c"}', ("a", "r", "c")),
        (b'{"id": "a", "replyTo": "r", "correlationId": "\xff"}', ("a", "r", None)),
        (b'{"id": "a"}', None),
        (b'{"id": "", "replyTo": "r"}', None),
        (b'{"id": 7, "replyTo": "r", "correlationId": "c"}', ("", "r", "c")),
        (b'{"id": "a", "replyTo": "r", "data": ' + b"[" * 100 + b"]" * 100 + b"}", None),
        (b'{"id": "a", "replyTo": "r", "data": "' + b"a" * 1024 * 1024 + b'"}', None),
        (b"nothing", None),
    ],
)
def test_who_waits_for_a_malformed_message(body: bytes, asker: object) -> None:
    found = asker_of(replace(QUEUE, envelope=None), body)

    assert (found and (found.id, found.reply_to, found.correlation_id)) == asker
    assert found is None or found.origin is None


@pytest.mark.rule("BRK-2", "CMD-7")
@pytest.mark.parametrize(
    ("body", "known"),
    [
        (b'{"command_id": "c", "command_type": 7, "id": "a"}', "c"),
        (b'{"command_type": "Unheard", "id": "a"}', "a"),
        (b'{"command_id": "c", "data": {}}', "c"),
        (b'{"command_id": "c\\n", "command_type": "Unheard"}', None),
        (b'{"id": "a", "mediationTarget": 7}', "a"),
        (b"nothing", None),
    ],
)
def test_a_command_that_makes_no_message_may_have_an_id(body: bytes, known: str | None) -> None:
    received = ReceivedMessage(body, "h", None)

    assert id_of_unread(QUEUE, received) == known
    assert id_of_unread(QUEUE, replace(received, source=Source())) is None
