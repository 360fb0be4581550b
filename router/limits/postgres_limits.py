"""Shared limits in PostgreSQL: a row for each rate and each router, and the database's clock."""

from typing import Final

from router.brokers.postgres.database import PostgresDatabase
from router.core.sharing import RateTerms
from router.limits import SEEN_SECONDS, LimitsScope, limits_errors
from router.ports import Reserved

_IS_THERE: Final = "SELECT to_regclass('message_router.rate_limits') IS NOT NULL AS is_there"
# Looked for first: to create what exists needs rights that a router may not have.
_CREATE: Final = """
DO $$ BEGIN
    PERFORM pg_advisory_xact_lock(hashtextextended('message_router schema', 0));
    CREATE SCHEMA IF NOT EXISTS message_router;
    CREATE TABLE IF NOT EXISTS message_router.limited_routers (
        key     text        NOT NULL, -- what routers have in common that share limits
        router  text        NOT NULL, -- one process
        seen_at timestamptz NOT NULL,
        PRIMARY KEY (key, router)
    );
    CREATE TABLE IF NOT EXISTS message_router.rate_limits (
        key      text   NOT NULL,
        name     text   NOT NULL, -- the pool
        next_at  float8 NOT NULL, -- Unix time of the next slot
        step     float8 NOT NULL, -- seconds between two slots
        reserved int    NOT NULL, -- the last time
        asked_at float8 NOT NULL, -- also Unix seconds
        PRIMARY KEY (key, name)
    );
END $$
"""
_SEEN: Final = """
WITH gone AS (
    DELETE FROM message_router.limited_routers
    WHERE key = $1 AND seen_at < clock_timestamp() - interval '1 hour' AND router <> $2
), noted AS (
    INSERT INTO message_router.limited_routers (key, router, seen_at)
    VALUES ($1, $2, clock_timestamp())
    ON CONFLICT (key, router) DO UPDATE SET seen_at = clock_timestamp()
)
SELECT count(*) + 1 AS routers FROM message_router.limited_routers
WHERE key = $1 AND router <> $2 AND seen_at >= clock_timestamp() - make_interval(secs => $3)
"""
_ADD: Final = """
INSERT INTO message_router.rate_limits (key, name, next_at, step, reserved, asked_at)
VALUES ($1, $2, 0, $3, 0, 0) ON CONFLICT DO NOTHING
"""
# The clock is read once, and after the row is ours: the row may have been waited for. Slots that
# are forgotten by a crash of the server are over when it is back, so the commit need not be
# durable.
_RESERVE: Final = """
UPDATE message_router.rate_limits AS rate SET (next_at, step, reserved, asked_at) = (
    SELECT first_at + taken * $3::float8, $3::float8, taken, now_at
    FROM (
        SELECT first_at, now_at, greatest(
            $5::int, least($6::int, floor((now_at - first_at) / $3::float8)::int + 1)
        ) AS taken
        FROM (
            SELECT now_at, greatest(
                CASE WHEN rate.step <> $3::float8 AND rate.next_at > now_at
                    THEN now_at + (rate.next_at - now_at) * $3::float8 / rate.step
                    ELSE rate.next_at
                END,
                now_at - ($4::int - 1) * $3::float8
            ) AS first_at
            FROM (SELECT extract(epoch FROM clock_timestamp())::float8 AS now_at OFFSET 0) AS clock
        ) AS place
    ) AS portion
)
WHERE key = $1 AND name = $2
RETURNING reserved, next_at - reserved * step - asked_at AS delay,
    set_config('synchronous_commit', 'off', true)
"""


class PostgresLimits:
    def __init__(self, url: str, scope: LimitsScope) -> None:
        self._database = PostgresDatabase(url, is_operators=True)
        self._scope = scope
        self._is_prepared = False

    async def close(self) -> None:
        await self._database.close()

    async def reserve(self, name: str, terms: RateTerms, wanted: int) -> Reserved:
        key, step = self._scope.key, terms.interval
        rate = (key, name, step, terms.burst, terms.portion, wanted)
        with limits_errors():
            await self._prepare()
            rows = await self._database.call(_RESERVE, *rate)
            if not rows:
                await self._database.call(_ADD, key, name, step)
                rows = await self._database.call(_RESERVE, *rate)
        return Reserved(rows[0]["reserved"], rows[0]["delay"])

    async def count_routers(self) -> int:
        with limits_errors():
            await self._prepare()
            scope = self._scope
            (row,) = await self._database.call(_SEEN, scope.key, scope.process, SEEN_SECONDS)
        return int(row["routers"])

    async def _prepare(self) -> None:
        if self._is_prepared:
            return
        (row,) = await self._database.call(_IS_THERE)
        if not row["is_there"]:
            await self._database.call(_CREATE)
        self._is_prepared = True
