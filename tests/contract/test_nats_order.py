"""NATS: what was left unsettled comes first (ORD-3), and one router receives a strict queue."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from router.brokers import BrokerRegistry
from router.brokers.nats import connection as nats_connection
from router.brokers.nats import sole, unsettled
from router.core.config import Ordering, QueueConfig
from router.ports import Disconnected, Nack, QueueRefused
from tests.contract.cases import bodies, publication, receive_one, several
from tests.support.cable import cable_to
from tests.support.servers import nats
from tests.support.servers.nats import NatsServer, add_stream, call

pytestmark = pytest.mark.anyio

STREAM = "ORDERS"
LEASE = 1.5
_RESET = f"$JS.API.CONSUMER.RESET.{STREAM}.message-router-orders"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    with NatsServer(nats.current(), tmp_path).running() as server:
        yield server


@pytest.fixture
def old_server(tmp_path: Path) -> Iterator[NatsServer]:
    with NatsServer(nats.old(), tmp_path).running() as server:
        yield server


@pytest.fixture
def strict_server(tmp_path: Path) -> Iterator[NatsServer]:
    """Its users may not reset consumers."""
    with NatsServer(nats.current(), tmp_path, denied=_RESET).running() as server:
        yield server


@asynccontextmanager
async def router(name: str) -> AsyncIterator[BrokerRegistry]:
    async with BrokerRegistry(worker_id=name, dedup_window=300.0) as brokers:
        yield brokers


def queue_at(server: NatsServer, lease: float | None = None) -> QueueConfig:
    uri = f"nats://{server.address}/?stream={STREAM}"
    return QueueConfig(name="orders", uri=uri, visibility_timeout=lease)


def strict_at(server: NatsServer) -> QueueConfig:
    return replace(queue_at(server), ordering=Ordering.STRICT)


async def leave_two_of(queue: QueueConfig, *names: str) -> None:
    """Let a router receive these and die: it has settled all but the first and the third."""
    async with router("dead") as brokers:
        async with brokers.open_publisher(queue) as publisher:
            await publisher.publish([publication(each) for each in names])
        async with brokers.open_queue(queue) as broker:
            held = await several(broker, len(names))
            await broker.ack([held[at].handle for at in range(len(held)) if at not in {0, 2}])
        async with brokers.open_publisher(queue) as publisher:
            await publisher.publish([publication("new")])


@pytest.mark.rule("ORD-3")
async def test_what_a_dead_router_held_comes_at_once_and_before_anything_newer(
    server: NatsServer,
) -> None:
    await add_stream(server.port, STREAM)
    queue = queue_at(server)
    await leave_two_of(queue, "a", "b", "c")
    async with router("next") as brokers, brokers.open_queue(queue) as broker:
        started = time.monotonic()
        received = await several(broker, 3)
        took = time.monotonic() - started
        await broker.ack([each.handle for each in received])
        depth = await broker.depth()

    assert bodies(received) == ["a", "c", "new"]
    assert took < 5
    assert depth is not None
    assert (depth.waiting, depth.in_flight) == (0, 0)


@pytest.mark.rule("ORD-3")
async def test_an_old_server_hands_out_nothing_newer_before_it_came_again(
    old_server: NatsServer,
) -> None:
    await add_stream(old_server.port, STREAM)
    queue = queue_at(old_server, LEASE)
    await leave_two_of(queue, "a", "b", "c")
    async with router("next") as brokers, brokers.open_queue(queue) as broker:
        received = await several(broker, 3)
        lost = await broker.ack([each.handle for each in received])

    assert bodies(received) == ["a", "c", "new"]
    assert not lost


@pytest.mark.rule("ORD-3", "BRK-7")
async def test_without_the_right_to_reset_it_waits_and_says_which_right_is_missing(
    strict_server: NatsServer,
) -> None:
    await add_stream(strict_server.port, STREAM)
    queue = queue_at(strict_server, LEASE)
    await leave_two_of(queue, "a", "b", "c")
    async with router("next") as brokers, brokers.open_queue(queue) as broker:
        received = await several(broker, 3)
        advice = broker.traits.advice

    assert bodies(received) == ["a", "c", "new"]
    assert advice is not None
    assert _RESET in advice


@pytest.mark.rule("ORD-3")
async def test_a_stream_that_keeps_what_was_acknowledged_does_not_repeat_much_of_it(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unsettled, "MAX_REPEATED_MESSAGES", 0)
    config = {"name": STREAM, "subjects": [f"{STREAM}.>"], "storage": "file"}
    await call(server.port, f"STREAM.CREATE.{STREAM}", config)
    queue = queue_at(server, LEASE)
    await leave_two_of(queue, "a", "b", "c")
    async with router("next") as brokers, brokers.open_queue(queue) as broker:
        received = await several(broker, 3)

    assert bodies(received) == ["a", "c", "new"]


@pytest.mark.rule("ORD-3")
async def test_what_waits_for_older_messages_is_kept_and_given_back_at_a_stop(
    old_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unsettled, "MAX_NEWER_MESSAGES", 1)
    await add_stream(old_server.port, STREAM)
    queue = queue_at(old_server, 3.0)
    await leave_two_of(queue, "a", "b", "c")
    async with router("stopped") as brokers, brokers.open_queue(queue) as broker:
        waiting = asyncio.ensure_future(broker.receive(10))
        await asyncio.sleep(1.5)
        broker.stop()
        stopped = await waiting
    async with router("next") as brokers, brokers.open_queue(queue) as broker:
        received = await several(broker, 3)

    assert stopped == ()
    assert bodies(received) == ["a", "c", "new"]


@pytest.mark.rule("ORD-3")
async def test_what_another_router_holds_stays_with_it(server: NatsServer) -> None:
    await add_stream(server.port, STREAM)
    queue = queue_at(server)
    async with (
        router("one") as brokers,
        router("two") as others,
        brokers.open_queue(queue) as one,
        others.open_queue(queue) as two,
    ):
        await publish(brokers, queue, "a", "b")
        held = await several(one, 2)
        await publish(brokers, queue, "c")
        received = await receive_one(two)
        lost = await one.ack([each.handle for each in held])

    assert bodies([received]) == ["c"]
    assert not lost


@pytest.mark.rule("ORD-3", "BRK-6")
async def test_a_new_connection_of_the_same_router_resets_nothing(server: NatsServer) -> None:
    await add_stream(server.port, STREAM)
    queue = queue_at(server)
    async with router("one") as brokers:
        async with brokers.open_publisher(queue) as publisher:
            await publisher.publish([publication(each) for each in "abc"])
        async with brokers.open_queue(queue) as broker:
            a, b = await several(broker, 2)
            await broker.nack([Nack(b.handle, 60)])
        async with brokers.open_queue(queue) as broker:
            received = await receive_one(broker)
            lost = await broker.ack([a.handle])

    assert bodies([received]) == ["c"]
    assert not lost


@pytest.mark.rule("ORD-3")
@pytest.mark.usefixtures("short_lock")
async def test_what_the_router_let_go_comes_first_on_its_next_connection(
    server: NatsServer,
) -> None:
    await add_stream(server.port, STREAM)
    queue = strict_at(server)
    async with router("one") as brokers:
        async with brokers.open_queue(queue) as broker:
            await publish(brokers, queue, "a", "b", "c")
            held = await several(broker, 3)
            forget = broker.traits.forget
            assert forget is not None
            forget([each.handle for each in held[1:]])
            await broker.ack([held[0].handle])
        await publish(brokers, queue, "d")
        async with brokers.open_queue(queue) as broker:
            received = await several(broker, 3)

    assert bodies(received) == ["b", "c", "d"]


@pytest.mark.rule("ORD-3")
async def test_the_first_router_after_a_restart_of_the_server_takes_nothing_of_the_others(
    server: NatsServer,
) -> None:
    await add_stream(server.port, STREAM)
    queue = queue_at(server)
    async with router("one") as brokers, router("two") as others:
        async with brokers.open_queue(queue) as one, others.open_queue(queue) as two:
            await publish(brokers, queue, "a")
            held = await receive_one(one)
            await publish(brokers, queue, "b")
            await receive_one(two)
            server.stop()
            server.start()
        async with others.open_queue(queue) as two:
            await publish(brokers, queue, "c")
            received = await receive_one(two)
        async with brokers.open_queue(queue) as one:
            lost = await one.ack([held.handle])

    assert bodies([received]) == ["c"]
    assert not lost


@pytest.mark.rule("ORD-2")
async def test_an_answer_that_never_comes_does_not_cost_the_lock(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sole, "TTL_SECONDS", 4.5)
    monkeypatch.setattr(nats_connection, "ANSWER_SECONDS", 2.25)  # half of it, as it is
    await add_stream(server.port, STREAM)
    async with cable_to(server.port) as cable, router("one") as brokers:
        uri = f"nats://127.0.0.1:{cable.port}/?stream={STREAM}"
        queue = replace(strict_at(server), uri=uri)
        async with brokers.open_queue(queue) as broker:
            await publish(brokers, queue, "a")
            await receive_one(broker)
            pulse = broker.traits.pulse
            assert pulse is not None
            cable.freeze()  # the renewal after 1.5 s is not answered in time
            await asyncio.sleep(4)
            cable.thaw()
            await asyncio.sleep(1.7)

            assert not pulse.is_silent()


@pytest.fixture
def short_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sole, "TTL_SECONDS", 1.5)
    monkeypatch.setattr(sole, "MARGIN_SECONDS", 0.3)
    monkeypatch.setattr(sole, "LOOK_SECONDS", 0.1)


async def publish(brokers: BrokerRegistry, queue: QueueConfig, *names: str) -> None:
    async with brokers.open_publisher(queue) as publisher:
        await publisher.publish([publication(each) for each in names])


@pytest.mark.rule("ORD-2", "ORD-3")
@pytest.mark.usefixtures("short_lock")
async def test_one_router_receives_a_strict_queue_and_the_next_takes_over_with_a_higher_fence(
    server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="router.brokers.nats")
    await add_stream(server.port, STREAM)
    queue = strict_at(server)
    async with (
        router("one") as brokers,
        router("two") as others,
        others.open_queue(queue) as two,
    ):
        async with brokers.open_queue(queue) as one:
            await publish(brokers, queue, "a")
            a = await receive_one(one)
            waiting = asyncio.ensure_future(several(two, 1))
            await publish(brokers, queue, "b")
            b = await receive_one(one)
            await asyncio.sleep(2.5)  # more than a TTL
            standing_by = not waiting.done()
            depth = await two.depth()
            await one.ack([a.handle, b.handle])
        await publish(brokers, queue, "c")
        after = await waiting

    fences = [each.fence for each in caplog.records if hasattr(each, "fence")]
    holders = [each.holder for each in caplog.records if hasattr(each, "holder")]
    assert bodies([a, b, *after]) == ["a", "b", "c"]
    assert standing_by
    assert depth is not None
    assert depth.due == 0
    assert holders == ["one"]
    assert fences[0] == fences[1] == fences[2] - 1


@pytest.mark.rule("ORD-2", "ORD-3", "ORD-9")
@pytest.mark.usefixtures("short_lock")
async def test_a_router_that_stood_still_has_lost_a_strict_queue(server: NatsServer) -> None:
    await add_stream(server.port, STREAM)
    queue = strict_at(server)
    async with router("one") as brokers:
        async with brokers.open_queue(queue) as one:
            await publish(brokers, queue, "a", "b")
            a, _ = await several(one, 2)
            pulse = one.traits.pulse
            assert pulse is not None
            before = pulse.is_silent()
            time.sleep(1.6)  # noqa: ASYNC251  the whole process stands still
            at_once = pulse.is_silent()
            await publish(brokers, queue, "c")
            with pytest.raises(Disconnected, match="lock"):
                await one.receive(10)
        async with brokers.open_queue(queue) as one:
            received = await several(one, 3)

    assert (before, at_once) == (False, True)
    assert bodies(received) == ["a", "b", "c"]
    assert received[0].broker_id == a.broker_id


@pytest.mark.rule("ORD-2")
async def test_a_strict_queue_whose_user_may_make_no_bucket_is_refused(tmp_path: Path) -> None:
    denied = "$JS.API.STREAM.CREATE.KV_message-router-locks"
    with NatsServer(nats.current(), tmp_path, denied=denied).running() as server:
        await add_stream(server.port, STREAM)
        async with router("one") as brokers, brokers.open_queue(strict_at(server)) as broker:
            with pytest.raises(QueueRefused, match=r"publish to \$JS\.API\.STREAM\.CREATE"):
                await broker.receive(1)
