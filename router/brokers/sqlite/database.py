"""A queue file: the event loop writes to it while that is quick, a thread when it may wait."""

import asyncio
import sqlite3
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from router.brokers.sqlite.connection import FileConnection, T, Work
from router.brokers.workers import THIS_MACHINE, Machine, PollPause
from router.ports import DataRefused, Disconnected, QueueRefused
from router.signal import Signal, wait_for_signal

MAX_JOBS: Final = 64  # in one transaction
QUICK_JOBS: Final = 8  # more of them at once are left to the thread
QUICK_SECONDS: Final = 0.05  # a turn that takes the loop longer was held up …
CAUTION_SECONDS: Final = 30.0  # … and the thread takes all turns for this long
CHECKPOINT_TURNS: Final = 64  # the log has some thousand pages by then …
LARGE_TURN: Final = 8  # … where a large turn counts for several
FIRST_POLL_SECONDS: Final = 0.02  # for other processes' changes, while anyone waits …
LAST_POLL_SECONDS: Final = 0.08  # … and when nothing has happened for a while

_REFUSED: Final = frozenset({sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT})


class _Job(NamedTuple):
    work: Work[Any]
    is_large: bool
    answer: asyncio.Future[Any]


class FileDatabase:
    """Jobs that are asked for at about the same time share one transaction: a turn.

    The event loop takes most turns itself. In a thread they cost half as much again, because thread
    and loop hand Python's global lock to and fro with every statement. A turn is short, and its
    commit waits for no disk. A thread takes the turns that may wait: to open the file, to begin a
    new log, large work, another process's lock or any other trouble; and all turns for a while,
    once a turn has held the loop up after all.

    For publishers another thread waits for the disk, so that messages flow meanwhile. While
    receivers wait, the loop looks for commits of other processes.
    """

    def __init__(
        self,
        path: Path,
        machine: Machine = THIS_MACHINE,
        refusal: str | None = None,
        on_storage: Callable[[str | None], None] = lambda _: None,
        *,
        poll_interval: float | None = None,
    ) -> None:
        """`refusal`: why writes were refused when the file was last open.

        `on_storage` is told each time why they are, and None when they no longer are.
        """
        self.path = path
        self._report = on_storage
        self._is_refused = refusal is not None
        self._loop = asyncio.get_running_loop()
        self._connection = FileConnection(path, machine, refusal)  # of the thread whose turn it is
        self.now = self._connection.now
        self._thread = ThreadPoolExecutor(1, f"sqlite {path.name}")
        self._jobs: list[_Job] = []
        self._is_busy = False  # a turn is being taken, or will be at once
        self._turns = 0  # since the last checkpoint
        self._cautious_until = 0.0  # loop time
        self._signals: defaultdict[str, Signal] = defaultdict(Signal)
        self._waiting = 0  # receivers with nothing to do
        self._pause = PollPause(FIRST_POLL_SECONDS, poll_interval or LAST_POLL_SECONDS)
        self._next_poll: asyncio.TimerHandle | None = None
        self._disk = ThreadPoolExecutor(1, f"disk {path.name}")  # waits for it, nothing else
        self._syncing = asyncio.Lock()
        self._asked = self._synced = 0  # syncs
        self._closing = False
        self._rested = asyncio.Event()  # nothing was left to do

    @property
    def incarnation(self) -> str:
        return self._connection.incarnation

    async def prepare(self) -> None:
        """Open and check the file."""
        await self.run(lambda _: None)

    async def run(self, work: Work[T], *, is_large: bool = False) -> T:
        if self._closing:
            raise Disconnected(f"{self.path.name} is closed")
        answer: asyncio.Future[T] = self._loop.create_future()
        self._jobs.append(_Job(work, is_large, answer))
        if not self._is_busy:
            self._next_turn()
        with _our_errors(self.path):
            return await answer

    async def sync(self) -> None:
        """Sync the log. Syncs take turns; one serves all calls that came before it began."""
        if self._closing:
            raise Disconnected(f"{self.path.name} is closed")
        self._asked += 1
        asked = self._asked
        async with self._syncing:
            if self._synced < asked:
                covered = self._asked
                try:
                    with _our_errors(self.path):
                        await self._loop.run_in_executor(self._disk, self._connection.sync_log)
                finally:
                    self._report_refusal()
                self._synced = covered

    async def look(self, work: Work[T]) -> T:
        def read() -> T:
            uri = f"{self.path.as_uri()}?mode=ro"
            with _our_errors(self.path), closing(sqlite3.connect(uri, uri=True)) as db:
                return work(db)

        return await asyncio.to_thread(read)

    def signal(self, queue: str) -> Signal:
        return self._signals[queue]

    async def wait(self, rung: asyncio.Event, seconds: float) -> None:
        self._waiting += 1
        self._poll_later()
        try:
            await wait_for_signal(rung, seconds)
        finally:
            self._waiting -= 1

    async def close(self) -> None:
        """Finish what was asked for, then close the file."""
        if self._closing:
            return
        self._closing = True
        if self._is_busy:
            await self._rested.wait()
        if self._next_poll is not None:
            self._next_poll.cancel()
        await self._loop.run_in_executor(self._thread, self._connection.close)
        self._thread.shutdown()
        self._disk.shutdown()

    def _next_turn(self, *_: object) -> None:
        """Take a turn soon if there is anything to do."""
        self._is_busy = bool(self._jobs)
        if self._is_busy:
            self._loop.call_soon(self._take_turn)
        elif self._closing:
            self._rested.set()

    def _take_turn(self) -> None:
        wanted = [job for job in self._jobs if not job.answer.done()]  # who gave up claims nothing
        jobs, self._jobs = wanted[:MAX_JOBS], wanted[MAX_JOBS:]
        may_wait = (
            len(jobs) > QUICK_JOBS
            or any(job.is_large for job in jobs)
            or not self._connection.is_ready
            or self._loop.time() < self._cautious_until
        )
        if may_wait:
            self._leave_to_thread(jobs)
            return
        began = time.perf_counter()
        try:
            results = self._connection.run([job.work for job in jobs])
        except Exception:  # noqa: BLE001 nothing was done; the thread tries again, and reports
            self._leave_to_thread(jobs)
            return
        if time.perf_counter() - began > QUICK_SECONDS:  # the loop's clock stands still meanwhile
            self._cautious_until = self._loop.time() + CAUTION_SECONDS
        self._end_turn(jobs, results)

    def _leave_to_thread(self, jobs: Sequence[_Job]) -> None:
        works = [job.work for job in jobs]
        turn = self._loop.run_in_executor(self._thread, self._connection.run_patiently, works)
        turn.add_done_callback(lambda turn: self._end_turn(jobs, turn.result()))

    def _end_turn(self, jobs: Sequence[_Job], results: Sequence[Any]) -> None:
        for job, result in zip(jobs, results, strict=True):
            if job.answer.done():  # its caller has stopped waiting
                continue
            if isinstance(result, Exception):
                job.answer.set_exception(result)
            else:
                job.answer.set_result(result)
        self._report_refusal()
        self._pause.reset()
        self._turns += LARGE_TURN if any(job.is_large for job in jobs) else 1
        if self._turns < CHECKPOINT_TURNS:
            self._next_turn()
        else:
            self._turns = 0
            checkpoint = self._loop.run_in_executor(self._thread, self._connection.checkpoint)
            checkpoint.add_done_callback(self._next_turn)

    def _report_refusal(self) -> None:
        refusal = self._connection.refusal
        if refusal is not None or self._is_refused:
            self._is_refused = refusal is not None
            self._report(refusal)

    def _poll_later(self) -> None:
        if self._waiting and self._next_poll is None:
            self._next_poll = self._loop.call_later(self._pause.lengthen(), self._poll)

    def _poll(self) -> None:
        self._next_poll = None
        if self._waiting and not self._is_busy and self._connection.has_changed_elsewhere():
            for signal in self._signals.values():
                signal.ring()
        self._poll_later()


@contextmanager
def _our_errors(path: Path) -> Iterator[None]:
    """Turn what the engine can act on into our errors. Let bugs through as they are."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in _REFUSED:  # the primary code
            raise QueueRefused(f"{path.name}: {error}") from error
        if isinstance(error, sqlite3.IntegrityError | sqlite3.DataError):
            raise DataRefused(f"{path.name}: {error}") from error
        if isinstance(error, sqlite3.OperationalError):
            raise Disconnected(f"{path.name}: {error}") from error
        raise
    except OSError as error:
        raise Disconnected(f"{path.name}: {error.strerror}") from error
