"""What the engine itself costs: between a made-up queue and a sender that cost next to nothing.

What is left is what the engine does: parse, track, route, order, settle and count.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import islice
from types import coroutine

import uvloop

from bench.measure import spread
from bench.report import ReportTable, say
from router.core.config import PoolConfig, QueueConfig, RoutingConfig
from router.core.history import Fate
from router.core.message import Handle, Message, ReceivedMessage
from router.core.outcome import Answer, Reply
from router.core.trace import Span
from router.core.warnings import WarningBook
from router.engine.alerts import Alerts
from router.engine.delivery import Deliverer, Mediator
from router.engine.queue_manager import QueueManager, shut_down
from router.engine.registry import REMOVED, Journal
from router.engine.transfer import OrderStore
from router.ports import Broker, Brokers, Depth, Nack, Publisher, Sender, Traits, Unsettled
from router.settings import Settings
from router.storage.dead_letters import NO_STORE, open_store
from router.wiring import open_engine
from tests.support.rig import middle

ACCEPTED = Reply(200, b'{"ack":true}')
QUEUE = QueueConfig(name="q", uri="memory://q")
CONCURRENCY = 100
GROUPS = (1, 100, 1_000, 10_000, 100_000)
POOLS = (1, 100, 1_000, 10_000)
LOOK_SECONDS = 0.001


def body(number: int, groups: int, pools: int, targets: int = 1) -> bytes:
    """The `number`-th message."""
    return json.dumps(
        {
            "id": f"0HZXEQ5Y{number:08d}",
            "poolCode": f"POOL-{number % pools}",
            "authToken": "token",
            "mediationType": "HTTP",
            "mediationTarget": f"http://127.0.0.1:{8081 + number % targets}/hook",
            "messageGroupId": f"group-{number % groups}",
            "highPriority": False,
        }
    ).encode()


class MadeUpQueue:
    """Hands out `total` messages, as fast as they are asked for."""

    holds_groups = True
    lease_seconds = 30.0
    traits = Traits()

    def __init__(self, total: int, groups: int, pools: int, targets: int = 1) -> None:
        self.acked = 0
        self.done = asyncio.Event()
        self._total = total
        self._left = iter(
            [ReceivedMessage(body(n, groups, pools, targets), n, str(n), 1) for n in range(total)]
        )

    async def receive(self, limit: int) -> Sequence[ReceivedMessage]:
        await _a_turn()
        messages = list(islice(self._left, limit))
        if not messages:
            await self.done.wait()
        return messages

    def stop(self) -> None:
        self.done.set()

    async def ack(self, handles: Sequence[Handle], *, error: str = "") -> Sequence[Unsettled]:
        self.acked += len(handles)
        if self.acked == self._total:
            self.done.set()
        return ()

    async def nack(self, items: Sequence[Nack]) -> Sequence[Unsettled]:
        raise AssertionError("nothing fails here")

    async def extend(self, handles: Sequence[Handle], seconds: float) -> Sequence[Unsettled]:
        return ()

    async def depth(self) -> Depth | None:
        return None


class OneQueue:
    """Opens the made-up queue."""

    def __init__(self, queue: MadeUpQueue) -> None:
        self._queue = queue

    @asynccontextmanager
    async def open_queue(self, queue: QueueConfig) -> AsyncIterator[Broker]:
        yield self._queue

    def open_publisher(self, queue: QueueConfig) -> AbstractAsyncContextManager[Publisher]:
        raise NotImplementedError(f"nothing is published to {queue.name}: there are no replies")


class AcceptingSender:
    """A target that accepts everything at once."""

    async def send(
        self,
        message: Message,
        attempt: int,
        timeout: float,
        span: Span,
        *,
        max_attempts: int | None = None,
        request: int = 1,
    ) -> Answer:
        await _a_turn()
        return self.reply_to(message, request)

    def reply_to(self, message: Message, request: int) -> Answer:
        return ACCEPTED


@coroutine
def _a_turn() -> Generator[None, None, None]:
    """Waits like something that takes no time: others are served meanwhile."""
    yield


@asynccontextmanager
async def engine(
    brokers: Brokers,
    sender: Sender,
    pools: int,
    journal: Journal | None = None,
    queue: QueueConfig = QUEUE,
    *,
    order: OrderStore | None = None,
) -> AsyncIterator[QueueManager]:
    """One that runs on the queue for as long as the block does."""
    alerts = Alerts(WarningBook(), time.time)
    mediator = Mediator(sender, alerts, timeout=900.0, jitter=middle, wall=time.time)
    async with (
        open_store(NO_STORE) as store,
        open_engine(
            Settings(),
            mediator,
            alerts,
            brokers=brokers,
            store=store,
            new_id=str,
            journal=journal,
            jitter=middle,
            order=order,
        ) as manager,
    ):
        codes = (f"POOL-{n}" for n in range(pools))
        wanted = tuple(PoolConfig(code=code, concurrency=CONCURRENCY) for code in codes)
        await manager.apply(RoutingConfig((queue,), wanted))
        yield manager
        manager.stop()
        if manager.registry.unaccounted:
            raise SystemExit("messages were lost: the figures mean nothing")


async def drain(
    brokers: Brokers,
    mediator: Deliverer,
    alerts: Alerts,
    config: RoutingConfig,
    total: int,
    *,
    cpu: Callable[[], float] = time.process_time,
) -> tuple[float, float]:
    """Deliver all that is in real queues. Return the CPU seconds and the seconds that it took."""
    async with (
        open_store(NO_STORE) as store,
        open_engine(
            Settings(), mediator, alerts, brokers=brokers, store=store, new_id=lambda: "none"
        ) as manager,
    ):
        ended = manager.registry.ledger.ended
        before, began = cpu(), time.perf_counter()
        await manager.apply(config)
        # What was returned for want of room comes again.
        while sum(ended[fate] for fate in REMOVED) < total:  # noqa: ASYNC110 - an event would cost something
            await asyncio.sleep(LOOK_SECONDS)
        spent, seconds = cpu() - before, time.perf_counter() - began
        await shut_down(manager, 1.0)
    if ended[Fate.DELIVERED] < total:
        raise SystemExit("messages have failed: the figures mean nothing")
    return spent, seconds


async def cost(total: int, groups: int, pools: int) -> float:
    """CPU microseconds per message, once every pool has had one: the first of each builds it up."""
    warm_up = max(pools, total // 10)
    total += warm_up
    queue = MadeUpQueue(total, groups, pools)
    async with engine(OneQueue(queue), AcceptingSender(), pools):
        while queue.acked < warm_up:  # noqa: ASYNC110  an event would be looked at for each message
            await asyncio.sleep(LOOK_SECONDS)
        before, done = time.process_time(), queue.acked
        await queue.done.wait()
        spent = time.process_time() - before
    if queue.acked != total:
        raise SystemExit("messages were lost: the figures mean nothing")
    return spent / (total - done) * 1e6


def measure(messages: int, rounds: int) -> ReportTable:
    cases = [(groups, 1) for groups in GROUPS] + [(1_000, pools) for pools in POOLS[1:]]
    found: dict[tuple[int, int], list[float]] = {case: [] for case in cases}
    for number in range(rounds):
        say(f"engine, round {number + 1} of {rounds}")
        for case in cases:
            found[case].append(uvloop.run(cost(messages, *case)))
    table = ReportTable("engine", "The engine alone: no HTTP, no broker", ("groups", "pools"))
    for (groups, pools), costs in found.items():
        table.add((f"{groups:,}", f"{pools:,}"), {"CPU µs": spread(costs)})
    return table
