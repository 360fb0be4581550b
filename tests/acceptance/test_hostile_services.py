"""Configuration services and name servers that mean harm: another tenant notices nothing."""

import asyncio
import json
import time
from contextlib import AsyncExitStack
from typing import Final

import pytest

from tests.acceptance.bystander import MIB, POOL, QUEUE, bystander
from tests.acceptance.process import eventually
from tests.acceptance.site import Site
from tests.chaos.storm import build_names, write_whole
from tests.outbound.servers import Connection, LoopbackTarget, Script, listening

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timing]

MEMORY_LIMIT_BYTES: Final = 192 * MIB
BAD: dict[str, object] = {"code": "BAD", "concurrency": 100, "timeoutMs": 3000}
HANGS_MS: Final = 25_000


async def silent(connection: Connection) -> None:
    await connection.read()
    await connection.reader.read()


async def trickling_headers(connection: Connection) -> None:
    await connection.read()
    await connection.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
    while True:
        await connection.write(b"x")
        await asyncio.sleep(1)


async def trickling_body(connection: Connection) -> None:
    await connection.read()
    await connection.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
    while True:
        await connection.write(b" ")
        await asyncio.sleep(1)


async def endless_headers(connection: Connection) -> None:
    await connection.read()
    await connection.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        await connection.write(b"X-%b: %b\r\n" % (b"a" * 100, b"b" * 8000))


async def endless_interim_replies(connection: Connection) -> None:
    await connection.read()
    while True:
        await connection.write(b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" * 10)


async def endless_body(connection: Connection) -> None:
    await connection.read()
    await connection.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        await connection.write(b"10000\r\n" + b" " * 65536 + b"\r\n")


async def tiny_chunks(connection: Connection) -> None:
    await connection.read()
    await connection.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        await connection.write(b"1\r\n \r\n" * 10_000)


SERVICES: Final[tuple[Script, ...]] = (
    silent,
    trickling_headers,
    trickling_body,
    endless_headers,
    endless_interim_replies,
    endless_body,
    tiny_chunks,
)


async def answers_quickly(connection: Connection) -> None:
    await connection.read()
    await connection.reply(200, json.dumps({"queues": []}).encode(), "Connection: close")


@pytest.mark.rule("P5", "P4", "CFG-3", "CFG-4")
async def test_hostile_configuration_services_disturb_no_others(site: Site) -> None:
    site.configure(BAD, POOL, queues=["orders", QUEUE])
    async with AsyncExitStack() as stack:
        services = [await stack.enter_async_context(listening(answers_quickly)) for _ in SERVICES]
        urls = [site.settings["MESSAGE_ROUTER_CONFIG_URL"], *(each.url for each in services)]
        site.settings["MESSAGE_ROUTER_CONFIG_URL"] = ",".join(urls)
        router = await stack.enter_async_context(site.router())
        other = await stack.enter_async_context(bystander(router))
        for service, script in zip(services, SERVICES, strict=True):
            service.script = script
        reload = asyncio.create_task(router.post("/config/reload"))
        await eventually(lambda: all(len(service.requests) == 2 for service in services))
        await other.is_undisturbed(MEMORY_LIMIT_BYTES)
        answer = await reload
        status = (await router.get("/config")).json()

    assert answer.status_code == 200  # the file's document counts, and the others' last good ones
    assert [bool(each["error"]) for each in status["sources"]] == [False, *[True] * len(SERVICES)]
    assert len(status["queues"]) == 2


@pytest.mark.rule("P5", "P4", "MED-4", "CFG-3", "OPS-4")
async def test_names_that_hang_disturb_no_others(site: Site, target: LoopbackTarget) -> None:
    """Names of targets and of the configuration service, and nothing to end the look-ups."""
    names = site.folder / "names.txt"
    write_whole(names, "0\n")
    site.configure(BAD, POOL, queues=["orders", QUEUE])
    file = site.settings["MESSAGE_ROUTER_CONFIG_URL"]
    site.settings |= {
        "LD_PRELOAD": str(build_names(site.folder)),
        "NAMES_FILE": str(names),
        "NAMES_SUFFIX": ".slow.test",
        "MESSAGE_ROUTER_CONFIG_URL": f"{file},http://config.slow.test:{target.port}/",
    }
    async with site.router() as router, bystander(router) as other:
        write_whole(names, f"{HANGS_MS}\n")
        reload = asyncio.create_task(router.post("/config/reload"))
        await router.publish(
            [
                {
                    "id": f"s{n}",
                    "mediationTarget": f"http://{n}.slow.test:{target.port}/",
                    "poolCode": "BAD",
                    "messageGroupId": f"{n}",
                }
                for n in range(100)
            ]
        )
        await eventually(lambda: len(site.in_flight()) == 100)
        await other.is_undisturbed(MEMORY_LIMIT_BYTES)
        answer = await reload
        begun = time.monotonic()
        code = await router.stop()
        took = time.monotonic() - begun

    assert answer.status_code == 200
    assert (code, target.requests) == (0, [])
    assert took < 10
