"""What ActiveMQ does that no other broker does, and how we stand it."""

import asyncio
import json
import logging
import random
import time
from collections.abc import AsyncIterator, Iterator

import pytest
from msgspec.structs import replace

from router.brokers import BrokerRegistry
from router.brokers.activemq import ActiveMqSettings
from router.brokers.kit.consuming import LONG_POLL_SECONDS
from router.brokers.workers import BrokerSettings
from router.core.config import Ordering, QueueConfig
from router.core.message import Tally
from router.ports import BrokerError, Disconnected, Nack, QueueRefused
from tests.contract.activemq_place import ActiveMqPlace
from tests.contract.cases import (
    PARENT,
    TRACED,
    Ends,
    bodies,
    both_ends,
    publication,
    receive_one,
    receive_tried,
    reopened,
    several,
)
from tests.support.proxy import Proxy, proxy_to
from tests.support.servers.activemq import ActiveMqServer
from tests.support.servers.base import free_port
from tests.support.stomp import bare_stomp, waiting

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

TRIED = Tally(failures=1, requests=3)
USER = ("router", "hunter2")


@pytest.fixture
def server(activemq: ActiveMqPlace) -> ActiveMqServer:
    return activemq.server


@pytest.fixture
def name(activemq: ActiveMqPlace) -> str:
    return activemq.new_queue()


@pytest.fixture(scope="module")
def plain_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ActiveMqServer]:
    """Without a scheduler, and for one user only."""
    directory = tmp_path_factory.mktemp("plain-activemq")
    with ActiveMqServer(directory, scheduler=False, user=USER).running() as server:
        yield server


@pytest.fixture
async def brokers(anyio_backend: object, server: ActiveMqServer) -> AsyncIterator[BrokerRegistry]:
    del anyio_backend  # asked for only to run on its loop
    async with brokers_with(ActiveMqSettings(url=f"stomp://{server.address}")) as brokers:
        yield brokers


@pytest.fixture
async def ends(server: ActiveMqServer, name: str, brokers: BrokerRegistry) -> AsyncIterator[Ends]:
    async with both_ends(brokers, queue_at(server.port, name)) as ends:
        yield ends


@pytest.fixture
async def wire(anyio_backend: object, server: ActiveMqServer) -> AsyncIterator[Proxy]:
    del anyio_backend
    async with proxy_to(server.port) as proxy:
        yield proxy


def brokers_with(settings: ActiveMqSettings) -> BrokerRegistry:
    return BrokerRegistry(
        worker_id="worker-1", dedup_window=300.0, settings=BrokerSettings(settings)
    )


def queue_at(port: int, name: str, *options: str, user: str = "") -> QueueConfig:
    query = "&".join(("heartbeat=1", *options))
    return QueueConfig(name="orders", uri=f"activemq://{user}127.0.0.1:{port}/{name}?{query}")


def body(group: str) -> bytes:
    content = {"id": "a", "mediationTarget": "https://svc.example/", "messageGroupId": group}
    return json.dumps(content).encode()


# Delays.


@pytest.mark.rule("BRK-4", "WQ-5")
async def test_a_copy_keeps_headers_and_group_and_the_first_id(
    server: ActiveMqServer, name: str, brokers: BrokerRegistry
) -> None:
    told = {"JMSXGroupID": "g", "colour": "blue\\cgreen\\n", "correlation-id": "7", "priority": "8"}
    async with bare_stomp(server.port) as others:
        await others.send(name, body("g"), told)
    async with brokers.open_queue(queue_at(server.port, name)) as broker:
        first = await receive_one(broker)
        await broker.nack([Nack(first.handle, 0.5, TRIED)])
        second = await receive_one(broker)
        await broker.nack([Nack(second.handle, 0.5, Tally(failures=2, requests=6))])
    async with bare_stomp(server.port) as others:
        await others.subscribe(name, selector="JMSXGroupID = 'g'")
        copy = await others.hear()

    assert first.broker_id == second.claimed_id == copy.headers["x-message-router-id"]
    assert second.broker_id != first.broker_id  # the broker made it for the copy
    assert (second.receive_count, second.tally) == (2, TRIED)
    assert copy.body == first.body
    assert "content-length" not in copy.headers  # text still
    assert copy.headers["persistent"] == "true"
    assert copy.headers["x-message-router-attempts"] == "2"
    assert {
        header: copy.headers[header] for header in ("colour", "correlation-id", "priority")
    } == {
        "colour": "blue:green\n",
        "correlation-id": "7",
        "priority": "8",
    }


@pytest.mark.rule("BRK-4", "FIFO-1")
async def test_what_is_delayed_one_after_the_other_comes_back_together(ends: Ends) -> None:
    numbers = [str(number) for number in range(20)]
    await ends.publisher.publish([publication(number) for number in numbers])
    first, *mates = await several(ends.broker, 20)

    await ends.broker.nack([Nack(first.handle, 1.0)])
    await asyncio.sleep(0.3)
    for received in mates:
        await ends.broker.nack([Nack(received.handle, 1.0)])

    # In one batch: if the first one fails again, none of the others may have gone before it.
    assert bodies(await ends.broker.receive(50)) == numbers


@pytest.mark.rule("P1")
async def test_what_is_delayed_outlives_a_broker_that_is_killed(
    ends: Ends, server: ActiveMqServer
) -> None:
    await ends.publisher.publish([publication("a")])
    first = await receive_one(ends.broker)
    await ends.broker.nack([Nack(first.handle, 2.0, TRIED)])

    await asyncio.to_thread(server.kill)
    await asyncio.to_thread(server.start)
    async with reopened(ends) as broker:
        survivor = await receive_tried(broker, TRIED)

    assert (survivor.body, survivor.claimed_id) == (b"a", first.claimed_id)


@pytest.mark.rule("BRK-4", "P3")
async def test_what_is_returned_at_once_takes_its_old_place(ends: Ends) -> None:
    await ends.publisher.publish([publication(str(number)) for number in range(6)])
    held = await several(ends.broker, 4)

    for received in (held[2], held[0]):
        await ends.broker.nack([Nack(received.handle, 0, TRIED)])
    again = await several(ends.broker, 4)

    assert bodies(again) == ["0", "2", "4", "5"]
    assert [received.tally for received in again[:2]] == [TRIED, TRIED]


@pytest.mark.rule("OPS-4", "P1")
async def test_what_is_returned_at_the_end_is_returned_by_closing(
    ends: Ends, server: ActiveMqServer, name: str
) -> None:
    await ends.publisher.publish([publication(str(number)) for number in range(4)])
    async with ends.brokers.open_queue(ends.queue) as leaving:
        held = await several(leaving, 2)
        leaving.stop()
        for received in held:
            await leaving.nack([Nack(received.handle, 0)])

    assert await waiting(server.port, name) == [b"0", b"1", b"2", b"3"]


# A broker that cannot delay.


@pytest.mark.rule("BRK-4", "P1")
async def test_without_a_scheduler_messages_are_held_in_memory_and_that_is_told_once(
    plain_server: ActiveMqServer, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    queue = queue_at(plain_server.port, name)
    settings = ActiveMqSettings(f"stomp://{plain_server.address}", *USER)
    async with brokers_with(settings) as brokers:
        async with both_ends(brokers, queue) as ends:
            await ends.publisher.publish([publication("a"), publication("b")])
            first = await receive_one(ends.broker)
            began = time.monotonic()
            await ends.broker.nack([Nack(first.handle, 1.0, TRIED)])
            others = await several(ends.broker, 1)
            second = await receive_one(ends.broker)
            waited = time.monotonic() - began
            await ends.broker.nack([Nack(second.handle, 30.0, TRIED)])
        async with brokers.open_queue(queue) as broker:
            returned = await several(broker, 2)

    assert bodies(others) == ["b"]
    assert 1.0 <= waited < 1.5
    assert (second.claimed_id, second.tally, second.receive_count) == (first.claimed_id, TRIED, 2)
    assert bodies(returned) == ["a", "b"]
    told = [record for record in caplog.records if record.levelno == logging.CRITICAL]
    assert [record.getMessage() for record in told] == [
        "messages to be delayed are held in memory: its broker has no scheduler (schedulerSupport)"
    ]


@pytest.mark.rule("BRK-4")
async def test_a_copy_that_comes_early_is_held_until_its_time(
    ends: Ends, server: ActiveMqServer, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    due_at = time.time() + 1.0
    headers = {
        "x-message-router-id": "first",
        "x-message-router-not-before": f"{due_at * 1000:.0f}",
    }
    async with bare_stomp(server.port) as others:
        await others.send(name, b"a", headers)

    received = await receive_one(ends.broker)

    assert due_at - 0.01 <= time.time() < due_at + 0.5
    assert received.claimed_id == "first"
    assert "came back too early" in caplog.text


@pytest.mark.rule("P1", "BRK-4")
async def test_a_broker_that_does_not_take_copies_loses_nothing(
    wire: Proxy, name: str, brokers: BrokerRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    async with both_ends(brokers, queue_at(wire.port, name)) as ends:
        await ends.publisher.publish([publication("a")])
        first = await receive_one(ends.broker)
        wire.to_server = lambda data: data.replace(b"SEND\n", b"REFUSE THIS\n")
        await ends.broker.nack([Nack(first.handle, 1.0, TRIED)])
        second = await receive_one(ends.broker)

    assert (second.claimed_id, second.tally) == (first.claimed_id, TRIED)
    assert "held in memory" in caplog.text


@pytest.mark.rule("P1", "BRK-6")
async def test_a_connection_cut_in_the_middle_of_a_copy_is_no_reason_to_alarm_anyone(
    wire: Proxy,
    server: ActiveMqServer,
    name: str,
    brokers: BrokerRegistry,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with both_ends(brokers, queue_at(wire.port, name)) as ends:
        await ends.publisher.publish([publication("a")])
        first = await receive_one(ends.broker)
        wire.to_server = lambda data: None if b"AMQ_SCHEDULED_DELAY" in data else data
        with pytest.raises(Disconnected):
            await ends.broker.nack([Nack(first.handle, 1.0, TRIED)])

    assert await waiting(server.port, name) == [b"a"]
    assert not [record for record in caplog.records if record.levelno == logging.CRITICAL]


# Connections.


@pytest.mark.rule("BRK-6", "P1")
@pytest.mark.parametrize("ending", ["stop", "kill"])
async def test_a_broker_that_restarts_hands_out_again_what_was_not_settled(
    ends: Ends, server: ActiveMqServer, ending: str
) -> None:
    await ends.publisher.publish([publication(number) for number in "abc"])
    a, b, _ = await several(ends.broker, 3)
    await ends.broker.ack([a.handle])
    waiting_for_more = asyncio.ensure_future(ends.broker.receive(1))

    await asyncio.to_thread(getattr(server, ending))
    with pytest.raises(Disconnected):
        await waiting_for_more
    with pytest.raises(Disconnected):
        await ends.broker.ack([b.handle])
    await asyncio.to_thread(server.start)
    async with reopened(ends) as broker:
        again = [await receive_one(broker)]
        while bodies(again)[-1] != "c":
            again.append(await receive_one(broker))

    # A broker that was killed may have forgotten that it removed the first one.
    assert bodies(again)[-2:] == ["b", "c"]
    assert again[-2].claimed_id == b.claimed_id


@pytest.mark.rule("BRK-6")
async def test_a_handle_of_another_connection_settles_nothing(ends: Ends) -> None:
    await ends.publisher.publish([publication("a")])
    async with ends.brokers.open_queue(ends.queue) as closed:
        old = await receive_one(closed)
    async with ends.brokers.open_queue(ends.queue) as broker:
        new = await receive_one(broker)

        (refused,) = await broker.ack([old.handle])
        (not_extended,) = await broker.extend([old.handle, new.handle], 30)
        (not_returned,) = await broker.nack([Nack(old.handle, 1.0)])

        assert (refused.stale, not_extended.stale, not_returned.stale) == (True, True, True)
        assert not await broker.ack([new.handle])


@pytest.mark.rule("BRK-6", "P1")
async def test_a_connection_cut_in_the_middle_of_an_ack_loses_nothing(
    wire: Proxy, server: ActiveMqServer, name: str, brokers: BrokerRegistry
) -> None:
    async with both_ends(brokers, queue_at(wire.port, name)) as ends:
        await ends.publisher.publish([publication("a")])
        received = await receive_one(ends.broker)
        wire.to_server = lambda data: None if b"ACK\n" in data else data

        with pytest.raises(Disconnected):
            await ends.broker.ack([received.handle])

    assert await waiting(server.port, name) == [b"a"]


@pytest.mark.rule("P1")
async def test_an_original_whose_copy_is_safe_is_not_delivered_again(
    wire: Proxy, server: ActiveMqServer, name: str, brokers: BrokerRegistry
) -> None:
    async with both_ends(brokers, queue_at(wire.port, name)) as ends:
        await ends.publisher.publish([publication("a")])
        first = await receive_one(ends.broker)
        wire.to_server = lambda data: None if b"ACK\n" in data else data
        with pytest.raises(Disconnected):
            await ends.broker.nack([Nack(first.handle, 1.0, TRIED)])
    async with brokers.open_queue(queue_at(server.port, name)) as broker:
        second = await receive_one(broker)
        await broker.ack([second.handle])

    assert (second.claimed_id, second.tally) == (first.claimed_id, TRIED)
    assert await waiting(server.port, name) == []


@pytest.mark.rule("BRK-6", "BRK-1")
async def test_a_broker_that_falls_silent_is_noticed(ends: Ends, server: ActiveMqServer) -> None:
    receiving = asyncio.ensure_future(ends.broker.receive(1))
    await asyncio.sleep(0.2)
    server.freeze()
    frozen = time.monotonic()

    try:
        with pytest.raises(Disconnected, match="silent"):
            await receiving
        noticed = time.monotonic() - frozen
    finally:
        server.thaw()

    assert 2 < noticed < 6


@pytest.mark.rule("ORD-9")
async def test_a_router_that_stood_still_does_not_trust_what_it_holds(ends: Ends) -> None:
    pulse = ends.broker.traits.pulse
    assert pulse is not None
    await asyncio.sleep(3.5)  # idle, with a heartbeat of one second
    before = pulse.is_silent()
    time.sleep(2.1)  # noqa: ASYNC251  the whole process stands still
    at_once = pulse.is_silent()
    await asyncio.sleep(0.5)  # until all was read that has arrived meanwhile

    assert (before, at_once, pulse.is_silent()) == (False, True, True)


@pytest.mark.rule("ORD-9")
async def test_two_heartbeats_of_silence_are_enough_not_to_trust_what_it_holds(
    ends: Ends, server: ActiveMqServer
) -> None:
    pulse = ends.broker.traits.pulse
    assert pulse is not None
    server.freeze()
    frozen_at = time.monotonic()
    try:
        while not pulse.is_silent():  # noqa: ASYNC110  nothing tells
            await asyncio.sleep(0.05)
        noticed = time.monotonic() - frozen_at
    finally:
        server.thaw()

    assert 0.9 < noticed < 2.5


@pytest.mark.rule("BRK-1")
async def test_an_idle_connection_stays_open(ends: Ends) -> None:
    receiving = asyncio.ensure_future(ends.broker.receive(1))
    await asyncio.sleep(5)  # five heart-beats
    await ends.publisher.publish([publication("a")])

    assert bodies(await receiving) == ["a"]


@pytest.mark.rule("BRK-6")
async def test_the_second_broker_is_used_when_the_first_does_not_answer(
    server: ActiveMqServer, name: str, brokers: BrokerRegistry
) -> None:
    uri = f"stomp://127.0.0.1:{free_port()},127.0.0.1:{server.port}/{name}"
    async with both_ends(brokers, QueueConfig(name="orders", uri=uri)) as ends:
        await ends.publisher.publish([publication("a")])

        assert (await receive_one(ends.broker)).body == b"a"


@pytest.mark.rule("BRK-3")
async def test_it_neither_nacks_nor_unsubscribes_nor_sends_what_a_restart_would_lose(
    wire: Proxy, name: str, brokers: BrokerRegistry
) -> None:
    said = bytearray()

    def listen(data: bytes) -> bytes:
        said.extend(data)
        return data

    wire.to_server = listen
    async with both_ends(brokers, queue_at(wire.port, name, "prefetch=7")) as ends:
        await ends.publisher.publish([publication(number) for number in "abcd"])
        a, b, c, _ = await several(ends.broker, 4)
        await ends.broker.ack([a.handle])
        await ends.broker.nack([Nack(b.handle, 0)])
        await ends.broker.nack([Nack(c.handle, 30)])
    frames = [frame.lstrip() for frame in bytes(said).split(b"\0")]
    sent = [frame for frame in frames if frame.startswith(b"SEND") and b"-probe" not in frame]

    assert not [frame for frame in frames if frame.startswith((b"NACK", b"UNSUBSCRIBE"))]
    assert len(sent) == 5
    assert all(b"\npersistent:true\n" in frame for frame in sent)
    assert b"\nactivemq.prefetchSize:7\n" in said


@pytest.mark.rule("P4")
async def test_no_more_than_the_prefetch_is_out_at_once(
    server: ActiveMqServer, name: str, brokers: BrokerRegistry
) -> None:
    async with both_ends(brokers, queue_at(server.port, name, "prefetch=3")) as ends:
        await ends.publisher.publish([publication(str(number)) for number in range(10)])
        first = await several(ends.broker, 3)
        others = await waiting(server.port, name)
        await ends.broker.ack([first[1].handle])
        more = await ends.broker.receive(3)

    assert bodies(first) == ["0", "1", "2"]
    assert len(others) == 7
    assert len(more) == 1


# Who may, and what is told.


@pytest.mark.rule("ROUTE-5", "P5")
async def test_a_broker_that_waits_for_an_ack_is_made_to_pass_on_what_the_window_allows(
    server: ActiveMqServer, name: str, brokers: BrokerRegistry
) -> None:
    """By itself it stops at 200 unsettled messages, although many more fit into the window."""
    sent = [str(n) for n in range(1000)]
    async with both_ends(brokers, queue_at(server.port, name, "prefetch=900")) as ends:
        await ends.publisher.publish(
            [publication(each, group=f"g{int(each) % 7}") for each in sent]
        )
        async with asyncio.timeout(LONG_POLL_SECONDS):  # without, it stops at 200
            received = await several(ends.broker, 900)
        await ends.broker.ack([each.handle for each in received])
        received += await several(ends.broker, 100)

    assert bodies(received) == sent


@pytest.mark.rule("ROUTE-5", "BRK-6")
async def test_a_window_that_waits_for_full_pools_is_opened_again_and_wider(
    server: ActiveMqServer, name: str, brokers: BrokerRegistry
) -> None:
    queue = queue_at(server.port, name, "prefetch=3")
    sent = [str(n) for n in range(8)]
    async with both_ends(brokers, queue) as ends:
        window = ends.broker.traits.window
        assert window is not None
        await ends.publisher.publish([publication(each, group="g") for each in sent])
        window.widen(4)  # nothing has come yet
        first = await ends.broker.receive(2)
        window.widen(4)  # one is still there
        first = [*first, *await ends.broker.receive(2)]
        window.widen(4)
        with pytest.raises(Disconnected, match="widened to 7"):
            await ends.broker.receive(2)

    async with brokers.open_queue(queue) as broker:
        window = broker.traits.window
        assert window is not None
        again = await several(broker, 7)
        window.widen(4)  # no wider than that
        await broker.ack([each.handle for each in again])
        (last,) = await broker.receive(10)

    assert bodies(first) == sent[:3]
    assert bodies(again) == sent[:7]
    assert bodies([last]) == sent[7:]


@pytest.mark.rule("CFG-7")
async def test_a_wrong_password_is_refused_and_not_told(
    plain_server: ActiveMqServer, name: str, brokers: BrokerRegistry
) -> None:
    queue = queue_at(plain_server.port, name, user="someone:s3cret@")

    with pytest.raises(QueueRefused) as refused:
        async with brokers.open_queue(queue):
            pass

    assert "does not accept" in str(refused.value)
    assert not {"someone", "s3cret"} & set(str(refused.value).split())


@pytest.mark.rule("CFG-7")
async def test_a_queue_given_by_its_name_is_at_the_broker_of_the_settings(
    plain_server: ActiveMqServer, name: str
) -> None:
    settings = ActiveMqSettings(f"stomp://{plain_server.address}", *USER)
    queue = QueueConfig(name="orders", uri=f"activemq://{name}")
    async with brokers_with(settings) as brokers, both_ends(brokers, queue) as ends:
        await ends.publisher.publish([publication("a")])

        assert (await receive_one(ends.broker)).body == b"a"


@pytest.mark.rule("BRK-6")
async def test_who_does_not_speak_stomp_is_told_apart_from_a_broker(
    anyio_backend: object, brokers: BrokerRegistry
) -> None:
    del anyio_backend

    async def babble(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"MESSAGE\ncontent-length:x\n\n\0")
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(babble, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        with pytest.raises(BrokerError, match="does not speak STOMP"):
            async with brokers.open_queue(queue_at(port, "orders")):
                pass


@pytest.mark.rule("BRK-2")
async def test_text_from_a_publisher_comes_as_it_was_written(
    ends: Ends, server: ActiveMqServer, name: str
) -> None:
    text = '{"id": "žluťoučký 🐎"}'.encode()
    async with bare_stomp(server.port) as others:
        await others.send(name, text)

    first = await receive_one(ends.broker)
    await ends.broker.nack([Nack(first.handle, 0.5)])
    second = await receive_one(ends.broker)

    assert first.body == second.body == text


# Traces.


@pytest.mark.rule("MED-1")
async def test_a_publishers_trace_comes_with_its_message_and_with_copies_of_it(
    server: ActiveMqServer, name: str, ends: Ends
) -> None:
    async with bare_stomp(server.port) as others:
        await others.send(name, body("g"), TRACED)

    first = await receive_one(ends.broker)
    await ends.broker.nack([Nack(first.handle, 0.1)])
    copy = await receive_one(ends.broker)

    assert (first.parent, copy.parent) == (PARENT, PARENT)


@pytest.mark.rule("ORD-2", "ORD-3")
async def test_a_strict_queue_has_one_consumer_and_the_next_one_gets_first_what_it_held(
    server: ActiveMqServer, name: str, brokers: BrokerRegistry
) -> None:
    given = replace(queue_at(server.port, name), ordering=Ordering.STRICT)
    async with brokers.open_publisher(given) as publisher, brokers.open_queue(given) as second:
        async with brokers.open_queue(given) as first:
            await publisher.publish([publication("a", group="g")])
            (a,) = await several(first, 1)
            waiting = asyncio.create_task(second.receive(10))
            await asyncio.sleep(0.3)  # it has subscribed by then
            await publisher.publish([publication(each, group="g") for each in "bc"])
            (b,) = await several(first, 1)
            await first.ack([a.handle])
            assert not waiting.done()
        after = list(await waiting)
        while len(after) < 2:
            after += await second.receive(10)

    assert bodies([a, b]) == ["a", "b"]
    assert bodies(after) == ["b", "c"]


@pytest.mark.parametrize(("groups", "is_kept"), [(500, True), (1500, False)])
async def test_the_broker_keeps_the_last_1024_groups_with_their_consumers(
    server: ActiveMqServer, name: str, brokers: BrokerRegistry, groups: int, is_kept: bool
) -> None:
    queue = queue_at(server.port, name)
    async with (
        brokers.open_publisher(queue) as publisher,
        brokers.open_queue(queue) as first,
        brokers.open_queue(queue) as second,
    ):
        consumers = (first, second)
        reading = [asyncio.create_task(each.receive(50)) for each in consumers]
        await asyncio.sleep(0.3)  # both have subscribed by then
        rounds: list[dict[str, int]] = []
        for dice in map(random.Random, (1, 2)):  # in another order, so not in turn again
            found: dict[str, int] = {}
            order = dice.sample(range(groups), groups)
            for start in range(0, groups, 500):
                some = order[start : start + 500]
                await publisher.publish([publication(str(n), group=f"g{n}") for n in some])
            while len(found) < groups:
                await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
                for number, task in enumerate(reading):
                    if task.done():
                        received = task.result()
                        found |= dict.fromkeys(bodies(received), number)
                        await consumers[number].ack([each.handle for each in received])
                        reading[number] = asyncio.create_task(consumers[number].receive(50))
            rounds.append(found)
        for task in reading:
            task.cancel()
        await asyncio.wait(reading)

    assert set(rounds[0].values()) == {0, 1}
    assert (rounds[0] == rounds[1]) is is_kept
