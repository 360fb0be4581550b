"""A work queue in SQLite beyond consuming and publishing (CMD-2 to CMD-10)."""

import sqlite3
from collections.abc import Sequence
from functools import partial

from router.brokers.sqlite.connection import QUERIES, T, Work
from router.brokers.sqlite.queue_table import QueueTable, json_value, to_json
from router.brokers.sqlite.work_queue import Database
from router.brokers.work_queue import (
    HELD_UNTIL,
    LAST_ROW_ID,
    ROWS_PER_PAGE,
    LocalQueues,
    batch_conflict,
    batch_record,
    callback_prefix,
    message_page,
    message_record,
    sink_for,
    state_asked_for,
    why_not_cancelled,
)
from router.core.config import QueueConfig
from router.core.identity import digest_of
from router.ports import (
    BatchRecord,
    Cancellation,
    CancelReply,
    MessageFilter,
    MessagePage,
    MessageRecord,
    Publication,
    no_reply,
)


class SqliteMessageStore:
    """The messages and batches of one queue."""

    def __init__(
        self, database: Database, table: QueueTable, local_queues: LocalQueues[QueueTable]
    ) -> None:
        self._database = database
        self._table = table
        self._local_queues = local_queues

    def takes(self, queue: QueueConfig) -> bool:
        return self._local_queues(queue) is not None

    async def find(self, message_id: str) -> MessageRecord | None:
        row = await self._database.look(partial(self._row, query="find", name=message_id))
        return None if row is None else message_record(message_id, row)

    async def page(
        self, wanted: MessageFilter, *, limit: int, before: int | None = None
    ) -> MessagePage:
        state, is_scheduled = state_asked_for(wanted.status)
        asked = {
            "queue": self._table.queue,
            "state": state,
            "is_scheduled": is_scheduled,
            "held_until": HELD_UNTIL,
            "group": wanted.group,
            "since": wanted.since,
            "unix": self._unix,
            "rows": ROWS_PER_PAGE,
            "limit": limit + 1,
            "before": LAST_ROW_ID if before is None else before,
        }

        def read(db: sqlite3.Connection) -> Sequence[sqlite3.Row]:
            return _named(db).execute(QUERIES["page"], asked).fetchall()

        return message_page(await self._database.look(read), limit)

    async def cancel(
        self, message_id: str, reply: CancelReply = no_reply, *, running: bool = False
    ) -> Cancellation:
        def work(db: sqlite3.Connection) -> Cancellation:
            asked = {
                "queue": self._table.queue,
                "message_id": message_id,
                "held_until": HELD_UNTIL,
            }
            known, unsettled, row_id, state = db.execute(QUERIES["cancellable"], asked).fetchone()
            problem = why_not_cancelled(known, unsettled, state, running=running)
            if problem is Cancellation.ASKED:
                db.execute(QUERIES["ask_to_end"], {"id": row_id})
            if problem is not None:
                return problem
            ids = to_json([row_id])
            _, body = db.execute(QUERIES["bodies"], {"ids": ids}).fetchone()
            for query in ("cancel", "free_keys", "delete_bodies"):
                db.execute(QUERIES[query], {"ids": ids, "now": self._table.clock()})
            self._table.offer(db, json_value(db, "groups_of", {"ids": ids}))
            self._table.audit_change(db, ids, "cancelled")
            self._table.count_ended(db, ids)
            for outgoing in reply(f"{self._database.incarnation}-{row_id}", body):
                table = sink_for(self._local_queues, outgoing.queue)
                table.publish(db, [outgoing.publication])
                self._database.signal(table.queue).ring()
            return Cancellation.CANCELLED

        return await self._change(work)

    async def open_batch(
        self, batch_id: str, size: int | None, callback: Publication, items: Sequence[Publication]
    ) -> int:
        def work(db: sqlite3.Connection) -> int:
            prefix = callback_prefix(callback.body)
            known = self._row(db, "batch", batch_id)
            if known is None:
                asked = {
                    "queue": self._table.queue,
                    "batch_id": batch_id,
                    "size": size if size is not None else -1,
                    "callback": to_json(self._table.row_of(callback, is_kept=True)),
                    "callback_body": prefix,
                }
                db.execute(QUERIES["open_batch"], asked)
            elif prefix != known["callback_body"]:
                raise batch_conflict("callback", batch_id)
            elif size not in (None, known["size"]):
                raise batch_conflict("size", batch_id, known["size"])
            return self._add_members(db, batch_id, items, closes=size is None)

        return await self._change(work)

    async def add_to_batch(self, batch_id: str, items: Sequence[Publication]) -> int:
        work = partial(self._add_members, batch_id=batch_id, items=items, closes=False)
        return await self._change(work)

    async def find_batch(self, batch_id: str) -> BatchRecord | None:
        row = await self._database.look(partial(self._row, query="batch", name=batch_id))
        return None if row is None else batch_record(batch_id, row)

    async def publish_tick(self, schedule: str, tick: int, item: Publication) -> bool:
        def work(db: sqlite3.Connection) -> bool:
            asked = {"queue": self._table.queue, "schedule": schedule, "tick": tick}
            is_newer = db.execute(QUERIES["tick"], asked).rowcount > 0
            if is_newer:
                self._table.publish(db, [item])
            return is_newer

        return await self._change(work)

    async def last_tick(self, schedule: str) -> int | None:
        row = await self._database.look(partial(self._row, query="last_tick", name=schedule))
        return None if row is None else int(row["tick"])

    async def forget_tick(self, schedule: str, tick: int) -> None:
        asked = {"queue": self._table.queue, "schedule": schedule, "tick": tick}
        await self._change(lambda db: db.execute(QUERIES["forget_tick"], asked).rowcount)

    async def _change(self, work: Work[T]) -> T:
        """Answer when the disk has it."""
        done = await self._database.run(work, is_large=True)
        self._database.signal(self._table.queue).ring()
        await self._database.sync()
        return done

    def _row(self, db: sqlite3.Connection, query: str, name: str) -> sqlite3.Row | None:
        """Return the row of what has that name, its instants as Unix time."""
        asked = {"queue": self._table.queue, "name": name, "unix": self._unix}
        row: sqlite3.Row | None = _named(db).execute(QUERIES[query], asked).fetchone()
        return row

    @property
    def _unix(self) -> float:
        """Return how far Unix time is ahead of the clock of the file."""
        return self._table.wall() - self._table.clock()

    def _add_members(
        self, db: sqlite3.Connection, batch_id: str, items: Sequence[Publication], *, closes: bool
    ) -> int:
        known = self._row(db, "batch", batch_id)
        if known is None:
            raise batch_conflict("unknown", batch_id)
        number, size, total = known["number"], known["size"], known["total"]
        members = {(item.message.id, digest_of(item.body)): item for item in items}
        asked = {"batch": number, "members": to_json(list(members))}
        added = {digest for (digest,) in db.execute(QUERIES["add_members"], asked).fetchall()}
        # Without a dedup key: it is new to the batch, whatever else was published.
        new = [
            (self._table.row_of(item, is_kept=True), item.body)
            for (_, digest), item in members.items()
            if digest in added
        ]
        if size < 0 and closes:
            size = total + len(new)
        if total + len(new) > size:
            raise batch_conflict("room", batch_id, size, total, len(new))
        if new:
            self._table.insert(db, new, batch=number)
        asked = {"batch": number, "added": len(new), "size": size}
        db.execute(QUERIES["grow_batch"], asked)
        self._table.complete(db, number)
        return len(new)


def _named(db: sqlite3.Connection) -> sqlite3.Cursor:
    """Return a cursor whose rows know the names of their columns."""
    cursor = db.cursor()
    cursor.row_factory = sqlite3.Row
    return cursor
