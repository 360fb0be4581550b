"""States of messages on PGMQ, beside those who know nothing of them (CMD-14)."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import asyncpg
import msgspec
import pytest
from msgspec import Struct
from msgspec.structs import replace

from router.brokers import BrokerRegistry
from router.brokers.pgmq import states
from router.core.config import Ordering, QueueConfig, Route
from router.core.message import parse
from router.core.outcome import Ending, Failure
from router.core.raw import RawRoute
from router.ports import (
    Broker,
    BrokerError,
    DataRefused,
    Finish,
    MessageRecord,
    MessageStatus,
    MessageStore,
    OutgoingMessage,
    Publication,
    Publisher,
)
from tests.contract.cases import queue_at
from tests.contract.pgmq_place import PgmqPlace
from tests.support.old_queues import write_old_schema

pytestmark = pytest.mark.anyio

WINDOW = 300.0
SUCCESS = Ending(result=b'{"sum": 3}')
FAILURE = Ending(Failure("E42", "no such order", 422))
COMMAND = {"command_id": "c-1", "command_type": "Debit", "data": {"n": 1.5, "account": "A-1"}}
ROWS = "SELECT count(*) FROM message_router.queue_messages WHERE queue = $1"


class Place(Struct, frozen=True):
    """One PGMQ queue, and a connection of someone who knows nothing but SQL."""

    uri: str
    name: str
    sql: Any

    def queue(self, options: str = "", *, is_bus: bool = False) -> QueueConfig:
        queue = queue_at(self.uri + options)
        if not is_bus:
            return queue
        route = Route(target="https://svc.example/debit", pool="P", group_field="account")
        return replace(queue, envelope="command-bus", routes=(("Debit", route),))

    async def send(self, message: object) -> None:
        await self.sql.execute("SELECT pgmq.send($1, $2::jsonb)", self.name, json.dumps(message))


class Opened(Struct, frozen=True):
    brokers: BrokerRegistry
    queue: QueueConfig
    broker: Broker
    publisher: Publisher
    store: MessageStore
    advice: list[str]

    async def take(self) -> list[Any]:
        return [received.handle for received in await self.broker.receive(50)]

    async def finish(self, *endings: Ending) -> None:
        finisher = self.broker.traits.finisher
        assert finisher is not None
        items = [Finish(*each) for each in zip(await self.take(), endings, strict=True)]
        assert not await finisher.finish(items)

    async def is_empty(self) -> bool:
        claim: Any = self.broker
        return not (await claim.claim(10)).messages

    async def found(self, message_id: str) -> MessageRecord:
        record = await self.store.find(message_id)
        assert record is not None
        return record


@pytest.fixture
async def place(pgmq: PgmqPlace, anyio_backend: object) -> AsyncIterator[Place]:
    del anyio_backend
    name = pgmq.new_queue()
    connection = await asyncpg.connect(pgmq.server.url)
    yield Place(pgmq.uri(name), name, connection)
    connection.terminate()


@pytest.fixture
async def fresh(
    pgmq: PgmqPlace, anyio_backend: object, request: pytest.FixtureRequest
) -> AsyncIterator[Place]:
    """A queue in a database with PGMQ, in which no router has been."""
    del anyio_backend
    database = f"fresh_{abs(hash(request.node.name))}"
    pgmq.server.sql(f"CREATE DATABASE {database}")
    server = pgmq.server.url.rpartition("/")[0]
    pgmq.server.install_pgmq(database)
    connection = await asyncpg.connect(f"{server}/{database}")
    await connection.execute("SELECT pgmq.create('orders')")
    uri = f"{server}/{database}?queue=orders".replace("postgresql:", "pgmq:")
    yield Place(uri, "orders", connection)
    connection.terminate()


@asynccontextmanager
async def registry(
    advice: list[str] | None = None, *, window: float = WINDOW
) -> AsyncIterator[BrokerRegistry]:
    async with BrokerRegistry(
        worker_id="worker-1",
        dedup_window=window,
        advise=lambda _, text: None if advice is None else advice.append(text),
    ) as brokers:
        yield brokers


@asynccontextmanager
async def opened(queue: QueueConfig, *, window: float = WINDOW) -> AsyncIterator[Opened]:
    advice: list[str] = []
    async with (
        registry(advice, window=window) as brokers,
        brokers.open_queue(queue) as broker,
        brokers.open_publisher(queue) as publisher,
    ):
        keeping = brokers.open_store(queue)
        assert keeping is not None
        async with keeping as store:
            yield Opened(brokers, queue, broker, publisher, store, advice)


def message(message_id: str, dedup_key: str | None = None, **fields: Any) -> Publication:
    body = {"id": message_id, "mediationTarget": "https://svc.example/do", **fields}
    encoded = msgspec.json.encode(body)
    return Publication(parse(encoded), encoded, dedup_key)


# What others send.


@pytest.mark.rule("CMD-14")
async def test_a_command_that_others_send_is_known_once_it_was_received(place: Place) -> None:
    await place.send({**COMMAND, "correlation_id": "k-1"})
    async with opened(place.queue(is_bus=True)) as site:
        before = await site.store.find("c-1")
        await site.finish(SUCCESS)
        after = await site.found("c-1")

    assert before is None
    assert (after.status, after.ending) == (MessageStatus.SUCCEEDED, SUCCESS)
    assert (after.pool, after.group, after.correlation_id) == ("P", "A-1", "k-1")
    assert after.payload_bytes == len(json.dumps(COMMAND["data"]))


@pytest.mark.rule("CMD-14")
async def test_the_state_of_a_command_survives_a_restart(place: Place) -> None:
    await place.send(COMMAND)
    await place.send({**COMMAND, "command_id": "c-2"})
    async with opened(place.queue(is_bus=True)) as site:
        await site.finish(SUCCESS, FAILURE)

    async with opened(place.queue(is_bus=True)) as site:
        succeeded, failed = await site.found("c-1"), await site.found("c-2")

    assert succeeded.ending == SUCCESS
    assert (failed.status, failed.ending) == (MessageStatus.FAILED, FAILURE)


@pytest.mark.rule("CMD-14", "P5")
@pytest.mark.parametrize(
    "given",
    [
        None,
        [],
        "text",
        "command_type",
        {"id": 7},
        {"id": ""},
        {"id": "x" * 513},
        {"command_type": "Debit", "command_id": {}},
        {"command_type": None, "data": []},
        {"command_type": {"a": 1}, "data": "text"},
    ],
)
async def test_what_names_no_message_has_no_state_and_is_handed_out(
    place: Place, given: object
) -> None:
    await place.send(given)
    async with opened(place.queue(is_bus=True)) as site:
        await site.finish(FAILURE)

        rows = await place.sql.fetchval(ROWS, f"pgmq:{place.name}")

    assert rows == 0


@pytest.mark.rule("CMD-14")
async def test_what_others_delete_is_unknown_and_its_row_goes_later(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "TEND_SECONDS", 0.0)
    monkeypatch.setattr(states, "SWEEP_SECONDS", 0.0)
    async with opened(place.queue()) as site:
        await site.publisher.publish([message("theirs"), message("old"), message("ours")])
        await place.sql.execute("SELECT pgmq.delete($1, ARRAY[1::bigint, 2])", place.name)
        await place.sql.execute(
            "UPDATE message_router.queue_messages SET published_at = published_at - interval '1 h'"
            " WHERE queue = $1 AND message_id = 'old'",
            f"pgmq:{place.name}",
        )

        known = [await site.store.find(each) for each in ("theirs", "old")]
        await site.finish(SUCCESS)
        await site.is_empty()

        left = await place.sql.fetch(
            "SELECT message_id FROM message_router.queue_messages WHERE queue = $1 ORDER BY id",
            f"pgmq:{place.name}",
        )

    assert known == [None, None]
    assert [row["message_id"] for row in left] == ["theirs", "ours"]


@pytest.mark.rule("CMD-14")
async def test_a_reply_has_no_state(place: Place) -> None:
    async with opened(place.queue()) as site:
        reply = replace(message("r"), message=replace(message("r").message, target=""))
        await site.publisher.publish([message("a"), reply])

        assert await site.store.find("r") is None
        assert (await site.found("a")).status is MessageStatus.READY


@pytest.mark.rule("CMD-14", "CMD-11")
async def test_a_next_step_is_known_as_soon_as_it_is_published(place: Place) -> None:
    async with opened(place.queue()) as site:
        await site.publisher.publish([message("a")])
        (handle,) = await site.take()
        finisher = site.broker.traits.finisher
        assert finisher is not None
        step = OutgoingMessage(site.queue, message("b", dedup_key="then-1"))
        await finisher.finish([Finish(handle, SUCCESS, (step,))])

        assert (await site.found("b")).status is MessageStatus.READY


# The same command again.


async def is_run_again(place: Place, first: object, second: object, ending: Ending) -> bool:
    async with opened(place.queue(is_bus=True)) as site:
        await place.send(first)
        await site.finish(ending)
        await place.send(second)
        return not await site.is_empty()


@pytest.mark.rule("CMD-14")
@pytest.mark.parametrize(
    "again",
    [
        '{"command_id": "c-1", "command_type": "Debit", "data": {"n": 1.5, "account": "A-1"}}',
        '{"data":{"account":"A-1","n":1.500},"command_type":"Debit","command_id":"c-1"}',
        '{"data":{"account":"x","account":"A-1","n":15e-1},"command_type":"Debit","command_id":"c-1"}',
    ],
)
async def test_a_command_that_has_succeeded_does_not_run_again(place: Place, again: str) -> None:
    async with opened(place.queue(is_bus=True)) as site:
        await place.send(COMMAND)
        await site.finish(SUCCESS)
        await place.sql.execute("SELECT pgmq.send($1, $2::jsonb)", place.name, again)

        assert await site.is_empty()
        copy = await site.found("c-1")
        left = await place.sql.fetchval(f'SELECT count(*) FROM pgmq."q_{place.name}"')  # noqa: S608

    assert (copy.status, copy.ending) == (MessageStatus.SUCCEEDED, SUCCESS)
    assert (left, site.advice) == (0, [])


@pytest.mark.rule("CMD-14")
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ('{"n": 1.0, "t": "a.0"}', '{"n": 1, "t": "a.0"}'),
        ('{"n": -0.00}', '{"n": 0}'),
        ('{"n": 1.0500, "m": [1.10, 20.0]}', '{"n": 1.05, "m": [1.1, 20]}'),
        ('{"t": "\\" 1.0, \\\\", "n": 10.0}', '{"t": "\\" 1.0, \\\\", "n": 10}'),
    ],
)
async def test_bodies_are_compared_as_jsonb_compares_them(
    place: Place, first: str, second: str
) -> None:
    async with opened(place.queue()):  # installs the schema
        (row,) = await place.sql.fetch(
            "SELECT $1::jsonb = $2::jsonb AS are_equal, message_router.pgmq_digest_of($1::jsonb)"
            " = message_router.pgmq_digest_of($2::jsonb) AS look_equal",
            first,
            second,
        )

    assert (row["are_equal"], row["look_equal"]) == (True, True)


@pytest.mark.rule("CMD-14")
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ('{"n": 10}', '{"n": 1}'),
        ('{"n": 1.05}', '{"n": 1.5}'),
        ('{"n": 1.509}', '{"n": 1.59}'),
        ('{"t": "1.0, "}', '{"t": "1, "}'),
        ('{"t": "\\"1.0]"}', '{"t": "\\"1]"}'),
        ('{"n": [1.0, 2]}', '{"n": [2, 1.0]}'),
        ('{"n": "1.0"}', '{"n": 1.0}'),
        ('{"n": 100.0}', '{"n": 1}'),
    ],
)
async def test_bodies_that_jsonb_tells_apart_are_told_apart(
    place: Place, first: str, second: str
) -> None:
    async with opened(place.queue()):
        (row,) = await place.sql.fetch(
            "SELECT $1::jsonb = $2::jsonb AS are_equal, message_router.pgmq_digest_of($1::jsonb)"
            " = message_router.pgmq_digest_of($2::jsonb) AS look_equal",
            first,
            second,
        )

    assert (row["are_equal"], row["look_equal"]) == (False, False)


@pytest.mark.rule("CMD-14")
async def test_a_command_with_the_same_id_and_another_body_runs_with_a_warning(
    place: Place,
) -> None:
    async with opened(place.queue(is_bus=True)) as site:
        await place.send(COMMAND)
        await site.finish(SUCCESS)
        await place.send({**COMMAND, "data": {"n": 2, "account": "A-1"}})

        assert not await site.is_empty()

    assert [text for text in site.advice if "other content" in text] == site.advice != []


@pytest.mark.rule("CMD-14")
async def test_a_command_that_has_failed_runs_again(place: Place) -> None:
    assert await is_run_again(place, COMMAND, COMMAND, FAILURE)


@pytest.mark.rule("CMD-14")
async def test_a_command_runs_again_after_the_window(place: Place) -> None:
    async with opened(place.queue(is_bus=True), window=0.2) as site:
        await place.send(COMMAND)
        await site.finish(SUCCESS)
        await asyncio.sleep(0.25)
        await place.send(COMMAND)

        assert not await site.is_empty()


@pytest.mark.rule("CMD-14", "CMD-4")
async def test_members_of_batches_and_what_has_a_dedup_key_always_run(place: Place) -> None:
    async with opened(place.queue()) as site:
        await site.publisher.publish([message("a", payload=1), message("b", payload=1)])
        await site.finish(SUCCESS, SUCCESS)
        await site.publisher.publish([message("b", dedup_key="k", payload=1)])
        await site.store.open_batch("batch", None, message("done"), [message("a", payload=1)])

        assert len(await site.take()) == 2


ALIKE = """
INSERT INTO message_router.queue_messages (
    queue, message_id, state, finished_at, body, pgmq_id, pgmq_digest
)
SELECT $1, 'x', 'succeeded', clock_timestamp() - interval '1 h', '', 1000000 + $2::bigint + i, ''
FROM generate_series(1, $2) AS i
"""
RECEIVE = """
EXPLAIN (ANALYZE, BUFFERS) SELECT FROM message_router.receive_from_pgmq(
    $1, 'w', 300, ARRAY[$2::bigint], ARRAY[1], ARRAY[now()], ARRAY['x'], ARRAY['P'],
    ARRAY[NULL], ARRAY[NULL], ARRAY[NULL::integer], ARRAY[false], ARRAY['new'::bytea]
)
"""


@pytest.mark.rule("CMD-14", "P5")
async def test_a_receive_costs_the_same_however_many_messages_have_its_id(place: Place) -> None:
    """Some publishers give all of their messages one id."""
    rows, pages = f"pgmq:{place.name}", list[int]()
    async with opened(place.queue()):
        await place.sql.fetch(RECEIVE, rows, 1)  # reads what each session reads once
        for count in (2_000, 20_000):
            await place.sql.execute(ALIKE, rows, count)
            plan = await place.sql.fetch(RECEIVE, rows, count)
            pages.append(int(re.findall(r"hit=(\d+)", " ".join(line for (line,) in plan))[0]))

    assert pages[1] <= 2 * pages[0] + 100


@pytest.mark.rule("CMD-14", "P1")
async def test_a_message_is_not_hidden_because_old_rows_cannot_be_removed(
    fresh: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "TEND_SECONDS", 0.0)
    async with opened(fresh.queue()) as site:
        await site.publisher.publish([message("a")])
        await fresh.sql.execute("ALTER FUNCTION message_router.prune_pgmq RENAME TO broken")
        with pytest.raises(BrokerError):
            await site.take()
        await fresh.sql.execute("ALTER FUNCTION message_router.broken RENAME TO prune_pgmq")

        assert not await site.is_empty()


@pytest.mark.rule("CMD-14", "CMD-4")
async def test_a_callback_that_jsonb_cannot_store_is_refused(place: Place) -> None:
    async with opened(place.queue()) as site:
        done = message("done", messageGroupId="\0")
        with pytest.raises(DataRefused, match=r"a callback that contains .u0000"):
            await site.store.open_batch("batch", None, done, [message("a")])

        assert await site.is_empty()


# The schema.


async def limited(place: Place, role: str) -> Place:
    """The same place for a user who has only what PGMQ needs."""
    await place.sql.execute(f"CREATE USER {role}")
    await place.sql.execute(f"GRANT USAGE ON SCHEMA pgmq TO {role}")
    await place.sql.execute(f"GRANT ALL ON pgmq.q_orders, pgmq.a_orders TO {role}")
    return replace(place, uri=place.uri.replace("//app@", f"//{role}@") + "&notify=false")


async def advice_of(place: Place) -> list[str]:
    """What the router says when it opens the queue twice, and works without states."""
    advice: list[str] = []
    queue = place.queue()
    async with registry(advice) as brokers:
        for _ in range(2):
            async with brokers.open_queue(queue) as broker:
                await place.send({"id": "a"})
                (received,) = await broker.receive(10)
                assert not await broker.ack([received.handle])
        assert brokers.open_store(queue) is None
    return advice


async def keeps_states(place: Place) -> bool:
    async with opened(place.queue()) as site:
        await place.send({"id": "a"})
        await site.finish(SUCCESS)
        return (await site.found("a")).status is MessageStatus.SUCCEEDED and not site.advice


@pytest.mark.rule("CMD-14")
async def test_without_the_right_to_make_the_schema_the_queue_works_and_says_what_to_grant(
    fresh: Place,
) -> None:
    place = await limited(fresh, "no_schema")
    database = place.uri.rpartition("/")[2].partition("?")[0]

    (advice,) = await advice_of(place)
    grant = advice.rpartition(": ")[2]
    await fresh.sql.execute(grant)

    assert grant == f'GRANT CREATE ON DATABASE "{database}" TO "no_schema"'
    assert await keeps_states(place)


@pytest.mark.rule("CMD-14")
async def test_a_schema_that_was_made_for_us_needs_only_the_right_to_use_it(fresh: Place) -> None:
    place = await limited(fresh, "given_schema")
    await fresh.sql.execute("CREATE SCHEMA message_router")

    (advice,) = await advice_of(place)
    grant = advice.rpartition(": ")[2]
    await fresh.sql.execute(grant)

    assert grant == 'GRANT USAGE, CREATE ON SCHEMA message_router TO "given_schema"'
    assert await keeps_states(place)


@pytest.mark.rule("CMD-14")
async def test_a_schema_of_another_user_of_ours_needs_rights_on_its_tables(fresh: Place) -> None:
    async with opened(fresh.queue()):
        pass
    place = await limited(fresh, "other_owner")

    (advice,) = await advice_of(place)
    await fresh.sql.execute(advice.partition("run: ")[2])

    assert await keeps_states(place)


@pytest.mark.rule("CMD-14")
@pytest.mark.parametrize("name", ["invoices", "schema_versions", "queue_messages"])
async def test_a_schema_that_somebody_else_has_made_is_left_as_it_is(
    fresh: Place, name: str
) -> None:
    await fresh.sql.execute(f"CREATE SCHEMA message_router; CREATE TABLE message_router.{name} ()")

    (advice,) = await advice_of(fresh)

    tables = await fresh.sql.fetch(
        "SELECT relname FROM pg_class WHERE relnamespace = 'message_router'::regnamespace"
    )
    assert "somebody else has made a schema message_router" in advice
    assert [row["relname"] for row in tables] == [name]


@pytest.mark.rule("CMD-14", "WQ-12")
async def test_routers_that_start_together_install_the_schema_once(fresh: Place) -> None:
    async with AsyncExitStack() as stack:
        sites = await asyncio.gather(
            *(stack.enter_async_context(opened(fresh.queue())) for _ in range(6))
        )
        await sites[0].publisher.publish([message("a")])
        await sites[1].finish(SUCCESS)
        found = [await site.found("a") for site in sites]
        versions = await fresh.sql.fetchval("SELECT count(*) FROM message_router.schema_versions")

    assert {each.status for each in found} == {MessageStatus.SUCCEEDED}
    assert (versions, [site.advice for site in sites]) == (1, [[]] * 6)


@pytest.mark.rule("CMD-14", "WQ-12")
async def test_the_schema_of_an_older_work_queue_is_upgraded_in_place(fresh: Place) -> None:
    address = fresh.uri.partition("?")[0].replace("pgmq:", "postgresql:")
    await write_old_schema(address)
    before = await fresh.sql.fetchval("SELECT count(*) FROM message_router.queue_messages")

    assert await keeps_states(fresh)

    after = await fresh.sql.fetchval(
        "SELECT count(*) FROM message_router.queue_messages WHERE pgmq_id IS NULL"
    )
    assert before == after > 0


@pytest.mark.rule("CMD-14", "BRK-6")
async def test_a_schema_that_is_dropped_is_installed_again(fresh: Place) -> None:
    async with opened(fresh.queue()) as site:
        await site.publisher.publish([message("a")])
        await fresh.sql.execute("DROP SCHEMA message_router CASCADE")
        with pytest.raises(BrokerError):
            await site.broker.receive(1)
        async with site.brokers.open_queue(site.queue) as broker:
            (received,) = await broker.receive(1)

            assert not await broker.ack([received.handle])
        assert (await site.found("a")).status is MessageStatus.SUCCEEDED


@pytest.mark.rule("CMD-14", "CMD-10")
async def test_a_tick_may_come_before_anything_is_consumed(fresh: Place) -> None:
    async with registry() as brokers:
        opening = brokers.open_store(fresh.queue())
        assert opening is not None
        async with opening as store:
            assert await store.publish_tick("nightly", 60, message("nightly-60"))
            assert await store.last_tick("nightly") == 60


@pytest.mark.rule("CMD-14")
async def test_a_store_that_cannot_be_made_is_told_once_and_then_there_is_none(
    fresh: Place,
) -> None:
    place, advice = await limited(fresh, "asks_first"), list[str]()
    async with registry(advice) as brokers:
        opening = brokers.open_store(place.queue())
        assert opening is not None
        with pytest.raises(BrokerError, match="not kept"):
            async with opening:
                pass

        assert brokers.open_store(place.queue()) is None
    assert [text for text in advice if "GRANT CREATE ON DATABASE" in text] == advice != []


@pytest.mark.rule("CMD-14")
async def test_publishing_installs_nothing(fresh: Place) -> None:
    async with registry() as brokers, brokers.open_publisher(fresh.queue()) as publisher:
        await publisher.publish([message("a")])

    assert await fresh.sql.fetchval("SELECT to_regnamespace('message_router')") is None


@pytest.mark.rule("CMD-14")
@pytest.mark.parametrize("kind", ["off", "raw", "strict"])
async def test_no_states_are_kept_if_they_are_off_or_of_raw_and_strict_queues(
    fresh: Place, kind: str
) -> None:
    queue = fresh.queue("&state=false" if kind == "off" else "")
    if kind == "raw":
        queue = replace(queue, route=RawRoute(target="https://svc.example/raw"))
    if kind == "strict":
        queue = replace(queue, ordering=Ordering.STRICT)
    async with registry() as brokers:
        async with brokers.open_queue(queue):
            pass
        assert brokers.open_store(queue) is None

    assert await fresh.sql.fetchval("SELECT to_regnamespace('message_router')") is None
