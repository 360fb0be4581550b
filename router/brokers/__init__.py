"""One module per broker, the only place its client is imported. Only this file knows which."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol, Self

from msgspec.structs import replace

from router.brokers.machine import THIS_MACHINE, Machine
from router.brokers.worker import BrokerSettings, Worker
from router.brokers.worker_locks import Liveness, WorkerLocks
from router.core.config import QueueConfig
from router.ports import Broker, Brokers, Publisher, QueueRefused

DEFAULT_SETTINGS: Final = BrokerSettings()
PLANNED: Final = frozenset({"pgmq"})


class Adapter(Brokers, Protocol):
    """All queues of one kind of broker, and what their connections share."""

    async def close(self) -> None: ...


class BrokerDoor:
    """Opens a queue by its URI. Fits the port `Brokers`; an `async with` owns what it opened."""

    def __init__(
        self,
        *,
        worker_id: str,
        dedup_window: float,
        machine: Machine = THIS_MACHINE,
        liveness: Callable[[Path], Liveness] = WorkerLocks,
        state_dir: Path | None = None,
        settings: BrokerSettings = DEFAULT_SETTINGS,
        warn: Callable[[str, str], None] | None = None,
    ) -> None:
        worker = Worker(worker_id, dedup_window, machine, liveness, state_dir, settings)
        self._worker = worker if warn is None else replace(worker, warn=warn)
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
            try:
                self._adapters[scheme] = _make_adapter(scheme, self._worker)
            except ModuleNotFoundError as error:
                text = f"a queue of type {scheme} needs the package {error.name}"
                raise QueueRefused(f"{text}: pip install 'message-router[all]'") from error
        return self._adapters[scheme]


def _make_adapter(scheme: str, worker: Worker) -> Adapter:  # noqa: PLR0911  one per broker
    """Imported on use: nobody needs the clients of all brokers."""
    match scheme:
        case "sqlite":
            from router.brokers.sqlite import SqliteQueues  # noqa: PLC0415 on use

            return SqliteQueues(worker)
        case "memory":
            from router.brokers.memory import MemoryQueues  # noqa: PLC0415 on use

            return MemoryQueues(worker)
        case "sqs" | "http" | "https":
            from router.brokers.sqs import SqsQueues  # noqa: PLC0415 on use

            return SqsQueues(worker)
        case "nats":
            from router.brokers.nats import NatsQueues  # noqa: PLC0415 on use

            return NatsQueues(worker)
        case "amqp" | "amqps":
            from router.brokers.rabbitmq import RabbitQueues  # noqa: PLC0415 on use

            return RabbitQueues(worker)
        case "postgresql":
            from router.brokers.postgres import PostgresQueues  # noqa: PLC0415 on use

            return PostgresQueues(worker)
        case "activemq" | "stomp":
            from router.brokers.activemq import ActiveMqQueues  # noqa: PLC0415 on use

            return ActiveMqQueues(worker)
    if scheme in PLANNED:
        raise QueueRefused(f"a queue of type {scheme} is not supported yet")
    raise QueueRefused(f"there is no queue of type {scheme!r}")
