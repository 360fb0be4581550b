"""A work queue in PostgreSQL beyond consuming and publishing (CMD-2 to CMD-10)."""

from collections.abc import Callable, Sequence
from typing import Any, Final, cast

from router.brokers.postgres.database import PostgresDatabase
from router.brokers.postgres.work_queue import (
    extra_columns,
    optional_text,
    outgoing_columns,
    places,
    publication_columns,
    text,
)
from router.brokers.work_queue import (
    HELD_UNTIL,
    LAST_ROW_ID,
    ROWS_PER_PAGE,
    LocalQueues,
    batch_conflict,
    batch_record,
    callback_prefix,
    message_page,
    message_record,
    ordered_group,
    state_asked_for,
    why_not_cancelled,
)
from router.core.config import QueueConfig
from router.core.identity import digest_of
from router.core.message import DEFAULT_POOL
from router.ports import (
    BatchRecord,
    Cancellation,
    CancelReply,
    MessageFilter,
    MessagePage,
    MessageRecord,
    Publication,
    no_reply,
)

# What a record is made of, without its result.
RECORD: Final = """
       state, attempts, posts, pool, group_id,
       extract(epoch FROM published_at)::float8 AS published_at,
       extract(epoch FROM not_before)::float8 AS not_before, run_after IS NOT NULL AS is_delayed,
       extract(epoch FROM run_after)::float8 AS due_at,
       extract(
           epoch FROM greatest(published_at, last_claimed_at, returned_at, finished_at)
       )::float8 AS updated_at,
       extract(epoch FROM first_claimed_at)::float8 AS first_claimed_at,
       extract(epoch FROM finished_at)::float8 AS finished_at, worker_id, correlation_id,
       batch_id, payload_size, last_error, error_code, http_status
"""
_FIND: Final = f"""
SELECT {RECORD}, result, result_omitted
FROM (
    SELECT * FROM message_router.queue_messages WHERE message_id = $2 AND queue = $1
    ORDER BY message_id, id DESC LIMIT 1
) AS message
LEFT JOIN message_router.queue_batches AS batch ON batch.number = message.batch
"""  # noqa: S608  columns
# Of the newest $8 messages before that one, of all queues, those that fit. Each row says how far
# the query has looked, if there is more to look at: not if all that it looked at is too old.
_PAGE: Final = f"""
WITH looked_at AS MATERIALIZED (
    SELECT id, queue, message_id, state, attempts, posts, pool, group_id, published_at, not_before,
           run_after, first_claimed_at, last_claimed_at, returned_at, finished_at, worker_id,
           correlation_id, batch, payload_size, last_error, error_code, http_status
    FROM message_router.queue_messages
    WHERE id < $2 ORDER BY id DESC LIMIT $8
), fitting AS (
    SELECT looked_at.*, batch_id
    FROM looked_at LEFT JOIN message_router.queue_batches AS entry ON entry.number = batch
    WHERE looked_at.queue = $1
      AND ($3::text IS NULL
           OR CASE WHEN not_before = to_timestamp({HELD_UNTIL}) THEN 'failed' ELSE state END = $3)
      AND ($4::boolean IS NULL OR $4 = (
          run_after IS NOT NULL AND not_before IS NOT NULL AND first_claimed_at IS NULL
      ))
      AND ($5::text IS NULL OR group_id = $5)
      AND ($6::float8 IS NULL OR published_at >= to_timestamp($6))
    ORDER BY id DESC LIMIT $7
)
SELECT looked_to, id, message_id, {RECORD}, NULL AS result, false AS result_omitted
FROM (
    SELECT CASE
        WHEN count(*) = $8 AND coalesce(max(published_at) >= to_timestamp($6), true) THEN min(id)
    END AS looked_to
    FROM looked_at
) AS looked LEFT JOIN fitting ON true
ORDER BY id DESC
"""  # noqa: S608  columns
_CANCELLABLE: Final = f"""
SELECT count(*) AS known,
       count(*) FILTER (WHERE finished_at IS NULL) AS unsettled,
       max(id) FILTER (WHERE finished_at IS NULL) AS id,
       max(CASE WHEN not_before = to_timestamp({HELD_UNTIL}) THEN 'failed' ELSE state END)
           FILTER (WHERE finished_at IS NULL) AS state,
       (array_agg(body) FILTER (WHERE finished_at IS NULL))[1] AS body
FROM message_router.queue_messages WHERE message_id = $2 AND queue = $1
"""  # noqa: S608  a number
_CANCEL: Final = f"SELECT message_router.cancel({places(16)}) AS is_done"
_ASK_TO_END: Final = (
    "UPDATE message_router.queue_messages SET is_cancelled = true"
    " WHERE id = $1 AND state = 'in-flight' RETURNING id"
)
_ADD_TO_BATCH: Final = f"SELECT * FROM message_router.add_to_batch({places(19)})"  # noqa: S608  numbers
_FIND_BATCH: Final = """
SELECT size, total, succeeded, failed, cancelled,
       extract(epoch FROM callback_at)::float8 AS callback_at
FROM message_router.queue_batches WHERE queue = $1 AND batch_id = $2
"""
_PUBLISH_TICK: Final = f"SELECT message_router.publish_tick({places(14)}) AS is_newer"
_FORGET_TICK: Final = (
    "DELETE FROM message_router.queue_ticks WHERE queue = $1 AND schedule = $2 AND tick = $3"
)
_LAST_TICK: Final = "SELECT tick FROM message_router.queue_ticks WHERE queue = $1 AND schedule = $2"


def _as_given(item: Publication) -> Publication:
    return item


class PostgresMessageStore:
    """The messages and batches of one queue."""

    def __init__(
        self,
        database: PostgresDatabase,
        name: str,
        *,
        dedup_window: float,
        local_queues: LocalQueues[str],
        stored: Callable[[Publication], Publication] = _as_given,
    ) -> None:
        """`stored`: how the queue has a publication."""
        self._stored = stored
        self._database = database
        self._name = name
        self._dedup_window = dedup_window
        self._local_queues = local_queues

    def takes(self, queue: QueueConfig) -> bool:
        return self._local_queues(queue) is not None

    async def find(self, message_id: str) -> MessageRecord | None:
        rows = await self._database.call(_FIND, self._name, text(message_id))
        return message_record(message_id, rows[0]) if rows else None

    async def page(
        self, wanted: MessageFilter, *, limit: int, before: int | None = None
    ) -> MessagePage:
        rows = await self._database.call(
            _PAGE,
            self._name,
            LAST_ROW_ID if before is None else before,
            *state_asked_for(wanted.status),
            optional_text(wanted.group),
            wanted.since,
            limit + 1,
            ROWS_PER_PAGE,
        )
        return message_page(rows, limit)

    async def cancel(
        self, message_id: str, reply: CancelReply = no_reply, *, running: bool = False
    ) -> Cancellation:
        while True:
            (row,) = await self._database.call(_CANCELLABLE, self._name, text(message_id))
            problem = why_not_cancelled(
                row["known"], row["unsettled"], row["state"], running=running
            )
            if problem is Cancellation.ASKED:
                if await self._database.call(_ASK_TO_END, row["id"]):
                    return problem
                continue  # it was settled meanwhile
            if problem is not None:
                return problem
            broker_id = f"{self._database.incarnation}-{row['id']}"
            outgoing = outgoing_columns([reply(broker_id, row["body"])], self._local_queues)
            (answer,) = await self._database.claim(
                _CANCEL, self._name, text(message_id), row["id"], self._dedup_window, *outgoing
            )
            if answer["is_done"]:
                for name in {self._name, *cast("Sequence[str]", outgoing[1])}:
                    self._database.signal(name).ring()
                return Cancellation.CANCELLED

    async def open_batch(
        self, batch_id: str, size: int | None, callback: Publication, items: Sequence[Publication]
    ) -> int:
        message, callback = callback.message, self._stored(callback)
        columns = (
            size,
            text(message.id),
            text(message.pool or DEFAULT_POOL),
            optional_text(ordered_group(message)),
            message.level,
            callback.not_before,
            optional_text(message.correlation_id),
            callback_prefix(callback.body),
        )
        return await self._add(batch_id, columns, items)

    async def add_to_batch(self, batch_id: str, items: Sequence[Publication]) -> int:
        return await self._add(batch_id, (None,) * 8, items)

    async def find_batch(self, batch_id: str) -> BatchRecord | None:
        rows = await self._database.call(_FIND_BATCH, self._name, text(batch_id))
        return batch_record(batch_id, rows[0]) if rows else None

    async def publish_tick(self, schedule: str, tick: int, item: Publication) -> bool:
        columns = publication_columns([self._stored(item)])
        (row,) = await self._database.call(
            _PUBLISH_TICK, text(schedule), tick, self._dedup_window, [self._name], *columns
        )
        if row["is_newer"]:
            self._database.signal(self._name).ring()
        return bool(row["is_newer"])

    async def last_tick(self, schedule: str) -> int | None:
        rows = await self._database.call(_LAST_TICK, self._name, text(schedule))
        return rows[0]["tick"] if rows else None

    async def forget_tick(self, schedule: str, tick: int) -> None:
        await self._database.call(_FORGET_TICK, self._name, text(schedule), tick)

    async def _add(
        self, batch_id: str, callback: tuple[Any, ...], items: Sequence[Publication]
    ) -> int:
        members = {(text(item.message.id), digest_of(item.body)): item for item in items}
        stored = list(map(self._stored, members.values()))
        columns = publication_columns(stored)
        (row,) = await self._database.call(
            _ADD_TO_BATCH,
            self._name,
            text(batch_id),
            *callback,
            [message_id for message_id, _ in members],
            [digest for _, digest in members],
            *columns[2:6],
            *extra_columns(stored),
        )
        if row["problem"] is not None:
            raise batch_conflict(row["problem"], batch_id, row["size"], row["total"], row["added"])
        self._database.signal(self._name).ring()
        return int(row["added"])
