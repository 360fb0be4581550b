"""What only PostgreSQL does, and what it does when the server fails."""

import asyncio
import random
import re
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from msgspec.structs import replace

from router.brokers import BrokerRegistry
from router.brokers.postgres import database, work_queue
from router.core.config import QueueConfig
from router.core.message import UNTRIED, ReceivedMessage, Tally, parse
from router.core.outcome import Failure
from router.ports import Broker, Disconnected, Nack, Publication, QueueRefused
from tests.contract.cases import (
    Ends,
    bodies,
    both_ends,
    is_empty,
    publication,
    queue_at,
    receive_one,
    several,
)
from tests.contract.postgres_place import PostgresPlace
from tests.support.servers.postgres import PostgresServer

pytestmark = pytest.mark.anyio

INSERT = """
INSERT INTO message_router.queue_messages (queue, message_id, group_id, body)
VALUES ($1, $2, $3, convert_to($2, 'UTF8')) ON CONFLICT DO NOTHING
"""
CLAIM = "SELECT FROM message_router.claim($1, 'w', 7, 10, 60)"


@pytest.fixture
def server(postgres: PostgresPlace) -> PostgresServer:
    return postgres.server


@pytest.fixture
async def brokers(anyio_backend: object) -> AsyncIterator[BrokerRegistry]:
    del anyio_backend  # asked for only to run on its loop
    async with new_brokers("worker-1") as brokers:
        yield brokers


@pytest.fixture
async def ends(postgres: PostgresPlace, brokers: BrokerRegistry) -> AsyncIterator[Ends]:
    async with both_ends(brokers, queue_at(postgres.new_uri())) as ends:
        yield ends


@pytest.fixture
async def producer(server: PostgresServer, anyio_backend: object) -> AsyncIterator[Any]:
    """A connection of someone who knows nothing but SQL."""
    del anyio_backend
    connection = await asyncpg.connect(server.url)
    yield connection
    connection.terminate()


def new_brokers(
    worker: str, dedup_window: float = 300.0, state_dir: Path | None = None
) -> BrokerRegistry:
    return BrokerRegistry(worker_id=worker, dedup_window=dedup_window, state_dir=state_dir)


def name_of(queue: QueueConfig) -> str:
    return queue.uri.partition("queue=")[2].partition("&")[0]


# When the server fails.


@pytest.mark.rule("P1")
@pytest.mark.parametrize("end", [PostgresServer.stop, PostgresServer.kill], ids=["stop", "kill"])
async def test_a_server_that_ends_while_we_wait_is_a_lost_connection_and_loses_nothing(
    ends: Ends, server: PostgresServer, end: Callable[[PostgresServer], None]
) -> None:
    await ends.publisher.publish([publication("a", group="g"), publication("b", group="g")])
    held = await receive_one(ends.broker)
    waiting = asyncio.ensure_future(ends.broker.receive(1))
    await asyncio.sleep(0.1)

    end(server)
    with pytest.raises(Disconnected):
        await waiting
    server.start()
    unsettled = await ends.broker.ack([held.handle])

    assert not unsettled
    assert bodies(await ends.broker.receive(10)) == ["b"]


@pytest.mark.rule("BRK-3", "P1")
async def test_an_ack_that_is_cut_off_can_be_sent_again(
    ends: Ends, server: PostgresServer, producer: Any
) -> None:
    await ends.publisher.publish([publication("a")])
    received = await receive_one(ends.broker)
    async with producer.transaction():
        await producer.execute("SELECT FROM message_router.queue_messages FOR UPDATE")
        cut_off = asyncio.ensure_future(ends.broker.ack([received.handle]))
        await asyncio.sleep(0.1)

        server.sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name = 'message-router'"
        )
        with pytest.raises(Disconnected):
            await cut_off
    again = await ends.broker.ack([received.handle])
    and_again = await ends.broker.ack([received.handle])

    assert not again
    assert not and_again
    assert await is_empty(ends.broker)


@pytest.mark.rule("BRK-6")
async def test_a_server_that_says_nothing_is_a_lost_connection(
    ends: Ends, server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "CALL_TIMEOUT_SECONDS", 0.5)
    await ends.publisher.publish([publication("a")])
    received = await receive_one(ends.broker)
    waiting = asyncio.ensure_future(ends.broker.receive(1))
    await asyncio.sleep(0.1)

    server.freeze()
    started = time.monotonic()
    try:
        with pytest.raises(Disconnected, match="does not answer"):
            await waiting
        with pytest.raises(Disconnected, match="does not answer"):
            await ends.broker.ack([received.handle])
        noticed = time.monotonic() - started
    finally:
        server.thaw()

    assert noticed < 0.5 + work_queue.LAST_POLL_SECONDS + 0.5 + 1
    assert not await ends.broker.ack([received.handle])


@pytest.mark.rule("BRK-6")
async def test_a_session_that_lost_its_statements_costs_nothing(server: PostgresServer) -> None:
    opened = database.PostgresDatabase(server.url)
    await opened.prepare()
    kept = "SELECT count(*) FROM pg_prepared_statements"
    prepared = [(await opened.call(kept))[0][0] for _ in range(2)][1]

    await opened.call("DEALLOCATE ALL")
    after = [(await opened.call(kept))[0][0] for _ in range(2)]
    await opened.close()

    assert prepared > 0
    assert after == [0, 0]  # as behind a pooler: no session can be relied on


@pytest.mark.rule("BRK-6")
async def test_a_stop_ends_a_receive_while_the_server_says_nothing(
    ends: Ends, server: PostgresServer
) -> None:
    waiting = asyncio.ensure_future(ends.broker.receive(1))
    await asyncio.sleep(1.5)  # by now it looks once a second

    server.freeze()
    try:
        ends.broker.stop()
        async with asyncio.timeout(1):
            batch = await waiting
    finally:
        server.thaw()

    assert not batch


@pytest.mark.rule("P5")
async def test_a_message_that_someone_has_locked_holds_up_no_other(
    ends: Ends, producer: Any
) -> None:
    await ends.publisher.publish([publication("a"), publication("b", group="h")])
    async with producer.transaction():
        await producer.execute(
            "SELECT FROM message_router.queue_messages WHERE message_id = 'a' FOR UPDATE"
        )

        batch = await ends.broker.receive(10)

    assert bodies(batch) == ["b"]


# Order over any number of routers.


GROUPS = 8
PER_LANE = 30


@dataclass
class Relay:
    """Workers that deliver what they receive, lane by lane, and what they see of each other."""

    queue: QueueConfig
    done: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))  # by lane
    holders: dict[str, str] = field(default_factory=dict)  # lane: worker
    brokers: list[Broker] = field(default_factory=list)
    chance: random.Random = field(default_factory=lambda: random.Random(1))  # noqa: S311 repeatable

    async def work(self, worker: str) -> None:
        async with new_brokers(worker) as brokers, brokers.open_queue(self.queue) as broker:
            self.brokers.append(broker)
            while batch := await broker.receive(self.chance.randint(1, 9)):
                runs: dict[str, list[ReceivedMessage]] = defaultdict(list)
                for received in batch:
                    runs[_lane_and_number(received)[0]].append(received)
                async with asyncio.TaskGroup() as deliveries:
                    for lane, run in runs.items():
                        self._take(lane, worker)
                        deliveries.create_task(self._deliver(broker, lane, run), name=lane)

    def _take(self, lane: str, worker: str) -> None:
        assert lane not in self.holders
        mates = {lane[:-1] + tier for tier in "hr"} & self.holders.keys()
        assert {self.holders[mate] for mate in mates} <= {worker}
        self.holders[lane] = worker

    async def _deliver(self, broker: Broker, lane: str, run: Sequence[ReceivedMessage]) -> None:
        """In order, until one fails; then the rest goes back, as the engine does it."""
        fails_at = self.chance.choice([len(run), len(run), self.chance.randrange(len(run))])
        for place, received in enumerate(run):
            await asyncio.sleep(self.chance.choice([0, 0, 0.002]))
            if received is run[-1]:
                del self.holders[lane]  # as soon as it is settled, anyone may have the lane
            if place < fails_at:
                self.done[lane].append(_lane_and_number(received)[1])
                assert not await broker.ack([received.handle])
            else:
                await broker.nack([Nack(received.handle, 0)])
        if sum(map(len, self.done.values())) == 2 * GROUPS * PER_LANE:
            for other in self.brokers:
                other.stop()


def _lane_and_number(received: ReceivedMessage) -> tuple[str, int]:
    lane, _, number = received.body.decode().partition(":")
    return lane, int(number)


@pytest.mark.rule("P1", "P2", "P3", "WQ-2", "FIFO-1")
async def test_four_workers_never_share_a_group_and_keep_every_lane_in_order(
    postgres: PostgresPlace, brokers: BrokerRegistry
) -> None:
    relay = Relay(queue_at(postgres.new_uri()))
    groups = [f"g{number}" for number in range(GROUPS)]

    async with both_ends(brokers, relay.queue) as ends, asyncio.TaskGroup() as workers:
        for worker in ("anna", "bert", "carl", "dora"):
            workers.create_task(relay.work(worker), name=worker)
        for number in range(PER_LANE):
            regular = [publication(f"{group}r:{number}", group=group) for group in groups]
            high = [publication(f"{group}h:{number}", group=group, high=True) for group in groups]
            await ends.publisher.publish([*regular, *high])

    lanes = [group + tier for group in groups for tier in "hr"]
    assert relay.done == {lane: list(range(PER_LANE)) for lane in lanes}


@pytest.mark.rule("WQ-2", "P5")
async def test_a_claim_waits_for_another_one_of_its_queue_and_nothing_else_does(
    postgres: PostgresPlace, ends: Ends, producer: Any
) -> None:
    await ends.publisher.publish([publication("a"), publication("b")])
    held = await receive_one(ends.broker)
    async with both_ends(ends.brokers, queue_at(postgres.new_uri())) as elsewhere:
        async with producer.transaction():
            await producer.execute(
                "SELECT FROM message_router.claim($1, 'other', 7, 1, 60)", name_of(ends.queue)
            )  # and now it is not committed
            waiting = asyncio.ensure_future(ends.broker.receive(1))

            await elsewhere.publisher.publish([publication("x")])
            there = await elsewhere.broker.receive(1)
            await ends.publisher.publish([publication("c")])
            unsettled = await ends.broker.ack([held.handle])
            await asyncio.sleep(0.2)
            waited = not waiting.done()

        assert bodies(await waiting) == ["c"]
    assert waited
    assert (bodies(there), list(unsettled)) == (["x"], [])


@pytest.mark.rule("P3", "WQ-2")
async def test_a_message_that_is_committed_late_breaks_no_group(ends: Ends, producer: Any) -> None:
    late = producer.transaction()
    await late.start()
    await producer.execute(INSERT, name_of(ends.queue), "late", "g")
    await ends.publisher.publish([publication("other"), publication("early", group="g")])
    other = await receive_one(ends.broker)  # by then `early` is the first of its group

    await late.commit()
    first = await receive_one(ends.broker)
    meanwhile = await ends.broker.depth()
    async with ends.brokers.open_queue(ends.queue) as second_line:
        nothing = await is_empty(second_line)
    await ends.broker.ack([first.handle])
    second = await receive_one(ends.broker)

    assert bodies([other, first, second]) == ["other", "late", "early"]
    assert nothing
    assert meanwhile is not None
    assert (meanwhile.waiting, meanwhile.in_flight) == (1, 2)


# Publishing by SQL.


@pytest.mark.rule("WQ-1", "P1")
async def test_a_message_can_be_published_in_a_transaction_of_ones_own(
    ends: Ends, producer: Any
) -> None:
    queue = name_of(ends.queue)
    waiting = asyncio.ensure_future(ends.broker.receive(10))
    rolled_back = producer.transaction()
    await rolled_back.start()
    await producer.execute(INSERT, queue, "never", None)
    await rolled_back.rollback()

    async with producer.transaction():
        await producer.execute(INSERT, queue, "a", "g")
        await producer.execute(INSERT, queue, "b", "g")
        await producer.execute(INSERT, queue, "a", "g")
        await asyncio.sleep(0.2)
        seen_early = waiting.done()

    assert not seen_early
    assert bodies(await waiting) == ["a", "b"]
    same, another = (replace(publication(name), dedup_key=None) for name in "ac")
    assert await ends.publisher.publish([same, another]) == [False, True]


@pytest.mark.rule("WQ-1", "ID-3")
async def test_sql_can_publish_another_body_under_an_id_and_again_what_has_died(
    ends: Ends, producer: Any
) -> None:
    insert = (
        "INSERT INTO message_router.queue_messages (queue, message_id, dedup_key, body)"
        " VALUES ($1, 'a', $2, $3) ON CONFLICT DO NOTHING"
    )
    queue = name_of(ends.queue)
    for key, body in [(None, b"x"), (None, b"y"), (None, b"x"), ("k", b"x"), ("k", b"z")]:
        await producer.execute(insert, queue, key, body)
    batch = await ends.broker.receive(10)
    await ends.broker.ack([received.handle for received in batch], error="HTTP 404")
    for key in (None, "k"):
        await producer.execute(insert, queue, key, b"x")

    assert bodies(batch) == ["x", "y", "x"]
    assert bodies(await ends.broker.receive(10)) == ["x", "x"]


@pytest.mark.rule("WQ-1")
async def test_a_producer_needs_no_more_than_the_right_to_insert(
    ends: Ends, server: PostgresServer, producer: Any
) -> None:
    server.sql("CREATE ROLE shop LOGIN")
    server.sql("GRANT USAGE ON SCHEMA message_router TO shop")
    server.sql("GRANT INSERT ON message_router.queue_messages TO shop")
    await producer.execute("SET ROLE shop")

    await producer.execute(INSERT.partition("ON CONFLICT")[0], name_of(ends.queue), "a", "g")

    assert bodies(await ends.broker.receive(1)) == ["a"]
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await producer.execute("SELECT body FROM message_router.queue_messages")


@pytest.mark.rule("BRK-2", "P5")
async def test_a_name_that_a_database_cannot_store_harms_no_other(ends: Ends) -> None:
    added = await ends.publisher.publish([publication("a", group="\0g"), publication("b")])
    received = await receive_one(ends.broker)
    await ends.broker.nack([Nack(received.handle, 0, UNTRIED, Failure("\0", "\0"))])

    assert added == [True, True]
    assert bodies(await ends.broker.receive(10)) == ["a", "b"]


# Waking up.


@pytest.mark.rule("WQ-6")
async def test_a_notification_wakes_who_waits(
    ends: Ends, producer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work_queue, "FIRST_POLL_SECONDS", 30.0)
    monkeypatch.setattr(work_queue, "LAST_POLL_SECONDS", 30.0)
    async with ends.brokers.open_queue(ends.queue) as broker:
        waiting = asyncio.ensure_future(broker.receive(1))
        await asyncio.sleep(0.3)

        await producer.execute(INSERT, name_of(ends.queue), "a", None)

        async with asyncio.timeout(2):
            assert bodies(await waiting) == ["a"]


@pytest.mark.rule("WQ-6")
async def test_without_notifications_a_message_is_seen_within_a_second_or_so(
    ends: Ends, server: PostgresServer, producer: Any
) -> None:
    waiting = asyncio.ensure_future(ends.broker.receive(1))
    await asyncio.sleep(0.3)
    server.sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'")

    await producer.execute(INSERT, name_of(ends.queue), "a", None)

    async with asyncio.timeout(2):
        assert bodies(await waiting) == ["a"]


@pytest.mark.rule("WQ-6")
async def test_no_notification_is_sent_while_the_queue_is_busy(ends: Ends, producer: Any) -> None:
    """Each notification makes the commits of the whole server wait for each other."""
    heard: list[str] = []
    await producer.add_listener("message_router", lambda *told: heard.append(told[-1]))
    await ends.publisher.publish([publication(str(number)) for number in range(5)])
    while_busy = []

    for number in range(5):
        await receive_one(ends.broker)
        await ends.publisher.publish([publication(f"more {number}")])
        await asyncio.sleep(0.02)
        while_busy += heard

    assert while_busy == []


# What stays behind.


@asynccontextmanager
async def finished(brokers: BrokerRegistry, queue: QueueConfig) -> AsyncIterator[Ends]:
    """A queue of which one message has succeeded and one has failed, after a second try."""
    async with both_ends(brokers, queue) as ends:
        await ends.publisher.publish([publication("good"), publication("bad")])
        good, bad = await ends.broker.receive(2)
        await ends.broker.ack([good.handle])
        await ends.broker.nack(
            [Nack(bad.handle, 0, Tally(1, 1), Failure("HTTP_503", "HTTP 503", 503))]
        )
        await ends.broker.ack([(await receive_one(ends.broker)).handle], error="HTTP 400")
        yield ends


def story(server: PostgresServer, queue: QueueConfig) -> list[str]:
    return server.sql(
        "SELECT message_id, audit.state, audit.worker_id, audit.error"
        " FROM message_router.queue_audit AS audit"
        " JOIN message_router.queue_messages USING (id)"
        " WHERE audit.queue = :'queue' ORDER BY id, at",
        {"queue": name_of(queue)},
    ).splitlines()


def rows_left(server: PostgresServer, queue: QueueConfig, table: str) -> int:
    count = "SELECT count(*) FROM message_router.:table WHERE queue = :'queue'"
    return int(server.sql(count, {"table": table, "queue": name_of(queue)}))


@pytest.mark.rule("WQ-8")
async def test_every_change_of_state_is_written_down(
    postgres: PostgresPlace, brokers: BrokerRegistry
) -> None:
    queue = queue_at(postgres.new_uri())
    async with finished(brokers, queue):
        found = story(postgres.server, queue)

    assert found == [
        "good|ready||",
        "good|in-flight|worker-1|",
        "good|succeeded|worker-1|",
        "bad|ready||",
        "bad|in-flight|worker-1|",
        "bad|ready|worker-1|HTTP 503",
        "bad|in-flight|worker-1|",
        "bad|failed|worker-1|HTTP 400",
    ]


@pytest.mark.rule("WQ-8", "WQ-4")
async def test_the_end_of_a_lease_is_written_down(
    postgres: PostgresPlace, brokers: BrokerRegistry
) -> None:
    queue = queue_at(postgres.new_uri(), lease=0.1)
    async with both_ends(brokers, queue) as ends:
        await ends.publisher.publish([publication("a")])
        await receive_one(ends.broker)
        await receive_one(ends.broker)

        found = story(postgres.server, queue)

    assert found[2] == "a|ready|worker-1|the lease ended"


@pytest.mark.rule("WQ-8")
async def test_no_story_is_written_if_none_is_wanted(
    postgres: PostgresPlace, brokers: BrokerRegistry
) -> None:
    queue = queue_at(postgres.new_uri("&audit=0"))
    async with finished(brokers, queue):
        assert rows_left(postgres.server, queue, "queue_audit") == 0


@pytest.mark.rule("WQ-8", "WQ-1")
@pytest.mark.parametrize(("keep", "rows"), [("0", 0), ("60", 2)])
async def test_finished_messages_stay_as_long_as_wanted(
    postgres: PostgresPlace, keep: str, rows: int
) -> None:
    queue = queue_at(postgres.new_uri(f"&keep={keep}&audit=0.1"))
    async with (
        new_brokers("worker-1", dedup_window=0.1) as brokers,
        finished(brokers, queue) as ends,
    ):
        await asyncio.sleep(0.2)
        assert await is_empty(ends.broker)  # a claim that prunes

    assert rows_left(postgres.server, queue, "queue_messages") == rows
    assert rows_left(postgres.server, queue, "queue_audit") == 0


@pytest.mark.rule("CMD-2", "CMD-4", "P4")
async def test_what_has_a_payload_or_a_batch_is_kept_longer(
    postgres: PostgresPlace, producer: Any
) -> None:
    queue = queue_at(postgres.new_uri("&audit=0"))
    async with (
        BrokerRegistry(worker_id="w", dedup_window=0.1, result_retention=1.0) as brokers,
        both_ends(brokers, queue) as ends,
    ):
        payload = b'{"id":"b","mediationTarget":"https://svc.example/","payload":1}'
        await ends.publisher.publish([publication("a"), Publication(parse(payload), payload)])
        await producer.execute(INSERT, name_of(queue), '{"payload":1}', None)
        await ends.broker.ack([one.handle for one in await several(ends.broker, 3)])
        left = []
        for seconds in (0.2, 1.0):
            await asyncio.sleep(seconds)
            await producer.fetch(CLAIM, name_of(queue))  # nothing there: it prunes
            left.append(rows_left(postgres.server, queue, "queue_messages"))

    assert left == [2, 0]


@pytest.mark.rule("CMD-4", "P4")
async def test_a_batch_is_kept_for_seven_days(postgres: PostgresPlace, producer: Any) -> None:
    queue = queue_at(postgres.new_uri())
    async with (
        BrokerRegistry(worker_id="w", dedup_window=0.1, result_retention=0.1) as brokers,
        both_ends(brokers, queue) as ends,
    ):
        opening = brokers.open_store(queue)
        assert opening is not None
        async with opening as store:
            callback = publication("done", body=b'{"id":"done"}')
            await store.open_batch("b", None, callback, [publication("a"), publication("b")])
            for count in (2, 1):
                found = await several(ends.broker, count)
                await ends.broker.ack([one.handle for one in found])
            await asyncio.sleep(0.2)
            await producer.fetch(CLAIM, name_of(queue))  # nothing there: it prunes
            again = await store.open_batch("b", None, callback, [publication("a")])
            await producer.execute(
                "UPDATE message_router.queue_batches SET callback_at = now() - interval '7 days'"
                " WHERE queue = $1",
                name_of(queue),
            )
            await producer.fetch(CLAIM, name_of(queue))
            batch = await store.find_batch("b")

    assert rows_left(postgres.server, queue, "queue_messages") == 0
    assert (again, batch) == (0, None)


@pytest.mark.rule("CMD-5", "CMD-6")
async def test_a_producer_of_its_own_schedules_and_prioritises(ends: Ends, producer: Any) -> None:
    insert = (
        "INSERT INTO message_router.queue_messages (queue, message_id, priority, not_before, body)"
        " VALUES ($1, $2, $3, now() + make_interval(secs => $4), $5)"
    )
    for name, priority, delay in (("a", 0, -1.0), ("b", 9, 0.0), ("c", 5, 3600.0), ("d", 4, 0.0)):
        await producer.execute(insert, name_of(ends.queue), name, priority, delay, name.encode())

    found = await several(ends.broker, 3)
    tier = await producer.fetchval(
        "SELECT high_priority FROM message_router.queue_messages"
        " WHERE queue = $1 AND message_id = 'b'",
        name_of(ends.queue),
    )

    assert (bodies(found), tier) == (["b", "d", "a"], True)
    assert await is_empty(ends.broker)


@pytest.mark.rule("WQ-8", "P4")
async def test_a_queue_that_is_never_empty_forgets_what_is_old_too(postgres: PostgresPlace) -> None:
    queue = queue_at(postgres.new_uri())
    async with (
        new_brokers("worker-1", dedup_window=0.1) as brokers,
        both_ends(brokers, queue) as ends,
    ):
        await ends.publisher.publish([publication("a"), publication("b"), publication("c")])
        await ends.broker.ack([(await receive_one(ends.broker)).handle])
        await asyncio.sleep(0.2)

        await receive_one(ends.broker)

    assert rows_left(postgres.server, queue, "queue_messages") == 2


@pytest.mark.rule("WQ-6", "WQ-8")
async def test_a_message_that_someone_waits_for_does_not_wait_for_the_cleaning(
    postgres: PostgresPlace, producer: Any
) -> None:
    queue = queue_at(postgres.new_uri())
    async with (
        new_brokers("worker-1", dedup_window=0.1) as brokers,
        both_ends(brokers, queue) as ends,
    ):
        await ends.publisher.publish([publication("a")])
        await ends.broker.ack([(await receive_one(ends.broker)).handle])
        await producer.fetch(CLAIM, name_of(queue))  # nothing there: someone waits
        await asyncio.sleep(0.2)

        await ends.publisher.publish([publication("b")])
        await producer.fetch(CLAIM, name_of(queue))
        left_by_the_first = rows_left(postgres.server, queue, "queue_messages")
        await producer.fetch(CLAIM, name_of(queue))

    assert left_by_the_first == 2
    assert rows_left(postgres.server, queue, "queue_messages") == 1


# Dead workers.


async def killed_with(messages: int, worker: str, queue: QueueConfig, state_dir: Path) -> None:
    """Leave behind what a router leaves that is killed while it holds messages."""
    async with (
        new_brokers(worker, state_dir=state_dir) as brokers,
        both_ends(brokers, queue) as ends,
    ):
        await ends.publisher.publish(
            [publication(f"{worker}{number}", group="g") for number in range(messages)]
        )
        while messages:
            messages -= len(await ends.broker.receive(1))
        (lock,) = (state_dir / "workers").iterdir()
        content = lock.read_text()
    lock.write_text(content)


@pytest.mark.rule("WQ-10", "P1")
async def test_what_a_dead_predecessor_held_is_handed_out_at_once(
    postgres: PostgresPlace, tmp_path: Path
) -> None:
    queue = queue_at(postgres.new_uri(), lease=30.0)
    await killed_with(1, "anna", queue, tmp_path)

    async with (
        new_brokers("bert", state_dir=tmp_path) as brokers,
        brokers.open_queue(queue) as broker,
    ):
        async with asyncio.timeout(1):
            received = await receive_one(broker)
        files = [path.name.rpartition("-")[2] for path in (tmp_path / "workers").iterdir()]
        await broker.ack([received.handle])

    assert (bodies([received]), received.receive_count) == (["anna0"], 2)
    assert files == ["bert"]
    assert "anna0|ready|anna|the worker died" in story(postgres.server, queue)


@pytest.mark.rule("WQ-10", "P2")
async def test_the_leases_of_another_instance_or_of_a_living_worker_are_not_ended(
    postgres: PostgresPlace, tmp_path: Path
) -> None:
    queue = queue_at(postgres.new_uri(), lease=30.0)
    await killed_with(1, "elsewhere", queue, tmp_path / "another state directory")
    async with (
        new_brokers("alive", state_dir=tmp_path) as living,
        both_ends(living, queue) as ends,
    ):
        await ends.publisher.publish([publication("held")])
        held = await receive_one(ends.broker)
        async with (
            new_brokers("bert", state_dir=tmp_path) as brokers,
            brokers.open_queue(queue) as broker,
        ):
            nothing = await is_empty(broker)
        unsettled = await ends.broker.ack([held.handle])

    assert nothing
    assert not unsettled


# A clock that is set back: the server's cannot be, so everything else moves into the future.

_SET_BACK = (
    "UPDATE message_router.queues SET clock = clock_timestamp() + interval '1 year'"
    " WHERE queue = $1"
)
_MOVE = """
UPDATE message_router.queue_messages
SET run_after = run_after + interval '1 year',
    lease_until = lease_until + interval '1 year',
    finished_at = finished_at + interval '1 year'
WHERE queue = $1
"""


async def set_back(producer: Any, queue: QueueConfig) -> None:
    """By a year."""
    await producer.execute(_SET_BACK, name_of(queue))
    await producer.execute(_MOVE, name_of(queue))


@pytest.mark.rule("WQ-11", "P2")
async def test_a_clock_that_is_set_back_keeps_nothing_and_hands_out_nothing_that_is_held(
    postgres: PostgresPlace, producer: Any
) -> None:
    queue = queue_at(postgres.new_uri(), lease=2.0)
    async with (
        new_brokers("anna") as brokers,
        both_ends(brokers, queue) as ends,
        new_brokers("bert") as other_brokers,
        other_brokers.open_queue(queue) as other,
    ):
        await ends.publisher.publish([publication("delayed"), publication("held")])
        delayed, held = await ends.broker.receive(2)
        await ends.broker.nack([Nack(delayed.handle, 1.0)])

        await set_back(producer, queue)
        began = time.monotonic()
        received = [await receive_one(other)]
        ended_after = time.monotonic() - began
        await other.ack([received[0].handle])
        lost = await ends.broker.extend([held.handle], 2.0)
        received += await other.receive(10)  # nobody extends it any more
        lease_ended_after = time.monotonic() - began

    assert bodies(received) == ["delayed", "held"]
    assert not lost
    assert 0.5 < ended_after < 2
    assert 1.5 < lease_ended_after < 5


@pytest.mark.rule("WQ-11", "WQ-1", "P4")
async def test_what_was_finished_by_a_clock_that_was_ahead_is_soon_forgotten(
    postgres: PostgresPlace, producer: Any
) -> None:
    queue = queue_at(postgres.new_uri())
    async with finished(BrokerRegistry(worker_id="anna", dedup_window=300.0), queue) as ends:
        await set_back(producer, queue)
        added = await ends.publisher.publish([publication("good")])
        received = bodies(await ends.broker.receive(10))

    assert (added, received) == ([True], ["good"])
    assert rows_left(postgres.server, queue, "queue_messages") == 1


@pytest.mark.rule("WQ-11")
async def test_a_message_that_is_meant_for_next_week_waits_whoever_sets_the_clock(
    ends: Ends, producer: Any
) -> None:
    await producer.execute(
        "INSERT INTO message_router.queue_messages (queue, message_id, run_after, body)"
        " VALUES ($1, 'a', now() + interval '7 days', '')",
        name_of(ends.queue),
    )
    await producer.execute(_SET_BACK, name_of(ends.queue))

    nothing = await is_empty(ends.broker)
    waits = await producer.fetchval(
        "SELECT run_after > now() + interval '6 days' FROM message_router.queue_messages"
        " WHERE queue = $1",
        name_of(ends.queue),
    )

    assert nothing
    assert waits


# The schema.


@pytest.fixture
def fresh_url(server: PostgresServer, request: pytest.FixtureRequest) -> str:
    """Of a database in which nobody has been."""
    name = f"fresh_{abs(hash(request.node.name))}"
    server.sql(f"CREATE DATABASE {name}")
    return f"{server.url.rpartition('/')[0]}/{name}"


async def open_and_close(url: str) -> None:
    async with (
        new_brokers("anyone") as brokers,
        brokers.open_queue(queue_at(f"{url}?queue=orders")),
    ):
        pass


@pytest.mark.rule("BRK-6")
async def test_routers_that_start_together_make_the_schema_once(fresh_url: str) -> None:
    async with asyncio.TaskGroup() as routers:
        for number in range(6):
            routers.create_task(open_and_close(fresh_url), name=f"router {number}")

    connection = await asyncpg.connect(fresh_url)
    versions = await connection.fetch("SELECT version FROM message_router.schema_versions")
    await connection.close()
    assert [row["version"] for row in versions] == [database.SCHEMA_VERSION]


def letter(message_id: str, body: bytes, key: str | None = None) -> Publication:
    return replace(publication(message_id, body=body), dedup_key=key)


@pytest.mark.rule("WQ-1", "ID-3")
async def test_only_the_same_body_under_the_same_id_is_dropped(ends: Ends) -> None:
    at_once = await ends.publisher.publish([letter("a", body) for body in (b"x", b"y", b"x")])
    batch = await ends.broker.receive(10)
    await ends.broker.ack([received.handle for received in batch])
    later = await ends.publisher.publish([letter("a", b"z"), letter("a", b"x"), letter("b", b"x")])

    assert (at_once, later) == ([True, True, False], [True, False, True])
    assert bodies(batch) == ["x", "y"]


@pytest.mark.rule("WQ-1")
async def test_an_explicit_key_is_taken_at_its_word(ends: Ends) -> None:
    added = await ends.publisher.publish(
        [letter("a", b"x", "k"), letter("b", b"y", "k"), letter("k", b"z"), letter("a", b"x")]
    )

    assert added == [True, "a", True, True]


@pytest.mark.rule("WQ-1")
@pytest.mark.parametrize("key", [None, "k"])
@pytest.mark.parametrize(("error", "may_come_again"), [("", False), ("HTTP 404", True)])
async def test_what_has_died_may_be_published_again_at_once(
    ends: Ends, key: str | None, error: str, may_come_again: bool
) -> None:
    await ends.publisher.publish([letter("a", b"x", key)])
    received = await receive_one(ends.broker)
    await ends.broker.ack([received.handle], error=error)

    assert await ends.publisher.publish([letter("a", b"x", key)]) == [may_come_again]


@pytest.mark.rule("ID-1")
async def test_a_message_keeps_its_broker_id_and_one_of_a_new_schema_has_another(
    fresh_url: str,
) -> None:
    queue, ids = queue_at(f"{fresh_url}?queue=orders"), []
    connection = await asyncpg.connect(fresh_url)
    for _ in range(2):
        async with new_brokers("anna") as brokers, both_ends(brokers, queue) as ends:
            await ends.publisher.publish([publication("a")])
        for worker in ("bert", "carl"):
            async with new_brokers(worker) as brokers, brokers.open_queue(queue) as broker:
                received = await receive_one(broker)
                ids.append(received.broker_id)
                await broker.nack([Nack(received.handle, 0)])
        await connection.execute("DROP SCHEMA message_router CASCADE")
    await connection.close()

    first, first_again, second, second_again = ids
    assert (first, second) == (first_again, second_again)
    assert first != second


@pytest.mark.rule("CFG-7")
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            "UPDATE message_router.schema_versions SET version = 1",
            "version 1, this router needs version 6.*drop the schema",
        ),
        ("INSERT INTO message_router.schema_versions VALUES (99)", "version 99"),
        (
            "ALTER ROLE app IN DATABASE {name} SET default_transaction_isolation = 'serializable'",
            "isolation is 'serializable'",
        ),
    ],
    ids=["earlier version", "later version", "isolation"],
)
async def test_a_database_in_which_the_queue_would_not_be_safe_is_refused(
    fresh_url: str, change: str, why: str
) -> None:
    await open_and_close(fresh_url)
    connection = await asyncpg.connect(fresh_url)
    await connection.execute(change.format(name=fresh_url.rpartition("/")[2]))
    await connection.close()

    with pytest.raises(QueueRefused, match=why):
        await open_and_close(fresh_url)


@pytest.mark.rule("CFG-7")
async def test_a_user_who_may_not_make_the_schema_is_refused(
    server: PostgresServer, fresh_url: str
) -> None:
    server.sql("CREATE ROLE guest LOGIN")

    with pytest.raises(QueueRefused, match="InsufficientPrivilege"):
        await open_and_close(fresh_url.replace("app@", "guest@"))


@pytest.mark.rule("CFG-7", "OPS-5")
@pytest.mark.parametrize(
    ("uri", "error", "why"),
    [
        ("postgresql://app:secret@{at}/secret?queue=q", QueueRefused, "InvalidCatalogName"),
        ("postgresql://secret@{at}/postgres?queue=q", QueueRefused, "InvalidAuthorization"),
        ("postgresql://app:secret@127.0.0.1:1/x?queue=q", Disconnected, "ConnectionRefused"),
        ("postgresql://app@{at}/x?queue=q&sslmode=secret", QueueRefused, "cannot be used"),
        ("postgresql://app@{at}/x?queue=q&secret=1", QueueRefused, "unknown option"),
        ("postgresql://app@{at}/x?queue=q&keep=secret", QueueRefused, "keep that is not"),
        ("postgresql://app@{at}/x?queue=q&audit=-1", QueueRefused, "audit that is not"),
        ("postgresql://app@{at}/postgres?queue=" + 101 * "q", QueueRefused, "100 characters"),
        ("postgresql://app@" + 64 * "a" + ".example/x?queue=q", QueueRefused, "cannot be used"),
    ],
)
async def test_a_wrong_uri_is_refused_with_a_reason_and_without_its_secrets(
    server: PostgresServer, brokers: BrokerRegistry, uri: str, error: type[Exception], why: str
) -> None:
    queue = queue_at(uri.format(at=f"127.0.0.1:{server.port}"))

    with pytest.raises(error, match=why) as refused:
        async with brokers.open_queue(queue):
            pass

    assert "secret" not in str(refused.value).replace("unknown option (secret)", "")


# What it costs.


PUBLISH = (
    "SELECT FROM message_router.publish(300, ARRAY[$1], ARRAY['p'], ARRAY['p'], ARRAY['P'],"
    " ARRAY[NULL], ARRAY[0::smallint], ARRAY[''::bytea], NULL, NULL, NULL, NULL)"
)
FINISHED = """
INSERT INTO message_router.queue_messages (queue, message_id, state, finished_at, body)
SELECT $1, 'x' || i, 'succeeded', clock_timestamp(), '' FROM generate_series(1, 20000) AS i
"""


async def pages_read_by(call: str, producer: Any, queue: str) -> int:
    plan = await producer.fetch(f"EXPLAIN (ANALYZE, BUFFERS) {call}", queue)
    return sum(int(pages) for row in plan[:2] for pages in re.findall(r"hit=(\d+)", row[0]))


@pytest.mark.rule("WQ-2", "P5")
@pytest.mark.parametrize(
    "others",
    [
        "SELECT $1, 'x' || i, NULL, '' FROM generate_series(1, 20000) AS i",
        "SELECT $1, 'x' || i, 'g' || i % 1000, '' FROM generate_series(1, 20000) AS i",
        "SELECT $1, 'x' || i, 'first', '' FROM generate_series(1, 20000) AS i",
    ],
    ids=["without groups", "in many groups", "in a group that is held"],
)
async def test_a_claim_costs_the_same_whatever_waits(
    ends: Ends, producer: Any, others: str
) -> None:
    queue = name_of(ends.queue)
    columns = "message_router.queue_messages (queue, message_id, group_id, body)"
    await ends.publisher.publish([publication("first", group="first")])
    await receive_one(ends.broker)
    await ends.publisher.publish([publication(f"few {n}", group=f"few {n}") for n in range(30)])
    await producer.fetch("SELECT FROM message_router.claim($1, 'w', 6, 10, 60)", queue)
    cost_of_few = await pages_read_by(CLAIM, producer, queue)

    await producer.execute(f"INSERT INTO {columns} {others}", queue)
    await producer.fetch("SELECT FROM message_router.claim($1, 'w', 8, 10, 60)", queue)

    assert await pages_read_by(CLAIM, producer, queue) < 3 * cost_of_few


@pytest.mark.rule("WQ-1", "P5")
async def test_a_publication_costs_the_same_whatever_is_finished(fresh_url: str) -> None:
    """Also by a plan that was made when nothing was."""
    await open_and_close(fresh_url)
    producer = await asyncpg.connect(fresh_url)
    await producer.fetch(PUBLISH, "orders")
    cost_with_none = await pages_read_by(PUBLISH, producer, "orders")

    await producer.execute(FINISHED, "orders")
    cost = await pages_read_by(PUBLISH, producer, "orders")
    producer.terminate()

    assert cost < 3 * cost_with_none


@pytest.mark.rule("WQ-6")
async def test_no_call_is_planned_twice(ends: Ends, producer: Any) -> None:
    """A claim of one message spent most of its time with that."""
    del ends  # the schema is there

    kept = await producer.fetch(
        "SELECT proname FROM pg_proc WHERE pronamespace = 'message_router'::regnamespace"
        " AND 'plan_cache_mode=force_generic_plan' = ANY (proconfig)"
    )

    calls = {"publish", "claim", "finish", "nack", "extend", "end_leases", "depth"}
    calls |= {"cancel", "publish_tick"}
    calls |= {"receive_from_pgmq", "cancel_in_pgmq", "prune_pgmq"}
    assert {row["proname"] for row in kept} == calls
