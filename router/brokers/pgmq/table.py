"""One PGMQ queue: which one a URI means, and what is asked of its table, in SQL.

Each call is one transaction.
"""

import logging
import re
from collections.abc import Iterable, Sequence
from typing import Final

from msgspec import Struct

from router.brokers.kit import read_uri, refusal, switch_option
from router.brokers.pgmq import OPTIONS
from router.brokers.pgmq.database import PgmqDatabase
from router.brokers.postgres import dsn_of
from router.brokers.postgres.work_queue import optional_text, text
from router.brokers.work_queue import keeps_record, ordered_group, payload_size
from router.core.config import COMMAND_BUS, QueueConfig
from router.core.message import DEFAULT_POOL, Message
from router.ports import BrokerError, QueueRefused

log = logging.getLogger(__name__)

MAX_NAME_CHARACTERS: Final = 47  # PGMQ's own limit
MAX_ID_CHARACTERS: Final = 512  # of a message
TALLY_HEADER: Final = "x-message-router"
GROUP_HEADER: Final = "x-pgmq-group"  # by which PGMQ's grouped reads know a group

_NOT_IN_A_NAME: Final = re.compile(r"[$;']|--|[\x00-\x1f\x7f-\x9f]")  # what PGMQ refuses, and we

_FIND: Final = """
WITH found AS (
    SELECT to_regnamespace('pgmq') AS schema, to_regclass(format('pgmq.%I', $1::text)) AS id
)
SELECT
    schema IS NOT NULL AS has_pgmq,
    id IS NOT NULL AS is_there,
    EXISTS (
        SELECT FROM pg_attribute WHERE attrelid = id AND attname = 'headers' AND NOT attisdropped
    ) AS has_headers,
    EXISTS (
        SELECT FROM pg_trigger
        WHERE tgrelid = id AND tgname = 'trigger_notify_queue_insert_listeners'
    ) AS notifies,
    ARRAY(SELECT DISTINCT proname::text FROM pg_proc WHERE pronamespace = schema) AS functions
FROM found
"""

# It changes the table, so it waits for all who use it: not for long, or they would wait behind it.
_NOTIFY: Final = """
SELECT set_config('lock_timeout', '1s', true), pgmq.enable_notify_insert($1)
"""

_READ: Final = """
SELECT
    msg_id,
    read_ct,
    (extract(epoch FROM enqueued_at) * 1000000)::bigint AS enqueued,
    convert_to({body}, 'UTF8') AS body,
    {headers} AS headers
FROM pgmq.{function}($1, $2, $3)
ORDER BY msg_id
"""
# The same with states: what comes is noted, and copies of what has succeeded end with it (CMD-14).
_READ_WITH_STATES: Final = """
WITH came AS MATERIALIZED (
    SELECT msg_id, read_ct, enqueued_at, message, {all_headers} AS headers
    FROM pgmq.{function}($1, $2, $3)
),
named AS MATERIALIZED (
    SELECT msg_id, read_ct, enqueued_at, named.*, message_router.pgmq_digest_of(message) AS digest
    FROM came CROSS JOIN LATERAL (SELECT {fields}) AS named
    WHERE length(message_id) BETWEEN 1 AND {max_id}
),
known AS MATERIALIZED (
    SELECT known.*
    FROM (
        SELECT array_agg(msg_id) AS msg_ids, array_agg(read_ct) AS reads,
               array_agg(enqueued_at) AS enqueued, array_agg(message_id) AS message_ids,
               array_agg(pool) AS pools, array_agg(group_name) AS groups,
               array_agg(correlation_id) AS correlation_ids,
               array_agg(payload_size) AS payload_sizes, array_agg(is_kept) AS kept,
               array_agg(digest) AS digests
        FROM named HAVING count(*) > 0
    ) AS item
    CROSS JOIN LATERAL message_router.receive_from_pgmq(
        $4, $5, $6, msg_ids, reads, enqueued, message_ids, pools, groups, correlation_ids,
        payload_sizes, kept, digests
    ) AS known
),
dropped AS MATERIALIZED (
    SELECT
    FROM (SELECT array_agg(msg_id) AS copies FROM known WHERE is_copy HAVING count(*) > 0) AS found
    CROSS JOIN LATERAL pgmq.delete($1, copies)
)
SELECT
    msg_id,
    read_ct,
    (extract(epoch FROM enqueued_at) * 1000000)::bigint AS enqueued,
    convert_to({body}, 'UTF8') AS body,
    {headers} AS headers,
    coalesce(known.id, 0) AS state_id,
    coalesce(is_copy, false) AS is_copy,
    coalesce(differs, false) AS differs,
    coalesce(is_cancelled, false) AS is_cancelled
FROM came LEFT JOIN known USING (msg_id)
WHERE (SELECT count(*) FROM dropped) >= 0 AND $7::text IS NOT NULL
ORDER BY msg_id
"""
_IS_COMMAND: Final = "coalesce(jsonb_typeof(message -> 'command_type'), 'null') <> 'null'"


def text_field(name: str) -> str:
    """Return the SQL for a field of a message, if it is text."""
    return f"CASE jsonb_typeof(message -> '{name}') WHEN 'string' THEN message ->> '{name}' END"


def _fields(*, is_bus: bool, has_headers: bool) -> str:
    """Return the SQL for what a state says of a message. $7: pool and group field by type."""
    group = text_field("messageGroupId")
    if has_headers:
        group = f"coalesce({group}, headers ->> '{GROUP_HEADER}')"
    plain = {
        "message_id": text_field("id"),
        "pool": text_field("poolCode"),
        "group_name": group,
        "correlation_id": text_field("correlationId"),
        "payload_size": "octet_length((message -> 'payload')::text)",
        "is_kept": "message ?| ARRAY['payload', 'replyTo', 'then']",
    }
    if not is_bus:
        return ", ".join(f"{sql} AS {name}" for name, sql in plain.items())
    route = "$7::jsonb -> (message ->> 'command_type')"
    command = {
        "message_id": text_field("command_id"),
        "pool": f"{route} ->> 'pool'",
        "group_name": f"message -> 'data' ->> ({route} ->> 'group')",
        "correlation_id": text_field("correlation_id"),
        "payload_size": "octet_length((message -> 'data')::text)",
        "is_kept": "true",
    }
    return ", ".join(
        f"CASE WHEN {_IS_COMMAND} THEN {command[name]} ELSE {sql} END AS {name}"
        for name, sql in plain.items()
    )


READ_BODY: Final = """
CASE jsonb_typeof(message)
    WHEN 'string' THEN message #>> '{}'
    ELSE coalesce(message::text, '')
END
"""
_READ_RAW_BODY: Final = "coalesce(message::text, '')"
_READ_ALL_HEADERS: Final = "CASE jsonb_typeof(headers) WHEN 'object' THEN headers::text END"
# Most have no other header than their group: that one is of no interest here. Anybody may write
# headers that are no object; nothing may fail for that.
_READ_HEADERS: Final = f"""
CASE jsonb_typeof(headers)
    WHEN 'object' THEN nullif(headers - '{GROUP_HEADER}', '{{}}'::jsonb)::text
END
"""

_NEXT: Final = "SELECT extract(epoch FROM min(vt) - clock_timestamp())::float8 AS wait FROM {table}"

# `read_ct` is the fence: the next read of a message invalidates older leases. `enqueued_at`
# distinguishes it from one of a queue that was dropped and made again.
_HELD: Final = """
asked AS (
    SELECT *
    FROM unnest((SELECT $2::bigint[]), (SELECT $3::int[]), (SELECT $4::bigint[]))
        WITH ORDINALITY AS lease(msg_id, read_ct, enqueued, position)
),
held AS MATERIALIZED (
    SELECT asked.position, asked.msg_id
    FROM asked JOIN {table} AS row USING (msg_id, read_ct)
    WHERE (extract(epoch FROM row.enqueued_at) * 1000000)::bigint = asked.enqueued
    ORDER BY asked.msg_id
    FOR UPDATE OF row
)
"""
# The same with states: a lease that went back is not good either.
_HELD_WITH_STATES: Final = _HELD.replace(
    "    ORDER BY",
    """        AND (state_id = 0 OR (
            SELECT lease_token = read_ct AND finished_at IS NULL
            FROM message_router.queue_messages WHERE id = state_id
        ))
    ORDER BY""",
).replace(
    """(SELECT $4::bigint[]))
        WITH ORDINALITY AS lease(msg_id, read_ct, enqueued, position)""",
    """(SELECT $4::bigint[]), {state_ids})
        WITH ORDINALITY AS lease(msg_id, read_ct, enqueued, state_id, position)""",
)
_LOST: Final = "ARRAY(SELECT position - 1 FROM asked EXCEPT SELECT position - 1 FROM held)"
_SETTLE: Final = """
WITH {held},
settled AS MATERIALIZED ({settled}){noted}
SELECT (SELECT count(*) FROM settled) AS settled{also}, {lost} AS lost{answer}
"""
_DELETED: Final = "SELECT pgmq.delete($1, ARRAY(SELECT msg_id FROM held))"
_ARCHIVED: Final = "SELECT pgmq.archive($1, ARRAY(SELECT msg_id FROM held))"
_HIDDEN: Final = """
SELECT FROM held CROSS JOIN LATERAL pgmq.set_vt($1, held.msg_id, $5::int)
"""
# Hardly ever is one to be cancelled: to find that out costs a look into an empty index.
_TO_CANCEL: Final = """,
ARRAY(
    SELECT place - 1
    FROM unnest((SELECT $6::bigint[]), (SELECT $3::int[]))
        WITH ORDINALITY AS item(state_id, token, place)
        JOIN message_router.queue_messages AS known ON known.id = state_id
    WHERE known.is_cancelled AND known.lease_token = token AND known.finished_at IS NULL
) AS to_cancel"""
# What is to be cancelled comes again at once.
_DELAY: Final = """CASE WHEN (
        SELECT is_cancelled FROM message_router.queue_messages WHERE id = item.state_id
    ) THEN 0 ELSE item.delay END"""
_NACKED: Final = """
SELECT
FROM held
    JOIN unnest((SELECT $5::int[]){ids}) WITH ORDINALITY AS item(delay{id}, position)
        USING (position)
    CROSS JOIN LATERAL pgmq.set_vt($1, held.msg_id, {delay})
"""
# `pgmq.set_vt` cannot store headers, and no row can be changed twice by one statement. The queue's
# name ($1) is not needed, but each of these statements is given it.
_NACKED_WITH_TALLY: Final = """
UPDATE {table} AS message
SET vt = clock_timestamp() + make_interval(secs => {delay}),
    headers = CASE jsonb_typeof(headers) WHEN 'object' THEN headers ELSE '{{}}' END
        || jsonb_build_object('{header}', item.tally::jsonb)
FROM held
    JOIN unnest((SELECT $5::int[]), (SELECT $6::text[]){ids})
        WITH ORDINALITY AS item(delay, tally{id}, position)
        USING (position)
WHERE message.msg_id = held.msg_id AND $1::text IS NOT NULL
RETURNING message.msg_id
"""

# The same with the state: the lease token of a row is `read_ct`.
_NOTED_NACK: Final = """,
noted AS MATERIALIZED (
    SELECT message_router.nack(
        item.state_id, asked.read_ct, item.delay, item.failures, item.requests, item.error,
        item.code, item.http_status
    )
    FROM held JOIN asked USING (position)
        JOIN unnest((SELECT $5::int[]), {columns}) WITH ORDINALITY
            AS item(delay, state_id, failures, requests, error, code, http_status, position)
            USING (position)
)"""

# What is due at the same time goes in together, in order. A time is rounded up: PGMQ has seconds.
_OUTGOING: Final = """
outgoing AS (
    SELECT
        queue, position, n, body::jsonb AS body, headers::jsonb AS headers, due,
        greatest(ceil(due - extract(epoch FROM clock_timestamp())), 0)::int AS delay{more}
    FROM unnest({columns}) WITH ORDINALITY AS item(queue, position, body, headers, due{more}, n)
)
"""
_NACK_TYPES: Final = ("bigint", "int", "int", "text", "text", "int")
_ITEM_TYPES: Final = ("text", "bigint", "text", "text", "float8")
_STATE_FIELDS: Final = {  # of what goes into a queue that keeps states
    "message_id": "text",  # None: it is a reply, which nobody asks for
    "dedup_key": "text",
    "pool": "text",
    "group_name": "text",
    "is_kept": "boolean",
    "correlation_id": "text",
    "payload_size": "int",
}
# PGMQ counts the messages of a call in their order.
_SENT: Final = """
sent AS MATERIALIZED (
    SELECT
        queue, msg_id,
        places[(row_number() OVER (PARTITION BY first ORDER BY msg_id))::int] AS n
    FROM (
        SELECT
            queue, delay, min(n) AS first, array_agg(n ORDER BY n) AS places,
            array_agg(body ORDER BY n) AS bodies, array_agg(headers ORDER BY n) AS headers
        FROM {source}
        GROUP BY queue, delay
        ORDER BY first
    ) AS together
    CROSS JOIN LATERAL pgmq.send_batch({arguments}) AS msg_id
)
"""
# A lease token says what is in flight. The state is that already, because to change it would write
# to all indexes.
_NOTED: Final = """,
noted AS (
    INSERT INTO message_router.queue_messages (
        queue, message_id, dedup_key, pool, pgmq_group, is_kept, correlation_id, payload_size,
        not_before, state, body, pgmq_id, published_at
    )
    SELECT
        'pgmq:' || lower(sent.queue), message_id, dedup_key, pool, group_name, is_kept,
        correlation_id, payload_size, to_timestamp(nullif(due, 0)), 'in-flight', '', msg_id, now()
    FROM sent JOIN outgoing USING (n)
    WHERE message_id IS NOT NULL
    ORDER BY n
)"""
_WITH_HEADERS: Final = "queue, bodies, headers, delay"
_WITHOUT_HEADERS: Final = "queue, bodies, delay"
_SEND: Final = "WITH {outgoing}, {sent}{noted} SELECT count(*) AS sent FROM sent"

# A message whose reply has no queue is not settled; the others are.
_FINISH: Final = """
WITH {outgoing},
stuck AS (
    SELECT DISTINCT position FROM outgoing
    WHERE to_regclass(format('pgmq.%I', 'q_' || lower(queue))) IS NULL
),
{held},
free AS MATERIALIZED (SELECT * FROM held WHERE position NOT IN (SELECT position FROM stuck)),
{sent}{noted},
settled AS MATERIALIZED (
    SELECT pgmq.delete($1, array_agg(msg_id))
    FROM free WHERE NOT position = ANY ($5::bigint[]) HAVING count(*) > 0
    UNION ALL
    SELECT pgmq.archive($1, array_agg(msg_id))
    FROM free WHERE position = ANY ($5::bigint[]) HAVING count(*) > 0
){ended}
SELECT
    (SELECT count(*) FROM sent) AS sent,
    (SELECT count(*) FROM settled) AS settled,
    {lost} AS lost,
    ARRAY(SELECT position - 1 FROM stuck) AS stuck{count_ended}
"""
# Only of messages that are kept for them, results are kept.
_ENDED: Final = """,
ending AS (
    SELECT
        item.*, asked.state_id, asked.read_ct::bigint AS token,
        (result IS NOT NULL OR omitted) AND (
            SELECT is_kept FROM message_router.queue_messages WHERE id = asked.state_id
        ) AS may_have_result
    FROM free JOIN asked USING (position)
        LEFT JOIN unnest({columns}) WITH ORDINALITY AS item(
            result, omitted, code, error, http_status, failures, requests, cancelled, position
        ) USING (position)
),
ended AS MATERIALIZED (
    SELECT
    FROM (
        SELECT
            array_agg(state_id) AS ids, array_agg(token) AS tokens,
            array_agg(CASE WHEN may_have_result THEN result END) AS results,
            array_agg(may_have_result AND omitted) AS omitted,
            array_agg(code) AS codes, array_agg(error) AS errors,
            array_agg(http_status) AS statuses, array_agg(failures) AS failures,
            array_agg(requests) AS requests, array_agg(cancelled) AS cancelled
        FROM ending HAVING count(*) > 0
    ) AS done
    CROSS JOIN LATERAL message_router.finish(
        ids, tokens, results, omitted, codes, errors, statuses, failures, requests,
        {window}::float8, '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}',
        '{{}}', '{{}}', '{{}}', cancelled
    )
)"""
_ENDING_TYPES: Final = ("bytea", "boolean", "text", "text", "int", "int", "int", "boolean")
# Only if nobody has read or moved the message since it was looked at.
_CANCEL: Final = """
WITH {outgoing},
held AS MATERIALIZED (
    SELECT msg_id FROM {table}
    WHERE msg_id = $3 AND read_ct = $4 AND vt = $5
    FOR UPDATE
),
{sent}{noted},
cancelled AS MATERIALIZED (
    SELECT message_router.cancel_in_pgmq($2, $6) FROM held
),
settled AS MATERIALIZED (SELECT pgmq.delete($1, ARRAY(SELECT msg_id FROM held)))
SELECT
    (SELECT count(*) FROM held) = 1 AS is_done,
    (SELECT count(*) FROM sent) AS sent,
    (SELECT count(*) FROM cancelled) AS cancelled,
    (SELECT count(*) FROM settled) AS settled
"""
# The same if all were accepted with nothing to keep or to send: 0.2 ms less of the server.
_ACCEPT: Final = """
WITH {held},
settled AS MATERIALIZED (
    SELECT pgmq.delete($1, array_agg(msg_id)) FROM held HAVING count(*) > 0
),
ended AS MATERIALIZED (
    SELECT
    FROM (
        SELECT array_agg(asked.state_id) AS ids, array_agg(asked.read_ct::bigint) AS tokens
        FROM held JOIN asked USING (position) HAVING count(*) > 0
    ) AS done
    CROSS JOIN LATERAL message_router.finish(
        ids, tokens, NULL, NULL, NULL, NULL, NULL, NULL, NULL, $6::float8, '{{}}', '{{}}', '{{}}',
        '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}'
    )
)
SELECT
    (SELECT count(*) FROM settled) AS settled,
    (SELECT count(*) FROM ended) AS ended,
    {lost} AS lost,
    '{{}}'::bigint[] AS stuck
"""
# A lease by which a message has ended already is not lost.
_LOST_WITH_STATES: Final = """
CASE WHEN (SELECT count(*) FROM held) < cardinality($2::bigint[]) THEN ARRAY(
    SELECT position - 1 FROM asked
    EXCEPT SELECT position - 1 FROM held
    EXCEPT SELECT position - 1 FROM (
        SELECT asked.position FROM asked
            JOIN message_router.queue_messages AS known
                ON known.id = asked.state_id AND known.lease_token = asked.read_ct
        WHERE known.finished_at IS NOT NULL
    ) AS ended_before
) ELSE '{}' END"""

_COUNT: Final = """
SELECT
    count(*) FILTER (WHERE vt <= now.is OR read_ct = 0) AS waiting,
    count(*) FILTER (WHERE vt > now.is AND read_ct > 0) AS in_flight,
    count(*) FILTER (WHERE vt <= now.is) AS due
FROM {table} CROSS JOIN (SELECT clock_timestamp() AS is) AS now
"""


class PgmqAddress(Struct, frozen=True):
    """Never log it: the DSN may hold a password."""

    dsn: str
    database: str  # its URI, without credentials and options
    name: str
    is_fifo: bool = False
    may_notify: bool = True  # False: the queue gets no trigger that it does not have
    may_keep_states: bool = True  # False: nothing is kept of messages but what PGMQ keeps


def read_address(queue: QueueConfig) -> PgmqAddress:
    """Read `pgmq://user:password@host:5432/database?queue=name&fifo=true&notify=false`."""
    uri = read_uri(queue, OPTIONS)
    name = uri.options.get("queue") or queue.name
    if len(name) > MAX_NAME_CHARACTERS:
        raise refusal(queue, f"names a queue with more than {MAX_NAME_CHARACTERS} characters")
    if _NOT_IN_A_NAME.search(name):
        raise refusal(queue, "names a queue with a character that PGMQ does not allow")
    return PgmqAddress(
        dsn_of(uri),
        uri.address.rpartition("@")[2] + uri.path,
        name,
        is_fifo=switch_option(queue, uri, "fifo", default=False),
        may_notify=switch_option(queue, uri, "notify", default=True),
        may_keep_states=switch_option(queue, uri, "state", default=True),
    )


class PgmqLease(Struct, frozen=True, eq=False, gc=False):
    """The right to settle one message, until somebody reads it again."""

    msg_id: int
    read_ct: int
    enqueued: int  # microseconds since 1970
    body: bytes
    state_id: int = 0  # of its row; 0: it has none


class PgmqItem(Struct, frozen=True):
    """One message on its way into a queue of this database."""

    queue: str
    body: str  # JSON that jsonb can store
    headers: str | None  # JSON
    due: float = 0.0  # Unix seconds
    position: int = 0  # of the message that it is a reply to, from 1
    message: Message | None = None  # None: a reply, or a queue without states
    dedup_key: str | None = None


class PgmqTable:
    """The SQL for one queue: it depends on the queue's name and on what the version can do."""

    def __init__(
        self,
        queue: str,
        *,
        has_headers: bool,
        reads_groups: bool,
        is_raw: bool = False,
        is_bus: bool = False,
        keeps_states: bool = False,
    ) -> None:
        self.has_headers = has_headers
        self.reads_groups = reads_groups
        self.keeps_states = keeps_states
        self.name = queue
        self.states = f"pgmq:{queue.lower()}"  # the queue of the rows that keep the states
        self.channel = f"pgmq.{_table_name(queue)}.INSERT"  # of insert notifications
        table = quoted_table("q", queue)
        held = _HELD.format(table=table)
        self.read = (_READ_WITH_STATES if keeps_states else _READ).format(
            headers=(_READ_ALL_HEADERS if is_raw else _READ_HEADERS) if has_headers else "NULL",
            all_headers="headers" if has_headers else "NULL::jsonb",
            body=_READ_RAW_BODY if is_raw else READ_BODY,
            # Never more than the first message of a group. The other grouped reads skip what is
            # hidden in the middle of a group, such as a retry that waits.
            function="read_grouped_head" if reads_groups else "read",
            fields=_fields(is_bus=is_bus, has_headers=has_headers),
            max_id=MAX_ID_CHARACTERS,
        )
        self.next = _NEXT.format(table=table)
        self.count = _COUNT.format(table=table)
        plain = {"held": held, "lost": _LOST, "noted": "", "also": "", "answer": ""}
        self.delete = _SETTLE.format(settled=_DELETED, **plain)
        self.archive = _SETTLE.format(settled=_ARCHIVED, **plain)
        hidden = {**plain, "answer": _TO_CANCEL} if keeps_states else plain
        self.hide = _SETTLE.format(settled=_HIDDEN, **hidden)
        first = 7 if has_headers else 6
        nacked = _NACKED_WITH_TALLY if has_headers else _NACKED
        nacked = nacked.format(
            table=table,
            header=TALLY_HEADER,
            delay=_DELAY if keeps_states else "item.delay",
            ids=f", {_columns(first, ['bigint'])}" if keeps_states else "",
            id=", state_id" if keeps_states else "",
        )
        if keeps_states:
            noted = _NOTED_NACK.format(columns=_columns(first, _NACK_TYPES))
            plain |= {"noted": noted, "also": ", (SELECT count(*) FROM noted) AS noted"}
        self.nack = _SETTLE.format(settled=nacked, **plain)
        arguments = _WITH_HEADERS if has_headers else _WITHOUT_HEADERS
        more = _STATE_FIELDS if keeps_states else {}
        types = (*_ITEM_TYPES, *more.values())
        noted = _NOTED if keeps_states else ""
        fields = "".join(f", {name}" for name in more)
        self.send = _SEND.format(
            outgoing=_OUTGOING.format(columns=_columns(1, types), more=fields),
            sent=_SENT.format(source="outgoing", arguments=arguments),
            noted=noted,
        )
        self.cancel = _CANCEL.format(
            outgoing=_OUTGOING.format(columns=_columns(7, types), more=fields),
            table=table,
            sent=_SENT.format(source="outgoing CROSS JOIN held", arguments=arguments),
            noted=noted,
        )
        self.accept = _ACCEPT.format(
            held=_HELD_WITH_STATES.format(table=table, state_ids=_columns(5, ["bigint"])),
            lost=_LOST_WITH_STATES,
        )
        # $6 to …: what goes out. Then the rows, how their messages ended, and the dedup window.
        rows = 6 + len(types)
        window = rows + 1 + len(_ENDING_TYPES)
        self.finish = _FINISH.format(
            outgoing=_OUTGOING.format(columns=_columns(6, types), more=fields),
            held=_HELD_WITH_STATES.format(table=table, state_ids=_columns(rows, ["bigint"]))
            if keeps_states
            else held,
            sent=_SENT.format(source="outgoing JOIN free USING (position)", arguments=arguments),
            noted=noted,
            ended=_ENDED.format(columns=_columns(rows + 1, _ENDING_TYPES), window=f"${window}")
            if keeps_states
            else "",
            count_ended=", (SELECT count(*) FROM ended) AS ended" if keeps_states else "",
            lost=_LOST_WITH_STATES if keeps_states else _LOST,
        )


def _columns(first: int, types: Iterable[str]) -> str:
    """Return the arguments of an `unnest`: `(SELECT $1::text[]), (SELECT $2::int[])`.

    The planner does not look into these, so one plan does for any number of rows. Else it makes a
    new plan for each call with few of them, which takes a millisecond of the server.
    """
    return ", ".join(f"(SELECT ${number}::{type_}[])" for number, type_ in enumerate(types, first))


def keeps_states(address: PgmqAddress, queue: QueueConfig) -> bool:
    """Return whether states of its messages may be kept.

    Of a strict queue, messages move to the order store: what is removed here may not have ended.
    """
    return address.may_keep_states and queue.route is None and not queue.is_strict


async def open_table(
    database: PgmqDatabase,
    address: PgmqAddress,
    queue: QueueConfig,
    *,
    to_consume: bool,
    may_install: bool = False,
) -> PgmqTable:
    """Find the queue. To consume it, enable insert notifications if possible.

    `may_install`: the tables for states, if they are not there.
    """
    (row,) = await database.call(_FIND, _table_name(address.name))
    if not row["has_pgmq"]:
        raise QueueRefused("the database has no PGMQ: install it with CREATE EXTENSION pgmq")
    if not row["is_there"]:
        problem = f"there is no PGMQ queue {address.name!r}: create it with"
        raise QueueRefused(f"{problem} SELECT pgmq.create('{address.name}')")
    may_keep_states = keeps_states(address, queue)
    if may_keep_states:
        await database.open_states(may_install=may_install, is_new=to_consume)
    functions = row["functions"]
    table = PgmqTable(
        address.name,
        has_headers=row["has_headers"],
        reads_groups=address.is_fifo and "read_grouped_head" in functions,
        is_raw=queue.route is not None,
        is_bus=queue.envelope == COMMAND_BUS,
        keeps_states=may_keep_states and database.keeps_states,
    )
    can_notify = address.may_notify and "enable_notify_insert" in functions
    if to_consume and can_notify and not row["notifies"]:
        try:
            await database.call(_NOTIFY, address.name)
        except BrokerError as error:
            log.info("queue %r is polled, it cannot notify: %s", address.name, error)
    return table


def _table_name(queue: str) -> str:
    return f"q_{queue.lower()}"


def quoted_table(kind: str, queue: str) -> str:
    """Return the table of a queue (`q`), or of its archive (`a`), for SQL."""
    quoted = queue.lower().replace('"', '""')
    return f'pgmq."{kind}_{quoted}"'


def fences(
    leases: Sequence[PgmqLease],
) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
    return (
        [lease.msg_id for lease in leases],
        [lease.read_ct for lease in leases],
        [lease.enqueued for lease in leases],
    )


def item_columns(items: Sequence[PgmqItem], *, with_states: bool) -> tuple[Sequence[object], ...]:
    columns: tuple[Sequence[object], ...] = (
        [item.queue for item in items],
        [item.position for item in items],
        [item.body for item in items],
        [item.headers for item in items],
        [item.due for item in items],
    )
    if not with_states:
        return columns
    messages = [item.message for item in items]
    return (
        *columns,
        [None if one is None else text(one.id) for one in messages],
        [optional_text(item.dedup_key) for item in items],
        [None if one is None else text(one.pool or DEFAULT_POOL) for one in messages],
        [None if one is None else optional_text(ordered_group(one)) for one in messages],
        [one is not None and keeps_record(one) for one in messages],
        [None if one is None else optional_text(one.correlation_id) for one in messages],
        [None if one is None else payload_size(one) for one in messages],
    )
