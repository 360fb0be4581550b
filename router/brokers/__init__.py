"""One module per broker, the only place its client is imported. Only this file knows which."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import Final, Protocol, Self

from router.brokers.worker import Worker
from router.core.config import QueueConfig
from router.ports import Broker, Brokers, Publisher, QueueRefused

PLANNED: Final = frozenset(
    {"http", "https", "sqs", "activemq", "stomp", "nats", "amqp", "postgresql", "pgmq"}
)


class Adapter(Brokers, Protocol):
    """All queues of one kind of broker, and what their connections share."""

    async def close(self) -> None: ...


class BrokerDoor:
    """Opens a queue by its URI. Fits the port `Brokers`; an `async with` owns what it opened."""

    def __init__(
        self, *, worker_id: str, dedup_window: float, clock: Callable[[], float] = time.time
    ) -> None:
        self._worker = Worker(worker_id, dedup_window, clock)
        self._adapters: dict[str, Adapter] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        while self._adapters:
            _, adapter = self._adapters.popitem()
            await adapter.close()

    @asynccontextmanager
    async def open_queue(self, queue: QueueConfig) -> AsyncIterator[Broker]:
        async with self._adapter(queue).open_queue(queue) as broker:
            yield broker

    def open_publisher(self, queue: QueueConfig) -> AbstractAsyncContextManager[Publisher] | None:
        return self._adapter(queue).open_publisher(queue)

    def _adapter(self, queue: QueueConfig) -> Adapter:
        scheme = queue.uri.partition(":")[0].lower()
        if scheme not in self._adapters:
            self._adapters[scheme] = _make_adapter(scheme, self._worker)
        return self._adapters[scheme]


def _make_adapter(scheme: str, worker: Worker) -> Adapter:
    """Imported on use: nobody needs the clients of all brokers."""
    match scheme:
        case "sqlite":
            from router.brokers.sqlite import SqliteQueues  # noqa: PLC0415 on use

            return SqliteQueues(worker)
        case "memory":
            from router.brokers.memory import MemoryQueues  # noqa: PLC0415 on use

            return MemoryQueues(worker)
    if scheme in PLANNED:
        raise QueueRefused(f"a queue of type {scheme} is not supported yet")
    raise QueueRefused(f"there is no queue of type {scheme!r}")
