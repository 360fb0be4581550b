"""A work queue in memory, with a clock that the test sets."""

import asyncio
import sqlite3
from collections.abc import Collection, Coroutine, Sequence
from typing import Any, Self, TypeVar, cast

from msgspec import Raw
from msgspec.structs import replace

from router.brokers.kit.consuming import ClaimedBatch
from router.brokers.memory.broker import MemoryDatabase
from router.brokers.sqlite.queue_table import QueueTable
from router.brokers.sqlite.store import SqliteMessageStore
from router.brokers.sqlite.work_queue import WorkQueue
from router.brokers.work_queue import Lease, no_local_queues
from router.core.message import UNTRIED, Message, Tally
from router.core.outcome import Ending, Failure
from router.ports import (
    BatchRecord,
    Cancellation,
    Depth,
    Finish,
    MessageRecord,
    Nack,
    PoolFilter,
    Publication,
    Receipt,
)

WINDOW = 300.0
LEASE = 30.0

T = TypeVar("T")


class QueueClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Queue:
    """A work queue as one worker sees it. Its methods answer at once, as nothing waits in memory.

    A settlement answers the positions of the leases that were lost.
    """

    def __init__(self, database: MemoryDatabase, table: QueueTable, runner: asyncio.Runner) -> None:
        self._database = database
        self._table = table
        self._runner = runner
        self._queue = WorkQueue(database, table, LEASE)
        self._pools: PoolFilter | None = None

    @classmethod
    def of(cls, database: MemoryDatabase, clock: Any, runner: asyncio.Runner) -> Self:
        return cls(database, QueueTable("orders", "anna", WINDOW, clock, clock), runner)

    @property
    def db(self) -> sqlite3.Connection:
        return self._database.db

    def but(self, **changes: Any) -> "Queue":
        """The same with another `worker_id`, `queue` or `audit`."""
        queue = Queue(self._database, replace(self._table, **changes), self._runner)
        queue.select(self._pools)
        return queue

    def publish(self, items: Sequence[Publication]) -> list[Receipt]:
        return list(self._run(self._queue.publish(items)))

    def select(self, pools: PoolFilter | None) -> None:
        self._pools = pools
        self._queue.select(pools)

    def claim(self, limit: int = 100) -> ClaimedBatch:
        return self._run(self._queue.claim(limit))

    def claim_ids(self, limit: int = 100) -> tuple[list[str], list[Lease]]:
        """The bodies and the leases of a claim."""
        found = self.claim(limit).messages
        return [one.body.decode() for one in found], [lease_of(one.handle) for one in found]

    def ack(self, leases: Sequence[Lease], error: str = "") -> list[int]:
        lost = [one.handle for one in self._run(self._queue.ack(leases, error=error))]
        return [position for position, lease in enumerate(leases) if lease in lost]

    def nack(self, lease: Lease, delay: float, tally: Tally = UNTRIED, error: str = "") -> bool:
        failure = Failure("HTTP_503", error, 503) if error else None
        return not self._run(self._queue.nack([Nack(lease, delay, tally, failure)]))

    def extend(self, leases: Sequence[Lease], seconds: float) -> list[int]:
        lost = [one.handle for one in self._run(self._queue.extend(leases, seconds))]
        return [position for position, lease in enumerate(leases) if lease in lost]

    def end_leases(self, worker_ids: Collection[str]) -> None:
        self._run(self._queue.end_leases(worker_ids))

    def finish(self, lease: Lease, ending: Ending) -> None:
        self._run(self._queue.finish([Finish(lease, ending)]))

    def add_batch(self, name: str, size: int | None, members: Sequence[Publication]) -> int:
        return self._run(self.store.open_batch(name, size, CALLBACK, members))

    def find(self, message_id: str) -> MessageRecord | None:
        return self._run(self.store.find(message_id))

    def find_batch(self, name: str) -> BatchRecord | None:
        return self._run(self.store.find_batch(name))

    def cancel(self, message_id: str) -> Cancellation:
        return self._run(self.store.cancel(message_id))

    @property
    def store(self) -> SqliteMessageStore:
        return SqliteMessageStore(self._database, self._table, no_local_queues)

    def depth(self) -> Depth:
        return self._run(self._queue.depth())

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)


def lease_of(handle: object) -> Lease:
    return cast("Lease", handle)


def publication(
    message_id: str,
    *,
    pool: str | None = None,
    group: str | None = None,
    high: bool = False,
    body: str | None = None,
    key: str | None = None,
    priority: int | None = None,
    not_before: float | None = None,
    payload: bytes = b"",
) -> Publication:
    message = Message(
        id=message_id,
        target="https://svc.example/",
        pool=pool,
        group=group,
        high_priority=high,
        priority=priority,
        payload=Raw(payload),
    )
    return Publication(message, (body or message_id).encode(), key, not_before)


CALLBACK = publication("done", body='{"id":"done"}')


def story(db: sqlite3.Connection) -> list[tuple[object, ...]]:
    """The audit of all messages that are still there."""
    audit = "SELECT message_id, audit.state, at, audit.worker_id, error FROM queue_audit AS audit"
    return list(db.execute(f"{audit} JOIN queue_messages USING (id) ORDER BY id, at"))
