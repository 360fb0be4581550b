"""The connection by which a process writes to a queue file: the schema, the clock, transactions."""

import logging
import os
import sqlite3
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, TypeVar

from router.brokers.kit import statements
from router.brokers.workers import Machine
from router.core.message import MAX_MESSAGE_BYTES
from router.core.returning import MAX_DELAY_SECONDS
from router.ports import QueueRefused

log = logging.getLogger(__name__)

BUSY_TIMEOUT_SECONDS: Final = 5.0  # that another process may hold the write lock
ROOM_BYTES: Final = 2 * MAX_MESSAGE_BYTES  # free again on a disk that was full
APPLICATION_ID: Final = 1297239633  # "MRQQ": marks the file as a work queue
SCHEMA_VERSION: Final = 14
OLDEST_VERSION: Final = 10  # that can be upgraded

_REFUSALS: Final = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY})

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]

_FILES: Final = files("router.brokers.sqlite")
QUERIES: Final = statements(_FILES.joinpath("queries.sql").read_text())
_PRAGMAS: Final = (
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = NORMAL",  # no end of a process undoes a commit; a power cut may
    "PRAGMA wal_autocheckpoint = 0",  # commits do not wait for the disk: see `checkpoint`
    "PRAGMA secure_delete = FAST",  # bodies hold tokens: wiped where that writes no further page
    "PRAGMA cache_size = -16000",  # KiB: the hot ends of the indexes of a long queue
    "PRAGMA journal_size_limit = 67108864",
    "PRAGMA temp_store = MEMORY",
)
# Without the times of the file, where the system can sync the content alone.
_flush: Final = os.fsync if sys.platform == "darwin" else os.fdatasync


class FileConnection:
    """For one thread at a time. Opened when it is first needed, and again after any error."""

    def __init__(self, path: Path, machine: Machine, refusal: str | None = None) -> None:
        self._path = path
        self._machine = machine
        self._db: sqlite3.Connection | None = None
        self._clock_offset = 0.0  # known once the file was open
        self._data_version: int | None = None  # when last looked at
        self._distrusts_log = False  # the disk could not keep it
        self.refusal = refusal  # why writes are refused; None: they are not, as far as we know
        self._changes_at_checkpoint = -1
        self.incarnation = ""  # known once the file was open

    def now(self) -> float:
        """Return the time by the clock of the file."""
        return self._machine.uptime() + self._clock_offset

    @property
    def is_ready(self) -> bool:
        """Whether a transaction need not wait for the disk.

        After a checkpoint, the first one begins a new log, which does.
        """
        if self._db is None or self._distrusts_log or self.refusal is not None:
            return False
        return self._db.total_changes != self._changes_at_checkpoint

    def run(self, works: Sequence[Work[Any]]) -> list[Any]:
        """Do all or nothing, in one transaction. Raise if that would have to wait for anything."""
        db = self._db or self._open()
        with transaction(db):
            if self.refusal is not None:  # not every work writes
                db.execute(QUERIES["trial"])
            results = [work(db) for work in works]
        if self.refusal is not None and _has_room(self._path):
            self.refusal = None
        return results

    def run_patiently(self, works: Sequence[Work[Any]]) -> list[Any]:
        """Do them in one transaction, or each in its own if one of them fails.

        Return the error in the place of the result. Trouble with the file is an error of all.
        """
        try:
            db = self._db or self._open()
            db.execute(f"PRAGMA busy_timeout = {round(BUSY_TIMEOUT_SECONDS * 1000)}")
            if self._distrusts_log:
                # What a failed sync did not keep may be a hole in the middle of the log.
                db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                self._distrusts_log = False
            results = self.run(works)
            db.execute("PRAGMA busy_timeout = 0")
        except Exception as error:  # noqa: BLE001 the bulkhead: the caller gets it
            self.close()
            if _is_refusal(error):
                self.refusal = str(error)
            if len(works) == 1 or isinstance(error, sqlite3.OperationalError | OSError):
                return [error] * len(works)
            return [result for work in works for result in self.run_patiently([work])]
        return results

    def has_changed_elsewhere(self) -> bool:
        """Whether another process has committed since the last look; also if it is not known."""
        if self._db is None:
            return True  # the next claim will say what is wrong
        before = self._data_version
        try:
            (self._data_version,) = self._db.execute("PRAGMA data_version").fetchone()
        except sqlite3.Error:
            return True
        return before != self._data_version

    def checkpoint(self) -> None:
        """Take what is in the log into the file itself. If that fails, it is done later."""
        if self._db is not None:
            with suppress(sqlite3.Error):
                self._db.execute("PRAGMA wal_checkpoint(PASSIVE)")
            self._changes_at_checkpoint = self._db.total_changes

    def sync_log(self) -> None:
        """Wait until the disk has all that was committed. For any thread, at any time."""
        try:
            _sync(Path(f"{self._path}-wal"))
        except FileNotFoundError:
            if self._db is not None:
                raise
            # The file is closed: SQLite has synced the log into the database.
        except OSError as error:
            self._distrusts_log = True
            self.refusal = error.strerror
            raise

    def close(self) -> None:
        db, self._db, self._data_version = self._db, None, None
        if db is not None:
            with suppress(sqlite3.Error):  # what was committed is in the log
                db.close()

    def _open(self) -> sqlite3.Connection:
        # Created by us, not by SQLite, for its mode: bodies hold tokens. A file that exists is
        # not opened: closing it would end all locks that SQLite has on it in this process.
        with suppress(FileExistsError):
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            os.close(os.open(self._path, flags, 0o600))
        self._db = sqlite3.connect(
            self._path,
            timeout=BUSY_TIMEOUT_SECONDS,
            isolation_level=None,
            check_same_thread=False,
        )
        with reading(self._db):
            check_owner(self._db)
        make_private(self._path)
        for pragma in _PRAGMAS:
            self._db.execute(pragma)
        with transaction(self._db):
            is_upgraded = prepare_schema(self._db, self._machine)
            self.incarnation, self._clock_offset = set_clock(self._db, self._machine)
        if is_upgraded:
            upgrade = {"file": self._path.name, "version": SCHEMA_VERSION}
            log.info("queue file upgraded", extra=upgrade)
        _sync(self._path.parent)  # the file's name, and that of its log
        return self._db


def _is_refusal(error: Exception) -> bool:
    """Return whether the file system does not take what is written: it is full, or defective."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _REFUSALS  # the primary code


def _has_room(path: Path) -> bool:
    """Return whether any message would fit. A few pages are often free on a disk that is full."""
    disk = os.statvfs(path.parent)
    return disk.f_bavail * disk.f_frsize >= ROOM_BYTES


def check_owner(db: sqlite3.Connection) -> int | None:
    """Return the schema version, or None for an empty database. Refuse what cannot be used."""
    (application,) = db.execute("PRAGMA application_id").fetchone()
    (version,) = db.execute("PRAGMA user_version").fetchone()
    (tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if not (application or version or tables):
        return None
    if application != APPLICATION_ID:
        raise QueueRefused("the file is a database of something else")
    if version > SCHEMA_VERSION:
        raise QueueRefused(
            f"a newer router wrote the file: it has schema version {version}, this router knows"
            f" version {SCHEMA_VERSION}. Use the newer router, or name another file"
        )
    if version < OLDEST_VERSION:
        raise QueueRefused(
            f"the file has schema version {version}, this router needs version {SCHEMA_VERSION} and"
            f" can upgrade version {OLDEST_VERSION}: empty the queue with the router that wrote it,"
            " then remove the file"
        )
    return int(version)


def make_private(path: Path) -> None:
    """Take a file from everybody but its owner. One that is shared with a group stays so."""
    for each in (path, Path(f"{path}-wal"), Path(f"{path}-shm")):
        with suppress(OSError):  # it is another user's, or it is not there
            if each.stat().st_mode & stat.S_IRWXO:
                each.chmod(0o600)


def prepare_schema(db: sqlite3.Connection, machine: Machine) -> bool:
    """Create the tables in an empty database, or upgrade those of an older version.

    All in the caller's transaction: a process that dies meanwhile leaves the file as it was. Return
    whether it was upgraded.
    """
    version = check_owner(db)
    if version is None:
        _run_file(db, "schema.sql")
        db.execute("INSERT INTO queue_file VALUES (?, '', 0)", (machine.new_id(),))
        return False
    for older in range(version, SCHEMA_VERSION):
        _run_file(db, f"upgrade_{older}.sql")
    return version < SCHEMA_VERSION


def _run_file(db: sqlite3.Connection, name: str) -> None:
    for statement in _FILES.joinpath(name).read_text().split(";\n"):
        db.execute(statement)  # `executescript` would end the transaction


def set_clock(db: sqlite3.Connection, machine: Machine) -> tuple[str, float]:
    """Return the file's incarnation and what its clock is ahead of the machine's uptime (WQ-11).

    The uptime cannot be set, so within a boot all processes agree on the time. The first process
    of each boot takes the offset from the wall clock. If that is or was wrong, delays and leases
    seem to end in a far future: they are cut to their length.
    """
    incarnation, boot_id, offset = db.execute(QUERIES["file"]).fetchone()
    if not machine.boot_id or boot_id != machine.boot_id:
        now = machine.wall()
        offset = now - machine.uptime()
        new = {
            "now": now,
            "boot_id": machine.boot_id,
            "offset": offset,
            "longest_delay": MAX_DELAY_SECONDS,
        }
        for query in ("set_clock", "cut_waits", "cut_audit", "cut_batches"):
            db.execute(QUERIES[query], new)
    return incarnation, offset


@contextmanager
def reading(db: sqlite3.Connection) -> Iterator[None]:
    """See one state of the file, though another process may be creating its tables."""
    db.execute("BEGIN")
    try:
        yield
    finally:
        db.rollback()


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Run all or nothing, with the write lock: no other process changes what we have read."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    finally:
        if db.in_transaction:
            db.execute("ROLLBACK")


def _sync(path: Path) -> None:
    """Sync what was written to the file, by any process.

    SQLite would, too (synchronous = FULL), but the connection would be blocked meanwhile.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _flush(file)
    finally:
        os.close(file)
