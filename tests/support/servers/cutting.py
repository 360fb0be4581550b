"""A way to a server on which answers are late, or cut off just before they arrive."""

import asyncio
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit


class CuttingProxy:
    """For HTTP/1.1 with one answer per request; what it counts is calls by POST."""

    def __init__(self, port: int) -> None:
        self.requests = 0
        self._server_port = port
        self._cuts = 0
        self._delay = 0.0
        self._listener: asyncio.Server | None = None
        self._links: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._listener is not None
        self._listener.close()
        for link in self._links:
            link.cancel()
        await asyncio.gather(*self._links, return_exceptions=True)

    def url(self, url: str) -> str:
        """The same place, by way of here."""
        assert self._listener is not None
        port = self._listener.sockets[0].getsockname()[1]
        return urlsplit(url)._replace(netloc=f"127.0.0.1:{port}").geturl()

    def cut_next_answer(self) -> None:
        self._cuts += 1

    def delay_answers(self, seconds: float) -> None:
        self._delay = seconds

    async def _serve(self, near: asyncio.StreamReader, nearer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._links.add(task)
        far, farther = await asyncio.open_connection("127.0.0.1", self._server_port)
        try:
            async with asyncio.TaskGroup() as both_ways:
                both_ways.create_task(self._forward(near, farther), name="to the server")
                both_ways.create_task(self._back(far, nearer), name="from the server")
        except* ConnectionError:
            pass  # one of them hung up
        finally:
            nearer.close()
            farther.close()
            self._links.discard(task)

    async def _forward(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while content := await source.read(65536):
            self.requests += content.count(b"POST / HTTP/1.1")
            sink.write(content)
            await sink.drain()
        raise ConnectionResetError

    async def _back(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while content := await source.read(65536):
            if self._cuts:
                self._cuts -= 1
                break
            await asyncio.sleep(self._delay)
            sink.write(content)
            await sink.drain()
        raise ConnectionResetError
