"""`onFailure: "park"`: a failed message moves to the order store with its group (ORD-4 to 8)."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any, ClassVar

import pytest
from msgspec.structs import replace

from router.brokers import BrokerRegistry
from router.core.config import Ordering, PoolConfig, QueueConfig, RetryPolicy
from router.core.history import Fate
from router.core.message import Handle, Message, ReceivedMessage, parse
from router.core.order import MAX_UNSENT_MESSAGES
from router.core.outcome import Answer, Reply
from router.core.trace import Span
from router.engine.transfer import QueueOrder
from router.ports import (
    Broker,
    Disconnected,
    OrderLog,
    OrderLogs,
    Publication,
    StoredMessage,
    StoreSize,
    Traits,
    Unsettled,
)
from tests.support.fakes import REFUSED, FakeSender
from tests.support.passing import PassingBroker
from tests.support.rig import (
    FREE_QUEUE,
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
from tests.support.virtual_time import now

pytestmark = pytest.mark.anyio

PARK = replace(FREE_QUEUE, ordering=Ordering.STRICT)
SOON = Reply(200, b'{"ack": false, "delaySeconds": 4}')
LATER = Reply(200, b'{"ack": false, "delaySeconds": 45}')


def failing(*answers: Reply | Exception, message_id: str = "a") -> FakeSender:
    sender = FakeSender(takes=1)
    sender.script(message_id, *answers)
    return sender


@pytest.mark.rule("ORD-4", "ORD-5", "ORD-6", "ORD-12")
async def test_a_failed_group_moves_to_the_store_and_later_messages_follow_it() -> None:
    async with running(pool(), sender=failing(LATER, SOON), queues=[PARK]) as rig:
        await rig.publish(*grouped("a", "b"), queue=PARK)
        await asyncio.sleep(10)
        await rig.publish(*grouped("c"), *grouped("x", group="h"), queue=PARK)
        await asyncio.sleep(100)

        assert [(round(at, 1), each) for at, each in rig.sender.sent] == [
            (0, "a"),
            (10, "x"),
            (46, "a"),
            (51, "a"),
            (52, "b"),
            (53, "c"),
        ]
        assert ended(rig) == {Fate.STORED: 3, Fate.DELIVERED: 4, Fate.RETURNED: 3}


@pytest.mark.rule("ORD-4", "CMD-11")
async def test_the_next_step_of_a_stored_message_keeps_the_order_of_its_own_group() -> None:
    """It is published to the queue, not to the store: there nobody would know of its group."""
    sender = failing(SOON)
    sender.script("step", LATER)
    async with parking(sender=sender) as (rig, _):
        step = {"id": "step", "mediationTarget": TARGET, "poolCode": "P", "messageGroupId": "h"}
        await rig.publish(*grouped("a", then=step), queue=PARK)
        await asyncio.sleep(20)
        await rig.publish(*grouped("x", group="h"), queue=PARK)
        await asyncio.sleep(100)

        assert rig.sender.ids == ["a", "a", "step", "step", "x"]


class Faulty:
    """Order logs that are away while `away` is set, and record what was appended."""

    def __init__(self, logs: OrderLogs) -> None:
        self.away = False
        self.bug: Exception | None = None  # of an append
        self.appended: list[tuple[float, list[str]]] = []
        self._logs = logs

    @asynccontextmanager
    async def open_order_log(self, queue: QueueConfig) -> AsyncIterator[OrderLog]:
        if self.away:
            raise Disconnected("unplugged")
        async with self._logs.open_order_log(queue) as order_log:
            yield _Recorded(order_log, self)


class _Recorded:
    def __init__(self, order_log: OrderLog, faulty: Faulty) -> None:
        self.unsettled_groups = order_log.unsettled_groups
        self.which_are_stored = order_log.which_are_stored
        self.size = order_log.size
        self.groups = order_log.groups
        self.count_held = order_log.count_held
        self.count_stored = order_log.count_stored
        self.find_group = order_log.find_group
        self.ids_of = order_log.ids_of
        self.group_of = order_log.group_of
        self.held_letter = order_log.held_letter
        self.retry_letter = order_log.retry_letter
        self.release = order_log.release
        self._log = order_log
        self._faulty = faulty

    async def append(self, items: Sequence[StoredMessage]) -> int:
        if self._faulty.bug is not None:
            raise self._faulty.bug
        ids = [item.publication.message.id for item in items]
        self._faulty.appended.append((now(), ids))
        return await self._log.append(items)


@asynccontextmanager
async def parking(
    *pools: PoolConfig, sender: FakeSender, queue: QueueConfig = PARK, **facts: Any
) -> AsyncIterator[tuple[Rig, Faulty]]:
    async with BrokerRegistry(worker_id="test", dedup_window=300) as registry:
        logs = Faulty(registry)
        async with running(
            *(pools or (pool(),)),
            sender=sender,
            queues=[queue],
            brokers=registry,
            order=order_store(logs, **facts),
        ) as rig:
            yield rig, logs


class HesitantAcks(PassingBroker):
    """A connection whose first ACK is to be tried again."""

    async def ack(self, handles: Sequence[Handle], *, error: str = "") -> Sequence[Unsettled]:
        if handles and not self.has_hesitated:
            self.has_hesitated = True
            return [Unsettled(each, "not now", stale=False) for each in handles]
        return await super().ack(handles, error=error)

    has_hesitated = False


class Hesitant:
    """Opens the strict queue with such a connection, and its store as it is."""

    def __init__(self, brokers: BrokerRegistry) -> None:
        self._brokers = brokers
        self.open_publisher = brokers.open_publisher

    @asynccontextmanager
    async def open_queue(self, queue: QueueConfig) -> AsyncIterator[Broker]:
        async with self._brokers.open_queue(queue) as broker:
            yield HesitantAcks(broker) if queue.uri == PARK.uri else broker


@pytest.mark.rule("ORD-6", "BRK-3")
async def test_what_is_stored_is_removed_from_its_queue_however_often_it_takes() -> None:
    async with BrokerRegistry(worker_id="test", dedup_window=300) as registry:
        order = order_store(registry)
        async with running(
            pool(), sender=failing(LATER), queues=[PARK], brokers=Hesitant(registry), order=order
        ) as rig:
            await rig.publish(*grouped("a"), queue=PARK)
            await asyncio.sleep(100)

            assert [(round(at, 1), each) for at, each in rig.sender.sent] == [(0, "a"), (46, "a")]
            assert ended(rig)[Fate.STORED] == 1
            assert rig.is_empty


def order_of(rig: Rig) -> QueueOrder:
    order = rig.manager.consumers["q"].order
    assert order is not None
    return order


def sent(rig: Rig) -> list[tuple[float, str]]:
    """What was sent, without the hundredths that acknowledgements take."""
    return [(round(at, 1), each) for at, each in rig.sender.sent]


@pytest.mark.rule("ORD-4", "ORD-5")
async def test_a_group_is_direct_again_when_its_last_stored_message_has_ended() -> None:
    async with parking(sender=failing(SOON)) as (rig, logs):
        await rig.publish(*grouped("a", "b"), queue=PARK)
        await asyncio.sleep(3)
        assert list(order_of(rig).groups) == [("P", "g")]
        await asyncio.sleep(10)

        assert not order_of(rig).groups
        await rig.publish(*grouped("c"), queue=PARK)
        await asyncio.sleep(10)
        assert sent(rig) == [(0, "a"), (5, "a"), (6, "b"), (13, "c")]
        assert logs.appended == [(1, ["a", "b"])]
        assert order_of(rig).messages == 0


@pytest.mark.rule("ORD-6", "P5")
async def test_other_groups_stay_direct() -> None:
    async with parking(pool(concurrency=1), sender=failing(LATER)) as (rig, logs):
        await rig.publish(*grouped("a", "b"), *grouped("x", "y", group="h"), queue=PARK)
        await asyncio.sleep(60)

        assert sent(rig) == [(0, "a"), (1, "x"), (2, "y"), (46, "a"), (47, "b")]
        assert logs.appended == [(1, ["a", "b"])]


@pytest.mark.rule("ORD-6", "WQ-5")
async def test_failures_go_along_with_the_message() -> None:
    policy = RetryPolicy(max_attempts=2, schedule=(10.0,), statuses=frozenset({404}))
    queue = replace(PARK, retry=policy)
    async with parking(sender=failing(Reply(404), Reply(404)), queue=queue) as (rig, _):
        await rig.publish(*grouped("a", "b"), queue=queue)
        await asyncio.sleep(60)

        assert sent(rig) == [(0, "a"), (11, "a"), (12, "b")]
        (letter,) = rig.letters.letters
        assert (letter.message_id, letter.queue, letter.failures) == ("a", "q", 2)


@pytest.mark.rule("ORD-6", "CMD-5")
async def test_an_early_message_is_stored_until_its_time_with_all_behind_it() -> None:
    at = datetime.fromtimestamp(WALL_AT_START + 20, UTC).isoformat()
    async with parking(sender=FakeSender(takes=1)) as (rig, logs):
        await rig.publish(*grouped("a"), *grouped("b", notBefore=at), *grouped("c"), queue=PARK)
        await asyncio.sleep(60)

        assert sent(rig) == [(0, "a"), (20, "b"), (21, "c")]
        assert logs.appended == [(1, ["b", "c"])]


@pytest.mark.rule("ORD-5", "CMD-5")
async def test_an_early_message_of_a_stored_group_keeps_its_time_and_place() -> None:
    at = datetime.fromtimestamp(WALL_AT_START + 20, UTC).isoformat()
    async with parking(sender=failing(SOON)) as (rig, _):
        await rig.publish(*grouped("a"), queue=PARK)
        await asyncio.sleep(2)
        await rig.publish(*grouped("b", notBefore=at), *grouped("c"), queue=PARK)
        await asyncio.sleep(60)

        assert sent(rig) == [(0, "a"), (5, "a"), (20, "b"), (21, "c")]


@pytest.mark.rule("ORD-6", "POOL-7")
async def test_messages_that_block_no_others_are_stored_alone() -> None:
    async with parking(sender=failing(SOON)) as (rig, logs):
        loose = grouped("a", dispatchMode="NEXT_ON_ERROR")
        await rig.publish(*loose, *grouped("b", "c"), queue=PARK)
        await asyncio.sleep(60)

        assert sent(rig) == [(0, "a"), (1, "b"), (2, "c"), (5, "a")]
        assert logs.appended == [(1, ["a"])]
        assert not order_of(rig).groups


@pytest.mark.rule("ORD-6", "POOL-7")
@pytest.mark.parametrize(
    ("parallel", "expected"),
    [(False, [(0, "a"), (5, "a"), (6, "b")]), (True, [(0, "a"), (0, "b"), (5, "a")])],
)
async def test_messages_without_a_group_are_one_group_unless_their_pool_says_otherwise(
    parallel: bool, expected: list[tuple[float, str]]
) -> None:
    config = pool(parallel_ungrouped=parallel)
    async with parking(config, sender=failing(SOON)) as (rig, _):
        await rig.publish(*[body(each, poolCode="P") for each in ("a", "b")], queue=PARK)
        await asyncio.sleep(60)

        assert sent(rig) == expected


@pytest.mark.rule("ORD-5", "POOL-3")
async def test_high_priority_does_not_pass_a_stored_message_that_was_tried() -> None:
    async with parking(sender=failing(SOON)) as (rig, _):
        await rig.publish(*grouped("a", "b"), queue=PARK)
        await asyncio.sleep(2)
        await rig.publish(*grouped("c", highPriority=True), queue=PARK)
        await asyncio.sleep(60)

        assert sent(rig) == [(0, "a"), (5, "a"), (6, "c"), (7, "b")]


@pytest.mark.rule("ORD-7")
async def test_while_the_store_is_away_the_queue_waits_and_direct_groups_go_on() -> None:
    sender = failing(SOON)
    sender.takes_for["x"] = 5.0
    async with parking(sender=sender) as (rig, logs):
        await rig.publish(*grouped("a", "b"), *grouped("x", "y", group="h"), queue=PARK)
        await asyncio.sleep(0.5)
        logs.away = True
        await asyncio.sleep(2)
        await rig.publish(*grouped("w", group="i"), queue=PARK)  # ends the open receive
        await asyncio.sleep(2)
        await rig.publish(*grouped("z", group="i"), queue=PARK)
        await asyncio.sleep(100)

        assert sent(rig) == [(0, "a"), (0, "x"), (2.5, "w"), (5, "y")]
        assert "ORDER_STORE" in rig.codes
        assert order_of(rig).is_stuck
        logs.away = False
        await asyncio.sleep(60)
        assert [each for _, each in sent(rig)[4:] if each != "z"] == ["a", "b"]
        assert "z" in [each for _, each in sent(rig)]
        assert "ORDER_STORE" not in rig.codes
        assert ended(rig)[Fate.FORFEITED] == 0


@pytest.mark.rule("ORD-7")
async def test_a_queue_is_not_received_before_the_store_has_answered() -> None:
    async with BrokerRegistry(worker_id="test", dedup_window=300) as registry:
        logs = Faulty(registry)
        logs.away = True
        async with running(
            pool(),
            sender=FakeSender(takes=1),
            queues=[PARK],
            brokers=registry,
            order=order_store(logs),
        ) as rig:
            await rig.publish(*grouped("a"), queue=PARK)
            await asyncio.sleep(10)
            assert rig.sender.sent == []
            assert "ORDER_STORE" in rig.codes
            logs.away = False
            await asyncio.sleep(10)
            assert [each for _, each in rig.sender.sent] == ["a"]


@pytest.mark.rule("ORD-7")
async def test_a_full_store_takes_nothing_until_it_has_room() -> None:
    size = len(grouped("a")[0])
    sender = failing(SOON)
    sender.script("x", SOON, SOON)
    async with parking(sender=sender, max_bytes=size) as (rig, logs):
        await rig.publish(*grouped("a"), queue=PARK)
        await asyncio.sleep(2)
        await rig.publish(*grouped("x", group="h"), queue=PARK)
        await asyncio.sleep(2)
        assert "ORDER_STORE" in rig.codes
        assert [ids for _, ids in logs.appended] == [["a"]]
        await asyncio.sleep(60)

        assert [ids for _, ids in logs.appended] == [["a"], ["x"]]
        assert ended(rig)[Fate.DELIVERED] == 2
        assert "ORDER_STORE" not in rig.codes


@pytest.mark.rule("ORD-7")
async def test_a_lease_lost_meanwhile_takes_its_group_along() -> None:
    async with parking(sender=failing(SOON)) as (rig, logs):
        await rig.publish(*grouped("a", "b"), queue=PARK)
        await asyncio.sleep(0.5)
        logs.away = True
        await asyncio.sleep(2)
        jobs = {job.message.id: job for job in rig.manager.registry.tracker}
        jobs["a"].lease_until = 1.0
        await asyncio.sleep(10)
        assert ended(rig)[Fate.FORFEITED] == 2
        logs.away = False
        await asyncio.sleep(100)

        assert [each for _, each in sent(rig)][:1] == ["a"]
        first = {each: at for at, each in reversed(sent(rig))}
        assert first["a"] < first["b"]
        assert rig.is_empty


@pytest.mark.rule("ORD-8")
async def test_a_copy_that_the_store_has_is_not_stored_again() -> None:
    async with parking(sender=failing(LATER)) as (rig, logs):
        await rig.publish(*grouped("a", "b"), queue=PARK)
        await asyncio.sleep(2)
        order = order_of(rig)
        items = [
            StoredMessage(Publication(parse(each), each, f"key-{n}"), "g")
            for n, each in enumerate(grouped("x", "x"))
        ]
        async with logs.open_order_log(order.queue) as order_log:
            assert await order_log.append(items) == 2
            assert await order_log.append(items) == 0
            assert (await order_log.size()).messages == 4


@pytest.mark.rule("ROUTE-3", "ORD-6")
async def test_a_copy_in_the_store_does_not_pass_what_went_back_to_it() -> None:
    async with parking(sender=failing(LATER, SOON)) as (rig, logs):
        await rig.publish(*grouped("a", "b"), queue=PARK)
        await asyncio.sleep(2)
        copies = [StoredMessage(Publication(parse(each), each, "k"), "g") for each in grouped("b")]
        async with logs.open_order_log(order_of(rig).queue) as order_log:
            assert await order_log.append(copies) == 1
        await asyncio.sleep(100)

        assert sent(rig) == [(0, "a"), (46, "a"), (51, "a"), (52, "b")]
        assert rig.is_empty


@pytest.mark.rule("ORD-10", "OPS-4")
async def test_a_stop_returns_what_is_on_its_way_and_stored_messages_stay() -> None:
    sender = failing(LATER)
    sender.script("x", LATER)
    sender.takes_for["x"] = 5.0
    async with parking(sender=sender) as (rig, logs):
        await rig.publish(*grouped("a", "b"), *grouped("x", "y", group="h"), queue=PARK)
        await asyncio.sleep(2)
        logs.away = True
        await asyncio.sleep(5)  # x waits for the store
        rig.manager.stop()
        await asyncio.sleep(5)

        assert rig.is_empty
        assert [(each, delay) for _, each, delay in rig.witness.nacks] == [("x", 0), ("y", 0)]
        assert ended(rig) == {Fate.STORED: 2, Fate.RETURNED: 2}
        logs.away = False
        async with logs.open_order_log(QueueConfig(name="q", uri="memory://store/order:q")) as log:
            assert (await log.size()).messages == 2


@pytest.mark.rule("ORD-4", "CFG-9")
async def test_a_router_that_starts_again_knows_what_is_stored() -> None:
    async with parking(sender=failing(LATER)) as (rig, _):
        await rig.publish(*grouped("a", "b"), queue=PARK)
        await asyncio.sleep(2)
        rig.manager.stop()
        await asyncio.sleep(1)
        order = rig.manager._orders.pop("q")  # as after a restart
        await rig.publish(*grouped("c"), queue=PARK)
        await rig.manager.apply(rig.config)
        await asyncio.sleep(100)

        assert order_of(rig) is not order
        assert sent(rig) == [(0, "a"), (46, "a"), (47, "b"), (48, "c")]


@pytest.mark.rule("ORD-2", "CFG-7")
async def test_a_changed_queue_is_received_when_the_old_consumer_has_ended() -> None:
    sender = FakeSender(takes=10)
    async with parking(sender=sender) as (rig, _):
        await rig.publish(*grouped("a"), queue=PARK)
        await asyncio.sleep(1)
        changed = replace(PARK, max_messages=7)
        await rig.apply(pool(), queues=[changed])
        await rig.publish(*grouped("b"), *grouped("x", group="h"), queue=changed)
        await asyncio.sleep(60)

        assert [(each, at >= 10) for at, each in rig.sender.sent] == [
            ("a", False),
            ("b", True),
            ("x", True),
        ]


@pytest.mark.rule("ORD-2", "CFG-7")
@pytest.mark.parametrize("between", [[replace(PARK, max_messages=7)], []], ids=["other", "none"])
async def test_a_queue_that_changes_twice_waits_for_the_first_of_its_consumers(
    between: Sequence[QueueConfig],
) -> None:
    async with parking(sender=FakeSender(takes=10)) as (rig, _):
        await rig.publish(*grouped("a"), queue=PARK)
        await asyncio.sleep(1)
        await rig.apply(pool(), queues=between)
        await asyncio.sleep(1)
        await rig.apply(pool(), queues=[replace(PARK, max_messages=8)])
        await rig.publish(*grouped("x", group="h"), queue=PARK)
        await asyncio.sleep(60)

        assert [(each, at >= 10) for at, each in rig.sender.sent] == [("a", False), ("x", True)]


@pytest.mark.rule("ORD-5", "CFG-6")
async def test_what_a_removed_pool_returns_is_stored_and_goes_to_the_default_pool() -> None:
    async with parking(pool(concurrency=1), sender=FakeSender(takes=5)) as (rig, _):
        await rig.publish(*grouped("a", "b", "c"), *grouped("x", group="h"), queue=PARK)
        await asyncio.sleep(1)
        await rig.apply(queues=[PARK])
        await asyncio.sleep(0.5)
        await rig.publish(*grouped("d"), queue=PARK)
        await asyncio.sleep(60)

        order = [each for _, each in rig.sender.sent]
        assert [each for each in order if each != "x"] == ["a", "b", "c", "d"]
        assert rig.witness.nacks == []
        assert rig.sender.most_in_group == 1


@pytest.mark.slow
@pytest.mark.rule("ORD-6", "MED-4")
async def test_an_outage_of_ten_minutes_stores_few_of_the_messages_that_wait() -> None:
    sender = Outage(until=600.0)
    async with parking(pool(concurrency=20), sender=sender) as (rig, logs):
        ids = [f"{n:06}" for n in range(100_000)]
        for start in range(0, len(ids), 2_000):
            some = ids[start : start + 2_000]
            await rig.publish(
                *[grouped(each, group=f"g{int(each) % 500}")[0] for each in some], queue=PARK
            )
        await asyncio.sleep(600)

        stored = sum(len(ids) for _, ids in logs.appended)
        assert 0 < stored < 5_000
        assert sender.refused < 1_000


@pytest.mark.rule("ORD-6")
async def test_at_most_a_thousand_messages_are_stored_that_were_not_sent() -> None:
    async with parking(sender=failing(SOON)) as (rig, _):
        await rig.publish(*grouped("a"), queue=PARK)
        await asyncio.sleep(2)
        order = order_of(rig)
        order.size, order._unsent = StoreSize(messages=2_000), MAX_UNSENT_MESSAGES
        breaker = rig.breakers.of("http://target.test:80")
        while (ticket := breaker.enter(2.0)) is not None:
            breaker.report(ticket, 2.0, ok=False)
        await rig.publish(*grouped("x", "y", group="h"), queue=PARK)
        await asyncio.sleep(1)

        assert ("P", "h") not in order.groups
        assert len(rig.pool().blocked) == 1
        await asyncio.sleep(100)
        assert ended(rig)[Fate.DELIVERED] == 3


class Outage(FakeSender):
    """A target that answers nothing until it is back."""

    def __init__(self, until: float) -> None:
        super().__init__(takes=0.01)
        self.until = until
        self.refused = 0

    async def send(
        self,
        message: Message,
        attempt: int,
        timeout: float,
        span: Span,
        *,
        max_attempts: int | None = None,
        request: int = 1,
    ) -> Answer:
        answer = await super().send(
            message, attempt, timeout, span, max_attempts=max_attempts, request=request
        )
        if now() < self.until:
            self.refused += 1
            return REFUSED
        return answer


@pytest.mark.rule("ORD-6")
async def test_explain_says_behind_what_a_message_waits() -> None:
    async with parking(sender=failing(LATER)) as (rig, _):
        await rig.publish(*grouped("a", "b"), queue=PARK)
        await asyncio.sleep(2)

        journal = rig.manager.registry.journal
        (head,), (mate,) = journal.of_message("a"), journal.of_message("b")
        assert (head.fate, head.returned_for, head.due_at) == (Fate.STORED, 45, 46.0)
        assert (mate.fate, mate.error) == (Fate.STORED, "behind a")


@pytest.mark.rule("ORD-4", "ORD-7")
async def test_a_store_that_others_use_is_asked_about_each_batch() -> None:
    async with parking(sender=failing(LATER), is_shared=True) as (rig, logs):
        await rig.publish(*grouped("a"), queue=PARK)
        await asyncio.sleep(2)
        async with logs.open_order_log(order_of(rig).queue) as order_log:
            await order_log.append(
                [
                    StoredMessage(Publication(parse(each), each, "k"), "h", delay=20.0)
                    for each in grouped("x", group="h")  # by another router
                ]
            )
        await rig.publish(*grouped("y", group="h"), queue=PARK)
        await asyncio.sleep(5)
        await rig.publish(*grouped("b"), queue=PARK)  # its group is known to be stored
        await asyncio.sleep(60)

        order = [each for _, each in sent(rig)]
        assert order.index("x") < order.index("y")


@pytest.mark.rule("ORD-5")
async def test_a_group_that_another_router_stored_goes_on_behind_what_is_here() -> None:
    async with parking(sender=failing(LATER), is_shared=True) as (rig, logs):
        await rig.publish(*grouped("a", "b"), queue=PARK)
        await asyncio.sleep(0.5)
        others = [StoredMessage(Publication(parse(each), each, "k"), "g") for each in grouped("x")]
        async with logs.open_order_log(order_of(rig).queue) as order_log:
            await order_log.append(others)
        await rig.publish(*grouped("c"), queue=PARK)
        await asyncio.sleep(100)

        assert [ids for _, ids in logs.appended] == [["x"], ["a", "b", "c"]]
        assert [each for _, each in sent(rig)] == ["a", "x", "a", "b", "c"]


@pytest.mark.rule("ORD-7")
async def test_a_batch_comes_again_if_a_shared_store_does_not_answer() -> None:
    async with parking(sender=FakeSender(takes=1), is_shared=True) as (rig, logs):
        await asyncio.sleep(1)
        logs.away = True
        await rig.publish(*grouped("a"), queue=PARK)
        await asyncio.sleep(10)
        assert rig.sender.sent == []
        logs.away = False
        await asyncio.sleep(100)

        assert [each for _, each in sent(rig)] == ["a"]


@pytest.mark.rule("ORD-4")
async def test_a_group_stays_stored_while_its_state_is_unknown() -> None:
    async with parking(sender=failing(SOON)) as (rig, logs):
        await rig.publish(*grouped("a"), queue=PARK)
        await asyncio.sleep(5.5)
        logs.away = True
        await asyncio.sleep(5)
        assert ("P", "g") in order_of(rig).groups
        logs.away = False
        await asyncio.sleep(60)

        assert not order_of(rig).groups


@pytest.mark.rule("ORD-7", "P1")
async def test_a_bug_returns_the_messages_to_their_queue() -> None:
    async with parking(sender=failing(SOON)) as (rig, logs):
        await asyncio.sleep(1)
        logs.bug = RuntimeError("bug")
        await rig.publish(*grouped("a", "b"), queue=PARK)
        await asyncio.sleep(2.5)
        assert [(each, delay) for _, each, delay in rig.witness.nacks] == [("a", 30), ("b", 30)]
        logs.bug = None
        await asyncio.sleep(60)

        assert rig.is_empty


@pytest.mark.rule("ORD-7", "BRK-5")
async def test_a_lost_lease_opens_the_connection_again() -> None:
    async with parking(pool(concurrency=1), sender=FakeSender(takes=5)) as (rig, _):
        await rig.publish(*grouped("x", group="h"), *grouped("a", "b"), queue=PARK)
        await asyncio.sleep(1)
        for job in rig.manager.registry.tracker:
            if job.message.id == "a":
                job.lease_until = 0.5
        await asyncio.sleep(100)

        assert [each for _, each in sent(rig)] == ["x", "a", "b"]
        assert ended(rig)[Fate.FORFEITED] == 2
        assert rig.witness.nacks == []


class Forgetful(PassingBroker):
    """A connection that is told what the router lets go."""

    forgotten: ClassVar[list[str]] = []
    received: ClassVar[dict[Handle, str]] = {}

    @property
    def traits(self) -> Traits:
        return replace(super().traits, forget=self.forget)

    async def receive(self, limit: int) -> Sequence[ReceivedMessage]:
        messages = await super().receive(limit)
        self.received.update({each.handle: parse(each.body).id for each in messages})
        return messages

    def forget(self, handles: Sequence[Handle]) -> None:
        self.forgotten.extend(self.received[each] for each in handles)


class ForgetfulBrokers:
    def __init__(self, brokers: BrokerRegistry) -> None:
        self._brokers = brokers
        self.open_publisher = brokers.open_publisher

    @asynccontextmanager
    async def open_queue(self, queue: QueueConfig) -> AsyncIterator[Broker]:
        async with self._brokers.open_queue(queue) as broker:
            yield Forgetful(broker) if queue.uri == PARK.uri else broker


@asynccontextmanager
async def forgetting(**facts: Any) -> AsyncIterator[tuple[Rig, Faulty]]:
    Forgetful.forgotten, Forgetful.received = [], {}
    async with BrokerRegistry(worker_id="test", dedup_window=300) as registry:
        logs = Faulty(registry)
        async with running(
            pool(concurrency=1),
            sender=FakeSender(takes=5),
            queues=[PARK],
            brokers=ForgetfulBrokers(registry),
            order=order_store(logs, **facts),
        ) as rig:
            yield rig, logs


@pytest.mark.rule("ORD-3", "ORD-7")
async def test_a_broker_is_told_what_is_let_go_though_its_lease_lives() -> None:
    async with forgetting() as (rig, _):
        await rig.publish(*grouped("x", group="h"), *grouped("a", "b"), queue=PARK)
        await asyncio.sleep(1)
        for job in rig.manager.registry.tracker:
            if job.message.id == "a":
                job.lease_until = 0.5
        await asyncio.sleep(10)

        assert Forgetful.forgotten == ["b"]


@pytest.mark.rule("ORD-3", "ORD-7")
async def test_a_broker_is_told_what_is_let_go_because_the_store_does_not_answer() -> None:
    async with forgetting(is_shared=True) as (rig, logs):
        await asyncio.sleep(1)
        logs.away = True
        await rig.publish(*grouped("a", "b"), queue=PARK)
        await asyncio.sleep(1)

        assert Forgetful.forgotten == ["a", "b"]


@pytest.mark.rule("ORD-3", "CFG-10")
async def test_a_broker_is_told_what_is_let_go_when_its_connection_is_closed() -> None:
    async with forgetting() as (rig, _):
        await rig.publish(*grouped("a", "b"), queue=PARK)
        await asyncio.sleep(1)
        consumer = rig.manager.consumers["q"]
        for receiver in consumer.connections:
            receiver.settler.close()

        assert Forgetful.forgotten == ["a", "b"]
