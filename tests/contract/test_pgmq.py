"""What only PGMQ does, and who else may work on its queues."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest
from msgspec.structs import replace

from router.brokers import BrokerRegistry
from router.brokers.pgmq import broker as pgmq_broker
from router.brokers.work_queue import ROWS_PER_PAGE
from router.core.config import QueueConfig, Route
from router.core.envelope import reader_of
from router.core.message import UNTRIED, Tally
from router.core.outcome import Ending, Failure
from router.ports import (
    Broker,
    DataRefused,
    Disconnected,
    Finish,
    MessageFilter,
    MessageLister,
    MessageStatus,
    Nack,
    OutgoingMessage,
    Publication,
    QueueRefused,
)
from tests.contract.cases import (
    PARENT,
    TRACED,
    Ends,
    bodies,
    both_ends,
    publication,
    queue_at,
    receive_one,
)
from tests.contract.pgmq_place import PgmqPlace
from tests.support.servers.postgres import PostgresServer

pytestmark = pytest.mark.anyio

COMMAND = {"command_id": "c-1", "command_type": "Debit", "data": {"amount": 1}}
# As PGMQ was before it had headers, grouped reads and notifications.
OLD_PGMQ = """
CREATE SCHEMA pgmq;
CREATE TYPE pgmq.message_record AS (
    msg_id BIGINT, read_ct INTEGER, enqueued_at TIMESTAMPTZ, vt TIMESTAMPTZ, message JSONB
);
CREATE TABLE pgmq.q_orders (
    msg_id BIGINT PRIMARY KEY GENERATED ALWAYS AS IDENTITY, read_ct INT DEFAULT 0 NOT NULL,
    enqueued_at TIMESTAMPTZ DEFAULT now() NOT NULL, vt TIMESTAMPTZ NOT NULL, message JSONB
);
CREATE TABLE pgmq.a_orders (LIKE pgmq.q_orders);
CREATE FUNCTION pgmq.read(queue_name TEXT, vt INTEGER, qty INTEGER)
RETURNS SETOF pgmq.message_record LANGUAGE sql AS $$
    UPDATE pgmq.q_orders AS m
    SET vt = clock_timestamp() + make_interval(secs => read.vt), read_ct = read_ct + 1
    WHERE msg_id IN (
        SELECT msg_id FROM pgmq.q_orders AS q WHERE q.vt <= clock_timestamp()
        ORDER BY msg_id LIMIT qty FOR UPDATE SKIP LOCKED
    )
    RETURNING msg_id, read_ct, enqueued_at, m.vt, message
$$;
CREATE FUNCTION pgmq.delete(queue_name TEXT, msg_ids BIGINT[])
RETURNS SETOF BIGINT LANGUAGE sql AS $$
    DELETE FROM pgmq.q_orders WHERE msg_id = ANY(msg_ids) RETURNING msg_id
$$;
CREATE FUNCTION pgmq.archive(queue_name TEXT, msg_ids BIGINT[])
RETURNS SETOF BIGINT LANGUAGE sql AS $$
    WITH gone AS (DELETE FROM pgmq.q_orders WHERE msg_id = ANY(msg_ids) RETURNING *)
    INSERT INTO pgmq.a_orders SELECT * FROM gone RETURNING msg_id
$$;
CREATE FUNCTION pgmq.set_vt(queue_name TEXT, msg_id BIGINT, vt INTEGER)
RETURNS SETOF pgmq.message_record LANGUAGE sql AS $$
    UPDATE pgmq.q_orders AS m SET vt = clock_timestamp() + make_interval(secs => set_vt.vt)
    WHERE m.msg_id = set_vt.msg_id
    RETURNING m.msg_id, read_ct, enqueued_at, m.vt, message
$$;
CREATE FUNCTION pgmq.send_batch(queue_name TEXT, msgs JSONB[], delay INTEGER DEFAULT 0)
RETURNS SETOF BIGINT LANGUAGE sql AS $$
    INSERT INTO pgmq.q_orders (vt, message)
    SELECT clock_timestamp() + make_interval(secs => delay), unnest(msgs) RETURNING msg_id
$$;
"""


@pytest.fixture
def server(pgmq: PgmqPlace) -> PostgresServer:
    return pgmq.server


@pytest.fixture
async def brokers(anyio_backend: object) -> AsyncIterator[BrokerRegistry]:
    del anyio_backend  # asked for only to run on its loop
    async with BrokerRegistry(worker_id="worker-1", dedup_window=300.0) as brokers:
        yield brokers


@pytest.fixture
def name(pgmq: PgmqPlace) -> str:
    return pgmq.new_queue()


@pytest.fixture
def options() -> str:
    return ""


@pytest.fixture
async def ends(
    pgmq: PgmqPlace, brokers: BrokerRegistry, name: str, options: str
) -> AsyncIterator[Ends]:
    async with both_ends(brokers, queue_at(pgmq.uri(name, options))) as ends:
        yield ends


@pytest.fixture
async def other(server: PostgresServer, anyio_backend: object) -> AsyncIterator[Any]:
    """A connection of someone who knows nothing but SQL."""
    del anyio_backend
    connection = await asyncpg.connect(server.url)
    yield connection
    connection.terminate()


def commands_at(pgmq: PgmqPlace, name: str) -> QueueConfig:
    route = Route(target="https://svc.example/debit")
    queue = queue_at(pgmq.uri(name))
    return replace(queue, envelope="command-bus", routes=(("Debit", route),))


async def send(other: Any, name: str, message: object, headers: object = None) -> None:
    given = None if headers is None else json.dumps(headers)
    await other.execute(
        "SELECT pgmq.send($1, $2::jsonb, $3::jsonb)", name, json.dumps(message), given
    )


async def rows(other: Any, table: str) -> list[Any]:
    found: list[Any] = await other.fetch(f'SELECT * FROM pgmq."{table}" ORDER BY msg_id')  # noqa: S608
    return found


# What cannot be consumed.


@pytest.mark.rule("BRK-6", "CFG-7")
async def test_a_queue_that_does_not_exist_is_refused_with_what_to_do(
    pgmq: PgmqPlace, brokers: BrokerRegistry
) -> None:
    queue = queue_at(pgmq.uri("nowhere"))
    publisher = brokers.open_publisher(queue)

    for opening in (brokers.open_queue(queue), publisher):
        with pytest.raises(QueueRefused, match=r"no PGMQ queue 'nowhere'.*pgmq\.create\('nowhere'"):
            async with opening:
                pass


@pytest.mark.rule("BRK-6", "CFG-7")
async def test_a_database_without_pgmq_is_refused_and_left_as_it_is(
    server: PostgresServer, brokers: BrokerRegistry, other: Any
) -> None:
    await other.execute("CREATE DATABASE plain")
    address = server.url.replace("/postgres", "/plain")
    uri = address.replace("postgresql:", "pgmq:")

    with pytest.raises(QueueRefused, match="has no PGMQ: install it with CREATE EXTENSION pgmq"):
        async with brokers.open_queue(queue_at(f"{uri}?queue=orders")):
            pass

    connection = await asyncpg.connect(address)
    assert await connection.fetchval("SELECT to_regnamespace('message_router')") is None
    await connection.close()


@pytest.mark.rule("BRK-6")
async def test_a_queue_that_is_dropped_is_a_lost_connection_then_a_refusal(
    ends: Ends, name: str, other: Any
) -> None:
    waiting = asyncio.ensure_future(ends.broker.receive(1))
    await asyncio.sleep(0.1)

    await other.execute("SELECT pgmq.drop_queue($1)", name)

    with pytest.raises(Disconnected):
        await waiting
    with pytest.raises(QueueRefused, match="no PGMQ queue"):
        async with ends.brokers.open_queue(ends.queue):
            pass


# What becomes of a message.


@pytest.mark.rule("BRK-3")
async def test_a_success_deletes_and_a_dead_letter_archives(
    ends: Ends, name: str, other: Any
) -> None:
    await ends.publisher.publish([publication("good"), publication("bad")])
    good, bad = await ends.broker.receive(10)

    await ends.broker.ack([good.handle])
    await ends.broker.ack([bad.handle], error="HTTP 422")

    assert await rows(other, f"q_{name}") == []
    (archived,) = await rows(other, f"a_{name}")
    assert archived["message"] == '"bad"'


@pytest.mark.rule("WQ-5")
async def test_what_was_tried_is_kept_in_the_headers_beside_those_of_others(
    ends: Ends, name: str, other: Any
) -> None:
    await send(other, name, {"id": "a"}, {"tenant": "t"})
    received = await receive_one(ends.broker)

    await ends.broker.nack([Nack(received.handle, 0, Tally(failures=2, requests=5))])

    (row,) = await rows(other, f"q_{name}")
    assert json.loads(row["headers"]) == {
        "tenant": "t",
        "x-message-router": {"failures": 2, "requests": 5},
    }
    assert (await receive_one(ends.broker)).tally == Tally(failures=2, requests=5)


@pytest.mark.rule("CMD-7")
@pytest.mark.parametrize("headers", [{"x-message-router": 7}, {"x-message-router": {}}, [1], "a"])
async def test_headers_that_make_no_sense_are_ignored(
    ends: Ends, name: str, other: Any, headers: object
) -> None:
    await send(other, name, {"id": "a"}, headers)

    received = await receive_one(ends.broker)
    await ends.broker.nack([Nack(received.handle, 0, Tally(failures=1))])

    assert received.tally == UNTRIED
    assert (await receive_one(ends.broker)).tally == Tally(failures=1)


@pytest.mark.rule("WQ-3")
async def test_whoever_reads_a_message_again_makes_our_lease_stale(
    pgmq: PgmqPlace, brokers: BrokerRegistry, name: str, other: Any
) -> None:
    async with both_ends(brokers, queue_at(pgmq.uri(name), lease=1)) as ends:
        await ends.publisher.publish([publication("a")])
        ours = await receive_one(ends.broker)
        await asyncio.sleep(1.1)
        theirs = await other.fetchrow("SELECT * FROM pgmq.read($1, 30, 1)", name)

        unsettled = await ends.broker.ack([ours.handle])
        not_extended = await ends.broker.extend([ours.handle], 30)
        refused = await ends.broker.nack([Nack(ours.handle, 0)])
        assert [(one.handle, one.stale) for one in refused] == [(ours.handle, True)]

    assert [one.stale for one in (*unsettled, *not_extended)] == [True, True]
    (row,) = await rows(other, f"q_{name}")
    assert (row["read_ct"], row["vt"]) == (theirs["read_ct"], theirs["vt"])


@pytest.mark.rule("WQ-3", "ID-1")
async def test_a_handle_settles_nothing_in_a_queue_that_was_made_again(
    ends: Ends, name: str, other: Any
) -> None:
    await ends.publisher.publish([publication("old")])
    old = await receive_one(ends.broker)
    await other.execute("SELECT pgmq.drop_queue($1)", name)
    await other.execute("SELECT pgmq.create($1)", name)
    await ends.publisher.publish([publication("new")])
    new = await receive_one(ends.broker)

    unsettled = await ends.broker.ack([old.handle])

    assert [one.stale for one in unsettled] == [True]
    assert old.broker_id != new.broker_id
    assert not await ends.broker.ack([new.handle])


# What is in a message.


@pytest.mark.rule("CMD-7")
async def test_a_message_of_anybody_is_the_text_that_jsonb_gives(
    ends: Ends, name: str, other: Any
) -> None:
    await other.execute("SELECT pgmq.send($1, $2::jsonb)", name, '{"b":1.50,  "a":"ž"}')

    assert (await receive_one(ends.broker)).body == '{"a": "ž", "b": 1.50}'.encode()


@pytest.mark.rule("CMD-7")
async def test_a_message_that_is_no_json_for_jsonb_comes_back_as_it_was(ends: Ends) -> None:
    odd = [
        b'{"id": "\\u0000"}',
        b'{"id": 1e400000}',
        b'{"id": "\\ud800"}',
        b'"text"',
        b"[1,2]",
        b"",
        b"{" * 100,
    ]
    await ends.publisher.publish([publication("a", body=body) for body in odd])

    assert [received.body for received in await ends.broker.receive(10)] == odd


@pytest.mark.rule("CMD-7")
async def test_a_body_that_is_no_text_is_refused(ends: Ends) -> None:
    with pytest.raises(DataRefused, match="not UTF-8"):
        await ends.publisher.publish([publication("a", body=b"\xff")])


@pytest.mark.rule("CMD-7")
async def test_a_row_without_a_message_is_handed_over_without_a_body(
    ends: Ends, name: str, other: Any
) -> None:
    await other.execute("SELECT pgmq.send($1, NULL::jsonb)", name)

    assert (await receive_one(ends.broker)).body == b""


@pytest.mark.rule("MED-1")
async def test_the_trace_of_who_sent_it_goes_on(ends: Ends, name: str, other: Any) -> None:
    await send(other, name, {"id": "a"}, TRACED)

    assert (await receive_one(ends.broker)).parent == PARENT


@pytest.mark.rule("CMD-5")
async def test_a_scheduled_message_waits_in_the_queue(ends: Ends, other: Any) -> None:
    now = await other.fetchval("SELECT extract(epoch FROM clock_timestamp())::float8")
    later = replace(publication("later"), not_before=now + 2)
    past = replace(publication("past"), not_before=now - 60)
    await ends.publisher.publish([later, publication("now"), past])

    first = bodies(await ends.broker.receive(10))
    depth = await ends.broker.depth()
    (second,) = await ends.broker.receive(10)

    assert set(first) == {"past", "now"}
    assert depth is not None
    assert (depth.waiting, depth.in_flight, depth.due) == (1, 2, 0)
    assert second.body == b"later"
    due = await other.fetchval("SELECT extract(epoch FROM clock_timestamp())::float8")
    assert now + 2 <= due < now + 5


# Waking.


@pytest.mark.rule("WQ-6")
async def test_an_insert_of_anybody_wakes_who_waits(
    ends: Ends, pgmq: PgmqPlace, name: str, other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pgmq_broker, "FIRST_POLL_SECONDS", 15.0)
    monkeypatch.setattr(pgmq_broker, "LAST_POLL_SECONDS", 15.0)
    async with ends.brokers.open_queue(queue_at(pgmq.uri(name))) as broker:
        waiting = asyncio.ensure_future(broker.receive(1))
        await asyncio.sleep(1)
        await send(other, name, {"id": "a"})

        async with asyncio.timeout(5):
            assert len(await waiting) == 1


@pytest.mark.rule("CMD-7")
async def test_a_queue_may_be_left_without_notifications(
    pgmq: PgmqPlace, brokers: BrokerRegistry, name: str, other: Any
) -> None:
    async with brokers.open_queue(queue_at(pgmq.uri(name, "&notify=false"))) as broker:
        await send(other, name, {"id": "a"})

        assert len(await broker.receive(1)) == 1

    triggers = (
        "SELECT count(*) FROM pg_trigger WHERE tgrelid = $1::text::regclass AND NOT tgisinternal"
    )
    assert await other.fetchval(triggers, f'pgmq."q_{name}"') == 0


@pytest.mark.rule("CMD-7")
async def test_a_user_who_may_not_make_triggers_polls(
    pgmq: PgmqPlace, brokers: BrokerRegistry, name: str, other: Any
) -> None:
    user = f"reader_{name}"
    await other.execute(f"CREATE USER {user}")
    await other.execute(f"GRANT USAGE ON SCHEMA pgmq TO {user}")
    await other.execute(f"GRANT ALL ON pgmq.q_{name} TO {user}")
    await send(other, name, {"id": "a"})
    uri = pgmq.uri(name).replace("//app@", f"//{user}@")

    async with brokers.open_queue(queue_at(uri)) as broker:
        received = await receive_one(broker)
        assert not await broker.ack([received.handle])


# Order.


@pytest.mark.rule("FIFO-1", "P3")
async def test_with_fifo_what_names_no_group_is_one_group_unless_we_published_it(
    pgmq: PgmqPlace, brokers: BrokerRegistry, name: str, other: Any
) -> None:
    async with both_ends(brokers, queue_at(pgmq.uri(name, "&fifo=true"))) as ends:
        await send(other, name, {"id": "theirs-1"})
        await send(other, name, {"id": "theirs-2"})
        await ends.publisher.publish([publication("ours-1"), publication("ours-2")])

        batch = await ends.broker.receive(10)

    assert bodies(batch) == ['{"id": "theirs-1"}', "ours-1", "ours-2"]


@pytest.mark.rule("FIFO-1", "P3")
async def test_with_fifo_a_hidden_message_in_the_middle_is_not_passed(
    pgmq: PgmqPlace, brokers: BrokerRegistry, name: str, other: Any
) -> None:
    async with both_ends(brokers, queue_at(pgmq.uri(name, "&fifo=true"))) as ends:
        await ends.publisher.publish([publication(each, group="g") for each in "abc"])
        await other.execute("SELECT pgmq.set_vt($1, 2::bigint, 2)", name)
        received = []
        for _ in range(3):
            (one,) = await ends.broker.receive(10)
            received.append(one)
            await ends.broker.ack([one.handle])

    assert bodies(received) == ["a", "b", "c"]


@pytest.mark.rule("FIFO-1")
async def test_without_fifo_a_group_that_went_back_comes_back_together(ends: Ends) -> None:
    messages = [publication(f"{n}", body=b'{"messageGroupId": "g", "n": %d}' % n) for n in range(3)]
    await ends.publisher.publish(messages)
    batch = await ends.broker.receive(10)
    for received in batch:
        await ends.broker.nack([Nack(received.handle, 1)])
        await asyncio.sleep(0.2)

    again = await ends.broker.receive(10)

    assert bodies(again) == bodies(batch)


# Others on the same queue.


@pytest.mark.rule("P1", "P2")
async def test_a_worker_that_speaks_sql_and_ours_share_a_queue(  # noqa: C901  two workers
    ends: Ends, name: str, other: Any
) -> None:
    """Its kind of work: read, then delete, archive or set_vt. Nothing is lost, nothing doubled."""
    total = 600
    await ends.publisher.publish([publication(f"m-{n}") for n in range(total)])
    done: list[str] = []
    returned: set[str] = set()

    def is_to_return(body: str) -> bool:
        """Every seventh goes back once."""
        if int(body.partition("-")[2]) % 7 or body in returned:
            return False
        returned.add(body)
        return True

    async def work_in_sql() -> int:
        count = 0
        while len(done) < total:
            read = await other.fetch("SELECT * FROM pgmq.read($1, 30, 5)", name)
            for row in read:
                body, msg_id = json.loads(row["message"]), row["msg_id"]
                if is_to_return(body):
                    await other.execute("SELECT pgmq.set_vt($1, $2::bigint, 0)", name, msg_id)
                    continue
                ending = "archive" if len(done) % 2 else "delete"
                assert await other.fetchval(f"SELECT pgmq.{ending}($1, $2::bigint)", name, msg_id)
                done.append(body)
                count += 1
            await asyncio.sleep(0.001)
        ends.broker.stop()
        return count

    async def work() -> int:
        count = 0
        while len(done) < total:
            for received in await ends.broker.receive(5):
                body = received.body.decode()
                if is_to_return(body):
                    await ends.broker.nack([Nack(received.handle, 0)])
                    continue
                assert not await ends.broker.ack([received.handle])
                done.append(body)
                count += 1
        return count

    async with asyncio.timeout(60), asyncio.TaskGroup() as workers:
        theirs = workers.create_task(work_in_sql())
        ours = workers.create_task(work())

    assert sorted(done) == sorted(f"m-{n}" for n in range(total))
    assert min(theirs.result(), ours.result()) > 0
    assert len(returned) == len(range(0, total, 7))
    assert await rows(other, f"q_{name}") == []


# Commands and replies.


@pytest.mark.rule("CMD-7")
async def test_the_body_of_a_command_stays_what_it_is(
    pgmq: PgmqPlace, brokers: BrokerRegistry, name: str, other: Any
) -> None:
    await send(other, name, COMMAND)

    async with brokers.open_queue(commands_at(pgmq, name)) as broker:
        received = await receive_one(broker)

    assert json.loads(received.body) == COMMAND
    assert reader_of(commands_at(pgmq, name))(received.body).target == "https://svc.example/debit"


def reply_to(queue: QueueConfig, **content: object) -> OutgoingMessage:
    body = json.dumps({"command_id": "c-1", **content}).encode()
    return OutgoingMessage(queue, Publication(publication("reply").message, body, "reply-1"))


@asynccontextmanager
async def with_replies(
    pgmq: PgmqPlace, brokers: BrokerRegistry, name: str
) -> AsyncIterator[tuple[Broker, QueueConfig]]:
    replies = QueueConfig(name="replies", uri=pgmq.uri(pgmq.new_queue()))
    async with brokers.open_queue(commands_at(pgmq, name)) as broker:
        yield broker, replies


def table_of(queue: QueueConfig, prefix: str = "q") -> str:
    return f"{prefix}_{queue.uri.partition('queue=')[2]}"


@pytest.mark.rule("CMD-3")
async def test_a_message_ends_and_its_reply_is_sent_in_one_transaction(
    pgmq: PgmqPlace, brokers: BrokerRegistry, name: str, other: Any
) -> None:
    await send(other, name, COMMAND)
    await send(other, name, COMMAND)
    async with with_replies(pgmq, brokers, name) as (broker, replies):
        good, bad = await broker.receive(10)
        finisher = broker.traits.finisher
        assert finisher is not None
        assert finisher.takes(replies)
        assert not finisher.takes(QueueConfig(name="r", uri="postgresql://h/app?queue=r"))
        assert not finisher.takes(QueueConfig(name="r", uri="pgmq://elsewhere/app?queue=r"))
        assert not finisher.takes(replace(replies, uri=f"{replies.uri};"))  # no name at all
        assert finisher.takes(replace(replies, uri=replies.uri.replace("//app@", "//u:pw@")))

        unsettled = await finisher.finish(
            [
                Finish(
                    good.handle,
                    Ending(result=b"[1]"),
                    (reply_to(replies, outcome="SUCCESS", result=[1]),),
                ),
                Finish(
                    bad.handle,
                    Ending(failure=Failure("NO_FUNDS", "none left")),
                    (reply_to(replies, outcome="FAILED", error_code="E", error_message="no"),),
                ),
            ]
        )

    assert unsettled == []
    assert await rows(other, f"q_{name}") == []
    assert len(await rows(other, f"a_{name}")) == 1
    assert [json.loads(row["message"]) for row in await rows(other, table_of(replies))] == [
        {"command_id": "c-1", "outcome": "SUCCESS", "result": [1]},
        {"command_id": "c-1", "outcome": "FAILED", "error_code": "E", "error_message": "no"},
    ]


@pytest.mark.rule("CMD-3", "WQ-3")
async def test_a_lost_lease_and_a_missing_reply_queue_send_nothing_and_stop_no_other(
    pgmq: PgmqPlace, brokers: BrokerRegistry, name: str, other: Any
) -> None:
    for _ in range(3):
        await send(other, name, COMMAND)
    async with with_replies(pgmq, brokers, name) as (broker, replies):
        lost, stuck, good = await broker.receive(10)
        await other.execute(f"UPDATE pgmq.q_{name} SET read_ct = 2 WHERE msg_id = 1")  # noqa: S608
        finisher = broker.traits.finisher
        assert finisher is not None
        nowhere = QueueConfig(name="nowhere", uri=pgmq.uri("nowhere"))

        unsettled = await finisher.finish(
            [
                Finish(lost.handle, Ending(), (reply_to(replies, outcome="SUCCESS"),)),
                Finish(stuck.handle, Ending(), (reply_to(nowhere, outcome="SUCCESS"),)),
                Finish(good.handle, Ending(), (reply_to(replies, outcome="SUCCESS"),)),
            ]
        )

    assert [(one.handle, one.stale) for one in unsettled] == [
        (lost.handle, True),
        (stuck.handle, False),
    ]
    assert "does not exist" in unsettled[1].reason
    assert [row["msg_id"] for row in await rows(other, f"q_{name}")] == [1, 2]
    assert len(await rows(other, table_of(replies))) == 1


# Older versions.


@pytest.mark.rule("CMD-7")
async def test_a_version_without_headers_groups_and_notifications_will_do(
    server: PostgresServer, brokers: BrokerRegistry, other: Any
) -> None:
    await other.execute("CREATE DATABASE old_pgmq")
    address = server.url.replace("/postgres", "/old_pgmq")
    connection = await asyncpg.connect(address)
    await connection.execute(OLD_PGMQ)
    uri = f"{address.replace('postgresql:', 'pgmq:')}?queue=orders&fifo=true"

    async with both_ends(brokers, queue_at(uri)) as ends:
        await ends.publisher.publish([publication(each, group="g") for each in "abc"])
        first, second, third = await ends.broker.receive(10)
        await ends.broker.nack([Nack(first.handle, 0, Tally(failures=1))])
        again = await receive_one(ends.broker)
        lost = [
            *await ends.broker.ack([second.handle]),
            *await ends.broker.ack([third.handle], error="HTTP 400"),
            *await ends.broker.extend([again.handle], 30),
        ]

        assert (ends.broker.holds_groups, ends.broker.traits.ordered_here) == (False, True)
        assert not ends.broker.traits.keeps_tally
        assert (again.body, again.receive_count, again.tally) == (b"a", 2, UNTRIED)
        assert not lost

    left = await connection.fetchval("SELECT array_agg(msg_id) FROM pgmq.q_orders")
    archived = await connection.fetchval("SELECT array_agg(msg_id) FROM pgmq.a_orders")
    await connection.close()
    assert (left, archived) == ([1], [3])


# Looking through a queue.


@asynccontextmanager
async def lister_of(ends: Ends) -> AsyncIterator[MessageLister]:
    opening = ends.brokers.open_lister(ends.queue)
    assert opening is not None
    async with opening as lister:
        yield lister


@pytest.mark.rule("CMD-7", "CMD-14")
@pytest.mark.parametrize("options", ["", "&state=false"])
async def test_what_waits_and_what_was_archived_is_listed(
    ends: Ends, name: str, other: Any, options: str
) -> None:
    bodies_by_id = {each: b'{"id":"%b"}' % each.encode() for each in ("bad", "good", "held")}
    await ends.publisher.publish(
        [publication(each, body=body) for each, body in bodies_by_id.items()]
    )
    bad, good, held = await ends.broker.receive(10)
    await ends.broker.ack([bad.handle], error="HTTP 422")
    await ends.broker.ack([good.handle])
    await ends.broker.nack(
        [Nack(held.handle, 60.0, Tally(2, 5), Failure("HTTP_503", "HTTP 503", 503))]
    )
    await send(other, name, {**COMMAND, "correlation_id": "c"}, {"x-pgmq-group": "g"})
    await other.execute("SELECT pgmq.send($1, '{}'::jsonb, 3600)", name)

    async with lister_of(ends) as lister:
        page = await lister.page(MessageFilter(), limit=10)
        of_group = await lister.page(MessageFilter(group="g"), limit=10)
        failed = await lister.page(MessageFilter(status=MessageStatus.FAILED), limit=10)

    assert page.next is None
    expected = [("5", "SCHEDULED"), ("c-1", "READY")]
    # Without states, PGMQ has forgotten what succeeded, and does not know why a message waits.
    if options:
        expected += [("held", "IN_FLIGHT"), ("bad", "FAILED")]
    else:
        expected += [("held", "READY"), ("good", "SUCCEEDED"), ("bad", "FAILED")]
    assert [(each.id, each.status.value) for each in page.records] == expected
    scheduled, command, waiting, *_, archived = page.records
    assert (scheduled.not_before is None, archived.ended_at is None) == (False, False)
    assert (command.group, command.correlation_id, command.payload_bytes) == ("g", "c", 13)
    assert (waiting.failures, waiting.requests) == (2, 5)
    assert [each.id for each in of_group.records] == ["c-1"]
    assert [each.id for each in failed.records] == ["bad"]


@pytest.mark.rule("CMD-7", "P5")
@pytest.mark.parametrize(
    "row",
    [
        (None, None),
        ("null", "[1]"),
        ('"text"', '{"x-message-router": 7}'),
        (
            '{"id": {"authToken": "hidden"}, "poolCode": 7}',
            '{"x-message-router": {"failures": "x"}}',
        ),
    ],
)
async def test_messages_of_anybody_are_listed_without_what_they_hide(
    ends: Ends, name: str, other: Any, row: tuple[str | None, str | None]
) -> None:
    await other.execute(
        f'INSERT INTO pgmq."q_{name}" (vt, message, headers) VALUES (now(), $1::jsonb, $2::jsonb)',  # noqa: S608
        *row,
    )

    async with lister_of(ends) as lister:
        (record,) = (await lister.page(MessageFilter(), limit=10)).records

    assert (record.id, record.pool, record.group) == ("1", None, None)
    assert (record.failures, record.requests) == (0, 0)


@pytest.mark.rule("CMD-7")
async def test_pages_of_pgmq_read_a_bounded_number_of_rows_of_both_tables(
    ends: Ends, name: str, other: Any
) -> None:
    half = ROWS_PER_PAGE // 2
    await other.execute(
        "SELECT pgmq.send($1, jsonb_build_object('id', 'm' || n)) FROM generate_series(1, $2) AS n",
        name,
        half + 10,
    )
    await other.execute("SELECT pgmq.archive($1, n) FROM generate_series(3, 8, 2) AS n", name)

    async with lister_of(ends) as lister:
        ids, before, pages = list[str](), None, 0
        while pages == 0 or before is not None:
            page = await lister.page(MessageFilter(), limit=half * 2, before=before)
            ids += [each.id for each in page.records]
            before, pages = page.next, pages + 1

    assert ids == [f"m{n}" for n in range(half + 10, 0, -1)]
    assert pages == 2
