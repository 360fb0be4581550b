"""The connection by which this process writes to a database file: for one thread at a time."""

import os
import sqlite3
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from router.brokers.machine import THIS_MACHINE, Machine
from router.brokers.queue_clock import Anchor, anchor
from router.brokers.queue_schema import prepare, transaction
from router.brokers.stored_table import Work

BUSY_TIMEOUT: Final = 5.0  # seconds that another process may hold the write lock

_PRAGMAS: Final = (
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = NORMAL",  # no end of a process undoes a commit; a power cut may
    "PRAGMA wal_autocheckpoint = 0",  # commits do not wait for the disk: see write_back
    "PRAGMA secure_delete = FAST",  # bodies hold tokens: wiped where that writes no further page
    "PRAGMA cache_size = -16000",  # KiB: the hot ends of the indexes of a long queue
    "PRAGMA journal_size_limit = 67108864",
    "PRAGMA temp_store = MEMORY",
)


class Ended(NamedTuple):
    """How a piece of work ended: with an error, or with a value."""

    error: Exception | None
    value: object


class SqliteConnection:
    """Opened when it is first needed, and anew after any error."""

    def __init__(self, path: Path, machine: Machine = THIS_MACHINE) -> None:
        self._path = path
        self._machine = machine
        self._anchor = Anchor("", "", 0.0)  # of the file, once it was open
        self._db: sqlite3.Connection | None = None
        self._version: int | None = None  # of the file when last looked at
        self._distrusts_log = False  # the disk could not keep it
        self._written_back = -1  # so many changes: what comes next begins a new log

    @property
    def incarnation(self) -> str:
        return self._anchor.incarnation

    def now(self) -> float:
        """Tell the time by the clock of the file."""
        return self._machine.uptime() + self._anchor.offset

    @property
    def is_ready(self) -> bool:
        """Whether it can be used without waiting for the disk first."""
        if self._db is None or self._distrusts_log:
            return False
        return self._db.total_changes != self._written_back

    def run(self, works: Sequence[Work[Any]]) -> list[Ended]:
        """All or nothing, in one transaction. It fails if it would have to wait for anything."""
        return _in_one_transaction(self._open(), works)

    def run_patiently(self, works: Sequence[Work[Any]]) -> list[Ended]:
        """Together if all goes well. A work's fault is its own; trouble with the file is all's."""
        try:
            db = self._open()
            with _patience(db):
                self._renew_log(db)
                return _in_one_transaction(db, works)
        except Exception as error:  # noqa: BLE001 the bulkhead: whoever asked is told
            self.close()
            if len(works) == 1 or isinstance(error, sqlite3.OperationalError | OSError):
                return [Ended(error, None) for _ in works]
            return [ended for work in works for ended in self.run_patiently([work])]

    def has_changed_elsewhere(self) -> bool:
        """Whether another process has committed since the last look; also if we cannot tell."""
        if self._db is None:
            return True  # the next claim will say what is wrong
        before = self._version
        try:
            (self._version,) = self._db.execute("PRAGMA data_version").fetchone()
        except sqlite3.Error:
            return True
        return before != self._version

    def write_back(self) -> None:
        """Take what is in the log into the file itself. If that fails, it is done later."""
        if self._db is not None:
            with suppress(sqlite3.Error):
                self._db.execute("PRAGMA wal_checkpoint(PASSIVE)")
            self._written_back = self._db.total_changes

    def close(self) -> None:
        db, self._db, self._version = self._db, None, None
        if db is not None:
            with suppress(sqlite3.Error):  # what was committed is in the log
                db.close()

    def keep_log(self) -> None:
        """Wait until the disk has all that was committed. For any thread, at any time."""
        try:
            _write_through(Path(f"{self._path}-wal"))
        except FileNotFoundError:
            if self._db is not None:
                raise
            # The file is closed: what was in its log is in the database, which SQLite waits for.
        except OSError:
            self._distrusts_log = True
            raise

    def _open(self) -> sqlite3.Connection:
        if self._db is None:
            _create(self._path)
            self._db = sqlite3.connect(
                self._path, timeout=BUSY_TIMEOUT, isolation_level=None, check_same_thread=False
            )
            for pragma in _PRAGMAS:
                self._db.execute(pragma)
            prepare(self._db, self._machine.new_id)
            self._anchor = anchor(self._db, self._machine)
            _write_through(self._path.parent)  # its name, and that of its log
        return self._db

    def _renew_log(self, db: sqlite3.Connection) -> None:
        """After a failed sync: what it did not keep may be a hole in the middle of the log."""
        if self._distrusts_log:
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            self._distrusts_log = False


def _in_one_transaction(db: sqlite3.Connection, works: Sequence[Work[Any]]) -> list[Ended]:
    with transaction(db):
        return [Ended(None, work(db)) for work in works]


@contextmanager
def _patience(db: sqlite3.Connection) -> Iterator[None]:
    """Within, it waits for the locks of others."""
    db.execute(f"PRAGMA busy_timeout = {round(BUSY_TIMEOUT * 1000)}")
    yield
    db.execute("PRAGMA busy_timeout = 0")  # not after an error: then it is closed


def _create(path: Path) -> None:
    """By us, not by SQLite, for its mode: bodies hold tokens. Its companions take it over.

    One that is there is not opened: closing it would end all locks that SQLite has on it here.
    """
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


# Without the times of the file, where the system can tell them from its content.
_flush: Final = os.fsync if sys.platform == "darwin" else os.fdatasync


def _write_through(path: Path) -> None:
    """Have the disk keep what was written to it, by whomever.

    SQLite would, too (synchronous = FULL), but nobody could use the connection meanwhile.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _flush(file)
    finally:
        os.close(file)
