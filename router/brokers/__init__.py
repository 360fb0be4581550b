"""Brokers: one package each, and here the registry that opens a queue by its URI. See README.md."""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol, Self

from router.brokers.workers import (
    THIS_MACHINE,
    BrokerSettings,
    ConsumerIdentity,
    Liveness,
    Machine,
    WorkerLocks,
)
from router.core.config import QueueConfig
from router.ports import Broker, Brokers, MessageStore, MessageStores, Publisher, QueueRefused

log = logging.getLogger(__name__)

DEFAULT_SETTINGS: Final = BrokerSettings()
DEFAULT_RESULT_RETENTION_SECONDS: Final = 86_400.0
DEFAULT_RESULT_MAX_BYTES: Final = 1024**3


class Adapter(Brokers, Protocol):
    """All queues of one kind of broker, and what outlives their connections."""

    async def close(self) -> None: ...


def _log_warning(queue: str, text: str) -> None:
    log.critical(text, extra={"queue": queue})


class BrokerRegistry:
    """Opens a queue by its URI. Fits the port `Brokers`; leaving the `async with` closes all."""

    def __init__(
        self,
        *,
        worker_id: str,
        dedup_window: float,
        machine: Machine = THIS_MACHINE,
        liveness: Callable[[Path], Liveness] = WorkerLocks,
        state_dir: Path | None = None,
        settings: BrokerSettings = DEFAULT_SETTINGS,
        result_retention: float = DEFAULT_RESULT_RETENTION_SECONDS,
        warn: Callable[[str, str], None] = _log_warning,
        result_max_bytes: int = DEFAULT_RESULT_MAX_BYTES,
        on_results: Callable[[str, bool], None] = lambda *_: None,
        on_storage: Callable[[str, str | None], None] = lambda *_: None,
    ) -> None:
        self._identity = ConsumerIdentity(
            worker_id,
            dedup_window,
            result_retention,
            machine,
            liveness,
            state_dir,
            settings,
            warn,
            result_max_bytes,
            on_results,
            on_storage,
        )
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

    def open_publisher(self, queue: QueueConfig) -> AbstractAsyncContextManager[Publisher]:
        return self._adapter(queue).open_publisher(queue)

    def open_store(self, queue: QueueConfig) -> AbstractAsyncContextManager[MessageStore] | None:
        adapter = self._adapter(queue)
        return adapter.open_store(queue) if isinstance(adapter, MessageStores) else None

    def _adapter(self, queue: QueueConfig) -> Adapter:
        scheme = queue.uri.partition(":")[0].lower()
        if scheme not in self._adapters:
            try:
                self._adapters[scheme] = _make_adapter(scheme, self._identity)
            except ModuleNotFoundError as error:
                text = f"a queue of type {scheme} needs the package {error.name}"
                raise QueueRefused(f"{text}: pip install 'message-router[all]'") from error
        return self._adapters[scheme]


def _make_adapter(scheme: str, identity: ConsumerIdentity) -> Adapter:  # noqa: PLR0911  one each
    """Import the adapter on use: nobody needs the clients of all brokers."""
    match scheme:
        case "sqlite":
            from router.brokers.sqlite import SqliteQueues  # noqa: PLC0415 on use

            return SqliteQueues(identity)
        case "memory":
            from router.brokers.memory import MemoryQueues  # noqa: PLC0415 on use

            return MemoryQueues(identity)
        case "sqs" | "http" | "https":
            from router.brokers.sqs.broker import SqsQueues  # noqa: PLC0415 on use

            return SqsQueues(identity)
        case "nats":
            from router.brokers.nats.broker import NatsQueues  # noqa: PLC0415 on use

            return NatsQueues(identity)
        case "amqp" | "amqps":
            from router.brokers.rabbitmq.broker import RabbitQueues  # noqa: PLC0415 on use

            return RabbitQueues(identity)
        case "postgresql":
            from router.brokers.postgres import PostgresQueues  # noqa: PLC0415 on use

            return PostgresQueues(identity)
        case "pgmq":
            from router.brokers.pgmq.broker import PgmqQueues  # noqa: PLC0415 on use

            return PgmqQueues(identity)
        case "activemq" | "stomp":
            from router.brokers.activemq.broker import ActiveMqQueues  # noqa: PLC0415 on use

            return ActiveMqQueues(identity)
    raise QueueRefused(f"unknown scheme {scheme!r}")
