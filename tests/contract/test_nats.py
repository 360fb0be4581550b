"""What only NATS JetStream does, and what it does when the server fails."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from nats.aio.client import Client

from router.brokers import BrokerRegistry
from router.brokers.nats import consumer as nats_consumer
from router.core.config import QueueConfig
from router.core.message import ReceivedMessage
from router.core.partitions import partition_number
from router.ports import Broker, DataRefused, Depth, Disconnected, Nack, QueueRefused, Unsettled
from tests.contract.cases import PARENT, TRACED, Ends, bodies, both_ends, publication, receive_one
from tests.support.proxy import proxy_to
from tests.support.servers import nats
from tests.support.servers.base import free_port
from tests.support.servers.nats import NatsServer, add_stream, call

pytestmark = pytest.mark.anyio

STREAM = "ORDERS"
CONSUMER = "message-router-orders"
SECOND = 1_000_000_000
EXPLICIT: dict[str, object] = {
    "durable_name": CONSUMER,
    "ack_policy": "explicit",
    "ack_wait": 30 * SECOND,
}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    with NatsServer(nats.current(), tmp_path).running() as server:
        yield server


@pytest.fixture
async def stream(server: NatsServer) -> None:
    await add_stream(server.port, STREAM)


@pytest.fixture
async def brokers() -> AsyncIterator[BrokerRegistry]:
    async with BrokerRegistry(worker_id="worker-1", dedup_window=300.0) as brokers:
        yield brokers


@pytest.fixture
async def ends(stream: None, server: NatsServer, brokers: BrokerRegistry) -> AsyncIterator[Ends]:
    del stream  # asked for only to be there
    async with both_ends(brokers, queue_at(server.port)) as ends:
        yield ends


def queue_at(port: int, lease: float | None = None, options: str = "") -> QueueConfig:
    uri = f"nats://127.0.0.1:{port}/?stream={STREAM}{options}"
    return QueueConfig(name="orders", uri=uri, visibility_timeout=lease)


async def make_consumer(port: int, terms: Mapping[str, object]) -> None:
    question = {"stream_name": STREAM, "config": {**EXPLICIT, **terms}}
    await call(port, f"CONSUMER.DURABLE.CREATE.{STREAM}.{CONSUMER}", question)


async def consumer(port: int) -> dict[str, Any]:
    found: dict[str, Any] = await call(port, f"CONSUMER.INFO.{STREAM}.{CONSUMER}", {})
    return found


async def kept(port: int) -> int:
    """How many messages are in the stream."""
    messages: int = (await call(port, f"STREAM.INFO.{STREAM}", {}))["state"]["messages"]
    return messages


async def receive_for_ever(broker: Broker) -> None:
    while not await broker.receive(10):
        pass


async def depth_of(broker: Broker) -> Depth:
    depth = await broker.depth()
    assert depth is not None
    return depth


def handles_of(unsettled: Sequence[Unsettled]) -> list[Any]:
    return [each.handle for each in unsettled]


def handles(messages: Sequence[ReceivedMessage]) -> list[Any]:
    return [received.handle for received in messages]


# When the server fails.


@pytest.mark.rule("P1", "BRK-3")
@pytest.mark.parametrize("ending", ["stop", "kill"])
async def test_a_lease_outlives_a_server_unless_the_server_forgot_it(
    ends: Ends, server: NatsServer, ending: str
) -> None:
    await ends.publisher.publish([publication("a"), publication("b")])
    first = await receive_one(ends.broker)
    second = await receive_one(ends.broker)
    waiting = asyncio.ensure_future(receive_for_ever(ends.broker))
    await asyncio.sleep(0.05)

    await asyncio.to_thread(getattr(server, ending))
    await asyncio.to_thread(server.start)

    with pytest.raises(Disconnected):
        await waiting
    with pytest.raises(Disconnected):
        await ends.broker.ack([first.handle])
    async with both_ends(ends.brokers, ends.queue) as again:
        await again.publisher.publish([publication("c")])
        lost = await again.broker.extend([second.handle], 30)
        unsettled = await again.broker.ack([first.handle, second.handle])
        batch = await again.broker.receive(10)

    forgotten = [each for each in (first, second) if each.handle in handles_of(unsettled)]
    assert bodies(batch) == [*bodies(forgotten), "c"]
    assert all(each.stale for each in (*lost, *unsettled))
    assert ending == "kill" or not forgotten


@pytest.mark.rule("BRK-3")
@pytest.mark.parametrize("heard", [False, True])
async def test_an_ack_whose_connection_is_cut_is_good_on_the_next_one(
    ends: Ends, server: NatsServer, heard: bool
) -> None:
    await ends.publisher.publish([publication(str(number)) for number in range(5)])

    def cut(data: bytes) -> bytes | None:
        return None if b"+ACK" in data else data

    def deafen(data: bytes) -> bytes:
        if b"+ACK" in data:
            proxy.to_client = lambda _: None
        return data

    async with proxy_to(server.port) as proxy:
        queue = queue_at(proxy.port)
        async with ends.brokers.open_queue(queue) as broker:
            batch = await broker.receive(10)
            proxy.to_server = deafen if heard else cut
            with pytest.raises(Disconnected):
                await broker.ack(handles(batch))
            still_there = await kept(server.port)
        proxy.to_server, proxy.to_client = lambda data: data, lambda data: data
        async with ends.brokers.open_queue(queue) as broker:
            unsettled = await broker.ack(handles(batch))

    assert not unsettled
    assert (still_there, await kept(server.port)) == (0 if heard else 5, 0)


@pytest.mark.rule("BRK-6")
async def test_a_server_that_falls_silent_is_noticed(ends: Ends, server: NatsServer) -> None:
    await ends.publisher.publish([publication("a")])
    received = await receive_one(ends.broker)
    waiting = asyncio.ensure_future(ends.broker.receive(1))
    await asyncio.sleep(0.05)

    server.freeze()
    frozen_at = time.monotonic()
    await asyncio.sleep(0.1)  # until all of its threads stand still
    try:
        with pytest.raises(Disconnected):
            await ends.broker.ack([received.handle])
        with pytest.raises(Disconnected):
            await waiting
        noticed_after = time.monotonic() - frozen_at
    finally:
        server.thaw()

    assert noticed_after < 10


@pytest.mark.rule("OPS-3")
async def test_a_request_that_the_server_has_lost_is_noticed(
    stream: None, server: NatsServer, brokers: BrokerRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    del stream
    monkeypatch.setattr(nats_consumer, "SILENCE_SECONDS", 0.5)
    async with proxy_to(server.port) as proxy, brokers.open_queue(queue_at(proxy.port)) as broker:
        proxy.to_server = lambda data: b"" if b"CONSUMER.MSG.NEXT" in data else data

        with pytest.raises(Disconnected, match="heart-beats"):
            await broker.receive(1)


@pytest.mark.rule("BRK-6")
async def test_heart_beats_keep_a_long_wait_alive(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats_consumer, "HEARTBEAT_SECONDS", 0.2)
    monkeypatch.setattr(nats_consumer, "SILENCE_SECONDS", 0.5)
    waiting = asyncio.ensure_future(ends.broker.receive(1))
    await asyncio.sleep(1.2)

    await ends.publisher.publish([publication("a")])

    assert bodies(await waiting) == ["a"]


@pytest.mark.rule("CFG-7")
async def test_a_deleted_consumer_is_created_again(ends: Ends, server: NatsServer) -> None:
    await ends.publisher.publish([publication("a")])
    stale = await receive_one(ends.broker)
    waiting = asyncio.ensure_future(ends.broker.receive(1))
    await asyncio.sleep(0.05)

    await call(server.port, f"CONSUMER.DELETE.{STREAM}.{CONSUMER}", {})

    with pytest.raises(Disconnected, match="gone"):
        await waiting
    async with ends.brokers.open_queue(ends.queue) as broker:
        again = await receive_one(broker)
        assert again.broker_id == stale.broker_id
        refused = await broker.nack([Nack(stale.handle, 0)])
        assert [(one.handle, one.stale) for one in refused] == [(stale.handle, True)]


@pytest.mark.rule("ROUTE-1", "BRK-3")
async def test_a_recreated_stream_gives_new_ids_and_takes_no_old_handles(
    ends: Ends, server: NatsServer
) -> None:
    await ends.publisher.publish([publication("a")])
    old = await receive_one(ends.broker)
    await call(server.port, f"STREAM.DELETE.{STREAM}", {})
    await add_stream(server.port, STREAM)
    await ends.publisher.publish([publication("b")])

    async with (
        BrokerRegistry(worker_id="worker-2", dedup_window=300.0) as other,
        other.open_queue(ends.queue) as its_broker,
    ):
        new = await receive_one(its_broker)
        async with ends.brokers.open_queue(ends.queue) as broker:
            refused = await broker.ack([old.handle])

    assert [each.stale for each in refused] == [True]
    assert new.broker_id != old.broker_id
    assert await kept(server.port) == 1


@pytest.mark.rule("BRK-6")
async def test_no_server_at_all_is_a_lost_connection(brokers: BrokerRegistry) -> None:
    queue = QueueConfig(name="orders", uri=f"nats://ada:secret@127.0.0.1:{free_port()}/")

    with pytest.raises(Disconnected, match="no connection to NATS") as lost:
        async with brokers.open_queue(queue):
            pass

    assert "secret" not in str(lost.value)


# What is asked of the server, and when.


@pytest.mark.rule("OPS-4")
async def test_a_stopped_receive_takes_nothing_from_the_next_one(ends: Ends) -> None:
    waiting = asyncio.ensure_future(ends.broker.receive(10))
    await asyncio.sleep(0.05)
    ends.broker.stop()
    stopped = await waiting
    await ends.publisher.publish([publication("a")])
    started = time.monotonic()

    async with ends.brokers.open_queue(ends.queue) as other:
        batch = await other.receive(10)

    assert (bodies(stopped), bodies(batch)) == ([], ["a"])
    assert time.monotonic() - started < 1


@pytest.mark.rule("OPS-4", "FIFO-1")
@pytest.mark.parametrize("program", [nats.current, nats.old])
async def test_what_is_returned_in_the_end_keeps_its_place(
    tmp_path: Path, brokers: BrokerRegistry, program: Callable[[], str]
) -> None:
    names = [str(number) for number in range(10)]
    with NatsServer(program(), tmp_path).running() as server:
        await add_stream(server.port, STREAM)
        async with both_ends(brokers, queue_at(server.port)) as ends:
            await ends.publisher.publish([publication(name) for name in names])
            first, *others = await ends.broker.receive(10)
            waiting = asyncio.ensure_future(ends.broker.receive(10))
            await asyncio.sleep(0.05)

            ends.broker.stop()
            acking = asyncio.ensure_future(ends.broker.ack([first.handle]))
            for received in others:
                await ends.broker.nack([Nack(received.handle, 0)])
            await acking
            stopped = await waiting
        async with brokers.open_queue(queue_at(server.port)) as broker:
            batch = await broker.receive(10)

    assert (bodies(stopped), bodies(batch)) == ([], names[1:])


@pytest.mark.rule("FIFO-1")
async def test_what_was_returned_one_after_the_other_comes_back_together(ends: Ends) -> None:
    names = [str(number) for number in range(10)]
    await ends.publisher.publish([publication(name, group="g") for name in names])

    first, *mates = await ends.broker.receive(50)

    await ends.broker.nack([Nack(first.handle, 0.6)])
    await asyncio.sleep(0.4)
    for received in mates:
        await ends.broker.nack([Nack(received.handle, 0.6)])

    assert bodies(await ends.broker.receive(50)) == names


@pytest.mark.rule("BRK-1")
async def test_a_batch_that_its_consumer_cuts_short_is_handed_over_at_once(
    stream: None, server: NatsServer, brokers: BrokerRegistry
) -> None:
    del stream
    await make_consumer(server.port, {"max_ack_pending": 3})
    async with both_ends(brokers, queue_at(server.port)) as ends:
        await ends.publisher.publish([publication(str(number)) for number in range(5)])
        started = time.monotonic()

        first = await ends.broker.receive(10)
        took = time.monotonic() - started
        await ends.broker.ack(handles(first))
        rest = await ends.broker.receive(10)

    assert (bodies(first), bodies(rest)) == (["0", "1", "2"], ["3", "4"])
    assert took < 1


@pytest.mark.rule("BRK-1")
async def test_a_consumer_may_allow_less_than_is_asked_for(
    stream: None, server: NatsServer, brokers: BrokerRegistry
) -> None:
    del stream
    await make_consumer(server.port, {"max_batch": 2, "max_expires": SECOND})
    async with both_ends(brokers, queue_at(server.port)) as ends:
        await ends.publisher.publish([publication(str(number)) for number in range(3)])

        batches = [bodies(await ends.broker.receive(10)) for _ in range(3)]

    assert batches == [["0", "1"], ["2"], []]


# The consumer.


@pytest.mark.rule("CFG-7")
async def test_a_consumer_is_made_without_limits(
    stream: None, server: NatsServer, brokers: BrokerRegistry
) -> None:
    del stream
    async with brokers.open_queue(
        queue_at(server.port, options=f"&subject={STREAM}.a.>")
    ) as broker:
        lease = broker.lease_seconds

    terms = (await consumer(server.port))["config"]
    assert (terms["max_deliver"], terms["max_ack_pending"]) == (-1, -1)
    assert (terms["ack_policy"], terms["filter_subject"]) == ("explicit", f"{STREAM}.a.>")
    assert terms["ack_wait"] == 30 * SECOND
    assert lease == 30.0


@pytest.mark.rule("CFG-7")
async def test_a_consumer_that_is_there_keeps_what_the_document_does_not_name(
    stream: None, server: NatsServer, brokers: BrokerRegistry
) -> None:
    del stream
    await make_consumer(server.port, {"ack_wait": 7 * SECOND, "max_ack_pending": 9})

    async with brokers.open_queue(queue_at(server.port)) as broker:
        as_found = broker.lease_seconds
    async with brokers.open_queue(queue_at(server.port, lease=11.0)) as broker:
        as_asked = broker.lease_seconds

    terms = (await consumer(server.port))["config"]
    assert (as_found, as_asked) == (7.0, 11.0)
    assert (terms["ack_wait"], terms["max_ack_pending"]) == (11 * SECOND, 9)


@pytest.mark.rule("CFG-7")
@pytest.mark.parametrize(
    ("terms", "why"),
    [
        ({"ack_policy": "none"}, "other than explicitly"),
        ({"ack_policy": "all"}, "other than explicitly"),
        ({"deliver_subject": "somewhere"}, "push consumer"),
        ({"headers_only": True}, "headers without bodies"),
        ({"filter_subject": "LOG.b"}, "another subject"),
    ],
)
async def test_a_consumer_that_is_not_fit_is_refused(
    server: NatsServer, brokers: BrokerRegistry, terms: dict[str, object], why: str
) -> None:
    log = {"name": STREAM, "subjects": ["LOG.>"]}  # a work queue would not have such consumers
    await call(server.port, f"STREAM.CREATE.{STREAM}", log)
    await make_consumer(server.port, terms)

    with pytest.raises(QueueRefused, match=why):
        async with brokers.open_queue(queue_at(server.port, options="&subject=LOG.a")):
            pass


@pytest.mark.rule("CFG-7")
async def test_a_stream_that_is_not_there_is_refused(
    server: NatsServer, brokers: BrokerRegistry
) -> None:
    with pytest.raises(QueueRefused, match="no stream 'ORDERS'"):
        async with brokers.open_queue(queue_at(server.port)):
            pass


@pytest.mark.rule("CFG-7")
async def test_what_jetstream_forbids_is_refused(ends: Ends, server: NatsServer) -> None:
    second = queue_at(server.port, options="&consumer=second")

    with pytest.raises(QueueRefused, match="workqueue"):
        async with ends.brokers.open_queue(second):
            pass


@pytest.mark.rule("CFG-7")
@pytest.mark.parametrize("credentials", ["", "ada:wrong-secret@"])
async def test_wrong_credentials_are_refused_and_right_ones_are_not(
    tmp_path: Path, brokers: BrokerRegistry, credentials: str
) -> None:
    guarded = NatsServer(nats.current(), tmp_path, user=("ada", "right-secret"))
    with guarded.running():
        wrong = QueueConfig(name="orders", uri=f"nats://{credentials}{guarded.address}/")
        right = QueueConfig(name="orders", uri=f"nats://ada:right-secret@{guarded.address}/")

        said = [await refusal(brokers, queue) for queue in (wrong, right)]

    assert said == ["NATS refuses the credentials", "there is no stream 'MESSAGES'"]


async def refusal(brokers: BrokerRegistry, queue: QueueConfig) -> str:
    with pytest.raises(QueueRefused) as refused:
        async with brokers.open_queue(queue):
            pass
    return str(refused.value)


# What becomes of a message.


@pytest.mark.rule("BRK-2", "DLQ-1")
async def test_a_dead_letter_is_terminated_and_leaves_the_stream(
    ends: Ends, server: NatsServer
) -> None:
    await ends.publisher.publish([publication("a")])
    received = await receive_one(ends.broker)

    async with stranger(server) as client:
        watched = await client.subscribe(f"$JS.EVENT.ADVISORY.CONSUMER.*.{STREAM}.{CONSUMER}")
        await client.flush()
        unsettled = await ends.broker.ack([received.handle], error="HTTP 404")
        advisory = await watched.next_msg(5)

    assert not unsettled
    assert "MSG_TERMINATED" in advisory.subject
    assert await kept(server.port) == 0


@pytest.mark.rule("DLQ-1")
async def test_the_last_delivery_that_a_consumer_allows_is_known_as_such(
    stream: None, server: NatsServer, brokers: BrokerRegistry
) -> None:
    del stream
    await make_consumer(server.port, {"max_deliver": 2})
    async with both_ends(brokers, queue_at(server.port)) as ends:
        await ends.publisher.publish([publication("a")])

        first = await receive_one(ends.broker)
        await ends.broker.nack([Nack(first.handle, 0)])
        second = await receive_one(ends.broker)

    assert (first.is_last, second.is_last) == (False, True)


@pytest.mark.rule("OPS-1", "OPS-3")
async def test_delayed_messages_are_counted_against_the_limit(
    stream: None, server: NatsServer, brokers: BrokerRegistry
) -> None:
    del stream
    await make_consumer(server.port, {"max_ack_pending": 3})
    async with both_ends(brokers, queue_at(server.port)) as ends:
        await ends.publisher.publish([publication(str(number)) for number in range(5)])
        first, second = await ends.broker.receive(2)
        await ends.broker.nack([Nack(first.handle, 60)])
        await ends.broker.nack([Nack(second.handle, 60)])

        with_room = await depth_of(ends.broker)
        await ends.broker.receive(1)
        without_room = await depth_of(ends.broker)

    assert with_room == Depth(waiting=5, in_flight=0, due=3, delayed=2, delayed_limit=3)
    assert without_room == Depth(waiting=4, in_flight=1, due=0, delayed=2, delayed_limit=3)


# Publishing.


@pytest.mark.rule("WQ-1")
@pytest.mark.parametrize("key", [" a ", "žluťoučký 🐎", "%61", "a\u00a0b"])
async def test_any_id_is_a_key(ends: Ends, key: str) -> None:
    others = [publication("a"), publication("a b")]

    first = await ends.publisher.publish([*others, publication(key)])
    second = await ends.publisher.publish([publication(key)])

    assert (first, second) == ([True, True, True], [False])


@pytest.mark.rule("WQ-1")
async def test_a_message_that_the_server_cannot_take_is_refused_with_all_others(
    ends: Ends, server: NatsServer
) -> None:
    large = publication("large", body=bytes(2 * 1024 * 1024))

    with pytest.raises(DataRefused, match="larger than"):
        await ends.publisher.publish([publication("a"), large])

    assert await kept(server.port) == 0


@pytest.mark.rule("WQ-1")
async def test_a_subject_that_no_stream_takes_is_refused(
    server: NatsServer, brokers: BrokerRegistry
) -> None:
    async with brokers.open_publisher(
        queue_at(server.port, options="&subject=elsewhere")
    ) as publisher:
        with pytest.raises(QueueRefused, match="no stream takes"):
            await publisher.publish([publication("a")])


@pytest.mark.rule("BRK-2")
async def test_a_message_of_another_program_is_taken_as_it_is(
    ends: Ends, server: NatsServer
) -> None:
    async with stranger(server) as client:
        await client.request(
            f"{STREAM}.x", b"hello", 5, headers={"Status": "404", "Content-Type": "text/plain"}
        )

    assert bodies(await ends.broker.receive(1)) == ["hello"]


@asynccontextmanager
async def stranger(server: NatsServer) -> AsyncIterator[Client]:
    client = Client()
    await client.connect(f"nats://{server.address}")
    try:
        yield client
    finally:
        await client.close()


# Traces.


@pytest.mark.rule("MED-1")
@pytest.mark.parametrize("spell", [str.lower, str.capitalize])
async def test_a_publishers_trace_comes_with_its_message_however_it_is_spelt(
    ends: Ends, server: NatsServer, spell: Callable[[str], str]
) -> None:
    headers = {spell(name): value for name, value in TRACED.items()}
    async with stranger(server) as client:
        await client.jetstream().publish(f"{STREAM}.a", b"a", headers=headers)

    received = await receive_one(ends.broker)

    assert received.parent == PARENT


@pytest.mark.rule("PART-2")
async def test_the_server_puts_groups_into_the_partitions_in_which_the_router_does(
    server: NatsServer,
) -> None:
    transform = {"src": "groups.*", "dest": "parts.{{partition(16,1)}}.{{wildcard(1)}}"}
    config = {"name": "PARTS", "subjects": ["groups.*"], "subject_transform": transform}
    await call(server.port, "STREAM.CREATE.PARTS", config)
    groups = [*(f"customer-{n}" for n in range(50)), "Zoë", "顧客", "a"]
    client = Client()
    await client.connect(f"nats://127.0.0.1:{server.port}")
    try:
        found: dict[str, int] = {}
        for group in groups:
            await client.request(f"groups.{group}", b"{}", 5)
            last = await call(server.port, "STREAM.MSG.GET.PARTS", {"seq": len(found) + 1})
            _, number, name = last["message"]["subject"].split(".")
            found[name] = int(number)
    finally:
        await client.close()

    assert found == {group: partition_number(group, 16) for group in groups}
