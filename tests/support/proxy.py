"""A wire between a client and a server on loopback, for a test to watch and to cut."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

Watch = Callable[[bytes], bytes | None]


class Proxy:
    """`to_server` and `to_client` see what passes and say what goes on; None cuts the wire."""

    def __init__(self, server_port: int) -> None:
        self.port = 0
        self.to_server: Watch = _as_it_is
        self.to_client: Watch = _as_it_is
        self._server_port = server_port

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One client, until either side is gone."""
        answers, requests = await asyncio.open_connection("127.0.0.1", self._server_port)
        ways = [
            asyncio.ensure_future(_pass(reader, requests, self._request)),
            asyncio.ensure_future(_pass(answers, writer, self._answer)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            writer.close()
            requests.close()

    def _request(self, data: bytes) -> bytes | None:
        return self.to_server(data)

    def _answer(self, data: bytes) -> bytes | None:
        return self.to_client(data)


@asynccontextmanager
async def proxy_to(server_port: int) -> AsyncIterator[Proxy]:
    proxy = Proxy(server_port)
    listener = await asyncio.start_server(proxy.connect, "127.0.0.1", 0)
    proxy.port = listener.sockets[0].getsockname()[1]
    async with listener:
        yield proxy


def _as_it_is(data: bytes) -> bytes | None:
    return data


async def _pass(source: asyncio.StreamReader, sink: asyncio.StreamWriter, watch: Watch) -> None:
    with suppress(OSError):
        while (data := await source.read(65536)) and (left := watch(data)) is not None:
            sink.write(left)
            await sink.drain()
