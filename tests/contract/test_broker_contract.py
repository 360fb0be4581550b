"""What every broker must do. Each adapter runs these same tests."""

import asyncio
import threading
import time
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

import pytest
from msgspec.structs import replace

from router.brokers import BrokerRegistry
from router.brokers.catalog import installed
from router.brokers.kit import consuming
from router.core.broker import WhenFull
from router.core.message import UNTRIED, ReceivedMessage, Tally
from router.core.outcome import Failure
from router.ports import Broker, Disconnected, Nack
from tests.contract.cases import (
    CASES,
    Case,
    Ends,
    bodies,
    both_ends,
    is_empty,
    name_of,
    publication,
    receive_one,
)
from tests.simulation.plan import START, Kind
from tests.support.virtual_time import now

pytestmark = pytest.mark.anyio

TRIED = Tally(failures=1, requests=3)
HTTP_500 = Failure("HTTP_500", "HTTP 500", 500)
MALFORMED = b"\x00\xff{not json"


async def depth_of(broker: Broker) -> tuple[int, int] | None:
    depth = await broker.depth()
    return None if depth is None else (depth.waiting, depth.in_flight)


@pytest.mark.rule("SIM-3")
def test_every_model_of_the_simulation_runs_these_tests_beside_a_real_broker() -> None:
    """With the same traits: a model that differs from its server fails where the server passes."""
    traits = {
        each.model: (each.leases, each.keeps_tally, each.drops_duplicates, each.any_body)
        for each in CASES
        if each.model is not None
    }
    real = {
        each.name: (each.leases, each.keeps_tally, each.drops_duplicates, each.any_body)
        for each in CASES
        if each.model is None
    }

    assert traits == {
        Kind.POSTGRES: real["postgres"],
        Kind.SQS_FIFO: real["sqs-fifo"],
        Kind.SQS: real["sqs"],
        Kind.ACTIVEMQ: real["activemq"],
        Kind.NATS: real["nats"],
        Kind.RABBITMQ: real["rabbitmq-classic"],
    }


@pytest.mark.rule("BRK-8")
async def test_the_description_says_what_the_broker_does(ends: Ends) -> None:
    broker, described = ends.broker, installed().broker_of(ends.queue.uri)

    assert described.holds_groups(ends.queue.uri) == broker.holds_groups
    keeps_letters = described.holds_letters and broker.holds_groups
    assert broker.traits.holds_letters == keeps_letters
    assert (described.when_full is WhenFull.FILTER) == (broker.traits.selector is not None)
    assert described.when_full is WhenFull.DEFER or not broker.traits.defers


@pytest.mark.rule("BRK-1")
async def test_what_is_published_is_received_in_order(ends: Ends) -> None:
    added = await ends.publisher.publish([publication("a"), publication("b"), publication("c")])

    batch = await ends.broker.receive(10)

    assert added == [True, True, True]
    assert bodies(batch) == ["a", "b", "c"]
    assert [(received.receive_count, received.tally) for received in batch] == [(1, UNTRIED)] * 3
    assert len({name_of(received) for received in batch}) == 3


@pytest.mark.rule("BRK-1")
async def test_no_more_than_the_limit_is_handed_over(ends: Ends) -> None:
    await ends.publisher.publish([publication(str(number)) for number in range(5)])

    assert bodies(await ends.broker.receive(2)) == ["0", "1"]
    assert bodies(await ends.broker.receive(10)) == ["2", "3", "4"]


@pytest.mark.rule("BRK-1")
async def test_a_receive_waits_for_what_comes(ends: Ends) -> None:
    waiting = asyncio.ensure_future(ends.broker.receive(10))
    await asyncio.sleep(0.05)
    await ends.publisher.publish([publication("a")])

    assert bodies(await waiting) == ["a"]


@pytest.mark.rule("BRK-3")
async def test_an_acked_message_is_gone(ends: Ends) -> None:
    await ends.publisher.publish([publication("a")])
    received = await receive_one(ends.broker)

    unsettled = await ends.broker.ack([received.handle])

    assert not unsettled
    assert await depth_of(ends.broker) in {None, (0, 0)}
    assert await is_empty(ends.broker)


@pytest.mark.rule("OPS-3")
async def test_the_depth_tells_what_waits_and_what_is_out(ends: Ends) -> None:
    await ends.publisher.publish([publication("a"), publication("b"), publication("c")])
    await receive_one(ends.broker)

    assert await depth_of(ends.broker) in {None, (2, 1)}


@pytest.mark.rule("BRK-4", "WQ-5")
async def test_a_nacked_message_comes_back_no_sooner_than_asked(case: Case, ends: Ends) -> None:
    await ends.publisher.publish([publication("a")])
    first = await receive_one(ends.broker)
    returned = now()

    await ends.broker.nack([Nack(first.handle, case.short, TRIED, HTTP_500)])
    second = await receive_one(ends.broker)

    assert returned + case.short - 0.01 <= now() < returned + case.short + 1
    assert (name_of(second), second.body) == (name_of(first), b"a")
    assert (second.receive_count, second.tally) == (2, TRIED if case.keeps_tally else UNTRIED)
    assert second.handle != first.handle


# Models of servers that say when a message was published, by the clock of their world.
DATES_ITSELF: Final = {Kind.ACTIVEMQ, Kind.NATS, Kind.SQS, Kind.SQS_FIFO}


def world_clock() -> float:
    """Return the time in a world that has just begun."""
    return START + now()


@pytest.mark.rule("BRK-9")
async def test_a_message_says_when_it_was_first_published_after_retries_too(
    case: Case, brokers: BrokerRegistry, tmp_path: Path
) -> None:
    clock = now if case.model is not None or case.virtual_time else time.time
    if case.model in DATES_ITSELF:
        clock = world_clock
    queue = replace(case.queue(tmp_path), max_age=3600.0)
    before = clock()
    async with both_ends(brokers, queue) as ends:
        await ends.publisher.publish([publication("a")])
        first = await receive_one(ends.broker)
        await ends.broker.nack([Nack(first.handle, case.short, TRIED)])
        again = await receive_one(ends.broker)

    assert first.published_at is not None
    assert again.published_at is not None
    # A wall clock goes on while virtual time stands still. RabbitMQ keeps whole seconds.
    assert case.virtual_time or before - 1.1 <= first.published_at <= clock() + 1
    assert case.virtual_time or abs(again.published_at - first.published_at) <= 0.001


@pytest.mark.rule("FIFO-1", "POOL-7")
async def test_what_has_no_order_waits_for_no_other(case: Case, ends: Ends) -> None:
    await ends.publisher.publish([publication("a"), publication("b")])
    first, second = await several(ends.broker, 2)
    delays = {first.handle: case.short, second.handle: case.short + 0.8}
    back = [Nack(handle, delay, TRIED, in_order=False) for handle, delay in delays.items()]

    await ends.broker.nack(back)

    assert bodies(await ends.broker.receive(10)) == [first.body.decode()]


@pytest.mark.rule("BRK-4")
async def test_a_message_nacked_without_delay_comes_back_at_once(ends: Ends) -> None:
    await ends.publisher.publish([publication("a"), publication("b")])
    first = await receive_one(ends.broker)

    await ends.broker.nack([Nack(first.handle, 0)])

    assert bodies(await ends.broker.receive(10)) == ["a", "b"]


@pytest.mark.rule("BRK-4", "P3")
async def test_many_are_returned_in_one_call_and_keep_their_order(ends: Ends) -> None:
    names = ["a", "b", "c", "d"]
    await ends.publisher.publish([publication(name) for name in names])
    batch = await several(ends.broker, len(names))

    refused = await ends.broker.nack([Nack(each.handle) for each in batch])
    again = await several(ends.broker, len(names))

    assert not refused
    assert bodies(again) == bodies(batch)


@pytest.mark.rule("BRK-4", "WQ-3", "WQ-5")
async def test_each_of_many_has_its_own_delay_and_a_settled_one_stops_no_other(
    case: Case, ends: Ends
) -> None:
    await ends.publisher.publish([publication("a"), publication("b"), publication("c")])
    late, gone, soon = await several(ends.broker, 3)
    await ends.broker.ack([gone.handle])
    returned = now()

    refused = await ends.broker.nack(
        [
            Nack(late.handle, 2 * case.short, TRIED, HTTP_500),
            Nack(gone.handle, case.short),
            Nack(soon.handle, case.short),
        ]
    )
    first = await receive_one(ends.broker)
    first_after = now() - returned
    second = await receive_one(ends.broker)
    second_after = now() - returned

    assert [(one.handle, one.stale) for one in refused] == [(gone.handle, True)]
    assert (first.body, second.body) == (soon.body, late.body)
    assert first_after >= case.short - 0.01
    assert second_after >= 2 * case.short - 0.01
    assert second.tally == (TRIED if case.keeps_tally else UNTRIED)


@pytest.mark.rule("BRK-4")
async def test_a_delayed_message_wakes_who_was_waiting_before(case: Case, ends: Ends) -> None:
    if not case.prompt:
        pytest.skip("it looks for what became due only once a second")
    await ends.publisher.publish([publication("a")])
    first = await receive_one(ends.broker)
    waiting = asyncio.ensure_future(ends.broker.receive(1))
    await asyncio.sleep(0.01)
    returned = now()

    await ends.broker.nack([Nack(first.handle, case.short)])

    assert bodies(await waiting) == ["a"]
    assert now() < returned + case.short + 1


@pytest.mark.rule("BRK-5", "WQ-4", "P1")
async def test_a_message_whose_lease_ended_is_handed_out_again(case: Case, brief: Ends) -> None:
    await brief.publisher.publish([publication("a")])
    first = await receive_one(brief.broker)
    received = now()

    second = await receive_one(brief.broker)

    assert received + case.short - 0.1 <= now() < received + case.short + 1
    assert (second.broker_id, second.receive_count) == (first.broker_id, 2)
    assert first.lease_until is not None
    assert first.lease_until <= received + case.short


@pytest.mark.rule("BRK-5", "WQ-4")
async def test_an_extended_lease_keeps_the_message_ours(case: Case, brief: Ends) -> None:
    await brief.publisher.publish([publication("a")])
    received = await receive_one(brief.broker)

    lost = [*await brief.broker.extend([received.handle], 3 * case.short)]
    await asyncio.sleep(0.5 * case.short)
    lost += await brief.broker.extend([received.handle], 3 * case.short)
    await asyncio.sleep(0.75 * case.short)  # no more: some brokers extend by one lease only

    assert not lost
    assert not await brief.broker.ack([received.handle])


@pytest.mark.rule("WQ-3")
async def test_a_stale_handle_settles_nothing(brief: Ends) -> None:
    await brief.publisher.publish([publication("a")])
    stale = (await receive_one(brief.broker)).handle
    live = (await receive_one(brief.broker)).handle
    await brief.broker.extend([live], 30)

    refused = await brief.broker.ack([stale, live])
    kept = await brief.broker.extend([stale], 30)

    assert [(one.handle, one.stale) for one in refused] == [(stale, True)]
    assert [(one.handle, one.stale) for one in kept] == [(stale, True)]
    refused = await brief.broker.nack([Nack(stale, 0)])
    assert [(one.handle, one.stale) for one in refused] == [(stale, True)]


@pytest.mark.rule("WQ-3")
async def test_a_settled_handle_cannot_give_the_message_back(ends: Ends) -> None:
    await ends.publisher.publish([publication("a")])
    received = await receive_one(ends.broker)
    await ends.broker.ack([received.handle], error="HTTP 400")

    refused = await ends.broker.nack([Nack(received.handle, 0)])
    assert [(one.handle, one.stale) for one in refused] == [(received.handle, True)]

    assert await is_empty(ends.broker)


@pytest.mark.rule("P1")
async def test_what_a_closed_connection_held_is_handed_out_again(
    case: Case, brokers: BrokerRegistry, tmp_path: Path
) -> None:
    queue = case.queue(tmp_path, lease=case.short)
    async with both_ends(brokers, queue) as closed:
        await closed.publisher.publish([publication("a")])
        await receive_one(closed.broker)

    async with brokers.open_queue(queue) as broker:
        received = await receive_one(broker)

    assert (received.body, received.receive_count) == (b"a", 2)


@pytest.mark.rule("P3", "FIFO-1", "WQ-2")
async def test_a_group_is_held_back_while_one_of_it_is_out(ends: Ends) -> None:
    if not ends.broker.holds_groups:
        pytest.skip("it holds no group back")
    await ends.publisher.publish([publication("a", group="g"), publication("b", group="g")])
    await ends.publisher.publish([publication("c", group="h")])
    first = await receive_one(ends.broker)

    others = await ends.broker.receive(10)
    await ends.broker.ack([first.handle])
    released = await ends.broker.receive(10)

    assert (bodies([first]), bodies(others), bodies(released)) == (["a"], ["c"], ["b"])


@pytest.mark.rule("P3", "FIFO-1", "WQ-2")
async def test_a_group_waits_for_its_first_message(case: Case, ends: Ends) -> None:
    if not ends.broker.holds_groups:
        pytest.skip("it holds no group back")
    await ends.publisher.publish([publication("a", group="g"), publication("b", group="g")])
    first = await receive_one(ends.broker)
    returned = now()

    await ends.broker.nack([Nack(first.handle, case.short)])
    batch = [*await ends.broker.receive(10)]

    assert now() >= returned + case.short - 0.01
    if len(batch) == 1:  # it hands out no more than one of a group
        await ends.broker.ack([batch[0].handle])
        batch += await ends.broker.receive(10)
    assert bodies(batch) == ["a", "b"]


@pytest.mark.rule("P3")
async def test_a_group_comes_in_the_order_of_publication(ends: Ends) -> None:
    numbers = [str(number) for number in range(20)]
    await ends.publisher.publish([publication(number, group="g") for number in numbers])

    received: list[str] = []
    while len(received) < len(numbers):
        batch = await ends.broker.receive(7)
        received += bodies(batch)
        await ends.broker.ack([received.handle for received in batch])

    assert received == numbers


@pytest.mark.rule("WQ-1")
async def test_a_message_published_twice_is_there_once(case: Case, ends: Ends) -> None:
    if not case.drops_duplicates:
        pytest.skip("it knows no duplicates")
    first = await ends.publisher.publish([publication("a"), publication("a")])
    received = await receive_one(ends.broker)
    while_out = await ends.publisher.publish([publication("a")])
    await ends.broker.ack([received.handle])
    when_done = await ends.publisher.publish([publication("a"), publication("b")])

    assert (first, while_out, when_done) == ([True, False], [False], [False, True])
    assert bodies(await ends.broker.receive(10)) == ["b"]


@pytest.mark.rule("WQ-1", "ID-2", "ID-3")
async def test_without_a_key_only_what_is_identical_is_a_duplicate(case: Case, ends: Ends) -> None:
    first, other = [
        replace(publication("a", body=each), dedup_key=None) for each in (b"first", b"other")
    ]

    together = await ends.publisher.publish([first, other, first])
    later = await ends.publisher.publish([other])

    new = not case.compares_bodies
    assert (together, later) == ([True, True, new], [new])
    received = await several(ends.broker, 4 if new else 2)
    assert set(bodies(received)) == {"first", "other"}


@pytest.mark.rule("WQ-1", "ID-3")
@pytest.mark.parametrize("key", [None, "a key"])
async def test_what_died_may_be_published_again(case: Case, ends: Ends, key: str | None) -> None:
    if key is not None and case.drops_duplicates and not case.compares_bodies:
        pytest.skip("the broker itself remembers explicit keys, whatever became of their message")
    item = replace(publication("a"), dedup_key=key)
    await ends.publisher.publish([item])
    received = await receive_one(ends.broker)
    await ends.broker.ack([received.handle], error="HTTP 404")

    assert await ends.publisher.publish([item]) == [True]
    assert bodies([await receive_one(ends.broker)]) == ["a"]


async def several(broker: Broker, number: int) -> list[ReceivedMessage]:
    received: list[ReceivedMessage] = []
    while len(received) < number:
        received += await broker.receive(number - len(received))
    return received


@pytest.mark.rule("BRK-2")
@pytest.mark.parametrize(
    "body",
    [b"", MALFORMED, "žluťoučký 🐎".encode(), b"x" * 256 * 1024],
    ids=["empty", "malformed", "unicode", "large"],
)
async def test_a_body_passes_through_unread(case: Case, ends: Ends, body: bytes) -> None:
    if not case.any_body and body in {b"", MALFORMED}:
        pytest.skip("it carries text only")
    await ends.publisher.publish([publication("a", body=body)])

    assert (await receive_one(ends.broker)).body == body


@pytest.mark.rule("BRK-2", "P5")
@pytest.mark.parametrize(
    "body",
    [b'{"messageGroupId": "\xff"}', b'{"id": ' + b"[" * 5000],
    ids=["not UTF-8", "deep"],
)
async def test_b7_a_body_that_cannot_be_read_is_returned_like_any_other(
    case: Case, ends: Ends, body: bytes
) -> None:
    if not case.any_body:
        pytest.skip("it carries text only")
    await ends.publisher.publish([publication("a", body=body)])
    first = await receive_one(ends.broker)
    await ends.broker.nack([Nack(first.handle, case.short, TRIED)])

    again = await receive_one(ends.broker)

    assert again.body == body
    assert await ends.broker.ack([again.handle]) == []


@pytest.mark.rule("P1", "P4")
async def test_b8_large_messages_come_through_a_small_window(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consuming, "WINDOW_BYTES", 1024 * 1024)
    filler = "x" * 100 * 1024
    sent = [f"{number}{filler}" for number in range(30)]
    await ends.publisher.publish([publication(each[:2], body=each.encode()) for each in sent])
    received: list[str] = []
    losses: list[str] = []
    while len(received) < len(sent):
        try:
            async with ends.brokers.open_queue(ends.queue) as broker:
                while len(received) < len(sent):
                    batch = await broker.receive(3)
                    received += bodies(batch)
                    assert await broker.ack([each.handle for each in batch]) == []
        except Disconnected as lost:
            losses.append(str(lost))

    assert sorted(received) == sorted(sent)
    assert len(losses) <= 3
    assert all("prefetch" in each for each in losses)


@pytest.mark.rule("P1", "P2")
async def test_a_thousand_messages_over_four_connections_arrive_once_each(
    case: Case, ends: Ends
) -> None:
    if not case.ample:
        pytest.skip("each of its calls takes the longer the more messages wait")
    numbers = [str(number) for number in range(1000)]
    await ends.publisher.publish(
        [publication(number, group=f"g{int(number) % 30}") for number in numbers]
    )
    received: Counter[str] = Counter()

    async def consume(broker: Broker) -> None:
        while received.total() < len(numbers):
            batch = await broker.receive(20)
            received.update(bodies(batch))
            await broker.ack([received.handle for received in batch])
        for other in connections:
            other.stop()  # they wait for a message that never comes

    async with AsyncExitStack() as stack, asyncio.TaskGroup() as consumers:
        connections = [
            await stack.enter_async_context(ends.brokers.open_queue(ends.queue)) for _ in range(4)
        ]
        for number, connection in enumerate(connections):
            consumers.create_task(consume(connection), name=f"consumer {number}")

    assert received == Counter(numbers)


@pytest.mark.rule("BRK-1")
async def test_a_stop_ends_a_receive_and_every_later_one(ends: Ends) -> None:
    waiting = asyncio.ensure_future(ends.broker.receive(1))
    await asyncio.sleep(0.05)
    started = now()

    ends.broker.stop()

    assert (list(await waiting), list(await ends.broker.receive(1))) == ([], [])
    assert now() < started + 1


@pytest.mark.rule("BRK-1")
async def test_a_connection_can_be_closed_while_it_receives(ends: Ends) -> None:
    async with ends.brokers.open_queue(ends.queue) as broker:
        waiting = asyncio.ensure_future(broker.receive(1))
        await asyncio.sleep(0.05)

    assert list(await waiting) == []


@pytest.mark.rule("BRK-6", "P1")
async def test_an_outage_loses_nothing(case: Case, ends: Ends) -> None:
    if case.outage is None:
        pytest.skip("nothing can make it unreachable")
    await ends.publisher.publish([publication("a")])
    received = await receive_one(ends.broker)

    async def publish_in_the_end() -> None:
        while True:
            try:
                await ends.publisher.publish([publication("b")])
            except Disconnected:
                await asyncio.sleep(0.05)
            else:
                return

    async with asyncio.TaskGroup() as tasks, case.outage(ends.queue):
        tasks.create_task(publish_in_the_end(), name="publish")
        await asyncio.sleep(0.5)
    unsettled = await ends.broker.ack([received.handle])

    assert not unsettled
    assert bodies(await ends.broker.receive(10)) == ["b"]


@pytest.mark.rule("BRK-6")
async def test_fifty_openings_leave_nothing_behind(
    case: Case, brokers: BrokerRegistry, tmp_path: Path
) -> None:
    queue = case.queue(tmp_path)

    async def open_and_close() -> None:
        async with both_ends(brokers, queue) as ends:
            await ends.publisher.publish([publication("a")])
            await ends.broker.depth()

    def belongings() -> tuple[int, int, int]:
        files = len(list(Path("/proc/self/fd").iterdir()))
        return len(asyncio.all_tasks()), threading.active_count(), files

    for _ in range(8):  # until what is made once per process has been made
        await open_and_close()
    before = belongings()
    for _ in range(50):
        await open_and_close()

    assert belongings() <= before
