"""What a large order store costs: claims, memory of the router, and groups that are not in it."""

import asyncio
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

import msgspec
import uvloop

from bench import brokers
from bench.brokers import NOTHING, QUEUE, BenchPlace, publisher
from bench.contenders import ROUTER, ContenderJob, running
from bench.latency import Listener
from bench.measure import Spread, percentile
from bench.report import ReportTable, say
from router.brokers import BrokerRegistry
from router.core.config import QueueConfig
from router.core.message import parse
from router.engine.transfer import OrderStore
from router.ports import Broker, OrderLog, Publication, StoredMessage
from router.settings import Settings
from router.wiring import order_store
from tests.support.servers import postgres

FILLED_AT_ONCE: Final = 2_000  # messages of an append
BLOCKED_SECONDS: Final = 36_000.0
USED_AT_ONCE: Final = 50
USED: Final = 2_000  # messages that go through the filled store
SAMPLES: Final = 600
WARM_UP: Final = 50
PAUSE_SECONDS: Final = 0.02  # between two messages
BLOCKED_EVERY: Final = 5  # samples, one for a blocked group
PATIENCE: Final = 30.0
SETTLE_SECONDS: Final = 3.0
STRICT: Final[Mapping[str, object]] = MappingProxyType({"ordering": "strict"})


@dataclass(frozen=True, slots=True)
class StoreCase:
    name: str
    messages: int
    groups: int


def measure(messages: int, groups: int) -> ReportTable:
    table = ReportTable(
        "order-store",
        "A strict queue on NATS whose order store is large",
        ("store", "what is in it"),
        note=(
            f"µs: to append a message of another group with its commit, and to claim and finish it,"
            f" {USED} of them. ms: from"
            f" publish to the POST, {SAMPLES} messages of direct groups, while others of blocked"
            " groups are stored."
        ),
    )
    cases = [
        StoreCase("nothing", 0, 1),
        StoreCase("one blocked message", 1, 1),
        StoreCase(f"{messages:,} messages of one blocked group", messages, 1),
        StoreCase(f"{groups:,} blocked groups", groups, groups),
    ]
    for kind in ("SQLite", "PostgreSQL"):
        for case in cases:
            say(f"order store: {kind}, {case.name}")
            with _place(kind) as (folder, url), brokers.running("NATS") as place:
                table.add((kind, case.name), _figures(case, place, folder, url))
    return table


@contextmanager
def _place(kind: str) -> Iterator[tuple[Path, str | None]]:
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        if kind == "SQLite":
            yield Path(folder), None
        else:
            with postgres.postgres_server() as server:
                yield Path(folder), server.url


def _figures(
    case: StoreCase, place: BenchPlace, folder: Path, url: str | None
) -> Mapping[str, Spread]:
    queue = place.new_queue()
    env = {**place.env, **(NOTHING if url is None else {"MESSAGE_ROUTER_ORDER_STORE": url})}
    state = folder / "state"
    state.mkdir()
    figures = uvloop.run(_use_store(case, Settings(state_dir=state, order_store=url)))
    job = ContenderJob(folder=folder, queue=queue, env=env, options=STRICT)
    with running(ROUTER, job) as router:
        waits = uvloop.run(_sample(queue, case))
        time.sleep(SETTLE_SECONDS)
        figures |= {
            "s to ready": router.seconds_to_ready,
            "MiB": router.process.resident_mib,
            "MiB peak": router.process.peak_mib,
            "ms p50": percentile(waits, 0.5),
            "ms p99": percentile(waits, 0.99),
        }
    return {name: Spread(value, value, value) for name, value in figures.items()}


async def _use_store(case: StoreCase, settings: Settings) -> dict[str, float]:
    """Fill the store, and let other messages go through it."""
    async with BrokerRegistry(worker_id="bench", dedup_window=0.0) as registry:
        store = order_store(settings, registry)
        queue = store.queue_of(QueueConfig(name=QUEUE, uri="nats://unused/"))
        await _fill(store, queue, case)
        async with store.logs.open_order_log(queue) as log, registry.open_queue(queue) as broker:
            await _use(log, broker, "first")  # claims decide once about each group
            began = time.monotonic()
            await log.size()
            sized = time.monotonic() - began
            appended, claimed = await _use(log, broker, "then")
    return {
        "µs append": appended / USED * 1e6,
        "µs claim": claimed / USED * 1e6,
        "ms size": sized * 1e3,
    }


async def _use(log: OrderLog, broker: Broker, name: str) -> tuple[float, float]:
    """Let messages of other groups go through the store. Return the seconds of both ends."""
    appended = claimed = 0.0
    for start in range(0, USED, USED_AT_ONCE):
        numbers = range(start, start + USED_AT_ONCE)
        messages = [_stored(f"{name}-{n}", f"used-{n % 100}") for n in numbers]
        began = time.monotonic()
        await log.append(messages)
        stored = time.monotonic()
        left = USED_AT_ONCE
        while left:
            found = await broker.receive(left)
            await broker.ack([each.handle for each in found])
            left -= len(found)
        appended += stored - began
        claimed += time.monotonic() - stored
    return appended, claimed


async def _fill(store: OrderStore, queue: QueueConfig, case: StoreCase) -> None:
    async with store.logs.open_order_log(queue) as log:
        for start in range(0, case.messages, FILLED_AT_ONCE):
            numbers = range(start, min(start + FILLED_AT_ONCE, case.messages))
            await log.append(
                [_stored(f"b{n}", f"blocked-{n % case.groups}", BLOCKED_SECONDS) for n in numbers]
            )


def _stored(message_id: str, group: str, delay: float = 0.0) -> StoredMessage:
    body = _body(message_id, group, "http://127.0.0.1:9/hook")
    return StoredMessage(Publication(parse(body), body, message_id), group, delay=delay)


def _body(message_id: str, group: str, target: str) -> bytes:
    return msgspec.json.encode(
        {
            "id": message_id,
            "poolCode": "POOL-0",
            "messageGroupId": group,
            "mediationTarget": target,
            "payload": {"text": "x" * 100},
        }
    )


async def _sample(queue: QueueConfig, case: StoreCase) -> Sequence[float]:
    """Return milliseconds from publish to the POST, of messages whose groups are direct."""
    arrivals: asyncio.Queue[float] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Listener(arrivals), "127.0.0.1", 0)
    target = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/hook"
    waits = []
    async with publisher(queue) as line:
        for number in range(SAMPLES + WARM_UP):
            await asyncio.sleep(PAUSE_SECONDS)
            if case.messages and number % BLOCKED_EVERY == 0:
                blocked = f"blocked-{number % case.groups}"
                await line.publish([_publication(f"late-{number}", blocked, target)])
            began = time.monotonic()
            async with asyncio.timeout(PATIENCE):
                await line.publish([_publication(f"d{number}", f"direct-{number % 50}", target)])
                waits.append((await arrivals.get() - began) * 1000)
    server.close()
    return waits[WARM_UP:]


def _publication(message_id: str, group: str, target: str) -> Publication:
    body = _body(message_id, group, target)
    return Publication(parse(body), body, message_id)
