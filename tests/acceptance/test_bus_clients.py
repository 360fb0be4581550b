"""A command bus on other brokers than PGMQ, whose sender nobody here wrote (CMD-7)."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

import boto3
import pika
import pytest
from nats.aio.client import Client as NatsClient
from nats.errors import TimeoutError as NothingCame

from router.worker import Command, Context, Permanent, Worker
from tests.acceptance.process import eventually
from tests.acceptance.site import Site
from tests.outbound.servers import Connection, listening
from tests.support.servers import nats, sqs
from tests.support.servers.nats import NatsServer, add_stream
from tests.support.servers.rabbitmq import rabbit_server

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

NO_FUNDS: Final = {"code": "NO_FUNDS", "message": "none left"}


class Bus(Protocol):
    """The queues of a domain, as a client sees them."""

    commands: str  # their URIs
    replies: str
    env: Mapping[str, str]

    def send(self, commands: Sequence[bytes]) -> None: ...

    def replied(self) -> Sequence[bytes]:
        """Take what is in the reply queue."""


class BotoBus:
    env: Mapping[str, str] = {**sqs.ENV, "MESSAGE_ROUTER_SQS_WAIT_TIME_SECONDS": "1"}

    def __init__(self, server: sqs.SqsServer) -> None:
        self.commands, self.replies = (server.new_queue(fifo=False) for _ in range(2))
        self._client = boto3.client(
            "sqs",
            region_name="eu-west-1",
            endpoint_url=server.url,
            aws_access_key_id="test",
            aws_secret_access_key="test",
        )

    def send(self, commands: Sequence[bytes]) -> None:
        for each in commands:
            self._client.send_message(QueueUrl=self.commands, MessageBody=each.decode())

    def replied(self) -> Sequence[bytes]:
        found = self._client.receive_message(QueueUrl=self.replies, MaxNumberOfMessages=10)
        taken = found.get("Messages", [])
        for each in taken:
            self._client.delete_message(QueueUrl=self.replies, ReceiptHandle=each["ReceiptHandle"])
        return [each["Body"].encode() for each in taken]


class PikaBus:
    env: Mapping[str, str] = {}

    def __init__(self, url: str) -> None:
        self.commands, self.replies = f"{url}?queue=commands", f"{url}?queue=replies"
        self._url = url
        with self._channel() as channel:
            for name in ("commands", "replies"):
                channel.queue_declare(name, durable=True)

    @contextmanager
    def _channel(self) -> Iterator[Any]:
        with pika.BlockingConnection(pika.URLParameters(self._url)) as connection:
            yield connection.channel()

    def send(self, commands: Sequence[bytes]) -> None:
        with self._channel() as channel:
            for each in commands:
                channel.basic_publish("", "commands", each)

    def replied(self) -> Sequence[bytes]:
        found: list[bytes] = []
        with self._channel() as channel:
            while (body := channel.basic_get("replies", auto_ack=True)[2]) is not None:
                found.append(body)
        return found


class NatsBus:
    env: Mapping[str, str] = {}

    def __init__(self, server: NatsServer) -> None:
        self._url = f"nats://{server.address}"
        self.commands = f"{self._url}/?stream=BUS&subject=BUS.commands"
        self.replies = f"{self._url}/?stream=BUS&subject=BUS.replies"

    def send(self, commands: Sequence[bytes]) -> None:
        asyncio.run(self._send(commands))

    def replied(self) -> Sequence[bytes]:
        return asyncio.run(self._replied())

    @asynccontextmanager
    async def _jetstream(self) -> AsyncIterator[Any]:
        client = NatsClient()
        await client.connect(self._url)
        yield client.jetstream()
        await client.close()

    async def _send(self, commands: Sequence[bytes]) -> None:
        async with self._jetstream() as stream:
            for each in commands:
                await stream.publish("BUS.commands", each)

    async def _replied(self) -> Sequence[bytes]:
        found: list[bytes] = []
        async with self._jetstream() as stream:
            reading = await stream.pull_subscribe("BUS.replies", "asker", stream="BUS")
            try:
                for each in await reading.fetch(10, timeout=1):
                    found.append(each.data)
                    await each.ack_sync()
            except NothingCame:
                pass
        return found


@pytest.fixture(params=["boto3", "pika", "nats-py"])
async def bus(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bus]:
    match request.param:
        case "boto3":
            with sqs.ministack(tmp_path).running() as stand_in:
                yield BotoBus(stand_in)
        case "pika":
            with rabbit_server() as rabbit:
                yield PikaBus(rabbit.url)
        case "nats-py":
            with NatsServer(nats.current(), tmp_path).running() as server:
                await add_stream(server.port, "BUS")
                yield NatsBus(server)


def command(command_id: str, kind: str, **data: object) -> bytes:
    fields = {"command_type": kind, "domain": "payments", "data": data, "reply_to": "replies"}
    return json.dumps({"command_id": command_id, "correlation_id": "k-1", **fields}).encode()


SENT: Final = [
    command("done", "Debit", amount=12),
    command("refused", "Debit", amount=-1),
    command("unheard", "Unheard"),
]
SUCCESS: Final = {
    "command_id": "done",
    "correlation_id": "k-1",
    "outcome": "SUCCESS",
    "result": {"left": 88},
}
REFUSED: Final = {
    "command_id": "refused",
    "correlation_id": "k-1",
    "outcome": "FAILED",
    "error_code": "NO_FUNDS",
    "error_message": "none left",
}


async def answers(bus: Bus, count: int) -> dict[str, Any]:
    """What the client gets, by the ids of its commands, once there are so many."""
    found: list[Any] = []
    async with asyncio.timeout(60):
        while len(found) < count:
            found += map(json.loads, await asyncio.to_thread(bus.replied))
    assert len(found) == count
    return {each["command_id"]: each for each in found}


async def account(connection: Connection) -> None:
    while True:
        asked = json.loads((await connection.read()).body)
        if asked["payload"]["amount"] > 0:
            await connection.reply(200, b'{"result": {"left": 88}}')
        else:
            await connection.reply(422, json.dumps({"error": NO_FUNDS}).encode())


@pytest.mark.rule("CMD-7", "CMD-3")
async def test_the_service_answers_commands_of_any_client(site: Site, bus: Bus) -> None:
    site.settings |= bus.env
    async with listening(account) as target:
        queue = {
            "queueName": "commands",
            "queueUri": bus.commands,
            "envelope": "command-bus",
            "routes": {"Debit": {"mediationTarget": target.url}},
        }
        document = site.folder / "routing.json"
        replies = {"queueName": "replies", "queueUri": bus.replies}
        document.write_text(json.dumps({"queues": [queue], "replyQueues": [replies]}))
        site.settings["MESSAGE_ROUTER_CONFIG_URL"] = document.as_uri()
        async with site.router() as router:
            await asyncio.to_thread(bus.send, SENT)
            found = await answers(bus, 3)
            letters = (await router.get("/dead-letters")).json()["items"]

    assert (found["done"], found["refused"]) == (SUCCESS, REFUSED)
    assert (found["unheard"]["outcome"], found["unheard"]["error_code"]) == ("FAILED", "MALFORMED")
    assert sorted(each["messageId"] for each in letters) == ["refused", "unheard"]
    assert {each.headers["x-message-type"] for each in target.requests} == {"Debit"}


@pytest.mark.rule("CMD-7", "CMD-9", "CMD-3")
async def test_the_library_answers_commands_of_any_client(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in bus.env.items():
        monkeypatch.setenv(name, value)
    seen: list[tuple[str | None, str | None]] = []
    worker = Worker(bus.commands, dead_letters="none", reply_queues={"replies": bus.replies})

    @worker.handler("Debit")
    def debit(command: Command, context: Context) -> object:
        seen.append((context.command_type, context.domain))
        if command.payload["amount"] < 0:
            raise Permanent(**NO_FUNDS)
        return {"left": 88}

    await asyncio.to_thread(bus.send, SENT[:2])
    await worker.start()
    found = await answers(bus, 2)
    await eventually(lambda: worker.counts.delivered == worker.counts.dead_lettered == 1)
    await worker.stop()

    assert found == {"done": SUCCESS, "refused": REFUSED}
    assert set(seen) == {("Debit", "payments")}
