"""Work queues in a file: the router's own durable broker, shared by any number of its processes."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache, partial
from pathlib import Path
from typing import Final

from router.brokers.consumer_identity import ConsumerIdentity
from router.brokers.kit.shared import Shared
from router.brokers.kit.uri import QueueUri, read_uri, refusal
from router.brokers.sqlite.database import FileDatabase
from router.brokers.sqlite.operations import QueueOperations
from router.brokers.sqlite.store import SqliteStore
from router.brokers.sqlite.work_queue import Sinks, WorkQueue
from router.brokers.work_queue import DEFAULT_AUDIT_SECONDS, DEFAULT_LEASE_SECONDS, seconds_option
from router.brokers.worker_locks import Recovery
from router.core.config import QueueConfig, sqlite_path

OPTIONS: Final = frozenset({"queue", "audit"})


class WorkedFile(FileDatabase):
    """A queue file, and the workers that share it."""

    def __init__(self, path: Path, worker: ConsumerIdentity) -> None:
        super().__init__(path, worker.machine)
        self.liveness = worker.liveness(Path(f"{path}-worker-"))
        self.recovery = Recovery(self.liveness)


class SqliteQueues:
    """`sqlite:///path/to/file.db?queue=name&audit=seconds`; the path is absolute."""

    def __init__(self, worker: ConsumerIdentity) -> None:
        self._worker = worker
        self._files = Shared(partial(WorkedFile, worker=worker))

    async def close(self) -> None:
        await self._files.close()

    @asynccontextmanager
    async def open_queue(self, queue: QueueConfig) -> AsyncIterator[WorkQueue]:
        uri = read_uri(queue, OPTIONS)
        lease = queue.visibility_timeout or DEFAULT_LEASE_SECONDS
        async with self._files.use(_path(queue, uri)) as file:
            with file.liveness.claim_own(self._worker.id):
                operations = self._operations(file, queue, uri)
                sinks = self._sinks(file, queue, uri)
                work_queue = WorkQueue(file, operations, lease, file.recovery, sinks)
                await work_queue.recover()
                try:
                    yield work_queue
                finally:
                    work_queue.interrupt()

    @asynccontextmanager
    async def open_publisher(self, queue: QueueConfig) -> AsyncIterator[WorkQueue]:
        uri = read_uri(queue, OPTIONS)
        async with self._files.use(_path(queue, uri)) as file:
            yield WorkQueue(file, self._operations(file, queue, uri))

    @asynccontextmanager
    async def open_store(self, queue: QueueConfig) -> AsyncIterator[SqliteStore]:
        uri = read_uri(queue, OPTIONS)
        async with self._files.use(_path(queue, uri)) as file:
            sinks = self._sinks(file, queue, uri)
            yield SqliteStore(file, self._operations(file, queue, uri), sinks)

    def _sinks(self, file: WorkedFile, queue: QueueConfig, uri: QueueUri) -> Sinks:
        """Return what finds the queues of the same file."""
        path = _path(queue, uri)

        @cache  # to follow symbolic links takes several system calls
        def find(other: QueueConfig) -> QueueOperations | None:
            if not other.uri.startswith("sqlite:"):
                return None
            other_uri = read_uri(other, OPTIONS)
            if _path(other, other_uri) != path:
                return None
            return self._operations(file, other, other_uri)

        return find

    def _operations(self, file: WorkedFile, queue: QueueConfig, uri: QueueUri) -> QueueOperations:
        return QueueOperations(
            queue=uri.options.get("queue") or queue.name,
            worker_id=self._worker.id,
            dedup_window=self._worker.dedup_window,
            clock=file.now,
            wall=self._worker.machine.wall,
            result_retention=self._worker.result_retention,
            audit=seconds_option(queue, uri, "audit", DEFAULT_AUDIT_SECONDS),
        )


def _path(queue: QueueConfig, uri: QueueUri) -> Path:
    if uri.address:
        raise refusal(queue, "needs three slashes, and then the path of a file")
    if uri.path.endswith("/") or not uri.path:
        raise refusal(queue, "names no file")
    return Path(os.path.realpath(sqlite_path(queue.uri)))
