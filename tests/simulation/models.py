"""Which model stands behind which kind of queue, and how the adapters come to talk to it."""

import asyncio
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, Protocol

from router.brokers.kit import consuming
from router.brokers.nats import broker as nats
from router.brokers.rabbitmq import broker as rabbitmq
from router.brokers.sqlite import database as sqlite_database
from router.brokers.sqlite.queue_table import FileLease, NewMessage, QueueTable
from router.brokers.sqs import broker as sqs
from router.core.config import QueueConfig
from router.core.message import Message
from tests.simulation import activemq as activemq_model
from tests.simulation import nats as nats_model
from tests.simulation import networked
from tests.simulation import rabbitmq as rabbit_model
from tests.simulation import sqs as sqs_model
from tests.simulation.loop import Process, SimLoop
from tests.simulation.network import Put, Weather
from tests.simulation.plan import Kind

Claim = Callable[[Sequence[FileLease]], None]

IDLE_POLL: Final = 2.0  # hours of idleness are looked through more quickly than in real life


class BrokerModel(Protocol):
    """A model of a broker, as the world treats it."""

    on_put: Put

    def make(self, queue: str) -> None: ...
    def publish(self, queue: str, body: bytes, message: Message | None) -> None: ...
    def contents(self) -> list[bytes]: ...
    def drop(self, process: Process | None = None, *, restarted: bool = False) -> None: ...


def uri_of(kind: Kind, name: str, directory: Path) -> str:
    match kind:
        case Kind.SQLITE | Kind.POSTGRES:
            return f"sqlite:///{directory}/queue.db?queue={name}"
        case Kind.RABBITMQ:
            return f"amqp://broker/?queue={name}"
        case Kind.SQS:
            return f"https://sqs.eu-west-1.amazonaws.com/1/{name}"
        case Kind.SQS_FIFO:
            return f"https://sqs.eu-west-1.amazonaws.com/1/{name}.fifo"
        case Kind.NATS:
            return f"nats://broker:4222/?stream={name}&consumer=c"
        case Kind.ACTIVEMQ:
            return f"activemq://broker:61613/{name}"


def place_of(queue: QueueConfig) -> str:
    """What the server calls it."""
    return queue.uri if queue.uri.startswith("https:") else queue.name


def make_server(kind: Kind, weather: Weather) -> BrokerModel:
    match kind:
        case Kind.SQLITE:
            return networked.NoServer()
        case Kind.POSTGRES:
            return networked.NetworkedServer(weather)
        case Kind.RABBITMQ:
            return rabbit_model.RabbitModel(weather)
        case Kind.SQS | Kind.SQS_FIFO:
            return sqs_model.SqsModel(weather)
        case Kind.NATS:
            return nats_model.NatsModel(weather)
        case Kind.ACTIVEMQ:
            return activemq_model.ActiveMqModel(weather)


def _heard(server: BrokerModel, insert: Callable[..., None]) -> Callable[..., None]:
    """Have the world hear of what comes into the table, as it does."""

    def hear(
        table: QueueTable,
        db: sqlite3.Connection,
        new: Sequence[tuple[NewMessage, bytes]],
        batch: int | None = None,
    ) -> None:
        insert(table, db, new, batch)
        for _, body in new:
            server.on_put(table.queue, body)

    return hear


@contextmanager
def installed(server: BrokerModel, on_claim: Claim = lambda _: None) -> Iterator[None]:
    """Where the adapters open their connections, the model answers.

    `on_claim` hears of what a work queue hands out, as it does.
    """

    def claim(*asked: Any, **options: Any) -> Sequence[FileLease]:
        leases = was(*asked, **options)
        on_claim(leases)
        return leases

    was = QueueTable.claim
    changes: list[tuple[Any, str, Any]] = [
        (QueueTable, "claim", claim),
        (QueueTable, "insert", _heard(server, QueueTable.insert)),
        # A turn that takes the loop long is noticed by a clock of the machine: there is none here.
        (sqlite_database, "time", SimpleNamespace(perf_counter=lambda: 0.0)),
        (sqlite_database, "LAST_POLL_SECONDS", IDLE_POLL),
    ]
    if isinstance(server, rabbit_model.RabbitModel):
        changes.append((rabbitmq, "open_connection", server.open_connection))
    elif isinstance(server, sqs_model.SqsModel):
        client = type("SimClient", (sqs_model.SimClient,), {"server": server})
        changes += [(sqs, "SqsClient", client), (sqs, "find_account", sqs_model.SimAccount.find)]
    elif isinstance(server, nats_model.NatsModel):
        changes += [
            (nats, "open_connection", server.open_connection),
            # The lock of a strict queue is ours for so long, by a clock of the machine.
            (consuming, "time", SimpleNamespace(monotonic=asyncio.get_running_loop().time)),
        ]
    elif isinstance(server, activemq_model.ActiveMqModel):
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        loop.network = server
    before = [getattr(module, name) for module, name, _ in changes]
    for module, name, value in changes:
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name, _), value in zip(changes, before, strict=True):
            setattr(module, name, value)
