"""Bringing what runs in line with the configuration while messages are under way (CFG-6, -7)."""

import asyncio
import logging

import pytest
from msgspec.structs import replace

from router.core.config import DEFAULT_POOL_CONFIG, QueueConfig
from router.core.history import Fate
from router.core.message import DEFAULT_POOL
from router.core.warnings import Severity
from router.engine.queue_manager import SLICE_ENTRIES
from router.ports import Disconnected
from tests.support.fakes import FakeSender
from tests.support.faults import Scripted, ScriptedQueue, handed
from tests.support.rig import FREE_QUEUE, QUEUE, body, ended, grouped, pool, running
from tests.support.virtual_time import now

pytestmark = pytest.mark.anyio


@pytest.mark.rule("CFG-6")
async def test_a_pool_that_is_gone_is_drained_and_let_go_once_idle() -> None:
    async with running(pool("P", 1), pool("Q"), sender=FakeSender(takes=10)) as rig:
        await rig.publish(*grouped("a", "b"))
        await asyncio.sleep(1)
        await rig.apply(pool("Q"))
        rig.manager.forget_finished(now())
        draining = set(rig.manager.draining_pools)
        await asyncio.sleep(15)
        rig.manager.forget_finished(now())

        assert (draining, rig.manager.draining_pools) == ({"P"}, {})
        # The open POST finished; the other came back at once and was routed without its pool.
        assert rig.sender.sent == [(0, "a"), (pytest.approx(10.002), "b")]
        assert "ROUTING" in rig.codes


@pytest.mark.rule("CFG-6", "OPS-5")
async def test_a_changed_pool_changes_in_place(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with running(pool("P", 1), sender=FakeSender(takes=10)) as rig:
        before = rig.pool()
        await rig.publish(*(body(str(n), poolCode="P", messageGroupId=str(n)) for n in range(5)))
        await asyncio.sleep(1)
        await rig.apply(pool("P", 4))
        await asyncio.sleep(1)

        assert rig.pool() is before
        assert [at for at, _ in rig.sender.sent] == [0, 1, 1, 1]
        assert caplog.messages.count("pool changed") == 1


@pytest.mark.rule("CFG-6", "OPS-2")
async def test_no_more_pools_are_made_than_allowed_and_a_warning_comes_before() -> None:
    pools = [pool(code) for code in "ABCDE"]
    async with running(*pools, max_pools=3, pool_warning_threshold=2) as rig:
        assert set(rig.manager.pools) == {"A", "B", "C"}
        told = sorted((w.severity, w.message) for w in rig.warnings if w.code == "POOL_LIMIT")
        assert [severity for severity, _ in told] == [Severity.WARN, Severity.CRITICAL]
        assert "pool D and 1 others were not created" in told[1][1]  # one for all of them


@pytest.mark.rule("CFG-6")
async def test_the_default_pool_is_never_drained_by_a_sync_that_does_not_name_it() -> None:
    async with running(pool("P"), sender=FakeSender(takes=10)) as rig:
        await rig.publish(body("a"), body("b"))
        await asyncio.sleep(1)
        made = rig.pool(DEFAULT_POOL)
        await rig.apply(pool("P"))
        await asyncio.sleep(30)

        assert rig.pool(DEFAULT_POOL) is made
        assert ended(rig) == {Fate.DELIVERED: 2}


@pytest.mark.rule("CFG-6")
async def test_the_default_pool_returns_to_twenty_once_it_is_no_longer_named() -> None:
    async with running(pool(DEFAULT_POOL, 3)) as rig:
        named = rig.pool(DEFAULT_POOL).config.concurrency
        await rig.apply(pool("P"))

        assert (named, rig.pool(DEFAULT_POOL).config) == (3, DEFAULT_POOL_CONFIG)


@pytest.mark.rule("CFG-6")
async def test_a_code_that_returns_while_its_pool_drains_revives_that_pool() -> None:
    async with running(pool("P"), pool("Q"), sender=FakeSender(takes=10)) as rig:
        await rig.publish(*grouped("a"))
        await asyncio.sleep(1)
        first = rig.pool()
        await rig.apply(pool("Q"))
        await rig.apply(pool("P"), pool("Q"))
        await rig.publish(*grouped("b"))
        await asyncio.sleep(60)

        assert rig.pool() is first
        assert rig.manager.draining_pools == {}
        assert [each for each in rig.sender.ids if each == "b"] == ["b"]
        assert rig.codes == set()


@pytest.mark.rule("CFG-6", "ROUTE-5")
async def test_a_revived_pool_that_is_full_counts_as_full() -> None:
    async with running(pool("P", 1), sender=FakeSender(takes=1000)) as rig:
        await rig.publish(*(body(str(n), poolCode="P") for n in range(100)))
        await asyncio.sleep(1)
        rig.manager.stop()
        await rig.apply(pool("P", 1), queues=())

        assert rig.manager.pools.have_room is rig.pool().has_room


@pytest.mark.rule("CFG-6", "P3")
async def test_arrivals_for_a_group_that_a_draining_pool_holds_wait_and_keep_their_order() -> None:
    sender = FakeSender(takes=10)
    sender.takes_for["a"] = 30
    async with running(pool("P"), pool("Q"), sender=sender, queues=(FREE_QUEUE,)) as rig:
        await rig.publish(*grouped("a"), queue=FREE_QUEUE)
        await asyncio.sleep(1)
        await rig.apply(pool("Q"), queues=(FREE_QUEUE,))
        await rig.publish(*grouped("b", "c"), *grouped("d", group="other"), queue=FREE_QUEUE)
        await asyncio.sleep(120)

        assert [each for each in sender.sent if each[1] != "d"] == [(0, "a"), (30, "b"), (40, "c")]
        assert (1, "d") in sender.sent


@pytest.mark.rule("CFG-6", "ROUTE-5", "BRK-4")
async def test_arrivals_that_waited_for_a_draining_pool_and_find_no_room_are_returned() -> None:
    sender = FakeSender(takes=1000, takes_for={"a": 30})
    async with running(pool("P"), pool("Q"), sender=sender, queues=(FREE_QUEUE,)) as rig:
        await rig.publish(*grouped("a"), queue=FREE_QUEUE)
        await asyncio.sleep(1)
        await rig.apply(pool("Q"), pool(DEFAULT_POOL, 1), queues=(FREE_QUEUE,))
        await rig.publish(*grouped("b", "c"), queue=FREE_QUEUE)
        await asyncio.sleep(1)
        await rig.publish(*(body(f"x{n}") for n in range(100)), queue=FREE_QUEUE)
        await asyncio.sleep(40)

        assert rig.witness.nacks == [(30, "c", 0)]  # it is not asked for until there is room


@pytest.mark.rule("CFG-7", "P1")
async def test_a_queue_that_is_gone_is_received_from_no_more_and_finishes_what_it_has() -> None:
    async with running(pool("P", 1), sender=FakeSender(takes=10)) as rig:
        await rig.publish(*grouped("a", "b"))
        await asyncio.sleep(1)
        await rig.apply(pool("P", 1), queues=())
        await rig.publish(*grouped("c"))
        await asyncio.sleep(60)
        stopping = len(rig.manager.stopping_consumers)
        rig.manager.forget_finished(now())

        assert rig.sender.ids == ["a", "b"]
        assert ended(rig) == {Fate.DELIVERED: 2}
        assert (stopping, rig.manager.stopping_consumers) == (1, [])


@pytest.mark.rule("CFG-7")
async def test_an_unchanged_queue_is_left_alone() -> None:
    async with running(pool("P")) as rig:
        before = rig.manager.consumers["q"]
        await rig.apply(pool("P"), pool("Q"))

        assert rig.manager.consumers["q"] is before


@pytest.mark.rule("CFG-7", "P1", "P2")
async def test_a_changed_queue_is_replaced_without_losing_or_repeating_a_message() -> None:
    async with running(pool("P", 1), sender=FakeSender(takes=10)) as rig:
        await rig.publish(*grouped("a", "b"))
        await asyncio.sleep(1)
        counts = rig.manager.consumers["q"].counts
        changed = replace(QUEUE, max_messages=5, connections=2)
        await rig.apply(pool("P", 1), queues=(changed,))
        await rig.publish(*grouped("c"))
        await asyncio.sleep(60)

        assert rig.sender.ids == ["a", "b", "c"]
        assert ended(rig) == {Fate.DELIVERED: 3}
        consumer = rig.manager.consumers["q"]
        assert (consumer.queue, len(consumer.connections)) == (changed, 2)
        assert consumer.counts is counts


@pytest.mark.rule("CFG-7", "ROUTE-2")
async def test_a_replaced_consumer_ends_when_its_successor_adopts_what_it_held() -> None:
    queue = ScriptedQueue(lease_seconds=30)
    sender = FakeSender(takes=100)
    async with running(pool("P"), sender=sender, brokers=Scripted(q=queue)) as rig:
        queue.hand_over(handed(body("a"), "old", "1", lease=30))
        await asyncio.sleep(1)
        await rig.apply(pool("P"), queues=(replace(QUEUE, max_messages=5),))
        (stopping,) = rig.manager.stopping_consumers
        await asyncio.sleep(1)
        queue.hand_over(handed(body("a"), "new", "1", lease=30))
        await asyncio.sleep(1)

        assert stopping.is_stopped
        await asyncio.sleep(120)
        assert [handle for _, handle in queue.acked] == ["new"]


@pytest.mark.rule("CFG-7", "ROUTE-2")
async def test_an_arrival_that_waited_while_its_consumer_was_stopped_is_returned() -> None:
    queue = ScriptedQueue(lease_seconds=30, takes={"nack": 5})
    (a,), (b,) = grouped("a", group="g"), grouped("b", group="h")
    async with running(
        pool("P", 1), sender=FakeSender(takes=100), brokers=Scripted(q=queue)
    ) as rig:
        queue.hand_over(handed(a, "a", "1", lease=30), handed(b, "b", "2", lease=30))
        await asyncio.sleep(1)
        await rig.apply(pool("Q"))  # b is returned, which takes a while
        queue.hand_over(handed(b, "later", "2", lease=30))
        await asyncio.sleep(1)
        await rig.apply(pool("Q"), queues=())
        await asyncio.sleep(20)

        assert [(handle, delay) for _, handle, delay in queue.nacked] == [("b", 0), ("later", 0)]


@pytest.mark.rule("CFG-7", "ROUTE-2")
async def test_arrivals_that_waited_while_their_consumer_was_stopped_are_all_returned() -> None:
    queue = ScriptedQueue(lease_seconds=30, takes={"nack": 5})
    (a,), (b,), (c,) = (grouped(each, group=each) for each in "abc")
    async with running(
        pool("P", 1), sender=FakeSender(takes=100), brokers=Scripted(q=queue)
    ) as rig:
        queue.hand_over(*[handed(each, each, each.decode(), lease=30) for each in (a, b, c)])
        await asyncio.sleep(1)
        await rig.apply(pool("Q"))  # b and c are returned, which takes a while
        queue.hand_over(handed(b, "b again", b.decode(), lease=30))
        queue.hand_over(handed(c, "c again", c.decode(), lease=30))
        await asyncio.sleep(1)
        await rig.apply(pool("Q"), queues=())
        await asyncio.sleep(20)

        assert [handle for _, handle, _ in queue.nacked] == [b, c, "b again", "c again"]


@pytest.mark.rule("CFG-7", "BRK-6", "P5")
async def test_a_stopped_consumer_that_cannot_reconnect_waits_between_its_tries() -> None:
    queue = ScriptedQueue(lease_seconds=30)
    brokers = Scripted(q=queue)
    async with running(pool("P"), sender=FakeSender(takes=25), brokers=brokers) as rig:
        queue.hand_over(handed(body("a"), "h", "1", lease=30))
        await asyncio.sleep(1)
        queue.failing |= dict.fromkeys(["open", "extend"], Disconnected("gone"))
        await rig.apply(pool("P"), queues=())
        await asyncio.sleep(17)
        queue.failing.clear()
        await asyncio.sleep(60)

        opened = [at for at, _ in brokers.opened]
        assert opened == [0, 10.25, 10.75, 11.75, 13.75, 17.75, 25.75]
        assert ended(rig) == {Fate.DELIVERED: 1}


@pytest.mark.rule("CFG-9")
async def test_without_a_queue_nothing_is_consumed() -> None:
    async with running(pool("P"), queues=()) as rig:
        await rig.publish(*grouped("a"))
        await asyncio.sleep(60)

        assert rig.sender.ids == []
        assert rig.manager.registry.ledger.received == 0


@pytest.mark.rule("CFG-9", "BRK-4")
async def test_a_stopped_router_returns_what_is_queued_and_starts_again_at_once() -> None:
    async with running(pool("P", 1), sender=FakeSender(takes=10)) as rig:
        await rig.publish(*grouped("a", "b"), body("c"))
        await asyncio.sleep(1)
        rig.manager.stop()
        await asyncio.sleep(20)
        sent = rig.sender.ids
        await rig.apply(pool("P", 1))
        await asyncio.sleep(60)

        assert sorted(sent) == ["a", "c"]
        assert (21, "b") in rig.sender.sent
        assert {delay for _, _, delay in rig.witness.nacks} == {0}


@pytest.mark.rule("CFG-6", "CFG-9")
async def test_a_draining_default_pool_is_revived_by_the_next_message_without_a_pool() -> None:
    async with running(pool("P"), sender=FakeSender(takes=50)) as rig:
        await rig.publish(body("a", messageGroupId="g"))
        await asyncio.sleep(1)
        made = rig.pool(DEFAULT_POOL)
        rig.manager.stop()
        await rig.apply(pool("P"))
        await rig.publish(body("b", messageGroupId="h"))
        await asyncio.sleep(1)

        assert rig.pool(DEFAULT_POOL) is made
        assert rig.sender.ids == ["a", "b"]


@pytest.mark.rule("CFG-6", "ROUTE-5")
async def test_when_the_only_pool_was_full_and_goes_its_messages_go_to_the_default_pool() -> None:
    sender = FakeSender(takes=1, takes_for={"0": 10_000})
    async with running(pool("P", 1), sender=sender) as rig:
        await rig.publish(*(body(str(n), poolCode="P", messageGroupId=str(n)) for n in range(100)))
        await asyncio.sleep(1)
        await rig.apply()
        await asyncio.sleep(300)

        assert len(set(sender.ids)) == 100


@pytest.mark.rule("CFG-6", "ROUTE-5", "P5")
async def test_a_full_pool_that_goes_does_not_hold_up_what_needs_none() -> None:
    sender = FakeSender(takes=1, takes_for={"0": 10_000})
    async with running(pool("P", 1), sender=sender) as rig:
        await rig.publish(*grouped(*(str(n) for n in range(60))))
        await asyncio.sleep(1)
        full = not rig.manager.pools.have_room
        await rig.publish(body("x"))
        await rig.apply()
        await asyncio.sleep(10)

        assert full
        assert (1, "x") in sender.sent


@pytest.mark.rule("CFG-6")
async def test_a_pool_can_be_changed_by_hand() -> None:
    async with running(pool("P", 1)) as rig:
        rig.pool().change(pool("P", 7))

        assert rig.pool().config.concurrency == 7


@pytest.mark.rule("CFG-7")
async def test_two_queues_are_consumed_side_by_side() -> None:
    other = QueueConfig(name="r", uri="memory://r")
    async with running(pool("P"), queues=(QUEUE, other)) as rig:
        await rig.publish(*grouped("a"))
        await rig.publish(*grouped("b", group="h"), queue=other)
        await asyncio.sleep(5)

        assert rig.sender.sent == [(0, "a"), (0, "b")]


@pytest.mark.rule("CFG-6", "P4", "P5")
async def test_a_draining_pool_that_is_full_of_waiting_arrivals_does_not_stop_the_others() -> None:
    sender = FakeSender(takes=1, takes_for={"a": 200})
    async with running(pool("P", 1), pool("Q"), sender=sender) as rig:
        await rig.publish(*grouped("a"))
        await asyncio.sleep(1)
        await rig.apply(pool("Q"))
        queue = replace(FREE_QUEUE, name="r", uri="memory://r?groups=free")
        await rig.apply(pool("Q"), queues=(QUEUE, queue))
        await rig.publish(*grouped(*(f"w{n}" for n in range(300))), queue=queue)
        await asyncio.sleep(10)
        for each in "bcd":
            await rig.publish(*grouped(each, poolCode="Q"))
            await asyncio.sleep(10)

        assert sender.ids == ["a", "b", "c", "d"]
        assert len(rig.manager.registry.tracker) <= 1 + 50 + 50


MANY = 4 * SLICE_ENTRIES


@pytest.mark.rule("CFG-6", "P5")
async def test_messages_have_their_turn_while_a_large_configuration_is_applied() -> None:
    pools = [pool(f"P{number}") for number in range(MANY)]
    queues = [QueueConfig(name=f"q{number}", uri=f"memory://q{number}") for number in range(MANY)]
    async with running() as rig:
        applying = asyncio.create_task(rig.apply(*pools, queues=[QUEUE, *queues]))
        seen = set()
        while not applying.done():
            seen.add((len(rig.manager.pools), len(rig.manager.consumers)))
            await asyncio.sleep(0)

        assert len(seen) >= 2 * MANY // SLICE_ENTRIES
        assert (len(rig.manager.pools), len(rig.manager.consumers)) == (MANY, MANY + 1)


@pytest.mark.rule("CFG-6", "OPS-4")
async def test_a_stop_ends_the_work_on_a_large_configuration() -> None:
    queues = [QueueConfig(name=f"q{number}", uri=f"memory://q{number}") for number in range(MANY)]
    async with running() as rig:
        applying = asyncio.create_task(
            rig.apply(*(pool(f"P{number}") for number in range(MANY)), queues=queues)
        )
        await asyncio.sleep(0)
        rig.manager.stop()
        await applying

        assert (rig.manager.pools, rig.manager.consumers) == ({}, {})


@pytest.mark.rule("CFG-6")
async def test_the_latest_configuration_wins_even_if_one_is_still_being_applied() -> None:
    async with running() as rig:
        applying = asyncio.create_task(rig.apply(*(pool(f"P{number}") for number in range(MANY))))
        await asyncio.sleep(0)
        await rig.apply(pool("last"))
        await applying

        assert set(rig.manager.pools) == {"last"}
        assert [each.code for each in rig.manager.applied.pools] == ["last"]


@pytest.mark.rule("CFG-6", "ROUTE-4")
async def test_a_default_pool_that_a_message_needed_meanwhile_gets_its_settings() -> None:
    pools = [pool(f"P{number}") for number in range(20 * SLICE_ENTRIES)]
    async with running() as rig:
        applying = asyncio.create_task(rig.apply(*pools, pool(DEFAULT_POOL, 7)))
        await asyncio.sleep(0)
        await rig.publish(body("a"))
        made = None
        while made is None:
            await asyncio.sleep(0)
            made = rig.manager.pools.get(DEFAULT_POOL)
        was_meanwhile = not applying.done()
        await applying
        await asyncio.sleep(30)

        assert was_meanwhile
        assert rig.pool(DEFAULT_POOL) is made
        assert made.config.concurrency == 7
        assert ended(rig) == {Fate.DELIVERED: 1}
