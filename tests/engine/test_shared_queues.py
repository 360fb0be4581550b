"""`share: true`: every message goes through the order store, and all routers deliver (ORD-13)."""

import asyncio
from contextlib import AsyncExitStack

import pytest
from msgspec.structs import replace

from router.brokers import BrokerRegistry
from router.brokers.memory import BROKER
from router.core.config import Ordering, QueueConfig
from router.core.history import Fate
from router.core.message import parse
from router.core.outcome import Reply
from router.engine.transfer import FOR_ALL
from router.ports import Publication
from tests.engine.test_leases import LeaseServer, LeasingRouter, free, router
from tests.engine.test_parked_groups import Outage, failing, order_of, parking, sent
from tests.support.fakes import FakeSender
from tests.support.rig import FREE_QUEUE, ended, grouped, order_store, pool

pytestmark = pytest.mark.anyio

SHARED = replace(FREE_QUEUE, ordering=Ordering.STRICT, is_shared=True)
SOON = Reply(200, b'{"ack": false, "delaySeconds": 4}')
LATER = Reply(200, b'{"ack": false, "delaySeconds": 45}')


@pytest.mark.rule("ORD-13", "ORD-12")
async def test_every_message_is_stored_and_delivered_from_the_store() -> None:
    async with parking(sender=failing(SOON), queue=SHARED) as (rig, logs):
        await rig.publish(*grouped("a", "b"), *grouped("x", group="h"), queue=SHARED)
        await asyncio.sleep(20)

        assert logs.appended == [(0, ["a", "b", "x"])]
        assert sent(rig) == [(0, "a"), (0, "x"), (5, "a"), (6, "b")]
        assert ended(rig)[Fate.STORED] == 3
        assert ended(rig)[Fate.DELIVERED] == 3
        assert rig.is_empty
        assert not order_of(rig).groups  # nobody asks what is stored


@pytest.mark.rule("ORD-13")
async def test_no_full_pool_holds_up_the_carrier() -> None:
    small = pool(concurrency=1, take_ahead=1)
    async with parking(small, sender=FakeSender(takes=1000), queue=SHARED) as (rig, _):
        await rig.publish(*[each for n in range(300) for each in grouped(f"{n}")], queue=SHARED)
        await asyncio.sleep(3)

        assert ended(rig)[Fate.STORED] == 300
        assert len(rig.sender.sent) == 1
        assert order_of(rig).messages == 300


@pytest.mark.rule("ORD-13")
async def test_a_target_that_is_down_does_not_hold_up_the_carrier() -> None:
    async with parking(sender=Outage(until=1000.0), queue=SHARED) as (rig, _):
        for start in range(0, 200, 10):
            messages = [grouped(f"{n}", group=f"{n}") for n in range(start, start + 10)]
            await rig.publish(*[each for (each,) in messages], queue=SHARED)
            await asyncio.sleep(10)

        assert ended(rig)[Fate.STORED] == 200
        assert Fate.DELIVERED not in ended(rig)


@pytest.mark.rule("ORD-13")
async def test_the_carrier_pauses_while_the_store_has_many_messages_and_goes_on_then() -> None:
    queue, sender = replace(SHARED, max_messages=2), FakeSender(takes=60)
    async with parking(pool(), sender=sender, queue=queue, max_shared=3) as (rig, logs):
        await rig.publish(*grouped(*"abcdef"), queue=SHARED)
        await asyncio.sleep(50)
        assert [ids for _, ids in logs.appended] == [["a", "b"], ["c", "d"]]
        assert "ORDER_STORE" in rig.codes
        assert "it has 3 of them" in next(each.message for each in rig.warnings)
        await asyncio.sleep(90)  # by now, a and b are delivered
        assert [ids for _, ids in logs.appended] == [["a", "b"], ["c", "d"], ["e", "f"]]
        await asyncio.sleep(300)

        assert [each for _, each in sent(rig)] == [*"abcdef"]
        assert "ORDER_STORE" not in rig.codes


@pytest.mark.rule("ORD-13", "ORD-7")
async def test_the_carrier_takes_nothing_while_the_store_is_full() -> None:
    queue, sender = replace(SHARED, max_messages=1), FakeSender(takes=20)
    async with parking(pool(), sender=sender, queue=queue, max_bytes=1) as (rig, logs):
        await rig.publish(*grouped("a", "b"), queue=SHARED)
        await asyncio.sleep(10)
        assert [ids for _, ids in logs.appended] == [["a"]]
        assert "is full" in next(each.message for each in rig.warnings)
        assert rig.manager.registry.held == 1  # a, which is being delivered
        await asyncio.sleep(100)

        assert [each for _, each in sent(rig)] == ["a", "b"]


@pytest.mark.rule("ORD-13", "ORD-7")
async def test_what_was_received_waits_for_a_store_that_is_away() -> None:
    async with parking(sender=FakeSender(takes=1), queue=SHARED) as (rig, logs):
        await asyncio.sleep(1)
        logs.away = True
        await rig.publish(*grouped("a", "b"), queue=SHARED)
        await asyncio.sleep(60)
        assert "ORDER_STORE" in rig.codes
        assert rig.sender.sent == []
        logs.away = False
        await asyncio.sleep(60)

        assert [each for _, each in sent(rig)] == ["a", "b"]
        assert ended(rig)[Fate.STORED] == 2


@pytest.mark.rule("ORD-13", "POOL-7")
async def test_messages_that_block_nobody_are_shared_alone() -> None:
    async with parking(sender=failing(SOON), queue=SHARED) as (rig, _):
        loose = grouped("a", dispatchMode="NEXT_ON_ERROR")
        await rig.publish(*loose, *grouped("b", "c"), queue=SHARED)
        await asyncio.sleep(60)

        assert sent(rig) == [(0, "a"), (1, "b"), (2, "c"), (5, "a")]


@pytest.mark.rule("ORD-13", "POOL-7")
async def test_what_comes_later_does_not_wait_for_a_shared_message_that_blocks_nobody() -> None:
    async with parking(sender=failing(LATER), queue=SHARED) as (rig, _):
        await rig.publish(*grouped("a", dispatchMode="NEXT_ON_ERROR"), queue=SHARED)
        await asyncio.sleep(5)
        await rig.publish(*grouped("b"), queue=SHARED)
        await asyncio.sleep(100)

        assert sent(rig) == [(0, "a"), (5, "b"), (46, "a")]


@pytest.mark.rule("ORD-13")
async def test_a_carrier_that_starts_again_does_not_look_which_groups_are_stored() -> None:
    async with parking(sender=failing(LATER), queue=SHARED) as (rig, logs):
        await rig.publish(*grouped("a", "b"), queue=SHARED)
        await asyncio.sleep(5)
        changed = replace(SHARED, max_messages=10)
        await rig.apply(pool(), queues=[changed])
        await rig.publish(*grouped("x", group="h"), queue=changed)
        await asyncio.sleep(5)

        assert not order_of(rig).groups
        assert [ids for _, ids in logs.appended] == [["a", "b"], ["x"]]


@pytest.mark.rule("ORD-13", "ORD-7")
async def test_a_lost_lease_leaves_a_shared_message_to_the_broker() -> None:
    short = replace(SHARED, visibility_timeout=3.0)
    async with parking(sender=FakeSender(takes=1), queue=short) as (rig, logs):
        await asyncio.sleep(1)
        logs.away = True
        await rig.publish(*grouped("a", "b"), queue=short)
        await asyncio.sleep(1)
        assert order_of(rig).queue.visibility_timeout == 3.0  # a killed router's come back then
        for job in list(rig.manager.registry.tracker):
            job.lease_until = 0.0
        logs.away = False
        await asyncio.sleep(60)

        assert [each for _, each in sent(rig)] == ["a", "b"]
        assert not order_of(rig).groups


@pytest.mark.rule("ORD-13", "DLQ-2")
async def test_a_letter_is_replayed_to_the_store_of_a_shared_queue() -> None:
    async with parking(sender=FakeSender(takes=1), queue=SHARED) as (rig, _):
        await asyncio.sleep(1)
        (given,) = grouped("a")
        order = order_of(rig)
        await order.put(Publication(parse(given), given, "again"))
        await asyncio.sleep(10)

        assert [each for _, each in sent(rig)] == ["a"]
        assert not order.groups


@pytest.mark.rule("ORD-13", "ORD-14")
async def test_the_history_says_that_a_message_is_stored_for_all_routers() -> None:
    async with parking(sender=failing(LATER), queue=SHARED) as (rig, _):
        await rig.publish(*grouped("a"), queue=SHARED)
        await asyncio.sleep(5)
        carried, failed = rig.manager.registry.journal.of_message("a")

        assert (carried.fate, carried.error) == (Fate.STORED, FOR_ALL)
        assert failed.fate is Fate.RETURNED


@pytest.mark.rule("ORD-13")
async def test_a_queue_that_is_shared_no_more_knows_what_is_stored() -> None:
    alone = replace(SHARED, is_shared=False)
    async with parking(sender=failing(LATER), queue=SHARED) as (rig, logs):
        await rig.publish(*grouped("a", "b"), queue=SHARED)
        await asyncio.sleep(5)
        await rig.apply(pool(), queues=[alone])
        await rig.publish(*grouped("c"), *grouped("x", group="h"), queue=alone)
        await asyncio.sleep(100)

        order = [each for _, each in sent(rig)]
        assert [each for each in order if each != "x"] == ["a", "a", "b", "c"]
        assert [ids for _, ids in logs.appended] == [["a", "b"], ["c"]]


# Several routers, with leases.


def shared(name: str) -> QueueConfig:
    return free(name, ordering=Ordering.STRICT, is_shared=True)


async def two_routers(stack: AsyncExitStack, queue: QueueConfig) -> list[LeasingRouter]:
    registry = await stack.enter_async_context(BrokerRegistry(worker_id="t", dedup_window=300))
    server = LeaseServer()
    return [
        await stack.enter_async_context(
            router(
                server,
                name,
                [queue],
                brokers=registry,
                sender=FakeSender(takes=1),
                order=order_store(registry, is_shared=True),
            )
        )
        for name in ("one", "two")
    ]


@pytest.mark.rule("ORD-13", "CFG-10")
async def test_the_router_with_the_lease_carries_and_all_deliver() -> None:
    queue = shared("q")
    async with AsyncExitStack() as stack:
        one, two = await two_routers(stack, queue)
        await asyncio.sleep(5)
        carriers = [each for each in (one, two) if each.phase_of("q") == "HELD"]
        groups = [grouped(f"{n}", group=f"{n}") for n in range(300)]
        await one.rig.publish(*[each for (each,) in groups], queue=queue)
        await asyncio.sleep(30)
        stored = [ended(each.rig)[Fate.STORED] for each in (one, two)]

        assert carriers == [one]
        assert stored == [300, 0]
        assert one.held == two.held == ["q"]
        assert len(one.rig.sender.sent) + len(two.rig.sender.sent) == 300
        assert one.rig.sender.sent
        assert two.rig.sender.sent
        depths = [await each.rig.manager.consumers["q"].depth() for each in (one, two)]
        assert depths[0] is not None
        assert depths[1] is None  # it sees the store, not the queue
        assert [each.leases.may_publish("q") for each in (one, two)] == [True, False]


@pytest.mark.rule("ORD-13", "CFG-10")
async def test_a_router_that_gives_the_lease_away_goes_on_delivering() -> None:
    queue = shared("q")
    async with AsyncExitStack() as stack:
        one, two = await two_routers(stack, queue)
        await asyncio.sleep(5)
        one.leases.release("q")
        await asyncio.sleep(20)
        groups = [grouped(f"{n}", group=f"{n}") for n in range(300)]
        await one.rig.publish(*[each for (each,) in groups], queue=queue)
        await asyncio.sleep(30)

        assert [each.phase_of("q") for each in (one, two)] == ["WAITING", "HELD"]
        assert [ended(each.rig)[Fate.STORED] for each in (one, two)] == [0, 300]
        assert len(one.rig.sender.sent) + len(two.rig.sender.sent) == 300
        assert one.rig.sender.sent


@pytest.mark.rule("ORD-13", "CFG-10", "CFG-6")
async def test_a_lease_that_is_taken_while_a_document_is_applied_starts_one_consumer() -> None:
    queue = shared("q")
    others = [QueueConfig(name=f"o{n}", uri=f"memory://o{n}", broker=BROKER) for n in range(60)]
    async with AsyncExitStack() as stack:
        one, _ = await two_routers(stack, queue)
        await asyncio.sleep(5)
        manager = one.rig.manager
        await one.apply(others[0])
        await asyncio.sleep(5)
        applying = asyncio.ensure_future(one.apply(*others, queue))
        while "o40" not in manager.consumers:  # noqa: ASYNC110  a turn of the loop each
            await asyncio.sleep(0)
        assert "q" not in manager.consumers  # its turn has not come
        manager.take_queue("q")
        consumer = manager.consumers["q"]
        await applying

        assert manager.consumers["q"] is consumer
