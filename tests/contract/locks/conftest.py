"""The leader lock's contract runs once for each kind of server, on real ones in real time."""

import itertools
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Final, Protocol

import pytest

from router.brokers.nats import NatsSettings
from router.locks import LockRequest, open_lock, open_locks
from router.ports import Lock, LockServer
from tests.support.servers import nats
from tests.support.servers.postgres import postgres_server, transaction_pooler
from tests.support.servers.redis import RedisServer

TTL: Final = 0.6
CASES: Final = ("redis", "postgres", "nats_server")
VARIANTS: Final = ("pooled_postgres", "old_nats_server")  # likewise, so they tell one story only

_numbers = itertools.count(1)


class LockCase(Protocol):
    """What a test does to the server itself."""

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def kill(self) -> None: ...
    def freeze(self) -> None: ...
    def thaw(self) -> None: ...


@dataclass
class LockPlace:
    """A lock of its own for each test, and as many routers as the test wants."""

    url: str
    server: LockCase
    key: str = field(default_factory=lambda: f"lock {next(_numbers)}")

    def lock(
        self, instance: str, *, process: str = "", ttl: float = TTL
    ) -> AbstractAsyncContextManager[Lock]:
        request = LockRequest(self.key, instance, process or f"process-of-{instance}", ttl)
        return open_lock(self.url, request, NatsSettings())

    def locks(self, instance: str) -> AbstractAsyncContextManager[LockServer]:
        request = LockRequest(self.key, instance, f"process-of-{instance}", TTL)
        return open_locks(self.url, request, NatsSettings())


@pytest.fixture(params=CASES)
def place(request: pytest.FixtureRequest) -> LockPlace:
    chosen: LockPlace = request.getfixturevalue(request.param)
    return LockPlace(chosen.url, chosen.server)


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> LockPlace:
    chosen: LockPlace = request.getfixturevalue(request.param)
    return LockPlace(chosen.url, chosen.server)


@pytest.fixture
async def one(place: LockPlace) -> AsyncIterator[Lock]:
    async with place.lock("one") as lock:
        yield lock


@pytest.fixture
async def two(place: LockPlace) -> AsyncIterator[Lock]:
    async with place.lock("two") as lock:
        yield lock


@pytest.fixture(scope="session")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LockPlace]:
    with RedisServer(tmp_path_factory.mktemp("redis")).running() as server:
        time.sleep(TTL + 2)  # until it lets anybody have a lock
        yield LockPlace(server.url, server)


@pytest.fixture(scope="session")
def postgres() -> Iterator[LockPlace]:
    with postgres_server() as server:
        yield LockPlace(server.url, server)


@pytest.fixture(scope="session")
def pooled_postgres(postgres: LockPlace) -> Iterator[LockPlace]:
    with transaction_pooler(postgres.server) as pooler:  # type: ignore[arg-type]
        yield LockPlace(pooler.url, postgres.server)


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LockPlace]:
    server = nats.NatsServer(nats.current(), tmp_path_factory.mktemp("nats"))
    with server.running():
        yield LockPlace(f"nats://{server.address}", server)


@pytest.fixture(scope="session")
def old_nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LockPlace]:
    server = nats.NatsServer(nats.old(), tmp_path_factory.mktemp("old-nats"))
    with server.running():
        yield LockPlace(f"nats://{server.address}", server)
