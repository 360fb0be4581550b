"""`onDeadLetter: "hold"`: a dead letter holds its group until someone decides (ORD-11)."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest
from msgspec.structs import replace

from router.brokers import BrokerRegistry
from router.core.broker import BrokerFacts, always
from router.core.config import OnFailure, Ordering, QueueConfig, RetryPolicy, RoutingConfig
from router.core.dead_letter import Reason
from router.core.explain import Situation
from router.core.history import Fate
from router.core.message import DEFAULT_GROUP
from router.core.order import GroupKey
from router.core.outcome import Reply
from router.core.replay import TargetChange
from router.engine.chores import Chores
from router.engine.dead_letters import DeadLetterReplay
from router.engine.groups import GroupDesk
from router.engine.publishing import BrokeOff
from router.engine.state import MessageLookup
from router.engine.stores import MessageStates, QueueStores
from router.engine.transfer import MOVED_AT_ONCE
from router.ports import (
    Broker,
    Conflict,
    DataRefused,
    Disconnected,
    Finish,
    OrderLog,
    OrderLogs,
    Publisher,
    QueueRefused,
    StoreError,
    Traits,
    Unknown,
    Unsettled,
)
from tests.engine.test_parked_groups import (
    LATER,
    SOON,
    Faulty,
    failing,
    order_of,
    parking,
    sent,
)
from tests.support.fakes import FakeSender
from tests.support.passing import PassingBroker
from tests.support.queues import FakeQueues
from tests.support.rig import (
    FREE_QUEUE,
    QUEUE,
    TARGET,
    WALL_AT_START,
    Rig,
    body,
    ended,
    grouped,
    order_store,
    pool,
    running,
)

pytestmark = pytest.mark.anyio

GONE = Reply(410)  # the target says that no retry can help
HOLD = replace(FREE_QUEUE, ordering=Ordering.STRICT, holds_letters=True)
HOLD_ITSELF = replace(QUEUE, ordering=Ordering.STRICT, holds_letters=True)
HOLD_IN_POOL = replace(HOLD, on_failure=OnFailure.BLOCK)
FIFO_FACTS = BrokerFacts(name="F", schemes=("f",), holds_groups=always)
HOLDS_GROUPS = BrokerFacts(name="B", schemes=("b",), holds_groups=always, holds_letters=True)
HOLD_FACTS = replace(HOLD_ITSELF, broker=HOLDS_GROUPS)
EVERY_KIND = pytest.mark.parametrize(
    "queue",
    [
        pytest.param(HOLD, id="parks"),
        pytest.param(HOLD_IN_POOL, id="blocks"),
        pytest.param(HOLD_ITSELF, id="holds-groups"),
    ],
)


def desk_of(rig: Rig) -> GroupDesk:
    return GroupDesk(rig.manager, rig.letters)


def replays(rig: Rig) -> DeadLetterReplay:
    return DeadLetterReplay(
        rig.letters,
        rig.manager.deps.publishing,
        wall=lambda: 0.0,
        new_id=iter("123456789").__next__,
        groups=desk_of(rig),
    )


@EVERY_KIND
@pytest.mark.rule("ORD-11")
async def test_a_dead_letter_holds_its_group_and_no_other(queue: QueueConfig) -> None:
    async with parking(sender=failing(GONE), queue=queue) as (rig, _):
        await rig.publish(*grouped("a", "b"), *grouped("x", group="h"), queue=queue)
        await asyncio.sleep(10)
        await rig.publish(*grouped("c"), *grouped("y", group="h"), queue=queue)
        await asyncio.sleep(1000)

        assert sent(rig) == [(0, "a"), (0, "x"), (10, "y")]
        assert [each.message_id for each in rig.letters.letters] == ["a"]
        assert "GROUP_HELD" in rig.codes
        assert ended(rig)[Fate.DEAD_LETTERED] == 1


@EVERY_KIND
@pytest.mark.rule("ORD-11", "DLQ-2")
async def test_a_replayed_letter_goes_before_the_group_that_it_held(queue: QueueConfig) -> None:
    async with parking(sender=failing(GONE), queue=queue) as (rig, _):
        await rig.publish(*grouped("a", "b", "c"), queue=queue)
        await asyncio.sleep(10)
        await replays(rig).replay(1)
        await asyncio.sleep(1)
        await rig.publish(*grouped("d"), queue=queue)
        await asyncio.sleep(100)

        assert [each for _, each in sent(rig)] == ["a", "a", "b", "c", "d"]
        assert rig.sender.attempts == [(each, 1) for each in ("a", "a", "b", "c", "d")]
        assert rig.letters.replayed == {1: 0.0}


@EVERY_KIND
@pytest.mark.rule("ORD-11")
async def test_a_letter_that_fails_again_holds_its_group_again(queue: QueueConfig) -> None:
    async with parking(sender=failing(GONE, GONE), queue=queue) as (rig, _):
        await rig.publish(*grouped("a", "b"), queue=queue)
        await asyncio.sleep(10)
        change = TargetChange(TARGET, f"{TARGET}/new")
        await replays(rig).replay(1, change=change)
        await asyncio.sleep(100)
        assert [each for _, each in sent(rig)] == ["a", "a"]
        assert [each.target for each in rig.letters.letters] == [TARGET, f"{TARGET}/new"]
        await replays(rig).replay(2)
        await asyncio.sleep(100)

        assert [each for _, each in sent(rig)] == ["a", "a", "a", "b"]


@EVERY_KIND
@pytest.mark.rule("ORD-11")
async def test_a_group_goes_on_when_its_letter_is_discarded(queue: QueueConfig) -> None:
    async with parking(sender=failing(GONE), queue=queue) as (rig, _):
        await rig.publish(*grouped("a", "b"), queue=queue)
        await asyncio.sleep(10)
        assert await replays(rig).discard(1)
        await asyncio.sleep(100)

        assert [each for _, each in sent(rig)] == ["a", "b"]
        assert rig.letters.discarded == [1]
        assert not await replays(rig).discard(1)


@pytest.mark.rule("ORD-11")
async def test_a_letter_that_died_after_retries_holds_its_group() -> None:
    policy = RetryPolicy(max_attempts=2, schedule=(10.0,), statuses=frozenset({404}))
    queue = replace(HOLD, retry=policy)
    async with parking(sender=failing(Reply(404), Reply(404)), queue=queue) as (rig, _):
        await rig.publish(*grouped("a", "b"), queue=queue)
        await asyncio.sleep(100)

        assert sent(rig) == [(0, "a"), (11, "a")]
        (letter,) = rig.letters.letters
        assert (letter.message_id, letter.failures) == ("a", 2)
        assert list(order_of(rig).groups) == [("P", "g")]


@pytest.mark.rule("ORD-11", "POOL-7")
async def test_messages_that_block_no_others_hold_no_others() -> None:
    async with parking(sender=failing(GONE), queue=HOLD) as (rig, _):
        loose = grouped("a", dispatchMode="NEXT_ON_ERROR")
        await rig.publish(*loose, *grouped("b"), queue=HOLD)
        await asyncio.sleep(100)

        assert [each for _, each in sent(rig)] == ["a", "b"]
        assert "GROUP_HELD" not in rig.codes


@pytest.mark.rule("ORD-11", "ORD-6")
@pytest.mark.parametrize(
    ("queue", "expected"), [(HOLD, ["a"]), (HOLD_ITSELF, ["a", "b"])], ids=["store", "itself"]
)
async def test_messages_without_a_group_are_one_unless_they_are_in_a_work_queue(
    queue: QueueConfig, expected: Sequence[str]
) -> None:
    async with parking(pool(), sender=failing(SOON, GONE), queue=queue) as (rig, _):
        await rig.publish(*[body(each, poolCode="P") for each in ("a", "b")], queue=queue)
        await asyncio.sleep(100)

        assert list(dict.fromkeys(each for _, each in sent(rig))) == expected


@pytest.mark.rule("ORD-11", "DLQ-1")
async def test_a_letter_that_cannot_be_written_is_no_letter_yet() -> None:
    async with parking(sender=failing(GONE, GONE), queue=HOLD) as (rig, _):
        rig.letters.broken = True
        await rig.publish(*grouped("a", "b"), queue=HOLD)
        await asyncio.sleep(10)
        rig.letters.broken = False
        await asyncio.sleep(100)

        assert [each for _, each in sent(rig)] == ["a", "a"]
        assert [each.message_id for each in rig.letters.letters] == ["a"]


@pytest.mark.rule("ORD-11", "ORD-10")
async def test_a_letter_that_could_not_be_stored_before_a_stop_is_delivered_again() -> None:
    async with parking(sender=failing(GONE, GONE), queue=HOLD) as (rig, logs):
        await rig.publish(*grouped("a", "b"), queue=HOLD)
        await asyncio.sleep(0.5)
        logs.away = True
        await asyncio.sleep(10)
        await rig.apply(pool(), queues=[])
        await asyncio.sleep(10)
        logs.away = False
        await rig.apply(pool(), queues=[HOLD])
        await asyncio.sleep(100)

        assert [each for _, each in sent(rig)] == ["a", "a"]
        assert [each.message_id for each in rig.letters.letters] == ["a", "a"]
        assert list(order_of(rig).groups) == [("P", "g")]


@pytest.mark.rule("ORD-11", "ORD-4")
async def test_a_group_is_still_held_after_a_restart() -> None:
    async with BrokerRegistry(worker_id="test", dedup_window=300) as registry:
        for times in (1, 2):
            async with running(
                pool(),
                sender=failing(GONE),
                queues=[HOLD],
                brokers=registry,
                order=order_store(registry),
            ) as rig:
                ids = ("a", "b") if times == 1 else ("c",)
                await rig.publish(*grouped(*ids), queue=HOLD)
                await asyncio.sleep(100)
                assert [each for _, each in sent(rig)] == ["a"][: 2 - times]


REPLAY = pytest.mark.rule("DLQ-2", "ORD-5")


@REPLAY
async def test_a_letter_that_does_not_hold_its_group_is_stored_behind_it() -> None:
    queue = replace(HOLD, holds_letters=False)
    sender = failing(GONE)
    sender.script("b", LATER)
    async with parking(sender=sender, queue=queue) as (rig, logs):
        await rig.publish(*grouped("a", "b", "c"), queue=queue)
        await asyncio.sleep(10)
        await replays(rig).replay(1)
        await rig.publish(*grouped("d"), queue=queue)
        await asyncio.sleep(100)

        assert [each for _, each in sent(rig)] == ["a", "b", "b", "c", "a", "d"]
        assert [ids for _, ids in logs.appended] == [["b", "c"], ["a"], ["d"]]
        assert not order_of(rig).groups


@REPLAY
async def test_a_replayed_letter_does_not_part_a_group_that_is_here() -> None:
    queue = replace(HOLD, holds_letters=False)
    sender = failing(GONE)
    sender.script("b", LATER)
    async with parking(sender=sender, queue=queue) as (rig, logs):
        await rig.publish(*grouped("a", "b", "c"), queue=queue)
        await asyncio.sleep(1.5)
        await replays(rig).replay(1)
        await rig.publish(*grouped("d", "e"), queue=queue)
        await asyncio.sleep(100)

        assert [ids for _, ids in logs.appended] == [["a"], ["b", "c", "d", "e"]]
        assert [each for _, each in sent(rig)] == ["a", "b", "a", "b", "c", "d", "e"]
        assert not order_of(rig).groups


@REPLAY
async def test_behind_a_replayed_letter_a_group_is_stored_when_nothing_of_it_is_here() -> None:
    queue = replace(HOLD, holds_letters=False)
    async with parking(sender=failing(GONE, LATER), queue=queue) as (rig, logs):
        await rig.publish(*grouped("a", "b"), queue=queue)
        await asyncio.sleep(1.5)
        await replays(rig).replay(1)
        await asyncio.sleep(10)
        await rig.publish(*grouped("c", "d"), queue=queue)
        await asyncio.sleep(100)

        assert [ids for _, ids in logs.appended] == [["a"], ["c", "d"]]
        assert [each for _, each in sent(rig)] == ["a", "b", "a", "a", "c", "d"]


@pytest.mark.rule("ORD-5", "CFG-6")
async def test_what_waits_for_a_removed_pool_is_stored_behind_a_letter_that_was_replayed() -> None:
    queue = replace(HOLD, holds_letters=False)
    sender = failing(GONE)
    async with parking(sender=sender, queue=queue) as (rig, logs):
        await rig.publish(*grouped("a"), queue=queue)
        await asyncio.sleep(10)
        sender.takes = 5.0
        await rig.publish(*grouped("b"), queue=queue)
        await asyncio.sleep(1)
        await rig.apply(queues=[queue])
        await rig.publish(*grouped("c"), queue=queue)
        await asyncio.sleep(1)
        await replays(rig).replay(1)
        await asyncio.sleep(100)

        assert [ids for _, ids in logs.appended] == [["a"], ["c"]]
        assert [each for _, each in sent(rig)] == ["a", "b", "a", "c"]


@REPLAY
async def test_a_letter_of_another_message_goes_behind_a_held_group() -> None:
    sender = failing(GONE)
    sender.script("b", GONE)
    async with parking(sender=sender, queue=HOLD) as (rig, _):
        await rig.publish(*grouped("a", "b", "c"), queue=HOLD)
        await asyncio.sleep(10)
        await desk_of(rig).release("q", G)
        await asyncio.sleep(10)
        await replays(rig).replay(1)  # `a`, while `b` holds the group
        await asyncio.sleep(10)
        assert [each for _, each in sent(rig)] == ["a", "b"]
        await replays(rig).replay(2)
        await asyncio.sleep(10)

        assert [each for _, each in sent(rig)] == ["a", "b", "b", "c", "a"]


@REPLAY
async def test_a_letter_of_a_queue_that_holds_groups_is_published_behind_its_group() -> None:
    queue = replace(HOLD_ITSELF, holds_letters=False)
    sender = failing(GONE)
    sender.script("b", LATER)
    async with parking(sender=sender, queue=queue) as (rig, logs):
        await rig.publish(*grouped("a", "b", "c"), queue=queue)
        await asyncio.sleep(10)
        await replays(rig).replay(1)
        await asyncio.sleep(100)

        assert [each for _, each in sent(rig)] == ["a", "b", "b", "c", "a"]
        assert logs.appended == []


@REPLAY
@pytest.mark.parametrize("mode", ["IMMEDIATE", "NEXT_ON_ERROR"])
async def test_a_letter_that_depends_on_no_other_is_stored_alone(mode: str) -> None:
    async with parking(sender=failing(GONE), queue=HOLD) as (rig, logs):
        await rig.publish(*grouped("a", dispatchMode=mode), queue=HOLD)
        await asyncio.sleep(10)
        await replays(rig).replay(1)
        await asyncio.sleep(10)

        assert [each for _, each in sent(rig)] == ["a", "a"]
        assert [ids for _, ids in logs.appended] == [["a"]]
        assert not order_of(rig).groups


@REPLAY
async def test_a_router_that_does_not_consume_the_queue_stores_only_in_a_shared_store() -> None:
    for is_shared in (True, False):
        async with parking(sender=failing(GONE), queue=HOLD, is_shared=is_shared) as (rig, logs):
            await rig.publish(*grouped("a"), *grouped("x", dispatchMode="IMMEDIATE"), queue=HOLD)
            await asyncio.sleep(10)
            await replays(rig).discard(1)
            rig.letters.discarded.clear()
            stored = [each for _, each in logs.appended]
            rig.manager.stop()
            rig.manager.keep(RoutingConfig(queues=(HOLD,)))
            if is_shared:
                await replays(rig).replay(1)
                assert [ids for _, ids in logs.appended] == [*stored, ["a"]]
            else:
                with pytest.raises(Conflict, match="the router that consumes its queue"):
                    await replays(rig).replay(1)


@REPLAY
async def test_a_letter_that_holds_nothing_is_stored_by_the_router_with_the_store_only() -> None:
    queue = replace(HOLD, holds_letters=False)
    async with parking(sender=failing(GONE), queue=queue) as (rig, _):
        await rig.publish(*grouped("a"), queue=queue)
        await asyncio.sleep(10)
        rig.manager.stop()
        rig.manager.keep(RoutingConfig(queues=(queue,)))
        with pytest.raises(Conflict, match="the router that consumes its queue"):
            await replays(rig).replay(1)

        assert rig.letters.replayed == {}


@REPLAY
@pytest.mark.parametrize("kind", ["blocks", "holds-groups"])
async def test_only_the_router_with_the_store_decides_about_a_letter_that_may_hold_its_group(
    kind: str,
) -> None:
    """Also where a failed message stays out of the store: a letter that holds does not."""
    queue = HOLD_IN_POOL if kind == "blocks" else replace(HOLD_ITSELF, broker=FIFO_FACTS)
    async with BrokerRegistry(worker_id="test", dedup_window=300) as registry:
        for is_shared in (True, False):
            order = order_store(registry, is_shared=is_shared)
            async with running(
                pool(),
                sender=failing(GONE),
                queues=[queue],
                brokers=Fifos(registry),
                order=order,
            ) as rig:
                await rig.publish(*grouped("a", "b"), queue=queue)
                await asyncio.sleep(10)
                rig.manager.stop()
                rig.manager.keep(RoutingConfig(queues=(queue,)))
                if is_shared:
                    assert await replays(rig).discard(1)
                    assert rig.letters.discarded == [1]
                    continue
                with pytest.raises(Conflict, match="decide there"):
                    await replays(rig).replay(1)
                with pytest.raises(Conflict, match="decide there"):
                    await replays(rig).discard(1)
                # It has a store with the same name, from the time when it had the queue.
                await desk_of(rig).release("q", G)
                with pytest.raises(Conflict, match="decide there"):
                    await desk_of(rig).release("q", G)
                assert (rig.letters.discarded, rig.letters.replayed) == ([], {})


@REPLAY
@pytest.mark.parametrize(
    "queue",
    [
        replace(HOLD, on_failure=OnFailure.BLOCK, holds_letters=False),
        replace(HOLD, broker=HOLDS_GROUPS),
    ],
    ids=["blocks", "holds-groups"],
)
async def test_without_an_order_store_a_letter_is_published_by_any_router(
    queue: QueueConfig,
) -> None:
    async with parking(sender=failing(GONE), queue=queue) as (rig, logs):
        await rig.publish(*grouped("a", dispatchMode="IMMEDIATE"), queue=queue)
        await asyncio.sleep(10)
        rig.manager.stop()
        rig.manager.keep(RoutingConfig(queues=(queue,)))
        await replays(rig).replay(1)

        assert rig.letters.replayed == {1: 0.0}
        assert logs.appended == []


@REPLAY
async def test_nothing_is_replayed_or_discarded_while_the_store_is_away() -> None:
    async with parking(sender=failing(GONE), queue=HOLD) as (rig, logs):
        await rig.publish(*grouped("a", "b"), queue=HOLD)
        await asyncio.sleep(10)
        logs.away = True
        with pytest.raises(BrokeOff, match="unplugged"):
            await replays(rig).replay(1)
        with pytest.raises(BrokeOff, match="unplugged"):
            await replays(rig).discard(1)

        assert rig.letters.replayed == {}
        assert rig.letters.discarded == []


@REPLAY
async def test_a_letter_that_holds_its_group_can_be_replayed_to_another_queue() -> None:
    other = QueueConfig(name="other", uri="memory://other")
    async with parking(sender=failing(GONE), queue=HOLD) as (rig, _):
        await rig.apply(pool(), queues=[HOLD, other])
        await rig.publish(*grouped("a", "b"), queue=HOLD)
        await asyncio.sleep(10)
        await replays(rig).replay(1, to="other")
        await asyncio.sleep(10)

        assert [each for _, each in sent(rig)] == ["a", "a"]  # `b` still waits


@REPLAY
async def test_a_group_does_not_go_on_before_its_letter_is_deleted() -> None:
    async with parking(sender=failing(GONE), queue=HOLD) as (rig, _):
        await rig.publish(*grouped("a", "b"), queue=HOLD)
        await asyncio.sleep(10)
        rig.letters.broken = True
        with pytest.raises(StoreError):
            await replays(rig).discard(1)
        await asyncio.sleep(10)
        assert [each for _, each in sent(rig)] == ["a"]
        rig.letters.broken = False
        assert await replays(rig).discard(1)
        await asyncio.sleep(10)

        assert [each for _, each in sent(rig)] == ["a", "b"]
        assert rig.letters.discarded == [1]
        assert not await replays(rig).discard(1)


@REPLAY
async def test_a_letter_is_not_discarded_while_it_is_replayed() -> None:
    async with parking(sender=failing(GONE), queue=HOLD) as (rig, _):
        await rig.publish(*grouped("a", "b"), queue=HOLD)
        await asyncio.sleep(10)
        rig.letters.busy.add(1)
        with pytest.raises(Conflict, match="being replayed"):
            await replays(rig).discard(1)

        assert rig.letters.discarded == []


@pytest.mark.rule("DLQ-2")
async def test_letters_that_can_hold_nothing_are_discarded_as_they_are() -> None:
    async with parking(sender=failing(GONE), queue=HOLD) as (rig, _):
        await rig.publish(*grouped("a"), queue=HOLD)
        await asyncio.sleep(10)
        (letter,) = rig.letters.letters
        rig.letters.letters += [
            replace(letter, body=b"{", reason=Reason.MALFORMED),
            replace(letter, queue="gone"),
        ]
        for number in (2, 3):
            assert await replays(rig).discard(number)
        without_groups = DeadLetterReplay(
            rig.letters, rig.manager.deps.publishing, wall=lambda: 0.0, new_id=lambda: "1"
        )
        assert await without_groups.discard(1)

        assert list(order_of(rig).groups) == [("P", "g")]


class Fifo(PassingBroker):
    """A broker that holds groups back, and keeps nothing of a message that has ended."""

    @property
    def traits(self) -> Traits:
        return replace(self.broker.traits, finisher=None, holds_letters=False)


class Fifos:
    def __init__(self, brokers: BrokerRegistry) -> None:
        self._brokers = brokers
        self.open_publisher = brokers.open_publisher

    @asynccontextmanager
    async def open_queue(self, queue: QueueConfig) -> AsyncIterator[Broker]:
        async with self._brokers.open_queue(queue) as broker:
            yield Fifo(broker) if queue.uri == HOLD_ITSELF.uri else broker


@pytest.mark.rule("ORD-11")
async def test_of_a_broker_that_only_holds_groups_the_order_store_has_what_is_held() -> None:
    sender = failing(LATER, GONE)
    async with BrokerRegistry(worker_id="test", dedup_window=300) as registry:
        order = order_store(registry)
        async with running(
            pool(), sender=sender, queues=[HOLD_ITSELF], brokers=Fifos(registry), order=order
        ) as rig:
            await rig.publish(*grouped("a", "b"), *grouped("x", group="h"), queue=HOLD_ITSELF)
            await asyncio.sleep(10)
            assert not order_of(rig).groups  # its broker holds back what only failed
            await asyncio.sleep(100)
            await rig.publish(*grouped("c"), *grouped("y", group="h"), queue=HOLD_ITSELF)
            await asyncio.sleep(10)
            assert [each for _, each in sent(rig)] == ["a", "x", "a", "y"]
            await replays(rig).replay(1)
            await asyncio.sleep(10)

            assert [each for _, each in sent(rig)][4:] == ["a", "b", "c"]
            assert not order_of(rig).groups


REPLIES = QueueConfig(name="replies", uri="lists://replies")


class Answering:
    """Queues and stores in memory; what is published to the queue of replies goes to lists."""

    def __init__(self, registry: BrokerRegistry) -> None:
        self._registry = registry
        self.open_queue = registry.open_queue
        self.replies = FakeQueues()

    def open_publisher(self, queue: QueueConfig) -> AbstractAsyncContextManager[Publisher]:
        return (self.replies if queue.name == "replies" else self._registry).open_publisher(queue)

    @property
    def answered(self) -> list[str]:
        replies = [json.loads(each.body) for each in self.replies.published["replies"]]
        return [each["messageId"] for each in replies]


@asynccontextmanager
async def answering(brokers: Answering, logs: Faulty, sender: FakeSender) -> AsyncIterator[Rig]:
    async with running(
        pool(),
        sender=sender,
        queues=[HOLD],
        brokers=brokers,
        reply_queues=[REPLIES],
        order=order_store(logs),
    ) as rig:
        yield rig


def asking(*ids: str, group: str = "g") -> list[bytes]:
    return grouped(*ids, group=group, replyTo="replies")


@pytest.mark.rule("ORD-11", "CMD-3")
async def test_a_letter_is_answered_before_it_moves_to_the_store() -> None:
    async with BrokerRegistry(worker_id="test", dedup_window=300) as registry:
        brokers, logs = Answering(registry), Faulty(registry)
        brokers.replies.unreachable = True
        async with answering(brokers, logs, failing(GONE)) as rig:
            await rig.publish(*asking("a", "b"), *asking("x", group="h"), queue=HOLD)
            await asyncio.sleep(10)
            await rig.publish(*asking("c"), *asking("y", group="h"), queue=HOLD)
            await asyncio.sleep(10)
            assert [each for _, each in sent(rig)] == ["a", "x", "y"]
            assert logs.appended == []
            brokers.replies.unreachable = False
            await asyncio.sleep(60)

            assert [ids for _, ids in logs.appended] == [["a", "b", "c"]]
            assert sorted(brokers.answered) == ["a", "x", "y"]
            assert ended(rig)[Fate.DEAD_LETTERED] == 1


@pytest.mark.rule("ORD-11", "CMD-3", "ORD-10")
async def test_a_letter_whose_reply_cannot_be_published_before_a_stop_is_answered_later() -> None:
    async with BrokerRegistry(worker_id="test", dedup_window=300) as registry:
        brokers, logs = Answering(registry), Faulty(registry)
        brokers.replies.unreachable = True
        async with answering(brokers, logs, failing(GONE)) as rig:
            await rig.publish(*asking("a", "b"), queue=HOLD)
            await asyncio.sleep(10)
        assert logs.appended == []
        brokers.replies.unreachable = False
        async with answering(brokers, logs, failing(GONE)) as rig:
            await asyncio.sleep(10)

            assert [each for _, each in sent(rig)] == ["a"]
            assert brokers.answered == ["a"]
            assert [ids for _, ids in logs.appended] == [["a", "b"]]


@pytest.mark.rule("ORD-11", "CMD-3")
async def test_a_letter_whose_reply_is_refused_for_good_holds_its_group_without_it() -> None:
    async with BrokerRegistry(worker_id="test", dedup_window=300) as registry:
        brokers, logs = Answering(registry), Faulty(registry)
        brokers.replies.refused["a-reply"] = DataRefused("it is not storable")
        async with answering(brokers, logs, failing(GONE)) as rig:
            await rig.publish(*asking("a", "b"), queue=HOLD)
            await asyncio.sleep(200)
            assert logs.appended == []
            await asyncio.sleep(400)

            assert [ids for _, ids in logs.appended] == [["a", "b"]]
            assert brokers.answered == []
            assert "REPLY_FAILED" in rig.codes
            assert ended(rig)[Fate.DEAD_LETTERED] == 1


@pytest.mark.rule("ORD-11", "ORD-7")
async def test_no_more_is_received_once_many_messages_wait_for_a_reply() -> None:
    async with BrokerRegistry(worker_id="test", dedup_window=300) as registry:
        brokers, logs = Answering(registry), Faulty(registry)
        brokers.replies.unreachable = True
        async with answering(brokers, logs, failing(GONE)) as rig:
            await rig.publish(*asking("a"), queue=HOLD)
            await asyncio.sleep(10)
            await rig.publish(*asking(*map(str, range(MOVED_AT_ONCE))), queue=HOLD)
            await asyncio.sleep(10)
            await rig.publish(*asking("x", group="h"), queue=HOLD)
            await asyncio.sleep(10)
            assert [each for _, each in sent(rig)] == ["a"]
            brokers.replies.unreachable = False
            await asyncio.sleep(60)

            assert [each for _, each in sent(rig)] == ["a", "x"]


class LosesLeases(PassingBroker):
    """A connection on which the lease of a letter is lost once, before it holds its group."""

    has_lost = False

    async def finish(self, items: Sequence[Finish]) -> Sequence[Unsettled]:
        if self.has_lost:
            return await super().finish(items)
        self.has_lost = True
        return [Unsettled(each.handle, "lost", stale=True) for each in items]


@pytest.mark.rule("ORD-11", "BRK-3")
async def test_a_letter_whose_lease_was_lost_holds_its_group_when_it_dies_again() -> None:
    async with BrokerRegistry(worker_id="test", dedup_window=300) as registry:

        class Queues:
            open_publisher = registry.open_publisher

            @asynccontextmanager
            async def open_queue(self, queue: QueueConfig) -> AsyncIterator[Broker]:
                async with registry.open_queue(queue) as broker:
                    yield LosesLeases(broker)

        queue = replace(HOLD_ITSELF, uri="memory://q?lease=30")
        async with running(
            pool(), sender=failing(GONE, GONE), queues=[queue], brokers=Queues()
        ) as rig:
            await rig.publish(*grouped("a", "b"), queue=queue)
            await asyncio.sleep(200)

            assert [each for _, each in sent(rig)] == ["a", "a"]
            assert [each.message_id for each in rig.letters.letters] == ["a", "a"]


OPERATORS = pytest.mark.rule("ORD-14")
G = ("P", "g")


@EVERY_KIND
@OPERATORS
async def test_a_held_group_is_shown_and_after_its_release_is_gone(queue: QueueConfig) -> None:
    async with parking(sender=failing(GONE), queue=queue) as (rig, _):
        await rig.publish(*grouped("a", "b"), queue=queue)
        await asyncio.sleep(10)
        desk = desk_of(rig)

        (listed,) = await desk.groups(None, 10, only_held=False)
        shown = await desk.show("q", G)
        assert (listed.queue, listed.stored.group, listed.stored.is_held) == ("q", "g", True)
        assert (shown.letter, shown.ids, shown.stored.messages) == (1, ["a", "b"], 2)
        released = await desk.release("q", G)
        await asyncio.sleep(10)

        assert (released.letter, released.stored.message_id) == (1, "a")
        assert [each for _, each in sent(rig)] == ["a", "b"]
        assert await desk.groups("q", 10, only_held=True) == []
        with pytest.raises(Conflict, match="no dead letter holds"):
            await desk.release("q", G)
        with pytest.raises(Unknown, match="nothing of this group"):
            await desk.show("q", G)


@OPERATORS
async def test_a_held_group_is_discarded_with_its_letter() -> None:
    async with parking(sender=failing(GONE), queue=HOLD) as (rig, _):
        await rig.publish(*grouped("a", "b"), queue=HOLD)
        await asyncio.sleep(10)
        await desk_of(rig).discard("q", G)
        await asyncio.sleep(10)

        assert rig.letters.discarded == [1]
        assert [each for _, each in sent(rig)] == ["a", "b"]


@OPERATORS
@pytest.mark.parametrize("other", [grouped("a", group="another")[0], b"no message"])
async def test_a_letter_of_another_group_with_the_same_id_is_not_discarded(other: bytes) -> None:
    async with parking(sender=failing(GONE), queue=HOLD) as (rig, _):
        await rig.publish(*grouped("a", "b"), queue=HOLD)
        await asyncio.sleep(10)
        rig.letters.letters.append(replace(rig.letters.letters[0], body=other))

        assert (await desk_of(rig).discard("q", G)).letter is None
        assert rig.letters.discarded == []


@OPERATORS
async def test_a_letter_that_is_not_known_is_not_discarded() -> None:
    async with parking(sender=failing(GONE), queue=HOLD) as (rig, _):
        await rig.publish(*grouped("a"), queue=HOLD)
        await asyncio.sleep(10)
        rig.letters.letters[0] = replace(rig.letters.letters[0], queue="another")

        assert (await desk_of(rig).discard("q", G)).letter is None
        assert rig.letters.discarded == []


class PartlyAway:
    """Order logs of which some do not answer, by the URIs of their queues."""

    def __init__(self, logs: OrderLogs) -> None:
        self.away = set[str]()
        self.asked = list[str]()
        self._logs = logs

    @asynccontextmanager
    async def open_order_log(self, queue: QueueConfig) -> AsyncIterator[OrderLog]:
        self.asked.append(queue.uri)
        if queue.uri in self.away:
            raise Disconnected("unplugged")
        async with self._logs.open_order_log(queue) as order_log:
            yield order_log


@asynccontextmanager
async def two_held_groups() -> AsyncIterator[tuple[Rig, PartlyAway]]:
    """Group `g` of the work queue `q`, and group `h` of the queue `r`, which has a store."""
    other = replace(HOLD, name="r", uri="memory://r?groups=free")
    async with BrokerRegistry(worker_id="test", dedup_window=300) as registry:
        logs, sender = PartlyAway(registry), failing(GONE)
        sender.script("x", GONE)
        async with running(
            pool(),
            sender=sender,
            queues=[HOLD_ITSELF, other],
            brokers=registry,
            order=order_store(logs),
        ) as rig:
            await rig.publish(*grouped("a", "b"), queue=HOLD_ITSELF)
            await rig.publish(*grouped("x", "y", group="h"), queue=other)
            await asyncio.sleep(10)
            yield rig, logs


@OPERATORS
async def test_a_store_that_is_away_hides_no_group_of_another() -> None:
    async with two_held_groups() as (rig, logs):
        desk = desk_of(rig)
        for away, seen in (("memory://store/order:q", "gh"), ("memory://store/order:r", "g")):
            logs.away = {away}
            found = await desk.groups(None, 10, only_held=True)
            assert [each.stored.group for each in found] == list(seen)
            assert "ORDER_STORE" in rig.codes
            explained = await desk.explain("b")
            assert explained is not None
            assert explained.situation is Situation.HELD
        with pytest.raises(BrokeOff, match="unplugged"):
            await desk.groups("r", 10, only_held=True)
        with pytest.raises(BrokeOff, match="unplugged"):
            await desk.show("r", ("P", "h"))
        with pytest.raises(BrokeOff, match="unplugged"):
            await desk.explain("y")
        logs.away = set()
        await desk.groups(None, 10, only_held=True)

        assert "ORDER_STORE" not in rig.codes


@OPERATORS
async def test_a_group_is_discarded_with_its_letter_while_another_store_is_away() -> None:
    async with two_held_groups() as (rig, logs):
        logs.away = {"memory://store/order:q"}
        discarded = await desk_of(rig).discard("q", G)
        await asyncio.sleep(10)

        assert rig.letters.discarded == [discarded.letter]
        assert [each for _, each in sent(rig)] == ["a", "x", "b"]


@OPERATORS
async def test_a_discard_that_breaks_off_can_be_made_again() -> None:
    async with parking(sender=failing(GONE), queue=HOLD) as (rig, _):
        await rig.publish(*grouped("a", "b"), queue=HOLD)
        await asyncio.sleep(10)
        rig.letters.broken = True
        with pytest.raises(StoreError):
            await desk_of(rig).discard("q", G)
        await asyncio.sleep(10)
        assert [each for _, each in sent(rig)] == ["a"]
        rig.letters.broken = False
        await desk_of(rig).discard("q", G)
        await asyncio.sleep(10)

        assert [each for _, each in sent(rig)] == ["a", "b"]
        assert rig.letters.discarded == [1]


@OPERATORS
async def test_a_group_whose_letter_is_being_replayed_is_not_discarded() -> None:
    async with parking(sender=failing(GONE), queue=HOLD) as (rig, _):
        await rig.publish(*grouped("a", "b"), queue=HOLD)
        await asyncio.sleep(10)
        rig.letters.busy.add(1)
        with pytest.raises(Conflict, match="being replayed"):
            await desk_of(rig).discard("q", G)

        assert rig.letters.discarded == []
        assert len(await desk_of(rig).groups("q", 10, only_held=True)) == 1


@OPERATORS
async def test_a_letter_that_somebody_else_decided_about_first_is_not_deleted() -> None:
    async with parking(sender=failing(GONE), queue=HOLD) as (rig, _):
        await rig.publish(*grouped("a", "b"), queue=HOLD)
        await asyncio.sleep(10)

        @asynccontextmanager
        async def replaying(letter_id: int) -> AsyncIterator[bool]:
            await desk_of(rig).release("q", G)
            yield letter_id == 1

        rig.letters.replaying = replaying  # type: ignore[method-assign]
        with pytest.raises(Conflict, match="no dead letter holds"):
            await desk_of(rig).discard("q", G)

        assert rig.letters.discarded == []


@pytest.mark.rule("ORD-11")
async def test_a_letter_holds_a_group_that_is_found_if_its_pool_changes_meanwhile() -> None:
    """Its pool lets messages without a group go on by themselves once the letter is written."""
    async with parking(sender=failing(GONE), queue=HOLD) as (rig, _):
        rig.letters.takes = 5
        await rig.publish(*grouped("a", "b", group=None), queue=HOLD)
        await asyncio.sleep(3)
        await rig.apply(pool(parallel_ungrouped=True), queues=[HOLD])
        await asyncio.sleep(10)
        (group,) = await desk_of(rig).groups("q", 10, only_held=True)
        assert group.stored.group == DEFAULT_GROUP
        await desk_of(rig).release("q", ("P", DEFAULT_GROUP))
        await asyncio.sleep(10)

        assert [each for _, each in sent(rig)] == ["a", "b"]


class Decides:
    """Order logs of which somebody else decides about each group just before we do."""

    def __init__(self, logs: OrderLogs) -> None:
        self._logs = logs

    @asynccontextmanager
    async def open_order_log(self, queue: QueueConfig) -> AsyncIterator[OrderLog]:
        async with self._logs.open_order_log(queue) as order_log:
            release = order_log.release

            async def release_late(group: GroupKey, message_id: str) -> bool:
                await release(group, message_id)
                return await release(group, message_id)

            order_log.release = release_late  # type: ignore[method-assign]
            yield order_log


@OPERATORS
async def test_a_group_that_somebody_else_released_first_is_not_released_twice() -> None:
    async with BrokerRegistry(worker_id="test", dedup_window=300) as registry:
        store = order_store(Decides(registry))
        sender = failing(GONE)
        async with running(
            pool(), sender=sender, queues=[HOLD], brokers=registry, order=store
        ) as rig:
            await rig.publish(*grouped("a", "b"), queue=HOLD)
            await asyncio.sleep(10)
            with pytest.raises(Conflict, match="no dead letter holds"):
                await desk_of(rig).release("q", G)


@OPERATORS
async def test_a_group_that_waits_for_its_next_try_is_shown_and_cannot_be_released() -> None:
    async with parking(sender=failing(LATER), queue=HOLD) as (rig, _):
        await rig.publish(*grouped("a", "b"), queue=HOLD)
        await asyncio.sleep(10)
        desk = desk_of(rig)

        (listed,) = await desk.groups("q", 10, only_held=False)
        assert (listed.stored.message_id, listed.stored.is_held) == ("a", False)
        assert listed.stored.due_at is not None
        assert await desk.groups("q", 10, only_held=True) == []
        with pytest.raises(Conflict, match="no dead letter holds"):
            await desk.release("q", G)
        with pytest.raises(Unknown, match="no strict queue 'other'"):
            await desk.show("other", G)


@OPERATORS
async def test_a_stored_message_is_explained_by_what_is_in_front_of_it() -> None:
    async with parking(sender=failing(LATER), queue=HOLD) as (rig, _):
        await rig.publish(*grouped("a", "b"), *grouped("x", group="h"), queue=HOLD)
        await asyncio.sleep(10)
        desk = desk_of(rig)

        front, behind = await desk.explain("a"), await desk.explain("b")
        assert front is not None
        assert behind is not None
        assert front.situation is behind.situation is Situation.STORED
        assert re.fullmatch(r"waits in the order store; next try .*Z", front.text)
        assert re.fullmatch(r"waits in the order store behind a; next try .*Z", behind.text)
        assert (front.behind, behind.behind) == (None, "a")
        assert await desk.explain("x") is None


@EVERY_KIND
@OPERATORS
async def test_a_held_message_is_explained_by_the_letter_that_holds_it(queue: QueueConfig) -> None:
    async with parking(sender=failing(GONE), queue=queue) as (rig, _):
        await rig.publish(*grouped("a", "b"), queue=queue)
        await asyncio.sleep(10)
        desk = desk_of(rig)

        letter, behind = await desk.explain("a"), await desk.explain("b")
        assert letter is not None
        assert behind is not None
        assert letter.situation is behind.situation is Situation.HELD
        assert letter.text.startswith("dead letter 1 holds its group since ")
        assert behind.text.startswith("its group is held by dead letter 1, message a, since ")
        assert behind.dead_letter == 1
        rig.letters.letters[0] = replace(rig.letters.letters[0], queue="another")
        unknown = await desk.explain("b")
        assert unknown is not None
        assert unknown.text.startswith("its group is held by a dead letter, message a, since ")


@OPERATORS
async def test_a_message_of_a_work_queue_that_waits_for_its_turn_is_not_stored() -> None:
    async with parking(sender=failing(LATER), queue=HOLD_ITSELF) as (rig, _):
        await rig.publish(*grouped("a", "b"), queue=HOLD_ITSELF)
        await asyncio.sleep(10)

        assert await desk_of(rig).explain("b") is None
        assert await desk_of(rig).groups(None, 10, only_held=False) == []


@EVERY_KIND
@OPERATORS
async def test_held_groups_are_warned_of_until_they_go_on(queue: QueueConfig) -> None:
    async with parking(sender=failing(GONE), queue=queue) as (rig, _):
        await rig.publish(*grouped("a", "b"), queue=queue)
        await asyncio.sleep(10)
        rig.book.clear()
        desk = desk_of(rig)
        await desk.measure()
        assert "GROUP_HELD" in rig.codes
        assert rig.manager.consumers["q"].held_groups == 1
        await desk.release("q", G)

        assert "GROUP_HELD" not in rig.codes
        assert rig.manager.consumers["q"].held_groups == 0


@OPERATORS
async def test_what_is_stored_is_measured_from_time_to_time() -> None:
    async with parking(sender=failing(LATER), queue=HOLD) as (rig, logs):
        await rig.publish(*grouped("a", "b"), queue=HOLD)
        await asyncio.sleep(20)
        desk = desk_of(rig)
        await desk.measure()
        size = order_of(rig).size
        assert size.messages == 2
        await desk.measure()
        assert order_of(rig).size is size  # too soon for another look
        logs.away = True
        await asyncio.sleep(20)
        await desk.measure()

        assert order_of(rig).size is size


class Counted:
    """Order logs of which one says what a database has."""

    def __init__(self, logs: OrderLogs) -> None:
        self._logs = Faulty(logs)

    @asynccontextmanager
    async def open_order_log(self, queue: QueueConfig) -> AsyncIterator[OrderLog]:
        async with self._logs.open_order_log(queue) as order_log:
            order_log.count_stored = self.count_stored  # type: ignore[method-assign]
            yield order_log

    async def count_stored(self) -> Mapping[str, int]:
        return {"order:q": 2}


@OPERATORS
async def test_stored_messages_whose_queue_is_gone_are_warned_of() -> None:
    async with BrokerRegistry(worker_id="test", dedup_window=300) as registry:
        store = order_store(Counted(registry))
        async with running(pool(), queues=[HOLD], brokers=registry, order=store) as rig:
            desk = desk_of(rig)
            await desk.measure()
            assert "ORDER_STORE" not in rig.codes
            await rig.apply(pool(), queues=[QUEUE])
            await desk.measure()
            await desk.measure()
            (text,) = [each.message for each in rig.warnings if each.code == "ORDER_STORE"]
            assert text == (
                "2 messages wait in the order store of q, and no strict queue of this name delivers"
                " them: configure one, or look at `message-router groups list --queue q`"
            )
            await rig.apply(pool(), queues=[HOLD])
            await desk.measure()

            assert "ORDER_STORE" not in rig.codes


@OPERATORS
@pytest.mark.parametrize(
    "left",
    [
        [replace(HOLD, ordering=None, holds_letters=False)],
        [replace(QUEUE, name="other", uri="memory://other")],
    ],
)
async def test_the_groups_of_a_queue_that_is_gone_or_not_strict_any_more_are_listed(
    left: Sequence[QueueConfig],
) -> None:
    async with BrokerRegistry(worker_id="test", dedup_window=300) as registry:
        store = order_store(Counted(registry))
        async with running(
            pool(), sender=failing(GONE), queues=[HOLD], brokers=registry, order=store
        ) as rig:
            await rig.publish(*grouped("a", "b"), queue=HOLD)
            await asyncio.sleep(10)
            await rig.apply(pool(), queues=left)
            desk = desk_of(rig)
            await desk.measure()

            (listed,) = await desk.groups(None, 10, only_held=False)
            assert (listed.queue, listed.stored.group, listed.stored.messages) == ("q", "g", 2)
            assert (await desk.show("q", G)).ids == ["a", "b"]
            explained = await desk.explain("b")
            assert explained is not None
            assert explained.situation is Situation.HELD


@pytest.mark.rule("ORD-11", "ORD-14")
@pytest.mark.parametrize(
    "changed",
    [
        pytest.param(replace(HOLD_FACTS, ordering=None), id="not-strict"),
        pytest.param(replace(HOLD_FACTS, holds_letters=False), id="continues"),
        pytest.param(replace(HOLD_FACTS, ordering=None, holds_letters=False), id="neither"),
    ],
)
async def test_groups_that_a_work_queue_holds_are_told_of_if_its_entry_does_not_say_so_any_more(
    changed: QueueConfig,
) -> None:
    async with parking(sender=failing(GONE), queue=HOLD_ITSELF) as (rig, _):
        await rig.publish(*grouped("a", "b"), queue=HOLD_ITSELF)
        await asyncio.sleep(10)
        await rig.apply(pool(), queues=[changed])
        rig.book.clear()
        desk = desk_of(rig)
        await desk.measure()
        assert "GROUP_HELD" in rig.codes
        (held,) = await desk.groups("q", 10, only_held=False)
        assert held.stored.is_held
        await desk.release("q", G)
        await asyncio.sleep(10)

        assert "GROUP_HELD" not in rig.codes
        assert [each for _, each in sent(rig)] == ["a", "b"]


@OPERATORS
async def test_a_queue_that_is_not_strict_is_not_warned_of_if_it_does_not_answer() -> None:
    async with two_held_groups() as (rig, logs):
        others = [replace(HOLD_FACTS, name=f"w{n}", uri=f"memory://w{n}") for n in range(2)]
        plain = [replace(each, ordering=None, holds_letters=False) for each in others]
        await rig.apply(pool(), queues=[HOLD_ITSELF, *plain])
        await desk_of(rig).measure()
        rig.book.clear()
        logs.away, logs.asked = {each.uri for each in plain}, []
        await desk_of(rig).measure()
        (held,) = await desk_of(rig).groups(None, 10, only_held=True)

        assert held.queue == "q"
        assert "ORDER_STORE" not in rig.codes
        assert plain[1].uri not in logs.asked  # it is where the first one is, and may take long
        with pytest.raises(BrokeOff, match="unplugged"):
            await desk_of(rig).groups("w1", 10, only_held=True)


@OPERATORS
async def test_a_queue_that_nobody_looks_at_any_more_is_not_warned_of_for_ever() -> None:
    async with parking(sender=failing(GONE), queue=HOLD) as (rig, logs):
        desk = desk_of(rig)
        logs.away = True
        with pytest.raises(BrokeOff):
            await desk.groups("q", 10, only_held=True)
        rig.manager.stop()
        assert "ORDER_STORE" in rig.codes
        await desk.measure()

        assert "ORDER_STORE" not in rig.codes


@OPERATORS
async def test_nothing_is_asked_of_a_store_that_is_away_or_was_never_used() -> None:
    async with parking(sender=FakeSender(), queue=HOLD) as (rig, logs):
        desk = desk_of(rig)
        logs.away = True
        await desk.measure()
        with pytest.raises(BrokeOff, match="unplugged"):
            await desk.groups(None, 10, only_held=False)
        assert "GROUP_HELD" not in rig.codes
    async with parking(sender=FakeSender(), queue=HOLD, exists=lambda: False) as (rig, logs):
        logs.away = True
        await rig.apply(pool(), queues=[QUEUE])
        await desk_of(rig).measure()
        assert rig.codes <= {"ORDER_STORE"}


@OPERATORS
async def test_without_an_order_store_no_group_is_stored() -> None:
    async with running(pool(), queues=[HOLD_IN_POOL]) as rig:
        assert await desk_of(rig).groups("q", 10, only_held=False) == []


class Foreign:
    """Order logs of queues that are none."""

    @asynccontextmanager
    async def open_order_log(self, queue: QueueConfig) -> AsyncIterator[OrderLog]:
        raise QueueRefused(f"{queue.name} is no work queue")
        yield


@OPERATORS
async def test_a_queue_that_is_no_work_queue_has_no_groups_of_its_own() -> None:
    async with running(pool(), queues=[QUEUE], order=order_store(Foreign())) as rig:
        rig.manager.keep(RoutingConfig(queues=(HOLD,)))

        assert await desk_of(rig).groups("q", 10, only_held=False) == []


class Slow:
    """Order logs that never open."""

    @asynccontextmanager
    async def open_order_log(self, queue: QueueConfig) -> AsyncIterator[OrderLog]:
        await asyncio.sleep(1e6)
        raise AssertionError(queue)
        yield


@OPERATORS
async def test_a_store_that_does_not_answer_is_given_up_on() -> None:
    async with running(pool(), queues=[QUEUE], order=order_store(Slow())) as rig:
        rig.manager.keep(RoutingConfig(queues=(HOLD,)))
        with pytest.raises(BrokeOff, match="no answer within 10 s"):
            await desk_of(rig).groups(None, 10, only_held=False)


@OPERATORS
async def test_the_states_of_messages_ask_the_order_store() -> None:
    async with (
        parking(sender=failing(LATER), queue=HOLD) as (rig, logs),
        BrokerRegistry(worker_id="t", dedup_window=1) as brokers,
    ):
        await rig.publish(*grouped("a", "b"), queue=HOLD)
        await asyncio.sleep(10)
        lookup = MessageLookup(rig.manager, rig.breakers, rig.letters, lambda: WALL_AT_START)
        stores = QueueStores(brokers, lambda: rig.config)
        states = MessageStates(stores, lookup, rig.manager.deps.publishing, desk_of(rig))

        assert (await states.explain("b")).behind == "a"
        logs.away = True
        away = await states.explain("b")
        assert away.situation is Situation.STORED
        assert away.notes[0] == "an order store could not be asked for it: unplugged"
        logs.away = False
        nowhere = await states.explain("nowhere")
        assert nowhere.situation is Situation.NOT_HERE


@OPERATORS
async def test_stores_are_measured_by_the_clock() -> None:
    async with parking(sender=failing(GONE), queue=HOLD) as (rig, _):
        await rig.publish(*grouped("a"), queue=HOLD)
        await asyncio.sleep(10)
        rig.book.clear()
        for groups, expected in ((None, set[str]()), (desk_of(rig), {"GROUP_HELD"})):
            await Chores(rig.manager, rig.breakers, rig.alerts, groups).measure_stores()
            assert rig.codes == expected
