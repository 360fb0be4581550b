"""A leader lock in PostgreSQL: a row and the database's clock. It needs no session."""

from typing import Final

from router.brokers.postgres.database import PostgresDatabase
from router.locks import LockRequest, instance_of, lock_errors
from router.ports import LockState

_IS_THERE: Final = "SELECT to_regclass('message_router.leader_locks') IS NOT NULL AS is_there"
# Looked for first: to create what exists needs rights that a router may not have.
_CREATE: Final = """
DO $$ BEGIN
    PERFORM pg_advisory_xact_lock(hashtextextended('message_router schema', 0));
    CREATE SCHEMA IF NOT EXISTS message_router;
    CREATE TABLE IF NOT EXISTS message_router.leader_locks (
        key          text        PRIMARY KEY,
        owner        text        NOT NULL, -- the process, then its instance; '': released
        fence        bigint      NOT NULL, -- grows with every new owner
        refreshed_at timestamptz NOT NULL,
        expires_at   timestamptz NOT NULL
    );
END $$
"""
# The holder of the lock must still have it after a crash of the server, however the database
# is set up: hence the last column.
_DURABLY: Final = "set_config('synchronous_commit', 'on', true)"
_ACQUIRE: Final = f"""
INSERT INTO message_router.leader_locks AS held (key, owner, fence, refreshed_at, expires_at)
VALUES ($1, $2, 1, clock_timestamp(), clock_timestamp() + make_interval(secs => $3))
ON CONFLICT (key) DO UPDATE SET
    owner = excluded.owner,
    fence = held.fence + (held.owner <> excluded.owner)::int,
    refreshed_at = clock_timestamp(),
    expires_at = clock_timestamp() + make_interval(secs => $3)
WHERE held.owner = excluded.owner OR held.expires_at <= clock_timestamp()
RETURNING owner, fence, {_DURABLY}
"""  # noqa: S608  a constant
_LOOK: Final = """
SELECT owner, fence, extract(epoch FROM clock_timestamp() - refreshed_at)::float8 AS age
FROM message_router.leader_locks WHERE key = $1
"""
_RENEW: Final = f"""
UPDATE message_router.leader_locks SET
    refreshed_at = clock_timestamp(),
    expires_at = clock_timestamp() + make_interval(secs => $3)
WHERE key = $1 AND owner = $2 AND fence = $4
RETURNING {_DURABLY}
"""  # noqa: S608  a constant
_RELEASE: Final = """
UPDATE message_router.leader_locks SET owner = '', expires_at = clock_timestamp()
WHERE key = $1 AND owner = $2
"""
# A number is the fence of a lock that no router has.
_NUMBER: Final = "SELECT fence FROM message_router.leader_locks WHERE key = $1"
_KEEP_NUMBER: Final = f"""
INSERT INTO message_router.leader_locks AS kept (key, owner, fence, refreshed_at, expires_at)
VALUES ($1, '', $2, clock_timestamp(), clock_timestamp())
ON CONFLICT (key) DO UPDATE SET fence = $2, refreshed_at = clock_timestamp()
RETURNING {_DURABLY}
"""  # noqa: S608  a constant


class PostgresLocks:
    def __init__(self, url: str, request: LockRequest) -> None:
        self.database = PostgresDatabase(url, is_operators=True)
        self.is_prepared = False
        self._request = request

    def lock(self, name: str) -> "PostgresLock":
        return PostgresLock(self, self._request.of_queue(name))

    async def number(self, name: str) -> int:
        with lock_errors():
            await self.prepare()
            rows = await self.database.call(_NUMBER, self._request.number_key(name))
        return int(rows[0]["fence"]) if rows else 0

    async def keep_number(self, name: str, number: int) -> None:
        with lock_errors():
            await self.prepare()
            await self.database.call(_KEEP_NUMBER, self._request.number_key(name), number)

    async def close(self) -> None:
        await self.database.close()

    async def prepare(self) -> None:
        if not self.is_prepared:
            (row,) = await self.database.call(_IS_THERE)
            if not row["is_there"]:
                await self.database.call(_CREATE)
            self.is_prepared = True


class PostgresLock:
    def __init__(self, locks: PostgresLocks, request: LockRequest) -> None:
        self._locks = locks
        self._database = locks.database
        self._request = request

    async def acquire(self) -> LockState:
        request = self._request
        with lock_errors():
            await self._locks.prepare()
            taken = await self._database.call(_ACQUIRE, request.key, request.owner, request.ttl)
            if taken:
                return LockState(holder=request.instance, is_ours=True, fence=taken[0]["fence"])
            (row,) = await self._database.call(_LOOK, request.key)
        holder = instance_of(row["owner"])
        return LockState(holder=holder, is_ours=False, fence=row["fence"], age=row["age"])

    async def renew(self, fence: int) -> bool:
        key, owner, ttl = self._request.key, self._request.owner, self._request.ttl
        with lock_errors():
            return bool(await self._database.call(_RENEW, key, owner, ttl, fence))

    async def release(self) -> None:
        if self._locks.is_prepared:
            with lock_errors():
                await self._database.call(_RELEASE, self._request.key, self._request.owner)
