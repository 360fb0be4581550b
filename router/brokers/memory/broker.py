"""Queues that live in this process and are lost with it: for tests, benchmarks and trying out.

The tables are the work queue's own, in a database in memory, on the event loop's clock. So what
holds here holds on disk, and on virtual time every instant is exact.
"""

import asyncio
import itertools
import sqlite3
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from msgspec.structs import replace

from router.brokers.kit import DEFAULT_LEASE_SECONDS, QueueUri, read_uri, refusal
from router.brokers.memory import OPTIONS
from router.brokers.sqlite.connection import QUERIES, T, Work, prepare_schema, transaction
from router.brokers.sqlite.order import SqliteOrderLog
from router.brokers.sqlite.queue_table import QueueTable
from router.brokers.sqlite.store import SqliteMessageStore
from router.brokers.sqlite.work_queue import WorkQueue
from router.brokers.work_queue import ResultLimit
from router.brokers.workers import THIS_MACHINE, ConsumerIdentity
from router.core.config import QueueConfig
from router.ports import Disconnected
from router.signal import Signal, wait_for_signal

GROUPS: Final = {"hold": True, "free": False}


class MemoryQueues:
    """All memory queues of one BrokerRegistry, by name: `memory://name?groups=hold|free&lease=seconds|none`.

    `groups=free`: a group is not held back while one of it is out. `lease=none`: a hand-over is
    good until its connection closes, and not a moment longer.
    """

    def __init__(self, worker: ConsumerIdentity) -> None:
        self._worker = worker
        self._database = MemoryDatabase()
        self._results = ResultLimit(worker.result_max_bytes, worker.on_results)
        self._connections = itertools.count(1)

    async def close(self) -> None:
        self._database.close()

    @asynccontextmanager
    async def open_queue(self, queue: QueueConfig) -> AsyncIterator[WorkQueue]:
        uri = read_uri(queue, OPTIONS)
        lease = _lease(queue, uri)
        table = self._table(queue)
        self._results.queues.add(queue.name)
        if lease is None:
            own_id = f"{self._worker.id}#{next(self._connections)}"
            table = replace(table, worker_id=own_id)
        work_queue = WorkQueue(
            self._database,
            table,
            lease,
            local_queues=self._sink,
            results=self._results,
            is_dated=queue.max_age is not None,
        )
        try:
            yield work_queue
        finally:
            work_queue.stop()
            if lease is None:
                await work_queue.end_leases([table.worker_id])

    @asynccontextmanager
    async def open_publisher(self, queue: QueueConfig) -> AsyncIterator[WorkQueue]:
        yield WorkQueue(self._database, self._table(queue))

    @asynccontextmanager
    async def open_store(self, queue: QueueConfig) -> AsyncIterator[SqliteMessageStore]:
        yield SqliteMessageStore(self._database, self._table(queue), self._sink)

    @asynccontextmanager
    async def open_order_log(self, queue: QueueConfig) -> AsyncIterator[SqliteOrderLog]:
        yield SqliteOrderLog(self._database, self._table(queue))

    def _sink(self, queue: QueueConfig) -> QueueTable | None:
        return self._table(queue) if queue.uri.startswith("memory:") else None

    def _table(self, queue: QueueConfig) -> QueueTable:
        uri = read_uri(queue, OPTIONS)
        groups = uri.options.get("groups", "hold")
        if groups not in GROUPS:
            raise refusal(queue, "has an option groups that is neither hold nor free")
        return QueueTable(
            queue=uri.address + uri.path,
            worker_id=self._worker.id,
            dedup_window=self._worker.dedup_window,
            clock=asyncio.get_running_loop().time,
            wall=self._worker.machine.wall,
            result_retention=self._worker.result_retention,
            holds_groups=GROUPS[groups],
        )


class MemoryDatabase:
    """A database without a file. No threads, no waiting: the event loop does the work."""

    def __init__(self) -> None:
        self.db: Final = sqlite3.connect(":memory:", isolation_level=None)
        self._signals: defaultdict[str, Signal] = defaultdict(Signal)
        self._open = True
        self.wait = wait_for_signal
        with transaction(self.db):
            prepare_schema(self.db, THIS_MACHINE)
        self.incarnation, _, _ = self.db.execute(QUERIES["file"]).fetchone()

    async def run(self, work: Work[T], *, is_large: bool = False) -> T:  # noqa: ARG002  nothing waits here
        if not self._open:
            raise Disconnected("the memory queues are closed")
        with transaction(self.db):
            return work(self.db)

    async def sync(self) -> None:
        """Do nothing: memory does not outlive the process."""

    async def look(self, work: Work[T]) -> T:
        return await self.run(work)

    def signal(self, queue: str) -> Signal:
        return self._signals[queue]

    def close(self) -> None:
        self._open = False
        self.db.close()


def _lease(queue: QueueConfig, uri: QueueUri) -> float | None:
    """Return the lease. The queue's visibility timeout overrides the URI, as everywhere."""
    said = uri.options.get("lease", str(DEFAULT_LEASE_SECONDS))
    if said == "none":
        return None
    try:
        seconds = queue.visibility_timeout or float(said)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise refusal(queue, "has an option lease that is neither seconds above 0 nor none")
    return seconds
