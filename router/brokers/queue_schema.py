"""The file of a work queue: made, recognised, and brought up to date."""

import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from router.brokers.machine import THIS_MACHINE
from router.brokers.queries import read_queries, read_sql, read_statements
from router.core.identity import dedup_key_of
from router.ports import QueueRefused

APPLICATION_ID: Final = 1297239633
SCHEMA_VERSION: Final = 4

QUERIES: Final = read_statements("sqlite_queue.sql")
_SCHEMA: Final = read_sql("sqlite_schema.sql")
_FROM_1: Final = read_sql("sqlite_from_1.sql")
_FROM_2: Final = read_queries("sqlite_from_2.sql")
_FROM_3: Final = read_queries("sqlite_from_3.sql")


def prepare(
    db: sqlite3.Connection, new_incarnation: Callable[[], str] = THIS_MACHINE.new_id
) -> None:
    """Create the tables in an empty database, bring an old one up to date, refuse others."""
    if _version(db) == SCHEMA_VERSION:
        return
    with transaction(db):
        version = _version(db)  # another process may have been faster
        if version not in _STEPS:
            raise QueueRefused(
                f"the file is of version {version}; this router knows {SCHEMA_VERSION}"
            )
        _STEPS[version](db)
        db.execute("INSERT INTO queue_file VALUES (?, '', 0)", (new_incarnation(),))


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


def _version(db: sqlite3.Connection) -> int:
    """0: an empty file."""
    (application,) = db.execute("PRAGMA application_id").fetchone()
    (version,) = db.execute("PRAGMA user_version").fetchone()
    (tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if application != APPLICATION_ID and (application or version or tables):
        raise QueueRefused("the file is a database of something else")
    return int(version)


def _create(db: sqlite3.Connection) -> None:
    _run(db, _SCHEMA)


def _upgrade_from_1(db: sqlite3.Connection) -> None:
    _run(db, _FROM_1)
    _upgrade_from_2(db)


def _upgrade_from_2(db: sqlite3.Connection) -> None:
    _run(db, _FROM_2["before"])
    _run(db, _SCHEMA)
    _run(db, _FROM_2["after"])
    (lanes,) = db.execute("SELECT json_group_array(id) FROM queue_lanes").fetchone()
    for query in ("reoffer", "offer"):
        QUERIES[query].run(db, {"lanes": lanes})
    _rekey(db)


def _upgrade_from_3(db: sqlite3.Connection) -> None:
    _run(db, _FROM_3["tables"])
    _rekey(db)


def _rekey(db: sqlite3.Connection) -> None:
    db.create_function("dedup_key_of", 3, dedup_key_of, deterministic=True)
    db.execute(_FROM_3["rekey"])


def _run(db: sqlite3.Connection, script: str) -> None:
    """`executescript` would end the transaction."""
    for statement in script.split(";\n"):
        db.execute(statement)


_STEPS: Final[Mapping[int, Callable[[sqlite3.Connection], None]]] = {
    0: _create,
    1: _upgrade_from_1,
    2: _upgrade_from_2,
    3: _upgrade_from_3,
}
