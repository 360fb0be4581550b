"""Queues to publish to, in lists, with a plug to pull."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from router.brokers.catalog import Catalog
from router.core.broker import QueueNames
from router.core.config import QueueConfig, RoutingConfig
from router.core.identity import dedup_key_of
from router.ports import (
    Broker,
    DataRefused,
    Disconnected,
    Publication,
    Publisher,
    QueueRefused,
    Receipt,
)
from tests.support.virtual_time import now

ORDERS = QueueConfig(name="orders", uri="memory://orders")
OTHER = QueueConfig(name="other", uri="memory://other")
BROKEN = QueueConfig(name="broken", uri="nonsense://broken")
ONE_QUEUE = RoutingConfig((ORDERS,))


@dataclass
class FakeQueues:
    """Keeps what is published by queue name; a dedup key counts once."""

    published: dict[str, list[Publication]] = field(default_factory=lambda: defaultdict(list))
    failures: list[Exception | None] = field(default_factory=list)  # of the next publishes
    refused: dict[str, Exception] = field(default_factory=dict)  # by id, with all that come with it
    keeps_some: bool = False  # of a call that is refused, what comes before the culprit
    calls: list[tuple[float, list[str]]] = field(default_factory=list)  # when, which ids
    takes: float = 0.0
    unreachable: bool = False
    fails_to_close: bool = False
    names_kept: bool = False  # of duplicates
    opened: int = 0
    closed: int = 0

    def open_queue(self, queue: QueueConfig) -> AbstractAsyncContextManager[Broker]:
        raise AssertionError(f"nobody consumes {queue.name} here")

    def open_publisher(self, queue: QueueConfig) -> AbstractAsyncContextManager[Publisher]:
        if queue.uri.startswith("nonsense:"):
            raise QueueRefused("no such scheme")
        return self._open(queue)

    @asynccontextmanager
    async def _open(self, queue: QueueConfig) -> AsyncIterator[Publisher]:
        if self.unreachable:
            raise Disconnected("connection refused by amqp://user:hidden@host")
        self.opened += 1
        try:
            yield FakePublisher(self, self.published[queue.name])
        finally:
            self.closed += 1
            if self.fails_to_close:
                raise Disconnected("too late")

    def ids(self, queue: str) -> list[str]:
        return [item.message.id for item in self.published[queue]]


@dataclass
class FakePublisher:
    queues: FakeQueues
    items: list[Publication]

    async def publish(self, items: Sequence[Publication]) -> Sequence[Receipt]:
        await asyncio.sleep(self.queues.takes)
        failure = self.queues.failures.pop(0) if self.queues.failures else None
        ids = [item.message.id for item in items]
        self.queues.calls.append((now(), ids))
        if failure is not None:
            raise failure
        for position, item in enumerate(items):
            refusal = self.queues.refused.get(item.message.id)
            if isinstance(refusal, DataRefused) and self.queues.keeps_some:
                for each in items[:position]:
                    self._put(each)
                raise DataRefused(str(refusal), range(position))
            if refusal is not None:
                raise refusal
        return [self._put(item) for item in items]

    def _put(self, item: Publication) -> Receipt:
        for other in self.items:
            if _key(item) == _key(other):
                return other.message.id if self.queues.names_kept else False
        self.items.append(item)
        return True


def _key(item: Publication) -> str:
    return dedup_key_of(item.dedup_key, item.message.id, item.body)


def names(queue_type: str, state_dir: str) -> QueueNames:
    """What queue names stand for, with the brokers of this project."""
    return Catalog().naming(queue_type, state_dir)


def queue_of(uri: str, name: str = "orders", **terms: Any) -> QueueConfig:
    """A queue that knows its broker, as one from a document does."""
    return QueueConfig(name=name, uri=uri, broker=Catalog().broker_of(uri), **terms)
