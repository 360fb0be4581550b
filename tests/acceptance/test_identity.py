"""Messages that look alike: every body is delivered or kept, whatever ids its producer chose."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aio_pika
import pytest

from tests.acceptance.process import RouterProcess, eventually
from tests.acceptance.site import Site
from tests.acceptance.targets import Gate
from tests.outbound.servers import Connection, LoopbackTarget, answering, listening
from tests.support.proxy import proxy_to
from tests.support.servers.rabbitmq import RabbitServer, rabbit_server

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

SOON = 10.0  # seconds: a message that is dropped never comes, so a failure need not wait longer
PARALLEL: dict[str, object] = {"code": "DEFAULT-POOL", "concurrency": 5, "ungrouped": "parallel"}
BASIC_ACK = b"\x00\x3c\x00\x50"  # class and method, as they go over the wire
FLOW_OK = b"\x00\x14\x00\x15"  # the broker's answer that tells that an ACK before it took effect


@pytest.fixture(scope="module")
def server() -> Iterator[RabbitServer]:
    with rabbit_server() as server:
        yield server


def order(message_id: str, target: LoopbackTarget, path: str, token: str = "") -> dict[str, object]:
    """Return a message. Its body is unique by its target's path."""
    return {"id": message_id, "mediationTarget": f"{target.url}/{path}", "authToken": token}


def paths(target: LoopbackTarget) -> list[str]:
    return [request.line.split()[1].rpartition("/")[2] for request in target.requests]


async def produce(server: RabbitServer, queue: str, body: bytes, message_id: str) -> None:
    """Publish as a producer that chooses the `message_id` property itself."""
    await until_made(server, queue)
    async with await aio_pika.connect(server.url) as connection, connection.channel() as channel:
        message = aio_pika.Message(body, message_id=message_id, delivery_mode=2)
        await channel.default_exchange.publish(message, routing_key=queue)


async def produce_without_id(server: RabbitServer, queue: str, body: bytes) -> None:
    """The client of the function above would make up a `message_id`."""
    await until_made(server, queue)
    await asyncio.to_thread(server.publish_without_id, queue, body)


async def until_made(server: RabbitServer, queue: str) -> None:
    """Wait until the router has declared its queue: what is published before is dropped."""
    async with await aio_pika.connect(server.url) as connection:
        for _ in range(int(SOON / 0.1)):
            try:
                async with connection.channel() as channel:
                    await channel.declare_queue(queue, passive=True)
            except aio_pika.exceptions.ChannelNotFoundEntity:
                await asyncio.sleep(0.1)
            else:
                return


async def letters(router: RouterProcess, number: int) -> list[dict[str, Any]]:
    """Return the dead letters once there are so many, or what there is in the end."""
    found: list[dict[str, Any]] = []
    for _ in range(int(SOON / 0.1)):
        found = (await router.get("/dead-letters")).json()["items"]
        if len(found) >= number:
            break
        await asyncio.sleep(0.1)
    return found


def dead_paths(found: Sequence[dict[str, Any]]) -> list[str]:
    return sorted(letter["target"].rpartition("/")[2] for letter in found)


# RabbitMQ, whose message_id is whatever a publisher wrote there.


@pytest.mark.rule("ID-1", "ID-3", "ROUTE-1", "P1")
async def test_two_messages_with_one_message_id_are_both_delivered(
    site: Site, server: RabbitServer
) -> None:
    gate = Gate()
    site.configure_queue(f"{server.url}?queue=alike&type=classic", PARALLEL)
    async with listening(gate.script) as slow, listening() as quick, site.router():
        created = order("order-7-created", slow, "created")
        paid = order("order-7-paid", quick, "paid")
        await produce(server, "alike", json.dumps(created).encode(), "order-7")
        await eventually(lambda: paths(slow) == ["created"])
        await produce(server, "alike", json.dumps(paid).encode(), "order-7")
        try:
            await eventually(lambda: paths(quick) == ["paid"], within=SOON)
        finally:
            gate.open()
        await eventually(lambda: gate.answered == ["order-7-created"])


@dataclass
class LostAnswer:
    """Cuts the wire once, when the broker tells that it has heard an ACK."""

    ack_was_sent: bool = False
    was_cut: bool = False

    def to_server(self, data: bytes) -> bytes | None:
        self.ack_was_sent |= BASIC_ACK in data
        return data

    def to_client(self, data: bytes) -> bytes | None:
        if self.ack_was_sent and not self.was_cut and FLOW_OK in data:
            self.was_cut = True
            return None
        return data


@pytest.mark.rule("BRK-3", "ID-3", "P1")
async def test_an_ack_whose_answer_was_lost_swallows_no_later_publication(
    site: Site, server: RabbitServer, target: LoopbackTarget
) -> None:
    lost = LostAnswer()
    first = json.dumps(order("order-7", target, "first")).encode()
    other = json.dumps(order("order-7", target, "other")).encode()
    async with proxy_to(server.port) as wire:
        wire.to_server, wire.to_client = lost.to_server, lost.to_client
        url = server.url.replace(f":{server.port}/", f":{wire.port}/")
        site.configure_queue(f"{url}?queue=unheard&type=classic")
        async with site.router():
            await produce(server, "unheard", first, "order-7")
            await eventually(lambda: lost.was_cut)
            assert paths(target) == ["first"]
            await produce(server, "unheard", other, "order-7")
            await eventually(lambda: paths(target) == ["first", "other"], within=SOON)
            await produce(server, "unheard", first, "order-7")
            await eventually(lambda: paths(target) == ["first", "other", "first"], within=SOON)


@pytest.mark.rule("DLQ-1", "ID-2", "ID-3")
async def test_two_dead_messages_with_one_message_id_are_two_letters(
    site: Site, server: RabbitServer
) -> None:
    site.configure_queue(f"{server.url}?queue=dead&type=classic")
    async with listening(answering(404)) as target, site.router() as router:
        for number, path in enumerate(("created", "paid"), start=1):
            body = json.dumps(order("order-7", target, path)).encode()
            await produce(server, "dead", body, "order-7")
            await eventually(lambda path=path: path in paths(target))  # type: ignore[misc]
            found = await letters(router, number)

    assert dead_paths(found) == ["created", "paid"]


@pytest.mark.rule("DLQ-1", "BRK-2", "ID-3")
async def test_malformed_bodies_are_kept_side_by_side_whichever_process_met_them(
    site: Site, server: RabbitServer
) -> None:
    site.configure_queue(f"{server.url}?queue=malformed&type=classic")
    found: list[dict[str, Any]] = []
    for number, body in enumerate((b"neither JSON", b"nor this"), start=1):
        async with site.router() as router:
            await produce_without_id(server, "malformed", body)
            found = await letters(router, number)
            await router.stop()

    assert [letter["reason"] for letter in found] == ["MALFORMED", "MALFORMED"]


# The embedded queue, and the API that publishes to it.


@pytest.mark.rule("DLQ-1", "ID-1", "ID-3")
async def test_a_recreated_queue_file_overwrites_no_letter(site: Site) -> None:
    site.configure()
    async with listening(answering(404)) as target:
        async with site.router() as router:
            await router.publish([order("a", target, "before")])
            await letters(router, 1)
            await router.stop()
        for file in site.folder.glob("queue.db*"):
            file.unlink()
        async with site.router() as router:
            await router.publish([order("b", target, "after")])
            await eventually(lambda: paths(target) == ["before", "after"])
            found = await letters(router, 2)

    assert dead_paths(found) == ["after", "before"]


@dataclass
class Guarded:
    """A target that takes its time to refuse the expired token, until the fresh one was there."""

    accepted: list[str] = field(default_factory=list)
    fresh: asyncio.Event = field(default_factory=asyncio.Event)

    async def script(self, connection: Connection) -> None:
        while True:
            request = await connection.read()
            if request.headers["authorization"] == "Bearer fresh":
                self.fresh.set()
                self.accepted.append("fresh")
                await connection.reply()
            else:
                await asyncio.wait_for(self.fresh.wait(), SOON + 5)
                await connection.reply(401)


@pytest.mark.rule("ROUTE-3", "ID-2", "P1")
async def test_a_copy_with_a_fresh_token_is_delivered_while_the_expired_one_is_in_flight(
    site: Site,
) -> None:
    guarded = Guarded()
    site.configure(PARALLEL, queues=("orders", "resends"))
    async with listening(guarded.script) as target, site.router() as router:
        await router.publish([order("m", target, "x", "expired")], queue="orders")
        await eventually(lambda: len(target.requests) == 1)
        await router.publish([order("m", target, "x", "fresh")], queue="resends")
        await eventually(lambda: guarded.accepted == ["fresh"], within=SOON)
        (letter,) = await letters(router, 1)

    assert letter["httpStatus"] == 401


@dataclass
class Repairable:
    """A target that answers 404 until it is repaired."""

    status: int = 404

    async def script(self, connection: Connection) -> None:
        while True:
            await connection.read()
            await connection.reply(self.status)


@pytest.mark.rule("WQ-1", "ID-3", "P1")
@pytest.mark.parametrize("way", ["api", "cli"])
async def test_what_died_is_delivered_when_it_is_sent_again(site: Site, way: str) -> None:
    repairable = Repairable()
    site.configure()
    async with listening(repairable.script) as target, site.router() as router:
        line = json.dumps(order("m", target, "x")).encode()
        await send(router, way, line)
        await letters(router, 1)
        repairable.status = 200
        await send(router, way, line)
        await eventually(lambda: paths(target) == ["x", "x"], within=SOON)


async def send(router: RouterProcess, way: str, line: bytes) -> None:
    """Send one message. It is published, whatever was sent before."""
    if way == "api":
        answer = await router.post("/messages?queue=orders", json.loads(line))
        assert answer.json() == {"accepted": 1, "duplicates": 0, "ids": ["m"]}
    else:
        told = await router.command("send", "--queue", "orders", "--json", stdin=line + b"\n")
        assert told.code == 0, told.err
        assert (json.loads(told.out)["sent"], json.loads(told.out)["duplicates"]) == (1, 0)


@pytest.mark.rule("WQ-1", "ID-2", "P1")
async def test_one_call_with_one_id_for_two_targets_delivers_to_both(
    site: Site, target: LoopbackTarget
) -> None:
    site.configure()
    async with site.router() as router:
        both = [order("m", target, "created"), order("m", target, "paid")]
        answer = await router.post("/messages?queue=orders", both)
        await eventually(lambda: sorted(paths(target)) == ["created", "paid"], within=SOON)

    assert answer.json() == {"accepted": 2, "duplicates": 0, "ids": ["m", "m"]}


@pytest.mark.rule("WQ-1", "ID-2")
async def test_a_byte_identical_resend_within_the_window_is_told_to_be_a_duplicate(
    site: Site, target: LoopbackTarget
) -> None:
    site.configure()
    async with site.router() as router:
        await router.publish([order("m", target, "x")])
        await eventually(lambda: paths(target) == ["x"] and not site.unsettled())
        again = await router.post("/messages?queue=orders", order("m", target, "x"))
        other = await router.post("/messages?queue=orders", order("m", target, "y"))
        await eventually(lambda: paths(target) == ["x", "y"] and not site.unsettled(), within=SOON)

    assert again.json() == {"accepted": 0, "duplicates": 1, "ids": ["m"]}
    assert other.json() == {"accepted": 1, "duplicates": 0, "ids": ["m"]}
