import asyncio
import ssl
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import pytest

from router.core.message import Message
from router.core.outcome import Answer, Reply
from router.core.target import TargetPolicy
from router.curl.loop import CurlOptions
from router.outbound.http_sender import HttpSender
from tests.outbound.servers import Certificate, listening, skip_or_fail, until

try:
    import h2.config
    import h2.connection
    import h2.events
    import h2.exceptions
except ImportError:
    skip_or_fail("h2 is not installed: no HTTP/2 target to test with")

pytestmark = pytest.mark.anyio


@dataclass
class Http2Target:
    """Accepts every request over HTTP/2; after `goaway_after` of them it winds a connection up."""

    goaway_after: int | None = None
    answers: asyncio.Event = field(default_factory=asyncio.Event)  # it holds replies until set
    streams: list[int] = field(default_factory=list)  # requests per connection
    headers: dict[str, str] = field(default_factory=dict)  # of the last request
    cancelled: int = 0
    port: int = 0
    _clients: list[tuple[h2.connection.H2Connection, asyncio.StreamWriter]] = field(
        default_factory=list
    )

    @property
    def url(self) -> str:
        return f"https://localhost:{self.port}/hook"

    def ping(self) -> None:
        """Ask every client whether it is still there."""
        for connection, writer in self._clients:
            connection.ping(b"anybody?")
            writer.write(connection.data_to_send())

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
        connection.initiate_connection()
        self._clients.append((connection, writer))
        number = len(self.streams)
        self.streams.append(0)
        async with asyncio.TaskGroup() as replies:
            while data := await _read(reader):
                for event in connection.receive_data(data):
                    if isinstance(event, h2.events.RequestReceived):
                        self.headers = _text(event.headers)
                    if isinstance(event, h2.events.StreamReset):
                        self.cancelled += 1
                    if isinstance(event, h2.events.StreamEnded):
                        self.streams[number] += 1
                        stream = event.stream_id or 0
                        replies.create_task(self._reply(connection, writer, number, stream))
                writer.write(connection.data_to_send())
        writer.close()

    async def _reply(
        self,
        connection: h2.connection.H2Connection,
        writer: asyncio.StreamWriter,
        number: int,
        stream: int,
    ) -> None:
        await self.answers.wait()
        with suppress(h2.exceptions.StreamClosedError):  # the client gave up on it
            self._accept(connection, number, stream)
        writer.write(connection.data_to_send())

    def _accept(self, connection: h2.connection.H2Connection, number: int, stream: int) -> None:
        connection.send_headers(stream, [(":status", "200")], end_stream=True)
        if self.streams[number] == self.goaway_after:
            connection.close_connection(last_stream_id=stream)


def _text(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in headers}


async def _read(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read(65536)
    except (ConnectionError, ssl.SSLError):
        return b""


@asynccontextmanager
async def speaking_http2(
    certificate: Certificate, goaway_after: int | None = None
) -> AsyncIterator[Http2Target]:
    target = Http2Target(goaway_after)
    target.answers.set()
    server = await asyncio.start_server(
        target.serve, "127.0.0.1", 0, ssl=certificate.server_context("h2"), backlog=1000
    )
    target.port = server.sockets[0].getsockname()[1]
    async with server:
        yield target


def trusting(certificate: Certificate, *, http_version: str = "HTTP_2") -> HttpSender:
    options = CurlOptions(ca_file=certificate.cert_file, http_version=http_version)
    return HttpSender(TargetPolicy(), options)


async def send(sender: HttpSender, url: str) -> Answer:
    return await sender.send(Message(id="m-1", target=url), 1, 5)


@pytest.mark.rule("MED-1")
async def test_every_header_is_one_of_its_own(certificate: Certificate) -> None:
    async with speaking_http2(certificate) as target, trusting(certificate) as sender:
        await sender.send(Message(id="m-1", target=target.url, token="tok"), 3, 5)

    agent = target.headers.pop("user-agent")
    assert agent.startswith("message-router/")
    assert target.headers == {
        ":method": "POST",
        ":scheme": "https",
        ":authority": f"localhost:{target.port}",
        ":path": "/hook",
        "content-type": "application/json",
        "accept": "application/json",
        "authorization": "Bearer tok",
        "x-message-id": "m-1",
        "x-message-attempt": "3",
        "x-message-request": "1",
        "content-length": "19",
    }


@pytest.mark.rule("MED-1")
async def test_requests_to_one_origin_share_a_connection(certificate: Certificate) -> None:
    async with speaking_http2(certificate) as target, trusting(certificate) as sender:
        await send(sender, target.url)
        answers = await asyncio.gather(*(send(sender, target.url) for _ in range(50)))

    assert answers == [Reply(200)] * 50
    assert target.streams == [51]


@pytest.mark.rule("MED-1")
async def test_a_connection_that_the_target_winds_up_costs_no_request(
    certificate: Certificate,
) -> None:
    winding_up = speaking_http2(certificate, goaway_after=3)

    async with winding_up as target, trusting(certificate) as sender:
        answers = [await send(sender, target.url) for _ in range(10)]

    assert answers == [Reply(200)] * 10
    assert target.streams == [3, 3, 3, 1]


@pytest.mark.rule("MED-1")
async def test_an_idle_connection_on_which_the_target_has_spoken_is_used_again(
    certificate: Certificate,
) -> None:
    async with speaking_http2(certificate) as target, trusting(certificate) as sender:
        await send(sender, target.url)
        target.ping()
        await asyncio.sleep(0.05)
        answer = await send(sender, target.url)

    assert answer == Reply(200)
    assert target.streams == [2]


@pytest.mark.rule("MED-1")
async def test_a_cancelled_request_ends_its_stream_and_leaves_the_connection_to_the_others(
    certificate: Certificate,
) -> None:
    async with speaking_http2(certificate) as target, trusting(certificate) as sender:
        await send(sender, target.url)
        target.answers.clear()
        async with asyncio.TaskGroup() as tasks:
            waiting = [tasks.create_task(send(sender, target.url)) for _ in range(20)]
            await until(lambda: sum(target.streams) == 21)
            for task in waiting[::2]:
                task.cancel()
            await until(lambda: target.cancelled == 10)
            target.answers.set()

    assert [task.result() for task in waiting[1::2]] == [Reply(200)] * 10
    assert target.streams == [21]
    assert "busy=0" in repr(sender)


@pytest.mark.rule("MED-1")
async def test_http_1_1_is_spoken_where_nothing_else_is_offered_or_wanted(
    certificate: Certificate,
) -> None:
    both = certificate.server_context("h2", "http/1.1")
    old = certificate.server_context("http/1.1")

    async with listening(tls=both) as modern, listening(tls=old) as dated:
        async with trusting(certificate) as sender:
            offered = await send(sender, dated.url)
        async with trusting(certificate, http_version="HTTP_1_1") as sender:
            wanted = await send(sender, modern.url)

    assert (offered, wanted) == (Reply(200), Reply(200))
    assert dated.requests[0].line == modern.requests[0].line == "POST /hook HTTP/1.1"
