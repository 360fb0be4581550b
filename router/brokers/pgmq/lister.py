"""Looks through the messages of one PGMQ queue, and of its archive (CMD-2)."""

from typing import Final

import msgspec

from router.brokers.pgmq.database import PgmqDatabase
from router.brokers.pgmq.table import GROUP_HEADER, TALLY_HEADER, PgmqTable, quoted_table
from router.brokers.postgres.store import RECORD
from router.brokers.postgres.work_queue import optional_text
from router.brokers.work_queue import LAST_ROW_ID, ROWS_PER_PAGE, Row, message_record
from router.core.message import UNTRIED, Tally
from router.ports import MessageFilter, MessagePage, MessageRecord, MessageStatus

# What states say of a message in the queue. The time of a retry is rounded up in PGMQ.
LIVE: Final = """CASE
    WHEN noted.finished_at IS NOT NULL THEN upper(noted.state)
    WHEN vt <= clock_timestamp() THEN 'READY'
    WHEN noted.lease_token IS NOT NULL THEN 'IN_FLIGHT'
    WHEN noted.run_after > clock_timestamp() - interval '1 second' THEN
        CASE WHEN noted.first_claimed_at IS NULL THEN 'SCHEDULED' ELSE 'READY' END
    ELSE 'IN_FLIGHT'
END"""
# The columns of a record, from a row of the states and what it is now.
NOTED: Final = """noted.message_id, attempts, posts, pool, pgmq_group AS group_id, published_at,
       not_before, CASE WHEN run_after > clock_timestamp() THEN run_after END AS run_after,
       first_claimed_at, last_claimed_at, returned_at, finished_at, worker_id, correlation_id,
       batch, noted.payload_size, last_error, error_code, http_status"""
STATE_OF: Final = "CASE {0} WHEN 'SCHEDULED' THEN 'ready' ELSE replace(lower({0}), '_', '-') END"

# Of the newest messages before that one, $6 of the queue, of the archive and of the states, those
# that fit. Each row says how far the query has looked, if there is more to look at: not if all that
# it looked at is too old. Anybody may write messages: an id is an id only if it is text.
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
){noted}, edge AS (
    SELECT greatest(
        (SELECT CASE WHEN count(*) = $6 THEN min(msg_id) END FROM queued),
        (SELECT CASE WHEN count(*) = $6 THEN min(msg_id) END FROM archived){edge}
    ) AS msg_id
), looked_at AS (
    SELECT item.msg_id, enqueued_at, vt, archived_at, {status} AS status, {group} AS group_name,
           CASE jsonb_typeof(message) WHEN 'object' THEN message END AS message,
           CASE jsonb_typeof(headers) WHEN 'object' THEN headers END AS headers{columns}
    FROM (
        SELECT * FROM queued UNION ALL SELECT * FROM archived{ended}
    ) AS item{join}, edge
    WHERE item.msg_id >= coalesce(edge.msg_id, item.msg_id)
), fitting AS (
    SELECT * FROM looked_at
    WHERE ($2::text IS NULL OR status = $2)
      AND ($3::text IS NULL OR $3 = group_name)
      AND ($4::float8 IS NULL OR enqueued_at >= to_timestamp($4))
    ORDER BY msg_id DESC LIMIT $5
)
SELECT looked_to, msg_id AS position, status, {texts},
       headers ->> '{header}' AS group_header,
       (headers -> '{tally}')::text AS tally,
       octet_length(coalesce(message -> 'payload', message -> 'data')::text) AS payload_octets,
       extract(epoch FROM enqueued_at)::float8 AS enqueued_at,
       extract(epoch FROM archived_at)::float8 AS archived_at,
       CASE status WHEN 'SCHEDULED' THEN extract(epoch FROM vt)::float8 END AS due,
       {record}
FROM (
    SELECT CASE WHEN coalesce(
        (SELECT max(enqueued_at) FROM looked_at) >= to_timestamp($4), true
    ) THEN edge.msg_id END AS looked_to
    FROM edge
) AS looked LEFT JOIN fitting ON true{batches}
ORDER BY position DESC
"""
_GROUP: Final = """coalesce(
    CASE jsonb_typeof(headers) WHEN 'object' THEN headers ->> '{header}' END,
    CASE jsonb_typeof(message) WHEN 'object' THEN message ->> 'messageGroupId' END
)"""
_WITHOUT_STATES: Final = {
    **dict.fromkeys(("noted", "edge", "columns", "ended", "join", "batches"), ""),
    "status": "status",
    "group": _GROUP,
    "record": "NULL AS message_id",
}
_WITH_STATES: Final = {
    "noted": """, noted AS MATERIALIZED (
    SELECT * FROM message_router.queue_messages
    WHERE queue = $7 AND pgmq_id < $1 ORDER BY pgmq_id DESC LIMIT $6
)""",
    "edge": """,
        (SELECT CASE WHEN count(*) = $6 THEN min(pgmq_id) END FROM noted)""",
    "ended": """
        UNION ALL
        SELECT pgmq_id, published_at, NULL, NULL, NULL, NULL, NULL FROM noted
        WHERE finished_at IS NOT NULL AND NOT EXISTS (
            SELECT FROM archived WHERE msg_id = pgmq_id AND enqueued_at = published_at
        )""",
    "join": """
    LEFT JOIN noted ON pgmq_id = item.msg_id AND published_at = enqueued_at""",
    "status": f"CASE WHEN noted.id IS NULL THEN status ELSE {LIVE} END",
    "group": f"CASE WHEN noted.id IS NULL THEN {_GROUP} ELSE pgmq_group END",
    "columns": f", {NOTED}",
    "record": f"message_id, {RECORD}, NULL AS result, false AS result_omitted".replace(
        " state,", f" {STATE_OF.format('status')} AS state,"
    ),
    "batches": "\nLEFT JOIN message_router.queue_batches ON number = batch",
}
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
    """PGMQ keeps what waits, and in the archive what was given up. States keep the rest."""

    def __init__(self, database: PgmqDatabase, table: PgmqTable) -> None:
        self._database = database
        self._states = (table.states,) if table.keeps_states else ()
        parts = _WITH_STATES if table.keeps_states else _WITHOUT_STATES
        self._page = _PAGE.format(
            queue=quoted_table("q", table.name),
            archive=quoted_table("a", table.name),
            headers="headers" if table.has_headers else "NULL",
            header=GROUP_HEADER,
            tally=TALLY_HEADER,
            texts=", ".join(map(_TEXT.format, _TEXTS)),
            **{**parts, "group": parts["group"].format(header=GROUP_HEADER)},
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
            ROWS_PER_PAGE // (2 + len(self._states)),
            *self._states,
        )
        found = [row for row in rows if row["position"] is not None]
        next_before = found[limit - 1]["position"] if len(found) > limit else rows[0]["looked_to"]
        return MessagePage(list(map(_record, found[:limit])), next_before)


def _record(row: Row) -> MessageRecord:
    if row["message_id"] is not None:
        return message_record(row["message_id"], row)
    tally = _tally(row["tally"])
    return MessageRecord(
        id=row["id_text"] or row["command_id_text"] or str(row["position"]),
        status=MessageStatus(row["status"]),
        failures=tally.failures,
        requests=tally.requests,
        created_at=row["enqueued_at"],
        pool=row["poolcode_text"],
        group=row["messagegroupid_text"] or row["group_header"],
        not_before=row["due"],
        ended_at=row["archived_at"],
        correlation_id=row["correlationid_text"] or row["correlation_id_text"],
        payload_bytes=row["payload_octets"] or 0,
    )


def _tally(given: str | None) -> Tally:
    """Read the tally. Anybody may write headers, so what makes no sense is ignored."""
    try:
        return UNTRIED if given is None else msgspec.json.decode(given, type=Tally)
    except msgspec.MsgspecError:
        return UNTRIED
