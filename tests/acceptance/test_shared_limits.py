"""One rate limit for three routers, while routers and the limits server come and go."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.acceptance.fleet import Fleet
from tests.acceptance.load import load, publish_all
from tests.acceptance.process import eventually
from tests.acceptance.site import Site
from tests.outbound.servers import Connection, listening
from tests.support.servers.postgres import PostgresServer, postgres_server
from tests.support.servers.redis import RedisServer

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(180)]

RATE = 4.0  # messages a second
POOL: dict[str, object] = {
    "code": "LOAD",
    "concurrency": 5,
    "rateLimitPerMinute": 60 * RATE,
    "rateLimitBurst": 1,
}
ROUTERS = 3
SPREAD = 0.5  # seconds that a request may be late, on a busy machine


@dataclass
class Clock:
    """A target that notes when it was asked."""

    at: list[float] = field(default_factory=list)

    async def script(self, connection: Connection) -> None:
        while True:
            await connection.read()
            self.at.append(time.monotonic())
            await connection.reply()

    def beyond_the_bound(self) -> list[tuple[int, float]]:
        """Return the windows with more messages than section 15 and a portion each allow."""
        windows = (
            (last - first + 1, self.at[last] - self.at[first])
            for first in range(len(self.at))
            for last in range(first, len(self.at))
        )
        return [
            (count, seconds)
            for count, seconds in windows
            if count > 1 + RATE * (seconds + SPREAD) + ROUTERS
        ]


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path).running() as server:
        yield server


@pytest.fixture
def postgres() -> Iterator[PostgresServer]:
    with postgres_server() as server:
        yield server


@pytest.mark.rule("LIM-1")
@pytest.mark.parametrize("kind", ["redis", "postgres"])
async def test_three_routers_keep_one_rate_as_one_dies_and_the_limits_server_goes_and_comes(
    site: Site, kind: str, request: pytest.FixtureRequest
) -> None:
    server: RedisServer | PostgresServer = request.getfixturevalue(kind)
    site.configure(POOL)
    site.settings["MESSAGE_ROUTER_LIMITS_URL"] = server.url
    site.settings["MESSAGE_ROUTER_REPLICAS"] = str(ROUTERS)
    clock = Clock()
    async with listening(clock.script) as target, AsyncExitStack() as stack:
        fleet = Fleet(site, stack)
        await fleet.start(0, 1, 2)
        await asyncio.sleep(6)  # until all have seen each other
        await publish_all(fleet.routers[0], load(target.url, 50, 3))
        began = time.monotonic()
        await eventually(lambda: len(clock.at) >= 20)
        await fleet.routers[1].kill()
        await eventually(lambda: len(clock.at) >= 40)
        await fleet.start(1)
        await eventually(lambda: len(clock.at) >= 60)
        await asyncio.to_thread(server.kill)
        await fleet.routers[2].kill()
        await fleet.start(2)  # it does not find out how many there are
        await asyncio.sleep(3)
        warned = [await fleet.routers[n].warnings("LIMITS") for n in range(ROUTERS)]
        away = len(clock.at)
        await asyncio.to_thread(server.start)
        await eventually(lambda: len(clock.at) >= 100)
        back = [await fleet.routers[n].warnings("LIMITS") for n in range(ROUTERS)]
        took = time.monotonic() - began
        codes = await fleet.stop()

    assert clock.beyond_the_bound() == []
    assert 60 < away < 100  # they went on, each at its part of the rate
    assert all(warned)
    assert back == [[], [], []]
    assert took < 2 * 100 / RATE
    assert codes == [0, 0, 0]
