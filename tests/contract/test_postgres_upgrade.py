"""A schema of commit ec404bd is upgraded in place: nothing is lost, order is kept (WQ-12)."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from router.brokers import BrokerRegistry
from router.brokers.postgres import database
from router.core.message import Tally
from router.core.outcome import Failure
from router.ports import Disconnected, MessageStatus, PoolFilter, QueueRefused
from tests.contract.cases import Ends, bodies, both_ends, publication, queue_at
from tests.contract.postgres_place import PostgresPlace
from tests.support.old_queues import WAITING, assert_nothing_is_lost, receive_all, write_old_schema

pytestmark = pytest.mark.anyio

_ROOT = Path(__file__).parents[2]
MANY = 100_000

# What a router of commit ec404bd asks when it opens a queue, and for messages.
OLD_VERSION = """
SELECT version, incarnation FROM message_router.schema_versions ORDER BY version DESC LIMIT 1
"""
OLD_CLAIM = "SELECT * FROM message_router.claim($1, $2, $3, $4, $5)"
OLD_NACK = "SELECT message_router.nack($1, $2, $3, $4, $5, $6)"
OLD_FINISH = f"SELECT message_router.finish({', '.join(f'${n}' for n in range(1, 23))})"
WAITS_FOR_A_LOCK = "SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted) FROM pg_sleep(0.05)"
REVISION = "SELECT to_jsonb(v) ->> 'revision' FROM message_router.schema_versions AS v"

# All that statements can see of the schema.
LAYOUT = """
SELECT 'column', table_name || '.' || column_name, data_type || is_nullable
FROM information_schema.columns WHERE table_schema = 'message_router'
UNION ALL
SELECT 'index', indexname, indexdef FROM pg_indexes WHERE schemaname = 'message_router'
UNION ALL
SELECT 'function', oid::regprocedure::text, prosrc || coalesce(proconfig::text, '')
FROM pg_proc WHERE pronamespace = 'message_router'::regnamespace
"""


@pytest.fixture
def fresh_url(postgres: PostgresPlace, request: pytest.FixtureRequest) -> str:
    """Of a database in which nobody has been."""
    name = f"fresh_{abs(hash(request.node.name))}"
    postgres.server.sql(f"CREATE DATABASE {name}")
    return f"{postgres.server.url.rpartition('/')[0]}/{name}"


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(url)
    try:
        yield connection
    finally:
        connection.terminate()


@asynccontextmanager
async def opened(url: str, name: str = "orders") -> AsyncIterator[Ends]:
    async with (
        BrokerRegistry(worker_id="new", dedup_window=300.0) as brokers,
        both_ends(brokers, queue_at(f"{url}?queue={name}")) as ends,
    ):
        yield ends


async def layout(url: str) -> set[tuple[str, ...]]:
    async with connected(url) as connection:
        return {tuple(row) for row in await connection.fetch(LAYOUT)}


@pytest.mark.rule("WQ-12")
async def test_a_schema_of_the_version_before_keeps_all_that_is_in_it(fresh_url: str) -> None:
    await write_old_schema(fresh_url)

    async with opened(fresh_url) as ends:
        opening = ends.brokers.open_store(ends.queue)
        assert opening is not None
        first = await ends.broker.receive(50)
        again = await ends.publisher.publish([publication("succeeded")])
        await ends.broker.ack([each.handle for each in first])
        (callback,) = await ends.broker.receive(50)
        flown, behind = await ends.broker.receive(50)
        await ends.broker.ack([each.handle for each in (flown, behind)])
        late = await ends.broker.receive(50)
        async with opening as store:
            result, failed = await store.find("result"), await store.find("failed")
            later, tick = await store.find("later"), await store.last_tick("nightly")

    assert bodies(first) == WAITING
    assert again == [False]
    assert callback.body.startswith(b'{"id":"done","payload":{"batchId":"batch","total":2')
    assert bodies([flown, behind]) == ["flying", "behind-flying"]
    assert bodies(late) == ["again", "behind-again"]
    assert (late[0].receive_count, late[0].tally) == (2, Tally(failures=1, requests=3))
    assert result is not None
    assert result.ending is not None
    assert result.ending.result == b'{"total":7}'
    assert failed is not None
    assert failed.last_failure is not None
    assert failed.last_failure.message == "it failed"
    assert later is not None
    assert later.status is MessageStatus.SCHEDULED
    assert tick == 42


@pytest.mark.rule("WQ-12", "ORD-7")
async def test_an_upgraded_order_store_knows_how_much_it_has(fresh_url: str) -> None:
    await write_old_schema(fresh_url)
    async with connected(fresh_url) as connection:
        await connection.execute(
            "UPDATE message_router.queue_messages SET queue = 'order:q' WHERE queue = 'orders'"
        )
        wanted = await connection.fetchrow(
            "SELECT count(*), sum(length(body)) FROM message_router.queue_messages"
            " WHERE queue = 'order:q' AND finished_at IS NULL"
        )

    async with (
        opened(fresh_url, "order:q") as ends,
        ends.brokers.open_order_log(ends.queue) as order_log,
    ):
        before = await order_log.size()
        (first, *_) = await ends.broker.receive(1)
        await ends.broker.ack([first.handle])
        after = await order_log.size()

    assert (before.messages, before.bytes) == tuple(wanted)
    assert (after.messages, after.bytes) == (wanted[0] - 1, wanted[1] - len(first.body))


@pytest.mark.rule("WQ-12", "ROUTE-5")
async def test_an_upgraded_schema_can_be_asked_for_pools(fresh_url: str) -> None:
    await write_old_schema(fresh_url)

    async with opened(fresh_url) as ends:
        assert ends.broker.traits.selector is not None
        ends.broker.traits.selector.select(PoolFilter(frozenset({"SLOW"}), excludes=True))
        others = await ends.broker.receive(50)
        ends.broker.traits.selector.select(PoolFilter(frozenset({"SLOW"})))
        slow = await ends.broker.receive(50)

    assert bodies(others) == ["f4", "member-2", "f1", "f2", "f3", "d1", "d2"]
    assert bodies(slow) == ["s4", "s1", "s2", "s3", "tick"]


@pytest.mark.rule("WQ-12")
async def test_an_upgraded_schema_is_that_of_a_new_one(
    fresh_url: str, postgres: PostgresPlace
) -> None:
    await write_old_schema(fresh_url)

    async with opened(fresh_url), opened(postgres.server.url):
        pass

    assert await layout(fresh_url) == await layout(postgres.server.url)


@pytest.mark.rule("WQ-12")
async def test_a_router_of_the_version_before_works_beside_a_new_one(fresh_url: str) -> None:
    """It has its statements prepared, and looks at the version whenever it connects."""
    await write_old_schema(fresh_url)
    async with connected(fresh_url) as old:
        claim, nack = await old.prepare(OLD_CLAIM), await old.prepare(OLD_NACK)
        finish = await old.prepare(OLD_FINISH)
        before = await claim.fetch("orders", "old", 1, 3, 30.0)

        async with opened(fresh_url) as ends:
            after = await claim.fetch("orders", "old", 2, 3, 30.0)
            returned = await nack.fetchval(after[0]["id"], 2, 0.0, 1, 1, "HTTP 503")
            opening = ends.brokers.open_store(ends.queue)
            assert opening is not None
            async with opening as store:
                record = await store.find(after[0]["body"].decode())
            claimed = await claim.fetch("orders", "old", 2, 1, 30.0)
            plain: list[object] = [[claimed[0]["id"]], [2], *[None] * 7, 300.0, [], [], [], []]
            lost = await finish.fetch(*plain, [], [], [], [], *[None] * 4)
            version = await old.fetchval(OLD_VERSION)
            new = await ends.broker.receive(50)

    found = [row["body"].decode() for row in (*before, *after)] + bodies(new)
    assert found == WAITING
    assert version == database.SCHEMA_VERSION
    assert [row["id"] for row in claimed] == [after[0]["id"]]
    assert returned
    assert lost == []
    assert record is not None
    assert record.last_failure == Failure("FAILED", "HTTP 503")


@pytest.mark.rule("WQ-12")
async def test_routers_that_start_together_upgrade_the_schema_once(fresh_url: str) -> None:
    await write_old_schema(fresh_url)

    async def start() -> None:
        async with opened(fresh_url):
            pass

    async with asyncio.TaskGroup() as routers:
        for number in range(4):
            routers.create_task(start(), name=f"router {number}")

    async with connected(fresh_url) as connection:
        assert await connection.fetchval(REVISION) == str(database.REVISION)


@pytest.mark.rule("WQ-12")
async def test_a_later_revision_of_the_version_is_accepted_as_it_is(fresh_url: str) -> None:
    async with opened(fresh_url), connected(fresh_url) as connection:
        await connection.execute("UPDATE message_router.schema_versions SET revision = 99")

    async with opened(fresh_url) as ends, connected(fresh_url) as connection:
        await ends.publisher.publish([publication("a")])

        assert bodies(await ends.broker.receive(1)) == ["a"]
        assert await connection.fetchval(REVISION) == "99"


@pytest.mark.rule("WQ-12", "CFG-7")
async def test_a_user_who_may_not_upgrade_the_schema_is_told_what_to_do(fresh_url: str) -> None:
    await write_old_schema(fresh_url)
    async with connected(fresh_url) as connection:
        await connection.execute(
            """
            CREATE ROLE lodger LOGIN;
            GRANT USAGE ON SCHEMA message_router TO lodger;
            GRANT ALL ON ALL TABLES IN SCHEMA message_router TO lodger
            """
        )

    with pytest.raises(QueueRefused, match=r"may not install or upgrade .* in upgrade_0.sql"):
        async with opened(fresh_url.replace("app@", "lodger@")):
            pass
    async with connected(fresh_url) as connection:
        await connection.execute("DROP OWNED BY lodger; DROP ROLE lodger")


@pytest.mark.rule("WQ-12")
async def test_a_router_that_does_not_own_the_schema_goes_on_after_its_upgrade(
    fresh_url: str,
) -> None:
    await write_old_schema(fresh_url)
    async with connected(fresh_url) as owner:
        await owner.execute(
            """
            CREATE ROLE tenant LOGIN;
            GRANT USAGE ON SCHEMA message_router TO tenant;
            GRANT ALL ON ALL TABLES IN SCHEMA message_router TO tenant
            """
        )
    async with opened(fresh_url):  # the owner upgrades it
        pass

    async with opened(fresh_url.replace("app@", "tenant@")) as ends:
        received = await ends.broker.receive(50)
        unsettled = await ends.broker.ack([each.handle for each in received])

    async with connected(fresh_url) as owner:
        await owner.execute("DROP OWNED BY tenant; DROP ROLE tenant")
    assert bodies(received) == WAITING
    assert unsettled == []


@pytest.mark.slow
@pytest.mark.rule("WQ-12", "P5")
async def test_an_upgrade_gives_way_to_a_producer_that_does_not_commit(fresh_url: str) -> None:
    """While it waits for the producer, all other producers wait behind it."""
    await write_old_schema(fresh_url)
    async with connected(fresh_url) as producer:
        transaction = producer.transaction()
        await transaction.start()
        await producer.execute(
            "INSERT INTO message_router.queue_messages (queue, message_id, body)"
            " VALUES ('orders', 'slow', 'slow')"
        )

        with pytest.raises(Disconnected, match="lock timeout"):
            async with opened(fresh_url):
                pass
        await transaction.commit()

    async with opened(fresh_url) as ends:
        assert {*WAITING, "slow"} <= {*bodies(await ends.broker.receive(50))}


@pytest.mark.slow
@pytest.mark.rule("WQ-12", "P1")
async def test_a_schema_survives_a_kill_in_the_middle_of_its_upgrade(fresh_url: str) -> None:
    await write_old_schema(fresh_url, MANY)
    command = [sys.executable, "-m", "tests.contract.opening", f"{fresh_url}?queue=many"]

    async with connected(fresh_url) as reader:
        reading = reader.transaction()
        await reading.start()
        await reader.fetch("SELECT FROM message_router.schema_versions")
        router = await asyncio.create_subprocess_exec(*command, cwd=_ROOT)
        async with connected(fresh_url) as watcher:  # the indexes are made, all but the end is done
            while not await watcher.fetchval(WAITS_FOR_A_LOCK):
                pass
        router.send_signal(signal.SIGKILL)
        assert await router.wait() == -signal.SIGKILL
        await reading.commit()
        revision_after_the_kill = await reader.fetchval(REVISION)
    async with opened(fresh_url, "many") as ends:
        received = await receive_all(ends.broker, MANY)

    assert revision_after_the_kill is None
    assert_nothing_is_lost(received, MANY)
