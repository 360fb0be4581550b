"""One PostgreSQL database: a few connections to it, and its schema. Only here is asyncpg used."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import asyncpg

from router.brokers.bell import Bell
from router.brokers.postgres_ear import Ear
from router.brokers.queries import read_sql
from router.ports import Disconnected, QueueRefused

log = logging.getLogger(__name__)

MIGRATIONS: Final = ("postgres_1.sql", "postgres_2.sql")  # the n-th makes version n
OLDEST_SERVER: Final = 15
MAX_CONNECTIONS: Final = 4  # of this process, and one that listens
MAX_CLAIMS: Final = 2  # of those, so that settling never waits for a claim that waits for its turn
CONNECT_TIMEOUT: Final = 5.0
CALL_TIMEOUT: Final = 10.0
MIGRATION_TIMEOUT: Final = 600.0
LISTEN_TIMEOUT: Final = 2.0
CLOSE_TIMEOUT: Final = 1.0
KEPT_STATEMENTS: Final = 100  # of a connection: more than there are
CHANNEL: Final = "message_router"

# Anything else that the server says may pass: it starts, stops, is full, a replica, out of reach.
_REFUSED: Final = (
    asyncpg.InvalidAuthorizationSpecificationError,  # covers a wrong password
    asyncpg.InvalidCatalogNameError,
    asyncpg.InsufficientPrivilegeError,
)

# A pooler that looked like the server itself has given the call to another session.
_LOST_STATEMENT: Final = (
    asyncpg.InvalidSQLStatementNameError,
    asyncpg.DuplicatePreparedStatementError,
)


class PostgresDatabase:
    """Calls go to whichever connection is free: no call leaves anything behind in its session.

    A connection on which anything went wrong is not used again. So an error costs a new connection,
    and nobody has to know in which state the old one was.
    """

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._idle: list[asyncpg.Connection] = []
        self._places = asyncio.Semaphore(MAX_CONNECTIONS)
        self._claims = asyncio.Semaphore(MAX_CLAIMS)
        self._bells: defaultdict[str, Bell] = defaultdict(Bell)
        self._ear = Ear(self._listen)
        self._is_closed = False
        self._keeps_statements: bool | None = None  # prepared ones; None: not found out yet
        self.incarnation = ""  # of the schema, once it was looked at

    async def prepare(self) -> None:
        """Bring the schema up to date; refuse a database in which the queue would not be safe."""
        if self._keeps_statements is None:
            self._keeps_statements = await self._has_sessions()
        (row,) = await self.call(
            "SELECT current_setting('server_version_num')::int / 10000 AS server,"
            " current_setting('transaction_isolation') AS isolation,"
            " to_regclass('message_router.schema_versions') IS NOT NULL AS is_there"
        )
        if row["server"] < OLDEST_SERVER:
            raise QueueRefused(f"the server is PostgreSQL {row['server']}, below {OLDEST_SERVER}")
        if row["isolation"] != "read committed":
            raise QueueRefused(f"the default transaction isolation is {row['isolation']!r}")
        version = await self._newest("version") if row["is_there"] else 0
        if version > len(MIGRATIONS):
            raise QueueRefused(
                f"the schema is of version {version}; this router knows {len(MIGRATIONS)}"
            )
        if version < len(MIGRATIONS):
            await self._migrate()
        self.incarnation = await self._newest("incarnation")

    async def call(self, query: str, *arguments: object) -> Sequence[Any]:
        """One statement, one transaction. Its rows are read by the names of their columns."""
        async with self._places:
            if self._is_closed:
                raise Disconnected("the database is closed")
            async with _our_errors(CALL_TIMEOUT):
                try:
                    return await self._call(query, arguments)
                except _LOST_STATEMENT:  # before it did anything
                    self._keeps_statements = False
                    return await self._call(query, arguments)

    async def claim(self, query: str, *arguments: object) -> Sequence[Any]:
        """A call that may have to wait for other processes."""
        async with self._claims:
            return await self.call(query, *arguments)

    def bell(self, queue: str) -> Bell:
        return self._bells[queue]

    async def listen(self) -> None:
        """Let other processes ring the bells, if that is possible."""
        if not self._is_closed:
            await self._ear.open()

    async def close(self) -> None:
        self._is_closed = True
        self._ear.close()
        while self._idle:
            await _close(self._idle.pop())

    async def _call(self, query: str, arguments: Sequence[object]) -> Sequence[Any]:
        connection = self._take_idle() or await self._connect()
        try:
            rows: Sequence[Any] = await connection.fetch(query, *arguments)
        except BaseException:
            connection.terminate()
            self._drop_all()
            raise
        self._put_back(connection)
        return rows

    def _take_idle(self) -> asyncpg.Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closed():
                return connection
        return None

    def _put_back(self, connection: asyncpg.Connection) -> None:
        if self._is_closed:
            connection.terminate()
        else:
            self._idle.append(connection)

    def _drop_all(self) -> None:
        """What happened to one connection may have happened to all: do not find out singly."""
        self._ear.close()
        while self._idle:
            self._idle.pop().terminate()

    async def _connect(self) -> asyncpg.Connection:
        return await asyncpg.connect(
            self._dsn,
            timeout=CONNECT_TIMEOUT,
            statement_cache_size=KEPT_STATEMENTS if self._keeps_statements else 0,
            server_settings={"application_name": "message-router"},
        )

    async def _has_sessions(self) -> bool:
        """Whether a connection is one session of the server: its process is the one we were told.

        A pooler may give each call to another session, and makes a number up.
        """
        async with _our_errors(CALL_TIMEOUT):
            connection = await self._connect()
            try:
                process = await connection.fetchval("SELECT pg_backend_pid()")
                return bool(process == connection.get_server_pid())
            finally:
                await _close(connection)

    async def _listen(self) -> asyncpg.Connection:
        async with _our_errors(LISTEN_TIMEOUT):
            connection = await self._connect()
            try:
                await connection.add_listener(CHANNEL, self._ring)
            except BaseException:
                connection.terminate()
                raise
            return connection

    def _ring(self, _connection: object, _pid: int, _channel: str, queue: str) -> None:
        self._bells[queue].ring()

    async def _newest(self, column: str) -> Any:
        (row,) = await self.call(
            f"SELECT max({column}) FROM message_router.schema_versions"  # noqa: S608  our names
        )
        return row[0]

    async def _migrate(self) -> None:
        async with _our_errors(MIGRATION_TIMEOUT):
            connection = await self._connect()
            try:
                await _migrate(connection)
            finally:
                connection.terminate()


async def _migrate(connection: asyncpg.Connection) -> None:
    """All or nothing; whoever comes second finds it done."""
    async with connection.transaction(isolation="read_committed"):
        await connection.execute(
            "SELECT pg_advisory_xact_lock(hashtextextended('message_router schema', 0))"
        )
        is_there = "SELECT to_regclass('message_router.schema_versions') IS NOT NULL"
        version = 0
        if await connection.fetchval(is_there):
            newest = "SELECT max(version) FROM message_router.schema_versions"
            version = await connection.fetchval(newest)
        for number, script in enumerate(MIGRATIONS[version:], version + 1):
            await connection.execute(read_sql(script))
            log.info("database schema installed", extra={"version": number})


async def _close(connection: asyncpg.Connection) -> None:
    """Politely, if it answers."""
    try:
        await connection.close(timeout=CLOSE_TIMEOUT)
    except (TimeoutError, OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
        connection.terminate()


@asynccontextmanager
async def _our_errors(seconds: float) -> AsyncIterator[None]:
    """So long and no longer. What the engine can act on becomes our error, without the URI."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except _REFUSED as error:
        raise QueueRefused(f"the database refuses us: {_kind(error)}") from None
    except asyncpg.ClientConfigurationError:
        raise QueueRefused("the URI cannot be used to connect") from None
    except TimeoutError:
        raise Disconnected("the database does not answer") from None
    except asyncpg.PostgresError as error:
        raise Disconnected(f"the database says: {error.args[0]}") from None
    except (asyncpg.InterfaceError, asyncpg.InternalClientError, OSError) as error:
        raise Disconnected(f"no connection to the database: {_kind(error)}") from None


def _kind(error: Exception) -> str:
    """Their texts may name users, hosts and paths."""
    return type(error).__name__
