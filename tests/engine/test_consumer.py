"""One queue's receivers: how much they ask for, how they reconnect, when they are unhealthy."""

import asyncio
import gc
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from msgspec.structs import replace

from router.brokers import BrokerRegistry
from router.core.broker import BrokerFacts, Exclusivity
from router.core.config import Ordering, QueueConfig
from router.core.dead_letter import Reason
from router.core.history import Fate
from router.core.message import Malformed, ReceivedMessage
from router.core.outcome import Reply
from router.core.state import NO_CONSUMER, assess, readiness
from router.engine import slices
from router.engine.broker_guard import CALL_TIMEOUT_SECONDS
from router.engine.dispatch import read_ahead
from router.engine.settle import ACK_LINGER_SECONDS
from router.ports import Depth, Disconnected, QueueRefused
from tests.support.fakes import FakeSender
from tests.support.faults import Scripted, ScriptedQueue, Unpluggable, handed
from tests.support.rig import QUEUE, Rig, body, ended, grouped, pool, running
from tests.support.states import RigReader
from tests.support.virtual_time import VirtualTimeLoop, now

pytestmark = pytest.mark.anyio

LEASELESS = QueueConfig(name="q", uri="memory://q?lease=none")


@asynccontextmanager
async def unpluggable(
    queue: QueueConfig = QUEUE, sender: FakeSender | None = None
) -> AsyncIterator[tuple[Rig, Unpluggable]]:
    async with BrokerRegistry(worker_id="test", dedup_window=300) as registered:
        plug = Unpluggable(registered)
        async with running(pool("P"), sender=sender, brokers=plug, queues=(queue,)) as rig:
            yield rig, plug


@pytest.mark.rule("BRK-1")
@pytest.mark.parametrize(("max_messages", "limit"), [(None, 50), (10, 10), (80, 50)])
async def test_a_receive_asks_for_what_a_batch_may_hold(
    max_messages: int | None, limit: int
) -> None:
    queue = ScriptedQueue()
    config = replace(QUEUE, max_messages=max_messages)
    async with running(pool("P"), brokers=Scripted(q=queue), queues=(config,)):
        await asyncio.sleep(1)

        assert queue.limits == [limit]


@pytest.mark.rule("BRK-1", "ROUTE-5")
async def test_a_receive_asks_for_less_when_there_is_less_room() -> None:
    queue = ScriptedQueue(lease_seconds=30)
    async with running(pool("P", 1), sender=FakeSender(takes=1000), brokers=Scripted(q=queue)):
        messages = [body(str(n), poolCode="P") for n in range(20)]
        queue.hand_over(*(handed(each, n, str(n), lease=30) for n, each in enumerate(messages)))
        await asyncio.sleep(1)

        assert queue.limits == [50, 30]


@pytest.mark.rule("BRK-1")
async def test_only_a_poll_that_succeeded_is_recorded() -> None:
    queue = ScriptedQueue()
    async with running(pool("P"), brokers=Scripted(q=queue)) as rig:
        (connection,) = rig.manager.consumers["q"].connections
        await asyncio.sleep(25)
        polled = connection.health.last_poll
        queue.failing["receive"] = Disconnected("gone")
        await asyncio.sleep(30)

        assert polled == 20
        assert connection.health.last_poll == 40


@pytest.mark.rule("BRK-1", "OPS-3")
async def test_each_connection_is_unhealthy_on_its_own_after_sixty_silent_seconds() -> None:
    queue = ScriptedQueue(is_deaf=True)
    config = replace(QUEUE, connections=2)
    async with running(pool("P"), brokers=Scripted(q=queue), queues=(config,)) as rig:
        consumer = rig.manager.consumers["q"]
        await asyncio.sleep(60)
        healthy_then = [each.is_healthy(now()) for each in consumer.connections]
        queue.is_deaf = False
        consumer.connections[0].health.last_poll = now()
        await asyncio.sleep(0.5)

        assert healthy_then == [True, True]
        assert [each.is_healthy(now()) for each in consumer.connections] == [True, False]
        assert not consumer.is_healthy(now())
        queue.changed.set()


@pytest.mark.rule("OPS-3")
async def test_a_consumer_that_is_held_back_by_full_pools_is_healthy() -> None:
    async with running(pool("P", 1), sender=FakeSender(takes=10_000)) as rig:
        await rig.publish(*(body(str(n), poolCode="P") for n in range(200)))
        await asyncio.sleep(600)

        assert rig.manager.consumers["q"].is_healthy(now())


@pytest.mark.rule("OPS-3", "BRK-6")
async def test_a_consumer_that_reconnects_is_healthy() -> None:
    async with unpluggable() as (rig, plug):
        await asyncio.sleep(1)
        plug.unplug()
        await asyncio.sleep(600)

        assert rig.manager.consumers["q"].is_healthy(now())


@pytest.mark.rule("OPS-3")
@pytest.mark.parametrize(("due", "healthy"), [(5, False), (0, True), (None, True)])
async def test_a_consumer_that_gets_nothing_of_what_is_due_is_unhealthy(
    due: int | None, healthy: bool
) -> None:
    queue = ScriptedQueue(depth=Depth(waiting=5, in_flight=0, due=due))
    async with running(pool("P"), brokers=Scripted(q=queue)) as rig:
        consumer = rig.manager.consumers["q"]
        verdicts = []
        for _ in range(4):
            await asyncio.sleep(30)
            await consumer.depth()
            verdicts.append(consumer.is_healthy(now()))

        assert verdicts == [True, True, True, healthy]


@pytest.mark.rule("OPS-3", "ORD-2")
@pytest.mark.parametrize(
    ("exclusivity", "healthy"), [(Exclusivity.BROKER, True), (Exclusivity.NOT_NEEDED, False)]
)
async def test_a_spare_that_waits_for_a_queue_of_one_consumer_is_healthy(
    exclusivity: Exclusivity, healthy: bool
) -> None:
    facts = BrokerFacts(name="scripted", schemes=("memory",), exclusivity=exclusivity)
    strict = QueueConfig(name="q", uri=QUEUE.uri, ordering=Ordering.STRICT, broker=facts)
    queue = ScriptedQueue(depth=Depth(waiting=5, in_flight=0, due=5))
    async with running(pool("P"), brokers=Scripted(q=queue), queues=[strict]) as rig:
        for _ in range(5):
            await asyncio.sleep(30)
            await rig.manager.consumers["q"].depth()

        assert rig.manager.consumers["q"].is_healthy(now()) is healthy


@pytest.mark.rule("OPS-3")
async def test_a_consumer_that_gets_messages_is_healthy_however_many_are_due() -> None:
    queue = ScriptedQueue(lease_seconds=30, depth=Depth(waiting=5, in_flight=0, due=5))
    async with running(pool("P"), brokers=Scripted(q=queue)) as rig:
        consumer = rig.manager.consumers["q"]
        verdicts = []
        for n in range(6):
            queue.hand_over(handed(body(str(n)), n, str(n), lease=30))
            await asyncio.sleep(30)
            await consumer.depth()
            verdicts.append(consumer.is_healthy(now()))

        assert all(verdicts)


@pytest.mark.rule("BRK-6")
async def test_a_lost_connection_is_opened_again_with_growing_pauses() -> None:
    async with unpluggable() as (rig, plug):
        await asyncio.sleep(10)
        plug.unplug()
        await asyncio.sleep(100)

        # The middle of 0…0.5, 0…1, 0…2, 0…4, 0…8, 0…16, 0…30, 0…30 s.
        pauses = [
            after - before for before, after in zip(plug.opened[1:], plug.opened[2:], strict=False)
        ]
        assert plug.opened[1] == 10.25
        assert pauses == [0.5, 1, 2, 4, 8, 15, 15, 15, 15, 15]
        assert rig.codes == {"QUEUE_UNREACHABLE"}


@pytest.mark.rule("BRK-6", "CFG-7")
async def test_a_queue_that_never_answered_is_reported_at_once_a_lost_one_after_a_minute() -> None:
    async with unpluggable() as (rig, plug):
        await asyncio.sleep(30)
        plug.unplug()
        await asyncio.sleep(55)
        early = set(rig.codes)
        await asyncio.sleep(30)
        late = set(rig.codes)
        rig.book.clear()
        await rig.apply(pool("P"), queues=(QUEUE, replace(QUEUE, name="r")))
        await asyncio.sleep(1)

        assert (early, late) == (set(), {"QUEUE_UNREACHABLE"})
        assert {w.source for w in rig.warnings} >= {"Consumer:r"}


@pytest.mark.rule("BRK-6")
async def test_two_short_losses_are_not_a_long_one() -> None:
    async with unpluggable() as (rig, plug):
        for _ in range(2):
            await asyncio.sleep(60)
            plug.unplug()
            await asyncio.sleep(40)
            plug.plug_in()

        assert rig.codes == set()


@pytest.mark.rule("BRK-6")
async def test_the_pauses_grow_although_it_can_connect_as_long_as_nothing_is_answered() -> None:
    queue = ScriptedQueue(failing={"receive": Disconnected("no answer")})
    brokers = Scripted(q=queue)
    async with running(pool("P"), brokers=brokers) as rig:
        await asyncio.sleep(130)

        assert len(brokers.opened) < 15
        assert "QUEUE_UNREACHABLE" in rig.codes


@pytest.mark.rule("BRK-6", "P5", "OPS-3")
async def test_a_refused_queue_is_looked_at_again_every_minute_and_others_go_on() -> None:
    queues = {"q": ScriptedQueue(failing={"open": QueueRefused("no")}), "r": ScriptedQueue()}
    brokers = Scripted(**queues)
    both = (QUEUE, replace(QUEUE, name="r"))
    async with running(pool("P"), brokers=brokers, queues=both) as rig:
        await asyncio.sleep(100)
        queues["r"].hand_over(handed(body("a"), "h", "1"))
        await asyncio.sleep(10)

        assert [at for at, name in brokers.opened if name == "q"] == [0, 60]
        assert rig.codes == {"QUEUE_VALIDATION"}
        assert assess(RigReader(rig).state()).issues == (
            "not connected: queues q",
            "unhealthy consumers: q",
        )
        assert readiness(RigReader(rig).state()).passed
        assert rig.sender.ids == ["a"]


@pytest.mark.rule("OPS-3")
async def test_a_router_whose_queues_are_all_refused_is_not_ready_until_one_is_connected() -> None:
    queue = ScriptedQueue(failing={"open": QueueRefused("no")})
    async with running(pool("P"), brokers=Scripted(q=queue)) as rig:
        await asyncio.sleep(1)
        refused = RigReader(rig).state()
        assert (assess(refused).healthy, readiness(refused).issues) == (False, (NO_CONSUMER,))
        queue.failing.clear()
        await asyncio.sleep(60)
        connected = RigReader(rig).state()
        assert (assess(connected).issues, readiness(connected).passed) == ((), True)

    assert rig.codes == {"QUEUE_VALIDATION"}  # it was not restarted


@pytest.mark.rule("OPS-3", "BRK-6")
async def test_a_router_whose_queues_cannot_be_reached_from_its_start_is_ready() -> None:
    queue = ScriptedQueue(failing={"open": Disconnected("no")})
    async with running(pool("P"), brokers=Scripted(q=queue)) as rig:
        for _ in range(100):
            await asyncio.sleep(6.1)
            state = RigReader(rig).state()
            assert readiness(state).passed
            assert assess(state).healthy

        assert assess(state).issues == ("no queue is connected",)
        assert rig.codes == {"QUEUE_UNREACHABLE"}  # it was not restarted


@pytest.mark.rule("P5")
@pytest.mark.parametrize("verb", ["open", "receive", "close"])
async def test_a_bug_in_an_adapter_costs_a_connection_and_no_more(verb: str) -> None:
    queue = ScriptedQueue(lease_seconds=30, failing={verb: RuntimeError("a bug")})
    async with running(pool("P"), brokers=Scripted(q=queue)) as rig:
        await asyncio.sleep(10)
        queue.failing.clear()
        await asyncio.sleep(30)
        queue.hand_over(handed(body("a"), "h", "1", lease=30))
        await asyncio.sleep(5)

        assert ended(rig) == {Fate.DELIVERED: 1}


@pytest.mark.rule("BRK-6", "P1")
async def test_nothing_is_sent_on_a_dead_handle() -> None:
    sender = FakeSender(takes=10)
    async with unpluggable(LEASELESS, sender) as (rig, plug):
        await rig.publish(*grouped("a", "b", "c"), queue=LEASELESS)
        await asyncio.sleep(1)
        plug.unplug()
        await asyncio.sleep(29)
        sent_meanwhile = list(sender.sent)
        plug.plug_in()
        await asyncio.sleep(120)

        assert sent_meanwhile == [(0, "a")]
        # The first was accepted: its next delivery is only acknowledged (BRK-3).
        assert sender.ids == ["a", "b", "c"]
        assert ended(rig) == {Fate.FORFEITED: 3, Fate.SUPERSEDED: 1, Fate.DELIVERED: 2}


@pytest.mark.rule("BRK-6", "P2")
async def test_a_message_under_way_is_settled_by_the_connection_that_brings_it_again() -> None:
    sender = FakeSender(takes=100)
    async with unpluggable(LEASELESS, sender) as (rig, plug):
        await rig.publish(*grouped("a", "b"), queue=LEASELESS)
        await asyncio.sleep(1)
        plug.unplug()
        await asyncio.sleep(2)
        plug.plug_in()
        await asyncio.sleep(300)

        assert sender.sent == [(0, "a"), (100, "b")]
        assert ended(rig) == {Fate.SUPERSEDED: 2, Fate.DELIVERED: 2}


@pytest.mark.rule("BRK-6", "P1")
async def test_handles_die_with_their_connection_even_if_a_call_on_it_just_timed_out() -> None:
    queue = ScriptedQueue(takes={"ack": 10_000})
    sender = FakeSender(takes=100, takes_for={"x": 1})

    def lose() -> None:
        queue.failing["receive"] = Disconnected("gone")
        queue.hand_over(handed(body("y", dispatchMode="IMMEDIATE"), "y", "3"))

    async with running(pool("P"), sender=sender, brokers=Scripted(q=queue)):
        queue.hand_over(
            *(handed(body(each, dispatchMode="IMMEDIATE"), each, each) for each in ("x", "a"))
        )
        await asyncio.sleep(CALL_TIMEOUT_SECONDS)  # the ACK of x is under way since t = 1
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        loop.call_soon(lose)
        loop.stand_still(2)
        await asyncio.sleep(0.1)
        queue.failing.clear()
        queue.takes.clear()
        await asyncio.sleep(30)
        queue.hand_over(handed(body("a", dispatchMode="IMMEDIATE"), "new", "a"))
        await asyncio.sleep(100)

        assert queue.acked == [(100 + ACK_LINGER_SECONDS, "new")]


@pytest.mark.rule("BRK-3", "BRK-6")
async def test_a_lease_is_good_on_the_next_connection() -> None:
    sender = FakeSender(takes=10)
    async with unpluggable(QUEUE, sender) as (rig, plug):
        await rig.publish(*grouped("a"))
        await asyncio.sleep(1)
        plug.unplug()
        await asyncio.sleep(10)
        plug.plug_in()
        await asyncio.sleep(60)

        assert sender.ids == ["a"]
        assert ended(rig) == {Fate.DELIVERED: 1}


@pytest.mark.rule("BRK-6", "ROUTE-5")
async def test_a_connection_that_breaks_while_the_pool_is_full_of_its_acks_is_opened_again() -> (
    None
):
    queue = ScriptedQueue()
    async with running(pool("P", 50), sender=FakeSender(takes=1), brokers=Scripted(q=queue)) as rig:
        await asyncio.sleep(1)
        queue.failing["ack"] = Disconnected("gone")
        for n in range(1000):
            message = body(str(n), poolCode="P", dispatchMode="IMMEDIATE")
            queue.hand_over(handed(message, n, str(n)))
        await asyncio.sleep(60)
        queue.failing.clear()
        await asyncio.sleep(120)

        assert rig.manager.registry.ledger.received == 1000
        assert rig.is_empty


@pytest.mark.rule("BRK-6", "ROUTE-2")
async def test_arrivals_that_wait_for_a_settling_message_die_with_their_connection() -> None:
    queues = {name: ScriptedQueue() for name in "qr"}
    queues["q"].takes["nack"] = 10
    twice = (QUEUE, replace(QUEUE, name="r"))
    sender = FakeSender(takes=1)
    sender.script("a", Reply(200, b'{"ack": false}'))
    async with running(pool("P"), sender=sender, brokers=Scripted(**queues), queues=twice) as rig:
        queues["q"].hand_over(handed(body("a"), "h", "1"))
        await asyncio.sleep(2)
        queues["r"].hand_over(handed(body("a"), "dead", "1"))
        await asyncio.sleep(1)
        queues["r"].failing["receive"] = Disconnected("gone")
        queues["r"].hand_over(handed(b"ends the receive", "bad", "2"))
        await asyncio.sleep(30)

        assert sender.ids == ["a"]
        assert ended(rig) == {Fate.RETURNED: 1, Fate.FORFEITED: 1, Fate.DEAD_LETTERED: 1}


@pytest.mark.rule("BRK-6", "BRK-3")
async def test_a_copy_is_not_acknowledged_on_another_connection_than_its_own() -> None:
    queue = ScriptedQueue(failing={"nack": Disconnected("gone")})
    sender = FakeSender(takes=60, takes_for={"x": 5})
    sender.script("x", Reply(200, b'{"ack": false}'))
    async with running(pool("P"), sender=sender, brokers=Scripted(q=queue)) as rig:
        queue.hand_over(
            handed(body("x"), "x", "1"), handed(body("a", messageGroupId="g"), "a", "2")
        )
        await asyncio.sleep(4.999)
        queue.hand_over(handed(body("a", messageGroupId="g"), "copy", "2"))
        await asyncio.sleep(30)

        assert queue.acked == []
        assert ended(rig) == {Fate.FORFEITED: 2}


@pytest.mark.rule("BRK-6", "ROUTE-5")
async def test_what_waits_for_room_is_lost_with_its_connection() -> None:
    queue = ScriptedQueue(holds_groups=False, failing={"nack": Disconnected("gone")})
    sender = FakeSender(takes=1000, takes_for={"x": 5})
    sender.script("x", Reply(200, b'{"ack": false}'))
    async with running(pool("P", 1), pool("Q"), sender=sender, brokers=Scripted(q=queue)) as rig:
        messages = [body(str(n), poolCode="P") for n in range(60)]
        queue.hand_over(
            handed(body("x", poolCode="Q"), "x", "x"),
            *(handed(each, n, str(n)) for n, each in enumerate(messages)),
        )
        await asyncio.sleep(4)
        waiting = len(rig.manager.registry.tracker)
        await asyncio.sleep(2)

        assert waiting == 61
        assert ended(rig) == {Fate.FORFEITED: 1 + 10}


@pytest.mark.rule("FIFO-1", "CFG-7")
@pytest.mark.parametrize(
    ("connections", "holds", "codes"),
    [(2, False, {"QUEUE_VALIDATION"}), (2, True, set()), (1, False, set())],
)
async def test_several_connections_to_a_queue_without_group_lock_are_warned_of(
    connections: int, holds: bool, codes: set[str]
) -> None:
    queue = ScriptedQueue(holds_groups=holds)
    config = replace(QUEUE, connections=connections)
    async with running(pool("P"), brokers=Scripted(q=queue), queues=(config,)) as rig:
        await asyncio.sleep(1)

        assert rig.codes == codes


@pytest.mark.rule("P5", "BRK-6")
async def test_one_broken_queue_does_not_stop_the_others() -> None:
    other = QueueConfig(name="r", uri="memory://r")
    async with BrokerRegistry(worker_id="test", dedup_window=300) as registered:
        plug = Unpluggable(registered)
        async with running(pool("P"), brokers=plug, queues=(QUEUE,)) as rig:
            await asyncio.sleep(1)
            plug.unplug()
            rig.witness.brokers = registered  # what is opened from now on works
            await rig.apply(pool("P"), queues=(QUEUE, other))
            await rig.publish(*grouped("a"), queue=other)
            await asyncio.sleep(10)

            assert rig.sender.ids == ["a"]


BIG = "x" * 200 * 1024


def large_batch() -> list[ReceivedMessage]:
    """Eight bodies of 200 KiB, of one group; the third is no message."""
    bodies = [*grouped("0", "1", other=BIG), b"x" * 200 * 1024, *grouped(*"34567", other=BIG)]
    return [handed(each, n, str(n), lease=30) for n, each in enumerate(bodies)]


async def turns_until_routed(rig: Rig, queue: ScriptedQueue, *messages: ReceivedMessage) -> int:
    """How often another task of the loop had its turn before they were routed."""
    before, turns = rig.manager.registry.ledger.received, 0
    queue.hand_over(*messages)
    while rig.manager.registry.ledger.received == before:
        await asyncio.sleep(0)
        turns += 1
    return turns


@pytest.mark.rule("P5", "FIFO-1")
async def test_a_large_receive_is_read_in_slices_and_routed_as_one_batch() -> None:
    queue, sender = ScriptedQueue(lease_seconds=30), FakeSender(takes=1)
    sender.script("1", Reply(503), Reply(503), Reply(503))
    async with running(pool("P"), sender=sender, brokers=Scripted(q=queue)) as rig:
        await asyncio.sleep(1)
        small = await turns_until_routed(rig, queue, handed(body("small"), 99, "99", lease=30))
        large = await turns_until_routed(rig, queue, *large_batch())
        await asyncio.sleep(60)

        # After each two bodies, the next comes in another turn.
        assert large - small == 3
        assert sender.ids == ["small", "0", "1", "1", "1"]
        assert [handle for _, handle, _ in queue.nacked] == [1, 3, 4, 5, 6, 7]
        assert [letter.reason for letter in rig.letters.letters] == [Reason.MALFORMED]
        assert ended(rig) == {Fate.DELIVERED: 2, Fate.DEAD_LETTERED: 1, Fate.RETURNED: 6}


@pytest.mark.rule("P5")
@pytest.mark.parametrize("is_slow", [True, False])
async def test_bodies_that_take_long_to_read_leave_as_much_time_to_others(
    monkeypatch: pytest.MonkeyPatch, *, is_slow: bool
) -> None:
    monkeypatch.setattr(slices, "LONG_SLICE_SECONDS", 0.0 if is_slow else 60.0)
    bodies = [body("a", other="[" * 900 * 1024) for _ in range(3)]
    began, cpu_began = now(), time.thread_time()
    await read_ahead([handed(each, n, str(n)) for n, each in enumerate(bodies)])
    paused, took = now() - began, time.thread_time() - cpu_began

    # After the last one there is no pause: the messages are routed.
    assert took / 3 < paused < took if is_slow else paused == 0


@pytest.mark.rule("P5")
async def test_a_bug_met_while_a_large_receive_is_read_concerns_one_message() -> None:
    text: Any = "x" * 300 * 1024  # what an adapter should never bring
    good = body("a")
    read = await read_ahead([handed(text, "bug", "1"), handed(good, "a", "2")])

    with pytest.raises(TypeError):
        read(text)  # where a bug concerns one message only
    assert read(good).id == "a"


@pytest.fixture
def no_collections() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.rule("P4")
@pytest.mark.usefixtures("no_collections")
async def test_what_cannot_be_read_is_free_at_once() -> None:
    """The collector comes rarely: bodies must not wait for it."""
    bodies = [b"[" * 200 * 1024, b"\xff" * 300 * 1024]
    before = [sys.getrefcount(each) for each in bodies]
    read = await read_ahead([handed(each, n, str(n)) for n, each in enumerate(bodies)])
    for each in bodies:
        with suppress(Malformed):
            read(each)
    del each, read

    assert [sys.getrefcount(each) for each in bodies] == before


@pytest.mark.rule("OPS-4", "P1")
async def test_what_is_still_being_read_when_the_queue_is_stopped_is_returned() -> None:
    queue, sender = ScriptedQueue(lease_seconds=30), FakeSender()
    async with running(pool("P"), sender=sender, brokers=Scripted(q=queue)) as rig:
        await asyncio.sleep(1)
        small = await turns_until_routed(rig, queue, handed(body("small"), 99, "99", lease=30))
        await asyncio.sleep(5)
        queue.hand_over(*large_batch())
        for _ in range(small + 1):
            await asyncio.sleep(0)
        assert rig.manager.registry.ledger.received == 1
        rig.manager.consumers["q"].stop()
        await asyncio.sleep(1)

        assert sender.ids == ["small"]
        assert [(handle, delay) for _, handle, delay in queue.nacked] == [(n, 0) for n in range(8)]
        assert ended(rig) == {Fate.DELIVERED: 1, Fate.RETURNED: 8}


@pytest.mark.rule("BRK-6", "P1")
async def test_what_is_still_being_read_when_the_connection_breaks_is_not_processed() -> None:
    queue, sender = ScriptedQueue(lease_seconds=30), FakeSender()
    async with running(pool("P"), sender=sender, brokers=Scripted(q=queue)) as rig:
        await asyncio.sleep(1)
        small = await turns_until_routed(rig, queue, handed(body("small"), 99, "99", lease=30))
        await asyncio.sleep(5)
        (connection,) = rig.manager.consumers["q"].connections
        line = connection._guarded
        assert line is not None
        queue.failing["ack"] = queue.failing["nack"] = Disconnected("gone")
        queue.hand_over(*large_batch())
        for _ in range(small):
            await asyncio.sleep(0)
        with pytest.raises(Disconnected):
            await line.ack([99])
        assert rig.manager.registry.ledger.received == 1
        await asyncio.sleep(1)

        assert sender.ids == ["small"]
        assert ended(rig) == {Fate.DELIVERED: 1, Fate.FORFEITED: 8}
