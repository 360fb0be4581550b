"""The whole engine on a memory queue and a fake sender, for tests that tell a story."""

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from router.brokers import BrokerRegistry
from router.core.config import PoolConfig, QueueConfig, RoutingConfig, TargetConfig
from router.core.history import Fate
from router.core.leadership import Leadership
from router.core.message import parse
from router.core.warnings import Notice, WarningBook
from router.engine.alerts import Alerts
from router.engine.breaker import Breakers
from router.engine.delivery import Mediator, TaskMediator
from router.engine.pool import ProcessPool
from router.engine.queue_manager import QueueManager
from router.engine.registry import Journal
from router.engine.shared_limits import SharedLimits
from router.engine.transfer import OrderStore
from router.ports import Brokers, OrderLogs, Publication, TaskRunner
from router.settings import Settings
from router.wiring import open_engine
from tests.support.fakes import FakeLetters, FakeSender
from tests.support.witness import Witness

QUEUE = QueueConfig(name="q", uri="memory://q")
FREE_QUEUE = QueueConfig(name="q", uri="memory://q?groups=free")  # its broker holds no group back
TARGET = "http://target.test/hook"
WALL_AT_START = 1_700_000_000.0  # Unix time when the virtual clock starts


def middle(low: float, high: float) -> float:
    """Jitter without chance."""
    return (low + high) / 2


def _virtual_wall() -> float:
    return WALL_AT_START + asyncio.get_running_loop().time()


def body(message_id: str, **fields: Any) -> bytes:
    return json.dumps({"id": message_id, "mediationTarget": TARGET, **fields}).encode()


def grouped(*ids: str, group: str | None = "g", **fields: Any) -> list[bytes]:
    """Messages of one group for the pool P."""
    return [body(each, messageGroupId=group, **({"poolCode": "P"} | fields)) for each in ids]


def pool(code: str = "P", concurrency: int = 10, **settings: Any) -> PoolConfig:
    """Return a pool that takes as much as it may hold, unless told otherwise."""
    return PoolConfig(code=code, concurrency=concurrency, **{"take_ahead": 1000} | settings)


def order_store(logs: OrderLogs, **facts: Any) -> OrderStore:
    """Return an order store in memory, on virtual time."""
    keys = (f"key-{n}" for n in itertools.count(1))
    return OrderStore(
        logs=logs, uri_of=lambda name: f"memory://store/{name}", new_key=keys.__next__, **facts
    )


def _zero() -> float:
    return 0.0


@dataclass
class Rig:
    """What a test looks at."""

    manager: QueueManager
    sender: FakeSender
    letters: FakeLetters
    book: WarningBook
    breakers: Breakers
    brokers: Brokers
    tasks: asyncio.TaskGroup
    alerts: Alerts
    witness: Witness
    config: RoutingConfig = field(default_factory=RoutingConfig)

    async def apply(
        self,
        *pools: PoolConfig,
        queues: Sequence[QueueConfig] = (QUEUE,),
        reply_queues: Sequence[QueueConfig] = (),
        targets: Sequence[TargetConfig] = (),
    ) -> None:
        self.config = RoutingConfig(
            tuple(queues), pools, tuple(reply_queues), targets=tuple(targets)
        )
        await self.manager.apply(self.config)

    async def publish(self, *bodies: bytes, queue: QueueConfig = QUEUE) -> None:
        async with self.brokers.open_publisher(queue) as publisher:
            await publisher.publish(
                [
                    Publication(message=parse(each), body=each, dedup_key=parse(each).id)
                    for each in bodies
                ]
            )

    async def publish_raw(self, content: bytes, *, queue: QueueConfig = QUEUE) -> None:
        """Publish something that may be no message."""
        message = parse(body("raw"))
        async with self.brokers.open_publisher(queue) as publisher:
            await publisher.publish([Publication(message=message, body=content)])

    @property
    def warnings(self) -> list[Notice]:
        return list(self.book.list(now=0.0))

    @property
    def codes(self) -> set[str]:
        return {notice.code for notice in self.warnings}

    def pool(self, code: str = "P") -> ProcessPool:
        return self.manager.pools[code]

    @property
    def is_empty(self) -> bool:
        return self.manager.registry.held == 0


def ended(rig: Rig) -> Counter[Fate]:
    """How many messages ended how."""
    return +Counter(rig.manager.registry.ledger.ended)


@asynccontextmanager
async def running(
    *pools: PoolConfig,
    sender: FakeSender | None = None,
    brokers: Brokers | None = None,
    queues: Sequence[QueueConfig] = (QUEUE,),
    tasks: TaskRunner | None = None,
    handles: TaskRunner | None = None,  # everything, as in a worker
    one_breaker: bool = False,
    reply_queues: Sequence[QueueConfig] = (),
    targets: Sequence[TargetConfig] = (),
    wall: Callable[[], float] | None = None,
    leadership: Leadership | None = None,
    longest_request: float = 0.0,
    journal: Journal | None = None,
    order: OrderStore | None = None,
    shared: SharedLimits | None = None,  # with other routers
    **limits: Any,  # settings
) -> AsyncIterator[Rig]:
    """A router that runs for as long as the block does; at its end, nothing is unaccounted for."""
    sender = sender or FakeSender()
    book, letters = WarningBook(), FakeLetters()
    alerts = Alerts(book, wall=lambda: 0.0)
    breakers = Breakers(on_change=lambda _: None, one_for_all=one_breaker)
    mediator = Mediator(
        sender,
        alerts,
        timeout=900.0,
        jitter=middle,
        wall=_zero,
        tasks=tasks,
    )
    async with BrokerRegistry(worker_id="test", dedup_window=300) as registered:
        witness = Witness(brokers or registered)
        async with open_engine(
            Settings(**limits),
            mediator if handles is None else TaskMediator(handles, alerts, _zero),
            alerts,
            brokers=witness,
            store=letters,
            new_id=lambda: "NEW",
            breakers=breakers,
            leadership=leadership,
            longest_request=longest_request,
            journal=journal,
            wall=wall or _virtual_wall,
            jitter=middle,
            order=order or order_store(registered),
            limits=shared,
        ) as manager:
            group = manager.deps.tasks
            rig = Rig(manager, sender, letters, book, breakers, witness, group, alerts, witness)
            await rig.apply(*pools, queues=queues, reply_queues=reply_queues, targets=targets)
            yield rig
            manager.stop()
            for pool_ in manager.draining_pools.values():
                pool_.runner.abort()
            assert manager.registry.unaccounted == 0
    assert manager.registry.held == 0
    assert manager.registry.unaccounted == 0
