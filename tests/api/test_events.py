import asyncio
import json

import httpx
import pytest
from fastapi import FastAPI

from router.api.access import Access
from router.api.app import create_app
from router.api.dashboard import BEAT, MAX_SECONDS, MAX_WATCHERS, RETRY, Feed, routes
from router.api.server import listen, serve
from router.core.state import RouterState
from tests.support.api import HandMadeRouter, assert_problem
from tests.support.states import fresh_state

pytestmark = [pytest.mark.anyio, pytest.mark.clock("virtual")]


class CountingRouter:
    """A router that delivers one message per snapshot taken, until it stands still."""

    def __init__(self, still_after: int = 1_000_000, ends_after: int = 1_000_000) -> None:
        self.taken = 0
        self._still_after = still_after
        self._ends_after = ends_after

    def state(self) -> RouterState:
        self.taken += 1
        return fresh_state(
            delivered=min(self.taken, self._still_after),
            shutting_down=self.taken >= self._ends_after,
        )


def delivered(event: bytes) -> int:
    count: int = json.loads(event.removeprefix(b"data: "))["totals"]["delivered"]
    return count


async def watch(feed: Feed, events: int) -> list[tuple[float, bytes]]:
    """What comes and when, without the first line."""
    loop, seen = asyncio.get_running_loop(), []
    stream = feed.events()
    assert await anext(stream) == RETRY
    for _ in range(events):
        event = await anext(stream)
        seen.append((loop.time(), event))
    return seen


@pytest.mark.rule("OPS-3")
async def test_there_is_one_snapshot_a_second() -> None:
    router = CountingRouter()

    seen = await watch(Feed(router.state), events=3)

    assert [(at, delivered(event)) for at, event in seen] == [(0, 1), (1, 2), (2, 3)]


@pytest.mark.rule("OPS-3")
async def test_a_snapshot_that_says_nothing_new_is_a_beat() -> None:
    router = CountingRouter(still_after=2)

    seen = await watch(Feed(router.state), events=4)

    assert [event == BEAT for _, event in seen] == [False, False, True, True]


@pytest.mark.rule("P4")
async def test_many_watchers_cost_no_more_than_one() -> None:
    router = CountingRouter()
    feed = Feed(router.state)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(MAX_WATCHERS):
            tasks.create_task(watch(feed, events=5), name="watcher")

    assert router.taken == 5


@pytest.mark.rule("OPS-3")
async def test_without_watchers_no_snapshot_is_taken() -> None:
    router = CountingRouter()
    Feed(router.state)

    await asyncio.sleep(3600)

    assert router.taken == 0


@pytest.mark.rule("OPS-3")
async def test_a_stream_ends_after_a_while_so_that_credentials_are_looked_at_again() -> None:
    router = CountingRouter()
    feed = Feed(router.state)

    events = [event async for event in feed.events()]

    assert asyncio.get_running_loop().time() == MAX_SECONDS
    assert len(events) == MAX_SECONDS + 1


@pytest.mark.rule("OPS-4")
async def test_a_stream_ends_when_the_router_does() -> None:
    router = CountingRouter(ends_after=3)
    feed = Feed(router.state)

    events = [event async for event in feed.events()]

    assert json.loads(events[-1].removeprefix(b"data: "))["shuttingDown"]
    assert router.taken == 3


@pytest.mark.rule("OPS-3")
async def test_events_are_server_sent_events_that_no_cache_keeps() -> None:
    app = FastAPI()
    app.include_router(routes)
    app.state.feed = Feed(CountingRouter(ends_after=2).state)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://r") as api:
        answer = await api.get("/events")

    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-store"
    assert answer.text.count("data: ") == 2


@pytest.mark.rule("P4")
async def test_watchers_are_limited_and_a_place_is_free_again_when_one_leaves() -> None:
    app = FastAPI()
    app.include_router(routes)
    app.state.feed = Feed(CountingRouter().state)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://r") as api:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(MAX_WATCHERS):
                tasks.create_task(api.get("/events"), name="watcher")
            await asyncio.sleep(1)
            refused = await api.get("/events")
        after = await api.get("/events")

    assert_problem(refused, 503, f"{MAX_WATCHERS} dashboards")
    assert after.status_code == 200


PATIENCE_SECONDS = 60.0  # httpx's own 5 s are too few on a busy machine


@pytest.mark.clock("real")
class TestOverTheWire:
    """On a real connection, in real time."""

    @pytest.mark.rule("OPS-3")
    async def test_head_has_an_end(self, router: HandMadeRouter) -> None:
        app = create_app(router, Access())
        async with (
            serve(app, listen("127.0.0.1", 0)) as port,
            httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=PATIENCE_SECONDS
            ) as api,
        ):
            answers = [await api.head("/events") for _ in range(2 * MAX_WATCHERS)]

        assert {(answer.status_code, answer.content) for answer in answers} == {(200, b"")}

    @pytest.mark.rule("P4")
    async def test_who_hangs_up_leaves_its_place(self, router: HandMadeRouter) -> None:
        app = create_app(router, Access())
        async with (
            serve(app, listen("127.0.0.1", 0)) as port,
            httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=PATIENCE_SECONDS
            ) as api,
        ):
            for _ in range(2 * MAX_WATCHERS):
                async with api.stream("GET", "/events") as answer:
                    status = answer.status_code

        assert status == 200
