"""A chat service as far as an incoming webhook goes: it keeps what it is sent."""

import asyncio
import json
from typing import Any

from tests.support.loopback import LoopbackServer


class WebServer(LoopbackServer):
    def __init__(self) -> None:
        self.status = "200 OK"
        self.received: list[Any] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/services/hidden"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
        self.received.append(json.loads(await reader.readexactly(length)))
        lines = (f"HTTP/1.1 {self.status}", "Location: /else", "Content-Length: 2", "", "ok")
        writer.write("\r\n".join(lines).encode())
        await writer.drain()
        writer.close()
