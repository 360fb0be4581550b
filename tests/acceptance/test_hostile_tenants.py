"""Targets, messages and documents that mean harm: another tenant notices nothing (B7 … B10)."""

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack

import aio_pika
import pytest

from router.brokers.kit.retries import RetryHistory, history_headers
from tests.acceptance.bystander import MIB, POOL, QUEUE, bystander, memory
from tests.acceptance.process import PATIENCE, eventually
from tests.acceptance.site import Site
from tests.acceptance.targets import dripping, flooding, ids, message
from tests.outbound.servers import Connection, LoopbackTarget, Script, answering, listening
from tests.support.servers.rabbitmq import RabbitServer, rabbit_server

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timing]

BAD: dict[str, object] = {"code": "BAD", "concurrency": 50, "timeoutMs": 5000}
DEEP = b"[" * (MIB - 10)


async def endless(connection: Connection) -> None:
    """Chunk after chunk, and never the last one."""
    await connection.read()
    await connection.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        await connection.write(b"1000\r\n" + b"x" * 4096 + b"\r\n")
        await asyncio.sleep(0.01)


async def chatty(connection: Connection) -> None:
    """One interim reply after the other."""
    await connection.read()
    while True:
        await connection.write(b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" * 10)
        await asyncio.sleep(0.01)


async def wordy(connection: Connection) -> None:
    """Headers without an end."""
    await connection.read()
    await connection.write(b"HTTP/1.1 500 No\r\n")
    while True:
        await connection.write(b"X-%b: %b\r\n" % (b"a" * 100, b"b" * 8000))
        await asyncio.sleep(0.001)


TARGETS: dict[str, Script] = {
    "drips": dripping,
    "floods": flooding,
    "never ends": endless,
    "interim replies": chatty,
    "endless headers": wordy,
    "deep JSON": answering(200, DEEP),
    "deep error": answering(500, b'{"error":' + DEEP + b"}"),
    "a bomb": answering(200, b"\x1f\x8b" + b"\0" * 1000, "Content-Encoding: gzip"),
    "a strange date": answering(503, b"", "Retry-After: Fri, 31 Dec 9999 23:59:59 GMT"),
    "a large result": answering(200, json.dumps({"ack": True, "result": "x" * MIB}).encode()),
}


def read_document(site: Site) -> dict[str, list[dict[str, object]]]:
    found: dict[str, list[dict[str, object]]] = json.loads(
        (site.folder / "routing.json").read_text()
    )
    return found


def write_document(site: Site, document: object) -> None:
    (site.folder / "routing.json").write_text(json.dumps(document))


@pytest.mark.rule("P5", "P4", "MED-1")
async def test_hostile_targets_disturb_no_others(site: Site) -> None:
    site.configure(BAD, POOL, queues=["orders", QUEUE])
    async with site.router() as router, bystander(router) as other, AsyncExitStack() as servers:
        hostile = [
            await servers.enter_async_context(listening(script)) for script in TARGETS.values()
        ]
        await router.publish(
            [
                {
                    "id": f"h{number}-{n}",
                    "mediationTarget": target.url,
                    "poolCode": "BAD",
                    "messageGroupId": f"{number}-{n}",
                }
                for number, target in enumerate(hostile)
                for n in range(10)
            ]
        )
        await eventually(lambda: all(target.requests for target in hostile))
        await other.is_undisturbed()


@pytest.mark.rule("P5", "P4", "OPS-2", "ID-1")
async def test_b9_hostile_messages_disturb_no_others(site: Site) -> None:
    """Thousands of groups and pools, one id for all, odd names, long texts, bytes."""
    site.configure(BAD, POOL, queues=["orders", QUEUE])
    odd = [
        "\u202e",
        "🐎" * 100,
        "a\u2028b",
        "%00%0d%0a",
        " ",
        "../../x",
    ]
    async with listening(answering(500)) as failing, site.router() as router:
        async with bystander(router) as other:
            for start in range(0, 3000, 500):
                await router.publish(
                    [
                        {
                            "id": "the same" if n % 3 else f"{odd[n % len(odd)]}{n}",
                            "mediationTarget": f"{failing.url}/{n}",
                            "poolCode": f"made-up {n}" if n % 2 else "BAD",
                            "messageGroupId": f"{odd[n % len(odd)]}{n}",
                            "dispatchMode": "x" * 1000,
                        }
                        for n in range(start, start + 500)
                    ]
                )
            raw = [b"\xff" * 1000, b"[" * 100_000, b"{}", b"null", b'{"id": "\xff"}']
            await site.publish_raw("orders", *(raw[n % 5] + b" " * n for n in range(500)))
            await eventually(lambda: len(failing.requests) >= 100)
            await other.is_undisturbed()
        warnings = (await router.get("/warnings")).json()
        longest = max(len(line) for line in router.stdout.read_text().splitlines())

    assert len([each for each in warnings if "made-up" in each["message"]]) <= 100
    assert max(len(each["message"]) for each in warnings) <= 1002
    assert longest < 20_000


@pytest.mark.rule("P5", "P4", "CFG-4", "CFG-5", "CFG-6", "OPS-2")
async def test_b10_hostile_documents_disturb_no_others(site: Site) -> None:
    """Thousands of queues, some with a hundred connections, pools, conflicts, and nonsense."""
    site.configure(BAD, POOL, queues=["orders", QUEUE])
    document, second = read_document(site), site.folder / "second.json"
    second.write_text('{"processingPools": []}')
    site.settings["MESSAGE_ROUTER_CONFIG_URL"] += f",{second.as_uri()}"
    async with site.router() as router, bystander(router) as other:
        document["queues"] += [
            {"queueName": f"q{n}", "queueUri": f"memory://q{n}", "connections": 100}
            for n in range(5000)
        ]
        document["queues"] += [
            {"queueName": f"s{n}", "queueUri": f"memory://s{n}"} for n in range(30_000)
        ]
        document["processingPools"] += [{"code": f"P{n}", "concurrency": 10} for n in range(40_000)]
        document["processingPools"] += [{"code": n, "concurrency": "x"} for n in range(40_000)]
        write_document(site, document)
        pools = [{"code": f"P{n}", "concurrency": 20} for n in range(40_000)]
        second.write_text(json.dumps({"processingPools": pools}))
        reload = asyncio.create_task(router.post("/config/reload"))
        await other.is_undisturbed()
        answer = await reload
        shown = [asyncio.create_task(router.get("/config")) for _ in range(5)]
        await other.is_undisturbed()
        configs = await asyncio.gather(*shown)
        warnings = await router.warnings("CONFIGURATION")
        conflicts = await router.warnings("CONFIG_CONFLICT")
        limits = [each["severity"] for each in await router.warnings("POOL_LIMIT")]

    assert answer.status_code == 200
    assert all(len(each.json()["processingPools"]) > 40_000 for each in configs)
    assert any("MESSAGE_ROUTER_MAX_CONNECTIONS" in each["message"] for each in warnings)
    assert len(conflicts) <= 100
    assert sorted(limits) == ["CRITICAL", "WARN"]


@pytest.fixture(scope="module")
def rabbitmq() -> Iterator[RabbitServer]:
    with rabbit_server() as server:
        yield server


@pytest.mark.rule("P5", "P4", "BRK-2", "ROUTE-1")
async def test_b7_bodies_that_are_not_utf8_with_forged_retry_headers_disturb_no_others(
    site: Site, target: LoopbackTarget, rabbitmq: RabbitServer
) -> None:
    site.configure(BAD, POOL, queues=["orders", QUEUE])
    document = read_document(site)
    document["queues"].append(
        {"queueName": "shared", "queueUri": f"{rabbitmq.url}?queue=shared&type=classic"}
    )
    forged = history_headers(RetryHistory("made-up", receive_count=3, due_at=time.time() + 1))
    async with await aio_pika.connect(rabbitmq.url) as connection, connection.channel() as channel:
        await channel.declare_queue("shared", durable=True, arguments={"x-queue-type": "classic"})
        async with site.router() as router, bystander(router) as other:
            write_document(site, document)
            assert (await router.post("/config/reload")).status_code == 200
            for number in range(100):
                honest = json.dumps(message(f"m{number}", target, pool="BAD")).encode()
                for body, headers in ((b"\xff\xfe%d" % number, forged), (honest, {})):
                    await channel.default_exchange.publish(
                        aio_pika.Message(body, headers=dict(headers)), routing_key="shared"
                    )
            await eventually(lambda: len(set(ids(target))) == 100)
            await other.is_undisturbed()
            letters = (await router.get("/dead-letters?reason=MALFORMED&limit=200")).json()
            lost = router.has_logged("connection lost")

    assert len(letters["items"]) == 100
    assert sorted(ids(target)) == sorted(f"m{number}" for number in range(100))  # each once
    assert not lost


@pytest.mark.rule("P5", "P4", "BRK-2")
async def test_b8_large_messages_of_a_broker_that_pushes_fill_no_memory(
    site: Site, rabbitmq: RabbitServer
) -> None:
    """Each of them is a dead letter. All together take 320 MiB, and a window at most 64 MiB."""
    count, large = 40, 8 * MIB
    site.configure(BAD, POOL, queues=["orders", QUEUE])
    document = read_document(site)
    document["queues"].append(
        {"queueName": "large", "queueUri": f"{rabbitmq.url}?queue=large&type=classic"}
    )
    async with await aio_pika.connect(rabbitmq.url) as connection, connection.channel() as channel:
        await channel.declare_queue("large", durable=True, arguments={"x-queue-type": "classic"})
        for number in range(count):
            body = b"%d" % number + b"x" * large
            await channel.default_exchange.publish(aio_pika.Message(body), routing_key="large")
        async with site.router() as router, bystander(router) as other:
            write_document(site, document)
            assert (await router.post("/config/reload")).status_code == 200
            await other.is_undisturbed(memory_limit=256 * MIB)
            deadline = time.monotonic() + 2 * PATIENCE
            kept: list[object] = []
            while len(kept) < count and time.monotonic() < deadline:
                await asyncio.sleep(0.2)
                letters = await router.get("/dead-letters?reason=MALFORMED&limit=100")
                kept = letters.json()["items"]
            peak = memory(router, peak=True)
        left = await channel.declare_queue("large", passive=True)

    assert len(kept) == count
    assert left.declaration_result.message_count == 0
    assert peak < 256 * MIB, peak // MIB
