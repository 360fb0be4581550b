"""One PGMQ queue: which one a URI means, and what is asked of its table, in SQL.

Each call is one transaction.
"""

import logging
import re
from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from router.brokers.kit import read_uri, refusal, switch_option
from router.brokers.pgmq import OPTIONS
from router.brokers.postgres import dsn_of
from router.brokers.postgres.database import PostgresDatabase
from router.core.config import QueueConfig
from router.ports import BrokerError, QueueRefused

log = logging.getLogger(__name__)

MAX_NAME_CHARACTERS: Final = 47  # PGMQ's own limit
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
_READ_BODY: Final = """
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
    FROM unnest($2::bigint[], $3::int[], $4::bigint[])
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
_LOST: Final = "ARRAY(SELECT position - 1 FROM asked EXCEPT SELECT position - 1 FROM held)"
_SETTLE: Final = """
WITH {held},
settled AS MATERIALIZED ({settled})
SELECT (SELECT count(*) FROM settled) AS settled, {lost} AS lost
"""
_DELETED: Final = "SELECT pgmq.delete($1, ARRAY(SELECT msg_id FROM held))"
_ARCHIVED: Final = "SELECT pgmq.archive($1, ARRAY(SELECT msg_id FROM held))"
_HIDDEN: Final = """
SELECT FROM held CROSS JOIN LATERAL pgmq.set_vt($1, held.msg_id, $5::int)
"""
_NACKED: Final = """
SELECT
FROM held
    JOIN unnest($5::int[]) WITH ORDINALITY AS item(delay, position) USING (position)
    CROSS JOIN LATERAL pgmq.set_vt($1, held.msg_id, item.delay)
"""
# `pgmq.set_vt` cannot store headers, and no row can be changed twice by one statement. The queue's
# name ($1) is not needed, but each of these statements is given it.
_NACKED_WITH_TALLY: Final = """
UPDATE {table} AS message
SET vt = clock_timestamp() + make_interval(secs => item.delay),
    headers = CASE jsonb_typeof(headers) WHEN 'object' THEN headers ELSE '{{}}' END
        || jsonb_build_object('{header}', item.tally::jsonb)
FROM held
    JOIN unnest($5::int[], $6::text[]) WITH ORDINALITY AS item(delay, tally, position)
        USING (position)
WHERE message.msg_id = held.msg_id AND $1::text IS NOT NULL
RETURNING message.msg_id
"""

# What is due at the same time goes in together, in order. A time is rounded up: PGMQ has seconds.
_OUTGOING: Final = """
outgoing AS (
    SELECT
        queue, position, n, body::jsonb AS body, headers::jsonb AS headers,
        greatest(ceil(due - extract(epoch FROM clock_timestamp())), 0)::int AS delay
    FROM unnest($%d::text[], $%d::bigint[], $%d::text[], $%d::text[], $%d::float8[])
        WITH ORDINALITY AS item(queue, position, body, headers, due, n)
)
"""
_SENT: Final = """
sent AS MATERIALIZED (
    SELECT
    FROM (
        SELECT
            queue, delay, min(n) AS first,
            array_agg(body ORDER BY n) AS bodies, array_agg(headers ORDER BY n) AS headers
        FROM {source}
        GROUP BY queue, delay
        ORDER BY first
    ) AS together
    CROSS JOIN LATERAL pgmq.send_batch({arguments})
)
"""
_WITH_HEADERS: Final = "queue, bodies, headers, delay"
_WITHOUT_HEADERS: Final = "queue, bodies, delay"
_SEND: Final = "WITH {outgoing}, {sent} SELECT count(*) AS sent FROM sent"

# A message whose reply has no queue is not settled; the others are.
_FINISH: Final = """
WITH {outgoing},
stuck AS (
    SELECT DISTINCT position FROM outgoing
    WHERE to_regclass(format('pgmq.%I', 'q_' || lower(queue))) IS NULL
),
{held},
free AS MATERIALIZED (SELECT * FROM held WHERE position NOT IN (SELECT position FROM stuck)),
{sent},
settled AS MATERIALIZED (
    SELECT pgmq.delete($1, ARRAY(
        SELECT msg_id FROM free WHERE NOT position = ANY ($5::bigint[])
    ))
    UNION ALL
    SELECT pgmq.archive($1, ARRAY(SELECT msg_id FROM free WHERE position = ANY ($5::bigint[])))
)
SELECT
    (SELECT count(*) FROM sent) AS sent,
    (SELECT count(*) FROM settled) AS settled,
    {lost} AS lost,
    ARRAY(SELECT position - 1 FROM stuck) AS stuck
"""

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
    )


class PgmqLease(Struct, frozen=True, eq=False, gc=False):
    """The right to settle one message, until somebody reads it again."""

    msg_id: int
    read_ct: int
    enqueued: int  # microseconds since 1970
    body: bytes


class PgmqItem(Struct, frozen=True):
    """One message on its way into a queue of this database."""

    queue: str
    body: str  # JSON that jsonb can store
    headers: str | None  # JSON
    due: float = 0.0  # Unix seconds
    position: int = 0  # of the message that it is a reply to, from 1


class PgmqTable:
    """The SQL for one queue: it depends on the queue's name and on what the version can do."""

    def __init__(
        self, queue: str, *, has_headers: bool, reads_groups: bool, is_raw: bool = False
    ) -> None:
        self.has_headers = has_headers
        self.reads_groups = reads_groups
        self.channel = f"pgmq.{_table_name(queue)}.INSERT"  # of insert notifications
        table = quoted_table("q", queue)
        held = _HELD.format(table=table)
        read_headers = _READ_ALL_HEADERS if is_raw else _READ_HEADERS
        self.read = _READ.format(
            headers=read_headers if has_headers else "NULL",
            body=_READ_RAW_BODY if is_raw else _READ_BODY,
            # Never more than the first message of a group. The other grouped reads skip what is
            # hidden in the middle of a group, such as a retry that waits.
            function="read_grouped_head" if reads_groups else "read",
        )
        self.next = _NEXT.format(table=table)
        self.count = _COUNT.format(table=table)
        self.delete = _SETTLE.format(held=held, settled=_DELETED, lost=_LOST)
        self.archive = _SETTLE.format(held=held, settled=_ARCHIVED, lost=_LOST)
        self.hide = _SETTLE.format(held=held, settled=_HIDDEN, lost=_LOST)
        nacked = _NACKED_WITH_TALLY if has_headers else _NACKED
        nacked = nacked.format(table=table, header=TALLY_HEADER)
        self.nack = _SETTLE.format(held=held, settled=nacked, lost=_LOST)
        arguments = _WITH_HEADERS if has_headers else _WITHOUT_HEADERS
        self.send = _SEND.format(
            outgoing=_OUTGOING % (1, 2, 3, 4, 5),
            sent=_SENT.format(source="outgoing", arguments=arguments),
        )
        self.finish = _FINISH.format(
            outgoing=_OUTGOING % (6, 7, 8, 9, 10),
            held=held,
            sent=_SENT.format(source="outgoing JOIN free USING (position)", arguments=arguments),
            lost=_LOST,
        )


async def open_table(
    database: PostgresDatabase, address: PgmqAddress, *, to_consume: bool, is_raw: bool = False
) -> PgmqTable:
    """Find the queue, and enable insert notifications if possible."""
    (row,) = await database.call(_FIND, _table_name(address.name))
    if not row["has_pgmq"]:
        raise QueueRefused("the database has no PGMQ: install it with CREATE EXTENSION pgmq")
    if not row["is_there"]:
        text = f"there is no PGMQ queue {address.name!r}: create it with"
        raise QueueRefused(f"{text} SELECT pgmq.create('{address.name}')")
    functions = row["functions"]
    table = PgmqTable(
        address.name,
        has_headers=row["has_headers"],
        reads_groups=address.is_fifo and "read_grouped_head" in functions,
        is_raw=is_raw,
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


def item_columns(items: Sequence[PgmqItem]) -> tuple[Sequence[object], ...]:
    return (
        [item.queue for item in items],
        [item.position for item in items],
        [item.body for item in items],
        [item.headers for item in items],
        [item.due for item in items],
    )
