"""The contract of limits servers runs on real servers, and on the one in memory."""

import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Final, Protocol

import pytest

from router.limits import LimitsScope, open_limits
from router.ports import LimitsServer
from tests.support.limits import MemoryLimits
from tests.support.servers.postgres import postgres_server, transaction_pooler
from tests.support.servers.redis import RedisServer

CASES: Final = ("redis", "postgres", "pooled_postgres", "memory")

_numbers = itertools.count(1)


class LimitsCase(Protocol):
    """What a test does to the server itself."""

    def start(self) -> None: ...
    def kill(self) -> None: ...


@dataclass
class LimitsPlace:
    """Limits of its own for each test, and as many routers as the test wants."""

    url: str
    server: LimitsCase | None
    key: str = field(default_factory=lambda: f"limits {next(_numbers)}")
    memory: MemoryLimits = field(default_factory=MemoryLimits)

    def router(self, process: str) -> AbstractAsyncContextManager[LimitsServer]:
        if self.server is None:
            return self._in_memory(process)
        return open_limits(self.url, LimitsScope(self.key, process))

    @asynccontextmanager
    async def _in_memory(self, process: str) -> AsyncIterator[LimitsServer]:
        yield self.memory.of(process)


@pytest.fixture(params=CASES)
def place(request: pytest.FixtureRequest) -> LimitsPlace:
    chosen: LimitsPlace = request.getfixturevalue(request.param)
    return LimitsPlace(chosen.url, chosen.server)


@pytest.fixture
async def one(place: LimitsPlace) -> AsyncIterator[LimitsServer]:
    async with place.router("one") as limits:
        yield limits


@pytest.fixture
async def two(place: LimitsPlace) -> AsyncIterator[LimitsServer]:
    async with place.router("two") as limits:
        yield limits


@pytest.fixture(scope="session")
def memory() -> LimitsPlace:
    return LimitsPlace("", None)


@pytest.fixture(scope="session")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LimitsPlace]:
    with RedisServer(tmp_path_factory.mktemp("redis")).running() as server:
        yield LimitsPlace(server.url, server)


@pytest.fixture(scope="session")
def postgres() -> Iterator[LimitsPlace]:
    with postgres_server() as server:
        yield LimitsPlace(server.url, server)


@pytest.fixture(scope="session")
def pooled_postgres(postgres: LimitsPlace) -> Iterator[LimitsPlace]:
    with transaction_pooler(postgres.server) as pooler:  # type: ignore[arg-type]
        yield LimitsPlace(pooler.url, postgres.server)
