"""A publisher's trace comes with its message, wherever a broker carries headers."""

from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

import aio_pika
import pytest
from nats.aio.client import Client

from router.brokers import BrokerDoor
from router.core.config import QueueConfig
from router.core.message import UNTRIED, Delivery
from router.core.trace import Span
from router.ports import Broker
from tests.contract.activemq_place import ActiveMqPlace
from tests.contract.cases import SQS_IN_A_HURRY
from tests.contract.nats_place import NatsPlace
from tests.contract.rabbitmq_place import RabbitPlace
from tests.contract.sqs_place import SqsPlace
from tests.support.servers.nats import add_stream
from tests.support.stomp import bare_stomp

pytestmark = [pytest.mark.anyio, pytest.mark.rule("MED-1")]

PARENT: Final = Span("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", True, "vendor=1")
HEADERS: Final = {"traceparent": PARENT.traceparent, "tracestate": PARENT.state}
BODY: Final = b'{"id": "a", "mediationTarget": "https://svc.example/"}'


@pytest.fixture
def anyio_backend() -> tuple[str, Mapping[str, Any]]:
    return "asyncio", {}


@pytest.fixture
async def door(anyio_backend: object) -> AsyncIterator[BrokerDoor]:
    del anyio_backend  # asked for only to run on its loop
    async with BrokerDoor(worker_id="w", dedup_window=300.0, settings=SQS_IN_A_HURRY) as door:
        yield door


async def one(broker: Broker) -> Delivery:
    (delivery,) = await broker.receive(1)
    return delivery


async def again(broker: Broker) -> Delivery:
    """Received, given back, received once more: on some brokers, a copy."""
    first = await one(broker)
    await broker.nack(first.handle, 0.1, UNTRIED)
    return await one(broker)


@pytest.mark.parametrize("spelling", [str.lower, str.capitalize])
async def test_nats_carries_it_however_it_is_spelt(
    nats_server: NatsPlace, door: BrokerDoor, spelling: Any
) -> None:
    port, stream = nats_server.server.port, f"TRACES-{spelling.__name__}"
    await add_stream(port, stream)
    client = Client()
    await client.connect(f"nats://127.0.0.1:{port}")
    headers = {spelling(name): value for name, value in HEADERS.items()}
    await client.jetstream().publish(f"{stream}.a", BODY, headers=headers)
    await client.close()

    uri = f"nats://127.0.0.1:{port}/?stream={stream}"
    async with door.open_queue(QueueConfig(name="orders", uri=uri)) as broker:
        delivery = await again(broker)
        await broker.ack([delivery.handle])

    assert delivery.parent == PARENT


@pytest.mark.slow
async def test_rabbitmq_carries_it_on_copies_too(rabbitmq: RabbitPlace, door: BrokerDoor) -> None:
    name, url = rabbitmq.new_queue(), rabbitmq.server.url
    queue = QueueConfig(name="orders", uri=f"{url}?queue={name}&type=classic")

    async with door.open_queue(queue) as broker, await aio_pika.connect(url) as connection:
        channel = await connection.channel()
        sent = aio_pika.Message(BODY, headers=dict(HEADERS))
        await channel.default_exchange.publish(sent, routing_key=name)
        delivery = await again(broker)
        await broker.ack([delivery.handle])

    assert delivery.parent == PARENT


@pytest.mark.slow
async def test_activemq_carries_it_on_copies_too(activemq: ActiveMqPlace, door: BrokerDoor) -> None:
    name, port = activemq.new_queue(), activemq.server.port
    async with bare_stomp(port) as others:
        await others.send(name, BODY, HEADERS)

    uri = f"activemq://127.0.0.1:{port}/{name}"
    async with door.open_queue(QueueConfig(name="orders", uri=uri)) as broker:
        delivery = await again(broker)
        await broker.ack([delivery.handle])

    assert delivery.parent == PARENT


def attribute(value: str) -> dict[str, str]:
    return {"DataType": "String", "StringValue": value}


@pytest.mark.parametrize("stand_in", ["ministack", "moto"])
async def test_sqs_carries_it_in_attributes(
    stand_in: str,
    door: BrokerDoor,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place: SqsPlace = request.getfixturevalue(stand_in)
    url = place.server.new_queue(fifo=False)
    attributes = {name: attribute(value) for name, value in HEADERS.items()}
    sent = {"QueueUrl": url, "MessageBody": BODY.decode(), "MessageAttributes": attributes}
    place.server.call("SendMessage", sent)
    for name, value in place.env.items():
        monkeypatch.setenv(name, value)

    async with door.open_queue(QueueConfig(name="orders", uri=url)) as broker:
        delivery = await one(broker)
        await broker.ack([delivery.handle])

    assert delivery.parent == PARENT


async def test_sqs_carries_it_as_aws_itself_writes_it(
    moto: SqsPlace, door: BrokerDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = moto.server.new_queue(fifo=False)
    root = f"1-{PARENT.trace_id[:8]}-{PARENT.trace_id[8:]}"
    header = attribute(f"Root={root};Parent={PARENT.span_id};Sampled=1")
    attributes = {"AWSTraceHeader": header}
    sent = {"QueueUrl": url, "MessageBody": "{}", "MessageSystemAttributes": attributes}
    moto.server.call("SendMessage", sent)
    for name, value in moto.env.items():
        monkeypatch.setenv(name, value)

    async with door.open_queue(QueueConfig(name="orders", uri=url)) as broker:
        delivery = await one(broker)
        await broker.ack([delivery.handle])

    assert delivery.parent == Span(PARENT.trace_id, PARENT.span_id, sampled=True)
