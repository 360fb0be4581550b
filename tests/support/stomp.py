"""What others do at an ActiveMQ: a bare STOMP client, which shares no code with ours."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import NamedTuple

_UNESCAPES = {"\\c": ":", "\\n": "\n", "\\r": "\r", "\\\\": "\\"}


class Got(NamedTuple):
    command: str
    headers: Mapping[str, str]
    body: bytes


class BareStomp:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def say(self, command: str, headers: Mapping[str, str], body: bytes = b"") -> None:
        lines = "".join(f"{name}:{value}\n" for name, value in headers.items())
        self._writer.write(f"{command}\n{lines}\n".encode() + body + b"\0")
        await self._writer.drain()

    async def send(self, queue: str, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Confirmed on return. As text, unless the headers tell a length."""
        sent = {"destination": f"/queue/{queue}", "persistent": "true", "receipt": "1"}
        await self.say("SEND", {**sent, **(headers or {})}, body)
        assert (await self.hear()).command == "RECEIPT"

    async def subscribe(self, queue: str, selector: str | None = None) -> None:
        headers = {"id": "1", "destination": f"/queue/{queue}", "ack": "client-individual"}
        await self.say("SUBSCRIBE", headers | ({} if selector is None else {"selector": selector}))

    async def hear(self, within: float = 10.0) -> Got:
        async with asyncio.timeout(within):
            head = (await self._reader.readuntil(b"\n\n")).decode().strip("\n\0")
            command, *lines = head.split("\n")
            headers = {}
            for line in lines:
                name, _, value = line.partition(":")
                headers[_plain(name)] = _plain(value)
            length = headers.get("content-length")
            if length is None:
                return Got(command, headers, (await self._reader.readuntil(b"\0"))[:-1])
            return Got(command, headers, (await self._reader.readexactly(int(length) + 1))[:-1])


@asynccontextmanager
async def bare_stomp(port: int) -> AsyncIterator[BareStomp]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    stomp = BareStomp(reader, writer)
    try:
        await stomp.say("CONNECT", {"accept-version": "1.2", "host": "test", "heart-beat": "0,0"})
        assert (await stomp.hear()).command == "CONNECTED"
        yield stomp
    finally:
        writer.close()
        await writer.wait_closed()


async def waiting(port: int, queue: str, seconds: float = 0.5) -> list[bytes]:
    """What a queue hands out within so many seconds. It stays there."""
    found: list[bytes] = []
    async with bare_stomp(port) as stomp:
        await stomp.subscribe(queue)
        try:
            while True:
                found.append((await stomp.hear(seconds)).body)
        except TimeoutError:
            return found


def _plain(text: str) -> str:
    """Good enough for what tests send: no backslash stands before another one."""
    for escaped, plain in _UNESCAPES.items():
        text = text.replace(escaped, plain)
    return text
