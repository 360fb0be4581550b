"""How soon an idle router sends: from the call that publishes to the first byte of the POST."""

import asyncio
import os
import random
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final, cast

import aiohttp
import uvloop

from bench import brokers
from bench.brokers import BenchPlace, Unavailable, publisher
from bench.contenders import ROUTER, ContenderJob, RunningContender, running
from bench.load import Load
from bench.measure import Spread, percentile
from bench.report import ReportTable, say
from router.core.config import QueueConfig
from router.ports import Publication

PAUSES: Final = (0.1, 0.3)  # seconds between two messages: the router is idle again
PATIENCE: Final = 30.0
NO_BOUND: Final[Mapping[str, float]] = MappingProxyType({})
PUBLISHED: Final = bytes(8 * 4096)  # what one publish adds to the file of a SQLite queue
WARM_UP: Final = 5  # messages that are not counted: connections are opened
_ACCEPTED: Final = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"

Publish = Callable[[Publication], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class LatencyCase:
    broker: str
    bound_ms: float
    through_api: bool = False


CASES: Final[Mapping[str, LatencyCase]] = {
    "SQLite, published by the router": LatencyCase("SQLite", 10.0, through_api=True),
    "SQLite, published by another process": LatencyCase("SQLite", 100.0),
    "NATS": LatencyCase("NATS", 5.0),
    "PostgreSQL": LatencyCase("PostgreSQL", 10.0),
}


class Listener(asyncio.Protocol):
    """A target that knows when the first byte of a request came."""

    def __init__(self, arrivals: "asyncio.Queue[float]") -> None:
        self._arrivals = arrivals
        self._unread = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # of TCP

    def data_received(self, data: bytes) -> None:
        if not self._unread:
            self._arrivals.put_nowait(time.monotonic())
        self._unread += data
        if self._unread.endswith(b"}"):  # our bodies do
            self._unread = b""
            self._transport.write(_ACCEPTED)


def measure(samples: int) -> ReportTable:
    table = ReportTable(
        "latency",
        "An idle router, one message: from publish to the first byte of the POST",
        ("queue",),
        note=f"{samples} messages each, one after the other, with pauses.",
    )
    _add(table, "limit: a POST straight to the target", uvloop.run(_straight(samples)))
    _add(table, "limit: a write that the disk has to keep", uvloop.run(_kept(samples)))
    for name, case in CASES.items():
        say(f"latency: {name}")
        try:
            with brokers.running(case.broker) as place:
                _measure_case(table, name, case, place, samples)
        except Unavailable as reason:
            say(f"{name}: left out, {reason}")
    return table


def _measure_case(
    table: ReportTable, name: str, case: LatencyCase, place: BenchPlace, samples: int
) -> None:
    queue = place.new_queue()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        job = ContenderJob(folder=Path(folder), queue=queue, env=place.env)
        with running(ROUTER, job) as router:
            waits = uvloop.run(_through(case, queue, router, samples))
    _add(table, name, waits, {"p99 wanted": case.bound_ms})


def _add(
    table: ReportTable, name: str, waits: Sequence[float], bounds: Mapping[str, float] = NO_BOUND
) -> None:
    shares = {f"ms p{share}": percentile(waits, share / 100) for share in (50, 90, 99)}
    figures = {**shares, "ms worst": max(waits), **bounds}
    table.add((name,), {key: Spread(value, value, value) for key, value in figures.items()})


async def _straight(samples: int) -> list[float]:
    """What the machine itself takes: no queue, no router."""
    async with aiohttp.ClientSession() as session:

        async def post(item: Publication) -> None:
            async with session.post(item.message.target, data=item.body) as answer:
                answer.raise_for_status()

        return await _sample(post, samples)


async def _kept(samples: int) -> list[float]:
    """What the disk itself takes: no publish to a SQLite queue is answered before that."""
    waits = []
    with tempfile.TemporaryFile(prefix="bench-", buffering=0) as file:
        for _ in range(samples):
            await asyncio.sleep(random.uniform(*PAUSES))  # noqa: S311  no secret
            started = time.monotonic()
            file.write(PUBLISHED)
            os.fdatasync(file.fileno())
            waits.append((time.monotonic() - started) * 1000)
    return waits


async def _through(
    case: LatencyCase, queue: QueueConfig, router: RunningContender, samples: int
) -> list[float]:
    async with _line(case, queue, router) as publish:
        return await _sample(publish, samples)


async def _sample(publish: Publish, samples: int) -> list[float]:
    """Milliseconds."""
    arrivals: asyncio.Queue[float] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Listener(arrivals), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    load = Load(messages=samples + WARM_UP, groups=10, targets=[f"http://127.0.0.1:{port}/hook"])
    waits = []
    for number in range(load.messages):
        await asyncio.sleep(random.uniform(*PAUSES))  # noqa: S311  no secret
        waits.append(await _one(publish, load.publications(number, number + 1)[0], arrivals))
    server.close()
    return waits[WARM_UP:]


async def _one(publish: Publish, item: Publication, arrivals: "asyncio.Queue[float]") -> float:
    started = time.monotonic()
    async with asyncio.timeout(PATIENCE):
        await publish(item)
        return (await arrivals.get() - started) * 1000


@asynccontextmanager
async def _line(
    case: LatencyCase, queue: QueueConfig, router: RunningContender
) -> AsyncIterator[Publish]:
    if not case.through_api:
        async with publisher(queue) as line:
            yield lambda item: line.publish([item])
        return
    reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
    path = f"/messages?queue={queue.name}"
    yield lambda item: _call(reader, writer, path, item.body)
    writer.close()


async def _call(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str, body: bytes
) -> None:
    """POST it to the router. By hand: what a client takes for itself is not the router's."""
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    answer = (await reader.readuntil(b"\r\n\r\n")).lower()
    if not answer.startswith(b"http/1.1 202 "):
        raise SystemExit(f"the router did not take a message: {answer.decode()}")
    await reader.readexactly(int(answer.partition(b"content-length: ")[2].split()[0]))
