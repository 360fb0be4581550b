"""The brokers that chaos can be brought to: their server, and their queue seen from outside."""

import asyncio
import json
import os
import sqlite3
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    closing,
    contextmanager,
    nullcontext,
)
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Protocol

import aio_pika

from router.brokers import BrokerRegistry
from router.brokers.rabbitmq.connection import Table
from router.core.config import Ordering, QueueConfig
from router.core.message import parse
from router.ports import BrokerError, Publication, Publisher
from tests.acceptance.site import Site
from tests.chaos.history import SLOW_POOL, Body
from tests.support.servers import nats, sqs
from tests.support.servers.activemq import ActiveMqServer
from tests.support.servers.base import ServerProcess
from tests.support.servers.nats import NatsServer
from tests.support.servers.postgres import PostgresServer, postgres_server
from tests.support.servers.rabbitmq import RabbitServer, rabbit_server
from tests.support.servers.redis import RedisServer
from tests.support.stomp import waiting

QUEUE: Final = "orders"
POOLS: Final[Sequence[dict[str, object]]] = (
    {"code": "GROUPED", "concurrency": 16},
    {"code": "LOOSE", "concurrency": 8, "ungrouped": "parallel"},
)
NARROW_POOLS: Final[Sequence[dict[str, object]]] = (
    {"code": "GROUPED", "concurrency": 1},
    {"code": "LOOSE", "concurrency": 1, "ungrouped": "parallel"},
)
SLOW_POOLS: Final = (*POOLS, {"code": SLOW_POOL, "concurrency": 1})
DELIVERY_LIMIT: Final = 20  # the default of RabbitMQ 4


@dataclass(frozen=True, kw_only=True)
class Promises:
    """What a broker keeps, as docs/brokers.md says, and what a run therefore checks."""

    routers: int = 2  # that may share the queue and keep its order
    order_after_a_crash: bool = True
    order_after_a_failure: bool = True  # False: a group may overtake a message that failed
    recovers_at_once: bool = False  # WQ-10
    knows_publications: bool = True  # False: what is published again is there twice
    survives_a_kill: bool = True  # of its server
    lease: int = 5  # seconds
    # Also returned for full pools and open circuits, and by a router that ends in peace. A return
    # is a copy and an ACK: a kill in between leaves two, so nothing is judged as repeated.
    is_returned_often: bool = False


class ChaosQueue(Protocol):
    """One queue of a broker."""

    @property
    def promises(self) -> Promises: ...

    @property
    def server(self) -> ServerProcess | None:
        """What can be stopped and started."""

    def uri(self, port: int | None = None) -> str:
        """Return its URI, with another port of its server."""

    def configure(self, site: Site) -> None:
        """Add what else a router needs to know."""

    async def in_flight(self) -> list[Body] | None:
        """Return what is handed out and not settled; None: the broker does not show it."""

    async def left(self) -> list[Body]:
        """Return what is not settled. Only called when no router runs, or `shows_left`."""


@dataclass(frozen=True)
class SqliteQueue:
    """The embedded queue: a file that all routers share."""

    file: Path
    promises: Promises = Promises(recovers_at_once=True, lease=30)
    server: None = None

    def uri(self, port: int | None = None) -> str:
        del port
        return f"sqlite:///{self.file}?queue={QUEUE}"

    def configure(self, site: Site) -> None:
        del site

    async def in_flight(self) -> list[Body]:
        return self._bodies("state = 'in-flight'")

    async def left(self) -> list[Body]:
        return self._bodies("finished_at IS NULL")

    def _bodies(self, condition: str) -> list[Body]:
        return bodies_in(
            self.file,
            f"SELECT body FROM queue_messages JOIN queue_bodies USING (id) WHERE {condition}",  # noqa: S608  ours
        )


@dataclass(frozen=True)
class ChaosPostgresQueue:
    server: PostgresServer
    promises: Promises = Promises(recovers_at_once=True, lease=30)

    def uri(self, port: int | None = None) -> str:
        url = self.server.url.replace(f":{self.server.port}/", f":{port or self.server.port}/")
        return f"{url}?queue={QUEUE}"

    def configure(self, site: Site) -> None:
        del site

    async def in_flight(self) -> list[Body]:
        return await self._bodies("state = 'in-flight'")

    async def left(self) -> list[Body]:
        return await self._bodies("finished_at IS NULL")

    async def _bodies(self, condition: str) -> list[Body]:
        query = "SELECT convert_from(body, 'UTF8') FROM message_router.queue_messages WHERE "
        lines = await asyncio.to_thread(self.server.sql, query + condition)
        return [json.loads(line) for line in lines.splitlines()]


@dataclass(frozen=True)
class ChaosPgmqQueue:
    server: PostgresServer
    promises: Promises = Promises(
        routers=1, order_after_a_crash=False, order_after_a_failure=False, knows_publications=False
    )

    is_fifo: bool = False

    def uri(self, port: int | None = None) -> str:
        url = self.server.pgmq_url.replace(f":{self.server.port}/", f":{port or self.server.port}/")
        return f"{url}?queue={QUEUE}" + ("&fifo=true" if self.is_fifo else "")

    def configure(self, site: Site) -> None:
        del site

    async def in_flight(self) -> None:
        return None

    async def left(self) -> list[Body]:
        lines = await asyncio.to_thread(self.server.sql, "SELECT message FROM pgmq.q_orders")
        return [json.loads(line) for line in lines.splitlines()]


@dataclass(frozen=True)
class NatsQueue:
    server: NatsServer
    promises: Promises = Promises(
        routers=1,
        order_after_a_failure=False,
        knows_publications=False,  # only those with a dedup key, and `POST /messages` has none
    )

    def uri(self, port: int | None = None) -> str:
        return f"nats://127.0.0.1:{port or self.server.port}/?stream=ORDERS"

    def configure(self, site: Site) -> None:
        del site

    async def in_flight(self) -> None:
        return None

    async def left(self) -> list[Body]:
        subject = "CONSUMER.INFO.ORDERS.message-router-orders"
        info = await nats.call(self.server.port, subject, {})
        return _counted(info["num_pending"] + info["num_ack_pending"])


@dataclass(frozen=True)
class ChaosRedisQueue:
    server: RedisServer
    promises: Promises = Promises(
        routers=1, order_after_a_crash=False, order_after_a_failure=False, knows_publications=False
    )

    def uri(self, port: int | None = None) -> str:
        return f"redis://127.0.0.1:{port or self.server.port}/0?stream={QUEUE}"

    def configure(self, site: Site) -> None:
        del site

    async def in_flight(self) -> None:
        return None

    async def left(self) -> list[Body]:
        return await _counted_by_its_depth(self)


@dataclass(frozen=True)
class ChaosRabbitQueue:
    url: str
    server: RabbitServer | None
    promises: Promises = Promises(routers=1, order_after_a_failure=False, knows_publications=False)
    kind: str = "classic"
    is_ours: bool = True  # False: somebody else makes it
    limit: int | None = None  # of deliveries, of a queue that somebody else makes

    def uri(self, port: int | None = None) -> str:
        url = self.url
        if port is not None and self.server is not None:
            url = url.replace(f":{self.server.port}/", f":{port}/")
        return f"{url}?queue={QUEUE}&type={self.kind}"

    async def create(self) -> None:
        """Make the queue as others do."""
        arguments: Table = {"x-queue-type": self.kind}
        if self.limit is not None:
            arguments["x-delivery-limit"] = self.limit
        async with await aio_pika.connect(self.url) as line, line.channel() as channel:
            await channel.declare_queue(QUEUE, durable=True, arguments=arguments)

    def configure(self, site: Site) -> None:
        del site

    async def in_flight(self) -> None:
        return None

    async def left(self) -> list[Body]:
        return await _counted_by_its_depth(self)


@dataclass(frozen=True)
class ChaosSqsQueue:
    server: sqs.SqsServer
    url: str
    promises: Promises = Promises(survives_a_kill=False, knows_publications=False)  # as NATS

    def uri(self, port: int | None = None) -> str:
        return self.url.replace(f":{self.server.port}/", f":{port or self.server.port}/")

    def configure(self, site: Site) -> None:
        site.settings |= {**sqs.ENV, "MESSAGE_ROUTER_SQS_WAIT_TIME_SECONDS": "2"}

    async def in_flight(self) -> None:
        return None

    async def left(self) -> list[Body]:
        return _counted(sum(await asyncio.to_thread(self.server.counts, self.url)))


@dataclass(frozen=True)
class ActiveMqQueue:
    server: ActiveMqServer
    promises: Promises = Promises(routers=1, order_after_a_failure=False, knows_publications=False)

    def uri(self, port: int | None = None) -> str:
        return f"activemq://127.0.0.1:{port or self.server.port}/{QUEUE}"

    def configure(self, site: Site) -> None:
        del site

    async def in_flight(self) -> None:
        return None

    async def left(self) -> list[Body]:
        return [json.loads(body) for body in await waiting(self.server.port, QUEUE)]


@contextmanager
def _postgres(folder: Path) -> Iterator[ChaosQueue]:
    del folder
    with postgres_server() as server:
        yield ChaosPostgresQueue(server)


@contextmanager
def _pgmq(folder: Path, *, is_fifo: bool = False) -> Iterator[ChaosQueue]:
    del folder
    with postgres_server() as server:
        server.install_pgmq()
        server.add_pgmq_queue(QUEUE)
        yield ChaosPgmqQueue(server, is_fifo=is_fifo)


@contextmanager
def _nats(folder: Path) -> Iterator[ChaosQueue]:
    with NatsServer(nats.current(), folder).running() as server:
        yield NatsQueue(server)


@contextmanager
def _redis(folder: Path) -> Iterator[ChaosQueue]:
    with RedisServer(folder, durable=True).running() as server:
        yield ChaosRedisQueue(server)


@contextmanager
def _rabbitmq(folder: Path) -> Iterator[ChaosQueue]:
    del folder
    with rabbit_server() as server:
        yield ChaosRabbitQueue(server.url, server)


@contextmanager
def _quorum(
    folder: Path, *, is_ours: bool = True, limit: int | None = None
) -> Iterator[ChaosQueue]:
    """At RABBITMQ_URL if it is set: to try another version. Its queues must be gone before."""
    del folder
    promises = Promises(
        routers=1,
        order_after_a_crash=False,
        order_after_a_failure=False,
        knows_publications=False,
        is_returned_often=True,
    )
    with ExitStack() as stack:
        server, url = None, os.environ.get("RABBITMQ_URL")
        if url is None:
            server = stack.enter_context(rabbit_server())
            url = server.url
        yield ChaosRabbitQueue(url, server, promises, "quorum", is_ours, limit)


@contextmanager
def _sqs(folder: Path, *, fifo: bool = True) -> Iterator[ChaosQueue]:
    os.environ |= sqs.ENV
    with sqs.ministack(folder).running() as server:
        yield ChaosSqsQueue(server, server.new_queue(fifo=fifo))


@contextmanager
def _activemq(folder: Path) -> Iterator[ChaosQueue]:
    with ActiveMqServer(folder).running() as server:
        yield ActiveMqQueue(server)


def _sqlite(folder: Path) -> AbstractContextManager[ChaosQueue]:
    return nullcontext(SqliteQueue(folder / "queue.db"))


BROKERS: Final[Mapping[str, Callable[[Path], AbstractContextManager[ChaosQueue]]]] = {
    "activemq": _activemq,
    "nats": _nats,
    "postgres": _postgres,
    "rabbitmq": _rabbitmq,
    "redis": _redis,
    "sqlite": _sqlite,
    "sqs": _sqs,
}
# Only killed, and not brought to a storm.
VARIANTS: Final[Mapping[str, Callable[[Path], AbstractContextManager[ChaosQueue]]]] = {
    "pgmq": _pgmq,
    "rabbitmq-default": partial(_quorum, is_ours=False),
    "rabbitmq-limit": partial(_quorum, is_ours=False, limit=DELIVERY_LIMIT),
    "rabbitmq-quorum": _quorum,
}

# Strict order is tried with it.
FIFO: Final[Mapping[str, Callable[[Path], AbstractContextManager[ChaosQueue]]]] = {
    "pgmq-fifo": partial(_pgmq, is_fifo=True),
}

# Without any order, so not for chaos.
UNORDERED: Final[Mapping[str, Callable[[Path], AbstractContextManager[ChaosQueue]]]] = {
    "sqs-standard": partial(_sqs, fifo=False),
}


@contextmanager
def running(broker: str) -> Iterator[ChaosQueue]:
    with (
        tempfile.TemporaryDirectory(prefix=f"chaos-{broker}-") as folder,
        {**BROKERS, **VARIANTS, **FIFO, **UNORDERED}[broker](Path(folder)) as queue,
    ):
        yield queue


async def prepare(queue: ChaosQueue) -> None:
    """Create what the router does not create by itself."""
    if isinstance(queue, NatsQueue):
        await nats.add_stream(queue.server.port, "ORDERS")
    elif isinstance(queue, ChaosRabbitQueue) and not queue.is_ours:
        await queue.create()


class NotAnswered(Exception):
    """Nobody knows whether a publication took effect."""


@dataclass
class Direct:
    """Publishes to the broker itself, over a connection that is opened again when it breaks."""

    queue: ChaosQueue
    brokers: BrokerRegistry
    _stack: AsyncExitStack
    _ordering: Ordering | None  # with which it creates the queue
    _line: Publisher | None = None

    async def put(self, bodies: Sequence[Body]) -> None:
        config = QueueConfig(name=QUEUE, uri=self.queue.uri(), ordering=self._ordering)
        encoded = [json.dumps(body).encode() for body in bodies]
        try:
            if self._line is None:
                opened = self.brokers.open_publisher(config)
                self._line = await self._stack.enter_async_context(opened)
            await self._line.publish([Publication(m := parse(b), b, m.id) for b in encoded])
        except (BrokerError, OSError, TimeoutError) as error:
            self._line = None
            await self._stack.aclose()
            raise NotAnswered from error


@asynccontextmanager
async def publishing_to(
    queue: ChaosQueue, ordering: Ordering | None = None
) -> AsyncIterator[Direct]:
    async with (
        BrokerRegistry(worker_id="chaos", dedup_window=300.0) as brokers,
        AsyncExitStack() as stack,
    ):
        yield Direct(queue, brokers, stack, ordering)


def dead_letters(site: Site) -> list[Body]:
    """Return the bodies in the dead-letter store."""
    return bodies_in(site.folder / "state" / "dead-letters.db", "SELECT body FROM dead_letters")


def bodies_in(file: Path, query: str) -> list[Body]:
    with closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True, timeout=10)) as db:
        return [json.loads(body) for (body,) in db.execute(query)]


async def _counted_by_its_depth(queue: ChaosQueue) -> list[Body]:
    config = QueueConfig(name=QUEUE, uri=queue.uri())
    async with (
        BrokerRegistry(worker_id="check", dedup_window=300.0) as brokers,
        brokers.open_queue(config) as broker,
    ):
        depth = await broker.depth()
    assert depth is not None
    return _counted(depth.waiting + depth.in_flight)


def _counted(number: int) -> list[Body]:
    """What a broker reports that shows no bodies."""
    return [{"messages": number}] if number else []
