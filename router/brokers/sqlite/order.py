"""The order store of one queue in SQLite, on disk or in memory (ORD-4 to ORD-8)."""

import sqlite3
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from router.brokers.sqlite.connection import QUERIES
from router.brokers.sqlite.queue_table import QueueTable, json_value, to_json
from router.brokers.sqlite.work_queue import LARGE_BYTES, MANY_MESSAGES, Database
from router.brokers.work_queue import GROUPS_AT_ONCE, HELD_UNTIL, stored_groups
from router.core.order import ORDER_PREFIX, GroupKey
from router.ports import HeldLetter, StoredGroup, StoredMessage, StoreSize


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

    async def unsettled_groups(self, after: GroupKey | None = None) -> Sequence[GroupKey]:
        pool, group = after or ("", "")
        asked = {"queue": self._table.queue, "pool": pool, "group": group, "limit": GROUPS_AT_ONCE}
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
            found = db.execute(QUERIES["stored_size"], asked).fetchone()
            messages, size, since = found or (0, 0, None)
            oldest = 0.0 if since is None else max(self._table.clock() - since, 0.0)
            return StoreSize(messages, size, oldest)

        return await self._database.look(work)

    async def groups(self, limit: int, *, only_held: bool = False) -> Sequence[StoredGroup]:
        return await self._list(None, None, limit, only_held=only_held)

    async def count_stored(self) -> Mapping[str, int]:
        asked = {"first": ORDER_PREFIX, "last": f"{ORDER_PREFIX}\U0010ffff"}
        rows = await self._database.look(
            lambda db: db.execute(QUERIES["count_stored"], asked).fetchall()
        )
        return dict(rows)

    async def count_held(self) -> int:
        asked = {
            "queue": self._table.queue,
            "held_until": HELD_UNTIL,
            "held_from": HELD_UNTIL / 2,  # the file's clock may be behind
        }
        row = await self._database.look(
            lambda db: db.execute(QUERIES["count_held"], asked).fetchone()
        )
        return int(row[0])

    async def find_group(self, group: GroupKey) -> StoredGroup | None:
        found = await self._list(*group, 2, only_held=False)
        return next(iter(found), None)

    async def _list(
        self, pool: str | None, group: str | None, limit: int, *, only_held: bool
    ) -> Sequence[StoredGroup]:
        table = self._table
        asked = {
            "queue": table.queue,
            "pool": pool,
            "group": group,
            "limit": limit,
            "only_held": only_held,
            "held_until": HELD_UNTIL,
        }

        def work(db: sqlite3.Connection) -> Sequence[sqlite3.Row]:
            cursor = db.cursor()
            cursor.row_factory = sqlite3.Row
            unix = table.wall() - table.clock()
            return cursor.execute(QUERIES["list_groups"], {**asked, "unix": unix}).fetchall()

        return stored_groups(await self._database.look(work))

    async def ids_of(self, group: GroupKey, limit: int) -> Sequence[str]:
        pool, name = group
        asked = {"queue": self._table.queue, "pool": pool, "group": name, "limit": limit}
        rows = await self._database.look(
            lambda db: db.execute(QUERIES["ids_of_group"], asked).fetchall()
        )
        return [message_id for (message_id,) in rows]

    async def group_of(self, message_id: str) -> GroupKey | None:
        asked = {"queue": self._table.queue, "message_id": message_id}
        row = await self._database.look(
            lambda db: db.execute(QUERIES["group_of_message"], asked).fetchone()
        )
        return None if row is None or row[1] is None else row

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
