"""Leases: kept while a message is tracked, never while it settles, never used when lost (BRK-5)."""

import asyncio
from collections import Counter

import pytest
from msgspec.structs import replace

from router.core.history import Fate
from router.core.outcome import Reply
from router.ports import Disconnected, Traits
from tests.support.fakes import FakeSender
from tests.support.faults import Scripted, ScriptedQueue, handed, lost, not_now
from tests.support.rig import QUEUE, body, grouped, pool, running

pytestmark = pytest.mark.anyio

DEFER = Reply(200, b'{"ack": false}')


@pytest.mark.rule("BRK-5")
async def test_a_delivery_of_fifteen_minutes_on_a_lease_of_thirty_seconds_is_made_once() -> None:
    sender = FakeSender(takes=899)
    async with running(pool("P"), sender=sender) as rig:
        await rig.publish(*grouped("a", "b"))
        await asyncio.sleep(2000)

        assert rig.sender.sent == [(0, "a"), (899, "b")]
        assert rig.manager.registry.ledger.ended[Fate.DELIVERED] == 2
        assert rig.manager.registry.ledger.received == 2


@pytest.mark.rule("BRK-5")
async def test_leases_are_extended_together_after_a_third_of_their_length() -> None:
    queue = ScriptedQueue(lease_seconds=30)
    async with running(pool("P", 1), sender=FakeSender(takes=40), brokers=Scripted(q=queue)):
        queue.hand_over(*(handed(body(i, poolCode="P"), i, i, lease=30) for i in "abc"))
        await asyncio.sleep(39)

        extensions = [call for call in queue.calls if call[1] == "extend"]
        assert extensions == [(10, "extend", 3), (20, "extend", 3), (30, "extend", 3)]


@pytest.mark.rule("BRK-5")
async def test_what_is_settling_is_not_extended() -> None:
    queue = ScriptedQueue(lease_seconds=30, unsettled={"h": not_now("h")})
    async with running(pool("P"), sender=FakeSender(takes=1), brokers=Scripted(q=queue)):
        queue.hand_over(handed(body("a"), "h", "1", lease=30))
        await asyncio.sleep(29)

        assert queue.extended == []


@pytest.mark.rule("BRK-5")
async def test_a_nack_waits_for_the_extension_under_way() -> None:
    queue = ScriptedQueue(lease_seconds=30, takes={"extend": 5})
    sender = FakeSender(takes=12)
    sender.script("a", DEFER)
    async with running(pool("P"), sender=sender, brokers=Scripted(q=queue)):
        queue.hand_over(handed(body("a"), "h", "1", lease=30))
        await asyncio.sleep(20)

        assert queue.extended == [(15, "h")]
        assert queue.nacked == [(15, "h", 30)]


@pytest.mark.rule("ROUTE-2")
async def test_a_nack_on_a_newer_connection_waits_for_an_extension_on_the_older_one() -> None:
    queues = {name: ScriptedQueue(lease_seconds=30) for name in "qr"}
    queues["q"].takes["extend"] = 5
    sender = FakeSender(takes=12)
    sender.script("a", DEFER)
    twice = (QUEUE, QUEUE.__class__(name="r", uri=QUEUE.uri))  # two consumers of one queue
    async with running(pool("P"), sender=sender, brokers=Scripted(**queues), queues=twice):
        queues["q"].hand_over(handed(body("a"), "old", "1", lease=30))
        await asyncio.sleep(11)
        queues["r"].hand_over(handed(body("a"), "new", "1", lease=30))
        await asyncio.sleep(20)

        assert queues["q"].nacked == []
        assert queues["r"].nacked == [(15, "new", 30)]


@pytest.mark.rule("BRK-5")
async def test_an_extension_does_not_touch_the_lease_of_a_newer_hand_over() -> None:
    queue = ScriptedQueue(lease_seconds=30, takes={"extend": 5}, unsettled={"old": lost("old")})
    async with running(pool("P"), sender=FakeSender(takes=40), brokers=Scripted(q=queue)) as rig:
        queue.hand_over(handed(body("a"), "old", "1", lease=30))
        await asyncio.sleep(11)
        queue.hand_over(handed(body("a"), "new", "1", lease=30))
        await asyncio.sleep(10)
        (job,) = rig.manager.registry.tracker
        queue.takes.clear()
        lease_until = job.lease_until
        await asyncio.sleep(30)

        assert lease_until == 11 + 30
        assert [handle for _, handle in queue.acked] == ["new"]


@pytest.mark.rule("P2")
async def test_no_delivery_starts_on_a_lost_lease_and_later_mates_are_let_go() -> None:
    queue = ScriptedQueue(lease_seconds=30, unsettled={"b": lost("b")})
    sender = FakeSender(takes=20)
    async with running(pool("P"), sender=sender, brokers=Scripted(q=queue)) as rig:
        queue.hand_over(
            *(
                handed(message, each, each, lease=30)
                for each, message in zip("abc", grouped(*"abc"), strict=True)
            )
        )
        await asyncio.sleep(25)

        assert rig.sender.ids == ["a"]
        assert queue.nacked == [(20, "c", 0)]  # its lease lives: the broker must hear of it
        assert rig.is_empty
        ended = rig.manager.registry.ledger.ended
        assert (ended[Fate.FORFEITED], ended[Fate.RETURNED]) == (1, 1)


@pytest.mark.rule("BRK-5")
async def test_an_extension_that_fails_is_tried_again_while_the_lease_lasts() -> None:
    queue = ScriptedQueue(lease_seconds=30, failing={"extend": Disconnected("gone")})
    async with running(pool("P"), sender=FakeSender(takes=60), brokers=Scripted(q=queue)) as rig:
        queue.hand_over(handed(body("a"), "h", "1", lease=30))
        await asyncio.sleep(12)
        queue.failing.clear()
        await asyncio.sleep(60)

        assert queue.extended[0][0] == pytest.approx(15.25)  # five seconds after the reconnection
        assert rig.manager.registry.ledger.ended[Fate.DELIVERED] == 1


@pytest.mark.rule("BRK-5")
async def test_an_extension_refused_for_now_leaves_the_lease_as_it_is() -> None:
    queue = ScriptedQueue(lease_seconds=30, unsettled={"h": not_now("h")})
    async with running(pool("P"), sender=FakeSender(takes=60), brokers=Scripted(q=queue)) as rig:
        queue.hand_over(handed(body("a"), "h", "1", lease=30))
        await asyncio.sleep(12)
        (job,) = rig.manager.registry.tracker

        assert job.lease_until == 30


@pytest.mark.rule("BRK-5")
async def test_what_has_lost_its_lease_is_not_returned() -> None:
    queue = ScriptedQueue(lease_seconds=30, unsettled={"h": lost("h")})
    sender = FakeSender(takes=15)
    sender.script("a", DEFER)
    async with running(pool("P"), sender=sender, brokers=Scripted(q=queue)) as rig:
        queue.hand_over(handed(body("a"), "h", "1", lease=30))
        await asyncio.sleep(20)

        assert queue.nacked == []
        assert rig.manager.registry.ledger.ended[Fate.FORFEITED] == 1


@pytest.mark.rule("ROUTE-2", "DLQ-1")
async def test_what_is_being_stored_as_a_dead_letter_is_not_extended_and_copies_wait_for_it() -> (
    None
):
    queue = ScriptedQueue(lease_seconds=30)
    sender = FakeSender(takes=1)
    sender.script("a", Reply(404))
    async with running(pool("P"), sender=sender, brokers=Scripted(q=queue)) as rig:
        rig.letters.takes = 15
        queue.hand_over(handed(body("a"), "old", "1", lease=30))
        await asyncio.sleep(5)
        queue.hand_over(handed(body("a"), "new", "1", lease=30))
        await asyncio.sleep(20)

        assert queue.extended == []
        assert [handle for _, handle in queue.acked] == ["old", "new"]
        assert len(rig.letters.letters) == 1


@pytest.mark.rule("BRK-5")
@pytest.mark.parametrize("is_last", [False, True])
async def test_a_lease_that_ends_now_has_ended(is_last: bool) -> None:
    queue = ScriptedQueue(lease_seconds=30, unsettled={"b": lost("b"), "c": not_now("c")})
    sender = FakeSender(takes=20)
    async with running(pool("P"), sender=sender, brokers=Scripted(q=queue)) as rig:
        first, second, third = grouped(*"abc")
        queue.hand_over(
            handed(first, "a", "a", lease=30),
            handed(second, "b", "b", lease=30),
            replace(handed(third, "c", "c", lease=20), is_last=is_last),
        )
        await asyncio.sleep(25)

        assert sender.ids == ["a"]
        assert queue.nacked == []  # another router may have both by now
        assert rig.letters.letters == []
        assert rig.manager.registry.ledger.ended[Fate.FORFEITED] == 2


@pytest.mark.rule("BRK-5")
async def test_what_fails_at_the_very_end_of_its_lease_is_not_returned() -> None:
    queue = ScriptedQueue(lease_seconds=30, unsettled={"h": not_now("h")})
    sender = FakeSender(takes=15)
    sender.script("a", DEFER)
    async with running(pool("P"), sender=sender, brokers=Scripted(q=queue)) as rig:
        queue.hand_over(handed(body("a"), "h", "1", lease=15))
        await asyncio.sleep(20)

        assert queue.nacked == []
        assert rig.manager.registry.ledger.ended[Fate.FORFEITED] == 1


@pytest.mark.rule("CMD-9", "BRK-6")
async def test_a_lease_that_is_asked_for_between_two_connections_is_ours_until_it_ends() -> None:
    gone = Disconnected("gone")
    queue = ScriptedQueue(lease_seconds=30)
    async with running(pool("P"), sender=FakeSender(takes=60), brokers=Scripted(q=queue)) as rig:
        queue.hand_over(handed(body("a"), "h", "1", lease=30))
        await asyncio.sleep(1)
        (job,) = rig.manager.registry.tracker
        while_connected = await job.settler.extend(job)  # from 1 to 31
        queue.failing |= dict.fromkeys(["receive", "open"], gone)
        queue.hand_over(handed(b"ends the receive", "bad", "2", lease=30))
        await asyncio.sleep(29)
        before_its_end = await job.settler.extend(job)
        await asyncio.sleep(1)
        at_its_end = await job.settler.extend(job)

        assert queue.extended == [(1, "h")]
        assert (while_connected, before_its_end, at_its_end) == (True, True, False)


@pytest.mark.rule("ROUTE-5", "BRK-5")
async def test_only_what_waits_for_room_gets_the_longer_lease_in_one_call() -> None:
    traits = Traits(held_lease_seconds=300)
    queue = ScriptedQueue(lease_seconds=30, traits=traits)
    sender = FakeSender(takes=400)
    async with running(
        pool("P", 1, take_ahead=None), sender=sender, brokers=Scripted(q=queue)
    ) as rig:
        for each in "abcdefghi":
            content = body(each, poolCode="P", messageGroupId=each)
            queue.hand_over(handed(content, each, each, lease=30))
        await asyncio.sleep(399)

        extended = Counter(at for at, handle in queue.extended if str(handle) > "c")
        calls = [(at, count) for at, verb, count in queue.calls if verb == "extend"]
        assert rig.manager.consumers["q"].flow.waiting == 6  # a is being sent, b and c wait for it
        assert extended == {10: 6, 290: 6}
        assert calls[:3] == [(10, 3), (10, 6), (20, 3)]
        assert [at for at, count in calls if count == 6] == [10, 290]


@pytest.mark.rule("ROUTE-5", "BRK-5")
async def test_a_longer_lease_that_was_refused_is_lost_like_any_other() -> None:
    traits = Traits(held_lease_seconds=300)
    queue = ScriptedQueue(lease_seconds=30, traits=traits, unsettled={"i": lost("i")})
    sender = FakeSender(takes=20)
    async with running(
        pool("P", 1, take_ahead=None), sender=sender, brokers=Scripted(q=queue)
    ) as rig:
        for each in "abcdefghi":
            content = body(each, poolCode="P", messageGroupId=each)
            queue.hand_over(handed(content, each, each, lease=30))
        await asyncio.sleep(500)

        assert rig.sender.ids == list("abcdefgh")
        assert rig.manager.registry.ledger.ended[Fate.FORFEITED] == 1
