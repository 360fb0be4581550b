"""The order store of one queue in SQLite, on disk or in memory (ORD-4 to ORD-8)."""

import sqlite3
from collections.abc import Collection, Sequence
from functools import partial

from router.brokers.sqlite.connection import QUERIES
from router.brokers.sqlite.queue_table import QueueTable, to_json
from router.brokers.sqlite.work_queue import LARGE_BYTES, MANY_MESSAGES, Database
from router.core.order import GroupKey
from router.ports import StoredMessage, StoreSize


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
