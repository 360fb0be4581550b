"""Where dead letters are kept: PostgreSQL, or a SQLite file behind its own thread (DLQ-1)."""

import asyncio
import logging
import sqlite3
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import (
    AbstractAsyncContextManager,
    ExitStack,
    asynccontextmanager,
    closing,
    contextmanager,
    nullcontext,
)
from importlib import resources
from math import inf
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from msgspec.structs import asdict

from router.brokers.kit import statements
from router.brokers.sqlite.connection import transaction
from router.core.dead_letter import DeadLetter, KeptLetter, LetterFilter, Reason
from router.core.redact import mask_urls, without_secrets
from router.ports import DeadLetterStore, StoreError
from router.setting_values import sqlite_path

log = logging.getLogger(__name__)

GIBIBYTE: Final = 1024**3
VERSION: Final = 2
NO_STORE: Final = "none"
EXPIRY_INTERVAL_SECONDS: Final = 60.0
CLOCK_STEP_SECONDS: Final = 3600.0  # a wall clock set forward by more than this expires nothing

_BUSY_SECONDS: Final = 5.0
_SPARE_PAGES: Final = 8  # that a letter may need beside its body: table and indexes grow
_PRAGMAS: Final = (
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = FULL",  # an ACK follows: what was kept must survive a power cut
    "PRAGMA secure_delete = ON",  # a discarded token is gone from the file
)

_FROM_FORMAT_1: Final = ("rename_key", "rename_attempts", "add_failures")
_SCHEMA: Final = (
    "create_table",
    "create_age_index",
    "create_message_index",
    "create_fingerprint_index",
    "create_order_index",
)

Answer = TypeVar("Answer")


@asynccontextmanager
async def open_store(
    url: str,
    *,
    max_bytes: int = GIBIBYTE,
    retention: float | None = None,
    wall: Callable[[], float] = time.time,
    executor: Executor | None = None,
) -> AsyncIterator[DeadLetterStore]:
    """Open the store of `sqlite:///path`, of `postgresql://…`, or of `none` that keeps nothing.

    `retention`: seconds after which letters are removed; None: never. `executor` runs one call at a
    time, in order; None: a thread of the store's own. Raises StoreError with the path and the
    reason when it cannot be written.
    """
    if url == NO_STORE:
        yield NoStore()
        return
    is_postgres = url.startswith(("postgresql:", "postgres:"))
    opening = _postgres(url, max_bytes) if is_postgres else _sqlite(_path(url), max_bytes, executor)
    async with opening as store, _expiring(store, retention, wall):
        yield store


@asynccontextmanager
async def _sqlite(
    path: Path, max_bytes: int, executor: Executor | None
) -> AsyncIterator["LetterTable"]:
    run = asyncio.get_running_loop().run_in_executor
    with ExitStack() as stack:
        executor = executor or stack.enter_context(
            ThreadPoolExecutor(1, thread_name_prefix="dead-letters")
        )
        opened = ExitStack()
        try:  # an opening that is cancelled goes on in its thread, and is closed there
            connection = await run(executor, lambda: opened.enter_context(closing(_connect(path))))
            yield SqliteLetters(connection, path, executor, max_bytes)
        finally:
            await asyncio.shield(run(executor, opened.close))


def _postgres(url: str, max_bytes: int) -> AbstractAsyncContextManager["LetterTable"]:
    try:
        from router.storage.postgres_letters import open_postgres_letters  # noqa: PLC0415 on use
    except ModuleNotFoundError as error:
        text = f"dead letters in PostgreSQL need the package {error.name}"
        raise StoreError(f"{text}: pip install 'message-router[postgres]'") from error
    return open_postgres_letters(url, max_bytes)


@asynccontextmanager
async def _expiring(
    store: "LetterTable", retention: float | None, wall: Callable[[], float]
) -> AsyncIterator[None]:
    """Remove what is older than the retention: at once, then every minute."""
    if retention is None:
        yield
        return
    chore = asyncio.create_task(_expire(store, retention, wall), name="dead-letter retention")
    try:
        yield
    finally:
        chore.cancel()
        await asyncio.wait([chore])


async def _expire(store: "LetterTable", retention: float, wall: Callable[[], float]) -> None:
    """Run until cancelled. In doubt about the time, letters are kept."""
    loop = asyncio.get_running_loop()
    ahead = wall() - loop.time() + CLOCK_STEP_SECONDS
    while True:
        oldest = min(wall(), ahead + loop.time()) - retention
        try:
            while removed := await store.expire(oldest):
                log.info("removed %d dead letters that are older than the retention", removed)
        except StoreError as error:
            log.warning("dead letters older than the retention are still there: %s", error)
        await asyncio.sleep(EXPIRY_INTERVAL_SECONDS)


class LetterTable(ABC):
    """Reads and changes letters. The statements of all databases have the same names."""

    @abstractmethod
    async def put(self, letter: DeadLetter) -> None: ...

    @abstractmethod
    def replaying(self, letter_id: int) -> AbstractAsyncContextManager[bool]: ...

    @abstractmethod
    async def rows(self, query: str, **values: object) -> Sequence[Any]:
        """Run a statement, which has its values by their names, or else in this order.

        Rows are read by the names of their columns. Raises StoreError.
        """

    async def find(
        self, wanted: LetterFilter, *, limit: int, before: int | None = None
    ) -> Sequence[KeptLetter]:
        rows = await self.rows("find", **asdict(wanted), before=before, limit=limit)
        return [_letter_of(row) for row in rows]

    async def find_in_order(
        self, wanted: LetterFilter, *, limit: int, up_to: int, after: KeptLetter | None = None
    ) -> Sequence[KeptLetter]:
        first_seen, letter_id = (-inf, 0) if after is None else (after.letter.first_seen, after.id)
        place = {"first_seen": first_seen, "id": letter_id, "up_to": up_to}
        rows = await self.rows("find_in_order", **asdict(wanted), **place, limit=limit)
        return [_letter_of(row) for row in rows]

    async def get(self, letter_id: int) -> KeptLetter | None:
        rows = await self.rows("get", id=letter_id)
        return _letter_of(rows[0]) if rows else None

    async def latest_of(self, message_id: str) -> KeptLetter | None:
        rows = await self.rows("latest_of", message_id=message_id)
        return _letter_of(rows[0]) if rows else None

    async def mark_replayed(self, letter_id: int, at: float) -> None:
        await self.rows("mark_replayed", id=letter_id, at=at)

    async def discard(self, letter_id: int) -> bool:
        return bool(await self.rows("discard", id=letter_id))

    async def expire(self, oldest: float) -> int:
        """Remove some of those that died before, and answer how many; 0: none is left."""
        return len(await self.rows("expire", oldest=oldest))


class SqliteLetters(LetterTable):
    def __init__(
        self, connection: sqlite3.Connection, path: Path, executor: Executor, max_bytes: int
    ) -> None:
        self._connection = connection  # touched only in the executor
        self._path = path
        self._executor = executor
        self._max_bytes = max_bytes
        self._replaying: set[int] = set()

    async def put(self, letter: DeadLetter) -> None:
        await self._run(lambda: self._put(without_secrets(letter)))

    @asynccontextmanager
    async def replaying(self, letter_id: int) -> AsyncIterator[bool]:
        is_ours = letter_id not in self._replaying
        self._replaying.add(letter_id)
        try:
            yield is_ours
        finally:
            if is_ours:
                self._replaying.discard(letter_id)

    async def rows(self, query: str, **values: object) -> Sequence[Any]:
        return await self._run(lambda: self._execute(query, values))

    async def _run(self, work: Callable[[], Answer]) -> Answer:
        def guarded() -> Answer:
            with _our_errors(self._path):
                return work()

        return await asyncio.get_running_loop().run_in_executor(self._executor, guarded)

    def _execute(self, query: str, values: Mapping[str, object]) -> Sequence[sqlite3.Row]:
        given = {name: stored(value) for name, value in values.items()}
        return self._connection.execute(_QUERIES[query], given).fetchall()

    def _put(self, letter: DeadLetter) -> None:
        """Write it in the place of an earlier death of the same message, whose age it keeps."""
        columns = asdict(letter)
        with transaction(self._connection):
            ((first_seen,),) = self._execute("first_seen_before", columns)
            if first_seen is None:
                self._check_room_for(letter)
            else:
                columns["first_seen"] = min(first_seen, letter.first_seen)
                self._execute("supersede", columns)
            self._execute("put", columns)

    def _check_room_for(self, letter: DeadLetter) -> None:
        """Check by what is in use: the file never shrinks, and free pages are used again."""
        page_size, pages, free = (
            self._connection.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_size", "page_count", "freelist_count")
        )
        needed = len(letter.body) + len(letter.reply) + _SPARE_PAGES * page_size
        if (pages - free) * page_size + needed > self._max_bytes:
            raise sqlite3.OperationalError(full(self._max_bytes))


class NoStore:
    """Keeps nothing, for those who set it so: what would be a dead letter is gone."""

    async def put(self, *_: object, **__: object) -> None:
        return None

    async def find(self, *_: object, **__: object) -> Sequence[KeptLetter]:
        return ()

    async def get(self, *_: object, **__: object) -> KeptLetter | None:
        return None

    async def discard(self, *_: object, **__: object) -> bool:
        return False

    def replaying(self, *_: object, **__: object) -> AbstractAsyncContextManager[bool]:
        return nullcontext(enter_result=True)

    find_in_order = find
    latest_of = get
    mark_replayed = put


def _path(url: str) -> Path:
    parts = urlsplit(url)
    if parts.scheme != "sqlite" or parts.netloc or parts.path in ("", "/"):
        raise StoreError(
            f"a dead-letter store is sqlite:///path/to/file, postgresql://… or {NO_STORE},"
            f" not {mask_urls(url)}"
        )
    return Path(sqlite_path(url))


def _connect(path: Path) -> sqlite3.Connection:
    with _our_errors(path):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)
        connection = sqlite3.connect(
            path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
        connection.row_factory = sqlite3.Row
        with ExitStack() as on_failure:
            on_failure.callback(connection.close)
            names = {row["name"] for row in connection.execute("SELECT name FROM sqlite_master")}
            if names and "dead_letters" not in names:
                raise sqlite3.DatabaseError("it is a database of something else")
            path.chmod(0o600)  # tokens are inside; SQLite gives its side files the same mode
            _prepare(connection)
            on_failure.pop_all()
        return connection


def _prepare(connection: sqlite3.Connection) -> None:
    for pragma in _PRAGMAS:
        connection.execute(pragma)
    with transaction(connection):
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version > VERSION:
            raise sqlite3.DatabaseError(f"written by a newer version (format {version})")
        for step in (*(_FROM_FORMAT_1 if version == 1 else ()), *_SCHEMA):
            connection.execute(_QUERIES[step])
        # Written every time: a store that cannot be written is to be noticed now, not at a death.
        connection.execute(f"PRAGMA user_version = {VERSION}")


@contextmanager
def _our_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise StoreError(f"the dead-letter store {path} cannot be used: {error}") from error


def stored(value: object) -> object:
    """Return what a database can hold: its text is valid Unicode."""
    if isinstance(value, Reason):
        return value.value
    return value.encode(errors="replace").decode() if isinstance(value, str) else value


def full(max_bytes: int) -> str:
    return f"it is full: the limit is {max_bytes} bytes (MESSAGE_ROUTER_DEAD_LETTER_MAX_BYTES)"


def _letter_of(row: Any) -> KeptLetter:
    """Return what a row says, which is read by the names of its columns."""
    fields = {name: row[name] for name in DeadLetter.__struct_fields__}
    fields["reason"] = Reason(fields["reason"])
    return KeptLetter(row["id"], DeadLetter(**fields), row["replayed_at"])


_QUERIES: Final = statements(
    resources.files("router.storage").joinpath("sql/dead_letters.sql").read_text()
)
