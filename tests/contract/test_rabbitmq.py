"""What RabbitMQ does that no other broker does, and how we stand it."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import aio_pika
import pytest
from msgspec.structs import replace

from router.brokers import BrokerRegistry
from router.brokers.rabbitmq import RabbitSettings
from router.brokers.rabbitmq import broker as rabbitmq_broker
from router.brokers.rabbitmq import connection as rabbitmq_connection
from router.brokers.rabbitmq.connection import UNSAVED_SECONDS, Table
from router.brokers.rabbitmq.limits import DeliveryLimit
from router.brokers.workers import BrokerSettings
from router.core.config import Ordering, QueueConfig
from router.core.identity import key_of
from router.core.message import UNTRIED, Tally
from router.core.raw import RawRoute
from router.ports import Broker, BrokerError, Depth, Disconnected, Nack, QueueRefused
from tests.acceptance.process import eventually
from tests.contract.cases import (
    PARENT,
    TRACED,
    Ends,
    bodies,
    both_ends,
    is_empty,
    publication,
    receive_one,
    receive_tried,
    reopened,
    several,
)
from tests.contract.rabbitmq_place import RabbitPlace
from tests.support.cable import cable_to
from tests.support.proxy import Proxy, proxy_to
from tests.support.servers.rabbitmq import RabbitServer

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

KINDS = ("classic", "quorum")
TRIED = Tally(failures=1, requests=1)
BASIC_ACK = b"\x00\x3c\x00\x50"  # class and method, as they go over the wire
FLOW_OK = b"\x00\x14\x00\x15"  # tells that an ACK before it was heard


@pytest.fixture
def server(rabbitmq: RabbitPlace) -> RabbitServer:
    return rabbitmq.server


@pytest.fixture
def name(rabbitmq: RabbitPlace) -> str:
    return rabbitmq.new_queue()


@pytest.fixture
async def brokers(anyio_backend: object, server: RabbitServer) -> AsyncIterator[BrokerRegistry]:
    del anyio_backend  # asked for only to run on its loop
    settings = BrokerSettings(RabbitSettings(server.url))
    async with BrokerRegistry(
        worker_id="worker-1", dedup_window=300.0, settings=settings
    ) as brokers:
        yield brokers


def queue(server: RabbitServer, name: str, *options: str) -> QueueConfig:
    given = "&".join((f"queue={name}", *options))
    return QueueConfig(name="orders", uri=f"{server.url}?{given}")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture
async def ends(
    server: RabbitServer, name: str, brokers: BrokerRegistry, kind: str
) -> AsyncIterator[Ends]:
    async with both_ends(brokers, queue(server, name, f"type={kind}")) as ends:
        yield ends


@pytest.fixture
async def classic(server: RabbitServer, name: str, brokers: BrokerRegistry) -> AsyncIterator[Ends]:
    async with both_ends(brokers, queue(server, name, "type=classic")) as ends:
        yield ends


@asynccontextmanager
async def bare_channel(server: RabbitServer) -> AsyncIterator[aio_pika.abc.AbstractChannel]:
    """What others do at this broker."""
    async with await aio_pika.connect(server.url) as connection, connection.channel() as channel:
        yield channel


async def control(server: RabbitServer, *words: str) -> str:
    return await asyncio.to_thread(server.control, *words)


# Delays.


@pytest.mark.rule("BRK-4", "WQ-5")
async def test_a_delay_between_two_steps_is_waited_for_in_hops(ends: Ends) -> None:
    await ends.publisher.publish([publication("a")])
    first = await receive_one(ends.broker)
    returned = time.monotonic()

    await ends.broker.nack([Nack(first.handle, 3.0, Tally(failures=1, requests=3))])
    second = await receive_one(ends.broker)

    assert 3.0 <= time.monotonic() - returned < 5
    assert (second.claimed_id, second.tally, second.receive_count) == ("a", Tally(1, 3), 2)


@pytest.mark.rule("BRK-4", "FIFO-1")
@pytest.mark.parametrize("delay", [1.0, 2.7])  # one step, and two
async def test_what_is_delayed_one_after_the_other_comes_back_together(
    ends: Ends, delay: float
) -> None:
    numbers = [str(number) for number in range(20)]
    await ends.publisher.publish([publication(number, group="g") for number in numbers])
    first, *mates = await several(ends.broker, 20)

    await ends.broker.nack([Nack(first.handle, delay)])
    await asyncio.sleep(0.3)
    for delivery in mates:
        await ends.broker.nack([Nack(delivery.handle, delay)])

    # In one batch: if the first one fails again, none of the others may have gone before it.
    assert bodies(await ends.broker.receive(50)) == numbers


@pytest.mark.rule("BRK-4")
async def test_many_may_be_delayed_at_once(ends: Ends) -> None:
    numbers = [str(number) for number in range(50)]
    await ends.publisher.publish([publication(number) for number in numbers])
    batch = await ends.broker.receive(50)

    assert not await ends.broker.nack([Nack(delivery.handle, 1.0) for delivery in batch])

    back: set[str] = set()
    while len(back) < len(batch):
        back |= set(bodies(await ends.broker.receive(50)))
    assert back == set(bodies(batch))


@pytest.mark.rule("BRK-4")
async def test_a_message_without_an_id_has_none_after_a_retry_either(
    classic: Ends, server: RabbitServer, name: str
) -> None:
    await asyncio.to_thread(server.publish_without_id, name, b"a")
    first = await receive_one(classic.broker)

    await classic.broker.nack([Nack(first.handle, 1.0)])
    second = await receive_one(classic.broker)

    assert (first.claimed_id, second.claimed_id) == (None, None)
    assert second.body == b"a"


@pytest.mark.rule("BRK-4", "P1")
async def test_a_delayed_message_survives_the_death_of_the_broker(
    server: RabbitServer,
    name: str,
    brokers: BrokerRegistry,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its retry queue is new. The broker confirms the copy seconds before it saves the queue."""
    monkeypatch.setattr(rabbitmq_connection, "UNSAVED_SECONDS", UNSAVED_SECONDS)
    async with both_ends(brokers, queue(server, name, f"type={kind}")) as ends:
        await ends.publisher.publish([publication("a")])
        first = await receive_one(ends.broker)
        await ends.broker.nack([Nack(first.handle, 5.0, TRIED)])

        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        async with reopened(ends) as broker:
            survivor = await receive_tried(broker, TRIED)

    assert survivor.body == b"a"


@pytest.mark.rule("BRK-3")
async def test_retry_queues_are_of_the_kind_of_their_queue(
    server: RabbitServer, name: str, brokers: BrokerRegistry
) -> None:
    async with bare_channel(server) as channel:
        for kind in KINDS:
            await channel.declare_queue(
                f"{name}-{kind}", durable=True, arguments={"x-queue-type": kind}
            )

    for kind in KINDS:
        async with brokers.open_queue(queue(server, f"{name}-{kind}")):
            pass

    listed = (await control(server, "list_queues", "name", "type")).split("\n")
    assert f"{name}-classic.retry.30s\tclassic" in listed
    assert f"{name}-quorum.retry.30s\tquorum" in listed


@pytest.mark.rule("BRK-4", "P1")
async def test_a_retry_queue_that_was_deleted_costs_a_connection_and_no_message(
    classic: Ends, server: RabbitServer, name: str
) -> None:
    await classic.publisher.publish([publication("a"), publication("b")])
    async with reopened(classic) as broker:
        first, second = await several(broker, 2)
        await broker.nack([Nack(first.handle, 30.0)])
        async with bare_channel(server) as channel:
            await channel.queue_delete(f"{name}.retry.30s")  # with what is in it

        with pytest.raises(Disconnected, match="retry"):
            await broker.nack([Nack(second.handle, 30.0)])

    assert (await receive_one(classic.broker)).body == b"b"


@pytest.mark.rule("P1")
@pytest.mark.parametrize("acked", [(0, 1, 2), (1, 3), (0, 2, 4), (4, 3, 0)])
async def test_an_ack_removes_these_and_no_others(classic: Ends, acked: tuple[int, ...]) -> None:
    await classic.publisher.publish([publication(str(number)) for number in range(6)])
    async with reopened(classic) as broker:
        batch = await broker.receive(5)
        await broker.ack([batch[number].handle for number in acked])

    left: list[str] = []
    while "5" not in left:
        left += bodies(await classic.broker.receive(10))

    assert left == [str(number) for number in range(6) if number not in acked]


# Windows.


@pytest.mark.rule("P4")
async def test_no_more_is_held_than_the_window_allows(
    server: RabbitServer, name: str, brokers: BrokerRegistry
) -> None:
    async with both_ends(brokers, queue(server, name, "type=classic", "prefetch=3")) as ends:
        await ends.publisher.publish([publication(str(number)) for number in range(5)])
        batch = await ends.broker.receive(10)
        depth = await ends.broker.depth()
        await ends.broker.ack([batch[0].handle, batch[1].handle])

        rest = await ends.broker.receive(10)

    assert (bodies(batch), bodies(rest)) == (["0", "1", "2"], ["3", "4"])
    assert depth is not None
    assert (depth.waiting, depth.in_flight, depth.due) == (2, 3, 0)


@pytest.mark.rule("ROUTE-5", "P5")
async def test_an_ack_of_an_earlier_window_does_not_keep_a_full_one_from_growing(
    server: RabbitServer, name: str, brokers: BrokerRegistry, kind: str
) -> None:
    async with both_ends(brokers, queue(server, name, f"type={kind}", "prefetch=3")) as ends:
        window = ends.broker.traits.window
        assert window is not None
        await ends.publisher.publish([publication(str(number)) for number in range(10)])
        window.widen(10)
        first = await several(ends.broker, 3)
        second = await several(ends.broker, 3)
        await ends.broker.ack([first[0].handle])
        full = await ends.broker.depth()

        third = await ends.broker.receive(3)

    assert bodies(second) == ["3", "4", "5"]
    assert bodies(third) == ["6", "7", "8"][: len(third)]
    assert third  # they come one by one; without room, none does
    assert full is not None
    assert (full.waiting, full.in_flight, full.due) == (4, 5, 0)


@pytest.mark.rule("CFG-7", "OPS-4")
async def test_a_stopped_connection_keeps_only_what_it_has_handed_over(
    ends: Ends,
) -> None:
    await ends.publisher.publish([publication("a"), publication("b"), publication("c")])
    held = await receive_one(ends.broker)

    ends.broker.stop()
    async with reopened(ends) as other:
        there = await other.receive(10)

    assert bodies([held]) == ["a"]
    assert bodies(there) == ["b", "c"]
    assert not await ends.broker.ack([held.handle])


@pytest.mark.rule("BRK-5")
async def test_what_is_not_asked_for_goes_back_before_the_broker_loses_patience(
    classic: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    await classic.publisher.publish([publication("a"), publication("b"), publication("c")])
    monkeypatch.setattr(rabbitmq_broker, "MAX_STAY_SECONDS", 0.2)
    monkeypatch.setattr(rabbitmq_broker, "STAY_CHECK_SECONDS", 0.1)
    async with reopened(classic) as broker:
        held = await receive_one(broker)
        await asyncio.sleep(0.6)
        async with reopened(classic) as other:
            there = await other.receive(10)

    assert (bodies([held]), bodies(there)) == (["a"], ["b", "c"])


@pytest.mark.rule("BRK-4", "P3")
async def test_what_is_returned_in_a_burst_comes_back_in_its_old_place(classic: Ends) -> None:
    numbers = [str(number) for number in range(300)]
    await classic.publisher.publish([publication(number) for number in numbers])
    out = await classic.broker.receive(50)
    while len(out) < 100:
        out = [*out, *await classic.broker.receive(50)]
    waiting = asyncio.ensure_future(receive_all(classic.broker, len(numbers)))

    for delivery in out:
        await classic.broker.nack([Nack(delivery.handle, 0)])

    # What was on its way when the first was returned may come before it, but never lose its place.
    received = await waiting
    assert received[-len(numbers) :] == numbers


async def receive_all(broker: Broker, least: int) -> list[str]:
    received: list[str] = []
    while len(received) < least or received[-1] != str(least - 1):
        received += bodies(await broker.receive(50))
    return received


# Connections that end.


@pytest.mark.rule("BRK-6", "P1")
async def test_a_broker_that_stops_and_starts_hands_out_again_what_was_not_settled(
    ends: Ends, server: RabbitServer
) -> None:
    await ends.publisher.publish([publication("a"), publication("b")])
    first, _ = await ends.broker.receive(2)
    waiting = asyncio.ensure_future(ends.broker.receive(10))

    await asyncio.to_thread(server.stop)

    with pytest.raises(Disconnected):
        await waiting
    with pytest.raises(Disconnected):
        await ends.broker.ack([first.handle])
    await asyncio.to_thread(server.start)
    async with reopened(ends) as broker:
        again = await broker.receive(10)
        assert [(each.body, each.receive_count) for each in again] == [(b"a", 2), (b"b", 2)]
        refused = await broker.nack([Nack(first.handle, 0)])
        assert [(one.handle, one.stale) for one in refused] == [(first.handle, True)]
        assert [each.stale for each in await broker.ack([first.handle])] == [True]
        assert not await broker.ack([each.handle for each in again])


@pytest.mark.rule("BRK-6", "P1")
async def test_an_ack_that_got_lost_on_the_way_is_reported(
    ends: Ends, server: RabbitServer, brokers: BrokerRegistry
) -> None:
    await ends.publisher.publish([publication("a")])
    async with cable_to(server.port) as cable:
        uri = ends.queue.uri.replace(f":{server.port}/", f":{cable.port}/")
        async with brokers.open_queue(QueueConfig(name="orders", uri=uri)) as broker:
            delivery = await receive_one(broker)
            cable.cut_at_next_word = True

            with pytest.raises(Disconnected):
                await broker.ack([delivery.handle])

    assert (await receive_one(ends.broker)).body == b"a"


@pytest.mark.rule("BRK-6", "P1")
async def test_an_original_whose_copy_is_safe_is_not_delivered_again(
    ends: Ends, server: RabbitServer, brokers: BrokerRegistry
) -> None:
    await ends.publisher.publish([publication("a"), publication("b")])
    async with proxy_to(server.port) as wire:
        through_wire = by_way_of(wire, ends.queue, server)
        async with brokers.open_queue(through_wire) as broker:
            first = await receive_one(broker)
            wire.to_server = lambda data: None if BASIC_ACK in data else data
            with pytest.raises(Disconnected):
                await broker.nack([Nack(first.handle, 30.0, TRIED)])
        wire.to_server = lambda data: data
        async with brokers.open_queue(through_wire) as broker:
            rest = await several(broker, 1)
            left = await broker.depth()

    assert (bodies([first]), bodies(rest)) == (["a"], ["b"])
    assert left == Depth(0, 1, due=0)


@pytest.mark.rule("RAW-3", "BRK-6", "P1")
async def test_a_nameless_message_is_not_taken_for_an_original_whose_copy_is_safe(
    classic: Ends, server: RabbitServer, name: str, brokers: BrokerRegistry
) -> None:
    await asyncio.to_thread(server.publish_without_id, name, b"a")
    async with proxy_to(server.port) as wire:
        through_wire = by_way_of(wire, classic.queue, server)
        raw = replace(through_wire, route=RawRoute(target="https://svc.test/hook"))
        async with brokers.open_queue(raw) as broker:
            first = await receive_one(broker)
            wire.to_server = lambda data: None if BASIC_ACK in data else data
            with pytest.raises(Disconnected):
                await broker.nack([Nack(first.handle, 30.0, TRIED)])
        wire.to_server = lambda data: data
        async with brokers.open_queue(raw) as broker:
            again = await receive_one(broker)  # a duplicate, or another with the same body

    assert (first.body, again.body, again.tally) == (b"a", b"a", UNTRIED)


@pytest.mark.rule("RAW-3", "WQ-15", "ID-1")
async def test_a_nameless_message_and_its_retry_copies_are_one_message(
    classic: Ends, server: RabbitServer, name: str, brokers: BrokerRegistry
) -> None:
    """Else each failure would be the first one that is known, and the limit never reached."""
    await asyncio.to_thread(server.publish_without_id, name, b"a")
    await asyncio.to_thread(server.publish_without_id, name, b"a")
    raw = replace(classic.queue, route=RawRoute(target="https://svc.test/hook"))
    async with brokers.open_queue(raw) as broker:
        first, other = await several(broker, 2)
        keys = [key_of("q", first, "x")]
        for _ in range(2):
            await broker.nack([Nack(first.handle, 1.0, TRIED)])
            first = await receive_one(broker)
            keys.append(key_of("q", first, "x"))

    assert len(set(keys)) == 1
    assert key_of("q", other, "x") not in keys
    assert first.claimed_id is None  # the target sees the digest of the body, as before


@pytest.mark.rule("BRK-6", "P1")
async def test_what_is_published_again_is_not_taken_for_an_original_that_is_gone(
    ends: Ends, server: RabbitServer, brokers: BrokerRegistry
) -> None:
    await ends.publisher.publish([publication("a")])
    async with proxy_to(server.port) as wire:
        through_wire = by_way_of(wire, ends.queue, server)
        async with brokers.open_queue(through_wire) as broker:
            first = await receive_one(broker)
            wire.to_client = lambda data: None if FLOW_OK in data else data
            with pytest.raises(Disconnected):
                await broker.nack(
                    [Nack(first.handle, 1.0, TRIED)]
                )  # the original is gone: who knows?
        wire.to_client = lambda data: data
        async with reopened(ends) as elsewhere:  # as another router, which remembers other things
            copy = await receive_one(elsewhere)
            await elsewhere.ack([copy.handle])
        await ends.publisher.publish([publication("a")])
        async with brokers.open_queue(through_wire) as broker:
            await receive_one(broker)  # and the connection ends, so that it is handed out once more

        async with brokers.open_queue(through_wire) as broker:
            again = await receive_one(broker)

    assert copy.tally == TRIED
    assert (again.claimed_id, again.tally, again.receive_count) == (first.claimed_id, UNTRIED, 2)


@pytest.mark.rule("ORD-9")
async def test_an_idle_connection_proves_that_it_is_alive(
    server: RabbitServer, name: str, brokers: BrokerRegistry
) -> None:
    async with brokers.open_queue(queue(server, name, "type=classic", "heartbeat=1")) as broker:
        pulse = broker.traits.pulse
        assert pulse is not None
        await asyncio.sleep(3.5)

        assert not pulse.is_silent()


@pytest.mark.rule("ORD-9")
async def test_a_router_that_stood_still_does_not_trust_what_it_holds(
    server: RabbitServer, name: str, brokers: BrokerRegistry
) -> None:
    async with brokers.open_queue(queue(server, name, "type=classic", "heartbeat=1")) as broker:
        pulse = broker.traits.pulse
        assert pulse is not None
        await asyncio.sleep(0.2)
        before = pulse.is_silent()
        time.sleep(2.1)  # noqa: ASYNC251  the whole process stands still
        at_once = pulse.is_silent()
        with suppress(Disconnected):
            await broker.depth()

        assert (before, at_once, pulse.is_silent()) == (False, True, True)


@pytest.mark.rule("ORD-9")
async def test_two_heartbeats_of_silence_are_enough_not_to_trust_what_it_holds(
    server: RabbitServer, name: str, brokers: BrokerRegistry
) -> None:
    async with brokers.open_queue(queue(server, name, "type=classic", "heartbeat=1")) as broker:
        pulse = broker.traits.pulse
        assert pulse is not None
        await asyncio.sleep(0.2)
        server.freeze()
        frozen_at = time.monotonic()
        try:
            while not pulse.is_silent():  # noqa: ASYNC110  nothing tells
                await asyncio.sleep(0.05)
            noticed = time.monotonic() - frozen_at
        finally:
            server.thaw()

    assert 1.3 < noticed < 2.5


def by_way_of(wire: Proxy, queue: QueueConfig, server: RabbitServer) -> QueueConfig:
    return QueueConfig(name="orders", uri=queue.uri.replace(f":{server.port}/", f":{wire.port}/"))


@pytest.mark.rule("BRK-6", "BRK-1")
async def test_a_broker_that_falls_silent_is_noticed(
    server: RabbitServer, name: str, brokers: BrokerRegistry
) -> None:
    started = 0.0
    async with both_ends(brokers, queue(server, name, "type=classic", "heartbeat=1")) as ends:
        waiting = asyncio.ensure_future(ends.broker.receive(1))
        await asyncio.sleep(0.2)
        server.freeze()
        started = time.monotonic()
        try:
            with pytest.raises(Disconnected):
                await waiting
            noticed = time.monotonic() - started
        finally:
            server.thaw()

    assert noticed < 10


@pytest.mark.rule("BRK-6", "CFG-7")
async def test_a_consumer_that_the_broker_ends_is_a_lost_connection(
    classic: Ends, server: RabbitServer, name: str, brokers: BrokerRegistry
) -> None:
    waiting = asyncio.ensure_future(classic.broker.receive(1))
    await asyncio.sleep(0.2)

    async with bare_channel(server) as channel:
        await channel.queue_delete(name)

    with pytest.raises(Disconnected, match="ended the consumer"):
        await waiting
    with pytest.raises(QueueRefused, match="there is no queue"):
        await classic.publisher.publish([publication("a")])
    with pytest.raises(QueueRefused, match="there is no queue"):
        async with brokers.open_queue(queue(server, name)):
            pass


@pytest.mark.rule("BRK-6", "P1")
async def test_a_channel_closed_for_a_message_held_too_long_gives_everything_back(
    server: RabbitServer, name: str, brokers: BrokerRegistry
) -> None:
    await impatient(server, consumer_timeout=1000, channel_tick_interval=200)
    try:
        async with both_ends(brokers, queue(server, name, "type=classic")) as ends:
            await ends.publisher.publish([publication("a")])
            held = await receive_one(ends.broker)
            with pytest.raises(Disconnected, match="timed out"):
                await ends.broker.receive(1)
            with pytest.raises(Disconnected):
                await ends.broker.nack([Nack(held.handle, 1.0)])

            async with reopened(ends) as broker:
                again = await receive_one(broker)
    finally:
        await impatient(server, consumer_timeout=1_800_000, channel_tick_interval=60_000)

    assert (again.body, again.receive_count) == (b"a", 2)


async def impatient(server: RabbitServer, **milliseconds: int) -> None:
    for setting, value in milliseconds.items():
        await control(server, "eval", f"application:set_env(rabbit, {setting}, {value}).")


@pytest.mark.rule("P5")
async def test_a_broker_short_of_memory_still_takes_acknowledgements(
    classic: Ends, server: RabbitServer
) -> None:
    await classic.publisher.publish([publication("a"), publication("b")])
    first, second = await classic.broker.receive(2)
    await control(server, "set_vm_memory_high_watermark", "0")
    try:
        putting_off = asyncio.ensure_future(classic.broker.nack([Nack(first.handle, 1.0)]))
        await asyncio.sleep(0.2)
        unsettled = await classic.broker.ack([second.handle])
        was_blocked = not putting_off.done()
    finally:
        await control(server, "set_vm_memory_high_watermark", "absolute", "1GiB")
    await putting_off

    assert (list(unsettled), was_blocked) == ([], True)
    assert bodies([await receive_one(classic.broker)]) == ["a"]


# What is refused.


@pytest.mark.rule("CFG-7")
async def test_a_queue_given_by_its_name_is_at_the_broker_of_the_settings(
    server: RabbitServer, name: str, brokers: BrokerRegistry
) -> None:
    given = QueueConfig(name=name, uri=f"amqp://{name}?type=classic")

    async with both_ends(brokers, given) as ends:
        await ends.publisher.publish([publication("a")])
        delivery = await receive_one(ends.broker)

    assert delivery.body == b"a"
    assert name in (await control(server, "list_queues", "name")).split("\n")


@pytest.mark.rule("CFG-7", "OPS-5")
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("guest:guest@", "guest:hunter2@"), "user and password"),
        (("/?", "/nowhere?"), "virtual host"),
        (("&type=classic", ""), "there is no queue"),
    ],
    ids=["password", "vhost", "queue"],
)
async def test_what_the_broker_refuses_is_refused_with_a_reason_and_without_credentials(
    server: RabbitServer, name: str, brokers: BrokerRegistry, change: tuple[str, str], why: str
) -> None:
    uri = queue(server, name, "type=classic").uri.replace(*change)

    with pytest.raises(BrokerError, match=why) as refused:
        async with brokers.open_queue(QueueConfig(name="orders", uri=uri)):
            pass

    assert "hunter2" not in str(refused.value)
    assert "guest" not in str(refused.value)


@pytest.mark.rule("CFG-7")
async def test_a_stream_is_refused(
    server: RabbitServer, name: str, brokers: BrokerRegistry
) -> None:
    async with bare_channel(server) as channel:
        await channel.declare_queue(name, durable=True, arguments={"x-queue-type": "stream"})

    with pytest.raises(QueueRefused, match="is a stream"):
        async with brokers.open_queue(queue(server, name)):
            pass


@pytest.mark.rule("BRK-6")
async def test_a_broker_that_is_not_there_is_a_lost_connection(brokers: BrokerRegistry) -> None:
    nowhere = QueueConfig(name="orders", uri="amqp://me:hunter2@127.0.0.1:1/?queue=q")

    with pytest.raises(Disconnected) as lost:
        async with brokers.open_queue(nowhere):
            pass

    assert "hunter2" not in str(lost.value)


# Traces.


@pytest.mark.rule("MED-1")
async def test_a_publishers_trace_comes_with_its_message_and_with_copies_of_it(
    server: RabbitServer, name: str, classic: Ends
) -> None:
    async with bare_channel(server) as channel:
        sent = aio_pika.Message(b"a", headers=dict(TRACED))
        await channel.default_exchange.publish(sent, routing_key=name)

    first = await receive_one(classic.broker)
    await classic.broker.nack([Nack(first.handle, 0.1)])
    copy = await receive_one(classic.broker)

    assert (first.parent, copy.parent) == (PARENT, PARENT)


# Delivery limits.


FOREIGN: Table = {"x-queue-type": "quorum", "x-delivery-limit": 20}
# More arguments in front of the limit, each of which hides the next.
HIDDEN: Table = FOREIGN | {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "nobody"}


async def make_queue(server: RabbitServer, name: str, arguments: Table) -> None:
    async with bare_channel(server) as channel:
        await channel.declare_queue(name, durable=True, arguments=arguments)


@pytest.mark.rule("BRK-7", "P1")
@pytest.mark.parametrize("arguments", [FOREIGN, HIDDEN], ids=["limit", "limit and more"])
async def test_a_connection_that_is_lost_more_often_than_a_queue_allows_loses_no_message(
    server: RabbitServer, name: str, brokers: BrokerRegistry, arguments: Table
) -> None:
    numbers = [str(number) for number in range(120)]
    await make_queue(server, name, arguments)
    given = queue(server, name, "prefetch=50")
    async with brokers.open_publisher(given) as publisher:
        await publisher.publish([publication(number, group="g") for number in numbers])
    advice = set()
    async with cable_to(server.port) as cable:
        through_cable = QueueConfig(
            name="orders", uri=given.uri.replace(f":{server.port}/", f":{cable.port}/")
        )
        for _ in range(25):
            async with brokers.open_queue(through_cable) as broker:
                first = await several(broker, 20)
                advice.add(broker.traits.advice)
                cable.cut()
            assert bodies(first) == numbers[:20]

    async with brokers.open_queue(given) as broker:
        came = await taken(broker, len(numbers))
        left = await broker.depth()

    assert came == numbers
    assert left == Depth(0, 0, due=0)
    assert [text for text in advice if text is not None] == [DeliveryLimit(20).advice()]


async def taken(broker: Broker, count: int) -> list[str]:
    """Receive and remove so many."""
    came: list[str] = []
    while len(came) < count:
        batch = await broker.receive(50)
        came += bodies(batch)
        assert not await broker.ack([each.handle for each in batch])
    return came


@pytest.mark.rule("BRK-7")
async def test_what_was_renewed_is_what_it_was(
    server: RabbitServer, name: str, brokers: BrokerRegistry
) -> None:
    await make_queue(server, name, {"x-queue-type": "quorum", "x-delivery-limit": 2})
    given = queue(server, name)
    async with both_ends(brokers, given) as ends:
        await ends.publisher.publish([publication("a")])
        first = await receive_one(ends.broker)
        await ends.broker.nack([Nack(first.handle, 1.0, TRIED)])
        second = await receive_one(ends.broker)
        is_told_at_once = ends.broker.traits.advice is not None
    async with brokers.open_queue(given) as broker:
        third = await receive_one(broker)

    assert is_told_at_once  # a limit this low leaves no room for mishaps
    assert (third.body, third.claimed_id, third.tally) == (second.body, "a", TRIED)
    assert [each.receive_count for each in (first, second, third)] == [1, 2, 3]


@pytest.mark.rule("BRK-7")
async def test_what_was_renewed_and_returned_comes_before_the_queue(
    server: RabbitServer, name: str, brokers: BrokerRegistry
) -> None:
    await make_queue(server, name, {"x-queue-type": "quorum", "x-delivery-limit": 2})
    given = queue(server, name, "prefetch=4")
    async with both_ends(brokers, given) as ends:
        await ends.publisher.publish([publication(str(number)) for number in range(8)])
        async with reopened(ends) as broker:
            await several(broker, 4)
        renewed = await several(ends.broker, 4)  # and nothing of the queue
        depth = await ends.broker.depth()
        for each in renewed:
            await ends.broker.nack([Nack(each.handle)])
        came = await taken(ends.broker, 8)

    assert bodies(renewed) == ["0", "1", "2", "3"]
    assert depth is not None
    assert (depth.waiting, depth.in_flight) == (4, 4)
    assert came == [str(number) for number in range(8)]


@pytest.mark.rule("BRK-7")
async def test_what_a_dead_router_has_moved_is_found_by_another_that_runs(
    server: RabbitServer, name: str, brokers: BrokerRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rabbitmq_broker, "STAY_CHECK_SECONDS", 0.1)
    await make_queue(server, name, {"x-queue-type": "quorum", "x-delivery-limit": 2})
    given = queue(server, name)
    async with both_ends(brokers, given) as ends:
        await ends.publisher.publish([publication("a")])
        async with reopened(ends) as broker:
            await receive_one(broker)
        async with brokers.open_queue(given) as other:
            waiting = asyncio.ensure_future(other.receive(1))
            (there,) = await waiting
            still = asyncio.ensure_future(ends.broker.receive(1))
            await asyncio.sleep(0.3)  # it consumes the queue itself, which is empty
        (found,) = await still

    assert (there.body, found.body) == (b"a", b"a")


@pytest.mark.rule("BRK-7")
async def test_without_the_right_to_make_a_queue_a_worn_message_is_delivered_all_the_same(
    server: RabbitServer, name: str, brokers: BrokerRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    await make_queue(server, name, {"x-queue-type": "quorum", "x-delivery-limit": 2})
    async with brokers.open_queue(queue(server, name)):
        pass  # makes the first retry queue
    await control(server, "add_user", name, "pw")
    await control(server, "set_permissions", name, f"^{name}$", ".*", ".*")
    restricted = QueueConfig(
        name="orders", uri=queue(server, name).uri.replace("guest:guest@", f"{name}:pw@")
    )
    async with both_ends(brokers, restricted) as ends:
        await ends.publisher.publish([publication("a")])
        async with reopened(ends) as broker:
            await receive_one(broker)
        again = await receive_one(ends.broker)

    assert again.body == b"a"
    assert "cannot be renewed" in caplog.text


@pytest.mark.rule("BRK-7")
async def test_our_own_queue_has_no_limit_and_raises_no_warning(
    server: RabbitServer, name: str, brokers: BrokerRegistry
) -> None:
    given = queue(server, name, "type=quorum")
    async with both_ends(brokers, given) as ends:
        await ends.publisher.publish([publication("a")])
    for _ in range(25):
        async with brokers.open_queue(given) as broker:
            await receive_one(broker)
            advice = broker.traits.advice
            assert advice is None

    listed = (await control(server, "list_queues", "name", "arguments")).split("\n")
    (ours,) = (line for line in listed if line.startswith(f"{name}\t"))
    is_new = int((await control(server, "version")).split(".")[0]) >= 4
    assert ("x-delivery-limit" in ours) == is_new


@pytest.mark.rule("ORD-2", "ORD-3")
async def test_a_strict_queue_has_one_consumer_and_the_next_one_gets_first_what_it_held(
    server: RabbitServer, name: str, brokers: BrokerRegistry, kind: str
) -> None:
    given = replace(queue(server, name, f"type={kind}"), ordering=Ordering.STRICT)
    refusals = 0
    async with brokers.open_publisher(given) as publisher:
        async with brokers.open_queue(given) as first:
            await publisher.publish([publication(each, group="g") for each in "abc"])
            a, b = await several(first, 2)
            await first.ack([a.handle])
            async with brokers.open_queue(given) as second:
                if kind == "classic":
                    with pytest.raises(Disconnected, match="exclusive"):
                        await second.receive(10)
                    refusals += 1
                else:
                    assert await is_empty(second)
            assert first.traits.advice is None
        async with brokers.open_queue(given) as third:
            after = await several(third, 2)

    assert bodies([a, b]) == ["a", "b"]
    assert bodies(after) == ["b", "c"]
    assert refusals == (kind == "classic")


@asynccontextmanager
async def rival(brokers: BrokerRegistry, given: QueueConfig, kind: str) -> AsyncIterator[list[str]]:
    """Another router that wants to receive a strict queue: it waits, or is refused."""
    received: list[str] = []

    async def receive() -> None:
        while True:
            with suppress(Disconnected):  # refused: the consumer of a classic queue is exclusive
                async with brokers.open_queue(given) as broker:
                    while True:
                        received.extend(bodies(await broker.receive(10)))
            assert kind == "classic"
            await asyncio.sleep(0.1)

    task = asyncio.create_task(receive())
    await asyncio.sleep(0.5)  # by then it waits
    yield received
    task.cancel()
    await asyncio.wait([task])


@pytest.mark.rule("ORD-2", "ORD-10")
async def test_a_router_that_stops_keeps_a_strict_queue_until_all_is_settled(
    server: RabbitServer, name: str, brokers: BrokerRegistry, kind: str
) -> None:
    """What it gives back goes to the front in order, also if newer messages wait in its window."""
    given = replace(queue(server, name, f"type={kind}"), ordering=Ordering.STRICT)
    async with brokers.open_publisher(given) as publisher, AsyncExitStack() as stack:
        async with brokers.open_queue(given) as first:
            await publisher.publish([publication(each, group="g") for each in "abcdef"])
            a, b, c = await several(first, 3)
            second = await stack.enter_async_context(rival(brokers, given, kind))
            first.stop()
            await asyncio.sleep(0.3)
            await first.nack([Nack(c.handle, 0.0)])
            await first.nack([Nack(b.handle, 0.0)])
            await asyncio.sleep(0.3)
            before = list(second)
            await first.ack([a.handle])
        await eventually(lambda: len(second) >= 5)

    assert before == []
    assert second == list("bcdef")


@pytest.mark.rule("ORD-2", "ROUTE-5")
async def test_looking_ahead_leaves_a_strict_queue_to_no_other_router(
    server: RabbitServer, name: str, brokers: BrokerRegistry, kind: str
) -> None:
    given = replace(queue(server, name, f"type={kind}&prefetch=2"), ordering=Ordering.STRICT)
    async with (
        brokers.open_publisher(given) as publisher,
        brokers.open_queue(given) as first,
    ):
        await publisher.publish([publication(each, group="g") for each in "abcdef"])
        held = await several(first, 2)
        async with rival(brokers, given, kind) as second:
            assert first.traits.window is not None
            first.traits.window.widen(100)
            held += await several(first, 4)
            await asyncio.sleep(0.3)

    assert bodies(held) == list("abcdef")
    assert second == []


@pytest.mark.rule("ORD-1", "BRK-4")
async def test_what_goes_back_to_a_strict_queue_comes_again_before_newer_messages(
    server: RabbitServer, name: str, brokers: BrokerRegistry, kind: str
) -> None:
    given = replace(queue(server, name, f"type={kind}"), ordering=Ordering.STRICT)
    async with brokers.open_publisher(given) as publisher:
        async with brokers.open_queue(given) as first:
            await publisher.publish([publication(each, group="g") for each in "abcd"])
            _, b, _ = await several(first, 3)
            await first.nack([Nack(b.handle, 0.0)])
            with pytest.raises(Disconnected, match="strict"):
                await first.receive(10)
        async with brokers.open_queue(given) as again:
            after = await several(again, 4)

    assert bodies(after) == list("abcd")


@pytest.mark.rule("ORD-2", "BRK-7")
async def test_a_strict_queue_that_others_made_without_a_single_consumer_is_told(
    server: RabbitServer, name: str, brokers: BrokerRegistry
) -> None:
    await make_queue(server, name, {"x-queue-type": "quorum"})
    given = replace(queue(server, name), ordering=Ordering.STRICT)

    async with brokers.open_queue(given) as broker:
        advice = broker.traits.advice

    assert advice is not None
    assert "x-single-active-consumer" in advice
