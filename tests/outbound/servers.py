"""Small raw targets on loopback: what they read is kept, what they answer is up to the test."""

import asyncio
import os
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, NoReturn

import pytest


def skip_or_fail(reason: str) -> NoReturn:
    """At home a missing tool is a pity; in CI it is a hole in the net."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


class Certificate(NamedTuple):
    cert_file: str
    key_file: str

    def server_context(self, *protocols: str) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.cert_file, self.key_file)
        context.set_alpn_protocols(list(protocols))
        return context


class TargetRequest(NamedTuple):
    line: str
    headers: dict[str, str]  # names in lower case
    body: bytes


Script = Callable[["Connection"], Awaitable[None]]


@dataclass
class Connection:
    """One client's connection, as a test's script sees it."""

    target: "LoopbackTarget"
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def read(self) -> TargetRequest:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        line, *lines = head.rstrip("\r\n").split("\r\n")
        pairs = (line.split(":", 1) for line in lines)
        headers = {name.lower(): value.removeprefix(" ") for name, value in pairs}
        body = await self.reader.readexactly(int(headers.get("content-length", "0")))
        self.target.requests.append(TargetRequest(line, headers, body))
        return self.target.requests[-1]

    async def write(self, data: bytes) -> None:
        if self.writer.is_closing():  # uvloop would call it a RuntimeError
            raise ConnectionResetError
        self.writer.write(data)
        await self.writer.drain()

    async def reply(self, status: int = 200, body: bytes = b"", *headers: str) -> None:
        lines = [f"HTTP/1.1 {status} Whatever", f"Content-Length: {len(body)}", *headers]
        await self.write("\r\n".join([*lines, "", ""]).encode() + body)

    def reset(self) -> None:
        self.writer.transport.abort()


@dataclass
class LoopbackTarget:
    """A listening socket; the script serves each connection until it returns or breaks off."""

    script: Script
    requests: list[TargetRequest] = field(default_factory=list)
    connections: int = 0
    open_connections: int = 0
    port: int = 0
    scheme: str = "http"
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"{self.scheme}://localhost:{self.port}/hook"

    def close_all(self) -> None:
        """Close every connection, also idle ones."""
        for writer in self._writers:
            writer.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open_connections += 1
        self._writers.add(writer)
        try:
            with suppress(ConnectionError, EOFError, ssl.SSLError):
                await self.script(Connection(self, reader, writer))
        finally:
            self._writers.discard(writer)
            self.open_connections -= 1
            writer.close()


async def polite(connection: Connection) -> None:
    """Accept everything, on as many requests as come."""
    while True:
        await connection.read()
        await connection.reply()


async def silent(connection: Connection) -> None:
    """Take requests and never answer."""
    while True:
        await connection.read()


def answering(status: int, body: bytes = b"", *headers: str) -> Script:
    async def script(connection: Connection) -> None:
        while True:
            await connection.read()
            await connection.reply(status, body, *headers)

    return script


def writing(data: bytes) -> Script:
    """Read one request, write these bytes and close."""

    async def script(connection: Connection) -> None:
        await connection.read()
        await connection.write(data)

    return script


@asynccontextmanager
async def listening(
    script: Script = polite,
    *,
    tls: ssl.SSLContext | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
) -> AsyncIterator[LoopbackTarget]:
    target = LoopbackTarget(script, scheme="https" if tls else "http")
    server = await asyncio.start_server(target.serve, host, port, ssl=tls, backlog=1000)
    target.port = server.sockets[0].getsockname()[1]
    try:
        yield target
    finally:
        server.close()
        target.close_all()
        await until(lambda: target.open_connections == 0)


@contextmanager
def nobody_accepts() -> Iterator[str]:
    """A port whose queue of connections is full: attempts to connect hang."""
    with ExitStack() as sockets:
        full = sockets.enter_context(socket.socket())
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(2):
            client = sockets.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(full.getsockname())
        yield f"http://127.0.0.1:{full.getsockname()[1]}/"


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(500):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise TimeoutError("it never came to pass")


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
