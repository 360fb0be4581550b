import asyncio
import signal
import socket
from contextlib import suppress

import httpx
import pytest

from router.api.app import create_app
from router.api.kit import MAX_BODY_BYTES
from router.api.server import CannotListen, listen, serve
from tests.support.api import LOCAL, HandMadeRouter

pytestmark = pytest.mark.anyio

HOST = "127.0.0.1"
ENOUGH = 10 * MAX_BODY_BYTES


async def get(port: int, path: str = "/health", method: str = "GET") -> httpx.Response:
    async with httpx.AsyncClient(base_url=f"http://{HOST}:{port}", trust_env=False) as client:
        return await client.request(method, path)


@pytest.mark.rule("OPS-4")
async def test_calls_are_answered_as_soon_as_the_context_is_entered(
    router: HandMadeRouter,
) -> None:
    async with serve(create_app(router, LOCAL), listen(HOST, 0)) as port:
        answer = await get(port)
        head = await get(port, method="HEAD")

    assert answer.status_code == 200
    assert "server" not in answer.headers
    assert (head.status_code, head.content) == (200, b"")


@pytest.mark.rule("OPS-4")
async def test_the_port_is_closed_after_the_context(router: HandMadeRouter) -> None:
    async with serve(create_app(router, LOCAL), listen(HOST, 0)) as port:
        await get(port)

    with pytest.raises(httpx.ConnectError):
        await get(port)


@pytest.mark.rule("OPS-4")
async def test_signals_stay_the_routers(router: HandMadeRouter) -> None:
    before = signal.getsignal(signal.SIGTERM)

    async with serve(create_app(router, LOCAL), listen(HOST, 0)) as port:
        await get(port)
        during = signal.getsignal(signal.SIGTERM)

    assert during is before


@pytest.mark.rule("CFG-1")
async def test_a_port_that_is_taken_is_told_with_its_setting(router: HandMadeRouter) -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]

        with pytest.raises(CannotListen, match=f"MESSAGE_ROUTER_PORT: port {port} .* taken"):
            async with serve(create_app(router, LOCAL), listen(HOST, port)):
                pytest.fail("served")


@pytest.mark.rule("CFG-1")
async def test_an_address_of_another_machine_is_told_with_its_setting(
    router: HandMadeRouter,
) -> None:
    with pytest.raises(CannotListen, match="MESSAGE_ROUTER_HOST"):
        async with serve(create_app(router, LOCAL), listen("192.0.2.1", 0)):
            pytest.fail("served")


@pytest.mark.rule("P5")
async def test_a_caller_that_hangs_up_half_way_does_no_harm(
    router: HandMadeRouter, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve(create_app(router, LOCAL), listen(HOST, 0)) as port:
        _, writer = await asyncio.open_connection(HOST, port)
        writer.write(b"POST /messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{")
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        answer = await get(port)

    assert answer.status_code == 200
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.rule("P4")
@pytest.mark.parametrize("path", ["/messages", "/warnings/acknowledge-all", "/nowhere"])
async def test_who_sends_without_end_is_cut_off(router: HandMadeRouter, path: str) -> None:
    async with serve(create_app(router, LOCAL), listen(HOST, 0)) as port:
        _, writer = await asyncio.open_connection(HOST, port)
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {10**12}\r\n\r\n"
        writer.write(head.encode())

        sent = await send_until_cut_off(writer)

        assert sent < ENOUGH
        assert (await get(port)).status_code == 200


async def send_until_cut_off(writer: asyncio.StreamWriter) -> int:
    sent = 0
    with suppress(ConnectionError):
        while sent < ENOUGH:
            writer.write(b" " * 65536)
            await writer.drain()
            sent += 65536
    writer.close()
    return sent
