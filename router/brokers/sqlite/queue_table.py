"""The tables of one queue: every rule about who may claim what is here and in queries.sql.

Synchronous on purpose: one call is a part of one transaction, which the database begins and ends.
"""

import secrets
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from router.brokers.sqlite.connection import QUERIES
from router.brokers.work_queue import (
    BATCH_RETENTION_SECONDS,
    HELD_UNTIL,
    MAX_ERROR_CHARACTERS,
    Lease,
    duplicate,
    keeps_record,
    ordered_group,
    payload_size,
)
from router.core.identity import dedup_key_of
from router.core.message import DEFAULT_POOL, HIGHEST_PRIORITY, Tally
from router.core.outcome import ACCEPTED, Ending
from router.ports import Finish, PoolFilter, Publication, Receipt, StoredMessage

WOKEN_AT_ONCE: Final = 1000  # delays, and leases, that one claim ends
ADOPTED_AT_ONCE: Final = 1000  # messages of an older router, whose pools are looked up
PRUNED_AT_ONCE: Final = 1000  # messages, and audit rows
CLAIM_BYTES: Final = 44  # that the first claim adds to a row, without the worker's id


class NewMessage(Struct, array_like=True, gc=False):
    """A message that is to be added: its columns, in the order of the statement `publish`."""

    message_id: str
    dedup_key: str | None
    pool: str
    group_id: str | None
    priority: int
    is_kept: bool
    payload_size: int | None
    correlation_id: str | None
    not_before: float | None  # Unix seconds
    # What `insert` finds out:
    id: int = 0
    wakes_at: float | None = None  # by the clock of the database
    offset: int = 0  # of its body in those of all
    size: int = 0


WithBodies = Sequence[tuple[NewMessage, bytes]]


class FileLease(Lease, frozen=True, array_like=True, gc=False):
    """A claimed message: what the statement `choose` answers, and settling needs to know."""

    group: int | None  # its number
    is_high: bool
    size: int  # of the body, in bytes
    deliveries: int  # before this one
    failures: int
    requests: int
    in_batch: bool  # settling it may complete the batch
    is_cancelled: bool = False  # it is to end, whoever gets it (CMD-13)


def stays_held(lease: FileLease, item: Finish) -> bool:
    """Return whether a message that was given up holds its group. Without one, it just ends."""
    return item.is_held and lease.group is not None


_known: Final = msgspec.json.Decoder(dict[str, str])
_chosen: Final = msgspec.json.Decoder(list[FileLease], strict=False)  # SQLite has no booleans
_FIRST_TRY: Final = Tally(failures=0, requests=1)


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

    def publish(self, db: sqlite3.Connection, items: Sequence[Publication]) -> Sequence[Receipt]:
        """Add them, unless they are duplicates (WQ-1)."""
        now = self.clock()
        keys = [dedup_key_of(item.dedup_key, item.message.id, item.body) for item in items]
        asked = {"queue": self.queue, "keys": to_json(keys), "before": now - self.dedup_window}
        db.execute(QUERIES["forget"], asked)
        known = _known.decode(json_value(db, "known", asked))
        receipts: list[Receipt] = []
        new: list[tuple[NewMessage, bytes]] = []
        for key, item in zip(keys, items, strict=True):
            kept = known.get(key)
            receipts.append(True if kept is None else duplicate(item, kept))
            if kept is None:
                known[key] = item.message.id
                new.append((self.row_of(item, key), item.body))
        if new:
            self.insert(db, new)
        return receipts

    def append(self, db: sqlite3.Connection, items: Sequence[StoredMessage]) -> int:
        """Add messages of another queue, unless they are here. Return how many were (ORD-6)."""
        now = self.clock()
        keys = [f"={item.publication.dedup_key}" for item in items]
        asked = {"queue": self.queue, "keys": to_json(keys), "before": now - self.dedup_window}
        db.execute(QUERIES["forget"], asked)
        known = _known.decode(json_value(db, "known", asked)).keys()
        new = {
            key: (item, self._row_of_stored(item, key, now))
            for key, item in reversed(list(zip(keys, items, strict=True)))
            if key not in known
        }
        added = list(reversed(new.values()))
        if added:
            self.insert(db, [(row, item.publication.body) for item, row in added])
            tallies = [_tally_row(row.id, item) for item, row in added]
            db.execute(QUERIES["keep_tallies"], {"tallies": to_json(tallies)})
            size = sum(len(item.publication.body) for item, _ in added)
            grown = {"queue": self.queue, "messages": len(added), "bytes": size}
            db.execute(QUERIES["count_added"], grown)
            held = [_letter_row(row.id, item) for item, row in added if item.given_up is not None]
            if held:
                self.hold(db, held)
        return len(added)

    def _row_of_stored(self, item: StoredMessage, key: str, now: float) -> NewMessage:
        message = item.publication.message
        wakes_at = now + item.delay if item.delay > 0 else None
        return NewMessage(
            message.id,
            key,
            message.pool or DEFAULT_POOL,
            item.group,
            min(message.level, HIGHEST_PRIORITY - 1),  # its group is one lane, whatever is in it
            is_kept=False,
            payload_size=payload_size(message),
            correlation_id=message.correlation_id,
            not_before=item.publication.not_before,
            wakes_at=HELD_UNTIL if item.given_up is not None else wakes_at,
        )

    def row_of(
        self, item: Publication, dedup_key: str | None = None, *, is_kept: bool = False
    ) -> NewMessage:
        message = item.message
        return NewMessage(
            message.id,
            dedup_key,
            message.pool or DEFAULT_POOL,
            ordered_group(message) if self.holds_groups else None,
            message.level,
            is_kept or keeps_record(message),
            payload_size(message),
            message.correlation_id,
            item.not_before,
        )

    def insert(self, db: sqlite3.Connection, new: WithBodies, batch: int | None = None) -> None:
        """Add messages, each with its body, whatever else is there."""
        now, unix = self.clock(), self.wall()
        (last_id,) = db.execute(QUERIES["last_id"]).fetchone()
        offset = 0
        for number, (row, body) in enumerate(new, last_id + 1):
            row.id, row.offset, row.size = number, offset, len(body)
            offset += len(body)
            if row.not_before is not None and row.not_before > unix:
                row.wakes_at = row.not_before + now - unix
        rows = [row for row, _ in new]
        ids = to_json([row.id for row in rows])
        asked = {
            "queue": self.queue,
            "rows": to_json(rows),
            "bodies": b"".join([body for _, body in new]),
            "now": now,
            "batch": batch,
            "room": CLAIM_BYTES + len(self.worker_id),
            "ids": ids,
        }
        has_groups = any(row.group_id is not None for row in rows)
        if has_groups:
            db.execute(QUERIES["add_groups"], asked)
        for query in ("publish", "start_progress", "store_bodies"):
            db.execute(QUERIES[query], asked)
        if has_groups:
            self.offer(db, json_value(db, "groups_of", asked))
        self.audit_change(db, ids, "ready")

    def claim(
        self, db: sqlite3.Connection, limit: int, lease: float, pools: PoolFilter | None = None
    ) -> Sequence[FileLease]:
        """Take the next messages (WQ-2), after ending the delays and leases that are due."""
        now = self.clock()
        if self.next_wake(db) <= now:
            due = {"now": now, "at_most": WOKEN_AT_ONCE}
            self.release(db, "to_wake", due, "the lease ended")
        asked: dict[str, object] = {
            "queue": self.queue,
            "worker_id": self.worker_id,
            "limit": limit,
            "now": now,
            "lease": lease,
            "token": secrets.randbits(63),
        }
        if pools is None:
            chosen = _chosen.decode(json_value(db, "choose", asked))
        else:
            asked["pools"], asked["excludes"] = to_json(pools.codes), pools.excludes
            db.execute(QUERIES["adopt"], {**asked, "at_most": ADOPTED_AT_ONCE})
            chosen = _chosen.decode(json_value(db, "choose_of_pools", asked))
        if chosen:
            asked["ids"] = ids = to_json([message.id for message in chosen])
            db.execute(QUERIES["claim"], asked)
            self.audit_change(db, ids, "in-flight")
            # The regular lane of a group whose high lane was taken is for this worker alone now.
            # The other way round nothing is on offer: high priority is taken first.
            high = {message.group for message in chosen if message.is_high}
            self.offer(db, to_json(high - {None}))
        return chosen

    def next_wake(self, db: sqlite3.Connection) -> float:
        """Return when a delay or a lease ends next."""
        (at,) = db.execute(QUERIES["next_wake"]).fetchone()
        return float("inf") if at is None else float(at)

    def end(self, db: sqlite3.Connection, ending: Sequence[tuple[FileLease, Finish]]) -> None:
        """Finish messages that are in flight, and keep how each ended."""
        plain: list[int] = []  # those with nothing to keep
        rows: list[Sequence[object]] = []  # of the others
        held: list[Sequence[object]] = []  # those that stay, in front of their groups
        alike: defaultdict[tuple[str, str], list[int]] = defaultdict(list)  # by state and error
        for lease, item in ending:
            how, tally = item.ending, item.tally
            state, error = _end_of(how)
            if stays_held(lease, item):
                held.append(_ending_row(lease.id, item, state, error))
                continue
            if how is ACCEPTED and (tally is None or tally == _FIRST_TRY):
                plain.append(lease.id)
            else:
                rows.append(_ending_row(lease.id, item, state, error))
            alike[state, error].append(lease.id)
        now = self.clock()
        if plain:
            db.execute(QUERIES["finish"], {"ids": to_json(plain), "now": now})
        if rows:
            for query in ("finish_as", "keep_endings"):
                db.execute(QUERIES[query], {"endings": to_json(rows), "now": now})
            free = [row[0] for row in rows if row[1] != "succeeded"]
            db.execute(QUERIES["free_keys"], {"ids": to_json(free)})
        ended = [lease.id for lease, item in ending if not stays_held(lease, item)]
        db.execute(QUERIES["delete_bodies"], {"ids": to_json(ended)})
        if held:
            self.hold(db, held)
        self.offer(db, to_json({lease.group for lease, _ in ending} - {None}))
        for (state, error), several in alike.items():
            self.audit_change(db, to_json(several), state, error)

    def hold(self, db: sqlite3.Connection, endings: Sequence[Sequence[object]]) -> None:
        """Let messages that were given up hold their groups (ORD-11)."""
        asked = {"endings": to_json(endings), "held_until": HELD_UNTIL}
        for query in ("hold", "keep_held"):
            db.execute(QUERIES[query], asked)
        for message_id, *_, error, _, _ in endings:
            self.audit_change(db, to_json([message_id]), "held", str(error))

    def offer(self, db: sqlite3.Connection, groups: str) -> None:
        """Decide what these groups offer now."""
        if groups != "[]":
            db.execute(QUERIES["offer"], {"queue": self.queue, "groups": groups})

    def release(
        self, db: sqlite3.Connection, query: str, asked: Mapping[str, object], why: str
    ) -> None:
        """Make the messages that the query finds claimable, of whichever queue they are.

        `why`: the reason for those that were in flight.
        """
        for queue, state, ids in db.execute(QUERIES[query], asked).fetchall():
            db.execute(QUERIES["release"], {"ids": ids, "now": self.clock()})
            table = replace(self, queue=queue)
            table.offer(db, json_value(db, "groups_of", {"ids": ids}))
            if state == "in-flight":
                table.audit_change(db, ids, "ready", why)

    def prune(self, db: sqlite3.Connection, after: int = 0) -> tuple[bool, int]:
        """Forget messages that were finished before the dedup window, and old audit rows.

        Look at the next messages after that one. Return whether there was anything to forget, and
        the last of those messages, or 0 at the end of the table.
        """
        changes = db.total_changes
        now = self.clock()
        asked = {
            "after": after,
            "before": now - self.dedup_window,
            "kept_before": now - max(self.dedup_window, self.result_retention),
            "at_most": PRUNED_AT_ONCE,
        }
        ids, last, looked_at = db.execute(QUERIES["to_prune"], asked).fetchone()
        for query in ("drop_groups", "prune", "prune_progress"):
            db.execute(QUERIES[query], {"ids": ids})
        asked["before"] = now - self.audit
        db.execute(QUERIES["prune_audit"], asked)
        asked["before"] = now - BATCH_RETENTION_SECONDS
        db.execute(QUERIES["prune_members"], asked)
        db.execute(QUERIES["prune_batch"], asked)
        return db.total_changes > changes, last if looked_at == PRUNED_AT_ONCE else 0

    def count_ended(self, db: sqlite3.Connection, ids: str) -> None:
        """Count messages that have just ended in their batches (CMD-4)."""
        for (batch,) in db.execute(QUERIES["count_ended"], {"ids": ids}).fetchall():
            self.complete(db, batch)

    def complete(self, db: sqlite3.Connection, batch: int) -> None:
        """Publish the callback of a batch if all of its members have ended, once."""
        asked = {"batch": batch, "now": self.clock()}
        for queue, row, body, counts in db.execute(QUERIES["complete"], asked).fetchall():
            new, payload = msgspec.json.decode(row, type=NewMessage), counts.encode()
            new.payload_size = len(payload)
            replace(self, queue=queue).insert(db, [(new, body + payload + b"}")])

    def audit_change(self, db: sqlite3.Connection, ids: str, state: str, error: str = "") -> None:
        if self.audit:
            asked = {
                "queue": self.queue,
                "now": self.clock(),
                "state": state,
                "worker_id": self.worker_id,
                "error": error,
                "ids": ids,
            }
            db.execute(QUERIES["audit"], asked)


def _end_of(how: Ending) -> tuple[str, str]:
    """Return the state of a message that ended so, and its error."""
    if how.is_cancelled:
        return "cancelled", ""
    if how.failure is None:
        return "succeeded", ""
    return "failed", how.failure.message[:MAX_ERROR_CHARACTERS]


def _tally_row(message_id: int, item: StoredMessage) -> Sequence[object]:
    """Return what the statement `keep_tallies` needs to know."""
    tally, error = item.tally, item.error[:MAX_ERROR_CHARACTERS]
    return (message_id, tally.failures, tally.requests, item.delay, error)


def _letter_row(message_id: int, item: StoredMessage) -> Sequence[object]:
    """Return what the statements `hold` and `keep_held` need to know of what is stored as held."""
    finish = Finish(None, Ending(item.given_up), tally=item.tally)
    return _ending_row(message_id, finish, "failed", item.error[:MAX_ERROR_CHARACTERS])


def _ending_row(message_id: int, item: Finish, state: str, error: str) -> Sequence[object]:
    """Return what the statements `finish_as` and `keep_endings` need to know."""
    how, tally = item.ending, item.tally
    tried = (None, None) if tally is None else (tally.failures, tally.requests)
    failure = how.failure
    if failure is None or how.is_cancelled:  # then the error of an earlier attempt stays
        result = None if how.result is None else how.result.decode()
        return (message_id, state, result, int(how.result_omitted), *tried)
    return (message_id, state, None, 0, *tried, error, failure.code, failure.http_status)


def json_value(db: sqlite3.Connection, query: str, asked: Mapping[str, object]) -> str:
    """Return the JSON that the statement answers."""
    (value,) = db.execute(QUERIES[query], asked).fetchone()
    return str(value)


def to_json(values: object) -> str:
    return msgspec.json.encode(values).decode()
