"""Opens the queues of files."""

import os
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import cache, partial
from pathlib import Path
from typing import Final

from router.brokers.kit import DEFAULT_LEASE_SECONDS, Shared, read_uri, refusal, seconds_option
from router.brokers.sqlite import OPTIONS
from router.brokers.sqlite.database import FileDatabase
from router.brokers.sqlite.order import SqliteOrderLog
from router.brokers.sqlite.queue_table import QueueTable
from router.brokers.sqlite.store import SqliteMessageStore
from router.brokers.sqlite.work_queue import WorkQueue
from router.brokers.work_queue import (
    DEFAULT_AUDIT_SECONDS,
    LocalQueues,
    ResultLimit,
)
from router.brokers.workers import ConsumerIdentity, Recovery
from router.core.config import QueueConfig
from router.setting_values import sqlite_path


class WorkedFile(FileDatabase):
    """A queue file, and the workers that share it."""

    def __init__(
        self,
        path: Path,
        worker: ConsumerIdentity,
        refusal: str | None,
        on_storage: Callable[[str | None], None],
    ) -> None:
        super().__init__(
            path, worker.machine, refusal, on_storage, poll_interval=worker.poll_interval
        )
        self.liveness = worker.liveness(Path(f"{path}-worker-"))
        self.recovery = Recovery(self.liveness)


class SqliteQueues:
    """`sqlite:///path/to/file.db?queue=name&audit=seconds`; the path is absolute."""

    def __init__(self, worker: ConsumerIdentity) -> None:
        self._worker = worker
        self._files = Shared(self._open)
        self._results: defaultdict[Path, ResultLimit] = defaultdict(
            lambda: ResultLimit(worker.result_max_bytes, worker.on_results)
        )
        self._refusals: dict[Path, str | None] = {}  # why files refuse writes: they are reopened

    async def close(self) -> None:
        await self._files.close()

    @asynccontextmanager
    async def open_queue(self, queue: QueueConfig) -> AsyncIterator[WorkQueue]:
        lease = queue.visibility_timeout or DEFAULT_LEASE_SECONDS
        async with self._file(queue) as file:
            with file.liveness.claim_own(self._worker.id):
                table, local_queues = self._table(file, queue), self._local_queues(file)
                work_queue = WorkQueue(
                    file,
                    table,
                    lease,
                    file.recovery,
                    local_queues=local_queues,
                    results=self._results[file.path],
                    is_dated=queue.max_age is not None,
                )
                await work_queue.recover()
                try:
                    yield work_queue
                finally:
                    work_queue.stop()

    @asynccontextmanager
    async def open_publisher(self, queue: QueueConfig) -> AsyncIterator[WorkQueue]:
        async with self._file(queue) as file:
            yield WorkQueue(file, self._table(file, queue))

    @asynccontextmanager
    async def open_store(self, queue: QueueConfig) -> AsyncIterator[SqliteMessageStore]:
        async with self._file(queue) as file:
            yield SqliteMessageStore(file, self._table(file, queue), self._local_queues(file))

    @asynccontextmanager
    async def open_order_log(self, queue: QueueConfig) -> AsyncIterator[SqliteOrderLog]:
        async with self._file(queue) as file:
            yield SqliteOrderLog(file, self._table(file, queue))

    def _file(self, queue: QueueConfig) -> AbstractAsyncContextManager[WorkedFile]:
        path = _path(queue)
        self._results[path].queues.add(queue.name)
        return self._files.use(path)

    def _open(self, path: Path) -> WorkedFile:
        refusal, report = self._refusals.get(path), partial(self._on_storage, path)
        return WorkedFile(path, self._worker, refusal, report)

    def _on_storage(self, path: Path, refusal: str | None) -> None:
        self._refusals[path] = refusal
        for name in self._results[path].queues:
            self._worker.on_storage(name, refusal)

    def _local_queues(self, file: WorkedFile) -> LocalQueues[QueueTable]:
        """Return what finds the queues of the same file."""

        @cache  # to follow symbolic links takes several system calls
        def find(other: QueueConfig) -> QueueTable | None:
            is_here = other.uri.startswith("sqlite:") and _path(other) == file.path
            return self._table(file, other) if is_here else None

        return find

    def _table(self, file: WorkedFile, queue: QueueConfig) -> QueueTable:
        uri = read_uri(queue, OPTIONS)
        return QueueTable(
            queue=uri.options.get("queue") or queue.name,
            worker_id=self._worker.id,
            dedup_window=self._worker.dedup_window,
            clock=file.now,
            wall=self._worker.machine.wall,
            result_retention=self._worker.result_retention,
            audit=seconds_option(queue, uri, "audit", DEFAULT_AUDIT_SECONDS),
        )


_THREE_SLASHES: Final = "needs three slashes, and then the path of a file"


def _path(queue: QueueConfig) -> Path:
    uri = read_uri(queue, OPTIONS)
    if uri.address:
        raise refusal(queue, _THREE_SLASHES)
    if uri.path.endswith("/") or not uri.path:
        raise refusal(queue, "names no file")
    if not queue.uri.partition(":")[2].startswith("//"):
        raise refusal(queue, _THREE_SLASHES)
    return Path(os.path.realpath(sqlite_path(queue.uri)))
