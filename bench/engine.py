"""What the engine itself costs: everything but HTTP and broker calls.

A broker that makes messages up and a sender that accepts them at once stand at both ends, so what
is left is parsing, tracking, routing, ordering, settling and counting.
"""

import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import uvloop

from router.core.config import PoolConfig, QueueConfig, RoutingConfig
from router.core.dead_letter import DeadLetter
from router.core.message import Delivery, Handle, Message, Tally
from router.core.outcome import Answer, Reply
from router.core.trace import Span
from router.core.warnings import WarningBook
from router.engine.alerts import Alerts
from router.engine.breaker import Breakers
from router.engine.letters import Letters
from router.engine.mediator import Mediator
from router.engine.queue_manager import QueueManager, Surroundings
from router.ports import Broker, Depth, Publisher, Traits, Unsettled

GROUPS = (1, 100, 1_000, 10_000, 100_000)
POOLS = (1, 100, 1_000, 10_000)
ACCEPTED = Reply(200, b'{"ack":true}')


class MadeUpQueue:
    """Hands out `total` messages, as fast as they are asked for."""

    holds_groups = True
    lease_seconds = 30.0
    traits = Traits()

    def __init__(self, total: int, groups: int, pools: int) -> None:
        self.acked = 0
        self.done = asyncio.Event()
        self._total = total
        self._bodies = [_body(n, groups, pools) for n in range(total)]
        self._next = 0

    async def receive(self, limit: int) -> Sequence[Delivery]:
        if self._next >= self._total:
            await self.done.wait()
            return []
        first, self._next = self._next, min(self._next + limit, self._total)
        lease = asyncio.get_running_loop().time() + 30.0
        await asyncio.sleep(0)
        return [Delivery(self._bodies[n], n, str(n), 1, lease) for n in range(first, self._next)]

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
    async def send(self, message: Message, post: int, timeout: float, span: Span) -> Answer:
        await asyncio.sleep(0)
        return ACCEPTED


class NoLetters:
    async def put(self, letter: DeadLetter) -> None:
        raise AssertionError("nothing fails here")


def _body(n: int, groups: int, pools: int) -> bytes:
    return json.dumps(
        {
            "id": f"0HZXEQ5Y{n:08d}",
            "poolCode": f"POOL-{n % pools}",
            "authToken": "token",
            "mediationType": "HTTP",
            "mediationTarget": "http://127.0.0.1:8081/hook",
            "messageGroupId": f"group-{n % groups}",
            "highPriority": False,
        }
    ).encode()


async def cost(total: int, groups: int, pools: int) -> float:
    """CPU microseconds per message."""
    queue = MadeUpQueue(total, groups, pools)
    alerts = Alerts(WarningBook(), time.time)
    mediator = Mediator(
        Yes(),
        Breakers(lambda _: None),
        alerts,
        timeout=900.0,
        jitter=lambda low, high: (low + high) / 2,
        wall=time.time,
    )
    async with asyncio.TaskGroup() as tasks:
        manager = QueueManager(
            Surroundings(
                brokers=OneQueue(queue),
                mediator=mediator,
                letters=Letters(NoLetters(), alerts, time.time),  # type: ignore[arg-type]  # unused
                alerts=alerts,
                tasks=tasks,
                jitter=lambda low, high: (low + high) / 2,
            )
        )
        config = RoutingConfig(
            (QueueConfig(name="q", uri="memory://q"),),
            tuple(PoolConfig(code=f"POOL-{n}", concurrency=100) for n in range(pools)),
        )
        await manager.apply(config)
        before = time.process_time()
        await queue.done.wait()
        spent = time.process_time() - before
        manager.stop()
        if manager.routing.unaccounted or queue.acked != total:
            raise SystemExit("messages were lost: the figures mean nothing")
    return spent / total * 1e6


def report(messages: int, rounds: int) -> None:
    cases = [(groups, 1) for groups in GROUPS] + [(1_000, pools) for pools in POOLS[1:]]
    figures: dict[tuple[int, int], list[float]] = {case: [] for case in cases}
    for _ in range(rounds):
        for case in cases:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                figures[case].append(runner.run(cost(messages, *case)))
    print(f"{'groups':>8} {'pools':>6}  CPU µs per message (median, min-max of {rounds})")
    for (groups, pools), costs in figures.items():
        low, high = min(costs), max(costs)
        print(f"{groups:>8} {pools:>6}  {statistics.median(costs):6.1f}  ({low:.1f}-{high:.1f})")
