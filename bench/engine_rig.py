"""The engine between two made-up ends: a queue and a sender that cost next to nothing.

What is left is what the engine itself does: parse, track, route, order, settle and count.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Generator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import islice
from types import coroutine

from router.core.config import PoolConfig, QueueConfig, RoutingConfig
from router.core.dead_letter import DeadLetter
from router.core.message import Handle, Message, ReceivedMessage, Tally
from router.core.outcome import Answer, Reply
from router.core.trace import Span
from router.core.warnings import WarningBook
from router.engine.alerts import Alerts
from router.engine.breaker import Breakers
from router.engine.dead_letter_writer import DeadLetterWriter
from router.engine.delivery import Mediator
from router.engine.deps import EngineDeps
from router.engine.publishing import open_publishing
from router.engine.queue_manager import QueueManager
from router.ports import Broker, Brokers, Depth, Publisher, Sender, Traits, Unsettled

ACCEPTED = Reply(200, b'{"ack":true}')
QUEUE = QueueConfig(name="q", uri="memory://q")
CONCURRENCY = 100


def body(number: int, groups: int, pools: int) -> bytes:
    """The `number`-th message."""
    return json.dumps(
        {
            "id": f"0HZXEQ5Y{number:08d}",
            "poolCode": f"POOL-{number % pools}",
            "authToken": "token",
            "mediationType": "HTTP",
            "mediationTarget": "http://127.0.0.1:8081/hook",
            "messageGroupId": f"group-{number % groups}",
            "highPriority": False,
        }
    ).encode()


class MadeUpQueue:
    """Hands out `total` messages, as fast as they are asked for."""

    holds_groups = True
    lease_seconds = 30.0
    traits = Traits()

    def __init__(self, total: int, groups: int, pools: int) -> None:
        self.acked = 0
        self.done = asyncio.Event()
        self._total = total
        self._left = iter(
            [ReceivedMessage(body(n, groups, pools), n, str(n), 1) for n in range(total)]
        )

    async def receive(self, limit: int) -> Sequence[ReceivedMessage]:
        await _a_turn()
        deliveries = list(islice(self._left, limit))
        if not deliveries:
            await self.done.wait()
        return deliveries

    def interrupt(self) -> None:
        self.done.set()

    async def ack(self, handles: Sequence[Handle], *, error: str = "") -> Sequence[Unsettled]:
        self.acked += len(handles)
        if self.acked == self._total:
            self.done.set()
        return ()

    async def nack(self, handle: Handle, delay: float, tally: Tally, *, error: str = "") -> None:
        raise AssertionError("nothing fails here")

    async def extend(self, handles: Sequence[Handle], seconds: float) -> Sequence[Unsettled]:
        return ()

    async def depth(self) -> Depth | None:
        return None


class OneQueue:
    """The door to the made-up queue."""

    def __init__(self, queue: MadeUpQueue) -> None:
        self._queue = queue

    @asynccontextmanager
    async def open_queue(self, queue: QueueConfig) -> AsyncIterator[Broker]:
        yield self._queue

    def open_publisher(self, queue: QueueConfig) -> AbstractAsyncContextManager[Publisher] | None:
        return None


class Yes:
    async def send(
        self,
        message: Message,
        post: int,
        timeout: float,
        span: Span,
        max_attempts: int | None = None,
    ) -> Answer:
        await _a_turn()
        return ACCEPTED


@coroutine
def _a_turn() -> Generator[None, None, None]:
    """Waits like something that takes no time: others are served meanwhile."""
    yield


class NoLetters:
    async def put(self, letter: DeadLetter) -> None:
        raise AssertionError("nothing fails here")


@asynccontextmanager
async def engine(brokers: Brokers, sender: Sender, pools: int) -> AsyncIterator[QueueManager]:
    """One that runs on the queue `QUEUE` for as long as the block does."""
    alerts = Alerts(WarningBook(), time.time)
    mediator = Mediator(
        sender,
        Breakers(lambda _: None),
        alerts,
        timeout=900.0,
        jitter=_middle,
        wall=time.time,
    )
    async with (
        open_publishing(
            brokers, lambda: manager.applied, refuse_url=lambda *_: None, new_id=str
        ) as publishing,
        asyncio.TaskGroup() as tasks,
    ):
        manager = QueueManager(
            EngineDeps(
                brokers=brokers,
                mediator=mediator,
                letters=DeadLetterWriter(NoLetters(), alerts, time.time),  # type: ignore[arg-type]  # unused
                alerts=alerts,
                publishing=publishing,
                tasks=tasks,
                jitter=_middle,
            )
        )
        codes = (f"POOL-{n}" for n in range(pools))
        wanted = tuple(PoolConfig(code=code, concurrency=CONCURRENCY) for code in codes)
        await manager.apply(RoutingConfig((QUEUE,), wanted))
        yield manager
        manager.stop()
        if manager.registry.unaccounted:
            raise SystemExit("messages were lost: the figures mean nothing")


def _middle(low: float, high: float) -> float:
    """Jitter without chance."""
    return (low + high) / 2
