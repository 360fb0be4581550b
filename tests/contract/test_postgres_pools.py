"""A claim for some pools reads no more of the tables, whatever waits for others (ROUTE-5).

Nor does one hot group keep others from being found (POOL-1).
"""

import json
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

from router.brokers import BrokerRegistry
from router.brokers.postgres.database import PostgresDatabase
from router.core.config import QueueConfig
from tests.acceptance.process import eventually
from tests.contract.postgres_place import PostgresPlace
from tests.support.fakes import FakeSender
from tests.support.pace import slowdown
from tests.support.rig import body, grouped, pool, running

pytestmark = pytest.mark.anyio

FILL = """
INSERT INTO message_router.queue_messages (queue, message_id, pool, group_id, body)
SELECT $1, $3 || n, $3, CASE WHEN $4 THEN 'g' || n / 2 END, '' FROM generate_series(1, $2) AS n
"""
CLAIM = "SELECT * FROM message_router.claim($1, 'w', 1, 20, 30, $2, $3)"
EXPLAIN = "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON)"


@pytest.fixture
async def connection(postgres: PostgresPlace, anyio_backend: object) -> AsyncIterator[Any]:
    del anyio_backend  # asked for only to run on its loop
    database = PostgresDatabase(postgres.server.url)
    await database.prepare()
    await database.close()
    connection = await asyncpg.connect(postgres.server.url)
    yield connection
    connection.terminate()


async def fill(connection: Any, queue: str, in_front: int, *, is_grouped: bool) -> None:
    """That many of a full pool, then some of an open one. The planner knows of full ones only."""
    await connection.execute("SELECT message_router.configure($1, 0, 0, 0)", queue)
    await connection.execute(FILL, queue, in_front, "FULL", is_grouped)
    await connection.execute("VACUUM ANALYZE message_router.queue_messages")
    await connection.execute(FILL, queue, 100, "OPEN", is_grouped)
    await offer(connection, queue)


async def offer(connection: Any, queue: str) -> None:
    """Let the groups offer their first messages."""
    while await connection.fetchval(
        "SELECT true FROM message_router.queue_changes WHERE queue = $1", queue
    ):
        await connection.fetch("SELECT message_router.claim($1, 'other', 1, 1, 0)", queue)


async def blocks_of(connection: Any, claim: str, *arguments: object) -> int:
    """How many blocks it reads. What it does is undone."""
    transaction = connection.transaction()
    await transaction.start()
    plan = json.loads(await connection.fetchval(f"{EXPLAIN} {claim}", *arguments))[0]["Plan"]
    await transaction.rollback()
    return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


@pytest.mark.rule("ROUTE-5", "P5")
@pytest.mark.parametrize("is_grouped", [False, True], ids=["ungrouped", "grouped"])
@pytest.mark.parametrize(
    ("pools", "excludes"), [(["FULL"], True), (["OPEN"], False)], ids=["but", "only"]
)
async def test_a_claim_reads_no_more_if_many_wait_in_front_for_a_full_pool(
    connection: Any, pools: list[str], *, excludes: bool, is_grouped: bool
) -> None:
    blocks = []
    for in_front in (100, 20_000):
        queue = f"pools-{in_front}-{pools}-{is_grouped}"
        await fill(connection, queue, in_front, is_grouped=is_grouped)
        for _ in range(2):  # the first one makes the plans
            found = await blocks_of(connection, CLAIM, queue, pools, excludes)
        blocks.append(found)

    assert blocks[1] <= 1.5 * blocks[0]


@pytest.mark.rule("ROUTE-5", "WQ-2")
@pytest.mark.parametrize("is_grouped", [False, True], ids=["ungrouped", "grouped"])
async def test_each_pool_that_is_left_out_costs_one_look_into_an_index(
    connection: Any, *, is_grouped: bool
) -> None:
    blocks = []
    for full in (10, 500):
        queue = f"left-out-{full}-{is_grouped}"
        await connection.execute("SELECT message_router.configure($1, 0, 0, 0)", queue)
        codes = [f"FULL-{n}-" for n in range(full)]
        for code in codes:
            await connection.execute(FILL, queue, 20, code, is_grouped)
        await offer(connection, queue)
        await connection.execute("VACUUM ANALYZE message_router.queue_messages")
        await connection.execute(FILL, queue, 100, "OPEN", is_grouped)
        await offer(connection, queue)
        for _ in range(2):  # the first one makes the plans
            found = await blocks_of(connection, CLAIM, queue, codes, True)
        blocks.append(found)

    assert blocks[1] - blocks[0] <= 4 * 490  # the levels of an index of this size, and one more


@pytest.mark.rule("POOL-1", "P5")
async def test_one_hot_group_idles_no_other_worker(
    postgres: PostgresPlace, anyio_backend: object
) -> None:
    del anyio_backend  # asked for only to run on its loop
    sender, config = FakeSender(takes=30), pool("P", 10, take_ahead=None)
    queue = QueueConfig(name="q", uri=f"{postgres.server.url}?queue=hot")
    async with (
        BrokerRegistry(worker_id="w", dedup_window=300) as brokers,
        running(config, sender=sender, brokers=brokers, queues=[queue]) as rig,
    ):
        await rig.publish(*grouped(*(f"hot{n}" for n in range(1000))), queue=queue)
        others = [body(f"m{n}", poolCode="P", messageGroupId=f"m{n}") for n in range(9)]
        await rig.publish(*others, queue=queue)
        await eventually(lambda: sender.open == 10, within=2 * slowdown())
