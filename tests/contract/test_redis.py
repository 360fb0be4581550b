"""What only Redis does, and what its adapter has to be careful about."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from redis.asyncio import Redis

from router.brokers import BrokerRegistry
from router.brokers.redis import broker as redis_broker
from router.core.config import Ordering
from router.core.message import Tally
from router.core.raw import RawRoute
from router.ports import Disconnected, Nack, QueueRefused
from tests.contract.cases import (
    PARENT,
    TRACED,
    Ends,
    bodies,
    both_ends,
    publication,
    queue_at,
    receive_one,
    reopened,
    several,
)
from tests.support.servers.redis import RedisServer

pytestmark = pytest.mark.anyio

TRIED = Tally(failures=1, requests=3)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path, durable=True).running() as server:
        yield server


@pytest.fixture
async def brokers() -> AsyncIterator[BrokerRegistry]:
    async with BrokerRegistry(worker_id="worker-1", dedup_window=300.0) as brokers:
        yield brokers


@pytest.fixture
async def ends(server: RedisServer, brokers: BrokerRegistry) -> AsyncIterator[Ends]:
    async with both_ends(brokers, queue_at(f"{server.url}?stream=orders")) as ends:
        yield ends


@pytest.fixture
async def client(server: RedisServer) -> AsyncIterator[Any]:
    """Whoever else uses the server."""
    async with Redis.from_url(server.url) as client:
        yield client


@pytest.mark.rule("BRK-3")
async def test_what_is_acknowledged_is_deleted_from_the_stream(ends: Ends, client: Any) -> None:
    await ends.publisher.publish([publication("a"), publication("b")])
    a, b = await several(ends.broker, 2)

    await ends.broker.ack([a.handle, b.handle])

    assert await client.xlen("orders") == 0
    assert (await client.xpending("orders", "message-router"))["pending"] == 0


@pytest.mark.rule("BRK-4", "P1")
async def test_a_delayed_copy_and_the_removal_of_its_original_are_one_transaction(
    ends: Ends, server: RedisServer
) -> None:
    await ends.publisher.publish([publication("a")])
    received = await receive_one(ends.broker)
    (file,) = server.directory.glob("appendonlydir/*.incr.aof")
    before = len(file.read_bytes())

    await ends.broker.nack([Nack(received.handle, 60.0, TRIED)])

    log = file.read_bytes()[before:].decode(errors="replace").lower()  # it is written at once
    kinds = [kind for kind in ("multi", "zadd", "xack", "xdel", "exec") if kind in log]
    assert kinds == ["multi", "zadd", "xack", "xdel", "exec"]
    assert log.index("multi") < log.index("zadd") < log.index("xdel") < log.rindex("exec")
    depth = await ends.broker.depth()
    assert depth is not None
    assert (depth.waiting, depth.in_flight, depth.due) == (1, 0, 0)


@pytest.mark.rule("P1", "P3", "BRK-6")
async def test_a_killed_server_has_lost_nothing(ends: Ends, server: RedisServer) -> None:
    await ends.publisher.publish([publication(name) for name in "abcd"])
    gone, delayed, back, _held = await several(ends.broker, 4)
    await ends.broker.ack([gone.handle])
    await ends.broker.nack([Nack(delayed.handle, 0.5, TRIED), Nack(back.handle, 0, TRIED)])

    await asyncio.to_thread(server.kill)
    await asyncio.to_thread(server.start)

    async with reopened(ends) as broker:
        again = await several(broker, 2)
        depth = await broker.depth()
    assert bodies(again) == ["c", "b"]
    assert {each.tally for each in again} == {TRIED}
    assert depth is not None
    assert (depth.waiting, depth.in_flight) == (0, 3)  # d is still leased


@pytest.mark.rule("P1", "BRK-6")
async def test_a_stream_that_was_deleted_is_made_again(ends: Ends, client: Any) -> None:
    await client.delete("orders")

    with pytest.raises(Disconnected, match="NOGROUP"):
        await ends.broker.receive(1)
    async with ends.brokers.open_queue(ends.queue) as broker:
        await ends.publisher.publish([publication("a")])
        assert bodies([await receive_one(broker)]) == ["a"]


@pytest.mark.rule("BRK-1")
async def test_what_was_published_before_the_group_existed_is_handed_out(
    server: RedisServer, brokers: BrokerRegistry, client: Any
) -> None:
    await client.xadd("early", {"body": "a"})

    async with brokers.open_queue(queue_at(f"{server.url}?stream=early")) as broker:
        assert bodies([await receive_one(broker)]) == ["a"]


@pytest.mark.rule("BRK-2")
async def test_the_message_is_in_the_field_that_the_uri_names(
    server: RedisServer, brokers: BrokerRegistry, client: Any
) -> None:
    uri = f"{server.url}?stream=others&field=data"
    async with both_ends(brokers, queue_at(uri)) as ends:
        await client.xadd("others", {"data": "theirs", "more": "x", **TRACED})
        await ends.publisher.publish([publication("ours")])
        theirs, ours = await several(ends.broker, 2)
        await ends.broker.nack([Nack(theirs.handle, 0.2, TRIED)])
        again = await receive_one(ends.broker)

    assert bodies([theirs, ours, again]) == ["theirs", "ours", "theirs"]
    assert (theirs.parent, again.parent) == (PARENT, PARENT)
    assert (again.claimed_id, again.receive_count) == (theirs.broker_id, 2)


@pytest.mark.rule("BRK-2")
async def test_an_entry_without_the_field_is_malformed_and_keeps_its_content(
    ends: Ends, client: Any
) -> None:
    await client.xadd("orders", {"text": "hello", b"\xff": b"\xfe"})

    received = await receive_one(ends.broker)

    assert received.flaw == "the stream entry has no field 'body'"
    assert b'"text":"hello"' in received.body


@pytest.mark.rule("BRK-2", "P5")
async def test_an_entry_with_thousands_of_fields_is_returned_like_any_other(
    ends: Ends, client: Any
) -> None:
    await client.xadd("orders", {**{f"f{n}": "x" for n in range(20_000)}, "body": "a"})
    first = await receive_one(ends.broker)

    await ends.broker.nack([Nack(first.handle, 0.1, TRIED)])

    assert bodies([await receive_one(ends.broker)]) == ["a"]


@pytest.mark.rule("RAW-4", "P1")
async def test_a_retry_copy_of_a_raw_entry_keeps_a_body_behind_thousands_of_fields(
    server: RedisServer, brokers: BrokerRegistry, client: Any
) -> None:
    queue = queue_at(f"{server.url}?stream=orders")
    raw = replace(queue, route=RawRoute(target="https://svc.test/hook"))
    fields = {f"f{n}": "x" for n in range(20_000)}
    async with both_ends(brokers, raw) as ends:
        await client.xadd("orders", {**fields, "body": "a"})
        first = await receive_one(ends.broker)
        await ends.broker.nack([Nack(first.handle, 0.1, TRIED)])
        again = await receive_one(ends.broker)

    assert (again.body, again.flaw, again.tally) == (b"a", None, TRIED)
    assert again.source is not None
    assert again.source.attributes == {f"f{n}": "x" for n in range(3950)}


@pytest.mark.rule("P5")
async def test_headers_of_ours_that_somebody_else_wrote_do_no_harm(ends: Ends, client: Any) -> None:
    forged = {"x-message-router-not-before": "9" * 30, "x-message-router-attempts": "many"}
    await client.xadd("orders", {"body": "a", **forged})

    received = await receive_one(ends.broker)

    assert (received.body, received.tally.failures) == (b"a", 0)


@pytest.mark.rule("BRK-4", "P3")
async def test_returned_messages_come_before_newer_ones_on_every_router(ends: Ends) -> None:
    await ends.publisher.publish([publication(name) for name in "abcd"])
    first = await several(ends.broker, 2)
    await ends.broker.nack([Nack(each.handle, 0, TRIED) for each in first])

    async with (
        BrokerRegistry(worker_id="worker-2", dedup_window=300.0) as others,
        others.open_queue(ends.queue) as other,
    ):
        received = await other.receive(10)

    assert bodies(received) == ["a", "b", "c", "d"]
    assert [each.tally for each in received][:2] == [TRIED, TRIED]


@pytest.mark.rule("ORD-3")
async def test_what_a_dead_router_held_of_a_strict_queue_comes_first_and_in_order(
    server: RedisServer, brokers: BrokerRegistry
) -> None:
    queue = replace(
        queue_at(f"{server.url}?stream=orders"), ordering=Ordering.STRICT, visibility_timeout=2
    )
    async with both_ends(brokers, queue) as ends:
        await ends.publisher.publish([publication(name) for name in "abcd"])
        async with (
            BrokerRegistry(worker_id="worker-2", dedup_window=300.0) as others,
            others.open_queue(queue) as dead,
        ):
            held = await several(dead, 4)
            await dead.ack([held[0].handle])
            await asyncio.sleep(1)
            await dead.extend([held[1].handle], 2.0)  # so its lease ends a second after the others
        await ends.publisher.publish([publication("e")])

        received = await several(ends.broker, 4)

    assert bodies(received) == ["b", "c", "d", "e"]


@pytest.mark.rule("BRK-5", "ROUTE-5")
async def test_all_that_a_dead_router_held_comes_without_a_pause(
    server: RedisServer, brokers: BrokerRegistry
) -> None:
    """However much of it is for a pool that is full: messages of others are behind it."""
    queue = replace(queue_at(f"{server.url}?stream=orders"), visibility_timeout=2)
    names = [str(number) for number in range(40)]
    async with both_ends(brokers, queue) as ends:
        await ends.publisher.publish([publication(name) for name in names])
        async with (
            BrokerRegistry(worker_id="worker-2", dedup_window=300.0) as others,
            others.open_queue(queue) as dead,
        ):
            await several(dead, 40)
        await asyncio.sleep(2.1)

        async with asyncio.timeout(2 / 4):  # until the next look
            received = [each for _ in range(4) for each in await ends.broker.receive(10)]

    assert bodies(received) == names


@pytest.mark.rule("P3", "BRK-6")
async def test_what_the_server_handed_out_in_an_answer_that_was_lost_comes_first(
    ends: Ends, client: Any
) -> None:
    await ends.publisher.publish([publication(name) for name in "abcd"])
    held = await receive_one(ends.broker)
    await client.xreadgroup("message-router", "worker-1", {"orders": ">"}, count=2)

    async with ends.brokers.open_queue(ends.queue) as broker:
        received = await broker.receive(10)
        unsettled = await broker.ack([held.handle])

    assert bodies(received) == ["b", "c", "d"]
    assert not unsettled


@pytest.mark.rule("P3", "BRK-6", "ROUTE-5")
async def test_an_answer_that_was_lost_is_found_behind_all_that_is_held(
    ends: Ends, client: Any
) -> None:
    """As many as `lookAhead` and the pools allow."""
    most = 2 * redis_broker.PENDING_AT_ONCE_MESSAGES + 1
    await ends.publisher.publish([publication(str(number)) for number in range(most + 2)])
    await several(ends.broker, most)
    await client.xreadgroup("message-router", "worker-1", {"orders": ">"}, count=1)

    async with ends.brokers.open_queue(ends.queue) as broker:
        received = await broker.receive(10)

    assert bodies(received) == [str(most), str(most + 1)]


@pytest.mark.rule("CMD-5")
async def test_a_message_that_is_not_due_waits_at_the_server(ends: Ends) -> None:
    loop = asyncio.get_running_loop()
    early = replace(publication("early"), not_before=time.time() + 0.6)
    begun = loop.time()
    await ends.publisher.publish([early, publication("now")])

    first = await receive_one(ends.broker)
    second = await receive_one(ends.broker)

    assert bodies([first, second]) == ["now", "early"]
    assert loop.time() - begun >= 0.59


@pytest.mark.rule("BRK-3")
async def test_consumers_that_hold_nothing_are_forgotten_and_others_are_not(
    ends: Ends, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_broker, "FORGOTTEN_CONSUMER_MS", 0)
    await ends.publisher.publish([publication("a")])
    await client.xgroup_createconsumer("orders", "message-router", "dead-and-empty")
    await client.xreadgroup("message-router", "dead-with-a", {"orders": ">"}, count=1)
    await asyncio.sleep(0.01)

    async with ends.brokers.open_queue(ends.queue):
        pass

    left = {each["name"] for each in await client.xinfo_consumers("orders", "message-router")}
    assert left == {b"dead-with-a"}


@pytest.mark.rule("BRK-7")
@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        (["--appendonly", "yes"], None),
        (["--appendonly", "no"], "set appendonly yes"),
        (
            ["--appendonly", "yes", "--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru"],
            "set maxmemory-policy noeviction, not allkeys-lru",
        ),
        (
            ["--appendonly", "yes", "--maxmemory", "64mb", "--maxmemory-policy", "volatile-lru"],
            None,
        ),
    ],
)
async def test_a_server_that_may_lose_messages_is_told_what_to_set(
    tmp_path: Path, brokers: BrokerRegistry, settings: list[str], advice: str | None
) -> None:
    with RedisServer(tmp_path, more=settings).running() as server:
        async with brokers.open_queue(queue_at(server.url)) as broker:
            told = broker.traits.advice

    assert (told is None) == (advice is None)
    assert advice is None or (told is not None and advice in told)


@pytest.mark.rule("CFG-7", "OPS-5")
async def test_wrong_credentials_are_refused_without_showing_them(
    tmp_path: Path, brokers: BrokerRegistry
) -> None:
    with RedisServer(tmp_path, password="right").running() as server:
        wrong = server.url.replace("right", "hunter2")
        with pytest.raises(QueueRefused, match="refuses the user or the password") as refused:
            async with brokers.open_queue(queue_at(wrong)):
                pass

    assert "hunter2" not in str(refused.value)


@pytest.mark.rule("CFG-7")
async def test_a_key_of_another_type_is_refused(
    server: RedisServer, brokers: BrokerRegistry, client: Any
) -> None:
    await client.set("text", "x")

    with pytest.raises(QueueRefused, match="WRONGTYPE"):
        async with brokers.open_queue(queue_at(f"{server.url}?stream=text")):
            pass


@pytest.mark.rule("BRK-6")
async def test_no_server_at_all_is_a_lost_connection(brokers: BrokerRegistry) -> None:
    with pytest.raises(Disconnected, match="no answer from Redis: ConnectionError"):
        async with brokers.open_queue(queue_at("redis://127.0.0.1:1")):
            pass


@pytest.mark.rule("CFG-7", "OPS-5")
async def test_a_uri_that_the_client_cannot_use_is_refused_without_its_secrets(
    brokers: BrokerRegistry,
) -> None:
    with pytest.raises(QueueRefused) as refused:
        async with brokers.open_queue(queue_at("redis://me:secret@[::1/0")):
            pass

    assert "secret" not in str(refused.value)
