"""Work queues hand over messages of some pools only, if they are asked to (ROUTE-5)."""

import asyncio

import pytest

from router.core.message import DEFAULT_POOL, Message
from router.ports import Broker, Nack, PoolFilter, PoolSelector, Publication
from tests.contract.cases import CASES, Ends, bodies, is_empty, params, receive_one
from tests.support.virtual_time import now

WORK_QUEUES = [case for case in CASES if case.compares_bodies]

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("case", params(WORK_QUEUES), indirect=True),
]


def publication(
    message_id: str, pool: str | None, group: str | None = None, priority: int = 0
) -> Publication:
    message = Message(
        id=message_id,
        target="https://svc.example/do",
        pool=pool,
        group=group,
        priority=priority,
    )
    return Publication(message, message_id.encode(), message_id)


def only(*codes: str) -> PoolFilter:
    return PoolFilter(frozenset(codes))


def all_but(*codes: str) -> PoolFilter:
    return PoolFilter(frozenset(codes), excludes=True)


def selector_of(broker: Broker) -> PoolSelector:
    assert broker.traits.selector is not None
    return broker.traits.selector


@pytest.mark.rule("ROUTE-5", "WQ-2")
async def test_messages_of_other_pools_are_left_in_the_queue_in_order(ends: Ends) -> None:
    pools = ["SLOW", "FAST", None, "SLOW", "FAST", "unknown"]
    await ends.publisher.publish([publication(f"{n}-{pool}", pool) for n, pool in enumerate(pools)])
    selector = selector_of(ends.broker)

    selector.select(only("FAST"))
    fast = bodies(await ends.broker.receive(10))
    selector.select(all_but("SLOW", "nowhere"))
    others = bodies(await ends.broker.receive(10))
    selector.select(None)
    rest = bodies(await ends.broker.receive(10))

    assert fast == ["1-FAST", "4-FAST"]
    assert others == ["2-None", "5-unknown"]
    assert rest == ["0-SLOW", "3-SLOW"]


@pytest.mark.rule("ROUTE-5", "WQ-2")
@pytest.mark.parametrize("excluded", ["", "a", "z", "az", "bcd", "acegikmoqsuwy", "mnMN"])
async def test_pools_before_between_and_behind_those_left_out_are_found(
    ends: Ends, excluded: str
) -> None:
    pools = "aMbzNycxdwevfugthsirjqkplomn"
    grouped = [publication(f"{pool}-grouped", pool, pool) for pool in pools]
    alone = [publication(f"{pool}-alone", pool) for pool in reversed(pools)]
    await ends.publisher.publish(grouped + alone)

    selector_of(ends.broker).select(all_but(*excluded))
    found = bodies(await ends.broker.receive(100))

    assert found == [
        each.message.id for each in grouped + alone if each.message.id[0] not in excluded
    ]


@pytest.mark.rule("ROUTE-5", "WQ-2")
async def test_a_message_without_a_pool_is_one_of_the_default_pool(ends: Ends) -> None:
    await ends.publisher.publish(
        [publication("none", None), publication("blank", ""), publication("named", DEFAULT_POOL)]
    )
    selector = selector_of(ends.broker)

    selector.select(all_but(DEFAULT_POOL))
    waiting = asyncio.ensure_future(ends.broker.receive(10))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    selector.select(only(DEFAULT_POOL))

    assert bodies(await waiting) == ["none", "blank", "named"]


@pytest.mark.rule("ROUTE-5", "WQ-2")
async def test_no_pool_selected_hands_over_nothing(ends: Ends) -> None:
    await ends.publisher.publish([publication("a", "SLOW")])

    selector_of(ends.broker).select(only())

    assert await is_empty(ends.broker)


@pytest.mark.rule("ROUTE-5", "WQ-2")
async def test_a_pool_that_is_selected_is_claimed_for_in_the_open_receive(ends: Ends) -> None:
    await ends.publisher.publish([publication("a", "SLOW")])
    selector = selector_of(ends.broker)
    selector.select(all_but("SLOW"))
    waiting = asyncio.ensure_future(ends.broker.receive(10))
    await asyncio.sleep(3)  # by now it looks for others' changes at long intervals
    assert not waiting.done()

    selector.select(None)
    selected = now()

    assert bodies(await waiting) == ["a"]
    assert now() - selected < 0.1


@pytest.mark.rule("ROUTE-5", "WQ-2")
async def test_groups_keep_their_order_and_priorities_across_selections(ends: Ends) -> None:
    """A group belongs to one pool; the same name in another pool is another group."""
    await ends.publisher.publish(
        [
            publication("s1", "SLOW", "g"),
            publication("f1", "FAST", "g"),
            publication("s2", "SLOW", "g"),
            publication("f2", "FAST", "g"),
            publication("s9", "SLOW", "g", priority=9),
            publication("f5", "FAST", priority=5),
        ]
    )
    selector = selector_of(ends.broker)

    selector.select(all_but("SLOW"))
    fast = await ends.broker.receive(2)
    selector.select(only("SLOW"))
    slow = await ends.broker.receive(10)
    selector.select(None)
    await ends.broker.ack([received.handle for received in fast])
    rest = await ends.broker.receive(10)

    assert bodies(fast) == ["f5", "f1"]
    assert bodies(slow) == ["s9", "s1", "s2"]
    assert bodies(rest) == ["f2"]


@pytest.mark.rule("ROUTE-5", "WQ-2")
async def test_a_returned_message_comes_back_only_if_its_pool_is_selected(ends: Ends) -> None:
    await ends.publisher.publish([publication("a", "SLOW", "g"), publication("b", "SLOW", "g")])
    selector = selector_of(ends.broker)
    first = await receive_one(ends.broker)

    selector.select(all_but("SLOW"))
    await ends.broker.nack([Nack(first.handle, 0)])
    await ends.publisher.publish([publication("c", "FAST")])
    fast = await ends.broker.receive(10)
    selector.select(all_but("FAST"))

    assert bodies(fast) == ["c"]
    assert bodies(await ends.broker.receive(10)) == ["a", "b"]


@pytest.mark.rule("ROUTE-5", "WQ-2")
async def test_each_connection_selects_for_itself(ends: Ends) -> None:
    await ends.publisher.publish([publication("a", "SLOW"), publication("b", "FAST")])
    async with ends.brokers.open_queue(ends.queue) as other:
        selector_of(other).select(only("FAST"))
        selector_of(ends.broker).select(only("SLOW"))

        assert bodies(await ends.broker.receive(10)) == ["a"]
        assert bodies(await other.receive(10)) == ["b"]
