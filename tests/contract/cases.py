"""Which brokers the contract is run against."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Protocol

import pytest
from _pytest.mark import ParameterSet
from msgspec import Struct

from router.brokers import BrokerRegistry
from router.brokers.sqs import SqsSettings
from router.brokers.workers import BrokerSettings
from router.core.config import QueueConfig
from router.core.message import Message, ReceivedMessage, Tally
from router.core.trace import Span
from router.ports import Broker, Disconnected, Publication, Publisher
from tests.simulation.models import uri_of
from tests.simulation.plan import Kind

# What a publisher of whichever broker says of its trace.
PARENT = Span(
    "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", sampled=True, state="vendor=1"
)
TRACED = {"traceparent": PARENT.traceparent, "tracestate": PARENT.state}

Outage = Callable[[QueueConfig], AbstractAsyncContextManager[None]]

_LOCK_A_FILE = """
import sqlite3, sys
database = sqlite3.connect(sys.argv[1], isolation_level=None)
database.execute("BEGIN EXCLUSIVE")
print("locked", flush=True)
sys.stdin.read()
"""


@asynccontextmanager
async def locked_by_another_process(queue: QueueConfig) -> AsyncIterator[None]:
    path = queue.uri.removeprefix("sqlite:///").partition("?")[0]
    locker = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        _LOCK_A_FILE,
        path,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert locker.stdin is not None
    assert locker.stdout is not None
    assert await locker.stdout.readline() == b"locked\n"
    try:
        yield
    finally:
        locker.stdin.close()
        await locker.wait()


class Case(Struct, frozen=True, kw_only=True):
    name: str
    uri: str  # {directory} is a new one for each test
    virtual_time: bool = False
    leases: bool = True  # False: a hand-over is good as long as its connection
    short: float = 0.3  # a lease, a delay: long enough to act within it, short enough to wait for
    outage: Outage | None = None  # makes the broker unreachable
    server: str | None = None  # the fixture of the real one, a Place
    settings: BrokerSettings = BrokerSettings()
    keeps_tally: bool = True  # False: what has been tried is forgotten
    drops_duplicates: bool = True  # False: what is published twice is there twice
    any_body: bool = True  # False: text only, and never none
    prompt: bool = True  # False: a poll under way looks for what became due only now and then
    model: Kind | None = None  # of the simulation: what it does, the real one must do too (SIM-3)
    ample: bool = True  # False: too slow for many messages, each call looks at all of them

    @property
    def clock(self) -> str:
        """Of its event loop, as the mark `clock` names it."""
        if self.model is not None:
            return "simulated"
        return "virtual" if self.virtual_time else "real"

    @property
    def compares_bodies(self) -> bool:
        """Whether it is a work queue: there, what is identical is a duplicate without a key."""
        if self.model is not None:
            return self.model is Kind.POSTGRES
        return self.server in {None, "postgres", "pooled_postgres"}

    def queue(self, directory: Path, lease: float = 30.0) -> QueueConfig:
        uri = self.uri.format(directory=directory)
        if self.model is not None:
            uri = uri_of(self.model, "orders", directory)
        return QueueConfig(name="orders", uri=uri, visibility_timeout=lease)


class BrokerPlace(Protocol):
    """Where the queues of some cases are."""

    @property
    def env(self) -> Mapping[str, str]:
        """What the client finds in the environment."""

    def prepare(self, case: Case) -> Case:
        """The case, with a queue of its own there."""


SQS_IN_A_HURRY = BrokerSettings(SqsSettings(wait=2.0, shortest_lease=1.0))

CASES = [
    Case(name="memory", uri="memory://orders", virtual_time=True, short=10.0),
    Case(name="memory-without-group-hold", uri="memory://orders?groups=free", virtual_time=True),
    Case(
        name="memory-by-connection",
        uri="memory://orders?lease=none",
        virtual_time=True,
        leases=False,
    ),
    Case(name="memory-in-real-time", uri="memory://orders"),
    Case(
        name="sqlite",
        uri="sqlite:///{directory}/queue.db?queue=orders",
        outage=locked_by_another_process,
    ),
    Case(
        name="sqs-fifo",
        uri="{queue}.fifo",
        server="ministack",
        settings=SQS_IN_A_HURRY,
        short=1.0,
        keeps_tally=False,
        any_body=False,
    ),
    Case(
        name="sqs",
        uri="{queue}",
        server="ministack",
        settings=SQS_IN_A_HURRY,
        short=1.0,
        keeps_tally=False,
        drops_duplicates=False,
        any_body=False,
    ),
    Case(
        name="sqs-by-moto",
        uri="{queue}",
        server="moto",
        settings=SQS_IN_A_HURRY,
        short=1.0,
        keeps_tally=False,
        drops_duplicates=False,
        any_body=False,
        prompt=False,
        ample=False,
    ),
    Case(name="postgres", uri="made for each test", server="postgres"),
    Case(name="postgres-behind-a-pooler", uri="made for each test", server="pooled_postgres"),
    Case(
        name="pgmq",
        uri="",  # options of the one that is made for each test
        server="pgmq",
        short=1.0,
        drops_duplicates=False,
        any_body=False,
    ),
    Case(
        name="pgmq-fifo",
        uri="&fifo=true",
        server="pgmq",
        short=1.0,
        drops_duplicates=False,
        any_body=False,
    ),
    Case(
        name="pgmq-behind-a-pooler",
        uri="",
        server="pooled_pgmq",
        short=1.0,
        drops_duplicates=False,
        any_body=False,
    ),
    Case(
        name="activemq",
        uri="{url}/{queue}?heartbeat=1",
        server="activemq",
        leases=False,
        short=1.0,
        drops_duplicates=False,
    ),
    Case(name="nats", uri="{stream}", server="nats_server", short=0.6, keeps_tally=False),
    Case(
        name="nats-as-debian-has-it",
        uri="{stream}",
        server="old_nats_server",
        short=0.6,
        keeps_tally=False,
    ),
    Case(
        name="rabbitmq-classic",
        uri="{url}?queue={queue}&type=classic",
        server="rabbitmq",
        leases=False,
        short=1.0,
        drops_duplicates=False,
    ),
    Case(
        name="rabbitmq-quorum",
        uri="{url}?queue={queue}&type=quorum",
        server="rabbitmq",
        leases=False,
        short=1.0,
        drops_duplicates=False,
    ),
    Case(name="redis", uri="made for each test", server="redis", drops_duplicates=False),
    Case(name="model-of-postgres", uri="", model=Kind.POSTGRES, short=10.0),
    Case(
        name="model-of-sqs-fifo",
        uri="",
        model=Kind.SQS_FIFO,
        settings=SQS_IN_A_HURRY,
        short=1.0,
        keeps_tally=False,
        any_body=False,
    ),
    Case(
        name="model-of-sqs",
        uri="",
        model=Kind.SQS,
        settings=SQS_IN_A_HURRY,
        short=1.0,
        keeps_tally=False,
        drops_duplicates=False,
        any_body=False,
    ),
    Case(
        name="model-of-activemq",
        uri="",
        model=Kind.ACTIVEMQ,
        leases=False,
        short=1.0,
        drops_duplicates=False,
    ),
    Case(name="model-of-nats", uri="", model=Kind.NATS, short=0.6, keeps_tally=False),
    Case(
        name="model-of-rabbitmq",
        uri="",
        model=Kind.RABBITMQ,
        leases=False,
        short=1.0,
        drops_duplicates=False,
    ),
]


def params(cases: Iterable[Case]) -> list[ParameterSet]:
    """To run a test once for each case, on its clock."""
    return [pytest.param(case, marks=pytest.mark.clock(case.clock), id=case.name) for case in cases]


class Ends(Struct, frozen=True):
    """Both ends of one queue."""

    queue: QueueConfig
    brokers: BrokerRegistry
    broker: Broker
    publisher: Publisher


@asynccontextmanager
async def both_ends(brokers: BrokerRegistry, queue: QueueConfig) -> AsyncIterator[Ends]:
    publishing = brokers.open_publisher(queue)
    async with brokers.open_queue(queue) as broker, publishing as publisher:
        yield Ends(queue, brokers, broker, publisher)


@asynccontextmanager
async def reopened(ends: Ends) -> AsyncIterator[Broker]:
    """A new connection; the broker may still be starting."""
    for _ in range(50):
        try:
            async with ends.brokers.open_queue(ends.queue) as broker:
                yield broker
                return
        except Disconnected:
            await asyncio.sleep(0.2)


def name_of(received: ReceivedMessage) -> str | None:
    """What a message and its retry copies are called alike; no broker needs to make such a name."""
    return received.claimed_id or received.broker_id


def publication(
    message_id: str, *, group: str | None = None, high: bool = False, body: bytes | None = None
) -> Publication:
    message = Message(
        id=message_id, target="https://svc.example/do", group=group, high_priority=high
    )
    return Publication(message, message_id.encode() if body is None else body, message_id)


def bodies(messages: Sequence[ReceivedMessage]) -> list[str]:
    return [received.body.decode() for received in messages]


async def several(broker: Broker, count: int) -> list[ReceivedMessage]:
    """They come one by one, and not always as one batch."""
    received: list[ReceivedMessage] = []
    while len(received) < count:
        received += await broker.receive(count - len(received))
    return received


def queue_at(uri: str, lease: float | None = 30.0) -> QueueConfig:
    return QueueConfig(name="orders", uri=uri, visibility_timeout=lease)


async def receive_one(broker: Broker) -> ReceivedMessage:
    (received,) = await broker.receive(1)
    return received


async def receive_tried(broker: Broker, tally: Tally) -> ReceivedMessage:
    """Receive a message that was put off with this tally before its broker was killed.

    Its original, which has another tally, may come before it: brokers write that a message was
    removed only after they have answered. Copies that they have confirmed, they keep.
    """
    while (received := await receive_one(broker)).tally != tally:
        pass
    return received


async def is_empty(broker: Broker) -> bool:
    """Whether nothing can be had now; after it, the connection receives no more."""
    waiting = asyncio.ensure_future(broker.receive(1))
    await asyncio.sleep(0.2)
    broker.stop()
    return not await waiting
