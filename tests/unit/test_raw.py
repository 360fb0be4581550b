"""Raw queues: what a route makes of a message (RAW-1 to RAW-4)."""

from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from router.brokers.rabbitmq.foreign import properties_of
from router.core.config import QueueConfig, RoutingConfig
from router.core.config_document import as_document, read_document
from router.core.identity import digest_of, key_of
from router.core.message import MAX_MESSAGE_BYTES, Malformed, ReceivedMessage, Source
from router.core.raw import (
    Attribute,
    BadPointer,
    BrokerFact,
    Fact,
    Pointer,
    RawRoute,
    letter_body,
    letter_source,
    opened,
    read_raw,
    stored_body,
)
from tests.support.queues import names

EMBEDDED = names("EMBEDDED", "/state dir")

TARGET = "https://svc.example/hook"
ROUTE = RawRoute(target=TARGET)


def received(body: bytes = b"{}", source: Source | None = None, **facts: Any) -> ReceivedMessage:
    given = {"broker_id": "b-1", **facts}
    return ReceivedMessage(body, "handle", source=source or Source(), **given)


@pytest.mark.rule("RAW-1")
def test_a_message_is_what_the_route_says_and_its_body_what_came() -> None:
    message = read_raw(replace(ROUTE, pool="P", reads_reply=True), received(b"\xff\0"))

    assert (message.id, message.target, message.pool, message.group) == ("b-1", TARGET, "P", None)
    assert (message.body, message.content_type) == (b"\xff\0", "application/octet-stream")
    assert message.is_raw
    assert message.reads_reply


@pytest.mark.rule("RAW-2")
@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"broker_id": "b"}, "b"),
        ({"broker_id": "copy", "claimed_id": "first"}, "first"),
        ({"broker_id": None, "claimed_id": "theirs"}, "theirs"),
        ({"broker_id": None}, digest_of(b"{}")),
        ({"broker_id": None, "claimed_id": "a\nb"}, digest_of(b"{}")),
        ({"broker_id": None, "claimed_id": "x" * 513}, digest_of(b"{}")),
    ],
)
def test_a_message_has_the_id_of_its_first_copy_or_its_digest(
    facts: dict[str, Any], expected: str
) -> None:
    assert read_raw(ROUTE, received(b"{}", **facts)).id == expected


@pytest.mark.rule("RAW-2")
@pytest.mark.parametrize(
    ("pointer", "expected"),
    [
        ("/order/id", "o-1"),
        ("/order/n", "17"),
        ("/order/price", "1.5"),
        ("/order/paid", "true"),
        ("/list/1", "b"),
        ("/a~1b/~0", "odd"),
        ("/", "empty name"),
        ("/deep" * 16, "far"),
    ],
)
def test_a_group_is_found_in_the_body(pointer: str, expected: str) -> None:
    deep: object = "far"
    for _ in range(15):
        deep = {"deep": deep}
    body = msgspec.json.encode(
        {
            "order": {"id": "o-1", "n": 17, "price": 1.5, "paid": True},
            "list": ["a", "b"],
            "a/b": {"~": "odd"},
            "": "empty name",
            "deep": deep,
        }
    )

    assert read_raw(replace(ROUTE, group=Pointer(pointer)), received(body)).group == expected


@pytest.mark.rule("RAW-2")
@pytest.mark.parametrize(
    "pointer",
    ["/none", "/list", "/list/2", "/list/01", "/list/-", "/text/more", "/null", "/blank", "/big"],
)
def test_a_message_without_what_was_asked_for_is_malformed(pointer: str) -> None:
    big = b"1" * 5000  # more digits than Python reads
    body = b'{"list": ["a", "b"], "text": "a", "null": null, "blank": " ", "big": %b}' % big

    with pytest.raises(Malformed, match=r"`id`: it has no text or number at /"):
        read_raw(replace(ROUTE, id=Pointer(pointer)), received(body))


@pytest.mark.rule("RAW-2")
def test_a_message_says_which_fact_of_its_broker_is_missing() -> None:
    with pytest.raises(Malformed, match="`messageGroupId`: it has no group from its broker"):
        read_raw(replace(ROUTE, group=BrokerFact(Fact.GROUP)), received())


@pytest.mark.rule("RAW-2")
@pytest.mark.parametrize("body", [b"", b"\xff", b"[" * 5000, b'{"id": 1'])
def test_nothing_is_found_in_a_body_that_is_not_json(body: bytes) -> None:
    with pytest.raises(Malformed, match="`id`"):
        read_raw(replace(ROUTE, id=Pointer("/id")), received(body))
    assert read_raw(ROUTE, received(body)).content_type == "application/octet-stream"


@pytest.mark.rule("RAW-2")
def test_several_values_come_from_one_part_of_the_body() -> None:
    pointers = (("X-A", Pointer("/o/a")), ("X-B", Pointer("/o/b")), ("X-Again", Pointer("/o/a")))

    message = read_raw(replace(ROUTE, headers=pointers), received(b'{"o": {"a": 1, "b": "2"}}'))

    assert message.headers == {"X-A": "1", "X-B": "2", "X-Again": "1"}


@pytest.mark.rule("RAW-2")
def test_values_come_from_attributes_and_from_the_broker() -> None:
    source = Source(
        attributes={"tenant": "acme", "empty": ""},
        binary={"bytes": b"\xff a"},
        group="g",
        subject="orders.eu",
        content_type="text/plain",
    )
    route = replace(
        ROUTE,
        id=Attribute("bytes"),
        group=Attribute("tenant"),
        headers=(
            ("X-Constant", "legacy"),
            ("X-Subject", BrokerFact(Fact.SUBJECT)),
            ("X-At", BrokerFact(Fact.PUBLISHED_AT)),
            ("X-Id", BrokerFact(Fact.ID)),
            ("X-Group", BrokerFact(Fact.GROUP)),
            ("X-Bytes", Attribute("bytes")),
            ("X-Empty", Attribute("empty")),
            ("X-None", Attribute("none")),
        ),
    )

    message = read_raw(route, received(b"{}", source, published_at=0.0))
    assert message.published_at == 0.0

    assert (message.id, message.group, message.content_type) == ("%FF%20a", "acme", "text/plain")
    assert message.headers == {
        "X-Constant": "legacy",
        "X-Subject": "orders.eu",
        "X-At": "1970-01-01T00:00:00.000Z",
        "X-Id": "b-1",
        "X-Group": "g",
        "X-Bytes": "%FF a",
    }
    unknown = replace(route, headers=(("X-At", BrokerFact(Fact.PUBLISHED_AT)),))
    assert read_raw(unknown, received(b"{}", source)).headers is None


@pytest.mark.rule("RAW-2")
def test_the_content_type_is_that_of_the_route_then_that_of_the_message() -> None:
    source = Source(attributes={"kind": "text/csv"}, content_type="text/plain")
    route = replace(ROUTE, content_type=Attribute("kind"))

    assert read_raw(route, received(b"{}", source)).content_type == "text/csv"
    assert read_raw(ROUTE, received(b"{}", source)).content_type == "text/plain"
    odd = Source(content_type="text/plain\r\nX-Evil: 1")
    assert read_raw(ROUTE, received(b"{}", odd)).content_type == "application/json"


@pytest.mark.rule("RAW-2")
@pytest.mark.parametrize(
    ("value", "error"), [("x" * 513, "longer than 512"), ("a\x07b", "control character")]
)
def test_a_group_that_no_message_may_have_is_malformed(value: str, error: str) -> None:
    route = replace(ROUTE, group=Attribute("g"))

    with pytest.raises(Malformed, match=error):
        read_raw(route, received(b"", Source(attributes={"g": value})))


@pytest.mark.rule("RAW-2")
def test_attributes_as_headers_are_bounded_and_cannot_add_lines() -> None:
    route = replace(ROUTE, headers=(("X-A", Attribute("a")),))

    evil = read_raw(route, received(b"", Source(attributes={"a": "x\r\nX-Evil: é%"})))
    assert evil.headers == {"X-A": "x%0D%0AX-Evil: %C3%A9%25"}
    with pytest.raises(Malformed, match="larger than 8192 bytes"):
        read_raw(route, received(b"", Source(attributes={"a": "x" * 8190})))


@pytest.mark.rule("RAW-2")
def test_a_constant_header_goes_out_as_it_is() -> None:
    route = replace(ROUTE, headers=(("X-Api-Key", "a%2Fb"),))

    assert read_raw(route, received(b"")).headers == {"X-Api-Key": "a%2Fb"}


@pytest.mark.rule("RAW-4")
def test_what_other_brokers_say_is_published_to_rabbitmq_as_text() -> None:
    source = Source(
        attributes={"n": "1", "j": "{}", "i": "7", "amqp.priority": "high"},
        kinds={"n": "Number", "j": "json", "i": "int"},
    )

    properties = properties_of(source, datetime.now(UTC))

    assert properties.headers == {"n": "1", "j": "{}", "i": 7}
    assert properties.priority is None
    usual = properties_of(Source(attributes={"amqp.priority": "9"}), datetime.now(UTC))
    assert usual.priority == 9


@pytest.mark.rule("RAW-1", "P4")
def test_a_large_body_and_a_queue_that_is_not_raw_are_malformed() -> None:
    with pytest.raises(Malformed, match="larger than"):
        read_raw(ROUTE, received(bytes(MAX_MESSAGE_BYTES + 1)))
    with pytest.raises(Malformed, match="this one is not"):
        read_raw(None, received())


@pytest.mark.rule("RAW-3", "ID-1")
def test_a_nameless_message_is_never_a_duplicate() -> None:
    one = received(b"{}", Source(token="1"), broker_id=None)
    two = received(b"{}", Source(token="2"), broker_id=None)

    assert key_of("q", one, "d") != key_of("q", two, "d")
    assert key_of("q", one, "d").fingerprint(b"{}") != key_of("q", two, "d").fingerprint(b"{}")
    named = received(b"{}", broker_id=None, claimed_id="theirs")
    assert key_of("q", named, "d").id == "theirs"


@pytest.mark.rule("RAW-4")
@given(st.binary(), st.dictionaries(st.text(), st.binary()))
def test_a_letter_and_a_stored_copy_keep_bytes_and_source(
    body: bytes, binary: dict[str, bytes]
) -> None:
    hand_over = received(body, Source(binary=binary, group="g"), published_at=5.0)

    source, content = letter_source(letter_body(hand_over, "m"))
    assert source is not None
    assert (content, source.binary, source.group) == (body, binary, "g")
    again = opened(received(stored_body(hand_over, "m"), broker_id="row"))
    assert again.source is not None
    assert (again.body, again.claimed_id, again.published_at) == (body, "m", 5.0)


@pytest.mark.rule("RAW-4", "BRK-9")
def test_a_stored_copy_of_any_message_keeps_when_it_was_published() -> None:
    plain = ReceivedMessage(b"{}", "handle", "b", published_at=5.0)

    assert letter_body(plain, "m") == b"{}"
    assert letter_source(b"{}") == (None, b"{}")
    assert stored_body(replace(plain, published_at=None), "m") == b"{}"
    again = opened(replace(plain, body=stored_body(plain, "m"), published_at=7.0))
    assert (again.body, again.source, again.published_at) == (b"{}", None, 5.0)
    # Not published when it was stored.
    assert opened(plain).published_at is None
    assert opened(replace(plain, published_at=None)).body == b"{}"
    odd = replace(plain, body=b"\0message-router kept\n{\n")
    assert opened(odd) is odd


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "slash"),
        ("a", "slash"),
        ("/~2", "neither"),
        ("/a~", "neither"),
        ("/a" * 17, "more than 16 steps"),
    ],
)
@pytest.mark.rule("RAW-2")
def test_what_is_no_pointer_is_refused(text: str, error: str) -> None:
    with pytest.raises(BadPointer, match=error):
        Pointer(text).check()


def queue_of(**entry: object) -> tuple[QueueConfig | None, list[str]]:
    document = {"queues": [{"queueName": "q", "queueUri": "nats://h/?stream=S", **entry}]}
    found = read_document(msgspec.json.encode(document), EMBEDDED)
    return next(iter(found.config.queues), None), [str(each) for each in found.problems]


WHOLE = {
    "mediationTarget": f"{TARGET}?token=secret",
    "poolCode": "P",
    "messageGroupId": {"attribute": "tenant"},
    "id": {"body": "/orderId"},
    "headers": {"X-Type": {"attribute": "type"}, "X-Source": "legacy"},
    "contentType": {"broker": "subject"},
    "replyBody": "protocol",
}


@pytest.mark.rule("RAW-1", "CFG-5")
def test_a_route_is_read_and_shown_without_secrets() -> None:
    queue, problems = queue_of(envelope="raw", route=WHOLE)

    assert problems == []
    assert queue is not None
    assert queue.route == RawRoute(
        target=f"{TARGET}?token=secret",
        pool="P",
        id=Pointer("/orderId"),
        group=Attribute("tenant"),
        headers=(("X-Type", Attribute("type")), ("X-Source", "legacy")),
        content_type=BrokerFact(Fact.SUBJECT),
        reads_reply=True,
    )
    assert "secret" not in repr(queue.route)
    shown = as_document(RoutingConfig((queue,)))["queues"][0]  # type: ignore[index]
    assert shown["envelope"] == "raw"
    assert shown["route"] == {**WHOLE, "mediationTarget": shown["route"]["mediationTarget"]}
    assert "secret" not in str(shown)


@pytest.mark.rule("RAW-1", "CFG-5")
@pytest.mark.parametrize(
    ("entry", "error"),
    [
        ({"envelope": "raw"}, "route: must say where"),
        ({"route": WHOLE}, "route: needs `envelope` `raw`"),
        ({"envelope": "raw", "route": WHOLE, "routes": {}}, "routes: needs"),
        ({"envelope": "raw", "queueUri": "memory://q", "route": WHOLE}, "envelope: `raw` is not"),
        ({"envelope": "raw", "queueUri": "sqlite:///q", "route": WHOLE}, "envelope: `raw` is not"),
        ({"envelope": "raw", "route": {}}, "route: Object missing required field"),
        (
            {"envelope": "raw", "route": WHOLE | {"poolcode": "P"}},
            "unknown field `poolcode`: did you mean `poolCode`?",
        ),
        ({"envelope": "raw", "route": WHOLE | {"z" * 200: "P"}}, f"unknown field `{'z' * 64}`"),
        (
            {"envelope": "raw", "route": WHOLE | {"target": "https://h"}},
            "unknown field `target`: did you mean `mediationTarget`?",
        ),
        (
            {"envelope": "raw", "route": WHOLE | {"mediationTarget": "https://"}},
            "route: `mediationTarget`",
        ),
        (
            {"envelope": "raw", "route": WHOLE | {"mediationTarget": "ftp://h"}},
            "route.mediationTarget: must begin",
        ),
        (
            {"envelope": "raw", "route": WHOLE | {"mediationTarget": "handler:a"}},
            "route.mediationTarget: must begin with https:// or http://",
        ),
        ({"envelope": "raw", "route": WHOLE | {"id": "1"}}, "route.id: must not be the same"),
        ({"envelope": "raw", "route": WHOLE | {"id": 5}}, 'route.id: must be {"attribute": name}'),
        ({"envelope": "raw", "route": WHOLE | {"id": {"body": 5}}}, "route.id: must be {"),
        ({"envelope": "raw", "route": WHOLE | {"id": {"header": "a"}}}, "route.id: must be {"),
        ({"envelope": "raw", "route": WHOLE | {"messageGroupId": 5}}, "must be a text, {"),
        ({"envelope": "raw", "route": WHOLE | {"id": {"body": "a"}}}, "the JSON pointer must"),
        ({"envelope": "raw", "route": WHOLE | {"id": {"broker": "a"}}}, "the broker knows id,"),
        ({"envelope": "raw", "route": WHOLE | {"contentType": "é"}}, "is not printable ASCII"),
        (
            {"envelope": "raw", "route": WHOLE | {"headers": {"Authorization": "a"}}},
            "route.headers: Authorization may not be set here",
        ),
        (
            {"envelope": "raw", "route": WHOLE | {"headers": {"X-A": ""}}},
            "route.headers.X-A: must not be empty",
        ),
        (
            {"envelope": "raw", "route": WHOLE | {"headers": {f"X-{n}": "a" for n in range(33)}}},
            "more than 32 headers",
        ),
    ],
)
def test_a_bad_route_is_refused_with_its_place(entry: dict[str, object], error: str) -> None:
    queue, problems = queue_of(**entry)

    assert queue is None
    assert error in problems[0]
