"""Whoever reads what the router says, and stops reading: nobody else notices (B6)."""

import asyncio
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest

from tests.acceptance.bystander import POOL, QUEUE, bystander, metric
from tests.acceptance.process import RouterProcess, eventually, start
from tests.acceptance.site import Site
from tests.outbound.servers import answering, listening

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timing]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


@pytest.fixture
def small_pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    yield reader, writer
    os.close(reader)
    os.close(writer)


async def answers(router: RouterProcess) -> None:
    for _ in range(300):
        try:
            if (await router.get("/health/ready")).status_code == 200:
                return
        except httpx.TransportError:
            pass
        await asyncio.sleep(0.1)
    raise TimeoutError("it does not answer")


@pytest.mark.rule("P5", "P4", "OPS-5", "OPS-4")
async def test_b6_a_log_reader_that_stands_still_stops_nothing(
    site: Site, small_pipe: tuple[int, int]
) -> None:
    reader, writer = small_pipe
    site.settings["MESSAGE_ROUTER_LOG_LEVEL"] = "DEBUG"
    site.port = free_port()
    site.configure({"code": "BAD", "concurrency": 50}, POOL, queues=["orders", QUEUE])
    async with listening(answering(404)) as missing:
        router = start(site.env, site.port, site.folder, output=writer)
        try:
            await answers(router)  # its first lines fill the pipe already
            async with bystander(router) as other:
                path = f"/hook/{'x' * 3000}"
                for start_at in range(0, 2000, 100):
                    batch = [
                        {
                            "id": f"h{n}",
                            "mediationTarget": f"http://127.0.0.1:{missing.port}{path}",
                            "poolCode": "BAD",
                            "messageGroupId": str(n),
                        }
                        for n in range(start_at, start_at + 100)
                    ]
                    await router.publish(batch)
                await eventually(lambda: len(missing.requests) == 2000)
                await other.is_undisturbed()
            dropped = float(await metric(router, "log_lines_dropped_total"))
            received = b""
            while b"were dropped" not in received[-1000:]:
                received += await asyncio.to_thread(os.read, reader, 65536)
            (counted,) = [
                entry["lines"]
                for entry in map(json.loads, received.splitlines())
                if "were dropped" in entry["message"]
            ]
            code = await router.stop()  # nobody reads the last lines
        finally:
            await router.kill()

    assert dropped > 0
    assert counted >= dropped
    assert code == 0


@pytest.fixture
def connections() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.rule("P5", "P4")
async def test_clients_of_the_api_that_read_nothing_hold_up_no_others(
    site: Site, connections: ExitStack
) -> None:
    """Of `/events`, and of large answers: what they ask for does not gather in memory."""
    site.configure({"code": "BAD", "concurrency": 1}, POOL, queues=["orders", QUEUE])
    async with site.router() as router, bystander(router) as other:
        for number in range(60):
            client = socket.socket()
            connections.enter_context(client)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            client.connect(("127.0.0.1", router.port))
            path = "/events" if number % 2 else "/metrics"
            ask = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
            client.sendall(ask * (1 if number % 2 else 10))
        await asyncio.sleep(1)
        await other.is_undisturbed()
