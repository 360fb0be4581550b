"""A cable between a client and a server on this machine, to be cut and frozen."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field


@dataclass
class Cable:
    """Passes bytes on both ways; told to cut, it loses the client's next ones and itself."""

    server_port: int
    port: int = 0
    cut_at_next_word: bool = False
    _ends: list[asyncio.StreamWriter] = field(default_factory=list)
    _flows: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._flows.set()

    def cut(self) -> None:
        """Break every connection now. New ones are possible at once."""
        ends, self._ends = self._ends, []
        for end in ends:
            end.transport.abort()

    def freeze(self) -> None:
        """Let connections stay open, and nothing pass."""
        self._flows.clear()

    def thaw(self) -> None:
        self._flows.set()

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            server_reader, server_writer = await asyncio.open_connection(
                "127.0.0.1", self.server_port
            )
        except OSError:
            writer.close()
            return
        ends = [writer, server_writer]
        self._ends += ends
        ways = [
            asyncio.ensure_future(self._pass_on(reader, server_writer, listen=True)),
            asyncio.ensure_future(self._pass_on(server_reader, writer, listen=False)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            for end in ends:
                end.close()
            self._ends = [each for each in self._ends if each not in ends]

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, listen: bool
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                await self._flows.wait()
                if listen and self.cut_at_next_word:
                    break
                writer.write(data)
                await writer.drain()


@asynccontextmanager
async def cable_to(server_port: int) -> AsyncIterator[Cable]:
    cable = Cable(server_port)
    server = await asyncio.start_server(cable.connect, "127.0.0.1", 0)
    cable.port = server.sockets[0].getsockname()[1]
    async with server:
        yield cable
