"""What is known of the messages in one PGMQ queue, beside what PGMQ knows (CMD-14)."""

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from router.brokers.pgmq.database import PgmqDatabase
from router.brokers.pgmq.lister import LIVE, NOTED, STATE_OF, PgmqLister
from router.brokers.pgmq.table import READ_BODY, PgmqItem, PgmqTable, item_columns, quoted_table
from router.brokers.postgres.store import RECORD, PostgresMessageStore
from router.brokers.postgres.work_queue import text
from router.brokers.work_queue import message_record, no_local_queues, why_not_cancelled
from router.core.config import QueueConfig
from router.ports import (
    Cancellation,
    CancelReply,
    DataRefused,
    MessageRecord,
    OutgoingMessage,
    Publication,
    no_reply,
)

T = TypeVar("T")

# What others have deleted or archived is unknown: nobody saw how it ended.
_FIND: Final = """
SELECT {record}, result, result_omitted
FROM (
    SELECT {state} AS state, {noted}, result, result_omitted
    FROM message_router.queue_messages AS noted
        LEFT JOIN {queue} AS waiting
            ON waiting.msg_id = noted.pgmq_id AND waiting.enqueued_at = noted.published_at
    WHERE noted.message_id = $2 AND noted.queue = $1
      AND (noted.finished_at IS NOT NULL OR waiting.msg_id IS NOT NULL)
    ORDER BY noted.message_id, noted.id DESC LIMIT 1
) AS message
LEFT JOIN message_router.queue_batches AS batch ON batch.number = message.batch
"""
# The unsettled ones are those that PGMQ has; rows of others may be left.
_CANCELLABLE: Final = """
WITH known AS MATERIALIZED (
    SELECT noted.id, pgmq_id, published_at, {state} AS state, noted.finished_at, read_ct, vt,
           convert_to({body}, 'UTF8') AS body, waiting.msg_id IS NOT NULL AS is_there
    FROM message_router.queue_messages AS noted
        LEFT JOIN {queue} AS waiting
            ON waiting.msg_id = noted.pgmq_id AND waiting.enqueued_at = noted.published_at
    WHERE noted.message_id = $2 AND noted.queue = $1
), unsettled AS (
    SELECT * FROM known WHERE finished_at IS NULL AND is_there
)
SELECT
    (SELECT count(*) FROM known WHERE finished_at IS NOT NULL OR is_there) AS known,
    (SELECT count(*) FROM unsettled) AS unsettled,
    ARRAY(SELECT id FROM known WHERE finished_at IS NULL AND NOT is_there) AS gone,
    id, pgmq_id, (extract(epoch FROM published_at) * 1000000)::bigint AS enqueued, state, read_ct,
    vt, body
FROM (SELECT) AS one LEFT JOIN (SELECT * FROM unsettled LIMIT 1) AS first ON true
"""
# Others may hold it: then it ends when the router gets it.
_ASK_TO_END: Final = (
    "UPDATE message_router.queue_messages SET is_cancelled = true"
    " WHERE id = $1 AND finished_at IS NULL RETURNING id"
)


class PgmqMessageStore:
    """The messages, batches and ticks of one queue."""

    def __init__(
        self,
        database: PgmqDatabase,
        table: PgmqTable,
        *,
        dedup_window: float,
        stored: Callable[[Publication], Publication],
        takes: Callable[[QueueConfig], bool],
        sent: Callable[[OutgoingMessage], PgmqItem],
    ) -> None:
        """`stored`: how PGMQ has a publication; `sent`: the same of what goes out with an end."""
        self._sent = sent
        self._stored = stored
        self._database = database
        self._table = table
        self._rows = PostgresMessageStore(
            database,
            table.states,
            dedup_window=dedup_window,
            local_queues=no_local_queues,
            stored=stored,
        )
        self._lister = PgmqLister(database, table)
        self.page = self._lister.page
        self.takes = takes
        self.find_batch = self._rows.find_batch
        self.last_tick = self._rows.last_tick
        self.forget_tick = self._rows.forget_tick
        state, waiting = STATE_OF.format(LIVE), quoted_table("q", table.name)
        self._find = _FIND.format(record=RECORD, state=state, noted=NOTED, queue=waiting)
        self._cancellable = _CANCELLABLE.format(state=state, queue=waiting, body=READ_BODY)

    async def find(self, message_id: str) -> MessageRecord | None:
        rows = await self._database.call(self._find, self._table.states, text(message_id))
        return message_record(message_id, rows[0]) if rows else None

    async def open_batch(
        self, batch_id: str, size: int | None, callback: Publication, items: Sequence[Publication]
    ) -> int:
        if not self._stored(callback).body.startswith(b"{"):
            raise DataRefused("PGMQ cannot store a callback that contains \\u0000")
        return self._rung(await self._rows.open_batch(batch_id, size, callback, items))

    async def add_to_batch(self, batch_id: str, items: Sequence[Publication]) -> int:
        return self._rung(await self._rows.add_to_batch(batch_id, items))

    async def publish_tick(self, schedule: str, tick: int, item: Publication) -> bool:
        return self._rung(await self._rows.publish_tick(schedule, tick, item))

    async def cancel(
        self, message_id: str, reply: CancelReply = no_reply, *, running: bool = False
    ) -> Cancellation:
        while True:
            (row,) = await self._database.call(
                self._cancellable, self._table.states, text(message_id)
            )
            problem = why_not_cancelled(
                row["known"], row["unsettled"], row["state"], running=running
            )
            if problem is Cancellation.ASKED:
                if await self._database.call(_ASK_TO_END, row["id"]):
                    return problem
                continue  # it was settled meanwhile
            if problem is not None:
                return problem
            outgoing = reply(f"{row['pgmq_id']}@{row['enqueued']}", row["body"])
            (answer,) = await self._database.call(
                self._table.cancel,
                self._table.name,
                row["id"],
                row["pgmq_id"],
                row["read_ct"],
                row["vt"],
                row["gone"],
                *item_columns(list(map(self._sent, outgoing)), with_states=True),
            )
            if answer["is_done"]:
                return self._rung(Cancellation.CANCELLED)

    def _rung(self, answer: T) -> T:
        """Return it. What waits for messages looks at once, as there may be some."""
        self._database.signal(self._table.channel).ring()
        return answer
