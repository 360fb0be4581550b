"""Queues that live in this process and are lost with it: for tests, benchmarks and trying out.

The table is the work queue's own, in a database in memory, on the event loop's clock. So what holds
here holds on disk, and on virtual time every instant is exact.
"""

import asyncio
import itertools
import sqlite3
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, TypeVar

from msgspec.structs import replace

from router.brokers.bell import Bell, wait_for_ring
from router.brokers.queue_schema import prepare, transaction
from router.brokers.queue_table import QueueTable
from router.brokers.stored_table import StoredTable, Work
from router.brokers.uri import QueueUri, read_uri, refusal
from router.brokers.work_queue import DEFAULT_LEASE, WorkQueueBroker, WorkQueuePublisher
from router.brokers.worker import Worker
from router.core.config import QueueConfig
from router.ports import Disconnected

T = TypeVar("T")

OPTIONS: Final = frozenset({"groups", "lease"})
GROUPS: Final = {"hold": True, "free": False}


class MemoryQueues:
    """All memory queues of one door, by name: `memory://name?groups=hold|free&lease=seconds|none`.

    `groups=free`: a group is not held back while one of it is out. `lease=none`: a hand-over is
    good until its connection closes, and not a moment longer.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._store = MemoryStore()
        self._connections = itertools.count(1)

    async def close(self) -> None:
        self._store.close()

    @asynccontextmanager
    async def open_queue(self, queue: QueueConfig) -> AsyncIterator[WorkQueueBroker]:
        uri = read_uri(queue, OPTIONS)
        lease = _lease(queue, uri)
        table = self._table(queue, uri)
        if lease is None:
            table = replace(table, worker_id=f"{self._worker.id}#{next(self._connections)}")
        broker = WorkQueueBroker(StoredTable(self._store, table), lease)
        try:
            yield broker
        finally:
            broker.interrupt()
            if lease is None:
                await self._store.run(table.let_go)
                self._store.bell(table.name).ring()

    @asynccontextmanager
    async def open_publisher(self, queue: QueueConfig) -> AsyncIterator[WorkQueuePublisher]:
        table = self._table(queue, read_uri(queue, OPTIONS))
        yield WorkQueuePublisher(StoredTable(self._store, table))

    def _table(self, queue: QueueConfig, uri: QueueUri) -> QueueTable:
        groups = uri.options.get("groups", "hold")
        if groups not in GROUPS:
            raise refusal(queue, "has an option groups that is neither hold nor free")
        return QueueTable(
            name=uri.address + uri.path,
            worker_id=self._worker.id,
            dedup_window=self._worker.dedup_window,
            clock=asyncio.get_running_loop().time,
            holds_groups=GROUPS[groups],
        )


class MemoryStore:
    """A database without a file. No threads, no waiting: the event loop does the work."""

    def __init__(self) -> None:
        self._db = sqlite3.connect(":memory:", isolation_level=None)
        self._bells: defaultdict[str, Bell] = defaultdict(Bell)
        self._open = True
        prepare(self._db)
        (self.incarnation,) = self._db.execute("SELECT incarnation FROM queue_file").fetchone()

    async def run(self, work: Work[T], *, is_large: bool = False) -> T:  # noqa: ARG002  nothing waits here
        if not self._open:
            raise Disconnected("the memory queues are closed")
        with transaction(self._db):
            return work(self._db)

    async def sync(self) -> None:
        """Nothing lasts here."""

    async def look(self, work: Work[T]) -> T:
        return await self.run(work)

    def bell(self, queue: str) -> Bell:
        return self._bells[queue]

    async def wait(self, rung: asyncio.Event, seconds: float) -> None:
        await wait_for_ring(rung, seconds)

    def close(self) -> None:
        self._open = False
        self._db.close()


def _lease(queue: QueueConfig, uri: QueueUri) -> float | None:
    """The queue's visibility timeout wins over the URI, as with every other broker."""
    said = uri.options.get("lease", str(DEFAULT_LEASE))
    if said == "none":
        return None
    try:
        seconds = queue.visibility_timeout or float(said)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise refusal(queue, "has an option lease that is neither seconds above 0 nor none")
    return seconds
