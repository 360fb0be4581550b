"""Whatever a publisher writes into the properties of a message, RabbitMQ hands it over (B7)."""

import struct

import aio_pika
import pytest
from pamqp import commands

from router.brokers import BrokerRegistry
from router.core.config import QueueConfig
from router.core.message import Tally
from router.ports import Nack
from tests.contract.cases import both_ends, publication
from tests.contract.rabbitmq_place import RabbitPlace

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

HEADERS, MESSAGE_ID, TIMESTAMP = 1 << 13, 1 << 7, 1 << 6
FAR_FUTURE = struct.pack(">Q", 2**64 - 1)
NOT_UTF8 = b'{"id": "\xff", "messageGroupId": "\xff"}'


def table(fields: bytes) -> bytes:
    return struct.pack(">I", len(fields)) + fields


def nested(levels: int) -> bytes:
    inner = b""
    for _ in range(levels):
        inner = b"\x01aF" + table(inner)
    return table(inner)


OURS = b"".join(
    bytes([len(name)]) + name + b"l" + struct.pack(">q", value)
    for name, value in (
        (b"x-message-router-not-before", -1),
        (b"x-message-router-attempts", 2**62),
        (b"x-message-router-deliveries", -5),
    )
)
HOSTILE = {
    "a year that no clock knows": (TIMESTAMP, FAR_FUTURE),
    "an id that is not UTF-8": (MESSAGE_ID, b"\x02\xff\xfe"),
    "tables in tables": (HEADERS, nested(3000)),
    "a name that is not UTF-8": (HEADERS, table(b"\x01\xffI\x00\x00\x00\x01")),
    "a text that is not UTF-8": (HEADERS, table(b"\x01aS" + table(b"\xff\xfe"))),
    "a number that is too large": (HEADERS, table(b"\x01ad" + struct.pack(">d", 1e308))),
    "a year inside of the headers": (HEADERS, table(b"\x01aT" + FAR_FUTURE)),
    "the router's own headers": (HEADERS, table(OURS)),
}


class Raw(commands.Basic.Properties):
    """Properties as nobody's client would write them."""

    raw = b""

    def marshal(self) -> bytes:
        return self.raw


@pytest.mark.rule("P5")
@pytest.mark.parametrize("what", HOSTILE)
async def test_b7_no_property_of_a_message_ends_the_connection(
    what: str, rabbitmq: RabbitPlace
) -> None:
    flag, content = HOSTILE[what]
    properties = Raw()
    properties.raw = struct.pack(">H", flag) + content
    name = rabbitmq.new_queue()
    config = QueueConfig(name="orders", uri=f"{rabbitmq.server.url}?queue={name}&type=classic")
    async with (
        BrokerRegistry(worker_id="worker-1", dedup_window=300.0) as brokers,
        both_ends(brokers, config) as ends,
        await aio_pika.connect(rabbitmq.server.url) as connection,
        connection.channel() as channel,
    ):
        bare = await channel.get_underlay_channel()
        await bare.basic_publish(NOT_UTF8, routing_key=name, properties=properties)
        await ends.publisher.publish([publication("honest")])

        first = await ends.broker.receive(1)
        await ends.broker.nack([Nack(first[0].handle, 0.5, Tally(failures=1, requests=1))])
        honest, again = await ends.broker.receive(1), await ends.broker.receive(1)
        settled = [await ends.broker.ack([each.handle for each in got]) for got in (honest, again)]

    assert [got[0].body for got in (first, again)] == [NOT_UTF8, NOT_UTF8]
    assert honest[0].body == publication("honest").body
    assert settled == [[], []]
