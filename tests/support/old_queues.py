"""Queues as commit ec404bd left them: a few messages of each kind, and many that wait."""

import sqlite3
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import asyncpg

from router.core.message import ReceivedMessage
from router.ports import Broker

_SCHEMAS = Path(__file__).with_name("schemas")

WRITTEN_AT = 1_700_000_000.0  # by the wall clock …
UPTIME = 1000.0  # … and the machine's, in the boot "boot"

WAITING = ["s4", "f4", "member-2", "s1", "s2", "s3", "f1", "f2", "f3", "d1", "d2", "tick"]
"""What can be claimed at once, in claim order."""

# Half of them without a group, half in groups of a hundred, of which the first is on offer.
_FILL_SQLITE = """
CREATE TEMP TABLE numbers AS
WITH RECURSIVE counted (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM counted LIMIT :count)
SELECT 1000 + n AS id, 'P' || (n % 10) AS pool, iif(n % 2, NULL, 'g' || (n / 200)) AS group_id
FROM counted;
INSERT INTO queue_groups (queue, pool, group_id)
SELECT DISTINCT 'many', pool, group_id FROM numbers WHERE group_id IS NOT NULL;
INSERT INTO queue_entries (id, queue, message_id, dedup_key, pool, group_id, published_at)
SELECT id, 'many', 'm' || id, 'k' || id, pool, group_id, 1700000000.0 FROM numbers;
INSERT INTO queue_bodies (id, body) SELECT id, CAST('m' || id AS BLOB) FROM numbers;
INSERT INTO queue_progress (
    id, queue, group_number, priority, high_priority, size, is_kept, offered_to, room
)
SELECT id, 'many', number, 0, 0, 5, 0,
       iif(row_number() OVER (PARTITION BY pool, group_id ORDER BY id) = 1
           OR numbers.group_id IS NULL, '', NULL), zeroblob(50)
FROM numbers LEFT JOIN queue_groups USING (pool, group_id);
DROP TABLE numbers
"""


def write_old_file(path: Path, count: int = 0) -> None:
    """Write a queue file of schema version 10, with that many messages in the queue `many`."""
    with closing(sqlite3.connect(path)) as db:
        db.executescript((_SCHEMAS / "sqlite_10.sql").read_text())
        for statement in _FILL_SQLITE.split(";\n"):
            db.execute(statement, {"count": count} if ":count" in statement else {})
        db.commit()


# The same messages. What was in flight or delayed is so for a moment from now.
_FILL_POSTGRES = """
INSERT INTO message_router.queue_messages (queue, message_id, pool, group_id, body)
SELECT 'many', 'm' || 1000 + n, 'P' || n % 10, CASE WHEN n % 2 = 0 THEN 'g' || n / 200 END,
       convert_to('m' || 1000 + n, 'UTF8')
FROM generate_series(1, $1) AS n ORDER BY n
"""
_MOVE_POSTGRES = """
UPDATE message_router.queues SET clock = NULL;
UPDATE message_router.queue_messages
SET lease_until = lease_until + (clock_timestamp() + interval '1 second' - lease_until),
    run_after = CASE WHEN deliveries = 0 THEN run_after
        ELSE clock_timestamp() + interval '2 seconds' + (run_after - run_after) END,
    finished_at = clock_timestamp() + (finished_at - finished_at)
"""


async def write_old_schema(url: str, count: int = 0) -> None:
    """Write a schema of version 6, revision 0, with that many messages in the queue `many`."""
    connection = await asyncpg.connect(url)
    async with connection.transaction():
        await connection.execute((_SCHEMAS / "postgres_6.sql").read_text())
        await connection.execute(_FILL_POSTGRES, count)
        await connection.execute(_MOVE_POSTGRES)
    await connection.close()


async def receive_all(broker: Broker, count: int) -> list[ReceivedMessage]:
    received: list[ReceivedMessage] = []
    while len(received) < count and (batch := await broker.receive(1000)):
        received += batch
        await broker.ack([each.handle for each in batch])
    return received


def assert_nothing_is_lost(received: Sequence[ReceivedMessage], count: int) -> None:
    """All of `many` have come, each once, and those of each group, and without one, in order."""
    numbers = [int(each.body[1:]) - 1000 for each in received]
    lanes: dict[object, list[int]] = defaultdict(list)
    for number in numbers:
        lanes[None if number % 2 else (number % 10, number // 200)].append(number)

    assert sorted(numbers) == list(range(1, count + 1))
    assert all(lane == sorted(lane) for lane in lanes.values())
