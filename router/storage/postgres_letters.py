"""Dead letters in PostgreSQL, which all replicas share (DLQ-1)."""

import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from importlib import resources
from typing import Any, Final
from urllib.parse import urlsplit

from msgspec.structs import astuple

from router.brokers.kit import statements
from router.brokers.postgres.database import PostgresDatabase
from router.core.dead_letter import DeadLetter, KeptLetter, LetterFilter
from router.core.redact import without_secrets
from router.ports import BrokerError, StoreError
from router.storage.dead_letters import full, letter_of, stored

VERSION: Final = 1
CLAIM_SECONDS: Final = 60.0  # longer than a publication may take


@asynccontextmanager
async def open_postgres_letters(url: str, max_bytes: int) -> AsyncIterator["PostgresLetters"]:
    """Open the store, and install its schema if there is none. Raises StoreError."""
    store = PostgresLetters(
        PostgresDatabase(url, is_operators=True), urlsplit(url).hostname or "", max_bytes
    )
    try:
        await store.prepare()
        yield store
    finally:
        await store.close()


class PostgresLetters:
    """A call that fails has an error of its own; the next one connects again."""

    def __init__(self, database: PostgresDatabase, host: str, max_bytes: int) -> None:
        self._database = database
        self._host = host
        self._max_bytes = max_bytes

    async def prepare(self) -> None:
        with self._our_errors():
            await self._database.check_server()
        (found,) = await self._call("is_there")
        if not found["is_there"]:
            await self._call("install")
        (store,) = await self._call("version")
        if store["version"] > VERSION:
            raise self._error(f"written by a newer version (format {store['version']})")
        await self._call("touch")

    async def close(self) -> None:
        await self._database.close()

    async def put(self, letter: DeadLetter) -> None:
        values = [_stored(value) for value in astuple(without_secrets(letter))]
        (row,) = await self._call("put", self._max_bytes, *values)
        if not row["is_kept"]:
            raise self._error(full(self._max_bytes))

    async def find(
        self, wanted: LetterFilter, *, limit: int, before: int | None = None
    ) -> Sequence[KeptLetter]:
        rows = await self._call("find", *_filter(wanted), before, limit)
        return [letter_of(row) for row in rows]

    async def find_in_order(
        self, wanted: LetterFilter, *, limit: int, up_to: int, after: KeptLetter | None = None
    ) -> Sequence[KeptLetter]:
        place = (float("-inf"), 0) if after is None else (after.letter.first_seen, after.id)
        rows = await self._call("find_in_order", *_filter(wanted), *place, up_to, limit)
        return [letter_of(row) for row in rows]

    async def get(self, letter_id: int) -> KeptLetter | None:
        rows = await self._call("get", letter_id)
        return letter_of(rows[0]) if rows else None

    async def latest_of(self, message_id: str) -> KeptLetter | None:
        rows = await self._call("latest_of", _stored(message_id))
        return letter_of(rows[0]) if rows else None

    @asynccontextmanager
    async def replaying(self, letter_id: int) -> AsyncIterator[bool]:
        claim = secrets.randbits(62)
        is_ours = bool(await self._call("claim", letter_id, claim, CLAIM_SECONDS))
        try:
            yield is_ours
        finally:
            if is_ours:
                with suppress(StoreError):  # it ends by itself
                    await self._call("release", letter_id, claim)

    async def mark_replayed(self, letter_id: int, at: float) -> None:
        await self._call("mark_replayed", letter_id, at)

    async def discard(self, letter_id: int) -> bool:
        return bool(await self._call("discard", letter_id))

    async def expire(self, oldest: float) -> int:
        """Remove some of those that died before, and answer how many; 0: none is left."""
        return len(await self._call("expire", oldest))

    async def _call(self, query: str, *values: object) -> Sequence[Any]:
        with self._our_errors():
            return await self._database.call(_QUERIES[query], *values)

    @contextmanager
    def _our_errors(self) -> Iterator[None]:
        try:
            yield
        except BrokerError as error:
            raise self._error(str(error)) from None

    def _error(self, reason: str) -> StoreError:
        place = f"in PostgreSQL at {self._host}" if self._host else "in PostgreSQL"
        return StoreError(f"the dead-letter store {place} cannot be used: {reason}")


def _filter(wanted: LetterFilter) -> Sequence[object]:
    given = (wanted.queue, wanted.pool, wanted.reason, wanted.target, wanted.since)
    return [_stored(value) for value in given]


def _stored(value: object) -> object:
    """Return what PostgreSQL can hold: there is no NUL in its text."""
    return stored(value.replace("\0", "\ufffd") if isinstance(value, str) else value)


_QUERIES: Final = statements(
    resources.files("router.storage").joinpath("sql/dead_letters_postgres.sql").read_text()
)
