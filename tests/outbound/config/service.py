"""A config service that answers exactly the bytes that a test gives it."""

import asyncio
from contextlib import suppress

from tests.support.loopback import LoopbackServer


def answer(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


class ConfigService(LoopbackServer):
    def __init__(self) -> None:
        self.reply = answer(b"{}")
        self.hangs = False
        self.requests: list[str] = []
        self._released = asyncio.Event()

    async def __aexit__(self, *_: object) -> None:
        self._released.set()
        await super().__aexit__()

    def url(self, path: str = "/config", credentials: str = "") -> str:
        return f"http://{credentials}127.0.0.1:{self.port}{path}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A client may leave before it has asked, or in the middle of a large answer.
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            self.requests.append((await reader.readuntil(b"\r\n\r\n")).decode())
            writer.write(self.reply)
            await writer.drain()
            if self.hangs:
                await self._released.wait()
        writer.close()
