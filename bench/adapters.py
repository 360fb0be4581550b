"""What a broker's adapter costs: receive and ACK, CPU of our process per message, real servers."""

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest
import uvloop

from bench.process import message
from router.brokers import BrokerDoor
from router.brokers.sqs_settings import SqsSettings
from router.brokers.worker import BrokerSettings
from router.core.config import QueueConfig
from tests.support.servers import activemq, nats, postgres, rabbitmq, sqs

BATCH: Final = 50  # what the router asks for at most
BOUNDS: Final = {"sqlite": 20, "postgresql": 60, "nats": 45, "sqs": 250}
GROUPS: Final = 1_000
CHUNK: Final = 500


@contextmanager
def _sqlite(folder: Path) -> Iterator[str]:
    yield f"sqlite:///{folder}/queue.db?queue=orders"


@contextmanager
def _postgresql(_: Path) -> Iterator[str]:
    with postgres.postgres_server() as server:
        yield f"{server.url}?queue=orders"


@contextmanager
def _nats(folder: Path) -> Iterator[str]:
    with nats.running(nats.NatsServer(nats.current(), folder)) as server:
        asyncio.run(nats.add_stream(server.port, "BENCH"))
        yield f"nats://{server.address}/?stream=BENCH"


@contextmanager
def _sqs(folder: Path) -> Iterator[str]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        os.environ.setdefault(name, "bench")
    with sqs.running(sqs.ministack(folder)) as server:
        yield server.new_queue(fifo=False)


@contextmanager
def _rabbitmq(_: Path) -> Iterator[str]:
    with rabbitmq.rabbit_server() as server:
        yield f"{server.url}?queue=orders&type=classic"


@contextmanager
def _activemq(folder: Path) -> Iterator[str]:
    with activemq.running(activemq.ActiveMqServer(folder)) as server:
        yield f"{server.url}/orders"


SERVERS: Final = {
    "sqlite": _sqlite,
    "postgresql": _postgresql,
    "nats": _nats,
    "sqs": _sqs,
    "rabbitmq": _rabbitmq,
    "activemq": _activemq,
}


def report(messages: int, rounds: int) -> None:
    for name, opened in SERVERS.items():
        figures: list[float] = []
        try:
            with tempfile.TemporaryDirectory() as folder, opened(Path(folder)) as uri:
                for _ in range(rounds):
                    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                        figures.append(runner.run(_cost(uri, messages)))
        except pytest.skip.Exception as reason:
            print(f"{name:>12}  {reason}")
            continue
        bound = f"  bound {BOUNDS[name]}" if name in BOUNDS else ""
        print(
            f"{name:>12}  {statistics.median(figures):5.0f} µs per message"
            f" ({min(figures):.0f}-{max(figures):.0f} of {rounds}){bound}",
            flush=True,
        )


async def _cost(uri: str, messages: int) -> float:
    queue = QueueConfig(name="orders", uri=uri, visibility_timeout=60.0)
    settings = BrokerSettings(sqs=SqsSettings(wait=2.0))
    async with (
        BrokerDoor(worker_id="bench", dedup_window=0.0, settings=settings) as door,
        door.open_queue(queue) as broker,
    ):
        await _publish(door, queue, messages)
        before, received = time.process_time(), 0
        while received < messages:
            deliveries = await broker.receive(BATCH)
            received += len(deliveries)
            if deliveries:
                await broker.ack([delivery.handle for delivery in deliveries])
        return (time.process_time() - before) / messages * 1e6


async def _publish(door: BrokerDoor, queue: QueueConfig, messages: int) -> None:
    opened = door.open_publisher(queue)
    if opened is None:
        raise SystemExit("it cannot be published to")
    run = time.time_ns()
    items = [message(n, "http://svc/hook", GROUPS, run) for n in range(messages)]
    async with opened as publisher:
        for first in range(0, messages, CHUNK):
            await publisher.publish(items[first : first + CHUNK])
