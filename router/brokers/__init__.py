"""Brokers: one package each, and here the registry that opens a queue by its URI. See README.md."""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from router.brokers.catalog import BROKERS, Catalog, installed
from router.brokers.package import Adapter, BrokerPackage
from router.brokers.workers import (
    THIS_MACHINE,
    BrokerSettings,
    ConsumerIdentity,
    Liveness,
    Machine,
    WorkerLocks,
)
from router.core.broker import BrokerUnusable
from router.core.config import QueueConfig
from router.ports import (
    Broker,
    MessageLister,
    MessageListers,
    MessageStore,
    MessageStores,
    OrderLog,
    OrderLogs,
    Publisher,
    QueueRefused,
)
from router.setting_values import BadSetting

log = logging.getLogger(__name__)

DEFAULT_SETTINGS: Final = BrokerSettings()
DEFAULT_RESULT_RETENTION_SECONDS: Final = 86_400.0
DEFAULT_RESULT_MAX_BYTES: Final = 1024**3


def _log_warning(queue: str, text: str) -> None:
    log.critical(text, extra={"queue": queue})


def _log_advice(queue: str, text: str) -> None:
    log.warning(text, extra={"queue": queue})


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
        advise: Callable[[str, str], None] = _log_advice,
        result_max_bytes: int = DEFAULT_RESULT_MAX_BYTES,
        on_results: Callable[[str, bool], None] = lambda *_: None,
        on_storage: Callable[[str, str | None], None] = lambda *_: None,
        poll_interval: float | None = None,
        catalog: Catalog | None = None,
    ) -> None:
        self._catalog = catalog or installed()
        self._identity = ConsumerIdentity(
            worker_id,
            dedup_window,
            result_retention,
            machine,
            liveness,
            state_dir,
            settings,
            warn,
            advise,
            result_max_bytes,
            on_results,
            on_storage,
            poll_interval,
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

    def open_lister(self, queue: QueueConfig) -> AbstractAsyncContextManager[MessageLister] | None:
        """Work queues list their messages as stores. Other brokers may list them, too."""
        adapter = self._adapter(queue)
        if isinstance(adapter, MessageListers):
            return adapter.open_lister(queue)
        return self.open_store(queue)

    @asynccontextmanager
    async def open_order_log(self, queue: QueueConfig) -> AsyncIterator[OrderLog]:
        adapter = self._adapter(queue)
        if not isinstance(adapter, OrderLogs):
            raise QueueRefused(f"{queue.name}: its broker keeps no order store")
        async with adapter.open_order_log(queue) as order_log:
            yield order_log

    def _adapter(self, queue: QueueConfig) -> Adapter:
        scheme = queue.uri.partition(":")[0].lower()
        try:
            package = self._catalog.find(scheme)
        except BrokerUnusable as error:
            raise QueueRefused(str(error)) from error
        if package is None:
            raise QueueRefused(f"unknown scheme {scheme!r}")
        if package.name not in self._adapters:
            self._adapters[package.name] = self._make(scheme, package)
        return self._adapters[package.name]

    def _make(self, scheme: str, package: BrokerPackage) -> Adapter:
        """Make the adapter on use: few need the clients of all brokers."""
        try:
            return package.make(self._identity)
        except ModuleNotFoundError as error:
            text = f"a queue of type {scheme} needs the package {error.name}"
            hint = ": pip install 'message-router[all]'" if package in BROKERS else ""
            raise QueueRefused(f"{text}{hint}") from error
        except BadSetting as error:  # of a package outside of this project
            raise QueueRefused(str(error)) from error
