"""The order store of one queue in SQLite, on disk or in memory (ORD-4 to ORD-8)."""

import sqlite3
from collections.abc import Callable, Collection, Sequence
from functools import partial

from router.brokers.sqlite.connection import QUERIES
from router.brokers.sqlite.queue_table import QueueTable, json_value, to_json
from router.brokers.sqlite.work_queue import LARGE_BYTES, MANY_MESSAGES, Database
from router.brokers.work_queue import HELD_UNTIL
from router.core.order import GroupKey
from router.ports import HeldLetter, StoredMessage, StoreSize


class SqliteOrderLog:
    def __init__(self, database: Database, table: QueueTable) -> None:
        self._database = database
        self._table = table

    async def append(self, items: Sequence[StoredMessage]) -> int:
        size = sum(len(item.publication.body) for item in items)
        is_large = len(items) > MANY_MESSAGES or size > LARGE_BYTES
        self._database.signal(self._table.queue).ring()
        added = await self._database.run(
            partial(self._table.append, items=items), is_large=is_large
        )
        await self._database.sync()
        return added

    async def unsettled_groups(self) -> Sequence[GroupKey]:
        asked = {"queue": self._table.queue}
        return await self._database.run(
            lambda db: db.execute(QUERIES["unsettled_groups"], asked).fetchall(), is_large=True
        )

    async def which_are_stored(self, groups: Collection[GroupKey]) -> Collection[GroupKey]:
        asked = {"queue": self._table.queue, "groups": to_json(list(groups))}
        return await self._database.run(
            lambda db: db.execute(QUERIES["stored_groups"], asked).fetchall()
        )

    async def size(self) -> StoreSize:
        asked = {"queue": self._table.queue}

        def work(db: sqlite3.Connection) -> StoreSize:
            messages, size, since = db.execute(QUERIES["stored_size"], asked).fetchone()
            oldest = 0.0 if since is None else max(self._table.clock() - since, 0.0)
            return StoreSize(messages, size, oldest)

        return await self._database.run(work, is_large=True)

    async def held_letter(self, group: GroupKey) -> HeldLetter | None:
        def work(db: sqlite3.Connection) -> HeldLetter | None:
            for row_id, message_id in self._held(db, group):
                _, body = db.execute(QUERIES["bodies"], {"ids": to_json([row_id])}).fetchone()
                return HeldLetter(message_id, body)
            return None

        return await self._database.run(work)

    async def retry_letter(self, group: GroupKey, message_id: str, body: bytes) -> bool:
        def work(db: sqlite3.Connection, row_id: int) -> None:
            asked = {"id": row_id, "body": body, "size": len(body)}
            for query in ("retry_letter", "forget_letter", "replace_body"):
                db.execute(QUERIES[query], asked)

        return await self._decide(group, message_id, work, "ready")

    async def release(self, group: GroupKey, message_id: str) -> bool:
        def work(db: sqlite3.Connection, row_id: int) -> None:
            asked = {"id": row_id, "ids": to_json([row_id]), "now": self._table.clock()}
            for query in ("release_letter", "free_keys", "delete_bodies"):
                db.execute(QUERIES[query], asked)
            self._table.count_ended(db, to_json([row_id]))

        return await self._decide(group, message_id, work, "failed")

    async def _decide(
        self,
        group: GroupKey,
        message_id: str,
        work: Callable[[sqlite3.Connection, int], None],
        state: str,
    ) -> bool:
        """Do that with the message that holds the group, unless it is another one."""

        def decide(db: sqlite3.Connection) -> bool:
            held = [row_id for row_id, held_id in self._held(db, group) if held_id == message_id]
            for row_id in held:
                work(db, row_id)
                ids = to_json([row_id])
                self._table.offer(db, json_value(db, "groups_of", {"ids": ids}))
                self._table.audit_change(db, ids, state)
            return bool(held)

        self._database.signal(self._table.queue).ring()
        done = await self._database.run(decide)
        await self._database.sync()
        return done

    def _held(self, db: sqlite3.Connection, group: GroupKey) -> Sequence[tuple[int, str]]:
        """Return id and message id of the message that holds the group, if there is one."""
        pool, name = group
        asked = {"queue": self._table.queue, "pool": pool, "group": name, "held_until": HELD_UNTIL}
        return db.execute(QUERIES["held_letter"], asked).fetchall()
