"""Identical messages: each queue delivers its own, and none ends before the one it is a copy of."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from router.brokers import BrokerRegistry
from router.core.history import Fate
from router.core.message import parse
from router.core.outcome import Answer, Cause, Ending, Failure, NoReply, Reply
from router.core.returning import NO_ROOM_DELAY_SECONDS
from router.engine.dispatch import MAX_FOLLOWERS
from router.engine.settle import ACK_LINGER_SECONDS
from router.ports import BatchRecord, MessageRecord, MessageStore, Publication, Task
from tests.support.fakes import FakeSender
from tests.support.faults import Scripted, ScriptedQueue, handed, lost
from tests.support.finishing import FinishingBrokers
from tests.support.rig import QUEUE, Rig, body, ended, pool, running

pytestmark = pytest.mark.anyio

OTHER = replace(QUEUE, name="r", uri="memory://r")
TAKES = 5.0  # of a delivery


def publication(message_id: str) -> Publication:
    content = body(message_id, poolCode="P")
    return Publication(parse(content), content)


@dataclass
class Stage:
    rig: Rig
    store: MessageStore

    async def open_batches(self, *names: str) -> None:
        """Each has the same one member, and a callback of its own."""
        for name in names:
            callback = publication(f"{name}-called")
            await self.store.open_batch(name, None, callback, [publication("m")])

    async def batch(self, name: str) -> BatchRecord:
        found = await self.store.find_batch(name)
        assert found is not None
        return found

    async def record(self) -> MessageRecord:
        found = await self.store.find("m")
        assert found is not None
        return found


@asynccontextmanager
async def stage(*answers: Answer) -> AsyncIterator[Stage]:
    """A router on a work queue, and what its target answers first to `m`."""
    sender = FakeSender(takes=TAKES)
    sender.script("m", *answers)
    async with BrokerRegistry(worker_id="test", dedup_window=300) as brokers:
        opening = brokers.open_store(QUEUE)
        assert opening is not None
        async with running(pool(), sender=sender, brokers=brokers) as rig, opening as store:
            yield Stage(rig, store)


@asynccontextmanager
async def finishing(
    queue: ScriptedQueue, sender: FakeSender
) -> AsyncIterator[tuple[Rig, FinishingBrokers]]:
    """A router on a scripted queue that keeps how its messages end."""
    brokers = FinishingBrokers(Scripted(q=queue))
    async with running(pool(), sender=sender, brokers=brokers) as rig:
        yield rig, brokers


@pytest.mark.rule("ROUTE-3", "P1")
@pytest.mark.parametrize("lease", [30.0, None])
async def test_the_same_body_in_two_queues_is_delivered_from_each(lease: float | None) -> None:
    queue, other = ScriptedQueue(lease_seconds=lease), ScriptedQueue(lease_seconds=lease)
    async with running(
        pool(),
        sender=FakeSender(takes=TAKES),
        brokers=Scripted(q=queue, r=other),
        queues=(QUEUE, OTHER),
    ) as rig:
        same = body("m", poolCode="P", dispatchMode="IMMEDIATE")
        queue.hand_over(handed(same, "first", "1", lease=lease))
        await asyncio.sleep(1)
        other.hand_over(handed(same, "second", "1", lease=lease))
        await asyncio.sleep(20)

        assert rig.sender.sent == [(0, "m"), (1, "m")]
        assert queue.acked == [(TAKES + ACK_LINGER_SECONDS, "first")]
        assert other.acked == [(1 + TAKES + ACK_LINGER_SECONDS, "second")]
        assert ended(rig) == {Fate.DELIVERED: 2}


@pytest.mark.rule("ROUTE-3", "P1")
async def test_a_copy_that_comes_again_is_not_dropped_in_favour_of_its_earlier_hand_over() -> None:
    queue = ScriptedQueue(lease_seconds=30.0)
    sender = FakeSender(takes=20.0)
    sender.script("m", Reply(500))
    async with running(pool(), sender=sender, brokers=Scripted(q=queue)) as rig:
        same = body("m", poolCode="P")
        queue.unsettled["first"] = lost("first")
        queue.hand_over(handed(same, "first", "1", lease=30.0))
        await asyncio.sleep(15)  # the lease of the first one is lost, so it proves nothing
        queue.hand_over(handed(same, "copy", "2", lease=3.0))
        await asyncio.sleep(2.9)  # the broker's lease ends a moment before ours
        queue.hand_over(handed(same, "copy again", "2", lease=30.0))
        await asyncio.sleep(1)
        assert queue.acked == []
        await asyncio.sleep(60)

        assert [handle for _, handle in queue.acked] == ["copy again"]
        assert ended(rig)[Fate.DELIVERED] == 1
        assert rig.is_empty


@dataclass
class TasksOfOneQueue:
    """Runs what came from one queue; nothing else may use its executors."""

    queue: str
    runs: list[str] = field(default_factory=list)

    async def run(self, task: Task) -> Answer:
        self.runs.append(task.queue)
        await asyncio.sleep(TAKES)
        if task.queue != self.queue:
            return NoReply(Cause.TARGET_REFUSED, "not for this queue")
        return Reply(200)


@pytest.mark.rule("ROUTE-3", "CMD-8", "P1")
async def test_what_may_use_an_executor_does_although_its_copy_elsewhere_may_not() -> None:
    queue, other = ScriptedQueue(lease_seconds=30), ScriptedQueue(lease_seconds=30)
    tasks = TasksOfOneQueue("r")
    async with running(
        pool(),
        tasks=tasks,
        brokers=Scripted(q=queue, r=other),
        queues=(QUEUE, OTHER),
    ) as rig:
        same = body(
            "m",
            poolCode="P",
            mediationType="PROCESS",
            mediationTarget="process:x",
            dispatchMode="IMMEDIATE",
        )
        queue.hand_over(handed(same, "refused", "1", lease=30))
        await asyncio.sleep(1)
        other.hand_over(handed(same, "allowed", "2", lease=30))
        await asyncio.sleep(20)

        assert tasks.runs == ["q", "r"]
        assert ended(rig) == {Fate.DEAD_LETTERED: 1, Fate.DELIVERED: 1}


@pytest.mark.rule("ROUTE-3", "CMD-4")
async def test_batches_with_the_same_member_fail_together_and_not_before_it_does() -> None:
    async with stage(Reply(404)) as on:
        await on.open_batches("a", "b")
        await asyncio.sleep(TAKES - 1)
        before = [await on.batch(name) for name in ("a", "b")]
        await asyncio.sleep(2 * TAKES)
        after = [await on.batch(name) for name in ("a", "b")]
        record = await on.record()

        assert [(each.succeeded, each.failed) for each in before] == [(0, 0)] * 2
        assert [each.callback_published_at for each in before] == [None] * 2
        assert [(each.succeeded, each.failed) for each in after] == [(0, 1)] * 2
        assert on.rig.sender.ids[0] == "m"
        assert sorted(on.rig.sender.ids[1:]) == ["a-called", "b-called"]
        assert all(at > TAKES for at, _ in on.rig.sender.sent[1:])
        assert (record.status, record.ending) == (
            "FAILED",
            Ending(Failure("HTTP_404", "HTTP 404", 404)),
        )
        assert len(on.rig.letters.letters) == 1


@pytest.mark.rule("ROUTE-3", "CMD-4", "CMD-2")
async def test_batches_with_the_same_member_succeed_with_its_one_result() -> None:
    async with stage(Reply(200, b'{"result": {"sum": 3}}')) as on:
        await on.open_batches("a", "b", "c")
        await asyncio.sleep(TAKES + 1)
        batches = [await on.batch(name) for name in ("a", "b", "c")]
        record = await on.record()

        assert [each.succeeded for each in batches] == [1] * 3
        assert on.rig.sender.ids.count("m") == 1
        assert record.ending == Ending(result=b'{"sum": 3}')
        assert ended(on.rig)[Fate.SUPERSEDED] == 2


@pytest.mark.rule("ROUTE-3", "CMD-4", "P1")
async def test_the_copy_of_a_member_that_is_returned_is_delivered_itself() -> None:
    async with stage(Reply(200, b'{"ack": false, "delaySeconds": 60}')) as on:
        await on.open_batches("a", "b")
        await asyncio.sleep(2 * TAKES + 1)
        batches = [await on.batch(name) for name in ("a", "b")]
        await asyncio.sleep(70)

        assert [at for at, name in on.rig.sender.sent if name == "m"][:2] == [0, TAKES]
        assert sorted(each.succeeded for each in batches) == [0, 1]
        assert [(await on.batch(name)).succeeded for name in ("a", "b")] == [1, 1]


@pytest.mark.rule("ROUTE-3", "WQ-1", "P1")
async def test_what_comes_after_the_failure_is_delivered_itself() -> None:
    """It may have been published because the first had failed."""
    queue = ScriptedQueue(lease_seconds=30, takes={"ack failed": 4})
    sender = FakeSender(takes=1)
    sender.script("m", Reply(404))
    async with finishing(queue, sender) as (rig, brokers):
        queue.hand_over(handed(body("m"), "first", "1", lease=30))
        await asyncio.sleep(0.5)
        queue.hand_over(handed(body("m"), "before", "2", lease=30))
        await asyncio.sleep(1.5)
        queue.hand_over(handed(body("m"), "after", "3", lease=30))
        await asyncio.sleep(20)

        assert rig.sender.ids == ["m", "m"]
        failed = {each.handle: each.ending.failure is not None for each in brokers.finished}
        assert failed == {"first": True, "before": True}
        assert {handle for _, handle in queue.acked} == {"first", "before", "after"}


@pytest.mark.rule("ROUTE-3", "P4")
async def test_no_more_copies_wait_here_than_there_is_room_for() -> None:
    queue = ScriptedQueue(lease_seconds=30)
    async with finishing(queue, FakeSender(takes=TAKES)) as (rig, _):
        copies = [handed(body("m"), n, str(n), lease=30) for n in range(MAX_FOLLOWERS + 3)]
        queue.hand_over(*copies)
        await asyncio.sleep(1)

        assert rig.manager.registry.held == MAX_FOLLOWERS + 1
        assert queue.nacked == [
            (0, MAX_FOLLOWERS + 1, NO_ROOM_DELAY_SECONDS),
            (0, MAX_FOLLOWERS + 2, NO_ROOM_DELAY_SECONDS),
        ]
        await asyncio.sleep(TAKES)

        assert len(queue.acked) == MAX_FOLLOWERS + 1
        assert rig.sender.ids == ["m"]
