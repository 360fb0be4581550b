"""One PostgreSQL database: a few connections to it, and its schema. Only here is asyncpg used."""

import asyncio
import logging
import os
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any, Final
from urllib.parse import urlsplit

import asyncpg

from router.brokers.kit import loop_time
from router.ports import BrokerError, DataRefused, Disconnected, QueueRefused
from router.signal import Signal, wait_for_signal

log = logging.getLogger(__name__)

SCHEMA_VERSION: Final = 6  # that schema.sql installs; only with this one routers work
REVISION: Final = 5  # of that version; with an older one this router does not work
OLDEST_SERVER_VERSION: Final = 15
MAX_CONNECTIONS: Final = 4  # of this process, and one that listens
MAX_CLAIMS: Final = 2  # of those, so that settling never waits for a claim that waits for its turn
CONNECT_TIMEOUT_SECONDS: Final = 5.0
CALL_TIMEOUT_SECONDS: Final = 10.0
INSTALL_TIMEOUT_SECONDS: Final = 600.0
LISTEN_TIMEOUT_SECONDS: Final = 2.0
LISTEN_AGAIN_SECONDS: Final = 30.0  # after an attempt, if it did not last
LONG_AGO: Final = float("-inf")
CLOSE_TIMEOUT_SECONDS: Final = 1.0
KEPT_STATEMENTS: Final = 100  # of a connection: more than there are
CHANNEL: Final = "message_router"

_FILES: Final = files("router.brokers.postgres")
_HAS_SCHEMA: Final = "SELECT to_regclass('message_router.schema_versions') IS NOT NULL"
# The column `revision` is missing in revision 0.
_INSTALLED: Final = """
SELECT version, incarnation, coalesce((to_jsonb(newest) ->> 'revision')::int, 0) AS revision
FROM message_router.schema_versions AS newest ORDER BY version DESC LIMIT 1
"""
_LOCK_SCHEMA: Final = "SELECT pg_advisory_xact_lock(hashtextextended('message_router schema', 0))"

# Anything else that the server says may pass: it starts, stops, is full, a replica, out of reach.
_REFUSED: Final = (
    asyncpg.InvalidAuthorizationSpecificationError,  # covers a wrong password
    asyncpg.InvalidCatalogNameError,
    asyncpg.InsufficientPrivilegeError,
)

# What a statement would store is refused, by the server or by the client that encodes it. Nothing
# was done, and the connection is as good as before.
_BAD_DATA: Final = (
    asyncpg.DataError,
    asyncpg.IntegrityConstraintViolationError,
    asyncpg.ProgramLimitExceededError,
)

# A pooler that looked like the server itself has given the call to another session.
_LOST_STATEMENT: Final = (
    asyncpg.InvalidSQLStatementNameError,
    asyncpg.DuplicatePreparedStatementError,
)


def is_for_environment(dsn: str) -> bool:
    """Return whether what a DSN leaves out may come from the environment, the password too.

    Routing documents name hosts. They must not be able to have `PGPASSWORD` sent to any of them, so
    it goes to `PGHOST`, or to this machine if that is not set.
    """
    login, _, hosts = urlsplit(dsn).netloc.rpartition("@")
    if ":" in login or not hosts:
        return True  # it names a password, or takes the host from there, too
    named = [host for host in os.environ.get("PGHOST", "").lower().split(",") if host]
    given = {urlsplit(f"//{host}").hostname or "" for host in hosts.split(",")}
    return given <= {*(named or ("localhost", "127.0.0.1", "::1"))}


class PostgresDatabase:
    """Calls go to whichever connection is free: no call leaves anything behind in its session.

    A connection on which anything went wrong is not used again, unless only data was refused. That
    costs a new connection, but then the state of the old one does not matter.
    """

    def __init__(self, dsn: str, *, is_operators: bool = False) -> None:
        self._dsn = dsn
        # "": none, instead of the environment's. That is for hosts that operators have named.
        self._password = None if is_operators or is_for_environment(dsn) else ""
        self._idle: list[asyncpg.Connection] = []
        self._places = asyncio.Semaphore(MAX_CONNECTIONS)
        self._claims = asyncio.Semaphore(MAX_CLAIMS)
        self._signals: defaultdict[str, Signal] = defaultdict(Signal)
        self._listener: asyncpg.Connection | None = None  # nothing depends on it: receivers poll
        self._listened_at = LONG_AGO  # when we last tried
        self._channels = {CHANNEL}
        self._is_closed = False
        self._keeps_statements: bool | None = None  # prepared ones; None: not found out yet
        self.incarnation = ""  # of the schema; known after `prepare`

    async def prepare(self) -> None:
        """Install or upgrade the schema. Refuse a database in which the queue is not safe."""
        await self.check_server()
        (row,) = await self.call(f"SELECT ({_HAS_SCHEMA}) AS has_schema")
        if not row["has_schema"]:
            await self._change_schema()
        (newest,) = await self.call(_INSTALLED)
        _check_version(newest["version"])
        if newest["revision"] < REVISION:
            await self._change_schema()
        self.incarnation = newest["incarnation"]

    async def check_server(self) -> None:
        """Refuse a server on which no queue is safe."""
        if self._keeps_statements is None:
            # A connection is one session of the server if the process that answers is the one that
            # was announced. A pooler may give each call to another session, and makes a number up.
            async with _our_errors(CALL_TIMEOUT_SECONDS):
                connection = await self._connect()
                try:
                    process = await connection.fetchval("SELECT pg_backend_pid()")
                    self._keeps_statements = process == connection.get_server_pid()
                finally:
                    await _close(connection)
        (row,) = await self.call(
            "SELECT current_setting('server_version_num')::int / 10000 AS server,"
            " current_setting('transaction_isolation') AS isolation"
        )
        if row["server"] < OLDEST_SERVER_VERSION:
            raise QueueRefused(
                f"the server is PostgreSQL {row['server']}, below {OLDEST_SERVER_VERSION}"
            )
        if row["isolation"] != "read committed":
            raise QueueRefused(f"the default transaction isolation is {row['isolation']!r}")

    async def call(self, query: str, *arguments: object) -> Sequence[Any]:
        """Run one statement in one transaction. Rows are read by the names of their columns."""
        async with self._places:
            if self._is_closed:
                raise Disconnected("the database is closed")
            async with _our_errors(CALL_TIMEOUT_SECONDS):
                try:
                    return await self._call(query, arguments)
                except _LOST_STATEMENT:  # before it did anything
                    self._keeps_statements = False
                    return await self._call(query, arguments)

    async def claim(self, query: str, *arguments: object) -> Sequence[Any]:
        """Run a statement that may have to wait for other processes."""
        async with self._claims:
            return await self.call(query, *arguments)

    def signal(self, queue: str) -> Signal:
        return self._signals[queue]

    def add_channel(self, channel: str) -> None:
        """Let empty notifications of that channel ring the signal of the same name."""
        if channel not in self._channels:
            self._channels.add(channel)
            self._stop_listening()  # the next connection listens to all

    async def wait(self, rung: asyncio.Event, seconds: float) -> None:
        """Wait for the signal, at most `seconds`. Other processes ring it if that is possible."""
        if not self._is_closed:
            await self._listen()
        await wait_for_signal(rung, seconds)

    async def close(self) -> None:
        self._is_closed = True
        self._stop_listening()
        while self._idle:
            await _close(self._idle.pop())

    async def _call(self, query: str, arguments: Sequence[object]) -> Sequence[Any]:
        connection = None
        while self._idle and (connection is None or connection.is_closed()):
            connection = self._idle.pop()
        if connection is None or connection.is_closed():
            connection = await self._connect()
        try:
            rows: Sequence[Any] = await connection.fetch(query, *arguments)
        except _BAD_DATA:
            self._put_back(connection)
            raise
        except BaseException:
            # What happened to one connection has probably happened to all.
            connection.terminate()
            self._stop_listening()
            while self._idle:
                self._idle.pop().terminate()
            raise
        self._put_back(connection)
        return rows

    def _put_back(self, connection: asyncpg.Connection) -> None:
        if self._is_closed:
            connection.terminate()
        else:
            self._idle.append(connection)

    async def _connect(self) -> asyncpg.Connection:
        return await asyncpg.connect(
            self._dsn,
            password=self._password,
            timeout=CONNECT_TIMEOUT_SECONDS,
            statement_cache_size=KEPT_STATEMENTS if self._keeps_statements else 0,
            server_settings={"application_name": "message-router"},
        )

    async def _listen(self) -> None:
        """Listen for what other processes publish, which is faster than polling (WQ-6).

        There is no task for it: a receiver that starts to wait opens the connection again, but not
        all the time.
        """
        is_open = self._listener is not None and not self._listener.is_closed()
        if is_open or loop_time() < self._listened_at + LISTEN_AGAIN_SECONDS:
            return
        self._listened_at = loop_time()
        try:
            async with _our_errors(LISTEN_TIMEOUT_SECONDS):
                connection = await self._connect()
                try:
                    for channel in self._channels:
                        await connection.add_listener(channel, self._ring)
                except BaseException:
                    connection.terminate()
                    raise
        except BrokerError as error:
            log.info("not listening for notifications, only polling: %s", error)
        else:
            self._listener = connection

    def _stop_listening(self) -> None:
        listener, self._listener = self._listener, None
        self._listened_at = LONG_AGO
        if listener is not None:
            listener.terminate()

    def _ring(self, _connection: object, _pid: int, channel: str, queue: str) -> None:
        self._signals[queue or channel].ring()

    async def _change_schema(self) -> None:
        """Install or upgrade it in one transaction. A process that comes second finds it done."""
        async with _our_errors(INSTALL_TIMEOUT_SECONDS):
            connection = await self._connect()
            try:
                async with connection.transaction(isolation="read_committed"):
                    await connection.execute(_LOCK_SCHEMA)
                    scripts = await _missing_scripts(connection)
                    for script in scripts:
                        await _run(connection, script)
            finally:
                connection.terminate()
        if scripts:
            versions = {"version": SCHEMA_VERSION, "revision": REVISION}
            log.info("database schema installed or upgraded", extra=versions)


async def _missing_scripts(connection: asyncpg.Connection) -> Sequence[str]:
    """Return what has to be run to install the schema, or to upgrade it."""
    if not await connection.fetchval(_HAS_SCHEMA):
        return ("schema.sql", "functions.sql")
    installed = await connection.fetchrow(_INSTALLED)
    _check_version(installed["version"])
    if installed["revision"] >= REVISION:
        return ()
    older = range(installed["revision"], REVISION)
    return (*(f"upgrade_{revision}.sql" for revision in older), "functions.sql")


async def _run(connection: asyncpg.Connection, script: str) -> None:
    try:
        await connection.execute(_FILES.joinpath(script).read_text())
    except asyncpg.InsufficientPrivilegeError as error:
        raise QueueRefused(
            f"the user may not install or upgrade the schema ({_kind(error)} in {script}): do it as"
            " its owner, see docs/brokers/postgres.md"
        ) from None


def _check_version(version: int) -> None:
    if version > SCHEMA_VERSION:
        raise QueueRefused(
            f"a newer router installed the schema: it has version {version}, this router knows"
            f" version {SCHEMA_VERSION}. Use the newer router, or another database"
        )
    if version < SCHEMA_VERSION:
        raise QueueRefused(
            f"the schema has version {version}, this router needs version {SCHEMA_VERSION}: empty"
            " the queues with the router that installed it, then drop the schema message_router"
        )


async def _close(connection: asyncpg.Connection) -> None:
    """Close the connection in order if the server answers, else cut it."""
    try:
        await connection.close(timeout=CLOSE_TIMEOUT_SECONDS)
    except (TimeoutError, OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
        connection.terminate()


@asynccontextmanager
async def _our_errors(seconds: float) -> AsyncIterator[None]:
    """Set a time limit. Turn what the engine can act on into our errors, without the URI."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except _REFUSED as error:
        raise QueueRefused(f"the database refuses us: {_kind(error)}") from None
    except _BAD_DATA as error:
        raise DataRefused(f"the database refuses the data: {_kind(error)}") from None
    except (asyncpg.ClientConfigurationError, UnicodeError):  # or its host is no name
        raise QueueRefused("the URI cannot be used to connect") from None
    except TimeoutError:
        raise Disconnected("the database does not answer") from None
    except asyncpg.PostgresError as error:
        raise Disconnected(f"the database says: {error.args[0]}") from None
    except (asyncpg.InterfaceError, asyncpg.InternalClientError, OSError) as error:
        raise Disconnected(f"no connection to the database: {_kind(error)}") from None


def _kind(error: Exception) -> str:
    """Return only the kind of the error: its text may name users, hosts, paths and data."""
    return type(error).__name__
