"""Looks through the messages of one PGMQ queue, and of its archive (CMD-2)."""

from typing import Final

import msgspec

from router.brokers.pgmq.table import GROUP_HEADER, TALLY_HEADER, quoted_table
from router.brokers.postgres.database import PostgresDatabase
from router.brokers.postgres.work_queue import optional_text
from router.brokers.work_queue import LAST_ROW_ID, ROWS_PER_PAGE, Row
from router.core.message import UNTRIED, Tally
from router.ports import MessageFilter, MessagePage, MessageRecord, MessageStatus

# Of the newest messages before that one, $6 of the queue and $6 of the archive, those that fit.
# Each row says how far the query has looked, if there is more to look at: not if all that it looked
# at is too old. Anybody may write messages: an id is an id only if it is text.
_PAGE: Final = """
WITH queued AS MATERIALIZED (
    SELECT msg_id, enqueued_at, vt, NULL::timestamptz AS archived_at, message,
           {headers}::jsonb AS headers, CASE
               WHEN vt <= clock_timestamp() THEN 'READY'
               WHEN read_ct = 0 THEN 'SCHEDULED'
               ELSE 'IN_FLIGHT'
           END AS status
    FROM {queue} WHERE msg_id < $1 ORDER BY msg_id DESC LIMIT $6
), archived AS MATERIALIZED (
    SELECT msg_id, enqueued_at, vt, archived_at, message, {headers}::jsonb AS headers,
           'FAILED' AS status
    FROM {archive} WHERE msg_id < $1 ORDER BY msg_id DESC LIMIT $6
), edge AS (
    SELECT greatest(
        (SELECT CASE WHEN count(*) = $6 THEN min(msg_id) END FROM queued),
        (SELECT CASE WHEN count(*) = $6 THEN min(msg_id) END FROM archived)
    ) AS msg_id
), looked_at AS (
    SELECT item.msg_id, enqueued_at, vt, archived_at, status,
           CASE jsonb_typeof(message) WHEN 'object' THEN message END AS message,
           CASE jsonb_typeof(headers) WHEN 'object' THEN headers END AS headers
    FROM (SELECT * FROM queued UNION ALL SELECT * FROM archived) AS item, edge
    WHERE item.msg_id >= coalesce(edge.msg_id, item.msg_id)
), fitting AS (
    SELECT * FROM looked_at
    WHERE ($2::text IS NULL OR status = $2)
      AND ($3::text IS NULL OR coalesce(headers ->> '{group}', message ->> 'messageGroupId') = $3)
      AND ($4::float8 IS NULL OR enqueued_at >= to_timestamp($4))
    ORDER BY msg_id DESC LIMIT $5
)
SELECT looked_to, msg_id AS id, status, {texts},
       headers ->> '{group}' AS group_header,
       (headers -> '{tally}')::text AS tally,
       octet_length(coalesce(message -> 'payload', message -> 'data')::text) AS payload_size,
       extract(epoch FROM enqueued_at)::float8 AS enqueued_at,
       extract(epoch FROM archived_at)::float8 AS archived_at,
       CASE status WHEN 'SCHEDULED' THEN extract(epoch FROM vt)::float8 END AS not_before
FROM (
    SELECT CASE WHEN coalesce(
        (SELECT max(enqueued_at) FROM looked_at) >= to_timestamp($4), true
    ) THEN edge.msg_id END AS looked_to
    FROM edge
) AS looked LEFT JOIN fitting ON true
ORDER BY msg_id DESC
"""
_TEXTS: Final = (
    "id",
    "command_id",
    "poolCode",
    "messageGroupId",
    "correlationId",
    "correlation_id",
)
_TEXT: Final = """CASE jsonb_typeof(message -> '{0}')
           WHEN 'string' THEN left(message ->> '{0}', 512)
       END AS {0}_text"""


class PgmqLister:
    """PGMQ keeps what waits, and in the archive what was given up. The rest it has forgotten."""

    def __init__(self, database: PostgresDatabase, queue: str, *, has_headers: bool) -> None:
        self._database = database
        self._page = _PAGE.format(
            queue=quoted_table("q", queue),
            archive=quoted_table("a", queue),
            headers="headers" if has_headers else "NULL",
            group=GROUP_HEADER,
            tally=TALLY_HEADER,
            texts=", ".join(map(_TEXT.format, _TEXTS)),
        )

    async def page(
        self, wanted: MessageFilter, *, limit: int, before: int | None = None
    ) -> MessagePage:
        rows = await self._database.call(
            self._page,
            LAST_ROW_ID if before is None else before,
            wanted.status,
            optional_text(wanted.group),
            wanted.since,
            limit + 1,
            ROWS_PER_PAGE // 2,
        )
        found = [row for row in rows if row["id"] is not None]
        next_before = found[limit - 1]["id"] if len(found) > limit else rows[0]["looked_to"]
        return MessagePage(list(map(_record, found[:limit])), next_before)


def _record(row: Row) -> MessageRecord:
    tally = _tally(row["tally"])
    return MessageRecord(
        id=row["id_text"] or row["command_id_text"] or str(row["id"]),
        status=MessageStatus(row["status"]),
        failures=tally.failures,
        requests=tally.requests,
        created_at=row["enqueued_at"],
        pool=row["poolcode_text"],
        group=row["messagegroupid_text"] or row["group_header"],
        not_before=row["not_before"],
        ended_at=row["archived_at"],
        correlation_id=row["correlationid_text"] or row["correlation_id_text"],
        payload_bytes=row["payload_size"] or 0,
    )


def _tally(given: str | None) -> Tally:
    """Read the tally. Anybody may write headers, so what makes no sense is ignored."""
    try:
        return UNTRIED if given is None else msgspec.json.decode(given, type=Tally)
    except msgspec.MsgspecError:
        return UNTRIED
