"""What happened to the messages of a file, and how long it is remembered (WQ-1, WQ-8).

All that happened at once, to any number of messages, is one row. Two kinds of them lead to more:
a claim, whose leases may end, and a finish, whose messages are pruned after the dedup window.
"""

import sqlite3
from typing import Final

import msgspec
from msgspec import Struct

from router.brokers.queue_schema import QUERIES

PRUNED_AT_ONCE: Final = 16  # rows about finished messages: many, so that whole pages become free
FORGOTTEN_AT_ONCE: Final = 8 * PRUNED_AT_ONCE  # more than get written meanwhile


class Change(Struct, frozen=True, kw_only=True):
    queue: str
    at: float
    state: str  # that they came to
    worker_id: str
    ids: str  # JSON
    error: str = ""
    look_at: float | None = None  # of a claim: when its leases end
    prune_from: float | None = None  # of a finish: when it was

    @property
    def leads_to_more(self) -> bool:
        return self.look_at is not None or self.prune_from is not None


class Memory(Struct, frozen=True):
    """How long things are remembered, in seconds."""

    dedup_window: float  # finished messages, so that they do not come again
    audit: float  # what happened; 0: only what leads to more is written at all


def write(db: sqlite3.Connection, change: Change, memory: Memory) -> int:
    """Answers its number, which was never used before."""
    if not memory.audit and not change.leads_to_more:
        return 0
    return db.execute(QUERIES["write"], msgspec.structs.asdict(change)).lastrowid or 0


def forget(db: sqlite3.Connection, memory: Memory, now: float, *, at_least: int) -> None:
    """Delete messages finished before the dedup window, if enough were, and what is too old."""
    asked = {"before": now - memory.dedup_window, "at_least": at_least, "now": now}
    if db.execute(QUERIES["is_time_to_prune"], asked).fetchone() is None:
        return
    asked["at_most"] = PRUNED_AT_ONCE
    asked["changes"], messages = db.execute(QUERIES["to_prune"], asked).fetchone()
    pruned = db.execute(QUERIES["prune"], asked).rowcount
    db.execute(QUERIES["pruned"], asked)
    if pruned < messages:
        db.execute(QUERIES["prune_again"], asked)
    old = {"before": now - memory.audit, "at_most": FORGOTTEN_AT_ONCE}
    db.execute(QUERIES["forget_changes"], old)
