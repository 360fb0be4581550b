"""A chat service as far as an incoming webhook goes: it keeps what it is sent."""

import asyncio
import json
from typing import Any, Self


class WebServer:
    def __init__(self) -> None:
        self.status = "200 OK"
        self.received: list[Any] = []

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/services/hidden"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
        self.received.append(json.loads(await reader.readexactly(length)))
        lines = (f"HTTP/1.1 {self.status}", "Location: /else", "Content-Length: 2", "", "ok")
        writer.write("\r\n".join(lines).encode())
        await writer.drain()
        writer.close()
