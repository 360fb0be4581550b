"""What is special about SQS, tried on its stand-ins."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from msgspec.structs import replace

from router.brokers import BrokerRegistry
from router.brokers.sqs import SqsSettings
from router.brokers.sqs.broker import HELD_LEASE_SECONDS, Receipt
from router.brokers.workers import BrokerSettings
from router.core.config import QueueConfig
from router.core.message import ReceivedMessage
from router.ports import Broker, DataRefused, Disconnected, Nack, QueueRefused
from tests.contract.cases import (
    PARENT,
    SQS_IN_A_HURRY,
    TRACED,
    bodies,
    both_ends,
    publication,
    queue_at,
)
from tests.contract.sqs_place import SqsPlace
from tests.support.servers.cutting import CuttingProxy
from tests.support.servers.sqs import ENV
from tests.support.virtual_time import now

pytestmark = pytest.mark.anyio

PATIENT = BrokerSettings(SqsSettings(wait=5.0))
EITHER = pytest.mark.parametrize("stand_in", ["ministack", "moto"])


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENV.items():
        monkeypatch.setenv(name, value)


def open_brokers(
    settings: BrokerSettings = SQS_IN_A_HURRY,
) -> AbstractAsyncContextManager[BrokerRegistry]:
    return BrokerRegistry(worker_id="worker-1", dedup_window=300.0, settings=settings)


def fifo(place: SqsPlace) -> QueueConfig:
    return queue_at(place.server.new_queue(fifo=True))


def standard(place: SqsPlace) -> QueueConfig:
    return queue_at(place.server.new_queue(fifo=False))


async def publish(brokers: BrokerRegistry, queue: QueueConfig, *ids: str, group: str = "g") -> None:
    async with brokers.open_publisher(queue) as publisher:
        await publisher.publish([publication(each, group=group) for each in ids])


async def receive_all(broker: Broker, count: int) -> Sequence[ReceivedMessage]:
    received: list[ReceivedMessage] = []
    while len(received) < count:
        received += await broker.receive(10)
    return received


# The long poll.


@pytest.mark.rule("BRK-1", "OPS-4", "P1", "P3")
async def test_what_a_poll_brings_after_the_end_of_its_connection_is_returned_in_order(
    ministack: SqsPlace,
) -> None:
    queue = fifo(ministack)
    async with open_brokers(PATIENT) as brokers:
        async with brokers.open_queue(queue) as closed:
            polling = asyncio.ensure_future(closed.receive(10))
            await asyncio.sleep(0.1)
            closed.stop()
            nothing = await polling
        await publish(brokers, queue, "a", "b", "c")
        await asyncio.sleep(0.5)  # the poll that nobody waits for takes them
        async with brokers.open_queue(queue) as broker:
            started = now()
            again = await receive_all(broker, 3)
            took = now() - started

    assert list(nothing) == []
    assert bodies(again) == ["a", "b", "c"]
    assert [delivery.receive_count for delivery in again] == [2, 2, 2]
    assert took < 5


@pytest.mark.rule("OPS-4")
async def test_a_registry_closes_when_its_last_poll_has_ended(ministack: SqsPlace) -> None:
    async with open_brokers() as brokers:
        async with brokers.open_queue(standard(ministack)) as broker:
            polling = asyncio.ensure_future(broker.receive(10))
            await asyncio.sleep(0.1)
        stopped = now()
        assert list(await polling) == []

    assert 1 < now() - stopped < 4


@pytest.mark.rule("BRK-1")
async def test_after_a_batch_that_was_not_full_it_waits_a_moment(ministack: SqsPlace) -> None:
    queue = standard(ministack)
    async with open_brokers() as brokers, brokers.open_queue(queue) as broker:
        await publish(brokers, queue, *"abcd")
        await broker.receive(2)
        full = now()
        await broker.receive(10)
        partial = now()
        await publish(brokers, queue, "e")
        await broker.receive(10)

        assert partial - full < 0.1
        assert now() - partial >= 0.1


# Settling in tens.


@EITHER
@pytest.mark.rule("BRK-3")
async def test_of_a_batch_only_the_bad_entries_are_refused(
    stand_in: str, request: pytest.FixtureRequest
) -> None:
    place: SqsPlace = request.getfixturevalue(stand_in)
    queue = standard(place)
    async with open_brokers() as brokers, brokers.open_queue(queue) as broker:
        await publish(brokers, queue, "a", "b")
        received = await receive_all(broker, 2)
        good = [delivery.handle for delivery in received]
        unknown = Receipt("unknown", now(), now() + 30)

        kept = await broker.extend([good[0], unknown, good[1]], 30)
        refused = await broker.ack([good[0], unknown, good[1]])

        assert [(each.handle, each.stale) for each in kept] == [(unknown, True)]
        assert [(each.handle, each.stale) for each in refused] == [(unknown, True)]
        assert place.server.counts(queue.uri) == (0, 0)


@pytest.mark.rule("BRK-3")
async def test_more_than_ten_are_settled_by_one_ack(ministack: SqsPlace) -> None:
    queue = standard(ministack)
    async with open_brokers() as brokers, brokers.open_queue(queue) as broker:
        await publish(brokers, queue, *(str(number) for number in range(25)))
        received = await receive_all(broker, 25)

        refused = await broker.ack([delivery.handle for delivery in received])

        assert list(refused) == []
        assert ministack.server.counts(queue.uri) == (0, 0)


@EITHER
@pytest.mark.rule("BRK-3", "WQ-3")
async def test_a_handle_whose_lease_ended_is_not_used_even_where_it_would_be_taken(
    stand_in: str, request: pytest.FixtureRequest
) -> None:
    place: SqsPlace = request.getfixturevalue(stand_in)
    queue = queue_at(place.server.new_queue(fifo=False), lease=1.0)
    async with open_brokers() as brokers, brokers.open_queue(queue) as broker:
        await publish(brokers, queue, "a")
        (late,) = await receive_all(broker, 1)
        await asyncio.sleep(1.05)

        refused = await broker.ack([late.handle])

        assert [each.stale for each in refused] == [True]
        assert bodies(await receive_all(broker, 1)) == ["a"]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.rule("BRK-4", "FIFO-1", "OPS-4", "P3")
async def test_a_group_returned_one_by_one_comes_back_as_it_was(
    ministack: SqsPlace, *, reverse: bool
) -> None:
    queue = fifo(ministack)
    async with (
        open_brokers() as brokers,
        brokers.open_queue(queue) as one,
        brokers.open_queue(queue) as other,
    ):
        await publish(brokers, queue, "a", "b", "c")
        received = await receive_all(one, 3)
        waiting = asyncio.ensure_future(receive_all(other, 3))

        for delivery in reversed(received) if reverse else received:
            await one.nack([Nack(delivery.handle, 0)])
            await asyncio.sleep(0.2)

        assert bodies(await waiting) == ["a", "b", "c"]


@pytest.mark.rule("BRK-4", "FIFO-1", "P3")
async def test_mates_that_are_due_wait_for_a_failed_head(ministack: SqsPlace) -> None:
    queue = fifo(ministack)
    async with open_brokers() as brokers, brokers.open_queue(queue) as broker:
        await publish(brokers, queue, "a", "b", "c")
        head, *mates = await receive_all(broker, 3)
        failed = now()

        await broker.nack([Nack(head.handle, 2)])
        for mate in mates:
            await broker.nack([Nack(mate.handle, 1)])
        again = await receive_all(broker, 3)

        assert bodies(again) == ["a", "b", "c"]
        assert now() - failed >= 1.9


@pytest.mark.rule("BRK-4")
async def test_ten_messages_are_returned_in_one_call(ministack: SqsPlace) -> None:
    async with CuttingProxy(ministack.server.port) as proxy, open_brokers() as brokers:
        queue = queue_at(proxy.url(ministack.server.new_queue(fifo=False)))
        async with brokers.open_queue(queue) as broker:
            await publish(brokers, queue, *(str(number) for number in range(10)))
            received = await receive_all(broker, 10)
            before = proxy.requests

            refused = await broker.nack(
                [Nack(delivery.handle, 30 + n) for n, delivery in enumerate(received)]
            )

            assert (refused, proxy.requests - before) == ([], 1)
            assert ministack.server.counts(queue.uri) == (0, 10)


# Leases.


@pytest.mark.parametrize(("own", "asked", "lease"), [(40, None, 40), (5, None, 15), (40, 20.0, 20)])
@pytest.mark.rule("BRK-5")
async def test_a_lease_is_what_is_asked_for_or_the_queues_own_and_never_too_short(
    ministack: SqsPlace, own: int, asked: float | None, lease: float
) -> None:
    url = ministack.server.new_queue(fifo=False, visibility=own)
    queue = queue_at(url, asked)
    async with open_brokers(BrokerSettings()) as brokers, brokers.open_queue(queue) as broker:
        await publish(brokers, queue, "a")
        (delivery,) = await receive_all(broker, 1)

        assert broker.lease_seconds == lease
        assert delivery.lease_until == pytest.approx(now() + lease, abs=1)


@pytest.mark.rule("BRK-5", "P2")
async def test_a_lease_counts_from_the_hand_over_even_when_its_answer_is_late(
    ministack: SqsPlace,
) -> None:
    quick = BrokerSettings(SqsSettings(wait=1.0))
    async with CuttingProxy(ministack.server.port) as proxy, open_brokers(quick) as brokers:
        queue = queue_at(proxy.url(ministack.server.new_queue(fifo=False)))
        async with brokers.open_queue(queue) as broker:
            await publish(brokers, queue, "a")
            proxy.delay_answers(2)  # each part of one: it may come in two
            started = now()
            (delivery,) = await broker.receive(1)
            proxy.delay_answers(0)

        assert delivery.lease_until is not None
        assert delivery.lease_until < started + 1 + 30 + 0.5


@pytest.mark.rule("BRK-5")
async def test_no_lease_is_extended_beyond_twelve_hours(ministack: SqsPlace) -> None:
    async with open_brokers() as brokers, brokers.open_queue(standard(ministack)) as broker:
        old = Receipt("unknown: asked, the server would refuse it too", now() - 43_180, now() + 10)

        (refused,) = await broker.extend([old], 30)

        assert (refused.handle, refused.stale) == (old, True)


@pytest.mark.rule("ROUTE-5", "BRK-5")
async def test_what_is_held_is_hidden_for_five_minutes_by_calls_of_ten(
    ministack: SqsPlace,
) -> None:
    brief = BrokerSettings(SqsSettings(shortest_lease=3.0))
    async with CuttingProxy(ministack.server.port) as proxy, open_brokers(brief) as brokers:
        queue = queue_at(proxy.url(ministack.server.new_queue(fifo=False)), 3.0)
        async with brokers.open_queue(queue) as broker:
            await publish(brokers, queue, *map(str, range(25)))
            held = [each.handle for each in await receive_all(broker, 25)]
            before = proxy.requests

            refused = await broker.extend(held, HELD_LEASE_SECONDS)
            calls = proxy.requests - before
            await asyncio.sleep(3.5)

            assert (refused, calls) == ([], 3)
            assert ministack.server.counts(queue.uri) == (0, 25)


# Trouble.


@pytest.mark.rule("BRK-6", "P1")
async def test_a_server_stopped_and_started_costs_a_receive_and_no_message(
    ministack: SqsPlace,
) -> None:
    queue = standard(ministack)
    async with open_brokers() as brokers, brokers.open_queue(queue) as broker:
        await publish(brokers, queue, "a", "b")
        (first,) = await broker.receive(1)
        polling = asyncio.ensure_future(receive_all(broker, 3))
        await asyncio.sleep(0.3)

        async with ministack.stopped(queue):
            with pytest.raises(Disconnected):
                await polling
            (unsettled,) = await broker.ack([first.handle])

        assert not unsettled.stale
        assert list(await broker.ack([first.handle])) == []
        assert ministack.server.counts(queue.uri) == (0, 1)


@pytest.mark.rule("BRK-3", "BRK-6", "P1")
async def test_an_ack_whose_answer_was_cut_off_is_tried_again(ministack: SqsPlace) -> None:
    async with CuttingProxy(ministack.server.port) as proxy, open_brokers() as brokers:
        queue = queue_at(proxy.url(ministack.server.new_queue(fifo=False)))
        async with brokers.open_queue(queue) as broker:
            await publish(brokers, queue, "a", "b")
            first, second = await receive_all(broker, 2)

            before = proxy.requests
            proxy.cut_next_answer()
            await broker.ack([first.handle])
            tries = proxy.requests - before
            unsettled = await broker.ack([second.handle])

            assert tries == 2  # the second one found it removed
            assert list(unsettled) == []
            assert ministack.server.counts(queue.uri) == (0, 0)


@pytest.mark.rule("BRK-6")
async def test_a_silent_server_is_noticed(ministack: SqsPlace) -> None:
    quick = BrokerSettings(SqsSettings(wait=1.0))
    queue = standard(ministack)
    async with (
        open_brokers(quick) as brokers,
        brokers.open_queue(queue) as broker,
        ministack.frozen(queue),
    ):
        started = now()
        with pytest.raises(Disconnected, match="not answered in time"):
            await broker.receive(10)

        assert now() - started < 8


@pytest.mark.rule("CFG-7")
async def test_a_queue_that_is_not_there_is_refused(ministack: SqsPlace) -> None:
    url = f"{ministack.server.url}/000000000000/nowhere"
    async with open_brokers() as brokers:
        with pytest.raises(QueueRefused, match="QueueDoesNotExist"):
            async with brokers.open_queue(queue_at(url)):
                pass


@pytest.mark.rule("CFG-7", "BRK-6")
async def test_an_address_without_an_answer_is_unreachable() -> None:
    async with open_brokers() as brokers:
        with pytest.raises(Disconnected):
            async with brokers.open_queue(queue_at("http://127.0.0.1:9/000000000000/orders")):
                pass


@pytest.mark.rule("CFG-7")
async def test_without_credentials_a_queue_is_refused_by_saying_so(
    ministack: SqsPlace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    async with open_brokers() as brokers:
        with pytest.raises(QueueRefused, match="no AWS credentials"):
            async with brokers.open_queue(standard(ministack)):
                pass


@pytest.mark.rule("OPS-5")
async def test_the_client_librarys_lines_that_hold_credentials_are_never_logged(
    ministack: SqsPlace, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with open_brokers() as brokers, brokers.open_queue(standard(ministack)):
        assert not logging.getLogger("botocore.parsers").isEnabledFor(logging.DEBUG)


# Names, publishing.


@pytest.mark.rule("CFG-7")
async def test_a_queue_can_be_named_and_found_at_another_endpoint(ministack: SqsPlace) -> None:
    name = ministack.server.new_queue(fifo=True).rpartition("/")[2]
    settings = BrokerSettings(SqsSettings(wait=2.0, endpoint=f"{ministack.server.url}/"))
    async with (
        open_brokers(settings) as brokers,
        both_ends(brokers, queue_at(f"sqs://{name}")) as ends,
    ):
        await ends.publisher.publish([publication("a")])

        assert ends.broker.holds_groups
        assert bodies(await ends.broker.receive(10)) == ["a"]


@pytest.mark.rule("WQ-1")
async def test_ids_and_groups_that_sqs_would_refuse_are_published_all_the_same(
    ministack: SqsPlace,
) -> None:
    odd = ["an id with spaces", "é" * 200, "x" * 512]
    async with open_brokers() as brokers, both_ends(brokers, fifo(ministack)) as ends:
        added = await ends.publisher.publish([publication(each, group=each) for each in odd])
        again = await ends.publisher.publish([publication(each, group=each) for each in odd])

        assert (added, again) == ([True] * 3, [False] * 3)
        assert sorted(bodies(await receive_all(ends.broker, 3))) == sorted(odd)


@pytest.mark.rule("BRK-2")
@pytest.mark.parametrize("body", [b"", b"\xff", b"a\x00b"])
async def test_a_body_that_sqs_does_not_carry_is_refused_by_name(
    ministack: SqsPlace, body: bytes
) -> None:
    async with open_brokers() as brokers, both_ends(brokers, standard(ministack)) as ends:
        with pytest.raises(DataRefused, match="message 'a'"):
            await ends.publisher.publish([publication("a", body=body)])


@pytest.mark.rule("BRK-1")
async def test_large_messages_do_not_share_a_call(ministack: SqsPlace) -> None:
    body = b"x" * 200 * 1024
    async with open_brokers() as brokers, both_ends(brokers, standard(ministack)) as ends:
        await ends.publisher.publish([publication(each, body=body) for each in "abc"])

        assert [len(each.body) for each in await receive_all(ends.broker, 3)] == [len(body)] * 3


# Traces.


def send(place: SqsPlace, queue: QueueConfig, where: str, attributes: Mapping[str, str]) -> None:
    given = {
        name: {"DataType": "String", "StringValue": value} for name, value in attributes.items()
    }
    place.server.call("SendMessage", {"QueueUrl": queue.uri, "MessageBody": "a", where: given})


@EITHER
@pytest.mark.rule("MED-1")
async def test_a_publishers_trace_comes_in_attributes(
    stand_in: str, request: pytest.FixtureRequest
) -> None:
    place: SqsPlace = request.getfixturevalue(stand_in)
    queue = standard(place)
    send(place, queue, "MessageAttributes", TRACED)

    async with open_brokers() as brokers, brokers.open_queue(queue) as broker:
        (delivery,) = await receive_all(broker, 1)

    assert delivery.parent == PARENT


@pytest.mark.rule("MED-1")
async def test_a_publishers_trace_comes_as_aws_itself_writes_it(moto: SqsPlace) -> None:
    queue = standard(moto)
    root = f"1-{PARENT.trace_id[:8]}-{PARENT.trace_id[8:]}"
    header = f"Root={root};Parent={PARENT.span_id};Sampled=1"
    send(moto, queue, "MessageSystemAttributes", {"AWSTraceHeader": header})

    async with open_brokers() as brokers, brokers.open_queue(queue) as broker:
        (delivery,) = await receive_all(broker, 1)

    assert delivery.parent == replace(PARENT, state="")
