"""The order store of one queue in PostgreSQL (ORD-4 to ORD-8)."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from router.brokers.postgres.database import PostgresDatabase
from router.brokers.postgres.work_queue import (
    FINISH,
    ending_columns,
    optional_text,
    outgoing_columns,
    text,
)
from router.brokers.work_queue import (
    GROUPS_AT_ONCE,
    HELD_UNTIL,
    MAX_ERROR_CHARACTERS,
    no_local_queues,
    payload_size,
    stored_groups,
)
from router.core.message import DEFAULT_POOL, HIGHEST_PRIORITY
from router.core.order import ORDER_PREFIX, GroupKey
from router.core.outcome import Ending, Failure
from router.ports import Finish, HeldLetter, StoredGroup, StoredMessage, StoreSize

_STORED_AS_HELD: Final = 0

# As the function `publish` does it. On its own: it changes nothing that a lost append could need.
_FORGET: Final = """
UPDATE message_router.queue_messages AS message SET identity = NULL
FROM unnest($2::text[]) AS item (identity)
WHERE message.queue = $1 AND message.identity = item.identity
  AND coalesce(finished_at, clock_timestamp())
      NOT BETWEEN clock_timestamp() - make_interval(secs => $3)
          AND clock_timestamp() + make_interval(secs => $3)
"""
_APPEND: Final = """
WITH added AS (
    INSERT INTO message_router.queue_messages (
        queue, message_id, identity, pool, group_id, priority, body, stored_bytes, not_before,
        correlation_id, payload_size, attempts, posts, run_after, last_error, lease_token,
        error_code, http_status
    )
    SELECT $1, item.message_id, item.identity, item.pool, item.group_id, item.priority, item.body,
           length(item.body), to_timestamp(item.not_before), item.correlation_id,
           item.payload_size, item.attempts, item.posts,
           CASE WHEN item.delay > 0 THEN clock_timestamp() + make_interval(secs => item.delay) END,
           nullif(item.error, ''), item.token, item.code, item.status
    FROM unnest(
             $2::text[], $3::text[], $4::text[], $5::text[], $6::smallint[], $7::bytea[],
             $8::float8[], $9::text[], $10::integer[], $11::integer[], $12::integer[],
             $13::float8[], $14::text[], $15::bigint[], $16::text[], $17::integer[]
         ) WITH ORDINALITY AS item (
             message_id, identity, pool, group_id, priority, body, not_before, correlation_id,
             payload_size, attempts, posts, delay, error, token, code, status, number
         )
    ORDER BY item.number
    ON CONFLICT DO NOTHING
    RETURNING stored_bytes
), grown AS (
    INSERT INTO message_router.order_sizes (queue, messages, bytes)
    SELECT $1, count(*), sum(stored_bytes) FROM added HAVING count(*) > 0
)
SELECT count(*)::integer AS messages FROM added
"""
# The first message of each group. Looking for the next group takes one look into an index, however
# many messages wait in this one.
UNSETTLED: Final = """
WITH RECURSIVE known AS (
    (
        SELECT group_key, pool, group_id FROM message_router.queue_messages
        WHERE queue = $1 AND group_key IS NOT NULL AND finished_at IS NULL
          AND ($2::text IS NULL OR group_key > hashtextextended(
              length($2)::text || ' ' || $2 || ' ' || $3::text, 0
          ))
        ORDER BY group_key, high_priority, id LIMIT 1
    )
    UNION ALL
    SELECT next.* FROM known CROSS JOIN LATERAL (
        SELECT message.group_key, message.pool, message.group_id
        FROM message_router.queue_messages AS message
        WHERE message.queue = $1 AND message.group_key IS NOT NULL
          AND message.finished_at IS NULL AND message.group_key > known.group_key
        ORDER BY message.group_key, message.high_priority, message.id LIMIT 1
    ) AS next
)
SELECT pool, group_id FROM known LIMIT $4
"""
STORED: Final = """
SELECT wanted.pool, wanted.group_id FROM (
    SELECT pool, group_id, hashtextextended(length(pool)::text || ' ' || pool || ' ' || group_id, 0)
    FROM unnest($2::text[], $3::text[]) AS given (pool, group_id)
) AS wanted (pool, group_id, key) CROSS JOIN LATERAL (
    SELECT FROM message_router.queue_messages AS message
    WHERE message.queue = $1 AND message.group_key IS NOT NULL AND message.finished_at IS NULL
      AND message.group_key BETWEEN wanted.key AND wanted.key
    ORDER BY message.group_key, message.high_priority, message.id LIMIT 1
) AS first
"""
# The sum is that of the rows from before they are replaced by it.
SIZE: Final = """
WITH folded AS (
    DELETE FROM message_router.order_sizes WHERE ctid = ANY (ARRAY(
        SELECT ctid FROM message_router.order_sizes WHERE queue = $1 FOR UPDATE SKIP LOCKED
    ))
    RETURNING messages, bytes
), total AS (
    INSERT INTO message_router.order_sizes (queue, messages, bytes)
    SELECT $1, sum(messages), sum(bytes) FROM folded HAVING count(*) > 0
)
SELECT coalesce(sum(messages), 0)::bigint AS messages, coalesce(sum(bytes), 0)::bigint AS bytes,
       coalesce(extract(epoch FROM clock_timestamp() - (
           SELECT published_at FROM message_router.queue_messages
           WHERE queue BETWEEN $1 AND $1 AND stored_bytes IS NOT NULL AND finished_at IS NULL
           ORDER BY queue, id LIMIT 1
       )), 0)::float8 AS oldest
FROM message_router.order_sizes WHERE queue = $1
"""
_COUNT_STORED: Final = """
SELECT queue, sum(messages)::bigint AS messages FROM message_router.order_sizes
WHERE starts_with(queue, $1) GROUP BY queue HAVING sum(messages) > 0
"""
_COUNT_HELD: Final = f"""
SELECT count(*) AS groups FROM message_router.queue_messages
WHERE queue = $1 AND finished_at IS NULL AND run_after = to_timestamp({HELD_UNTIL})
"""  # noqa: S608  a number
# Groups and what is in front of their lanes; of one group if $2 is given.
_GROUPS: Final = """
SELECT first.pool, first.group_id, first.message_id, first.state, first.attempts, first.last_error,
       extract(epoch FROM first.published_at)::float8 AS since,
       extract(epoch FROM first.not_before)::float8 AS not_before,
       extract(epoch FROM first.run_after)::float8 AS wakes_at, (
           SELECT count(*) FROM message_router.queue_messages AS mate
           WHERE mate.queue = $1 AND mate.group_key = first.group_key AND mate.finished_at IS NULL
       ) AS messages
FROM (
    SELECT DISTINCT ON (group_key, high_priority) *
    FROM message_router.queue_messages
    WHERE queue = $1 AND group_key IS NOT NULL AND finished_at IS NULL
      AND ($2::text IS NULL OR group_key = hashtextextended(
          length($2)::text || ' ' || $2 || ' ' || $3::text, 0
      ))
    ORDER BY group_key, high_priority, id
) AS first
WHERE $2::text IS NULL OR (first.pool = $2 AND first.group_id = $3)
ORDER BY first.id LIMIT $4
"""
_HELD_GROUPS: Final = _GROUPS.replace(
    "AND finished_at IS NULL\n      AND ($2",
    f"AND finished_at IS NULL\n      AND run_after = to_timestamp({HELD_UNTIL})\n      AND ($2",
)
_IDS: Final = """
SELECT message_id FROM message_router.queue_messages
WHERE queue = $1 AND finished_at IS NULL AND pool = $2 AND group_id = $3
  AND group_key = hashtextextended(length($2)::text || ' ' || $2 || ' ' || $3, 0)
ORDER BY high_priority DESC, id LIMIT $4
"""
_GROUP_OF: Final = """
SELECT pool, group_id FROM message_router.queue_messages
WHERE message_id = $2 AND queue = $1 AND finished_at IS NULL
ORDER BY message_id, id LIMIT 1
"""

# The first message of each lane of the group, if it was given up and holds the group (ORD-11).
_HELD: Final = f"""
SELECT first.* FROM (VALUES (false), (true)) AS tier (high) CROSS JOIN LATERAL (
    SELECT id, message_id, group_id, pool, body, lease_token, last_error, error_code, http_status,
           run_after
    FROM message_router.queue_messages
    WHERE queue = $1 AND finished_at IS NULL AND high_priority = tier.high
      AND group_key = hashtextextended(length($2)::text || ' ' || $2 || ' ' || $3, 0)
    ORDER BY id LIMIT 1
) AS first
WHERE first.run_after = to_timestamp({HELD_UNTIL}) AND first.pool = $2 AND first.group_id = $3
LIMIT 1
"""  # noqa: S608  a number
_RETRY: Final = f"""
WITH due AS (
    UPDATE message_router.queue_messages
    SET run_after = NULL, not_before = NULL, lease_token = NULL, attempts = 0, posts = 0,
        last_error = NULL, error_code = NULL, http_status = NULL, body = $2
    WHERE id = $1 AND finished_at IS NULL AND run_after = to_timestamp({HELD_UNTIL})
    RETURNING id, queue, group_key
), changed AS (
    INSERT INTO message_router.queue_changes (queue, group_key) SELECT queue, group_key FROM due
)
SELECT id FROM due
"""  # noqa: S608  a number


class PostgresOrderLog:
    def __init__(self, database: PostgresDatabase, name: str, dedup_window: float) -> None:
        self._database = database
        self._name = name
        self._dedup_window = dedup_window

    async def append(self, items: Sequence[StoredMessage]) -> int:
        messages = [item.publication.message for item in items]
        keys = [text(f"={item.publication.dedup_key}") for item in items]
        await self._database.call(_FORGET, self._name, keys, self._dedup_window)
        rows = await self._database.call(
            _APPEND,
            self._name,
            [text(message.id) for message in messages],
            keys,
            [text(message.pool or DEFAULT_POOL) for message in messages],
            [optional_text(item.group) for item in items],
            # Its group is one lane, whatever is in it.
            [min(message.level, HIGHEST_PRIORITY - 1) for message in messages],
            [item.publication.body for item in items],
            [
                item.publication.not_before if item.given_up is None else HELD_UNTIL
                for item in items
            ],
            [optional_text(message.correlation_id) for message in messages],
            [payload_size(message) for message in messages],
            [item.tally.failures for item in items],
            [item.tally.requests for item in items],
            [item.delay for item in items],
            [text(item.error[:MAX_ERROR_CHARACTERS]) for item in items],
            # As if it had been claimed once: `finish` ends it with this token.
            [None if item.given_up is None else _STORED_AS_HELD for item in items],
            [None if item.given_up is None else text(item.given_up.code) for item in items],
            [None if item.given_up is None else item.given_up.http_status for item in items],
        )
        self._database.signal(self._name).ring()
        return int(rows[0]["messages"])

    async def unsettled_groups(self, after: GroupKey | None = None) -> Sequence[GroupKey]:
        pool, name = (None, None) if after is None else map(text, after)
        rows = await self._database.call(UNSETTLED, self._name, pool, name, GROUPS_AT_ONCE)
        return [(row["pool"], row["group_id"]) for row in rows]

    async def which_are_stored(self, groups: Collection[GroupKey]) -> Collection[GroupKey]:
        asked = {(text(pool), text(group)): (pool, group) for pool, group in groups}
        pools, names = [pool for pool, _ in asked], [group for _, group in asked]
        rows = await self._database.call(STORED, self._name, pools, names)
        return [asked[row["pool"], row["group_id"]] for row in rows]

    async def size(self) -> StoreSize:
        (row,) = await self._database.call(SIZE, self._name)
        return StoreSize(row["messages"], row["bytes"], row["oldest"])

    async def groups(self, limit: int, *, only_held: bool = False) -> Sequence[StoredGroup]:
        query = _HELD_GROUPS if only_held else _GROUPS
        return stored_groups(await self._database.call(query, self._name, None, None, limit))

    async def count_stored(self) -> Mapping[str, int]:
        rows = await self._database.call(_COUNT_STORED, ORDER_PREFIX)
        return {row["queue"]: row["messages"] for row in rows}

    async def count_held(self) -> int:
        (row,) = await self._database.call(_COUNT_HELD, self._name)
        return int(row["groups"])

    async def find_group(self, group: GroupKey) -> StoredGroup | None:
        pool, name = group
        rows = await self._database.call(_GROUPS, self._name, text(pool), text(name), 2)
        return next(iter(stored_groups(rows)), None)

    async def ids_of(self, group: GroupKey, limit: int) -> Sequence[str]:
        pool, name = group
        rows = await self._database.call(_IDS, self._name, text(pool), text(name), limit)
        return [row["message_id"] for row in rows]

    async def group_of(self, message_id: str) -> GroupKey | None:
        rows = await self._database.call(_GROUP_OF, self._name, text(message_id))
        found = [(row["pool"], row["group_id"]) for row in rows if row["group_id"] is not None]
        return next(iter(found), None)

    async def held_letter(self, group: GroupKey) -> HeldLetter | None:
        for row in await self._held(group):
            return HeldLetter(row["message_id"], row["body"])
        return None

    async def retry_letter(self, group: GroupKey, message_id: str, body: bytes) -> bool:
        for row in await self._held(group, message_id):
            done = await self._database.call(_RETRY, row["id"], body)
            self._database.signal(self._name).ring()
            return bool(done)
        return False

    async def release(self, group: GroupKey, message_id: str) -> bool:
        for row in await self._held(group, message_id):
            why = Failure(row["error_code"], row["last_error"] or "", row["http_status"])
            end = Finish(None, Ending(why))
            lost = await self._database.call(
                FINISH,
                [row["id"]],
                [row["lease_token"]],
                *ending_columns([end]),
                self._dedup_window,
                *outgoing_columns([()], no_local_queues),
            )
            self._database.signal(self._name).ring()
            return not lost
        return False

    async def _held(self, group: GroupKey, message_id: str | None = None) -> Sequence[Any]:
        """Return the message that holds the group, if there is one; or only if it is this one."""
        pool, name = group
        rows = await self._database.call(_HELD, self._name, text(pool), text(name))
        wanted = None if message_id is None else text(message_id)
        return [row for row in rows if wanted in (None, row["message_id"])]
