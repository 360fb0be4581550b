"""One database file, and the one thread of this process that writes to it."""

import asyncio
import os
import sqlite3
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final, NamedTuple, TypeVar

from router.brokers.bell import Bell, wait_for_ring
from router.brokers.queue_schema import prepare, transaction
from router.brokers.stored_table import Work
from router.ports import Disconnected, QueueRefused

T = TypeVar("T")

BUSY_TIMEOUT: Final = 5.0  # how long another process may hold the write lock
MAX_JOBS: Final = 64  # in one transaction
FIRST_POLL: Final = 0.02  # for other processes' changes, while anyone waits …
LAST_POLL: Final = 0.08  # … and when nothing has happened for a while

_PRAGMAS: Final = (
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = NORMAL",  # no end of a process undoes a commit; a power cut may
    "PRAGMA secure_delete = FAST",  # bodies hold tokens: wiped where that writes no further page
    "PRAGMA wal_autocheckpoint = 4000",
    "PRAGMA cache_size = -16000",  # KiB: the hot ends of the indexes of a long queue
    "PRAGMA journal_size_limit = 67108864",
    "PRAGMA temp_store = MEMORY",
)
_REFUSED: Final = frozenset({sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT})


class _Job(NamedTuple):
    work: Work[Any]
    answer: asyncio.Future[Any]


class _Ended(NamedTuple):
    """How a job ended: with an error, or with a value."""

    job: _Job
    error: Exception | None
    value: object


class SqliteFile:
    """Jobs go in from the event loop; what piles up meanwhile shares one transaction.

    The thread opens the file when it is first needed, and anew after any error. While receivers
    wait, it looks for the commits of other processes: seldom enough to cost nothing. It never
    waits for the disk on behalf of a publisher: others do, so that messages flow meanwhile.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._loop = asyncio.get_running_loop()
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()  # None: look up, something changed
        self._bells: defaultdict[str, Bell] = defaultdict(Bell)
        self._waiting = 0  # receivers with nothing to do
        self._disk = ThreadPoolExecutor(1, f"disk {path.name}")  # waits for it, nothing else
        self._syncing = asyncio.Lock()
        self._asked = self._synced = 0  # syncs
        self._distrusts_log = False  # the disk could not keep it
        self._closing = False
        self._closed = self._loop.create_future()
        self._db: sqlite3.Connection | None = None  # the thread's own
        self._version: int | None = None  # of the file when last polled; the thread's own
        self._thread = threading.Thread(target=self._serve, name=f"sqlite {path.name}", daemon=True)
        self._thread.start()

    async def prepare(self) -> None:
        await self.run(_nothing)

    async def run(self, work: Work[T]) -> T:
        if self._closing:
            raise Disconnected(f"{self._path.name} is closed")
        answer: asyncio.Future[T] = self._loop.create_future()
        self._jobs.put(_Job(work, answer))
        with _our_errors(self._path):
            return await answer

    async def sync(self) -> None:
        """One at a time; it is good for all who came before it began."""
        self._asked += 1
        asked = self._asked
        async with self._syncing:
            if self._synced < asked:
                covered = self._asked
                with _our_errors(self._path):
                    await self._loop.run_in_executor(self._disk, self._sync)
                self._synced = covered

    async def look(self, work: Work[T]) -> T:
        return await asyncio.to_thread(self._look, work)

    def bell(self, queue: str) -> Bell:
        return self._bells[queue]

    async def wait(self, rung: asyncio.Event, seconds: float) -> None:
        self._waiting += 1
        self._jobs.put(None)
        try:
            await wait_for_ring(rung, seconds)
        finally:
            self._waiting -= 1

    async def close(self) -> None:
        """Finish what was asked for, then let go of the file."""
        self._closing = True
        self._jobs.put(None)
        await self._closed
        self._thread.join()
        self._disk.shutdown()

    # From here on: the thread.

    def _serve(self) -> None:
        pause = FIRST_POLL
        while not (self._closing and self._jobs.empty()):
            jobs = self._next_jobs(pause if self._waiting else None)
            if jobs:
                ended = self._carry_out(jobs)
                self._loop.call_soon_threadsafe(_answer, ended)
            elif self._waiting and self._has_changed_elsewhere():
                self._loop.call_soon_threadsafe(self._ring_all)
            pause = FIRST_POLL if jobs else min(2 * pause, LAST_POLL)
        self._disconnect()
        self._loop.call_soon_threadsafe(self._closed.set_result, None)

    def _next_jobs(self, timeout: float | None) -> list[_Job]:
        """What has piled up; none if it was only a nudge, or nothing came in time."""
        found: list[_Job | None] = []
        try:
            found.append(self._jobs.get(timeout=timeout))
            while len(found) < MAX_JOBS:
                found.append(self._jobs.get_nowait())
        except Empty:
            pass
        return [job for job in found if job is not None]

    def _carry_out(self, jobs: Sequence[_Job]) -> list[_Ended]:
        """Together if all goes well. A job's fault is its own; trouble with the file is all's."""
        try:
            db = self._connect()
            self._renew_log(db)
            with transaction(db):
                ended = [_Ended(job, None, job.work(db)) for job in jobs]
        except Exception as error:  # noqa: BLE001 the thread's bulkhead: whoever asked is told
            self._disconnect()
            if len(jobs) == 1 or isinstance(error, sqlite3.OperationalError | OSError):
                return [_Ended(job, error, None) for job in jobs]
            return [alone for job in jobs for alone in self._carry_out([job])]
        return ended

    def _connect(self) -> sqlite3.Connection:
        if self._db is None:
            _create(self._path)
            self._db = sqlite3.connect(self._path, timeout=BUSY_TIMEOUT, isolation_level=None)
            for pragma in _PRAGMAS:
                self._db.execute(pragma)
            prepare(self._db)
            _write_through(self._path.parent)  # its name, and that of its log
        return self._db

    def _renew_log(self, db: sqlite3.Connection) -> None:
        """After a failed sync: what it did not keep may be a hole in the middle of the log."""
        if self._distrusts_log:
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            self._distrusts_log = False

    def _disconnect(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None

    def _has_changed_elsewhere(self) -> bool:
        """Whether another process has committed since the last look; also if we cannot tell."""
        before = self._version
        try:
            (self._version,) = self._connect().execute("PRAGMA data_version").fetchone()
        except (sqlite3.Error, OSError, QueueRefused):
            self._disconnect()
            return True  # the next claim will say what is wrong
        return before != self._version

    # From here on: the event loop again, or any thread.

    def _ring_all(self) -> None:
        for bell in self._bells.values():
            bell.ring()

    def _sync(self) -> None:
        try:
            _write_through(Path(f"{self._path}-wal"))
        except FileNotFoundError:
            if self._db is not None:
                raise
            # The file is closed: what was in its log is in the database, which SQLite waits for.
        except OSError:
            self._distrusts_log = True
            raise

    def _look(self, work: Work[T]) -> T:
        with (
            _our_errors(self._path),
            closing(sqlite3.connect(f"{self._path.as_uri()}?mode=ro", uri=True)) as db,
        ):
            return work(db)


def _nothing(_: object) -> None:
    """Enough to have the file opened and checked."""


def _create(path: Path) -> None:
    """By us, not by SQLite, for its mode: bodies hold tokens. Its companions take it over.

    One that is there is not opened: closing it would end all locks that SQLite has on it here.
    """
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


def _answer(ended: Sequence[_Ended]) -> None:
    for (_, answer), error, value in ended:
        if answer.done():  # nobody waits for it any more
            continue
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(value)


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


@contextmanager
def _our_errors(path: Path) -> Iterator[None]:
    """Turn what the engine can act on into our errors. Let bugs through as they are."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        if _primary_code(error) in _REFUSED:
            raise QueueRefused(f"{path.name}: {error}") from error
        if isinstance(error, sqlite3.OperationalError):
            raise Disconnected(f"{path.name}: {error}") from error
        raise
    except OSError as error:
        raise Disconnected(f"{path.name}: {error.strerror}") from error


def _primary_code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF
