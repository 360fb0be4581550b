"""Raw queues, filled by clients that know nothing of the router: retried, dead, replayed."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import boto3
import pika
import psycopg
import pytest
import stomp
from nats.aio.client import Client as NatsClient
from redis import Redis

from tests.acceptance.process import RouterProcess, eventually
from tests.acceptance.site import Site
from tests.outbound.servers import Connection, TargetRequest, listening
from tests.support.servers import nats, sqs
from tests.support.servers.activemq import ActiveMqServer
from tests.support.servers.nats import NatsServer, add_stream
from tests.support.servers.postgres import PostgresServer, postgres_server
from tests.support.servers.rabbitmq import RabbitServer, rabbit_server
from tests.support.servers.redis import RedisServer
from tests.support.servers.sqs import SqsServer

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

ALL_BYTES = bytes(range(256))
TEXT = '{"order": 17, "note": "žluťoučký 🐎 \\u0007"}\n'


async def grumpy(connection: Connection) -> None:
    """Ask for a second, then refuse the message, then take it: it is retried, dead, replayed."""
    while True:
        await connection.read()
        match len(connection.target.requests):
            case 1:
                await connection.reply(429, b'{"ack": true}', "Retry-After: 1")
            case 2:
                await connection.reply(400, b'{"ack": true}')
            case _:
                await connection.reply(200, b'{"ack": false}')


async def sent_three_times(
    site: Site, uri: str, publish: Callable[[], object], **route: object
) -> list[TargetRequest]:
    """Let the router deliver what is published: return what its target got, in all three tries."""
    async with listening(grumpy) as target:
        entry = {"mediationTarget": target.url, "poolCode": "RAW", **route}
        pool = {"code": "RAW", "concurrency": 2}
        site.configure_queue(uri, pool, envelope="raw", route=entry, visibilityTimeout=20)
        async with site.router() as router:
            await asyncio.to_thread(publish)
            (letter,) = await router.letters("TARGET_REJECTED")
            await _shows_no_body(router, letter["id"])
            refused = await router.post("/messages?queue=orders", {"mediationTarget": target.url})
            assert refused.status_code == 422
            assert "orders is a raw queue" in refused.text
            replayed = await router.post(f"/dead-letters/{letter['id']}/replay")
            assert replayed.json() == {"replayed": 1}, replayed.text
            await eventually(lambda: len(target.requests) == 3)
            await _settles(router)
            assert len(target.requests) == 3
        return target.requests


async def _shows_no_body(router: RouterProcess, letter_id: int) -> None:
    detail = (await router.get(f"/dead-letters/{letter_id}")).json()
    assert detail["message"] is None
    assert detail["raw"]["bodyBytes"] == detail["bodyBytes"]


async def _settles(router: RouterProcess) -> None:
    """Wait until nothing is held: `ack: false` was not read, so it is accepted."""
    metrics = ""
    for _ in range(200):
        metrics = (await router.get("/metrics")).text
        if 'message_router_in_flight{pool="RAW"} 0.0' in metrics:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(metrics)


@pytest.fixture
def stand_in(tmp_path: Path) -> Iterator[SqsServer]:
    with sqs.ministack(tmp_path).running() as server:
        yield server


@pytest.mark.rule("RAW-1", "RAW-2", "RAW-4")
async def test_sqs_filled_by_boto3(
    site: Site, stand_in: SqsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in sqs.ENV.items():
        monkeypatch.setenv(name, value)
    site.settings |= sqs.ENV
    site.settings["MESSAGE_ROUTER_SQS_WAIT_TIME_SECONDS"] = "2"
    url = stand_in.new_queue(fifo=True)
    client = boto3.client("sqs", region_name="eu-west-1", endpoint_url=stand_in.url)

    def publish() -> None:
        client.send_message(
            QueueUrl=url,
            MessageBody=TEXT,
            MessageGroupId="customer-7",
            MessageDeduplicationId="1",
            MessageAttributes={
                "type": {"DataType": "String", "StringValue": "order.créé"},
                "blob": {"DataType": "Binary", "BinaryValue": b"\xff\0"},
            },
        )

    requests = await sent_three_times(
        site,
        url,
        publish,
        id={"body": "/order"},
        headers={
            "X-Type": {"attribute": "type"},
            "X-Blob": {"attribute": "blob"},
            "X-Group": {"broker": "group"},
        },
    )

    for request in requests:
        assert request.body == TEXT.encode()
        assert request.headers["x-message-id"] == "17"
        assert request.headers["x-type"] == "order.cr%C3%A9%C3%A9"
        assert request.headers["x-blob"] == "%FF%00"
        assert request.headers["x-group"] == "customer-7"
        assert request.headers["content-type"] == "application/json"


@pytest.fixture
def rabbit() -> Iterator[RabbitServer]:
    with rabbit_server() as server:
        yield server


@pytest.mark.rule("RAW-1", "RAW-2", "RAW-4")
async def test_rabbitmq_filled_by_pika(site: Site, rabbit: RabbitServer) -> None:
    def publish() -> None:
        with pika.BlockingConnection(pika.URLParameters(rabbit.url)) as connection:
            channel = connection.channel()
            channel.queue_declare("legacy", durable=True)
            properties = pika.BasicProperties(
                content_type="application/x-thing",
                message_id="order-17",
                type="order.created",
                headers={"tenant": "acme", "n": 5, "on": True},
            )
            channel.basic_publish("", "legacy", ALL_BYTES, properties)

    requests = await sent_three_times(
        site,
        f"{rabbit.url}?queue=legacy&type=classic",
        publish,
        messageGroupId={"attribute": "tenant"},
        headers={
            "X-Type": {"attribute": "amqp.type"},
            "X-N": {"attribute": "n"},
            "X-On": {"attribute": "on"},
        },
    )

    for request in requests:
        assert request.body == ALL_BYTES
        assert request.headers["content-type"] == "application/x-thing"
        assert request.headers["x-message-id"] == "order-17"
        assert request.headers["x-type"] == "order.created"
        assert (request.headers["x-n"], request.headers["x-on"]) == ("5", "true")


@asynccontextmanager
async def jetstream(directory: Path) -> AsyncIterator[NatsServer]:
    with NatsServer(nats.current(), directory).running() as server:
        await add_stream(server.port, "ORDERS")
        yield server


@pytest.mark.rule("RAW-1", "RAW-2", "RAW-4")
async def test_nats_filled_by_nats_py(site: Site, tmp_path: Path) -> None:
    async with jetstream(tmp_path) as server:

        async def send() -> None:
            client = NatsClient()
            await client.connect(f"nats://{server.address}")
            headers = {"tenant": "acme", "Content-Type": "image/png"}
            await client.jetstream().publish("ORDERS.eu.created", ALL_BYTES, headers=headers)
            await client.close()

        requests = await sent_three_times(
            site,
            f"nats://{server.address}/?stream=ORDERS",
            lambda: asyncio.run(send()),
            messageGroupId={"attribute": "tenant"},
            headers={"X-Subject": {"broker": "subject"}},
        )

    for request in requests:
        assert request.body == ALL_BYTES
        assert request.headers["x-subject"] == "ORDERS.eu.created"
        assert request.headers["content-type"] == "image/png"
    assert requests[0].headers["x-message-id"] == requests[1].headers["x-message-id"]


@pytest.mark.rule("RAW-1", "RAW-2", "RAW-4")
@pytest.mark.parametrize("body", [ALL_BYTES, TEXT.encode()], ids=["bytes", "text"])
async def test_activemq_filled_by_stomp_py(site: Site, tmp_path: Path, body: bytes) -> None:
    with ActiveMqServer(tmp_path).running() as server:

        def publish() -> None:
            is_text = body != ALL_BYTES
            connection = stomp.Connection12(
                [("127.0.0.1", server.port)], auto_content_length=not is_text
            )
            connection.connect(wait=True)
            headers = {"tenant": "acme", "persistent": "true"}
            content = body.decode() if is_text else body
            connection.send("/queue/legacy", content, "application/x-thing", headers)
            connection.disconnect("bye")

        requests = await sent_three_times(
            site,
            f"{server.url}/legacy",
            publish,
            messageGroupId={"attribute": "tenant"},
            headers={"X-Tenant": {"attribute": "tenant"}},
        )

    for request in requests:
        assert request.body == body
        assert request.headers["x-tenant"] == "acme"
    assert requests[0].headers["x-message-id"] == requests[1].headers["x-message-id"]


@pytest.mark.rule("RAW-1", "RAW-2", "RAW-4")
async def test_redis_filled_by_redis_py(site: Site, tmp_path: Path) -> None:
    with RedisServer(tmp_path, durable=True).running() as server:

        def publish() -> None:
            with Redis.from_url(server.url) as client:
                client.xadd("legacy", {"data": ALL_BYTES, "tenant": "acme", "blob": b"\xff"})

        requests = await sent_three_times(
            site,
            f"{server.url}?stream=legacy&field=data",
            publish,
            messageGroupId={"attribute": "tenant"},
            headers={"X-Tenant": {"attribute": "tenant"}, "X-Blob": {"attribute": "blob"}},
        )

    for request in requests:
        assert request.body == ALL_BYTES
        assert (request.headers["x-tenant"], request.headers["x-blob"]) == ("acme", "%FF")
        assert request.headers["content-type"] == "application/octet-stream"
    assert requests[0].headers["x-message-id"] == requests[1].headers["x-message-id"]


@pytest.fixture
def postgres() -> Iterator[PostgresServer]:
    with postgres_server() as server:
        server.install_pgmq()
        yield server


@pytest.mark.rule("RAW-1", "RAW-2", "RAW-4")
async def test_pgmq_filled_by_pgmq_send(site: Site, postgres: PostgresServer) -> None:
    postgres.add_pgmq_queue("legacy")
    order = {"order": 17, "note": "žluťoučký 🐎", "list": [1.50, None]}

    def publish() -> None:
        with psycopg.connect(postgres.url) as connection:
            connection.execute(
                "SELECT pgmq.send('legacy', %s::jsonb, %s::jsonb)",
                [json.dumps(order), json.dumps({"tenant": "acme", "n": 5})],
            )

    with_text = f"SELECT '{json.dumps(order)}'::jsonb::text"
    as_stored = postgres.sql(with_text).strip()
    requests = await sent_three_times(
        site,
        f"{postgres.pgmq_url}?queue=legacy",
        publish,
        messageGroupId={"attribute": "tenant"},
        id={"body": "/order"},
        headers={"X-N": {"attribute": "n"}},
    )

    for request in requests:
        assert request.body.decode() == as_stored
        assert (request.headers["x-message-id"], request.headers["x-n"]) == ("17", "5")
