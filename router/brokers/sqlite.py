"""Work queues in a file: the router's own durable broker, shared by any number of its processes."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from router.brokers.queue_table import QueueTable
from router.brokers.sqlite_file import SqliteFile
from router.brokers.uri import QueueUri, read_uri, refusal
from router.brokers.work_queue import DEFAULT_LEASE, WorkQueueBroker, WorkQueuePublisher
from router.brokers.worker import Worker
from router.core.config import QueueConfig

OPTIONS: Final = frozenset({"queue"})


class SqliteQueues:
    """`sqlite:///relative.db?queue=name`; four slashes before an absolute path."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._files = SqliteFiles()

    async def close(self) -> None:
        await self._files.close()

    @asynccontextmanager
    async def open_queue(self, queue: QueueConfig) -> AsyncIterator[WorkQueueBroker]:
        uri = read_uri(queue, OPTIONS)
        lease = queue.visibility_timeout or DEFAULT_LEASE
        async with self._files.use(_path(queue, uri)) as file:
            broker = WorkQueueBroker(file, self._table(queue, uri), lease)
            try:
                yield broker
            finally:
                broker.interrupt()

    @asynccontextmanager
    async def open_publisher(self, queue: QueueConfig) -> AsyncIterator[WorkQueuePublisher]:
        uri = read_uri(queue, OPTIONS)
        async with self._files.use(_path(queue, uri)) as file:
            yield WorkQueuePublisher(file, self._table(queue, uri))

    def _table(self, queue: QueueConfig, uri: QueueUri) -> QueueTable:
        return QueueTable(
            name=uri.options.get("queue") or queue.name,
            worker_id=self._worker.id,
            dedup_window=self._worker.dedup_window,
            clock=self._worker.clock,
        )


class SqliteFiles:
    """The open files of this process: one thread for each, whoever uses it."""

    def __init__(self) -> None:
        self._files: dict[Path, SqliteFile] = {}
        self._users: dict[Path, int] = {}

    @asynccontextmanager
    async def use(self, path: Path) -> AsyncIterator[SqliteFile]:
        """The file, open and fit for use. Closed when its last user leaves."""
        file = self._enter(path)
        try:
            await file.run(_nothing)
            yield file
        finally:
            await self._leave(path)

    async def close(self) -> None:
        """For what is still in use: its users find it closed."""
        for file in self._files.values():
            await file.close()

    def _enter(self, path: Path) -> SqliteFile:
        if path not in self._files:
            self._files[path] = SqliteFile(path)
        self._users[path] = self._users.get(path, 0) + 1
        return self._files[path]

    async def _leave(self, path: Path) -> None:
        self._users[path] -= 1
        if not self._users[path]:
            del self._users[path]
            await self._files.pop(path).close()


def _path(queue: QueueConfig, uri: QueueUri) -> Path:
    if uri.address:
        raise refusal(queue, "needs three slashes before a relative path, four before an absolute")
    if uri.path.endswith("/") or not uri.path:
        raise refusal(queue, "names no file")
    return Path(os.path.realpath(uri.path.removeprefix("/")))


def _nothing(_: object) -> None:
    """Enough to have the file opened and checked."""
