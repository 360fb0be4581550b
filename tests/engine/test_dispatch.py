"""What becomes of an arrival: new, handed over again, a copy, or too much for its pool."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec.structs import replace

from router.core.config import QueueConfig
from router.core.dead_letter import Reason
from router.core.history import Fate
from router.core.message import DEFAULT_POOL, ReceivedMessage, parse
from router.core.outcome import Reply
from router.core.returning import DEFAULT_DELAY_SECONDS, MIN_DEFERRAL_SECONDS
from router.core.warnings import Severity
from router.engine.settle import ACK_LINGER_SECONDS
from router.ports import Publication, Traits
from tests.support.fakes import REFUSED, FakeSender
from tests.support.faults import Scripted, ScriptedQueue, handed, lost
from tests.support.rig import FREE_QUEUE, QUEUE, Rig, body, ended, grouped, pool, running
from tests.support.virtual_time import VirtualTimeLoop

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def scripted(
    queue: ScriptedQueue, takes: float = 1.0, sender: FakeSender | None = None
) -> AsyncIterator[Rig]:
    sender = sender or FakeSender(takes=takes)
    async with running(pool("P"), sender=sender, brokers=Scripted(q=queue)) as rig:
        await asyncio.sleep(1)  # connected; stories begin at t = 1
        yield rig


def stand_still(seconds: float) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    loop.stand_still(seconds)


@pytest.mark.rule("ROUTE-1", "ROUTE-2", "P2", "BRK-3")
async def test_a_redelivered_message_is_not_sent_again_and_settled_by_its_newest_handle() -> None:
    queue = ScriptedQueue(lease_seconds=30)
    async with scripted(queue, takes=10) as rig:
        queue.hand_over(handed(body("a", poolCode="P"), "old", "1", lease=5))
        await asyncio.sleep(6)
        queue.hand_over(handed(body("a", poolCode="P"), "new", "1", lease=30))
        await asyncio.sleep(20)

        assert rig.sender.sent == [(1, "a")]
        assert queue.acked == [(11 + ACK_LINGER_SECONDS, "new")]
        assert (ended(rig)[Fate.DELIVERED], ended(rig)[Fate.SUPERSEDED]) == (1, 1)


@pytest.mark.rule("P1", "P5")
@pytest.mark.parametrize("lease", [30.0, None])
async def test_a_bug_met_while_routing_gives_one_message_back_and_strands_no_other(
    lease: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    queue = ScriptedQueue(lease_seconds=lease)
    unhashable: Any = ["no", "string"]  # what an adapter should never bring
    async with scripted(queue) as rig:
        queue.hand_over(
            handed(body("a"), "a", "1", lease=lease),
            handed(body("b"), "b", unhashable, lease=lease),
            handed(body("c"), "c", "3", lease=lease),
        )
        await asyncio.sleep(5)

        assert rig.sender.ids == ["a", "c"]
        assert [handle for _, handle in queue.acked] == ["a", "c"]
        assert queue.nacked == [(1, "b", DEFAULT_DELAY_SECONDS)]
        assert ended(rig)[Fate.RETURNED] == 1
        assert rig.codes == {"PROCESSING"}
    assert "unhashable" in caplog.text


@pytest.mark.rule("ROUTE-2")
async def test_twice_in_one_batch_is_once() -> None:
    queue = ScriptedQueue(lease_seconds=30)
    async with scripted(queue) as rig:
        queue.hand_over(
            handed(body("a"), "old", "1", lease=30), handed(body("a"), "new", "1", lease=30)
        )
        await asyncio.sleep(5)

        assert rig.sender.ids == ["a"]
        assert [handle for _, handle in queue.acked] == ["new"]


@pytest.mark.rule("ROUTE-1", "ROUTE-2")
async def test_where_the_broker_has_no_id_the_message_is_known_by_its_own() -> None:
    queue = ScriptedQueue(lease_seconds=30)
    async with scripted(queue, takes=5) as rig:
        queue.hand_over(handed(body("a"), "old", None, lease=30))
        await asyncio.sleep(1)
        queue.hand_over(handed(body("a"), "new", None, lease=30))
        await asyncio.sleep(10)

        assert rig.sender.ids == ["a"]
        assert [handle for _, handle in queue.acked] == ["new"]


@pytest.mark.rule("ROUTE-2")
async def test_a_copy_on_a_connection_whose_old_handle_lives_is_acknowledged_away() -> None:
    queue = ScriptedQueue(lease_seconds=None)
    async with scripted(queue, takes=5) as rig:
        queue.hand_over(handed(body("a"), "first", "1"))
        await asyncio.sleep(1)
        queue.hand_over(handed(body("a"), "copy", "1"))
        await asyncio.sleep(10)

        assert rig.sender.ids == ["a"]
        assert queue.acked == [(2 + ACK_LINGER_SECONDS, "copy"), (6 + ACK_LINGER_SECONDS, "first")]


@pytest.mark.rule("ROUTE-2")
async def test_an_arrival_waits_for_the_ack_under_way_and_is_acknowledged_too() -> None:
    queue = ScriptedQueue(lease_seconds=30, takes={"ack": 4})
    async with scripted(queue) as rig:
        queue.hand_over(handed(body("a"), "old", "1", lease=30))
        await asyncio.sleep(2)
        queue.hand_over(handed(body("a"), "new", "1", lease=30))
        await asyncio.sleep(20)

        assert rig.sender.ids == ["a"]
        assert [handle for _, handle in queue.acked] == ["old", "new"]


@pytest.mark.rule("ROUTE-2")
async def test_an_arrival_waits_for_the_nack_under_way_and_is_routed_as_new() -> None:
    queue = ScriptedQueue(lease_seconds=30, takes={"nack": 4})
    sender = FakeSender(takes=1)
    sender.script("a", Reply(200, b'{"ack": false}'))
    async with scripted(queue, sender=sender) as rig:
        queue.hand_over(handed(body("a"), "old", "1", lease=30))
        await asyncio.sleep(2)
        queue.hand_over(handed(body("a"), "new", "1", lease=30))
        await asyncio.sleep(20)

        assert rig.sender.sent == [(1, "a"), (6, "a")]
        assert queue.nacked == [(6, "old", 30)]
        assert queue.acked == [(7 + ACK_LINGER_SECONDS, "new")]


@pytest.mark.rule("ROUTE-2", "ROUTE-5")
async def test_a_waiting_arrival_that_finds_no_room_is_returned() -> None:
    queue = ScriptedQueue(lease_seconds=300, takes={"nack": 4}, traits=Traits(defers=True))
    sender = FakeSender(takes=1000, takes_for={"a": 3})
    sender.script("a", Reply(200, b'{"ack": false}'))
    async with running(pool("P", 10), sender=sender, brokers=Scripted(q=queue)) as rig:
        queue.hand_over(handed(body("a", poolCode="P"), "old", "1", lease=300))
        await asyncio.sleep(4)
        queue.hand_over(
            handed(body("a", poolCode="P"), "new", "1", lease=300),
            *(handed(each, n, f"b{n}", lease=300) for n, each in enumerate(many(100))),
        )
        await asyncio.sleep(1)
        await rig.apply(pool("P", 1))
        await asyncio.sleep(10)

        assert "QUEUE_FULL" in rig.codes
        assert queue.nacked == [(7, "old", 30), (11, "new", MIN_DEFERRAL_SECONDS)]


@pytest.mark.rule("ROUTE-3")
async def test_a_requeued_copy_is_acknowledged_away_and_the_first_is_untouched() -> None:
    queue = ScriptedQueue(lease_seconds=30)
    async with scripted(queue, takes=5) as rig:
        queue.hand_over(handed(body("a"), "first", "1", lease=30))
        await asyncio.sleep(1)
        queue.hand_over(handed(body("a"), "copy", "2", lease=30))
        await asyncio.sleep(10)

        assert rig.sender.ids == ["a"]
        assert [handle for _, handle in queue.acked] == ["copy", "first"]


@pytest.mark.rule("ROUTE-3")
async def test_a_copy_inside_one_batch_is_acknowledged_away() -> None:
    queue = ScriptedQueue(lease_seconds=30)
    async with scripted(queue, takes=5) as rig:
        same = body("a", poolCode="P")
        queue.hand_over(
            handed(same, "first", "1", lease=30),
            handed(bytes(bytearray(same)), "copy", "2", lease=30),
        )
        await asyncio.sleep(10)

        assert rig.sender.sent == [(1, "a")]
        assert queue.acked == [(1 + ACK_LINGER_SECONDS, "copy"), (6 + ACK_LINGER_SECONDS, "first")]
        assert (ended(rig)[Fate.DELIVERED], ended(rig)[Fate.SUPERSEDED]) == (1, 1)


@pytest.mark.rule("ROUTE-3")
async def test_a_copy_inside_one_batch_of_the_memory_broker_ends_with_the_first() -> None:
    async with running(queues=()) as rig:
        same = body("a", poolCode="P")
        async with rig.brokers.open_publisher(QUEUE) as publisher:
            await publisher.publish(
                [Publication(message=parse(same), body=same, dedup_key=key) for key in ("1", "2")]
            )
        await rig.apply(pool("P"))
        await asyncio.sleep(10)

        assert rig.sender.sent == [(0, "a")]
        assert sorted(rig.witness.acks) == [
            (1 + ACK_LINGER_SECONDS, "a"),
            (1 + 2 * ACK_LINGER_SECONDS, "a"),
        ]
        assert rig.manager.consumers["q"].counts.calls["receive", "ok"] == 1
        assert (ended(rig)[Fate.DELIVERED], ended(rig)[Fate.SUPERSEDED]) == (1, 1)


@pytest.mark.rule("ROUTE-3")
async def test_a_requeued_copy_waits_for_the_ack_under_way_and_is_acknowledged_too() -> None:
    queue = ScriptedQueue(lease_seconds=30, takes={"ack": 4})
    async with scripted(queue) as rig:
        queue.hand_over(handed(body("a"), "first", "1", lease=30))
        await asyncio.sleep(2)
        queue.hand_over(handed(body("a"), "copy", "2", lease=30))
        await asyncio.sleep(20)

        assert rig.sender.ids == ["a"]
        assert [handle for _, handle in queue.acked] == ["first", "copy"]


@pytest.mark.rule("ROUTE-3", "WQ-1", "ID-3")
async def test_a_copy_of_a_message_that_dies_meanwhile_is_delivered_on_its_own() -> None:
    queue = ScriptedQueue(lease_seconds=30, takes={"ack failed": 4})
    sender = FakeSender(takes=1)
    sender.script("a", Reply(404))
    async with scripted(queue, sender=sender) as rig:
        queue.hand_over(handed(body("a"), "first", "1", lease=30))
        await asyncio.sleep(2)
        queue.hand_over(handed(body("a"), "sent again", "2", lease=30))
        await asyncio.sleep(20)

        assert rig.sender.sent == [(1, "a"), (6 + ACK_LINGER_SECONDS, "a")]
        assert [handle for _, handle in queue.acked] == ["first", "sent again"]


@pytest.mark.rule("ROUTE-3", "ID-3")
async def test_where_the_broker_has_no_id_nothing_proves_that_what_comes_again_has_died() -> None:
    queue = ScriptedQueue(lease_seconds=30, takes={"ack failed": 4})
    sender = FakeSender(takes=1)
    sender.script("a", Reply(404))
    async with scripted(queue, sender=sender) as rig:
        queue.hand_over(handed(body("a"), "first", None, lease=30))
        await asyncio.sleep(2)
        queue.hand_over(handed(body("a"), "sent again", None, lease=30))
        await asyncio.sleep(20)

        assert rig.sender.ids == ["a", "a"]
        assert ended(rig) == {Fate.DEAD_LETTERED: 1, Fate.DELIVERED: 1}


@pytest.mark.rule("ROUTE-3", "P1", "ID-3")
async def test_a_copy_of_a_message_whose_lease_has_ended_is_delivered_if_that_one_is_not() -> None:
    queue = ScriptedQueue(lease_seconds=30, unsettled={"first": lost("first")})
    sender = FakeSender(takes=10)
    sender.script("a", Reply(200, b'{"ack": false}'))
    async with scripted(queue, sender=sender) as rig:
        queue.hand_over(handed(body("a"), "first", "1", lease=5))
        await asyncio.sleep(6)  # another router may have it by now, and hold a copy
        queue.hand_over(handed(body("a"), "copy", "2", lease=30))
        await asyncio.sleep(40)

        assert rig.sender.sent == [(1, "a"), (11, "a")]
        assert queue.acked == [(21 + ACK_LINGER_SECONDS, "copy")]
        assert (ended(rig)[Fate.DELIVERED], ended(rig)[Fate.FORFEITED]) == (1, 1)


@pytest.mark.rule("ROUTE-3", "P4")
async def test_of_the_copies_that_wait_only_those_with_a_lease_are_kept() -> None:
    queue = ScriptedQueue(lease_seconds=30, unsettled={"first": lost("first")})
    async with scripted(queue, takes=60) as rig:
        queue.hand_over(handed(body("a"), "first", "1", lease=5))
        await asyncio.sleep(6)
        queue.hand_over(handed(body("a"), "copy", "2", lease=20))
        await asyncio.sleep(1)
        queue.hand_over(handed(body("a"), "further", "3", lease=20))  # of which one is held
        await asyncio.sleep(20)
        queue.hand_over(handed(body("a"), "again", "2", lease=20))
        await asyncio.sleep(1)

        assert rig.manager.registry.held == 2
        assert [handle for _, handle in queue.acked] == ["further"]
        assert (ended(rig)[Fate.SUPERSEDED], ended(rig)[Fate.FORFEITED]) == (1, 1)


@pytest.mark.rule("ROUTE-3", "P1", "BRK-3")
async def test_a_copy_whose_lease_has_ended_is_no_longer_acknowledged() -> None:
    queue = ScriptedQueue(lease_seconds=300)
    async with scripted(queue, takes=5) as rig:
        queue.hand_over(
            handed(body("a"), "first", "1", lease=300), handed(body("a"), "copy", "2", lease=30)
        )
        await asyncio.sleep(ACK_LINGER_SECONDS / 2)  # the ACK of the copy is not sent yet
        stand_still(31)
        await asyncio.sleep(20)

        assert rig.sender.ids == ["a"]
        assert [handle for _, handle in queue.acked] == ["first"]
        assert (ended(rig)[Fate.DELIVERED], ended(rig)[Fate.SUPERSEDED]) == (1, 1)


@pytest.mark.rule("ROUTE-3", "P1", "BRK-3")
async def test_where_handles_have_no_lease_a_copy_waits_unless_its_own_connection_holds_one() -> (
    None
):
    queue, other = ScriptedQueue(lease_seconds=None), ScriptedQueue(lease_seconds=None)
    async with running(
        pool("P"),
        sender=FakeSender(takes=5),
        brokers=Scripted(q=queue, r=other),
        queues=(QUEUE, replace(QUEUE, name="r")),  # the same queue, over another connection
    ) as rig:
        queue.hand_over(handed(body("a"), "first", "1"))
        await asyncio.sleep(1)
        queue.hand_over(handed(body("a"), "on the same", "2"))
        other.hand_over(handed(body("a"), "on another", "3"))
        await asyncio.sleep(1)
        other.hand_over(handed(body("a"), "further", "4"))
        await asyncio.sleep(10)

        assert rig.sender.ids == ["a"]
        assert queue.acked == [
            (1 + ACK_LINGER_SECONDS, "on the same"),
            (5 + ACK_LINGER_SECONDS, "first"),
        ]
        assert other.acked == [
            (2 + ACK_LINGER_SECONDS, "further"),
            (5 + 2 * ACK_LINGER_SECONDS, "on another"),
        ]


@pytest.mark.rule("ROUTE-2", "ID-3")
async def test_a_redelivery_of_a_message_that_dies_meanwhile_is_acknowledged_as_dead() -> None:
    queue = ScriptedQueue(lease_seconds=30, takes={"ack failed": 4})
    sender = FakeSender(takes=1)
    sender.script("a", Reply(404))
    async with scripted(queue, sender=sender) as rig:
        queue.hand_over(handed(body("a"), "old", "1", lease=30))
        await asyncio.sleep(2)
        queue.hand_over(handed(body("a"), "new", "1", lease=30))
        await asyncio.sleep(20)

        assert rig.sender.ids == ["a"]
        assert [verb for _, verb, _ in queue.calls if "ack" in verb] == ["ack failed"] * 2


@pytest.mark.rule("ROUTE-2", "BRK-3")
async def test_a_copy_on_another_connection_waits_while_the_old_handle_lives() -> None:
    queue, other = ScriptedQueue(lease_seconds=None), ScriptedQueue(lease_seconds=None)
    async with running(
        pool("P"),
        sender=FakeSender(takes=5),
        brokers=Scripted(q=queue, r=other),
        queues=(QUEUE, replace(QUEUE, name="r")),  # the same queue, over another connection
    ) as rig:
        queue.hand_over(handed(body("a"), "first"))
        await asyncio.sleep(1)
        other.hand_over(handed(body("a"), "copy"))
        await asyncio.sleep(10)

        assert rig.sender.ids == ["a"]
        assert queue.acked == [(5 + ACK_LINGER_SECONDS, "first")]
        assert other.acked == [(5 + 2 * ACK_LINGER_SECONDS, "copy")]


@pytest.mark.rule("ROUTE-3")
async def test_the_same_id_for_another_target_is_another_message() -> None:
    queue = ScriptedQueue(lease_seconds=30)
    async with scripted(queue) as rig:
        for handle, (host, broker_id) in enumerate(
            [("a", "1"), ("b", "2"), ("c", None), ("d", None)]
        ):
            message = body("x", mediationTarget=f"http://{host}.test/", dispatchMode="IMMEDIATE")
            queue.hand_over(handed(message, handle, broker_id, lease=30))
        await asyncio.sleep(5)

        assert rig.sender.ids == ["x"] * 4
        assert {handle for _, handle in queue.acked} == {0, 1, 2, 3}


@pytest.mark.rule("ROUTE-3", "ID-2")
async def test_the_same_id_and_target_with_another_token_is_another_message() -> None:
    queue = ScriptedQueue(lease_seconds=30)
    async with scripted(queue, takes=5) as rig:
        for handle, token in enumerate(["expired", "fresh"]):
            message = body("x", authToken=token, dispatchMode="IMMEDIATE")
            queue.hand_over(handed(message, handle, str(handle), lease=30))
        await asyncio.sleep(10)

        assert rig.sender.ids == ["x", "x"]
        assert {handle for _, handle in queue.acked} == {0, 1}


@pytest.mark.rule("ID-1", "ID-3")
async def test_an_id_chosen_by_a_publisher_makes_no_message_a_copy_of_another() -> None:
    queue = ScriptedQueue(lease_seconds=None)
    async with scripted(queue, takes=5) as rig:
        for handle, what in enumerate(["created", "paid"]):
            message = body(f"order-7-{what}", dispatchMode="IMMEDIATE")
            queue.hand_over(ReceivedMessage(message, handle, None, claimed_id="order-7"))
        await asyncio.sleep(10)

        assert rig.sender.ids == ["order-7-created", "order-7-paid"]
        assert {handle for _, handle in queue.acked} == {0, 1}


@pytest.mark.rule("CMD-7", "BRK-2")
async def test_what_the_adapter_can_make_no_message_of_is_a_dead_letter_with_its_reason() -> None:
    """Even if the body would be one."""
    queue = ScriptedQueue(lease_seconds=30)
    async with scripted(queue) as rig:
        received = replace(handed(body("x"), "h", "1", lease=30), flaw="there is no route")
        queue.hand_over(received)
        await asyncio.sleep(10)

        (letter,) = rig.letters.letters
        assert (letter.reason, letter.error) == (Reason.MALFORMED, "there is no route")
        assert rig.sender.ids == []
        assert [handle for _, handle in queue.acked] == ["h"]


@pytest.mark.rule("ID-2", "OPS-6")
async def test_a_message_whose_broker_reused_its_id_is_forfeited_and_the_new_one_delivered() -> (
    None
):
    queue = ScriptedQueue(lease_seconds=30)
    async with scripted(queue, takes=5) as rig:
        queue.hand_over(handed(body("old"), "old", "1", lease=30))
        await asyncio.sleep(1)
        queue.hand_over(handed(body("new"), "new", "1", lease=30))
        await asyncio.sleep(20)

        assert rig.sender.ids == ["old", "new"]
        assert [handle for _, handle in queue.acked] == ["new"]
        ended = {fate: n for fate, n in rig.manager.registry.ledger.ended.items() if n}
        assert ended == {Fate.FORFEITED: 1, Fate.DELIVERED: 1}


@pytest.mark.rule("ROUTE-4")
async def test_a_message_for_an_unknown_pool_goes_to_the_default_pool_with_a_warning() -> None:
    async with running(pool("P")) as rig:
        await rig.publish(body("a", poolCode="X"))
        await asyncio.sleep(5)

        assert rig.sender.ids == ["a"]
        assert rig.pool(DEFAULT_POOL).config.concurrency == 20
        assert [(w.code, w.severity) for w in rig.warnings] == [("ROUTING", Severity.WARN)]


@pytest.mark.rule("ROUTE-4")
async def test_messages_for_unknown_pools_are_counted_by_queue() -> None:
    async with running(pool("P")) as rig:
        await rig.publish(
            *(body(f"x{n}", poolCode=f"made-up-{n}") for n in range(3)),
            body("a", poolCode="P"),
            body("b"),
        )
        await asyncio.sleep(5)

        assert rig.manager.pools.unknown == {"q": 3}


@pytest.mark.rule("BRK-2")
async def test_messages_with_unknown_fields_are_delivered_and_counted_by_queue() -> None:
    async with running(pool("P")) as rig:
        await rig.publish(
            body("a", colour="red", size=1), body("b", then=None), body("c", poolcode="X")
        )
        await asyncio.sleep(5)

        assert rig.sender.ids == ["a", "b", "c"]
        assert rig.manager.dispatcher.unknown_fields == {"q": 2}
        assert rig.warnings == []


@pytest.mark.rule("ROUTE-4", "ROUTE-5")
async def test_a_message_for_an_unknown_pool_that_has_to_wait_for_room_is_counted_once() -> None:
    traits = Traits(ordered_here=True)
    queue = ScriptedQueue(holds_groups=False, traits=traits)
    async with scripted(queue, takes=5) as rig:
        queue.hand_over(
            *(handed(body(f"x{n}", poolCode="X", messageGroupId=f"g{n}"), n) for n in range(450))
        )
        await asyncio.sleep(300)

        assert len(rig.sender.sent) == 450
        assert rig.manager.pools.unknown == {"q": 450}


@pytest.mark.rule("ROUTE-4")
@pytest.mark.parametrize("code", [None, "", "  ", DEFAULT_POOL])
async def test_a_message_without_a_pool_goes_to_the_default_pool(code: str | None) -> None:
    async with running(pool("P")) as rig:
        await rig.publish(body("a", poolCode=code))
        await asyncio.sleep(5)

        assert rig.pool(DEFAULT_POOL).runner.last_start == 0
        assert rig.warnings == []


def many(count: int, code: str = "P", group: str | None = None) -> list[bytes]:
    return [
        body(f"{code}{n}", poolCode=code, messageGroupId=group or f"g{n}") for n in range(count)
    ]


@pytest.mark.rule("ROUTE-5", "BRK-4", "P5")
async def test_one_full_pool_does_not_stop_the_other_on_the_same_queue() -> None:
    sender = FakeSender(takes=1, takes_for={f"P{n}": 10_000 for n in range(100)})
    async with running(pool("P", 1), pool("Q", 1), sender=sender) as rig:
        await rig.publish(*many(100))
        await asyncio.sleep(10)
        await rig.publish(*many(20, "Q"))
        await asyncio.sleep(60)

        assert sum(each.startswith("Q") for each in rig.sender.ids) == 20
        assert rig.witness.nacks == []
        assert rig.warnings == []


@pytest.mark.rule("ROUTE-5", "P4", "BRK-1")
async def test_a_queue_whose_only_pool_is_full_is_not_asked_at_all() -> None:
    sender = FakeSender(takes=10_000)
    async with running(pool("P", 1), sender=sender) as rig:
        await rig.publish(*many(10_000))
        await asyncio.sleep(600)

        assert rig.witness.nacks == []
        assert len(rig.manager.registry.tracker) <= 50 + 1
        assert rig.manager.registry.ledger.received <= 50 + 1


@pytest.mark.rule("ROUTE-5", "ROUTE-6", "P3")
@pytest.mark.parametrize("queue", [QUEUE, FREE_QUEUE])
async def test_group_order_holds_although_a_pool_is_full_again_and_again(
    queue: QueueConfig,
) -> None:
    sender = FakeSender(takes=0.5)
    async with running(pool("P", 2), pool("Q", 1), sender=sender, queues=(queue,)) as rig:
        first, second = many(150, group="g"), many(150, "Q", group="g")
        await rig.publish(
            *(each for both in zip(first, second, strict=True) for each in both), queue=queue
        )
        await asyncio.sleep(600)

        for code in "PQ":
            mine = [each for each in sender.ids if each.startswith(code)]
            assert mine == [f"{code}{n}" for n in range(150)]


@pytest.mark.rule("ROUTE-5")
async def test_without_a_group_lock_in_the_broker_what_does_not_fit_waits_in_the_consumer() -> None:
    queue = ScriptedQueue(holds_groups=False, lease_seconds=30)
    sender = FakeSender(takes=5)
    async with running(pool("P", 1), pool("Q"), sender=sender, brokers=Scripted(q=queue)) as rig:
        queue.hand_over(
            *(handed(each, n, str(n), lease=30) for n, each in enumerate(many(50, group="g")))
        )
        await asyncio.sleep(1)
        queue.hand_over(
            *(
                handed(body(f"x{n}", poolCode="P", messageGroupId="g"), f"x{n}", f"x{n}", lease=30)
                for n in range(10)
            )
        )
        await asyncio.sleep(2)
        asked = len(queue.limits)
        waiting = len(rig.manager.registry.tracker)
        await asyncio.sleep(4)
        asked_meanwhile = len(queue.limits) - asked
        await asyncio.sleep(600)

        assert (waiting, asked_meanwhile) == (60, 0)
        assert queue.nacked == []
        assert sender.ids == [f"P{n}" for n in range(50)] + [f"x{n}" for n in range(10)]


@pytest.mark.rule("ROUTE-5", "OPS-4")
async def test_what_waits_in_the_consumer_is_returned_in_order_when_it_stops() -> None:
    queue = ScriptedQueue(holds_groups=False, lease_seconds=30)
    async with running(
        pool("P", 1), pool("Q"), sender=FakeSender(takes=50), brokers=Scripted(q=queue)
    ) as rig:
        queue.hand_over(
            *(handed(each, n, str(n), lease=30) for n, each in enumerate(many(50, group="g")))
        )
        await asyncio.sleep(1)
        queue.hand_over(
            *(
                handed(body(f"x{n}", poolCode="P", messageGroupId="g"), f"x{n}", f"x{n}", lease=30)
                for n in range(3)
            )
        )
        await asyncio.sleep(2)
        await rig.apply(pool("P", 1), pool("Q"), queues=())
        await asyncio.sleep(1)

        assert queue.nacked == [(3, "x1", 0), (3, "x2", 0)]


@pytest.mark.rule("ROUTE-6", "FIFO-1")
async def test_the_runs_of_a_batch_are_failed_apart() -> None:
    sender = FakeSender(takes=1)
    sender.script("a1", *[REFUSED] * 3)
    async with running(pool("P"), pool("Q"), sender=sender) as rig:
        await rig.publish(
            *grouped("a1", "a2", group="a"),
            *grouped("b1", "b2", group="b"),
            *grouped("c1", "c2", group="a", poolCode="Q"),
        )
        await asyncio.sleep(10)

        assert {"b1", "b2", "c1", "c2"} < set(sender.ids)
        assert "a2" not in sender.ids
        assert [each for _, each, _ in rig.witness.nacks] == ["a1", "a2"]


@pytest.mark.rule("POOL-7")
async def test_oddities_in_a_message_are_warned_of_and_ignored() -> None:
    async with running(pool("P")) as rig:
        await rig.publish(body("a", dispatchMode="SOMEHOW"), body("b", replyTo="there"))
        await asyncio.sleep(5)

        assert sorted(rig.sender.ids) == ["a", "b"]
        assert [w.code for w in rig.warnings] == ["CONFIGURATION"] * 2


@pytest.mark.rule("ROUTE-2")
async def test_a_true_copy_without_an_id_of_the_broker_is_acknowledged_away() -> None:
    queue = ScriptedQueue(lease_seconds=None)
    async with scripted(queue, takes=5) as rig:
        queue.hand_over(handed(body("a"), "first"), handed(body("a"), "copy"))
        await asyncio.sleep(10)

        assert rig.sender.ids == ["a"]
        assert [handle for _, handle in queue.acked] == ["copy", "first"]
