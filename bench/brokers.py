"""The brokers of the benchmark: a server each, started on use, and new queues in it."""

import asyncio
import itertools
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final

import pytest

from router.brokers import BrokerRegistry
from router.brokers.sqs import SqsSettings
from router.brokers.workers import BrokerSettings
from router.core.config import QueueConfig
from router.ports import Publisher
from tests.support.servers import activemq, nats, postgres, rabbitmq, sqs

QUEUE: Final = "orders"
NOTHING: Final[Mapping[str, str]] = MappingProxyType({})
LOOK_SECONDS: Final = 1.0
SQS_MOST: Final = 4_000  # each receive of the stand-in looks through all that waits
_SHORT_POLLS: Final = {"MESSAGE_ROUTER_SQS_WAIT_TIME_SECONDS": "1"}  # a stop waits for the last
SETTINGS: Final = BrokerSettings(SqsSettings(wait=1.0))


class Unavailable(Exception):
    """The broker is not installed: the benchmark leaves it out."""


@dataclass(frozen=True, slots=True)
class BenchPlace:
    """A broker that runs."""

    new_uri: Callable[[], str]  # of a queue that nobody has used
    env: Mapping[str, str] = field(default_factory=lambda: NOTHING)  # what its clients need
    lives_in_router: bool = False  # published to through the router's API only
    most: int | None = None  # messages that it can hold without becoming slow

    def new_queue(self) -> QueueConfig:
        return QueueConfig(name=QUEUE, uri=self.new_uri(), visibility_timeout=60.0)


@contextmanager
def _memory(_: Path) -> Iterator[BenchPlace]:
    yield BenchPlace(lambda: "memory://orders", lives_in_router=True)


@contextmanager
def _sqlite(folder: Path) -> Iterator[BenchPlace]:
    numbers = itertools.count(1)
    yield BenchPlace(lambda: f"sqlite:///{folder}/queue-{next(numbers)}.db?queue=orders")


@contextmanager
def _nats(folder: Path) -> Iterator[BenchPlace]:
    with nats.NatsServer(nats.current(), folder).running() as server:
        streams = (f"BENCH{number}" for number in itertools.count(1))

        def new_stream() -> str:
            stream = next(streams)
            asyncio.run(nats.add_stream(server.port, stream))
            return f"nats://{server.address}/?stream={stream}"

        yield BenchPlace(new_stream, {"NATS_SERVERS": f"nats://{server.address}"})


@contextmanager
def _sqs(folder: Path) -> Iterator[BenchPlace]:
    os.environ.update(sqs.ENV)  # this process publishes
    with sqs.ministack(folder).running() as server:
        env = {**sqs.ENV, **_SHORT_POLLS, "SQS_ENDPOINT_OVERRIDE": server.url}
        yield BenchPlace(lambda: server.new_queue(fifo=True, visibility=60), env, most=SQS_MOST)


@contextmanager
def _postgresql(_: Path) -> Iterator[BenchPlace]:
    numbers = itertools.count(1)
    with postgres.postgres_server() as server:
        yield BenchPlace(lambda: f"{server.url}?queue=orders-{next(numbers)}")


@contextmanager
def _pgmq(_: Path, options: str = "") -> Iterator[BenchPlace]:
    numbers = itertools.count(1)
    with postgres.postgres_server() as server:
        server.install_pgmq()

        def new_queue() -> str:
            name = f"orders_{next(numbers)}"
            server.add_pgmq_queue(name)
            return f"{server.pgmq_url}?queue={name}{options}"

        yield BenchPlace(new_queue)


@contextmanager
def _rabbitmq(_: Path) -> Iterator[BenchPlace]:
    numbers = itertools.count(1)
    with rabbitmq.rabbit_server() as server:
        env = {"RABBITMQ_URL": server.url}
        yield BenchPlace(lambda: f"{server.url}?queue=orders-{next(numbers)}&type=classic", env)


@contextmanager
def _activemq(folder: Path) -> Iterator[BenchPlace]:
    numbers = itertools.count(1)
    with activemq.ActiveMqServer(folder).running() as server:
        env = {"ACTIVEMQ_BROKER_URL": f"stomp://{server.address}"}
        yield BenchPlace(lambda: f"{server.url}/orders-{next(numbers)}", env)


BROKERS: Final[Mapping[str, Callable[[Path], AbstractContextManager[BenchPlace]]]] = {
    "memory": _memory,
    "SQLite": _sqlite,
    "NATS": _nats,
    "SQS": _sqs,
    "PostgreSQL": _postgresql,
    "PGMQ": _pgmq,
    "PGMQ-without-states": partial(_pgmq, options="&state=false"),
    "RabbitMQ": _rabbitmq,
    "ActiveMQ": _activemq,
}
BY_DEFAULT: Final = tuple(name for name in BROKERS if name != "PGMQ-without-states")


@contextmanager
def running(name: str) -> Iterator[BenchPlace]:
    """Raises Unavailable."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        try:
            with BROKERS[name](Path(folder)) as place:
                yield place
        except pytest.skip.Exception as reason:  # how the tests' servers say it
            raise Unavailable(str(reason)) from None


@asynccontextmanager
async def publisher(queue: QueueConfig) -> AsyncIterator[Publisher]:
    async with (
        BrokerRegistry(worker_id="bench", dedup_window=0.0, settings=SETTINGS) as registry,
        registry.open_publisher(queue) as line,
    ):
        yield line


async def left_in(queue: QueueConfig) -> int:
    """Messages that are not acknowledged, once no router runs."""
    async with (
        BrokerRegistry(worker_id="bench", dedup_window=0.0, settings=SETTINGS) as registry,
        registry.open_queue(queue) as broker,
    ):
        depth = await broker.depth()
        if depth is not None:
            return depth.waiting + depth.in_flight
        asyncio.get_running_loop().call_later(LOOK_SECONDS, broker.stop)
        return len(await broker.receive(1))
