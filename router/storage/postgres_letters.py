"""Dead letters in PostgreSQL, which all replicas share (DLQ-1)."""

import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from importlib import resources
from typing import Any, Final
from urllib.parse import urlsplit

from msgspec.structs import asdict

from router.brokers.kit import statements
from router.brokers.postgres.database import PostgresDatabase
from router.core.dead_letter import DeadLetter
from router.core.redact import without_secrets
from router.ports import BrokerError, StoreError
from router.storage.dead_letters import LetterTable, full, stored

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


class PostgresLetters(LetterTable):
    """Dead letters in PostgreSQL. After a call that failed, the next one connects again."""

    def __init__(self, database: PostgresDatabase, host: str, max_bytes: int) -> None:
        self._database = database
        self._host = host
        self._max_bytes = max_bytes

    async def prepare(self) -> None:
        with self._our_errors():
            await self._database.check_server()
        (found,) = await self.rows("is_there")
        if not found["is_there"]:
            await self.rows("install")
        (store,) = await self.rows("version")
        if store["version"] > VERSION:
            raise self._error(f"written by a newer version (format {store['version']})")
        await self.rows("touch")

    async def close(self) -> None:
        await self._database.close()

    async def put(self, letter: DeadLetter) -> None:
        columns = asdict(without_secrets(letter))
        (row,) = await self.rows("put", max_bytes=self._max_bytes, **columns)
        if not row["is_kept"]:
            raise self._error(full(self._max_bytes))

    @asynccontextmanager
    async def replaying(self, letter_id: int) -> AsyncIterator[bool]:
        claim = secrets.randbits(62)
        is_ours = bool(await self.rows("claim", id=letter_id, claim=claim, seconds=CLAIM_SECONDS))
        try:
            yield is_ours
        finally:
            if is_ours:
                with suppress(StoreError):  # it ends by itself
                    await self.rows("release", id=letter_id, claim=claim)

    async def rows(self, query: str, **values: object) -> Sequence[Any]:
        with self._our_errors():
            return await self._database.call(_QUERIES[query], *map(_stored, values.values()))

    @contextmanager
    def _our_errors(self) -> Iterator[None]:
        try:
            yield
        except BrokerError as error:
            raise self._error(str(error)) from None

    def _error(self, reason: str) -> StoreError:
        place = f"in PostgreSQL at {self._host}" if self._host else "in PostgreSQL"
        return StoreError(f"the dead-letter store {place} cannot be used: {reason}")


def _stored(value: object) -> object:
    """Return what PostgreSQL can hold: there is no NUL in its text."""
    return stored(value.replace("\0", "\ufffd") if isinstance(value, str) else value)


_QUERIES: Final = statements(
    resources.files("router.storage").joinpath("sql/dead_letters_postgres.sql").read_text()
)
