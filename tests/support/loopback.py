"""A server on a free port of loopback, for as long as its block runs."""

import asyncio
from typing import Self


class LoopbackServer:
    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raise NotImplementedError
