"""Cancelling what a router holds, on virtual time (CMD-13)."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec.structs import replace

from router.brokers import BrokerRegistry
from router.core.config import OnFailure, Ordering, QueueConfig, RetryPolicy, TargetConfig
from router.core.explain import Situation
from router.core.history import Fate
from router.core.message import parse
from router.core.outcome import Answer, Reply
from router.engine.settle import ACK_LINGER_SECONDS
from router.engine.state import MessageLookup
from router.engine.stores import END_SECONDS, MessageStates, QueueStores
from router.outbound.handlers import Command, Context, HandlerTasks
from router.ports import (
    Conflict,
    MessageStatus,
    Publication,
    StillRunning,
    Task,
    TaskRunner,
    Unknown,
)
from tests.support.fakes import REFUSED, FakeSender
from tests.support.faults import Scripted, ScriptedQueue, handed
from tests.support.rig import QUEUE, WALL_AT_START, Rig, body, ended, grouped, pool, running

pytestmark = pytest.mark.anyio

REPLIES = QueueConfig(name="replies", uri="memory://replies")
STRICT = QueueConfig(
    name="q", uri="memory://q?groups=free", ordering=Ordering.STRICT, on_failure=OnFailure.BLOCK
)
CANCELLED = MessageStatus.CANCELLED


class Office:
    """A rig, and what an operator asks of it."""

    def __init__(self, rig: Rig, states: MessageStates) -> None:
        self.rig = rig
        self.states = states

    async def cancel(self, message_id: str, *, running: bool = True) -> bool:
        return await self.states.cancel(message_id, None, running=running)

    async def state_of(self, message_id: str) -> MessageStatus:
        return (await self.states.find(message_id, "q")).record.status

    async def replies(self) -> list[dict[str, Any]]:
        async with self.rig.brokers.open_queue(REPLIES) as queue:
            return [json.loads(each.body) for each in await queue.receive(10)]


@asynccontextmanager
async def office(
    *,
    sender: FakeSender | None = None,
    handles: TaskRunner | None = None,
    concurrency: int = 10,
    retry: RetryPolicy | None = None,
    queue: QueueConfig = QUEUE,
    take_ahead: int = 1000,
) -> AsyncIterator[Office]:
    one = pool(concurrency=concurrency, retry=retry, parallel_ungrouped=True, take_ahead=take_ahead)
    async with (
        BrokerRegistry(worker_id="w", dedup_window=300) as brokers,
        running(
            one,
            sender=sender,
            handles=handles,
            brokers=brokers,
            queues=[queue],
            reply_queues=[REPLIES],
        ) as rig,
    ):
        lookup = MessageLookup(rig.manager, rig.breakers, rig.letters, lambda: WALL_AT_START)
        stores = QueueStores(brokers, lambda: rig.config)
        yield Office(rig, MessageStates(stores, lookup, rig.manager.deps.publishing))


def slow(**takes: float) -> FakeSender:
    return FakeSender(takes_for=takes)


@pytest.mark.rule("CMD-13")
async def test_an_open_request_is_cut_and_its_message_ends_cancelled() -> None:
    async with office(sender=slow(a=100.0)) as at:
        await at.rig.publish(body("a", poolCode="P", replyTo="replies", payload=1))
        await asyncio.sleep(10)

        assert await at.cancel("a") is True

        assert asyncio.get_running_loop().time() == pytest.approx(10 + ACK_LINGER_SECONDS)
        assert await at.state_of("a") is CANCELLED
        assert [(each["outcome"], each["errorCode"]) for each in await at.replies()] == [
            ("FAILED", "CANCELLED")
        ]
        assert at.rig.sender.open == 0
        assert ended(at.rig) == {Fate.CANCELLED: 1}
        assert at.rig.letters.letters == []
        (entry,) = at.rig.manager.registry.journal.of_message("a")
        assert [(each.seconds, each.error) for each in entry.tries] == [(10.0, "Cancelled")]
        explained = await at.states.explain("a")
        assert explained.situation is Situation.CANCELLED
        assert explained.text.endswith("while it was in delivery: its target may have acted")


@pytest.mark.rule("CMD-13", "FIFO-1")
async def test_its_group_goes_on_behind_it() -> None:
    async with office(sender=slow(a=100.0)) as at:
        await at.rig.publish(*grouped("a", "b", "c"))
        await asyncio.sleep(10)
        await at.cancel("a")
        await asyncio.sleep(10)

        assert [message_id for _, message_id in at.rig.sender.sent] == ["a", "b", "c"]
        assert at.rig.sender.sent[1][0] == pytest.approx(10, abs=0.1)
        assert at.rig.sender.most_in_group == 1
        assert at.rig.is_empty


@pytest.mark.rule("CMD-13")
async def test_without_being_told_so_it_does_not_stop_what_runs() -> None:
    async with office(sender=slow(a=20.0)) as at:
        await at.rig.publish(body("a", poolCode="P"))
        await asyncio.sleep(10)

        with pytest.raises(Conflict, match="running=true"):
            await at.cancel("a", running=False)
        await asyncio.sleep(20)

        assert await at.state_of("a") is MessageStatus.SUCCEEDED
        with pytest.raises(Conflict, match="it has ended"):
            await at.cancel("a")
        with pytest.raises(Unknown):
            await at.cancel("nobody")


@pytest.mark.rule("CMD-13")
@pytest.mark.parametrize("group", ["g", None])
async def test_what_waits_for_a_worker_ends_at_once(group: str | None) -> None:
    async with office(sender=slow(first=100.0), concurrency=1) as at:
        fields = {"poolCode": "P", "messageGroupId": group}
        await at.rig.publish(*(body(each, **fields) for each in ("first", "a", "b")))
        await asyncio.sleep(10)

        assert await at.cancel("a") is True
        assert (await at.states.explain("a")).text.endswith("Z")  # no target has seen it
        await asyncio.sleep(100)

        assert [message_id for _, message_id in at.rig.sender.sent] == ["first", "b"]
        assert ended(at.rig) == {Fate.CANCELLED: 1, Fate.DELIVERED: 2}


@pytest.mark.rule("CMD-13")
async def test_between_two_requests_it_ends_before_the_next() -> None:
    sender = FakeSender()
    sender.script("a", *[Reply(503)] * 3)
    async with office(sender=sender) as at:
        await at.rig.publish(body("a", poolCode="P"))
        await asyncio.sleep(1.5)

        assert await at.cancel("a") is True

        assert asyncio.get_running_loop().time() == pytest.approx(2, abs=0.1)
        assert len(sender.sent) == 1
        assert await at.state_of("a") is CANCELLED
        assert at.rig.is_empty


def limit_to_one(rig: Rig) -> None:
    entry = TargetConfig(name="one", match="http://target.test", concurrency=1)
    rig.manager.deps.targets.of("http://target.test:80").configure(entry)


@pytest.mark.rule("CMD-13")
async def test_what_waits_for_its_target_again_ends_at_once() -> None:
    sender = slow(b=100.0)
    sender.script("a", Reply(503))
    async with office(sender=sender) as at:
        limit_to_one(at.rig)
        await at.rig.publish(body("a", poolCode="P"), body("b", poolCode="P"))
        await asyncio.sleep(10)
        assert [job.message.id for job in at.rig.pool().runner.at_gate] == ["a"]

        assert await at.cancel("a") is True

        assert [message_id for _, message_id in sender.sent] == ["a", "b"]
        assert await at.state_of("a") is CANCELLED


@pytest.mark.rule("CMD-13")
@pytest.mark.parametrize("group", ["g", None])
async def test_what_is_parked_at_its_target_ends_at_once(group: str | None) -> None:
    sender = slow(first=100.0)
    fields = {"poolCode": "P", "messageGroupId": group}
    elsewhere = {**fields, "mediationTarget": "http://other.test/"}
    async with office(sender=sender) as at:
        limit_to_one(at.rig)
        await at.rig.publish(body("first", poolCode="P"))
        await asyncio.sleep(5)
        await at.rig.publish(body("a", **fields), body("b", **elsewhere), body("c", **fields))
        await asyncio.sleep(5)
        assert at.rig.pool().parked

        await at.rig.publish(body("d", **fields))
        await asyncio.sleep(1)
        assert await at.cancel("d") is True
        assert await at.cancel("a") is True
        await asyncio.sleep(5)
        assert await at.cancel("c") is True

        assert [message_id for _, message_id in sender.sent] == ["first", "b"]
        assert [await at.state_of(each) for each in "abc"] == [
            CANCELLED,
            MessageStatus.SUCCEEDED,
            CANCELLED,
        ]
        assert not at.rig.pool().parked
        await asyncio.sleep(100)
        assert at.rig.is_empty


class Tasks:
    """Tasks of a hundred seconds that end so many seconds after they were told to."""

    def __init__(self, lingers: float, *, is_ending: bool) -> None:
        self.lingers = lingers
        self.is_ending = is_ending
        self.starts: list[tuple[float, str]] = []

    async def run(self, task: Task) -> Answer:
        loop = asyncio.get_running_loop()
        self.starts.append((round(loop.time(), 1), task.message.id))
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            ended = loop.create_future()
            loop.call_later(self.lingers, ended.set_result, None)
            raise StillRunning(ended, is_ending=self.is_ending) from None
        return Reply(200)


@pytest.mark.rule("CMD-13")
async def test_what_takes_a_while_to_end_keeps_its_place_in_its_group() -> None:
    tasks = Tasks(lingers=5.0, is_ending=True)
    async with office(handles=tasks) as at:
        await at.rig.publish(*grouped("a", "b", mediationTarget="handler:t"))
        await asyncio.sleep(10)

        assert await at.cancel("a") is False
        assert asyncio.get_running_loop().time() == pytest.approx(10 + END_SECONDS)
        assert await at.state_of("a") is MessageStatus.IN_FLIGHT
        assert await at.cancel("a") is False  # again: no harm
        await asyncio.sleep(5)

        assert await at.state_of("a") is CANCELLED
        assert tasks.starts == [(0.0, "a"), (15.0, "b")]


@pytest.mark.rule("CMD-13", "CMD-9")
@pytest.mark.parametrize(("is_ending", "fate"), [(True, Fate.RETURNED), (False, Fate.FORFEITED)])
async def test_a_stop_does_not_wait_for_what_is_about_to_end(is_ending: bool, fate: Fate) -> None:
    tasks = Tasks(lingers=50.0, is_ending=is_ending)
    async with office(handles=tasks) as at:
        await at.rig.publish(*grouped("a", mediationTarget="handler:t"))
        await asyncio.sleep(10)
        assert await at.cancel("a") is False
        runner = at.rig.pool().runner
        runner.stop()
        runner.abort()
        await asyncio.sleep(1)

        assert ended(at.rig)[fate] == 1
        assert len(tasks.starts) == 1


@pytest.mark.rule("CMD-13", "BRK-5")
async def test_what_another_router_cancels_ends_at_the_next_extension() -> None:
    async with office(sender=slow(a=100.0)) as at:
        await at.rig.publish(body("a", poolCode="P"))
        await asyncio.sleep(1)
        opening = at.rig.brokers.brokers.open_store(QUEUE)  # type: ignore[attr-defined]
        async with opening as store:  # as another router would
            await store.cancel("a", running=True)
        await asyncio.sleep(20)

        assert await at.state_of("a") is CANCELLED
        assert at.rig.sender.open == 0
        (entry,) = at.rig.manager.registry.journal.of_message("a")
        assert entry.ended_at == pytest.approx(10, abs=5.1)


@pytest.mark.rule("CMD-13", "ROUTE-2")
async def test_what_is_handed_over_again_after_its_cancel_ends_at_once() -> None:
    """Its lease ended at the broker, while the router still holds it."""
    queue = ScriptedQueue(lease_seconds=30)
    sender = slow(a=100.0)
    async with running(pool(concurrency=1), sender=sender, brokers=Scripted(q=queue)) as rig:
        bodies = {each: body(each, poolCode="P") for each in "ab"}  # b waits for the worker
        for each in "ab":
            queue.hand_over(handed(bodies[each], each, each, lease=30))
        await asyncio.sleep(5)
        for each in "ab":
            again = handed(bodies[each], f"{each} again", each, lease=30)
            queue.hand_over(replace(again, is_cancelled=True))
        await asyncio.sleep(1)

        assert sender.ids == ["a"]
        assert sender.open == 0
        assert {handle for _, handle in queue.acked} == {"a again", "b again"}
        assert ended(rig) == {Fate.CANCELLED: 2, Fate.SUPERSEDED: 2}


@pytest.mark.rule("CMD-13")
async def test_what_goes_back_comes_again_at_once_and_ends_without_a_request() -> None:
    sender = FakeSender()
    sender.script("a", Reply(429, retry_after="600"))
    async with office(sender=sender) as at:
        at.rig.witness.nack_takes = 1.0
        await at.rig.publish(body("a", poolCode="P", replyTo="replies", payload=1))
        await asyncio.sleep(1.5)  # its NACK is on its way

        assert await at.cancel("a") is False
        await asyncio.sleep(0.1)

        assert len(sender.sent) == 1
        assert [each["errorCode"] for each in await at.replies()] == ["CANCELLED"]
        assert ended(at.rig) == {Fate.RETURNED: 1, Fate.CANCELLED: 1}


@pytest.mark.rule("CMD-13")
async def test_a_handler_that_answers_all_the_same_is_not_heard() -> None:
    tasks = HandlerTasks(_NoThreads())

    async def stubborn(_command: Command, _context: Context) -> object:
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            await asyncio.sleep(1)
        return {"too": "late"}

    tasks.register("t", stubborn)
    async with office(handles=tasks, concurrency=1) as at:
        await at.rig.publish(*grouped("a", "b", mediationTarget="handler:t"))
        await asyncio.sleep(10)

        assert await at.cancel("a") is True
        assert asyncio.get_running_loop().time() == pytest.approx(11, abs=0.1)
        await asyncio.sleep(200)

        found = await at.states.find("a", "q")
        assert (found.record.status, found.record.ending) == (CANCELLED, None)
        assert await at.state_of("b") is MessageStatus.SUCCEEDED


class _NoThreads:
    def run(self, call: object) -> Any:
        raise AssertionError(call)

    def close(self) -> None: ...


@pytest.mark.rule("CMD-13", "ORD-1")
async def test_what_waits_in_front_of_its_group_ends_at_once_and_the_group_goes_on() -> None:
    sender = FakeSender()
    sender.script("a", *[REFUSED] * 9)
    sender.script("c", *[REFUSED] * 9)
    async with office(sender=sender, queue=STRICT) as at:
        await at.rig.publish(*grouped("a", "b", "d"), *grouped("c", group="alone"), queue=STRICT)
        await asyncio.sleep(10)
        assert len(at.rig.pool().blocked) == 2

        assert await at.cancel("d") is True
        assert len(at.rig.pool().blocked) == 2
        assert await at.cancel("a") is True
        assert await at.cancel("c") is True
        await asyncio.sleep(5)

        assert [message_id for _, message_id in sender.sent].count("b") == 1
        assert await at.state_of("b") is MessageStatus.SUCCEEDED
        assert not at.rig.pool().blocked
        assert ended(at.rig) == {Fate.CANCELLED: 3, Fate.DELIVERED: 1}


@pytest.mark.rule("CMD-13", "ORD-1")
async def test_what_failed_in_front_of_its_group_and_was_accepted_then_is_delivered() -> None:
    sender = FakeSender()
    sender.script("a", *[REFUSED] * 3)
    async with office(sender=sender, queue=STRICT) as at:
        await at.rig.publish(*grouped("a", replyTo="replies"), queue=STRICT)
        await asyncio.sleep(60)

        assert ended(at.rig) == {Fate.DELIVERED: 1}
        assert await at.state_of("a") is MessageStatus.SUCCEEDED
        assert [each["outcome"] for each in await at.replies()] == ["SUCCESS"]


@pytest.mark.rule("CMD-13")
async def test_another_message_of_the_same_id_that_has_ended_is_not_taken_for_it() -> None:
    sender = slow(a=100.0)
    async with office(sender=sender) as at:
        first, second = body("a", poolCode="P"), body("a", poolCode="P", payload=2)
        async with at.rig.brokers.open_publisher(QUEUE) as publisher:
            await publisher.publish([Publication(parse(first), first)])
            await asyncio.sleep(1)
            sender.takes_for["a"] = 1.0
            await publisher.publish([Publication(parse(second), second)])
        await asyncio.sleep(5)
        assert await at.state_of("a") is MessageStatus.SUCCEEDED  # the newer one

        assert await at.cancel("a") is True

        assert ended(at.rig) == {Fate.CANCELLED: 1, Fate.DELIVERED: 1}


@pytest.mark.rule("CMD-13")
async def test_what_waits_for_room_in_its_pool_ends_at_its_turn_without_a_request() -> None:
    ids = [f"m{number}" for number in range(30)]
    async with office(sender=slow(m0=10.0), concurrency=1, queue=STRICT, take_ahead=10) as at:
        await at.rig.publish(body("of the default pool"), queue=STRICT)
        await asyncio.sleep(1)  # now the consumer asks for as many as that pool has room for
        await at.rig.publish(*(body(each, poolCode="P") for each in ids), queue=STRICT)
        await asyncio.sleep(5)
        (consumer,) = at.rig.manager.consumers.values()
        held = [job for each in consumer.receivers for job in each.settler.held]
        last = next(job.message.id for job in reversed(held) if job.pool is None)

        assert await at.cancel(last) is False
        await asyncio.sleep(60)

        assert await at.state_of(last) is CANCELLED
        sent = [message_id for _, message_id in at.rig.sender.sent[1:]]
        assert sent == [each for each in ids if each != last]


@pytest.mark.rule("CMD-13")
async def test_behind_what_was_cancelled_at_a_busy_target_its_group_still_waits() -> None:
    async with office(sender=slow(first=100.0)) as at:
        limit_to_one(at.rig)
        await at.rig.publish(body("first", poolCode="P"))
        await asyncio.sleep(5)
        await at.rig.publish(*grouped("a", "b", group="g"))
        await asyncio.sleep(5)

        assert await at.cancel("b") is True

        assert at.rig.pool().parked == 1
        await asyncio.sleep(100)
        assert [message_id for _, message_id in at.rig.sender.sent] == ["first", "a"]
