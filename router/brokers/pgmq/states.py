"""What a consumer of a PGMQ queue keeps of its messages, in rows of the work queue (CMD-14)."""

from collections.abc import Sequence
from typing import Any, Final, cast

import msgspec

from router.brokers.kit import loop_time
from router.brokers.pgmq.database import PgmqDatabase
from router.brokers.pgmq.table import PgmqLease, PgmqTable, quoted_table
from router.brokers.postgres.work_queue import (
    CONFIGURE,
    ending_columns,
    failure_columns,
    limit_results,
)
from router.brokers.work_queue import ResultLimit
from router.brokers.workers import ConsumerIdentity
from router.core.config import QueueConfig
from router.core.message import Handle
from router.core.outcome import ACCEPTED
from router.ports import Finish, Nack

TEND_SECONDS: Final = 1.0  # between two removals of old rows …
TEND_MESSAGES: Final = 500  # … unless so many have come
SWEEP_SECONDS: Final = 30.0
SWEPT_ROWS: Final = 2_000  # at once

_PRUNE: Final = "SELECT message_router.prune_pgmq($1, $2)"
# Messages that others have deleted or archived. They are looked for in the order of their rows, a
# few in each sweep.
_SWEEP: Final = """
WITH looked_at AS MATERIALIZED (
    SELECT id, pgmq_id, published_at, finished_at FROM message_router.queue_messages
    WHERE queue = $1 AND pgmq_id > $2 ORDER BY queue, pgmq_id LIMIT $3
), gone AS (
    DELETE FROM message_router.queue_messages AS message USING looked_at
    WHERE message.id = looked_at.id AND looked_at.finished_at IS NULL AND message.batch IS NULL
      AND looked_at.published_at < clock_timestamp() - interval '1 minute'
      AND NOT EXISTS (
          SELECT FROM {table} AS waiting
          WHERE waiting.msg_id = looked_at.pgmq_id AND waiting.enqueued_at = looked_at.published_at
      )
)
SELECT CASE WHEN count(*) = $3 THEN max(pgmq_id) ELSE 0 END AS next FROM looked_at
"""


class PgmqStates:
    def __init__(
        self,
        database: PgmqDatabase,
        table: PgmqTable,
        queue: QueueConfig,
        identity: ConsumerIdentity,
        results: ResultLimit,
    ) -> None:
        self._database = database
        self._name = table.states
        self._queue = queue.name
        self._identity = identity
        self._results = results
        self._sweep = _SWEEP.format(table=quoted_table("q", table.name))
        self._tended_at = self._swept_at = loop_time()
        self._untended = 0  # messages that have come since
        self._swept_to = 0
        routes = {
            kind: {"pool": route.pool, "group": route.group_field} for kind, route in queue.routes
        }
        self.claim_arguments = (
            self._name,
            identity.id,
            identity.dedup_window,
            msgspec.json.encode(routes).decode(),
        )

    async def configure(self) -> None:
        keep = self._identity.dedup_window
        results = max(keep, self._identity.result_retention)
        await self._database.call(CONFIGURE, self._name, keep, 0.0, results)

    def came(self, rows: Sequence[Any]) -> Sequence[Any]:
        """Return those of these messages that are to be handed out: not what has succeeded."""
        self._untended += len(rows)
        for row in rows:
            if row["differs"]:
                text = "a message came again with the id of one that has succeeded, and with other"
                self._identity.advise(self._queue, f"{text} content: it runs")
        return [row for row in rows if not row["is_copy"]]

    def nack_columns(self, items: Sequence[Nack]) -> tuple[Any, ...]:
        return (
            state_ids([item.handle for item in items]),
            [item.tally.failures for item in items],
            [item.tally.requests for item in items],
            *failure_columns(items),
        )

    def acceptance_columns(self, items: Sequence[Finish]) -> tuple[Any, ...] | None:
        """Return what `accept` is given, if these were accepted with nothing to keep or to send."""
        if any(item.ending is not ACCEPTED or item.tally or item.outgoing for item in items):
            return None
        return state_ids([item.handle for item in items]), self._identity.dedup_window

    def ending_columns(self, items: Sequence[Finish]) -> tuple[Any, ...]:
        """Return what is kept of these ends. Columns of which nothing is kept are empty."""
        ids = state_ids([item.handle for item in items])
        columns = (column or () for column in ending_columns(items))
        were_cancelled = [item.ending.is_cancelled for item in items]
        return (ids, *columns, were_cancelled, self._identity.dedup_window)

    async def limit_results(self, items: Sequence[Finish]) -> None:
        if self._results.is_due(items):
            await limit_results(self._database, self._results)

    async def tend(self) -> None:
        """Remove what is old, now and then."""
        now = loop_time()
        if self._untended < TEND_MESSAGES and now < self._tended_at + TEND_SECONDS:
            return
        await self._database.call(_PRUNE, self._name, max(self._untended, TEND_MESSAGES))
        self._untended, self._tended_at = 0, now
        if now >= self._swept_at + SWEEP_SECONDS:
            (row,) = await self._database.call(self._sweep, self._name, self._swept_to, SWEPT_ROWS)
            self._swept_at, self._swept_to = now, row["next"]


def state_ids(handles: Sequence[Handle]) -> Sequence[int]:
    return [lease.state_id for lease in cast("Sequence[PgmqLease]", handles)]
