"""The order store of a strict queue: what is appended is claimed in order (ORD-4 to ORD-8)."""

import re
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import pytest
from msgspec import Struct
from msgspec.structs import replace

from router.brokers import BrokerRegistry
from router.brokers.postgres.order import SIZE, STORED, UNSETTLED
from router.core.config import QueueConfig
from router.core.message import ReceivedMessage, Tally, parse
from router.core.outcome import Ending, Failure
from router.ports import (
    Broker,
    Cancellation,
    Finish,
    HeldLetter,
    MessageStatus,
    MessageStore,
    Nack,
    OrderLog,
    Publication,
    QueueRefused,
    StoredMessage,
    StoreSize,
)
from tests.contract.postgres_place import PostgresPlace

pytestmark = pytest.mark.anyio


class LogSite(Struct, frozen=True):
    """Both ends of one order store."""

    log: OrderLog
    broker: Broker
    store: MessageStore
    stores: dict[str, int]  # what two messages make


@pytest.fixture(params=["memory", "sqlite", pytest.param("postgres", marks=pytest.mark.slow)])
async def site(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[LogSite]:
    uri, stores = "memory://order?lease=30", dict[str, int]()
    if request.param == "sqlite":
        uri, stores = f"sqlite://{tmp_path}/order.db?queue=order:q", {"order:q": 2}
    if request.param == "postgres":
        place: PostgresPlace = request.getfixturevalue("postgres")
        base, _, name = place.new_uri().partition("queue=")
        uri, stores = f"{base}queue=order:{name}", {f"order:{name}": 2}
    queue = QueueConfig(name="q", uri=uri)
    async with (
        BrokerRegistry(worker_id="w", dedup_window=300) as registry,
        registry.open_queue(queue) as broker,
        registry.open_order_log(queue) as order_log,
    ):
        opening = registry.open_store(queue)
        assert opening is not None
        async with opening as store:
            yield LogSite(order_log, broker, store, stores)


def stored(message_id: str, group: str | None = "g", **facts: Any) -> StoredMessage:
    fields = {"id": message_id, "mediationTarget": "http://t.test/", "poolCode": "P"}
    given = {"messageGroupId": group} if group is not None else {}
    body = msgspec.json.encode(fields | given | facts.pop("fields", {}))
    key = facts.pop("key", message_id)
    return StoredMessage(Publication(parse(body), body, key), group, **facts)


def ids(messages: Sequence[ReceivedMessage]) -> list[str]:
    return [parse(each.body).id for each in messages]


@pytest.mark.rule("ORD-6")
async def test_messages_are_claimed_in_order_with_what_was_tried(site: LogSite) -> None:
    tally = Tally(failures=2, requests=5)
    assert await site.log.append([stored("a", tally=tally, error="503"), stored("b")]) == 2

    messages = await site.broker.receive(10)

    assert ids(messages) == ["a", "b"]
    assert [each.tally for each in messages] == [tally, Tally(0, 0)]


@pytest.mark.rule("ORD-6")
async def test_a_delay_holds_the_whole_group_back_and_no_other(site: LogSite) -> None:
    await site.log.append(
        [stored("a", delay=0.5), stored("b"), stored("x", "h"), stored("y", None)]
    )

    assert ids(await site.broker.receive(10)) == ["x", "y"]
    assert ids(await site.broker.receive(10)) == ["a", "b"]


@pytest.mark.rule("ORD-5", "POOL-3")
async def test_priorities_do_not_change_the_order_of_a_group(site: LogSite) -> None:
    high = {"highPriority": True}
    await site.log.append([stored("a", delay=0.3), stored("b", fields=high), stored("c")])

    assert ids(await site.broker.receive(10)) == ["a", "b", "c"]


@pytest.mark.rule("ORD-8")
async def test_what_is_there_already_is_left_as_it_is(site: LogSite) -> None:
    await site.log.append([stored("a", delay=0.3)])

    assert await site.log.append([stored("a"), stored("b"), stored("b")]) == 1
    messages = await site.broker.receive(10)
    assert ids(messages) == ["a", "b"]
    await site.broker.ack([each.handle for each in messages])
    assert await site.log.append([stored("b")]) == 0  # it was there lately


@pytest.mark.rule("ORD-4")
async def test_a_group_is_stored_until_its_last_message_has_ended(site: LogSite) -> None:
    await site.log.append([stored("a"), stored("b"), stored("x", "h"), stored("y", None)])
    assert sorted(await site.log.unsettled_groups()) == [("P", "g"), ("P", "h")]
    assert await site.log.which_are_stored([("P", "g"), ("P", "i"), ("Q", "g")]) == [("P", "g")]
    assert await site.log.which_are_stored([]) == []

    first, second, other, _ = await site.broker.receive(10)
    await site.broker.ack([first.handle, other.handle])
    assert list(await site.log.unsettled_groups()) == [("P", "g")]
    await site.broker.nack([Nack(second.handle, 30.0)])
    assert await site.log.which_are_stored([("P", "g"), ("P", "h")]) == [("P", "g")]


@pytest.mark.rule("ORD-7")
async def test_the_store_knows_how_much_it_has(site: LogSite) -> None:
    assert (await site.log.size()).messages == 0
    items = [stored("a"), stored("b")]
    await site.log.append(items)

    size = await site.log.size()

    assert (size.messages, size.bytes) == (2, sum(len(item.publication.body) for item in items))
    assert 0 <= size.oldest_seconds < 60


GONE = Failure("HTTP_410", "gone", 410)
IN_FRONT = ("P", "g")


def body_of(message_id: str) -> bytes:
    return stored(message_id).publication.body


async def give_up(site: LogSite, received: ReceivedMessage) -> None:
    """Let this message hold its group: it is a dead letter."""
    finisher = site.broker.traits.finisher
    assert finisher is not None
    finish = Finish(received.handle, Ending(GONE), (), Tally(3, 7), is_held=True)
    assert await finisher.finish([finish]) == []


@pytest.mark.rule("ORD-11")
async def test_a_letter_holds_back_what_is_behind_it_and_no_other_group(site: LogSite) -> None:
    await site.log.append([stored("a"), stored("b"), stored("x", "h")])
    first, second, other = await site.broker.receive(10)

    await give_up(site, first)
    await site.broker.nack([Nack(second.handle)])
    await site.broker.ack([other.handle])
    await site.log.append([stored("c"), stored("y", "h")])

    assert ids(await site.broker.receive(10)) == ["y"]
    assert await site.log.held_letter(IN_FRONT) == HeldLetter("a", body_of("a"))
    assert await site.log.held_letter(("P", "h")) is None
    assert await site.log.which_are_stored([IN_FRONT]) == [IN_FRONT]
    depth = await site.broker.depth()
    assert depth is not None
    assert depth.due == 0


@pytest.mark.rule("ORD-7")
async def test_the_store_counts_what_comes_and_what_ends(site: LogSite) -> None:
    items = {name: stored(name, None) for name in "abcdef"}
    size_of = {name: len(item.publication.body) for name, item in items.items()}
    await site.log.append([items["a"], items["b"]])
    await site.log.size()  # puts the counts together
    assert await site.log.append([items["b"], items["c"]]) == 1
    await site.log.append([items["d"], items["e"], items["f"]])
    a, b, c = await site.broker.receive(3)
    await site.broker.ack([a.handle])
    await site.broker.ack([a.handle])  # once more
    await site.broker.ack([b.handle], error="given up")
    await site.broker.nack([Nack(c.handle)])
    assert await site.store.cancel("d") is Cancellation.CANCELLED

    size = await site.log.size()

    assert (size.messages, size.bytes) == (3, sum(size_of[name] for name in "cef"))
    assert await site.log.size() == replace(size, oldest_seconds=pytest.approx(0.0, abs=60))
    left = await site.broker.receive(10)
    await site.broker.ack([each.handle for each in left])
    assert await site.log.size() == StoreSize()
    assert not set(site.stores) & set(await site.log.count_stored())


@pytest.mark.rule("ORD-4")
async def test_groups_are_told_page_by_page(site: LogSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{type(site.log).__module__}.GROUPS_AT_ONCE", 2)
    await site.log.append([stored(f"{n}", f"g{n % 5}") for n in range(20)])

    pages, after = [], None
    while page := await site.log.unsettled_groups(after):
        pages.append(page)
        after = page[-1]

    assert [len(page) for page in pages] == [2, 2, 1]
    assert {group for page in pages for group in page} == {("P", f"g{n}") for n in range(5)}


@pytest.mark.slow
@pytest.mark.rule("ORD-7", "P4", "WQ-2")
async def test_a_large_store_in_postgresql_answers_as_quickly(postgres: PostgresPlace) -> None:
    postgres.server.sql("CREATE DATABASE large")
    url = f"{postgres.server.url.rpartition('/')[0]}/large"
    pages: list[list[int]] = []
    async with (
        BrokerRegistry(worker_id="w", dedup_window=300) as registry,
        registry.open_order_log(QueueConfig(name="q", uri=f"{url}?queue=order:q")) as log,
    ):
        connection = await asyncpg.connect(url)
        for count in (50, 20_000):
            items = [stored(f"{count}-{n}", delay=3600.0) for n in range(count)]
            for start in range(0, count, 2000):
                await log.append(items[start : start + 2000])
            await connection.execute("ANALYZE message_router.queue_messages")  # it is one group
            await log.append([stored(f"other-{count}", "h")])
            await log.size()
            await connection.fetch(CLAIM, "nothing")  # reads what each session reads once
            pages.append([await _pages_read(connection, *asked) for asked in ASKED])
        connection.terminate()

    assert all(large <= 2 * small + 100 for small, large in zip(*pages, strict=True))


CLAIM = "SELECT * FROM message_router.claim($1, 'w', 1, 10, 30)"
ASKED: Sequence[tuple[Any, ...]] = (
    (CLAIM, "order:q"),
    (SIZE, "order:q"),
    (STORED, "order:q", ["P"], ["unknown"]),
    (UNSETTLED, "order:q", None, None, 100),
)


async def _pages_read(connection: Any, query: str, *arguments: object) -> int:
    plan = await connection.fetch(f"EXPLAIN (ANALYZE, BUFFERS) {query}", *arguments)
    return int(re.findall(r"hit=(\d+)", " ".join(line for (line,) in plan))[0])


@pytest.mark.rule("ORD-11")
async def test_a_letter_without_a_group_holds_none_and_just_ends(site: LogSite) -> None:
    await site.log.append([stored("a", None), stored("b", None), stored("x", "h")])
    first, second, other = await site.broker.receive(10)

    await give_up(site, first)
    await give_up(site, other)
    await site.broker.ack([second.handle])

    assert await site.log.count_held() == 1
    assert (await site.log.size()).messages == 1
    assert [each.message_id for each in await site.log.groups(10)] == ["x"]
    assert await site.store.find("a") is not None


@pytest.mark.rule("ORD-11")
async def test_a_letter_that_is_retried_comes_first_and_as_if_it_were_new(site: LogSite) -> None:
    await site.log.append([stored("a"), stored("b")])
    first, second = await site.broker.receive(10)
    await give_up(site, first)
    await site.broker.nack([Nack(second.handle)])

    changed = msgspec.json.encode(msgspec.json.decode(body_of("a")) | {"payload": {"n": 1}})
    assert not await site.log.retry_letter(IN_FRONT, "b", changed)
    assert await site.log.retry_letter(IN_FRONT, "a", changed)
    assert not await site.log.retry_letter(IN_FRONT, "a", changed)  # it holds it no more

    messages = await site.broker.receive(10)
    assert ids(messages) == ["a", "b"]
    assert messages[0].body == changed
    assert messages[0].tally == Tally(0, 0)
    assert await site.log.held_letter(IN_FRONT) is None


@pytest.mark.rule("ORD-11")
async def test_a_released_group_goes_on_behind_its_letter(site: LogSite) -> None:
    await site.log.append([stored("a"), stored("b")])
    first, second = await site.broker.receive(10)
    await give_up(site, first)
    await site.broker.nack([Nack(second.handle)])

    assert not await site.log.release(IN_FRONT, "b")
    assert await site.log.release(IN_FRONT, "a")
    assert not await site.log.release(IN_FRONT, "a")

    (second,) = await site.broker.receive(10)
    assert ids([second]) == ["b"]
    await site.broker.ack([second.handle])
    assert await site.log.which_are_stored([IN_FRONT]) == []
    assert await site.log.append([stored("a")]) == 1  # it may come again


@pytest.mark.rule("ORD-11")
async def test_a_letter_can_be_stored_in_front_of_its_group(site: LogSite) -> None:
    letter = stored("a", given_up=GONE, tally=Tally(1, 1), error="gone")
    assert await site.log.append([letter, stored("b"), stored("x", "h")]) == 3
    assert await site.log.append([letter]) == 0  # its ACK was lost

    assert ids(await site.broker.receive(10)) == ["x"]
    assert await site.log.held_letter(IN_FRONT) == HeldLetter("a", body_of("a"))
    assert await site.log.release(IN_FRONT, "a")
    assert ids(await site.broker.receive(10)) == ["b"]


@pytest.mark.rule("ORD-11", "CMD-2")
async def test_a_letter_that_holds_its_group_has_failed_and_cannot_be_cancelled(
    site: LogSite,
) -> None:
    await site.log.append([stored("a"), stored("b")])
    await give_up(site, (await site.broker.receive(10))[0])

    for _ in range(2):
        record = await site.store.find("a")
        assert record is not None
        assert record.status is MessageStatus.FAILED
        assert record.ending == Ending(GONE)
        assert (record.failures, record.requests, record.not_before) == (3, 7, None)
        assert await site.store.cancel("a") is Cancellation.TOO_LATE
        await site.log.release(IN_FRONT, "a")


@pytest.mark.rule("ORD-11")
async def test_a_lease_that_was_lost_holds_nothing(site: LogSite) -> None:
    await site.log.append([stored("a"), stored("b")])
    (first, _) = await site.broker.receive(10)
    await site.broker.nack([Nack(first.handle)])
    finisher = site.broker.traits.finisher
    assert finisher is not None

    (unsettled,) = await finisher.finish([Finish(first.handle, Ending(GONE), is_held=True)])

    assert unsettled.stale
    assert await site.log.held_letter(IN_FRONT) is None


@pytest.mark.rule("ORD-14")
async def test_groups_are_listed_with_what_stands_in_front_of_them(site: LogSite) -> None:
    letter = stored("a", given_up=GONE, tally=Tally(2, 2), error="gone")
    waiting = stored("w", "i", delay=60.0, tally=Tally(1, 1), error="503")
    await site.log.append([letter, stored("b"), stored("x", "h"), stored("y", None), waiting])
    (out, _) = await site.broker.receive(10)
    assert ids([out]) == ["x"]

    held, handed_out, put_off = await site.log.groups(10)

    assert (held.pool, held.group, held.messages, held.message_id) == ("P", "g", 2, "a")
    assert (held.is_held, held.is_out, held.due_at) == (True, False, None)
    assert (held.failures, held.error) == (2, "gone")
    assert (handed_out.group, handed_out.is_held, handed_out.is_out) == ("h", False, True)
    assert handed_out.due_at is None
    assert (put_off.message_id, put_off.is_held, put_off.failures) == ("w", False, 1)
    assert put_off.due_at is not None
    assert 50 < put_off.due_at - put_off.since < 70
    (only,) = await site.log.groups(10, only_held=True)
    assert (only.message_id, only.is_held) == ("a", True)
    assert [each.group for each in await site.log.groups(2)] == ["g", "h"]
    found = await site.log.find_group(IN_FRONT)
    assert found is not None
    assert found == replace(held, since=found.since)
    assert await site.log.find_group(("P", "nobody")) is None
    assert await site.log.count_held() == 1


@pytest.mark.rule("ORD-14")
async def test_order_stores_are_counted_whichever_queue_they_are_for(site: LogSite) -> None:
    await site.log.append([stored("a"), stored("y", None)])

    counted = await site.log.count_stored()

    assert {name: n for name, n in counted.items() if name in site.stores} == site.stores


@pytest.mark.rule("ORD-14")
async def test_the_messages_of_a_group_are_listed_in_order(site: LogSite) -> None:
    await site.log.append([stored("a"), stored("x", "h"), stored("b"), stored("y", None)])

    assert await site.log.ids_of(IN_FRONT, 10) == ["a", "b"]
    assert await site.log.ids_of(IN_FRONT, 1) == ["a"]
    assert [await site.log.group_of(each) for each in ("b", "x", "y", "z")] == [
        ("P", "g"),
        ("P", "h"),
        None,
        None,
    ]


@pytest.mark.rule("ORD-6")
async def test_other_brokers_keep_no_order_store() -> None:
    async with BrokerRegistry(worker_id="w", dedup_window=300) as registry:
        queue = QueueConfig(name="q", uri="stomp://localhost:1/q")
        with pytest.raises(QueueRefused, match="keeps no order store"):
            async with registry.open_order_log(queue):
                pytest.fail("it was opened")
