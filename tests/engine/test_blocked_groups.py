"""`onFailure: "block"`: a failed message waits in front of its group, in the router (ORD-1)."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import pytest
from msgspec.structs import replace

from router.brokers import BrokerRegistry
from router.core.config import OnFailure, Ordering, QueueConfig, RetryPolicy
from router.core.history import Fate, WaitReason
from router.core.message import UNTRIED
from router.core.outcome import Cause, Metric, NoReply, Reply
from router.core.returning import ReturnReason
from router.engine.delivery import nack_all
from router.engine.job import Return
from router.engine.pool import waits_in
from router.ports import Broker, Brokers, Nack, Unsettled
from tests.support.fakes import OK, FakeSender
from tests.support.passing import PassingBroker
from tests.support.rig import (
    FREE_QUEUE,
    QUEUE,
    WALL_AT_START,
    body,
    ended,
    grouped,
    pool,
    running,
)

pytestmark = pytest.mark.anyio

BLOCK = replace(FREE_QUEUE, ordering=Ordering.STRICT, on_failure=OnFailure.BLOCK)
SOON = Reply(200, b'{"ack": false, "delaySeconds": 4}')
LATER = Reply(200, b'{"ack": false, "delaySeconds": 45}')
SKIP = replace(BLOCK, on_failure=OnFailure.SKIP)
PARK = replace(BLOCK, on_failure=OnFailure.PARK)
NO_ADDRESS = NoReply(Cause.UNRESOLVED)  # nothing was sent


def failing(*answers: Reply | NoReply | Exception, message_id: str = "a") -> FakeSender:
    sender = FakeSender(takes=1)
    sender.script(message_id, *answers)
    return sender


def other_target(message_id: str, **fields: object) -> bytes:
    return body(message_id, poolCode="P", mediationTarget="http://other.test/", **fields)


@pytest.mark.rule("ORD-1", "P3")
async def test_a_failed_message_is_tried_again_before_all_that_came_behind_it() -> None:
    async with running(pool(), sender=failing(LATER, SOON), queues=[BLOCK]) as rig:
        await rig.publish(*grouped("a", "b"), queue=BLOCK)
        await asyncio.sleep(10)
        await rig.publish(*grouped("c"), queue=BLOCK)
        await asyncio.sleep(100)

        assert rig.sender.sent == [(0, "a"), (46, "a"), (51, "a"), (52, "b"), (53, "c")]
        assert rig.witness.nacks == []
        assert rig.sender.most_in_group == 1
        assert ended(rig) == {Fate.DELIVERED: 3}


@pytest.mark.rule("ORD-1", "P5")
async def test_other_groups_pass_a_blocked_one_and_its_worker_is_free() -> None:
    async with running(pool(concurrency=1), sender=failing(LATER), queues=[BLOCK]) as rig:
        await rig.publish(*grouped("a", "b"), *grouped("x", "y", group="h"), queue=BLOCK)
        await asyncio.sleep(20)

        assert rig.sender.sent == [(0, "a"), (1, "x"), (2, "y")]
        assert waits_in(rig.pool())[WaitReason.RETRY] == 1
        assert waits_in(rig.pool())[WaitReason.GROUP] == 1
        await asyncio.sleep(60)
        assert rig.sender.sent[3:] == [(46, "a"), (47, "b")]
        assert waits_in(rig.pool())[WaitReason.RETRY] == 0


@pytest.mark.rule("ORD-1", "SHARE-1")
async def test_a_blocked_group_gives_its_worker_to_another_target() -> None:
    async with running(pool(concurrency=1), sender=failing(LATER), queues=[BLOCK]) as rig:
        await rig.publish(*grouped("a", "b"), other_target("x"), other_target("y"), queue=BLOCK)
        await asyncio.sleep(100)

        assert rig.sender.sent == [(0, "a"), (1, "x"), (2, "y"), (46, "a"), (47, "b")]


@pytest.mark.rule("ORD-1")
async def test_a_failed_message_of_high_priority_stays_in_front() -> None:
    async with running(pool(), sender=failing(SOON), queues=[BLOCK]) as rig:
        await rig.publish(
            *grouped("a", highPriority=True), *grouped("b", highPriority=True), queue=BLOCK
        )
        await asyncio.sleep(60)

        assert rig.sender.sent == [(0, "a"), (5, "a"), (6, "b")]


@pytest.mark.rule("ORD-1", "WQ-5")
async def test_failures_are_counted_until_the_message_is_given_up_and_the_group_goes_on() -> None:
    policy = RetryPolicy(max_attempts=2, schedule=(10.0,))
    sender = failing(Reply(404), Reply(404), message_id="a")
    queue = replace(BLOCK, retry=replace(policy, statuses=frozenset({404})))
    async with running(pool(), sender=sender, queues=[queue]) as rig:
        await rig.publish(*grouped("a", "b"), queue=queue)
        await asyncio.sleep(60)

        assert rig.sender.sent == [(0, "a"), (11, "a"), (12, "b")]
        assert [(letter.message_id, letter.failures) for letter in rig.letters.letters] == [
            ("a", 2)
        ]
        told = rig.pool().deliveries.by_metric
        assert told == {Metric.SUCCESS: 1, Metric.TRANSIENT: 2, Metric.FAILURE: 0}
        assert rig.manager.consumers["q"].counts.by_metric == told


@pytest.mark.rule("ORD-1", "POOL-5")
async def test_a_message_that_meets_a_bug_stays_in_front_too() -> None:
    async with running(pool(), sender=failing(RuntimeError("bug")), queues=[BLOCK]) as rig:
        await rig.publish(*grouped("a", "b"), queue=BLOCK)
        await asyncio.sleep(60)

        assert rig.sender.sent == [(0, "a"), (31, "a"), (32, "b")]


@pytest.mark.rule("ORD-1", "CMD-5")
async def test_an_early_message_waits_in_its_place() -> None:
    at = datetime.fromtimestamp(WALL_AT_START + 20, UTC).isoformat()
    async with running(pool(), sender=FakeSender(takes=1), queues=[BLOCK]) as rig:
        await rig.publish(*grouped("a"), *grouped("b", notBefore=at), *grouped("c"), queue=BLOCK)
        await asyncio.sleep(60)

        assert rig.sender.sent == [(0, "a"), (20, "b"), (21, "c")]


@pytest.mark.rule("ORD-1", "CMD-5")
async def test_an_early_message_that_waited_long_enough_behind_others_waits_no_more() -> None:
    at = datetime.fromtimestamp(WALL_AT_START + 1, UTC).isoformat()
    async with running(pool(), sender=FakeSender(takes=3), queues=[BLOCK]) as rig:
        await rig.publish(*grouped("a"), *grouped("b", notBefore=at), queue=BLOCK)
        await asyncio.sleep(60)

        assert rig.sender.sent == [(0, "a"), (3, "b")]


@pytest.mark.rule("ORD-1", "POOL-7")
async def test_messages_without_order_block_nothing() -> None:
    async with running(pool(), sender=failing(SOON), queues=[BLOCK]) as rig:
        loose = grouped("a", dispatchMode="NEXT_ON_ERROR")
        await rig.publish(*loose, *grouped("b"), queue=BLOCK)
        await asyncio.sleep(60)

        assert rig.sender.sent == [(0, "a"), (1, "b"), (5, "a")]
        assert rig.witness.nacks == [(1, "a", 4)]


@pytest.mark.rule("ORD-1", "OPS-4")
async def test_a_stop_returns_a_blocked_group_in_order() -> None:
    async with running(pool(), sender=failing(LATER), queues=[BLOCK]) as rig:
        await rig.publish(*grouped("a", "b"), queue=BLOCK)
        await asyncio.sleep(10)
        rig.manager.stop()
        await asyncio.sleep(1)

        assert rig.witness.nacks == [(10, "a", 0), (10, "b", 0)]
        assert rig.is_empty
        assert rig.manager.draining_pools["P"].runner.pausing == 0


@pytest.mark.rule("ORD-10", "OPS-4")
@pytest.mark.parametrize("queue", [BLOCK, SKIP, PARK], ids=["block", "skip", "park"])
async def test_what_fails_while_its_queue_stops_goes_back_to_its_place(queue: QueueConfig) -> None:
    """Returned for later, a router that starts meanwhile would send the newer ones first."""
    sender = failing(NO_ADDRESS, NO_ADDRESS, NO_ADDRESS)
    async with running(pool(), sender=sender, queues=[queue]) as rig:
        await rig.publish(*grouped("a", "b"), queue=queue)
        await asyncio.sleep(0.5)
        rig.manager.stop()
        await asyncio.sleep(60)

        assert [(each, delay) for _, each, delay in rig.witness.nacks] == [("a", 0), ("b", 0)]


@pytest.mark.rule("ORD-1", "POOL-6")
async def test_what_a_removed_pool_fails_to_send_goes_back_to_its_place() -> None:
    async with running(pool(), sender=failing(LATER), queues=[BLOCK]) as rig:
        await rig.publish(*grouped("a", "b"), queue=BLOCK)
        await asyncio.sleep(0.5)
        await rig.apply(queues=[BLOCK])
        await asyncio.sleep(100)

        assert [each for _, each in rig.sender.sent] == ["a", "a", "b"]
        assert [(each, delay) for _, each, delay in rig.witness.nacks] == [("a", 0), ("b", 0)]


@pytest.mark.rule("ORD-1", "ROUTE-5")
async def test_a_pool_full_of_blocked_groups_holds_its_queue_up() -> None:
    sender = FakeSender(takes=1)
    ids = [f"{n:02}" for n in range(60)]
    for each in ids:
        sender.script(each, LATER)
    async with running(pool(concurrency=2), sender=sender, queues=[BLOCK]) as rig:
        await rig.publish(*[grouped(each, group=each)[0] for each in ids], queue=BLOCK)
        await asyncio.sleep(40)

        assert rig.pool().queued == rig.pool().capacity == 50
        assert len(rig.sender.sent) == 50
        assert rig.witness.nacks == []
        await asyncio.sleep(200)
        assert ended(rig) == {Fate.DELIVERED: 60}


@pytest.mark.rule("ORD-1", "BRK-5")
@pytest.mark.parametrize(("late", "taken"), [("a", ["a", "b"]), ("b", ["b"])])
async def test_what_waits_for_longer_than_its_broker_allows_goes_back(
    late: str, taken: list[str]
) -> None:
    async with running(pool(), sender=failing(LATER), queues=[BLOCK]) as rig:
        await rig.publish(*grouped("a", "b"), queue=BLOCK)
        await asyncio.sleep(10)
        jobs = {job.message.id: job for job in rig.manager.registry.tracker}
        jobs[late].hold_until = 5.0

        overdue = rig.pool().take_overdue(10.0)

        assert [job.message.id for job in overdue] == taken
        assert len(rig.pool().lanes) == 2 - len(taken)
        for job in overdue:
            job.settler.finish([job], Fate.RETURNED)
        await asyncio.sleep(60)


class ForgetsTallies(PassingBroker):
    """It keeps what failed only with a delay, as RabbitMQ does."""

    async def nack(self, items: Sequence[Nack]) -> Sequence[Unsettled]:
        kept = [each if each.delay else replace(each, tally=UNTRIED) for each in items]
        return await super().nack(kept)


class ForgetfulBrokers:
    def __init__(self, brokers: Brokers) -> None:
        self._brokers = brokers
        self.open_publisher = brokers.open_publisher

    @asynccontextmanager
    async def open_queue(self, queue: QueueConfig) -> AsyncIterator[Broker]:
        async with self._brokers.open_queue(queue) as broker:
            yield ForgetsTallies(broker)


@pytest.mark.rule("ORD-1", "WQ-5")
async def test_what_failed_is_known_when_a_blocked_message_went_back_meanwhile() -> None:
    policy = RetryPolicy(max_attempts=2, schedule=(30.0,), statuses=frozenset({404}))
    sender, queue = failing(Reply(404), Reply(404)), replace(BLOCK, retry=policy)
    async with (
        BrokerRegistry(worker_id="test", dedup_window=300) as registry,
        running(pool(), sender=sender, queues=[queue], brokers=ForgetfulBrokers(registry)) as rig,
    ):
        await rig.publish(*grouped("a", "b"), queue=queue)
        await asyncio.sleep(10)
        for job in rig.manager.registry.tracker:
            job.hold_until = 5.0
        overdue = rig.pool().take_overdue(10.0)
        await nack_all([Return(job, ReturnReason.OVERDUE) for job in overdue])
        await asyncio.sleep(60)

        assert rig.sender.ids == ["a", "a", "b"]
        assert [(each.message_id, each.failures) for each in rig.letters.letters] == [("a", 2)]


@pytest.mark.rule("ORD-1", "BRK-6")
async def test_a_blocked_group_whose_connection_was_lost_is_left_to_its_broker() -> None:
    async with running(pool(), sender=failing(SOON), queues=[BLOCK]) as rig:
        await rig.publish(*grouped("a", "b"), queue=BLOCK)
        await asyncio.sleep(3)
        for job in rig.manager.registry.tracker:
            job.lease_until = 2.0
        await asyncio.sleep(3)

        assert rig.sender.sent == [(0, "a")]
        assert ended(rig) == {Fate.FORFEITED: 2}


@pytest.mark.rule("ORD-1")
async def test_where_the_broker_holds_groups_it_does_so() -> None:
    queue = replace(QUEUE, ordering=Ordering.STRICT, on_failure=OnFailure.BLOCK)
    async with running(pool(), sender=failing(SOON), queues=[queue]) as rig:
        await rig.publish(*grouped("a", "b"))
        await asyncio.sleep(60)

        assert rig.witness.nacks == [(1, "a", 4), (1, "b", 4)]
        assert rig.sender.sent == [(0, "a"), (5, "a"), (6, "b")]


@pytest.mark.rule("ORD-1")
@pytest.mark.parametrize("queue", [QUEUE, FREE_QUEUE, SKIP], ids=["holds", "free", "strict"])
async def test_with_skip_the_others_of_the_group_go_on(queue: QueueConfig) -> None:
    skip = replace(queue, on_failure=OnFailure.SKIP)
    async with running(pool(), sender=failing(SOON, OK), queues=[skip]) as rig:
        await rig.publish(*grouped("a", "b"), queue=skip)
        await asyncio.sleep(60)

        assert rig.sender.sent == [(0, "a"), (1, "b"), (5, "a")]
        assert rig.witness.nacks == [(1, "a", 4)]


@pytest.mark.rule("ORD-1", "POOL-7")
@pytest.mark.parametrize("queue", [FREE_QUEUE, SKIP], ids=["free", "strict"])
async def test_a_message_may_ask_to_block_on_a_queue_that_skips(queue: QueueConfig) -> None:
    skip = replace(queue, on_failure=OnFailure.SKIP)
    async with running(pool(), sender=failing(SOON), queues=[skip]) as rig:
        first = grouped("a", dispatchMode="BLOCK_ON_ERROR")
        await rig.publish(*first, *grouped("b"), queue=skip)
        await asyncio.sleep(60)

        assert rig.sender.sent == [(0, "a"), (5, "a"), (6, "b")]


@pytest.mark.rule("ORD-1", "FIFO-1")
async def test_with_skip_nothing_passes_a_message_that_was_not_sent() -> None:
    async with running(pool(), sender=failing(*[NO_ADDRESS] * 3), queues=[SKIP]) as rig:
        await rig.publish(*grouped("a", "b"), queue=SKIP)
        await asyncio.sleep(20)
        await rig.publish(*grouped("c"), queue=SKIP)
        await asyncio.sleep(60)

        assert rig.sender.sent == [(0, "a"), (2, "a"), (5, "a"), (36, "a"), (37, "b"), (38, "c")]
        assert rig.witness.nacks == []


@pytest.mark.rule("ORD-1", "FIFO-1")
async def test_with_skip_what_was_not_sent_goes_back_with_its_group_where_brokers_hold_it() -> None:
    skip = replace(SKIP, uri=QUEUE.uri)
    async with running(pool(), sender=failing(*[NO_ADDRESS] * 3), queues=[skip]) as rig:
        await rig.publish(*grouped("a", "b"), queue=skip)
        await asyncio.sleep(60)

        assert rig.sender.sent == [(0, "a"), (2, "a"), (5, "a"), (36, "a"), (37, "b")]
        assert rig.witness.nacks == [(6, "a", 30), (6, "b", 10)]


@pytest.mark.rule("ORD-1", "GATE-1")
async def test_with_skip_nothing_passes_what_waits_for_a_silent_target() -> None:
    sender = failing(Reply(429, retry_after="45"), message_id="x")
    async with running(pool(), sender=sender, queues=[SKIP]) as rig:
        await rig.publish(*grouped("x", group="h"), queue=SKIP)
        await asyncio.sleep(2)
        await rig.publish(*grouped("a", "b"), queue=SKIP)
        await asyncio.sleep(38)
        await rig.publish(*grouped("c"), queue=SKIP)
        await asyncio.sleep(60)

        assert [name for _, name in rig.sender.sent if name != "x"] == ["a", "b", "c"]
        assert rig.witness.nacks == [(1, "x", 45)]


@pytest.mark.rule("ORD-1", "POOL-7")
async def test_with_skip_an_unsent_message_without_order_keeps_nothing_waiting() -> None:
    async with running(pool(), sender=failing(*[NO_ADDRESS] * 3), queues=[SKIP]) as rig:
        first = grouped("a", dispatchMode="IMMEDIATE")
        await rig.publish(*first, *grouped("b"), queue=SKIP)
        await asyncio.sleep(60)

        assert rig.sender.sent == [(0, "a"), (0, "b"), (2, "a"), (5, "a"), (36, "a")]


@pytest.mark.rule("ORD-1", "CMD-5")
async def test_with_skip_an_early_message_is_passed_when_it_is_its_turn() -> None:
    at = datetime.fromtimestamp(WALL_AT_START + 20, UTC).isoformat()
    async with running(pool(), sender=FakeSender(takes=1), queues=[SKIP]) as rig:
        await rig.publish(*grouped("a", notBefore=at), *grouped("b"), queue=SKIP)
        await asyncio.sleep(60)

        assert rig.sender.sent == [(0, "b"), (20, "a")]


@pytest.mark.rule("ORD-1", "BRK-5")
async def test_with_skip_a_lost_lease_takes_back_all_that_is_unsettled() -> None:
    async with running(pool(), sender=failing(*[NO_ADDRESS] * 3), queues=[SKIP]) as rig:
        await rig.publish(*grouped("a", "b"), queue=SKIP)
        await asyncio.sleep(10)
        for job in rig.manager.registry.tracker:
            job.lease_until = 9.0
        await asyncio.sleep(60)

        assert [name for at, name in rig.sender.sent if at > 10] == ["a", "b"]
