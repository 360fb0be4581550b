"""A failure holds back what its batch brought behind it in its group (FIFO-1)."""

import asyncio
import sys

import pytest
from msgspec.structs import replace

from router.core.config import QueueConfig, RetryPolicy
from router.core.outcome import Answer, Cause, NoReply, Reply
from router.ports import Traits
from tests.support.fakes import REFUSED, FakeSender
from tests.support.faults import Scripted, ScriptedQueue, handed
from tests.support.rig import FREE_QUEUE, QUEUE, body, grouped, pool, running

pytestmark = pytest.mark.anyio

DEFERRED = Reply(200, b'{"ack": false, "delaySeconds": 45}')
SOON = Reply(200, b'{"ack": false, "delaySeconds": 4}')
RATE_LIMITED = Reply(429, retry_after="45")


def failing(*answers: Answer) -> FakeSender:
    """A sender whose first message, `a`, meets these answers; each POST takes a second."""
    sender = FakeSender(takes=1)
    sender.script("a", *answers)
    return sender


@pytest.mark.parametrize(
    ("answers", "ends_at", "delay"),
    [
        ([DEFERRED], 1, 45),
        ([Reply(200, b'{"ack": false}')], 1, 30),
        ([RATE_LIMITED], 1, 45),
        ([Reply(302)], 1, 30),
        ([Reply(503)] * 3, 6, 30),
        ([REFUSED] * 3, 6, 30),
        ([NoReply(Cause.TIMEOUT)] * 3, 6, 30),
    ],
)
@pytest.mark.rule("BRK-4", "P3")
async def test_the_rest_goes_back_unsent_after_the_head_for_as_long_as_the_head(
    answers: list[Answer], ends_at: float, delay: float
) -> None:
    async with running(pool(), sender=failing(*answers), queues=[FREE_QUEUE]) as rig:
        await rig.publish(*grouped("a", "b", "c"), queue=FREE_QUEUE)
        await asyncio.sleep(120)

        assert rig.witness.nacks == [(ends_at, each, delay) for each in "abc"]
        back = ends_at + (47.25 if answers == [RATE_LIMITED] else delay)  # its silence (GATE-1)
        assert rig.sender.sent[-3:] == [(back, "a"), (back + 1, "b"), (back + 2, "c")]
        assert rig.sender.most_in_group == 1


@pytest.mark.rule("FIFO-1")
@pytest.mark.parametrize(("answer", "head", "mates"), [(DEFERRED, 45, 10), (SOON, 4, 4)])
async def test_where_the_broker_holds_the_group_back_the_rest_is_ready_for_the_head(
    answer: Reply, head: float, mates: float
) -> None:
    async with running(pool(), sender=failing(answer)) as rig:
        await rig.publish(*grouped("a", "b", "c"))
        await asyncio.sleep(120)

        assert rig.witness.nacks == [(1, "a", head), (1, "b", mates), (1, "c", mates)]
        assert rig.sender.sent[1:] == [(1 + head, "a"), (2 + head, "b"), (3 + head, "c")]


@pytest.mark.rule("P3", "BRK-4")
@pytest.mark.parametrize(("queue", "mates"), [(QUEUE, 10), (FREE_QUEUE, 45)])
async def test_a_failed_group_goes_back_in_one_call(queue: QueueConfig, mates: float) -> None:
    async with running(pool(), sender=failing(DEFERRED), queues=[queue]) as rig:
        rig.witness.nack_takes = 5
        await rig.publish(*grouped("a", "b", "c"), queue=queue)
        await asyncio.sleep(100)

        assert rig.witness.nacks == [(1, "a", 45), (1, "b", mates), (1, "c", mates)]
        assert rig.sender.sent == [(0, "a"), (51, "a"), (52, "b"), (53, "c")]


@pytest.mark.rule("MED-4")
@pytest.mark.parametrize(("queue", "mates"), [(QUEUE, 10), (FREE_QUEUE, 30)])
async def test_an_open_circuit_holds_the_group_back_too(queue: QueueConfig, mates: float) -> None:
    async with running(pool(), queues=[queue]) as rig:
        breaker = rig.breakers.of("http://target.test:80")
        for _ in range(10):
            ticket = breaker.enter(0.0)
            assert ticket is not None
            breaker.report(ticket, 0.0, ok=False)
        await rig.publish(*grouped("a", "b"), queue=queue)
        await asyncio.sleep(60)

        assert rig.witness.nacks == [(0, "a", 30), (0, "b", mates)]
        assert rig.sender.sent == [(30, "a"), (31, "b")]


@pytest.mark.rule("FIFO-1")
async def test_a_dead_letter_holds_nothing_back() -> None:
    async with running(pool(), sender=failing(Reply(404))) as rig:
        await rig.publish(*grouped("a", "b"))
        await asyncio.sleep(60)

        assert rig.sender.sent == [(0, "a"), (1, "b")]
        assert rig.witness.nacks == []
        assert [letter.message_id for letter in rig.letters.letters] == ["a"]


@pytest.mark.rule("DLQ-1")
async def test_a_dead_letter_that_cannot_be_kept_goes_back_and_the_rest_with_it() -> None:
    async with running(pool(), sender=failing(Reply(404)), queues=[FREE_QUEUE]) as rig:
        rig.letters.broken = True
        await rig.publish(*grouped("a", "b"), queue=FREE_QUEUE)
        await asyncio.sleep(60)

        assert rig.witness.nacks == [(1, "a", 30), (1, "b", 30)]
        assert rig.sender.sent == [(0, "a"), (31, "a"), (32, "b")]
        assert "DEAD_LETTER_STORE" in rig.codes


@pytest.mark.rule("P5")
async def test_other_groups_of_the_batch_go_on() -> None:
    async with running(pool(), sender=failing(DEFERRED)) as rig:
        await rig.publish(*grouped("a"), *grouped("x", "y", group="other"))
        await asyncio.sleep(30)

        assert rig.sender.sent == [(0, "a"), (0, "x"), (1, "y")]


@pytest.mark.rule("FIFO-1")
async def test_another_batch_of_the_group_is_not_held_back_where_no_order_is_promised() -> None:
    queue = ScriptedQueue(holds_groups=False, lease_seconds=60, traits=Traits())
    first, second, third = grouped("a", "b", "c")
    async with running(pool(), sender=failing(DEFERRED), brokers=Scripted(q=queue)) as rig:
        queue.hand_over(handed(first, 1, "1", lease=60), handed(second, 2, "2", lease=60))
        await asyncio.sleep(0.5)
        queue.hand_over(handed(third, 3, "3", lease=60))
        await asyncio.sleep(10)

        assert [handle for _, handle, _ in queue.nacked] == [1, 2]
        assert rig.sender.sent == [(0, "a"), (1, "c")]


@pytest.mark.rule("FIFO-1", "ROUTE-2")
async def test_what_comes_behind_a_redelivered_message_of_its_group_goes_back_with_it() -> None:
    queue = ScriptedQueue(lease_seconds=60)
    first, second = grouped("a", "b")
    (other,) = grouped("x", group="other")
    async with running(pool(), sender=failing(SOON), brokers=Scripted(q=queue)) as rig:
        queue.hand_over(handed(first, "old", "1", lease=60))
        await asyncio.sleep(0.5)  # its lease has ended at the broker
        queue.hand_over(
            handed(first, "new", "1", lease=60),
            handed(second, "b", "2", lease=60),
            handed(other, "x", "3", lease=60),
        )
        await asyncio.sleep(10)

        assert queue.nacked == [(1, "new", 4), (1, "b", 4)]
        assert rig.sender.sent == [(0, "a"), (0.5, "x")]


@pytest.mark.rule("FIFO-1", "ROUTE-2", "POOL-7")
async def test_a_redelivered_message_of_another_pool_parts_no_group() -> None:
    queue = ScriptedQueue(lease_seconds=60)
    first, second = grouped("a", "b")
    (other,) = grouped("x", poolCode="Q")
    sender = failing(SOON)
    sender.takes_for["x"] = 5.0
    async with running(pool("P"), pool("Q"), sender=sender, brokers=Scripted(q=queue)) as rig:
        queue.hand_over(handed(other, "old", "1", lease=60))
        await asyncio.sleep(0.5)
        queue.hand_over(
            handed(first, "a", "2", lease=60),
            handed(other, "new", "1", lease=60),
            handed(second, "b", "3", lease=60),
        )
        await asyncio.sleep(10)

        assert queue.nacked == [(1.5, "a", 4), (1.5, "b", 4)]
        assert rig.sender.sent == [(0, "x"), (0.5, "a")]


@pytest.mark.rule("POOL-7")
async def test_the_same_group_id_in_another_pool_is_another_group() -> None:
    async with running(pool("P"), pool("Q"), sender=failing(DEFERRED)) as rig:
        await rig.publish(*grouped("a"), *grouped("x", poolCode="Q"))
        await asyncio.sleep(30)

        assert rig.sender.sent == [(0, "a"), (0, "x")]
        assert [each for _, each, _ in rig.witness.nacks] == ["a"]


@pytest.mark.rule("FIFO-1")
async def test_high_priority_mates_go_back_with_the_rest_in_group_order() -> None:
    async with running(pool(), sender=failing(DEFERRED), queues=[FREE_QUEUE]) as rig:
        await rig.publish(*grouped("a", highPriority=True), *grouped("b"), queue=FREE_QUEUE)
        await rig.publish(*grouped("H", highPriority=True), queue=FREE_QUEUE)
        await asyncio.sleep(30)

        assert [each for _, each, _ in rig.witness.nacks] == ["a", "H", "b"]


@pytest.mark.rule("FIFO-1")
async def test_nothing_is_kept_of_a_batch_once_it_is_settled() -> None:
    async with running(pool(), sender=failing(DEFERRED)) as rig:
        await rig.publish(*grouped("a", "b"))
        await asyncio.sleep(0.5)
        (run,) = {job.failure_scope for job in rig.manager.registry.tracker}
        await asyncio.sleep(100)

        alone = object()
        known = [alone]  # as the consumer knows its latest receives
        assert sys.getrefcount(run) == sys.getrefcount(alone), known
        assert len(rig.pool().lanes) == 0


@pytest.mark.rule("WQ-5")
class TestRetryPolicy:
    async def test_the_pools_policy_wins_over_the_queues(self) -> None:
        queue = replace(QUEUE, retry=RetryPolicy(max_attempts=1, schedule=(500.0,)))
        policy = RetryPolicy(max_attempts=3, schedule=(5.0, 20.0))
        sender = failing(*[Reply(302)] * 5)
        async with running(pool(retry=policy), sender=sender, queues=[queue]) as rig:
            await rig.publish(*grouped("a", "b"))
            await asyncio.sleep(100)

            assert [at for at, each in rig.sender.sent if each == "a"] == [0, 6, 27]
            assert rig.sender.sent[-1] == (28, "b")
            assert [letter.reason.value for letter in rig.letters.letters] == ["RETRIES_EXHAUSTED"]
            assert rig.letters.letters[0].failures == 3

    async def test_the_queues_policy_holds_where_the_pool_has_none(self) -> None:
        queue = replace(QUEUE, retry=RetryPolicy(schedule=(5.0,)))
        async with running(pool(), sender=failing(Reply(302)), queues=[queue]) as rig:
            await rig.publish(*grouped("a"))
            await asyncio.sleep(100)

            assert rig.sender.sent == [(0, "a"), (6, "a")]

    async def test_three_tries_are_one_attempt(self) -> None:
        sender = failing(*[REFUSED] * 6)
        async with running(pool(retry=RetryPolicy(max_attempts=2)), sender=sender) as rig:
            await rig.publish(*grouped("a"))
            await asyncio.sleep(100)

            assert sender.attempts == [("a", n) for n in (1, 1, 1, 2, 2, 2)]
            assert sender.requests == [("a", n) for n in (1, 2, 3, 1, 2, 3)]
            assert [(each.failures, each.requests) for each in rig.letters.letters] == [(2, 6)]
            assert rig.witness.tallies["a"].failures == 1

    async def test_deferring_without_end_uses_up_no_attempt(self) -> None:
        sender = failing(*[SOON, RATE_LIMITED] * 10)
        async with running(pool(retry=RetryPolicy(max_attempts=1)), sender=sender) as rig:
            await rig.publish(*grouped("a"))
            await asyncio.sleep(2000)

            assert len(sender.sent) == 21
            assert rig.letters.letters == []

    async def test_a_bug_of_ours_uses_up_no_attempt(self) -> None:
        sender = FakeSender(takes=1)
        sender.script("a", RuntimeError("a bug"), RuntimeError("a bug"))
        async with running(pool(retry=RetryPolicy(max_attempts=1)), sender=sender) as rig:
            await rig.publish(*grouped("a"))
            await asyncio.sleep(200)

            assert [at for at, _ in sender.sent] == [0, 31, 62]
            assert rig.letters.letters == []


@pytest.mark.rule("ROUTE-5", "POOL-1")
async def test_what_does_not_fit_comes_after_what_did_in_its_group() -> None:
    sender = FakeSender(takes=1)
    async with running(pool(concurrency=1), sender=sender) as rig:
        ids = [f"{n:03}" for n in range(120)]
        await rig.publish(*(body(each, poolCode="P", messageGroupId="g") for each in ids))
        await asyncio.sleep(600)

        assert sender.ids == ids
