"""Work queues in a file: the router's own durable broker, shared by any number of its processes."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final

from router.brokers.queue_table import QueueTable
from router.brokers.shared import Shared
from router.brokers.sqlite_file import SqliteFile
from router.brokers.stored_table import StoredTable
from router.brokers.uri import QueueUri, read_uri, refusal
from router.brokers.work_queue import DEFAULT_LEASE, WorkQueueBroker, WorkQueuePublisher
from router.brokers.worker import Worker
from router.brokers.worker_locks import Recovery
from router.core.config import QueueConfig, sqlite_path
from router.ports import BrokerError

OPTIONS: Final = frozenset({"queue", "audit"})
DEFAULT_AUDIT: Final = 3600.0


class WorkedFile(SqliteFile):
    """A queue file, and the workers that share it."""

    def __init__(self, path: Path, worker: Worker) -> None:
        super().__init__(path, worker.machine)
        self.liveness = worker.liveness(Path(f"{path}-worker-"))
        self.recovery = Recovery(self.liveness)


class SqliteQueues:
    """`sqlite:///path/to/file.db?queue=name&audit=seconds`; the path is absolute."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._files = Shared(partial(WorkedFile, worker=worker))

    async def close(self) -> None:
        await self._files.close()

    @asynccontextmanager
    async def open_queue(self, queue: QueueConfig) -> AsyncIterator[WorkQueueBroker]:
        uri = read_uri(queue, OPTIONS)
        lease = queue.visibility_timeout or DEFAULT_LEASE
        async with self._files.use(_path(queue, uri)) as file:
            with file.liveness.claim_own(self._worker.id):
                table = self._table(file, queue, uri)
                stored = StoredTable(file, table, file.recovery)
                await stored.recover()
                broker = WorkQueueBroker(stored, lease)
                try:
                    yield broker
                finally:
                    broker.interrupt()
                    with suppress(BrokerError):
                        await file.run(table.tidy)

    @asynccontextmanager
    async def open_publisher(self, queue: QueueConfig) -> AsyncIterator[WorkQueuePublisher]:
        uri = read_uri(queue, OPTIONS)
        async with self._files.use(_path(queue, uri)) as file:
            yield WorkQueuePublisher(StoredTable(file, self._table(file, queue, uri)))

    def _table(self, file: WorkedFile, queue: QueueConfig, uri: QueueUri) -> QueueTable:
        return QueueTable(
            name=uri.options.get("queue") or queue.name,
            worker_id=self._worker.id,
            dedup_window=self._worker.dedup_window,
            clock=file.now,
            audit=_audit(queue, uri),
        )


def _path(queue: QueueConfig, uri: QueueUri) -> Path:
    if uri.address:
        raise refusal(queue, "needs three slashes, and then the path of a file")
    if uri.path.endswith("/") or not uri.path:
        raise refusal(queue, "names no file")
    return Path(os.path.realpath(sqlite_path(queue.uri)))


def _audit(queue: QueueConfig, uri: QueueUri) -> float:
    try:
        seconds = float(uri.options.get("audit", DEFAULT_AUDIT))
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise refusal(queue, "has an option audit that is not a number of seconds")
    return seconds
