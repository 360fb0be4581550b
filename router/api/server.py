"""Serving the API on the router's own event loop, and limiting its connections.

Anyone can connect before being authenticated. So connections are counted, and each has limited time
to send its request. When the limit is reached, a new connection replaces the one that has kept us
waiting longest, so probes are answered however many connections send nothing. A connection whose
call is being answered (`/events` takes minutes) does not keep us waiting, so it stays.
"""

import asyncio
import errno
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from enum import Enum, auto
from functools import partial
from typing import Any, Final

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

_GRACE_SECONDS: Final = 5  # for open calls when the router stops
_BACKLOG: Final = 2048
MAX_CONNECTIONS: Final = 200
IDLE_SECONDS: Final = 5  # between two calls
CHECK_SECONDS: Final = 1.0
_FULL: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nRetry-After: 1\r\n"
    b"Connection: close\r\n\r\n"
)


class CannotListen(Exception):
    """The address cannot be used. The text names the setting to change."""


def listen(host: str, port: int) -> socket.socket:
    """Bind the address; port 0 picks a free port. Raises CannotListen."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        settings = "MESSAGE_ROUTER_HOST, MESSAGE_ROUTER_PORT"
        text = f"{settings}: cannot listen on {host}:{port}: {error.strerror}"
        if error.errno == errno.EADDRINUSE:
            text = f"MESSAGE_ROUTER_PORT: port {port} of {host} is taken; set it to a free one"
        raise CannotListen(text) from None


@asynccontextmanager
async def serve(
    app: ASGIApp, listener: socket.socket, max_connections: int = MAX_CONNECTIONS
) -> AsyncIterator[int]:
    """Answer calls until the context ends, then close the listener. Yields its port."""
    places = ConnectionLimit(max_connections)
    protocol: Any = partial(ApiConnection, places=places)
    config = uvicorn.Config(
        app,
        http=protocol,
        timeout_keep_alive=IDLE_SECONDS,
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_GRACE_SECONDS,
    )
    server = _Server(config)
    async with asyncio.TaskGroup() as tasks:
        # The socket is listening already: a call that comes before the server runs waits.
        tasks.create_task(server.serve(sockets=[listener]), name="api")
        watching = tasks.create_task(places.watch(), name="api connections")
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            watching.cancel()


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the router, which stops the API last."""
        yield


class ClientWait(Enum):
    """The events we may be waiting for."""

    HEAD = auto()  # of a call
    BODY = auto()  # the rest of it
    READING = auto()  # it does not read our answer


LIMITS: Final = {ClientWait.HEAD: 10.0, ClientWait.BODY: 60.0, ClientWait.READING: 60.0}  # seconds


class ConnectionLimit:
    """Counts the open connections, and knows which of them keep us waiting."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._open: set[ApiConnection] = set()
        # Since when; the longest first.
        self._waiting: dict[ApiConnection, tuple[ClientWait, float]] = {}

    def take(self, connection: "ApiConnection") -> bool:
        """Admit it, if necessary in place of another. Return False if none can be dropped."""
        if len(self._open) >= self.limit:
            longest = next(iter(self._waiting), None)
            if longest is None:
                return False
            longest.abort()
        self._open.add(connection)
        return True

    def release(self, connection: "ApiConnection") -> None:
        self._open.discard(connection)
        self._waiting.pop(connection, None)

    def wait(self, connection: "ApiConnection", what: ClientWait | None, now: float) -> None:
        """Note what we wait for, or None."""
        self._waiting.pop(connection, None)
        if what is not None and connection in self._open:
            self._waiting[connection] = what, now

    async def watch(self) -> None:
        """Drop connections that keep us waiting too long, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            now = loop.time()
            for connection, (what, since) in list(self._waiting.items()):
                if now - since > LIMITS[what]:
                    connection.abort()


class ApiConnection(H11Protocol):
    """One connection, which reports when it waits for its client."""

    def __init__(self, *args: Any, places: ConnectionLimit, **options: Any) -> None:
        super().__init__(*args, **options)
        self.app_state = {"connection": self}  # so that an application can cut it off
        self._places = places
        self._waits_for: ClientWait | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._places.take(self):
            self._look()
        else:
            transport.write(_FULL)
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._places.release(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        self._waits_for = None  # for the next call there is time again
        super().on_response_complete()
        self._look()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._look()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._look()

    def abort(self) -> None:
        """Close it at once."""
        self._places.release(self)
        self.transport.abort()

    def _look(self) -> None:
        """Note what we wait for now. A client that keeps us waiting for the same gains no time."""
        what: ClientWait | None = None
        if self.flow.write_paused:
            what = ClientWait.READING
        elif self.cycle is None or self.cycle.response_complete:
            what = ClientWait.HEAD
        elif self.cycle.more_body:
            what = ClientWait.BODY
        if what is not self._waits_for:
            self._waits_for = what
            self._places.wait(self, what, self.loop.time())
