"""The end of a run, by the clock (OPS-4)."""

import asyncio
import logging

import pytest

from router.core.history import Fate
from router.core.warnings import Severity
from router.engine.queue_manager import shut_down
from router.engine.settle import ACK_LINGER_SECONDS
from router.ports import BrokerError, Disconnected
from tests.support.fakes import REFUSED, FakeSender
from tests.support.faults import Scripted, ScriptedQueue, handed
from tests.support.rig import FREE_QUEUE, Rig, body, ended, grouped, pool, running
from tests.support.virtual_time import now

pytestmark = pytest.mark.anyio


async def end(rig: Rig, grace: float = 30.0) -> float:
    """How long it took."""
    began = now()
    await shut_down(rig.manager, grace)
    return now() - began


@pytest.mark.rule("OPS-4")
async def test_an_idle_router_ends_at_once() -> None:
    async with running(pool("P")) as rig:
        await asyncio.sleep(1)

        assert await end(rig) == 0
        assert rig.warnings == []


@pytest.mark.rule("OPS-4")
async def test_a_router_without_queues_ends_at_once() -> None:
    async with running(pool("P"), queues=()) as rig:
        assert await end(rig) == 0


@pytest.mark.rule("OPS-4", "BRK-4")
async def test_an_open_post_finishes_and_everything_else_goes_back_at_once() -> None:
    async with running(pool("P", 1), sender=FakeSender(takes=10)) as rig:
        await rig.publish(*grouped("a1", "a2", group="a"), *grouped("b1", "b2", group="b"))
        await asyncio.sleep(1)
        took = await end(rig)

        assert took == pytest.approx(9.002)
        assert rig.sender.ids == ["a1"]
        assert rig.witness.acks == [(10 + ACK_LINGER_SECONDS, "a1")]
        # Group mates of the open one after it.
        assert rig.witness.nacks == [(1, "b1", 0), (1, "b2", 0), (10, "a2", 0)]
        assert rig.warnings == []


@pytest.mark.rule("OPS-4", "OPS-5")
async def test_it_is_logged_what_a_shutdown_waits_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with running(pool("P"), sender=FakeSender(takes=10)) as rig:
        await rig.publish(*grouped("a"), *grouped("b", group="b"))
        await asyncio.sleep(1)
        await end(rig, grace=30)

    (waiting,) = [each for each in caplog.records if "open requests" in each.message]
    assert (vars(waiting)["requests"], vars(waiting)["seconds"]) == (2, 30)


@pytest.mark.rule("OPS-4")
async def test_an_overdue_post_is_aborted_before_its_nack() -> None:
    async with running(pool("P"), sender=FakeSender(takes=100)) as rig:
        await rig.publish(*grouped("a", "b"))
        await asyncio.sleep(1)
        took = await end(rig, grace=7)

        assert took == 7
        assert rig.sender.open == 0
        assert rig.witness.nacks == [(8, "a", 0), (8, "b", 0)]
        assert ended(rig) == {Fate.RETURNED: 2}


@pytest.mark.rule("OPS-4")
async def test_no_new_try_starts() -> None:
    sender = FakeSender(takes=1)
    sender.script("a", *[REFUSED] * 3)
    async with running(pool("P"), sender=sender) as rig:
        await rig.publish(*grouped("a"))
        await asyncio.sleep(1.5)
        took = await end(rig)

        assert took == 0
        assert sender.ids == ["a"]
        assert rig.witness.nacks == [(1.5, "a", 0)]


@pytest.mark.rule("OPS-4")
async def test_a_receive_that_still_brings_messages_gives_them_back() -> None:
    queue = ScriptedQueue(lease_seconds=30, is_deaf=True)
    async with running(pool("P"), brokers=Scripted(q=queue)) as rig:
        await asyncio.sleep(1)
        ending = rig.tasks.create_task(end(rig))
        await asyncio.sleep(15)
        queue.is_deaf = False
        queue.hand_over(handed(body("a"), "h", "1", lease=30), handed(b"?", "i", "2", lease=30))
        took = await ending

        assert took == 15
        assert queue.nacked == [(16, "h", 0), (16, "i", 0)]
        assert rig.sender.ids == []
        assert ended(rig) == {Fate.RETURNED: 2}


@pytest.mark.rule("CFG-7", "OPS-6")
async def test_the_return_of_what_a_last_receive_brought_is_not_cut_off() -> None:
    queue = ScriptedQueue(lease_seconds=90, is_deaf=True, takes={"nack": 10})
    async with running(pool("P"), brokers=Scripted(q=queue)) as rig:
        await asyncio.sleep(1)
        consumer = rig.manager.consumers["q"]
        await rig.apply(pool("P"), queues=())
        await asyncio.sleep(20)
        queue.is_deaf = False
        queue.hand_over(handed(body("a"), "h", "1", lease=90))
        await asyncio.sleep(6)
        consumer.abort_overdue(asyncio.get_running_loop().time())  # a receive that does not return
        await asyncio.sleep(10)

        assert queue.nacked == [(31, "h", 0)]
        assert ended(rig) == {Fate.RETURNED: 1}
        assert consumer.is_stopped


@pytest.mark.rule("BRK-6", "OPS-6")
async def test_what_waits_to_be_returned_is_lost_with_its_connection() -> None:
    queue = ScriptedQueue(is_deaf=True, takes={"nack": 3})
    async with running(pool("P"), brokers=Scripted(q=queue)) as rig:
        await asyncio.sleep(1)
        await rig.apply(pool("P"), queues=())
        queue.is_deaf = False
        queue.hand_over(*[handed(body(each), each, each) for each in "abc"])
        await asyncio.sleep(1)
        queue.failing["nack"] = Disconnected("gone")
        await asyncio.sleep(10)

        assert queue.nacked == []
        assert ended(rig) == {Fate.FORFEITED: 3}


@pytest.mark.rule("BRK-6", "OPS-6")
async def test_a_copy_that_waits_for_others_to_be_returned_is_lost_with_the_connection() -> None:
    queue = ScriptedQueue(takes={"nack": 10}, failing={"ack": Disconnected("gone")})
    sender = FakeSender(takes=5)
    async with running(pool("P"), sender=sender, brokers=Scripted(q=queue)) as rig:
        queue.hand_over(handed(body("a"), "h", "1"))
        await asyncio.sleep(1)
        queue.is_deaf = True
        await asyncio.sleep(1)
        settler = rig.manager.consumers["q"].connections[0].settler
        await rig.apply(pool("P"), queues=())
        queue.is_deaf = False
        queue.hand_over(handed(body("b"), "late", "2"))
        await asyncio.sleep(1)
        copy = handed(body("c"), "copy", "3")
        rig.manager.registry.receive(1, settler.counts, now())
        rig.manager.registry.hold_untracked(copy)
        settler.readmit([copy])  # as when the message that it is a copy of has ended
        await asyncio.sleep(10)

        assert queue.nacked == []
        assert ended(rig) == {Fate.FORFEITED: 3}
        assert rig.manager.registry.unaccounted == 0


@pytest.mark.rule("OPS-4")
@pytest.mark.parametrize("grace", [5, 30])
async def test_a_receive_that_never_returns_is_ended_after_twenty_five_seconds(
    grace: float,
) -> None:
    queue = ScriptedQueue(is_deaf=True)
    async with running(pool("P"), brokers=Scripted(q=queue)) as rig:
        await asyncio.sleep(1)

        assert await end(rig, grace) == 25


@pytest.mark.rule("OPS-4")
async def test_a_post_may_use_its_grace_although_the_receive_never_returns() -> None:
    queue = ScriptedQueue(lease_seconds=30)
    async with running(pool("P"), sender=FakeSender(takes=29), brokers=Scripted(q=queue)) as rig:
        queue.hand_over(handed(body("a"), "h", "1", lease=30))
        queue.is_deaf = True
        await asyncio.sleep(0.5)
        queue.is_deaf = False
        queue.changed.set()
        await asyncio.sleep(0.5)
        queue.is_deaf = True
        took = await end(rig)

        assert took == pytest.approx(28.502)
        assert [handle for _, handle in queue.acked] == ["h"]


@pytest.mark.rule("OPS-4")
async def test_a_connection_that_does_not_close_is_left_behind() -> None:
    queue = ScriptedQueue(takes={"close": 10_000})
    async with running(pool("P"), brokers=Scripted(q=queue)) as rig:
        await asyncio.sleep(1)

        assert await end(rig) == 25


@pytest.mark.rule("OPS-4", "P3")
async def test_what_waited_for_a_draining_pool_goes_back_and_starts_no_delivery() -> None:
    async with running(
        pool("P"), pool("Q"), sender=FakeSender(takes=20), queues=(FREE_QUEUE,)
    ) as rig:
        await rig.publish(*grouped("a"), queue=FREE_QUEUE)
        await asyncio.sleep(1)
        await rig.apply(pool("Q"), queues=(FREE_QUEUE,))
        await rig.publish(*grouped("b"), queue=FREE_QUEUE)
        await asyncio.sleep(1)
        await end(rig)

        assert rig.sender.ids == ["a"]
        assert rig.witness.nacks == [(20, "b", 0)]


@pytest.mark.rule("OPS-4", "ROUTE-5")
async def test_what_waits_for_room_goes_back_although_the_receive_does_not_return() -> None:
    """And is sent by no other pool."""
    queue = ScriptedQueue(lease_seconds=100, holds_groups=False)
    pools = pool("P", 1, take_ahead=1), pool("Q")  # Q has room, so there is a receive
    async with running(*pools, sender=FakeSender(takes=10), brokers=Scripted(q=queue)) as rig:
        for each in "abcd":
            queue.hand_over(handed(grouped(each, group=each)[0], each, each, lease=100))
        queue.hand_over(handed(grouped("x", poolCode="Q")[0], "x", "x", lease=100))
        await asyncio.sleep(1)
        assert rig.manager.consumers["q"].flow.waiting == 2
        queue.is_deaf = True
        await end(rig)

        assert rig.sender.ids == ["a", "x"]
        assert set(queue.nacked) == {(1, each, 0) for each in "bcd"}
        assert not rig.manager.pools


@pytest.mark.rule("OPS-4")
@pytest.mark.parametrize(
    "fault", [{"nack": BrokerError("too late")}, {"nack": Disconnected("gone")}]
)
async def test_messages_that_could_not_be_returned_are_counted(
    fault: dict[str, Exception],
) -> None:
    queue = ScriptedQueue(lease_seconds=30, failing=dict(fault))
    async with running(pool("P", 1), sender=FakeSender(takes=5), brokers=Scripted(q=queue)) as rig:
        queue.hand_over(*(handed(body(i, poolCode="P"), i, i, lease=30) for i in "abc"))
        await asyncio.sleep(1)
        await end(rig)

        (warning,) = rig.warnings
        assert (warning.code, warning.severity) == ("SHUTDOWN_CLEANUP_ERRORS", Severity.WARN)
        assert warning.message.startswith("2 messages")
        assert ended(rig) == {Fate.DELIVERED: 1, Fate.FORFEITED: 2}


@pytest.mark.rule("OPS-4", "OPS-6")
async def test_a_broker_that_does_not_answer_cannot_hold_up_the_end() -> None:
    queue = ScriptedQueue(lease_seconds=3600, takes={"ack": 10_000, "nack": 10_000})
    async with running(pool("P"), sender=FakeSender(takes=5), brokers=Scripted(q=queue)) as rig:
        messages = zip("abc", grouped(*"abc"), strict=True)
        queue.hand_over(*(handed(each, name, name, lease=3600) for name, each in messages))
        await asyncio.sleep(6)
        took = await end(rig, grace=10)
        left = now()

        assert took <= 25
        assert rig.is_empty
        assert ended(rig) == {Fate.FORFEITED: 3}
    assert now() - left <= 5  # no task of it is left either


@pytest.mark.rule("OPS-4", "BRK-3")
async def test_acks_that_are_being_repeated_are_given_up() -> None:
    queue = ScriptedQueue(lease_seconds=3600, failing={"ack": BrokerError("not now")})
    async with running(pool("P"), sender=FakeSender(takes=1), brokers=Scripted(q=queue)) as rig:
        queue.hand_over(handed(body("a"), "h", "1", lease=3600))
        await asyncio.sleep(5)
        await end(rig, grace=2)
        left = now()

        assert ended(rig) == {Fate.FORFEITED: 1}
    assert now() == left


@pytest.mark.rule("OPS-4", "BRK-6")
async def test_a_router_without_its_broker_ends_too() -> None:
    queue = ScriptedQueue(lease_seconds=3600)
    async with running(pool("P"), sender=FakeSender(takes=1000), brokers=Scripted(q=queue)) as rig:
        queue.hand_over(handed(body("a"), "h", "1", lease=3600))
        await asyncio.sleep(1)
        queue.failing |= dict.fromkeys(["open", "receive", "ack", "nack"], Disconnected("gone"))
        await asyncio.sleep(100)
        took = await end(rig, grace=10)

        assert took <= 25
        assert ended(rig) == {Fate.FORFEITED: 1}


@pytest.mark.rule("OPS-4", "ROUTE-3")
async def test_copies_are_still_acknowledged_away() -> None:
    queue = ScriptedQueue(lease_seconds=30)
    async with running(pool("P"), sender=FakeSender(takes=5), brokers=Scripted(q=queue)) as rig:
        queue.hand_over(
            handed(body("a"), "h", "1", lease=30), handed(body("a"), "copy", "2", lease=30)
        )
        await asyncio.sleep(0.001)
        took = await end(rig, grace=0)

        assert took == pytest.approx(0.001)
        assert queue.acked == [(0.002, "copy")]
