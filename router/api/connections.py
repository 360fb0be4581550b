"""The API's open connections: how many there may be, and how long one may keep us waiting.

Anybody may connect before we know who it is. So connections are counted, and each has only so long
to say what it wants. When all places are taken, whoever has kept us waiting longest loses its place
to the new one: probes are answered, however many connections say nothing. A connection whose call
is being answered (`/events` for minutes) is not waited for, so it keeps its place.
"""

import asyncio
from enum import Enum, auto
from typing import Any, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

IDLE_SECONDS: Final = 5  # between two calls, until the first byte of the next
CHECK_SECONDS: Final = 1.0
_FULL: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nRetry-After: 1\r\n"
    b"Connection: close\r\n\r\n"
)


class Wait(Enum):
    """What a client may keep us waiting for."""

    HEAD = auto()  # of a call
    BODY = auto()  # the rest of it
    READING = auto()  # it does not take our answer


LIMITS: Final = {Wait.HEAD: 10.0, Wait.BODY: 60.0, Wait.READING: 60.0}  # seconds


class Places:
    """Who is connected, and who of them keeps us waiting."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._open: set[Connection] = set()
        self._waiting: dict[Connection, tuple[Wait, float]] = {}  # since when; the longest first

    def take(self, connection: "Connection") -> bool:
        """Give it a place, if need be that of another. False: there is none."""
        if len(self._open) >= self.limit:
            longest = next(iter(self._waiting), None)
            if longest is None:
                return False
            longest.drop()
        self._open.add(connection)
        return True

    def leave(self, connection: "Connection") -> None:
        self._open.discard(connection)
        self._waiting.pop(connection, None)

    def wait(self, connection: "Connection", what: Wait | None, now: float) -> None:
        """Note what we wait for. None: for nothing."""
        self._waiting.pop(connection, None)
        if what is not None and connection in self._open:
            self._waiting[connection] = what, now

    async def watch(self) -> None:
        """Drop those that have kept us waiting too long, for as long as it runs."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            now = loop.time()
            for connection, (what, since) in list(self._waiting.items()):
                if now - since > LIMITS[what]:
                    connection.drop()


class Connection(H11Protocol):
    """One connection, which says when it waits for its client."""

    def __init__(self, *args: Any, places: Places, **options: Any) -> None:
        super().__init__(*args, **options)
        self._places = places
        self._waits_for: Wait | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._places.take(self):
            self._wait(Wait.HEAD)
        else:
            transport.write(_FULL)
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._places.leave(self)
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

    def drop(self) -> None:
        """Cut it off. Its place is free at once."""
        self._places.leave(self)
        self.transport.abort()

    def _look(self) -> None:
        """Find out what we wait for. A client that goes on waiting for nothing gains no time."""
        what: Wait | None = None
        if self.flow.write_paused:
            what = Wait.READING
        elif self.cycle is None or self.cycle.response_complete:
            what = Wait.HEAD
        elif self.cycle.more_body:
            what = Wait.BODY
        if what is not self._waits_for:
            self._wait(what)

    def _wait(self, what: Wait | None) -> None:
        self._waits_for = what
        self._places.wait(self, what, self.loop.time())
