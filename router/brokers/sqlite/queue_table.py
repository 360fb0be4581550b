"""One queue of a SQLite database: how messages come into it, and how batches are counted.

Synchronous on purpose: one call is a part of one transaction, which the database begins and ends.
"""

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from typing import Final, cast

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from router.brokers import work_queue
from router.brokers.sqlite.connection import QUERIES
from router.core.identity import dedup_key_of
from router.core.message import DEFAULT_POOL, Mode
from router.ports import Publication

Row = dict[str, object]  # a message that is to be added, by the names of its columns

_COLUMNS: Final = (  # in the order of `publish`
    *("id", "message_id", "dedup_key", "pool", "group_id", "priority", "offset", "size"),
)
_keys: Final = msgspec.json.Decoder(set[str])


class QueueTable(Struct, frozen=True):
    """One queue of a database, as one worker sees it."""

    queue: str
    worker_id: str
    dedup_window: float
    clock: Callable[[], float]
    wall: Callable[[], float]  # Unix seconds
    result_retention: float = 0.0  # seconds that a message with a payload or result stays
    holds_groups: bool = True
    audit: float = 0.0  # seconds that the audit rows stay; 0: none are written

    def publish(self, db: sqlite3.Connection, items: Sequence[Publication]) -> Sequence[bool]:
        """Add them. Return False for those that are duplicates (WQ-1)."""
        now = self.clock()
        keys = [dedup_key_of(item.dedup_key, item.message.id, item.body) for item in items]
        asked = {"queue": self.queue, "keys": to_json(keys), "before": now - self.dedup_window}
        db.execute(QUERIES["forget"], asked)
        known = _keys.decode(json_value(db, "known", asked))
        added: list[bool] = []
        rows: list[Row] = []
        bodies: list[bytes] = []
        for key, item in zip(keys, items, strict=True):
            added.append(key not in known)
            if key not in known:
                known.add(key)
                rows.append(self.row_of(item, key))
                bodies.append(item.body)
        if rows:
            self.insert(db, rows, bodies)
        return added

    def row_of(self, item: Publication, dedup_key: str | None, *, is_kept: bool = False) -> Row:
        """Return the row of a message, without what only `insert` knows."""
        message = item.message
        in_group = self.holds_groups and message.mode is not Mode.IMMEDIATE
        row: Row = {
            "message_id": message.id,
            "dedup_key": dedup_key,
            "pool": message.pool or DEFAULT_POOL,
            "group_id": message.group if in_group else None,
            "priority": message.level,
        }
        is_kept = is_kept or work_queue.is_kept(message)
        if is_kept or message.correlation_id is not None or item.not_before is not None:
            row |= {
                "is_kept": int(is_kept),
                "payload_size": len(message.payload) if message.has_payload else None,
                "correlation_id": message.correlation_id,
                "not_before": item.not_before,
            }
        return row

    def insert(
        self,
        db: sqlite3.Connection,
        rows: Sequence[Row],
        bodies: Sequence[bytes],
        batch: int | None = None,
    ) -> None:
        """Add messages, whatever else is there."""
        now = self.clock()
        (last_id,) = db.execute(QUERIES["last_id"]).fetchone()
        offset = 0
        for number, (row, body) in enumerate(zip(rows, bodies, strict=True), last_id + 1):
            row |= {"id": number, "offset": offset, "size": len(body)}
            offset += len(body)
            if row.get("not_before") is not None:
                due = float(cast("float", row["not_before"])) + now - self.wall()
                row["run_after"] = due if due > now else None
        ids = to_json([row["id"] for row in rows])
        asked = {
            "queue": self.queue,
            "rows": to_json([[row[column] for column in _COLUMNS] for row in rows]),
            "bodies": b"".join(bodies),
            "now": now,
            "ids": ids,
        }
        has_groups = any(row["group_id"] is not None for row in rows)
        if has_groups:
            db.execute(QUERIES["add_groups"], asked)
        for query in ("publish", "store_bodies"):
            db.execute(QUERIES[query], asked)
        extras = [row for row in rows if "is_kept" in row]
        if extras:
            asked = {"extras": to_json(extras), "batch": batch, "now": now}
            db.execute(QUERIES["add_extras"], asked)
        if has_groups:
            db.execute(QUERIES["offer"], {"ids": ids})
        self.audit_change(db, ids, "ready")

    def count_ended(self, db: sqlite3.Connection, ids: str) -> None:
        """Count messages that have just ended in their batches (CMD-4)."""
        for (batch,) in db.execute(QUERIES["count_ended"], {"ids": ids}).fetchall():
            self.complete(db, batch)

    def complete(self, db: sqlite3.Connection, batch: int) -> None:
        """Publish the callback of a batch if all of its members have ended, once."""
        asked = {"batch": batch, "now": self.clock()}
        for queue, batch_id, total, succeeded, failed, cancelled, row, body in db.execute(
            QUERIES["complete"], asked
        ).fetchall():
            payload = {
                "batchId": batch_id,
                "total": total,
                "succeeded": succeeded,
                "failed": failed,
                "cancelled": cancelled,
            }
            callback = body + msgspec.json.encode(payload) + b"}"
            replace(self, queue=queue).insert(db, [msgspec.json.decode(row)], [callback])

    def audit_change(
        self, db: sqlite3.Connection, ids: str, state: str, error: str = "", queue: str = ""
    ) -> None:
        if self.audit:
            asked = {
                "queue": queue or self.queue,
                "now": self.clock(),
                "state": state,
                "worker_id": self.worker_id,
                "error": error,
                "ids": ids,
            }
            db.execute(QUERIES["audit"], asked)


def json_value(db: sqlite3.Connection, query: str, asked: Mapping[str, object]) -> str:
    """Return the JSON that the statement answers."""
    (value,) = db.execute(QUERIES[query], asked).fetchone()
    return str(value)


def to_json(values: object) -> str:
    return msgspec.json.encode(values).decode()
