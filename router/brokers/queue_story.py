"""What happened to the messages of a file, and how long it is remembered (WQ-1, WQ-8).

All that happened at once, to any number of messages, is one row. Two kinds of them lead to more:
a claim, whose leases may end, and a finish, whose messages lose their bodies soon, and are pruned
after the dedup window.
"""

import sqlite3
from typing import Final

import msgspec
from msgspec import Struct

from router.brokers.queue_schema import QUERIES

TIDIED_AT_ONCE: Final = 16  # rows about finished messages
FORGOTTEN_AT_ONCE: Final = 8 * TIDIED_AT_ONCE  # more than get written meanwhile


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
    return QUERIES["write"].run(db, msgspec.structs.asdict(change)).lastrowid or 0


def tidy(db: sqlite3.Connection, memory: Memory, now: float, *, at_least: int) -> None:
    """Empty the bodies of finished messages, and forget what is too old: if there is enough of it.

    Many at once, as they share their pages; and whole pages become free.
    """
    asked = {"before": now - memory.dedup_window, "at_least": at_least}
    if QUERIES["is_time_to_tidy"].run(db, asked).fetchone() is not None:
        _empty(db, memory, now)
        _prune(db, memory, now)


def _empty(db: sqlite3.Connection, memory: Memory, now: float) -> None:
    asked = {"before": now - memory.dedup_window, "at_most": TIDIED_AT_ONCE}
    changes, ids = QUERIES["to_empty"].run(db, asked).fetchone()
    QUERIES["empty"].run(db, {"ids": ids})
    QUERIES["emptied"].run(db, {"changes": changes})


def _prune(db: sqlite3.Connection, memory: Memory, now: float) -> None:
    asked: dict[str, object] = {
        "before": now - memory.dedup_window,
        "at_most": TIDIED_AT_ONCE,
        "now": now,
    }
    asked["changes"], messages, asked["ids"] = QUERIES["to_prune"].run(db, asked).fetchone()
    if not messages:
        return
    pruned = QUERIES["prune"].run(db, asked).rowcount
    QUERIES["prune_progress"].run(db, asked)
    QUERIES["pruned"].run(db, asked)
    if pruned < messages:
        QUERIES["prune_again"].run(db, asked)
    old = {"before": now - memory.audit, "at_most": FORGOTTEN_AT_ONCE}
    QUERIES["forget_changes"].run(db, old)
