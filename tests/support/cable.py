"""A cable between a client and a server on this machine, to be cut."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass
class Cable:
    """Passes bytes on both ways; told to cut, it loses the client's next ones and itself."""

    server_port: int
    port: int = 0
    cut_at_next_word: bool = False
    _ends: list[asyncio.StreamWriter] = field(default_factory=list)

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self.server_port)
        self._ends += [writer, server_writer]
        try:
            async with asyncio.TaskGroup() as ways:
                ways.create_task(self._pass_on(reader, server_writer, listen=True), name="to")
                ways.create_task(self._pass_on(server_reader, writer, listen=False), name="from")
        finally:
            writer.close()
            server_writer.close()

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, listen: bool
    ) -> None:
        try:
            while data := await reader.read(65536):
                if listen and self.cut_at_next_word:
                    break
                writer.write(data)
        except ConnectionError:
            pass
        for end in self._ends:
            end.close()


@asynccontextmanager
async def cable_to(server_port: int) -> AsyncIterator[Cable]:
    cable = Cable(server_port)
    server = await asyncio.start_server(cable.connect, "127.0.0.1", 0)
    cable.port = server.sockets[0].getsockname()[1]
    async with server:
        yield cable
