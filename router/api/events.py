"""`/events`: the dashboard's figures, once a second, for as long as someone watches."""

import asyncio
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus
from typing import Any, Final, Protocol

import msgspec
from fastapi import APIRouter
from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from router.api.problems import problem_response
from router.engine.snapshot import Snapshot

INTERVAL: Final = 1.0
MAX_WATCHERS: Final = 20
LONGEST: Final = 600.0  # then the page asks anew, and its credentials are looked at again
RETRY: Final = b"retry: 2000\n\n"
BEAT: Final = b": beat\n\n"  # nothing has changed, and the connection lives
HEADERS: Final = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
STREAM: Final = "text/event-stream"
_DESCRIBED: Final[dict[int | str, dict[str, Any]]] = {
    HTTPStatus.OK.value: {
        "description": "One snapshot a second as server-sent events, or a beat if it is the same",
        "content": {STREAM: {"schema": {"type": "string"}}},
    }
}


class Watched(Protocol):
    def snapshot(self) -> Snapshot: ...


def event_routes(router: Watched) -> APIRouter:
    routes = APIRouter(tags=["monitoring"])
    feed = Feed(router.snapshot)

    @routes.get("/events", response_class=Response, responses=_DESCRIBED)
    async def events() -> Response:
        """What the dashboard shows. It ends after ten minutes: ask again."""
        return _Seat(feed)

    return routes


class Feed:
    """The latest snapshot, made once for all who watch. While nobody does, it does nothing."""

    def __init__(self, take: Callable[[], Snapshot]) -> None:
        self.watchers = 0
        self._take = take
        self._encoder = msgspec.json.Encoder()
        self._event = b""
        self._is_last = False
        self._made_at = float("-inf")

    async def events(self) -> AsyncIterator[bytes]:
        """For one watcher. One that reads slowly misses snapshots, and holds up nobody."""
        ends = _now() + LONGEST
        yield RETRY
        sent = b""
        while _now() < ends:
            self._refresh()
            yield BEAT if sent is self._event else self._event
            sent = self._event
            if self._is_last:
                return
            await asyncio.sleep(INTERVAL)

    def _refresh(self) -> None:
        if _now() - self._made_at < INTERVAL / 2:
            return  # another watcher has just had it made
        self._made_at = _now()
        snapshot = self._take()
        self._is_last = snapshot.shutting_down  # an open stream would hold up the end
        event = b"data: %b\n\n" % self._encoder.encode(snapshot)
        if event != self._event:
            self._event = event


class _Seat(Response):
    """One watcher's answer: a stream, unless too many watch already."""

    def __init__(self, feed: Feed) -> None:
        super().__init__()
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        feed = self._feed
        if feed.watchers >= MAX_WATCHERS:
            text = f"{MAX_WATCHERS} dashboards watch already"
            full = problem_response(HTTPStatus.SERVICE_UNAVAILABLE, text)
            await full(scope, receive, send)
            return
        feed.watchers += 1
        try:
            stream = StreamingResponse(feed.events(), headers=HEADERS, media_type=STREAM)
            await stream(scope, receive, send)
        finally:
            feed.watchers -= 1


def _now() -> float:
    return asyncio.get_running_loop().time()
