"""ACKs that go to the broker together, and connections that come and go meanwhile."""

import asyncio

import pytest
from msgspec.structs import replace

from router.core.history import Fate
from router.core.outcome import Reply
from router.core.returning import ReturnReason
from router.engine.job import Return
from router.engine.settle import ACK_LINGER_SECONDS
from router.ports import Disconnected
from tests.support.fakes import FakeSender
from tests.support.faults import Scripted, ScriptedQueue, handed, not_now
from tests.support.rig import QUEUE, body, ended, pool, running

pytestmark = pytest.mark.anyio

DEFER = Reply(200, b'{"ack": false}')


def alone(message_id: str) -> bytes:
    """A message that waits for no other."""
    return body(message_id, dispatchMode="IMMEDIATE")


def acks(queue: ScriptedQueue) -> list[tuple[float, str, int]]:
    return [
        (round(at, 3), verb, count) for at, verb, count in queue.calls if verb.startswith("ack")
    ]


@pytest.mark.rule("BRK-3")
async def test_while_an_ack_is_under_way_the_next_ones_gather_for_one_call() -> None:
    queue = ScriptedQueue(lease_seconds=30, takes={"ack": 1})
    sender = FakeSender(takes=1, takes_for={"b": 1.3, "c": 1.6})
    async with running(pool("P"), sender=sender, brokers=Scripted(q=queue)):
        queue.hand_over(*(handed(alone(each), each, each, lease=30) for each in "abc"))
        await asyncio.sleep(5)

        assert acks(queue) == [(1.002, "ack", 1), (2.004, "ack", 2)]


@pytest.mark.rule("BRK-3")
async def test_one_whose_lease_has_ended_takes_no_other_along() -> None:
    queue = ScriptedQueue(lease_seconds=30)
    async with running(pool("P"), brokers=Scripted(q=queue)) as rig:
        queue.hand_over(
            handed(alone("a"), "late", "1", lease=1 + ACK_LINGER_SECONDS / 2),
            handed(alone("b"), "in time", "2", lease=30),
        )
        await asyncio.sleep(5)
        queue.hand_over(handed(alone("a"), "again", "1", lease=30))
        await asyncio.sleep(5)

        assert rig.sender.ids == ["a", "b"]
        assert [handle for _, handle in queue.acked] == ["in time", "again"]
        assert ended(rig) == {Fate.DELIVERED: 1, Fate.FORFEITED: 1, Fate.SUPERSEDED: 1}


@pytest.mark.rule("BRK-3")
async def test_what_was_acknowledged_does_not_hurry_what_was_refused() -> None:
    queue = ScriptedQueue(lease_seconds=30, unsettled={"h": not_now("h")})
    async with running(pool("P"), brokers=Scripted(q=queue)):
        queue.hand_over(
            handed(alone("a"), "h", "1", lease=30), handed(alone("b"), "i", "2", lease=1.1)
        )
        await asyncio.sleep(2)

        assert acks(queue) == [(1.002, "ack", 2), (1.252, "ack", 1), (1.752, "ack", 1)]


@pytest.mark.rule("BRK-3", "P1")
async def test_what_was_returned_while_its_ack_was_repeated_is_delivered_again() -> None:
    queue = ScriptedQueue(lease_seconds=30, unsettled={"h": not_now("h")})
    async with running(pool("P"), brokers=Scripted(q=queue)) as rig:
        queue.hand_over(handed(body("a"), "h", "1", lease=3))
        await asyncio.sleep(2.9)
        (job,) = rig.manager.registry.tracker
        await job.settler.nack([Return(job, ReturnReason.STOPPED)])
        await asyncio.sleep(1)  # its lease ends before the ACK is tried again
        queue.hand_over(handed(body("a"), "i", "1", lease=30))
        await asyncio.sleep(5)

        assert rig.sender.ids == ["a", "a"]
        assert ended(rig) == {Fate.RETURNED: 1, Fate.DELIVERED: 1}


@pytest.mark.rule("ROUTE-2", "WQ-1")
async def test_copies_of_the_accepted_and_of_the_dead_are_acknowledged_apart() -> None:
    queue = ScriptedQueue(lease_seconds=30, takes={"ack": 4, "ack failed": 4})
    sender = FakeSender(takes=1)
    sender.script("dead", Reply(404))
    async with running(pool("P"), sender=sender, brokers=Scripted(q=queue)) as rig:
        queue.hand_over(*(handed(alone(each), each, each, lease=30) for each in ("ok", "dead")))
        await asyncio.sleep(2)  # both are being settled
        queue.takes.clear()
        queue.hand_over(
            *(handed(alone(each), f"{each} again", each, lease=30) for each in ("ok", "dead"))
        )
        await asyncio.sleep(10)

        assert sorted(acks(queue)) == [
            (1.002, "ack", 1),
            (1.002, "ack failed", 1),
            (5.004, "ack", 1),
            (5.004, "ack failed", 1),
        ]
        assert ended(rig) == {Fate.DELIVERED: 1, Fate.DEAD_LETTERED: 1, Fate.SUPERSEDED: 2}


@pytest.mark.rule("BRK-3", "BRK-6")
async def test_an_ack_that_failed_is_repeated_as_soon_as_a_new_connection_is_open() -> None:
    queue = ScriptedQueue(
        lease_seconds=300, failing={"ack": Disconnected("gone")}, takes={"open": 0.3}
    )
    async with running(pool("P"), brokers=Scripted(q=queue)) as rig:
        queue.hand_over(handed(body("a"), "h", "1", lease=300))
        await asyncio.sleep(1)
        queue.failing["open"] = Disconnected("gone")
        await asyncio.sleep(30)
        queue.failing.clear()
        await asyncio.sleep(60)

        opened = [at for at, verb, _ in queue.calls if verb == "open"]
        assert queue.acked == [(opened[-1] + 0.3, "h")]
        assert ended(rig) == {Fate.DELIVERED: 1}


@pytest.mark.rule("BRK-6")
async def test_an_ack_on_a_handle_that_died_with_its_connection_is_given_up_at_once() -> None:
    queue = ScriptedQueue(unsettled={"h": not_now("h")})
    async with running(pool("P"), brokers=Scripted(q=queue)) as rig:
        queue.hand_over(handed(body("a"), "h", "1"))
        await asyncio.sleep(5)  # the next try is at 8.752
        held_before = rig.manager.registry.held
        queue.failing |= dict.fromkeys(["receive", "open"], Disconnected("gone"))
        queue.hand_over(handed(b"ends the receive", "bad", "2"))
        await asyncio.sleep(1)

        assert (held_before, rig.manager.registry.held) == (1, 0)
        assert ended(rig) == {Fate.FORFEITED: 1, Fate.DEAD_LETTERED: 1}


@pytest.mark.rule("ROUTE-2", "CFG-6")
async def test_a_queue_that_goes_is_left_once_another_connection_holds_its_last_message() -> None:
    queues = {name: ScriptedQueue(lease_seconds=30) for name in "qr"}
    other = replace(QUEUE, name="r")  # two consumers of one queue
    sender = FakeSender(takes=20)
    async with running(
        pool("P"), sender=sender, brokers=Scripted(**queues), queues=(QUEUE, other)
    ) as rig:
        queues["q"].hand_over(handed(body("a"), "old", "1", lease=30))
        await asyncio.sleep(1)
        await rig.apply(pool("P"), queues=(other,))
        await asyncio.sleep(1)
        queues["r"].hand_over(handed(body("a"), "new", "1", lease=30))
        await asyncio.sleep(30)

        assert [at for at, verb, _ in queues["q"].calls if verb == "close"] == [2]
        assert [handle for _, handle in queues["r"].acked] == ["new"]


@pytest.mark.rule("ROUTE-2", "CFG-6")
async def test_a_copy_that_waited_is_returned_by_a_queue_that_goes() -> None:
    queue = ScriptedQueue(lease_seconds=30, takes={"nack": 4})
    sender = FakeSender(takes=1)
    sender.script("a", DEFER)
    async with running(pool("P"), sender=sender, brokers=Scripted(q=queue)) as rig:
        queue.hand_over(handed(body("a", poolCode="P"), "old", "1", lease=30))
        await asyncio.sleep(2)
        queue.hand_over(handed(body("a", poolCode="P"), "new", "1", lease=30))
        await asyncio.sleep(1)
        await rig.apply(pool("P"), queues=())
        await asyncio.sleep(20)

        assert sender.ids == ["a"]
        assert queue.nacked == [(5, "old", 30), (9, "new", 0)]


@pytest.mark.rule("ROUTE-2", "FIFO-1")
async def test_redeliveries_that_waited_for_the_nack_of_their_group_keep_its_order() -> None:
    queue = ScriptedQueue(lease_seconds=30, takes={"nack": 4})
    sender = FakeSender(takes=1)
    sender.script("a", DEFER, DEFER)
    messages = [(body(name, messageGroupId="g"), str(number)) for number, name in enumerate("ab")]
    async with running(pool("P"), sender=sender, brokers=Scripted(q=queue)):
        for hand_over in ("old", "new"):
            queue.hand_over(
                *(
                    handed(content, f"{hand_over} {number}", number, lease=30)
                    for content, number in messages
                )
            )
            await asyncio.sleep(2)
        await asyncio.sleep(10)

        assert sender.ids == ["a", "a"]
        assert queue.nacked == [
            (5, "old 0", 30),
            (5, "old 1", 10),
            (10, "new 0", 30),
            (10, "new 1", 10),
        ]
