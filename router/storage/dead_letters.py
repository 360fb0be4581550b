"""Where dead letters are kept: a SQLite file, behind a thread of its own (DLQ-1)."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from importlib import resources
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import urlsplit

import msgspec

from router.core.config import sqlite_path
from router.core.dead_letter import DeadLetter, KeptLetter, LetterFilter, Reason
from router.core.named_sql import statements
from router.core.redact import mask_urls, without_secrets
from router.ports import DeadLetterStore, StoreError

GIBIBYTE: Final = 1024**3
VERSION: Final = 1
NO_STORE: Final = "none"

_BUSY_SECONDS: Final = 5.0
_PRAGMAS: Final = (
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = FULL",  # an ACK follows: what was kept must survive a power cut
    "PRAGMA secure_delete = ON",  # a discarded token is gone from the file
)

Answer = TypeVar("Answer")


@asynccontextmanager
async def open_store(
    url: str, *, max_bytes: int = GIBIBYTE, retention: float | None = None
) -> AsyncIterator[DeadLetterStore]:
    """Open the store of `sqlite:///path`, or the one of `none` that keeps nothing.

    Raises StoreError with the path and the reason when it cannot be written.
    `retention`: seconds after which letters are forgotten; None: never.
    """
    if url == NO_STORE:
        yield NoStore()
        return
    path = _path(url)
    with ThreadPoolExecutor(1, thread_name_prefix="dead-letters") as thread:
        run = asyncio.get_running_loop().run_in_executor
        connection = await run(thread, _connect, path, max_bytes)
        try:
            yield SqliteStore(connection, path, thread, retention)
        finally:
            await run(thread, connection.close)


class SqliteStore:
    def __init__(
        self,
        connection: sqlite3.Connection,
        path: Path,
        thread: ThreadPoolExecutor,
        retention: float | None,
    ) -> None:
        self._connection = connection  # touched only in the thread
        self._path = path
        self._thread = thread
        self._retention = retention

    async def put(self, letter: DeadLetter) -> None:
        await self._run(lambda: self._put(without_secrets(letter)))

    async def find(
        self, wanted: LetterFilter, *, limit: int, before: int | None = None
    ) -> Sequence[KeptLetter]:
        values = {**_columns(wanted), "limit": limit, "before": before}
        return await self._run(lambda: self._read("find", values))

    async def get(self, letter_id: int) -> KeptLetter | None:
        found = await self._run(lambda: self._read("get", {"id": letter_id}))
        return found[0] if found else None

    async def latest_of(self, message_id: str) -> KeptLetter | None:
        found = await self._run(lambda: self._read("latest_of", {"message_id": message_id}))
        return found[0] if found else None

    async def mark_replayed(self, letter_id: int, at: float) -> None:
        await self._run(lambda: self._change("mark_replayed", {"id": letter_id, "at": at}))

    async def discard(self, letter_id: int) -> bool:
        return await self._run(lambda: self._change("discard", {"id": letter_id})) > 0

    async def _run(self, work: Callable[[], Answer]) -> Answer:
        def guarded() -> Answer:
            with _our_errors(self._path):
                return work()

        return await asyncio.get_running_loop().run_in_executor(self._thread, guarded)

    def _put(self, letter: DeadLetter) -> None:
        if self._retention is not None:
            self._change("forget", {"oldest": letter.dead_at - self._retention})
        self._change("put", _columns(letter))

    def _read(self, query: str, values: Mapping[str, object]) -> Sequence[KeptLetter]:
        with closing(self._connection.execute(_QUERIES[query], values)) as rows:
            return [_letter(row) for row in rows]

    def _change(self, query: str, values: Mapping[str, object]) -> int:
        with closing(self._connection.execute(_QUERIES[query], values)) as cursor:
            return cursor.rowcount


class NoStore:
    """Keeps nothing, for those who set it so: what would be a dead letter is gone."""

    async def put(self, letter: DeadLetter) -> None:
        pass

    async def find(
        self,
        wanted: LetterFilter,  # noqa: ARG002 - the port's signature
        *,
        limit: int,  # noqa: ARG002 - the port's signature
        before: int | None = None,  # noqa: ARG002 - the port's signature
    ) -> Sequence[KeptLetter]:
        return ()

    async def get(self, letter_id: int) -> KeptLetter | None:  # noqa: ARG002 - the port's signature
        return None

    async def latest_of(self, message_id: str) -> KeptLetter | None:  # noqa: ARG002 - the port's signature
        return None

    async def mark_replayed(self, letter_id: int, at: float) -> None:
        pass

    async def discard(self, letter_id: int) -> bool:  # noqa: ARG002 - the port's signature
        return False


def _path(url: str) -> Path:
    parts = urlsplit(url)
    if parts.scheme != "sqlite" or parts.netloc or parts.path in ("", "/"):
        raise StoreError(
            f"a dead-letter store is sqlite:///path/to/file or {NO_STORE}, not {mask_urls(url)}"
        )
    return Path(sqlite_path(url))


def _connect(path: Path, max_bytes: int) -> sqlite3.Connection:
    with _our_errors(path):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.chmod(0o600)  # tokens are inside; SQLite gives its side files the same mode
        connection = sqlite3.connect(
            path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
        connection.row_factory = sqlite3.Row
        with ExitStack() as on_failure:
            on_failure.callback(connection.close)
            _prepare(connection, max_bytes)
            on_failure.pop_all()
        return connection


def _prepare(connection: sqlite3.Connection, max_bytes: int) -> None:
    for pragma in _PRAGMAS:
        connection.execute(pragma)
    (page_size,) = connection.execute("PRAGMA page_size").fetchone()
    connection.execute(f"PRAGMA max_page_count = {max_bytes // page_size}")
    connection.execute("BEGIN IMMEDIATE")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > VERSION:
        raise sqlite3.DatabaseError(f"written by a newer version (format {version})")
    connection.execute(_QUERIES["create_table"])
    connection.execute(_QUERIES["create_age_index"])
    connection.execute(_QUERIES["create_message_index"])
    # Written every time: a store that cannot be written is to be noticed now, not at a death.
    connection.execute(f"PRAGMA user_version = {VERSION}")
    connection.execute("COMMIT")


@contextmanager
def _our_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise StoreError(f"the dead-letter store {path} cannot be used: {error}") from error


def _columns(value: DeadLetter | LetterFilter) -> dict[str, object]:
    columns: dict[str, object] = msgspec.structs.asdict(value)
    if value.reason is not None:
        columns["reason"] = value.reason.value
    return columns


def _letter(row: sqlite3.Row) -> KeptLetter:
    fields = {name: row[name] for name in DeadLetter.__struct_fields__}
    fields["reason"] = Reason(fields["reason"])
    return KeptLetter(row["id"], DeadLetter(**fields), row["replayed_at"])


_QUERIES: Final = statements(
    resources.files("router.storage").joinpath("sql/dead_letters.sql").read_text()
)
