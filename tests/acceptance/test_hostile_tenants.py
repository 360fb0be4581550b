"""Targets of one tenant that mean harm: another tenant notices nothing."""

import asyncio
import json
from contextlib import AsyncExitStack

import pytest

from tests.acceptance.bystander import MIB, POOL, QUEUE, bystander
from tests.acceptance.process import eventually
from tests.acceptance.site import Site
from tests.acceptance.targets import dripping, flooding
from tests.outbound.servers import Connection, Script, answering, listening

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


@pytest.mark.rule("P5", "P4", "MED-1")
async def test_targets_that_mean_harm_disturb_nobody_else(site: Site) -> None:
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
