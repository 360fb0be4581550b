"""Where the URI of a RabbitMQ queue leads."""

import asyncio

import pytest
from aiormq.base import FutureStore
from pamqp import decode

from router.brokers.rabbitmq import RabbitAddress, RabbitSettings, read_address
from router.brokers.rabbitmq.connection import our_errors
from router.core.config import QueueConfig
from router.ports import Disconnected, QueueRefused

DEFAULT = "amqp://us:hidden@rabbit.example:5673/shop"


def place(uri: str) -> RabbitAddress:
    return read_address(QueueConfig(name="orders", uri=uri), DEFAULT)


@pytest.mark.rule("CFG-7")
@pytest.mark.parametrize(
    ("uri", "url", "queue"),
    [
        ("amqp://me:pw@host/v?queue=q", "amqp://me:pw@host/v", "q"),
        ("amqp://host?queue=q", "amqp://host/", "q"),
        ("amqps://host:5671/?queue=q%2F1", "amqps://host:5671/", "q/1"),
        ("amqp://me:p%40w@host/a%2Fb?queue=q", "amqp://me:p%40w@host/a%2Fb", "q"),
        ("amqp://orders", DEFAULT, "orders"),
        ("amqp://or%2Fders%3F", DEFAULT, "or/ders?"),
    ],
)
def test_a_uri_says_where_the_queue_is(uri: str, url: str, queue: str) -> None:
    found = place(uri)

    assert (found.url, found.queue) == (f"{url}?heartbeat=10", queue)


@pytest.mark.rule("CFG-7")
def test_a_queue_has_the_usual_window_unless_told_otherwise() -> None:
    usual = place("amqp://host?queue=q")
    told = place("amqp://host?queue=q&type=quorum&prefetch=20&heartbeat=2&cafile=/etc/ca.pem")

    assert (usual.kind, usual.prefetch) == (None, 500)
    assert (told.kind, told.prefetch) == ("quorum", 20)
    assert told.url == "amqp://host/?heartbeat=2&cafile=/etc/ca.pem"


@pytest.mark.rule("CFG-7")
@pytest.mark.parametrize(
    ("uri", "why"),
    [
        ("amqp://me:secret@host/vhost", "names no queue"),
        ("amqp://host?queue=", "names no queue"),
        ("amqp://", "names no queue"),
        ("amqp:///vhost?queue=q", "names no host"),
        ("amqp://me:secret@host:port/?queue=q", "wrong port"),
        ("amqp://host?queue=q&type=stream", "neither classic nor quorum"),
        ("amqp://host?queue=q&prefetch=0", "from 1 to 65535"),
        (f"amqp://host?queue=q&prefetch={'9' * 5000}", "from 1 to 65535"),
        ("amqp://host?queue=q&heartbeat=soon", "from 1 to 60"),
        ("amqp://me:secret@host?qeue=q", "unknown option (qeue)"),
    ],
)
def test_a_wrong_uri_is_refused_with_a_reason_and_without_its_secrets(uri: str, why: str) -> None:
    with pytest.raises(QueueRefused) as refused:
        place(uri)

    assert why in str(refused.value)
    assert "secret" not in str(refused.value)


@pytest.mark.rule("OPS-5")
def test_what_holds_a_password_does_not_show_it() -> None:
    shown = repr(place("amqp://me:hidden@host?queue=q")) + repr(RabbitSettings(DEFAULT))

    assert "hidden" not in shown


@pytest.mark.rule("BRK-6")
def test_a_connection_that_breaks_while_it_is_opened_is_tried_again() -> None:
    with pytest.raises(Disconnected, match="was closed"), our_errors(opening=True):
        raise StopAsyncIteration  # so the client's reader of frames ends


@pytest.mark.anyio
@pytest.mark.rule("BRK-6")
async def test_a_call_that_the_client_ends_without_a_reason_means_a_lost_connection() -> None:
    """Found by minutes of faults on a real broker; here the client's own code ends the call."""
    calls = FutureStore(asyncio.get_running_loop())
    call = calls.create_task(asyncio.Event().wait())
    await calls.reject_all(None)

    with pytest.raises(Disconnected, match="was closed"), our_errors():
        await call


@pytest.mark.rule("BRK-6")
def test_a_bug_is_not_taken_for_a_lost_connection() -> None:
    with pytest.raises(ZeroDivisionError), our_errors():
        raise ZeroDivisionError


@pytest.mark.rule("CMD-9")
@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("shortstr", b"\x02\xff\xfe"),
        ("timestamp", b"\xff" * 8),
        ("table", b"\x00\x00\x00\x06\x01\xffI\x00\x00\x00\x01"),
    ],
)
def test_other_connections_of_the_program_read_properties_as_without_us(
    kind: str, value: bytes
) -> None:
    """Only our own connections forgive what cannot be read (B7)."""
    strictly = {
        "shortstr": decode.short_str,
        "timestamp": decode.timestamp,
        "table": decode.field_table,
    }[kind]

    with pytest.raises(Exception) as theirs:
        strictly(value)
    with pytest.raises(theirs.type):
        decode.by_type(value, kind)
