"""What a work queue in SQLite can tell and do beside consuming and publishing (CMD-2 to CMD-10)."""

import sqlite3
from collections.abc import Sequence
from functools import partial

import msgspec

from router.brokers.sqlite.connection import QUERIES, T, Work
from router.brokers.sqlite.operations import QueueOperations
from router.brokers.sqlite.queue_table import Row, to_json
from router.brokers.sqlite.work_queue import Database, Sinks
from router.brokers.work_queue import (
    batch_conflict,
    callback_prefix,
    ending_of,
    status_of,
)
from router.core.config import QueueConfig
from router.core.identity import digest_of
from router.ports import (
    BatchRecord,
    Cancellation,
    CancelReply,
    MessageRecord,
    Publication,
    no_reply,
)


class SqliteStore:
    """The messages and batches of one queue."""

    def __init__(self, database: Database, operations: QueueOperations, sinks: Sinks) -> None:
        self._database = database
        self._operations = operations
        self._sinks = sinks

    def takes(self, queue: QueueConfig) -> bool:
        return self._sinks(queue) is not None

    async def find(self, message_id: str) -> MessageRecord | None:
        return await self._database.look(partial(self._find, message_id=message_id))

    async def cancel(self, message_id: str, reply: CancelReply = no_reply) -> Cancellation:
        return await self._change(partial(self._cancel, message_id=message_id, reply=reply))

    async def open_batch(
        self, batch_id: str, size: int | None, callback: Publication, items: Sequence[Publication]
    ) -> int:
        def work(db: sqlite3.Connection) -> int:
            self._open_batch(db, batch_id, size, callback)
            return self._add_members(db, batch_id, items, closes=size is None)

        return await self._change(work)

    async def add_to_batch(self, batch_id: str, items: Sequence[Publication]) -> int:
        return await self._change(
            partial(self._add_members, batch_id=batch_id, items=items, closes=False)
        )

    async def find_batch(self, batch_id: str) -> BatchRecord | None:
        def work(db: sqlite3.Connection) -> BatchRecord | None:
            found = self._batch(db, batch_id)
            return None if found is None else found[1]

        return await self._database.look(work)

    async def publish_tick(self, schedule: str, tick: int, item: Publication) -> bool:
        def work(db: sqlite3.Connection) -> bool:
            asked = {"queue": self._operations.queue, "schedule": schedule, "tick": tick}
            is_newer = db.execute(QUERIES["tick"], asked).rowcount > 0
            if is_newer:
                self._operations.publish(db, [item])
            return is_newer

        return await self._change(work)

    async def last_tick(self, schedule: str) -> int | None:
        def work(db: sqlite3.Connection) -> int | None:
            asked = {"queue": self._operations.queue, "schedule": schedule}
            (tick,) = db.execute(QUERIES["last_tick"], asked).fetchone()
            return None if tick is None else int(tick)

        return await self._database.look(work)

    async def _change(self, work: Work[T]) -> T:
        """Answer when the disk has it."""
        done = await self._database.run(work, is_large=True)
        self._database.signal(self._operations.queue).ring()
        await self._database.sync()
        return done

    def _find(self, db: sqlite3.Connection, message_id: str) -> MessageRecord | None:
        asked = {"queue": self._operations.queue, "message_id": message_id}
        row = db.execute(QUERIES["find"], asked).fetchone()
        if row is None:
            return None
        (_, state, failures, requests, published, not_before, run_after, claimed, finished) = row[
            :9
        ]
        (worker_id, correlation_id, batch_id, payload_size, error, result, omitted) = row[9:16]
        unix = self._unix()
        return MessageRecord(
            id=message_id,
            status=status_of(
                state, is_scheduled=None not in (not_before, run_after) and claimed is None
            ),
            failures=failures,
            requests=requests,
            created_at=published + unix,
            not_before=not_before,
            started_at=None if claimed is None else claimed + unix,
            ended_at=None if finished is None else finished + unix,
            worker_id=worker_id,
            correlation_id=correlation_id,
            batch_id=batch_id,
            payload_bytes=payload_size or 0,
            last_error=error,
            ending=ending_of(
                state,
                result=None if result is None else result.encode(),
                result_omitted=bool(omitted),
                failure=(row[16], error, row[17]),
            ),
        )

    def _unix(self) -> float:
        """Return what Unix time is ahead of the clock of the file."""
        return self._operations.wall() - self._operations.clock()

    def _cancel(self, db: sqlite3.Connection, message_id: str, reply: CancelReply) -> Cancellation:
        operations = self._operations
        asked = {"queue": operations.queue, "message_id": message_id}
        known, unsettled, row_id, state = db.execute(QUERIES["cancellable"], asked).fetchone()
        if not known:
            return Cancellation.UNKNOWN
        if unsettled > 1:
            return Cancellation.AMBIGUOUS
        if state != "ready":
            return Cancellation.TOO_LATE
        ids = to_json([row_id])
        _, body = db.execute(QUERIES["bodies"], {"ids": ids}).fetchone()
        operations.cancel(db, ids)
        for outgoing in reply(f"{self._database.incarnation}-{row_id}", body):
            queue = self._sinks(outgoing.queue)
            if queue is None:
                raise ValueError(f"{outgoing.queue.name} is not in this database")
            queue.publish(db, [outgoing.publication])
            self._database.signal(queue.queue).ring()
        return Cancellation.CANCELLED

    def _open_batch(
        self, db: sqlite3.Connection, batch_id: str, size: int | None, callback: Publication
    ) -> None:
        prefix = callback_prefix(callback.body)
        found = self._batch(db, batch_id)
        if found is not None:
            _, known, known_prefix = found
            if prefix != known_prefix:
                raise batch_conflict("callback", batch_id)
            if size not in (None, known.size):
                raise batch_conflict("size", batch_id, known.size)
            return
        row = self._operations.row_of(callback, None, is_kept=True)
        asked = {
            "queue": self._operations.queue,
            "batch_id": batch_id,
            "size": size if size is not None else -1,
            "callback": to_json(row),
            "callback_body": prefix,
        }
        db.execute(QUERIES["open_batch"], asked)

    def _add_members(
        self, db: sqlite3.Connection, batch_id: str, items: Sequence[Publication], *, closes: bool
    ) -> int:
        found = self._batch(db, batch_id)
        if found is None:
            raise batch_conflict("unknown", batch_id)
        number, known, _ = found
        members = {(item.message.id, digest_of(item.body)): item for item in items}
        asked = {"batch": number, "members": to_json(list(members))}
        (there,) = db.execute(QUERIES["known_members"], asked).fetchone()
        for message_id, digest in msgspec.json.decode(there):
            del members[message_id, digest]
        size = known.total + len(members) if known.size < 0 and closes else known.size
        if known.total + len(members) > size:
            raise batch_conflict("room", batch_id, size, known.total, len(members))
        if members:
            db.execute(QUERIES["add_members"], {"batch": number, "members": to_json(list(members))})
            # Without a dedup key: it is new to the batch, whatever else was published.
            rows: list[Row] = [
                self._operations.row_of(item, None, is_kept=True) for item in members.values()
            ]
            bodies = [item.body for item in members.values()]
            self._operations.insert(db, rows, bodies, batch=number)
        asked = {"batch": number, "added": len(members), "size": size}
        db.execute(QUERIES["grow_batch"], asked)
        self._operations.complete(db, number)
        return len(members)

    def _batch(
        self, db: sqlite3.Connection, batch_id: str
    ) -> tuple[int, BatchRecord, bytes] | None:
        """Return the number of a batch, how far it has come, and its callback."""
        asked = {"queue": self._operations.queue, "batch_id": batch_id}
        row = db.execute(QUERIES["batch"], asked).fetchone()
        if row is None:
            return None
        number, _, size, total, succeeded, failed, cancelled, _, prefix, complete_at = row
        record = BatchRecord(
            id=batch_id,
            size=size,
            total=total,
            succeeded=succeeded,
            failed=failed,
            cancelled=cancelled,
            callback_published_at=None if complete_at is None else complete_at + self._unix(),
        )
        return number, record, prefix
