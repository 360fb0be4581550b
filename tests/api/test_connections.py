"""Clients that say nothing, or never finish: they keep nobody else out for long."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from router.api import server as connections
from router.api.server import ClientWait, listen, serve

pytestmark = pytest.mark.anyio

HOST = "127.0.0.1"
GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
HEAD_OF_POST = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n"
CHUNK = b"x" * 65536


class App:
    """Reads what it is sent; `/stream` goes on until it is told to stop, `/flood` for ever."""

    def __init__(self) -> None:
        self.streaming = 0
        self.stop = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/stream":
            self.streaming += 1
            while not self.stop.is_set():
                await send({"type": "http.response.body", "body": b".", "more_body": True})
                await asyncio.sleep(0.05)
        if scope["path"] == "/flood":
            left = asyncio.ensure_future(receive())
            while not left.done():
                await send({"type": "http.response.body", "body": CHUNK, "more_body": True})
                await asyncio.sleep(0)
            return
        await send({"type": "http.response.body", "body": b"done"})


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    @property
    def is_cut_off(self) -> bool:
        return self.reader.at_eof() or self.reader.exception() is not None


class ServedApi:
    def __init__(self, app: App, port: int) -> None:
        self.app = app
        self.port = port
        self._clients: list[Client] = []

    async def connect(self, data: bytes = b"") -> Client:
        client = Client(*await asyncio.open_connection(HOST, self.port))
        client.send(data)
        self._clients.append(client)
        return client

    async def get(self, path: str = "/") -> httpx.Response:
        async with httpx.AsyncClient(trust_env=False, timeout=5) as client:
            return await client.get(f"http://{HOST}:{self.port}{path}")

    def close(self) -> None:
        for client in self._clients:
            client.writer.transport.abort()


@asynccontextmanager
async def serving(limit: int = 200) -> AsyncIterator[ServedApi]:
    app = App()
    async with serve(app, listen(HOST, 0), limit) as port:
        api = ServedApi(app, port)
        try:
            yield api
        finally:
            app.stop.set()
            api.close()


async def until(holds: Callable[[], bool], within: float = 5.0) -> float:
    begun = asyncio.get_running_loop().time()
    async with asyncio.timeout(within):
        while not holds():  # noqa: ASYNC110  the other end is waited for
            await asyncio.sleep(0.01)
    return asyncio.get_running_loop().time() - begun


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "CHECK_SECONDS", 0.05)
    limits = {ClientWait.HEAD: 0.3, ClientWait.BODY: 0.5, ClientWait.READING: 0.4}
    monkeypatch.setattr(connections, "LIMITS", limits)


@pytest.mark.rule("P5")
async def test_when_all_places_are_taken_who_waited_longest_makes_room() -> None:
    async with serving(limit=20) as api:
        silent = [await api.connect() for _ in range(50)]
        answers = [(await api.get()).status_code for _ in range(3)]
        await until(lambda: sum(each.is_cut_off for each in silent) >= 31)
        cut_off = [each.is_cut_off for each in silent]

        assert answers == [200] * 3
        assert cut_off == sorted(cut_off, reverse=True)  # the first ones
        assert cut_off.count(True) <= 33


@pytest.mark.rule("P5")
async def test_who_connects_while_every_place_is_busy_is_told_to_come_later() -> None:
    async with serving(limit=2) as api:
        for _ in range(2):
            await api.connect(GET.replace(b"/", b"/stream", 1))
        await until(lambda: api.app.streaming == 2)
        refused = await api.get()
        api.app.stop.set()
        await asyncio.sleep(0.2)
        answered = await api.get()

    assert refused.status_code == 503
    assert answered.status_code == 200


@pytest.mark.rule("P5")
@pytest.mark.usefixtures("impatient")
async def test_a_head_that_does_not_come_in_time_is_not_waited_for() -> None:
    async with serving() as api:
        silent, slow = await api.connect(), await api.connect()

        async def drip() -> None:
            while not slow.is_cut_off:
                slow.send(b"G")
                await asyncio.sleep(0.05)

        took = await asyncio.gather(
            until(lambda: silent.is_cut_off), until(lambda: slow.is_cut_off), drip()
        )

        assert 0.25 < took[0] < 2
        assert 0.25 < took[1] < 2


@pytest.mark.rule("P5")
@pytest.mark.usefixtures("impatient")
async def test_a_body_that_does_not_come_in_time_is_not_waited_for() -> None:
    async with serving() as api:
        client = await api.connect(HEAD_OF_POST)

        assert 0.45 < await until(lambda: client.is_cut_off) < 2


@pytest.mark.rule("P5")
@pytest.mark.usefixtures("impatient")
async def test_who_does_not_read_the_answer_is_cut_off() -> None:
    async with serving(limit=1) as api:
        client = await api.connect(GET.replace(b"/", b"/flood", 1))
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.sleep(1)
        answer = await api.get()

    assert answer.status_code == 200


@pytest.mark.rule("P5")
@pytest.mark.usefixtures("impatient")
async def test_a_stream_goes_on_and_a_connection_has_time_again_after_each_call() -> None:
    async with serving() as api:
        stream = await api.connect(GET.replace(b"/", b"/stream", 1))
        caller = await api.connect()
        for _ in range(5):
            await asyncio.sleep(0.2)
            caller.send(GET)
        await asyncio.sleep(0.1)

        assert not stream.is_cut_off
        assert not caller.is_cut_off
        assert (await caller.reader.read(65536)).count(b"done") == 5


@pytest.mark.rule("P5")
async def test_calls_sent_together_are_answered_in_order() -> None:
    async with serving(limit=1) as api:
        client = await api.connect(GET * 3 + HEAD_OF_POST + b"x" * 99 + GET)
        received = b""
        while received.count(b"done") < 5:
            received += await client.reader.read(65536)

        assert (await api.get()).status_code == 200  # in its place
        await until(lambda: client.is_cut_off)
