"""The work queue as a table of SQLite (SPEC §12): every rule about who may claim what is here.

Synchronous on purpose: one call is the work of one transaction, which the caller begins and ends.
"""

import secrets
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from hashlib import blake2b
from itertools import accumulate
from typing import Final

import msgspec
from msgspec import Struct

from router.brokers.queries import read_queries, read_sql
from router.brokers.work_queue import MAX_ERROR, Claim, Claimed, Lease
from router.core.message import DEFAULT_POOL, UNTRIED, Mode, Tally
from router.ports import Depth, Publication, QueueRefused

APPLICATION_ID: Final = 1297239633
SCHEMA_VERSION: Final = 1
MAX_WOKEN: Final = 1000  # delays and leases ended by one claim
PRUNED_PER_CLAIMED: Final = 2  # so that pruning keeps up with what gets finished

_SCHEMA: Final = read_sql("sqlite_schema.sql")
_QUERIES: Final = read_queries("sqlite_queue.sql")


class NewRow(Struct, frozen=True, array_like=True, gc=False):
    """What the statement `publish` takes."""

    message_id: str
    dedup_key: str
    pool: str
    group_id: str | None
    group_key: int | None
    high_priority: bool
    offset: int  # of its body in all bodies
    size: int


class Row(Struct, frozen=True, array_like=True, gc=False):
    """What the statement `claimed` tells of a message."""

    id: int
    grouped: int
    high_priority: int
    deliveries: int
    attempts: int
    posts: int
    size: int


_rows: Final = msgspec.json.Decoder(list[Row])
_ids: Final = msgspec.json.Decoder(list[int])
_keys: Final = msgspec.json.Decoder(set[str])


def prepare(db: sqlite3.Connection) -> None:
    """Create the table in an empty database; refuse one that is not ours."""
    (application,) = db.execute("PRAGMA application_id").fetchone()
    (version,) = db.execute("PRAGMA user_version").fetchone()
    (tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if (application, version) == (APPLICATION_ID, SCHEMA_VERSION):
        return
    if application == APPLICATION_ID:
        raise QueueRefused(f"the file is of version {version}; this router knows {SCHEMA_VERSION}")
    if application or version or tables:
        raise QueueRefused("the file is a database of something else")
    db.executescript(_SCHEMA)


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """All or nothing. Takes the write lock first: no other process changes what we have read."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    finally:
        if db.in_transaction:
            db.execute("ROLLBACK")


class QueueTable(Struct, frozen=True):
    """One queue of a database, as one worker sees it."""

    name: str
    worker_id: str
    dedup_window: float
    clock: Callable[[], float]
    holds_groups: bool = True

    def publish(self, db: sqlite3.Connection, items: Sequence[Publication]) -> Sequence[bool]:
        """Put them in; False for one that is in already, or was within the dedup window."""
        now = self.clock()
        known = self._known(db, items, now)
        fresh: dict[str, Publication] = {}
        added = []
        for item in items:
            added.append(item.dedup_key not in known and item.dedup_key not in fresh)
            fresh.setdefault(item.dedup_key, item)
        self._insert(db, [item for item in fresh.values() if item.dedup_key not in known], now)
        return added

    def claim(self, db: sqlite3.Connection, limit: int, lease: float) -> Claim:
        """Take the next messages (WQ-2), after ending what is due to end."""
        now = self.clock()
        self._wake(db, now)
        self._prune(db, now, PRUNED_PER_CLAIMED * limit)
        messages = self._take(db, limit, now, now + lease)
        return Claim(messages, wait=0.0 if messages else self._time_to_change(db, now))

    def finish(self, db: sqlite3.Connection, leases: Sequence[Lease], error: str) -> Sequence[int]:
        """Remove them; answer the positions of those that are not ours to remove."""
        asked = {"leases": _as_json(leases), "error": error[:MAX_ERROR], "now": self.clock()}
        finished = db.execute(_QUERIES["finish"], asked).rowcount
        _reoffer(db, [lease.id for lease in leases if lease.grouped])
        return () if finished == len(leases) else _list(db, "not_finished", asked)

    def give_back(
        self, db: sqlite3.Connection, lease: Lease, delay: float, tally: Tally, error: str
    ) -> bool:
        """Make it claimable again after `delay`; False: it is not ours any more."""
        asked = {
            "id": lease.id,
            "token": lease.token,
            "run_after": self.clock() + delay if delay > 0 else None,
            "attempts": tally.attempts,
            "posts": tally.posts,
            "error": error[:MAX_ERROR],
        }
        changed = db.execute(_QUERIES["give_back"], asked).rowcount
        _reoffer(db, [lease.id] if lease.grouped else ())
        return changed == 1

    def extend(
        self, db: sqlite3.Connection, leases: Sequence[Lease], seconds: float
    ) -> Sequence[int]:
        """Keep them for longer; answer the positions of those that are lost."""
        now = self.clock()
        asked = {"leases": _as_json(leases), "lease_until": now + seconds, "now": now}
        extended = db.execute(_QUERIES["extend"], asked).rowcount
        return () if extended == len(leases) else _list(db, "not_held", asked)

    def let_go(self, db: sqlite3.Connection) -> None:
        """Give back all that this worker holds, as it was before the claim."""
        held = _list(db, "held", {"queue": self.name, "worker_id": self.worker_id})
        db.execute(_QUERIES["let_go"], {"ids": _as_json(held)})
        _reoffer(db, held)

    def depth(self, db: sqlite3.Connection) -> Depth:
        asked = {"queue": self.name, "worker_id": self.worker_id, "now": self.clock()}
        everything, finished, in_flight, due = db.execute(_QUERIES["depth"], asked).fetchone()
        return Depth(waiting=everything - finished - in_flight, in_flight=in_flight, due=due)

    def _known(
        self, db: sqlite3.Connection, items: Sequence[Publication], now: float
    ) -> AbstractSet[str]:
        asked = {
            "queue": self.name,
            "keys": _as_json([item.dedup_key for item in items]),
            "before": now - self.dedup_window,
        }
        db.execute(_QUERIES["forget"], asked)
        (known,) = db.execute(_QUERIES["known"], asked).fetchone()
        return _keys.decode(known)

    def _insert(self, db: sqlite3.Connection, items: Sequence[Publication], now: float) -> None:
        rows = self._rows_of(items)
        added = db.execute(
            _QUERIES["publish"],
            {
                "queue": self.name,
                "rows": _as_json(rows),
                "bodies": b"".join(item.body for item in items),
                "now": now,
            },
        )
        first_id = (added.lastrowid or 0) - len(rows) + 1
        _reoffer(db, [first_id + at for at, row in enumerate(rows) if row.group_key is not None])

    def _rows_of(self, items: Sequence[Publication]) -> Sequence[NewRow]:
        offsets = accumulate((len(item.body) for item in items), initial=0)
        return [self._row_of(item, offset) for item, offset in zip(items, offsets, strict=False)]

    def _row_of(self, item: Publication, offset: int) -> NewRow:
        message = item.message
        pool = message.pool or DEFAULT_POOL
        ordered = self.holds_groups and message.mode is not Mode.IMMEDIATE
        group = message.group if ordered else None
        return NewRow(
            message_id=message.id,
            dedup_key=item.dedup_key,
            pool=pool,
            group_id=group,
            group_key=None if group is None else _group_key(pool, group),
            high_priority=bool(message.high_priority),
            offset=offset,
            size=len(item.body),
        )

    def _wake(self, db: sqlite3.Connection, now: float) -> None:
        """Make claimable what has waited, or been held, for long enough."""
        due = _list(db, "due", {"queue": self.name, "now": now, "at_most": MAX_WOKEN})
        if due:
            db.execute(_QUERIES["wake"], {"ids": _as_json(due)})
            _reoffer(db, due)

    def _prune(self, db: sqlite3.Connection, now: float, at_most: int) -> None:
        before = now - self.dedup_window
        db.execute(_QUERIES["prune"], {"queue": self.name, "before": before, "at_most": at_most})

    def _take(
        self, db: sqlite3.Connection, limit: int, now: float, lease_until: float
    ) -> Sequence[Claimed]:
        token = secrets.randbits(63)
        asked = {
            "queue": self.name,
            "worker_id": self.worker_id,
            "limit": limit,
            "token": token,
            "now": now,
            "lease_until": lease_until,
        }
        if not db.execute(_QUERIES["claim"], asked).rowcount:
            return ()
        rows, bodies = db.execute(_QUERIES["claimed"], asked).fetchone()
        taken = _read_claimed(rows, bodies, token)
        # A group's other lane is for this worker alone now. Only the regular lane of a high one can
        # still be on offer: before a regular one is taken, all high ones are.
        _reoffer(db, [one.lease.id for one in taken if one.lease.grouped and one.high_priority])
        return taken

    def _time_to_change(self, db: sqlite3.Connection, now: float) -> float:
        (at,) = db.execute(_QUERIES["next_change"], {"queue": self.name}).fetchone()
        return float("inf") if at is None else max(at - now, 0.0)


def _read_claimed(rows: str, bodies: bytes, token: int) -> list[Claimed]:
    taken = []
    start = 0
    for row in _rows.decode(rows):
        end = start + row.size
        taken.append(
            Claimed(
                Lease(row.id, token, bool(row.grouped)),
                bool(row.high_priority),
                row.deliveries,
                Tally(row.attempts, row.posts) if row.posts or row.attempts else UNTRIED,
                bodies[start:end],
            )
        )
        start = end
    taken.sort(key=_claim_order)
    return taken


def _group_key(pool: str, group: str) -> int:
    """A number for a group (P3: pool and group id). If two ever share one, they share a line."""
    name = f"{len(pool)} {pool} {group}".encode()
    return int.from_bytes(blake2b(name, digest_size=8).digest(), signed=True)


def _claim_order(claimed: Claimed) -> tuple[bool, int]:
    """High priority first, then by id."""
    return not claimed.high_priority, claimed.lease.id


def _reoffer(db: sqlite3.Connection, changed: Sequence[int]) -> None:
    if changed:
        db.execute(_QUERIES["reoffer"], {"ids": _as_json(changed)})


def _list(db: sqlite3.Connection, query: str, asked: Mapping[str, object]) -> Sequence[int]:
    (numbers,) = db.execute(_QUERIES[query], asked).fetchone()
    return _ids.decode(numbers)


def _as_json(rows: Sequence[object]) -> str:
    return msgspec.json.encode(rows).decode()
