"""The clock of a queue file: every process that shares the file goes by it (WQ-11).

It is the machine's uptime plus an offset that is kept in the file: within one boot nobody can set
it. The first process of each boot takes a new offset from the wall clock. If that is or was wrong,
delays and leases in the file may seem to end in a far future. They are cut to what can be true.
"""

import sqlite3
from typing import Final

from msgspec import Struct

from router.brokers.machine import Machine
from router.brokers.queries import read_statements
from router.brokers.queue_schema import transaction

LONGEST_DELAY: Final = 43_200.0  # seconds

_QUERIES: Final = read_statements("sqlite_clock.sql")


class Anchor(Struct, frozen=True):
    incarnation: str  # of the file
    boot_id: str
    offset: float  # what the file's clock is ahead of the machine's uptime


def anchor(db: sqlite3.Connection, machine: Machine) -> Anchor:
    """Return what this boot's processes have agreed on; the first one decides."""
    known = _read(db)
    if _is_of_this_boot(known, machine):
        return known
    with transaction(db):
        known = _read(db)
        if _is_of_this_boot(known, machine):  # another process was faster
            return known
        return _begin(db, machine)


def _is_of_this_boot(known: Anchor, machine: Machine) -> bool:
    return bool(machine.boot_id) and known.boot_id == machine.boot_id


def _begin(db: sqlite3.Connection, machine: Machine) -> Anchor:
    now = machine.wall()
    (last,) = _QUERIES["last_change"].run(db, {}).fetchone()
    asked = {
        "now": now,
        "ahead": max(0.0, (last or now) - now),  # the clock before was at least so far ahead
        "longest_delay": LONGEST_DELAY,
        "boot_id": machine.boot_id,
        "offset": now - machine.uptime(),
    }
    for query in ("cut_progress", "cut_changes", "anchor"):
        _QUERIES[query].run(db, asked)
    return _read(db)


def _read(db: sqlite3.Connection) -> Anchor:
    return Anchor(*_QUERIES["file"].run(db, {}).fetchone())
