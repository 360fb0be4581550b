"""The contract runs once for each case, on the clock that the case asks for."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from router.brokers import BrokerRegistry
from router.brokers.rabbitmq import connection as rabbitmq_connection
from router.brokers.workers import Machine
from tests.contract.activemq_place import ActiveMqPlace
from tests.contract.cases import CASES, BrokerPlace, Case, Ends, both_ends, params
from tests.contract.nats_place import NatsPlace
from tests.contract.pgmq_place import PgmqPlace
from tests.contract.postgres_place import PostgresPlace
from tests.contract.rabbitmq_place import RabbitPlace
from tests.contract.redis_place import RedisPlace
from tests.contract.sqs_place import SqsPlace
from tests.simulation.models import installed, make_server, place_of
from tests.simulation.network import Weather
from tests.support.servers import activemq as activemq_servers
from tests.support.servers import nats, sqs
from tests.support.servers.postgres import postgres_server, transaction_pooler
from tests.support.servers.rabbitmq import rabbit_server
from tests.support.servers.redis import RedisServer


@pytest.fixture(params=params(CASES))
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Case:
    chosen: Case = request.param
    if chosen.server is None:
        return chosen
    place: BrokerPlace = request.getfixturevalue(chosen.server)
    for name, value in place.env.items():
        monkeypatch.setenv(name, value)
    return place.prepare(chosen)


@pytest.fixture
async def brokers(
    anyio_backend: object, case: Case, tmp_path: Path
) -> AsyncIterator[BrokerRegistry]:
    del anyio_backend  # asked for only to run on its loop
    if case.model is not None:
        async with modelled_brokers(case, tmp_path) as brokers:
            yield brokers
        return
    async with BrokerRegistry(
        worker_id="worker-1", dedup_window=300.0, settings=case.settings
    ) as brokers:
        yield brokers


@asynccontextmanager
async def modelled_brokers(case: Case, directory: Path) -> AsyncIterator[BrokerRegistry]:
    """The real adapter, with the simulation's model of its server behind it (SIM-3)."""
    assert case.model is not None
    weather = Weather(random.Random(1))  # noqa: S311  repeatable, not secret
    weather.is_calm = True
    server = make_server(case.model, weather)
    server.make(place_of(case.queue(directory)))
    clock = asyncio.get_running_loop().time
    machine = Machine(wall=clock, uptime=clock, boot_id="boot")
    with installed(server):
        async with BrokerRegistry(
            worker_id="worker-1", dedup_window=300.0, settings=case.settings, machine=machine
        ) as brokers:
            yield brokers


@pytest.fixture
async def ends(case: Case, brokers: BrokerRegistry, tmp_path: Path) -> AsyncIterator[Ends]:
    """A queue with leases that last longer than any test."""
    async with both_ends(brokers, case.queue(tmp_path)) as ends:
        yield ends


@pytest.fixture
async def brief(case: Case, brokers: BrokerRegistry, tmp_path: Path) -> AsyncIterator[Ends]:
    """A queue whose leases end while the test watches."""
    if not case.leases:
        pytest.skip("its leases end with the connection")
    async with both_ends(brokers, case.queue(tmp_path, lease=case.short)) as ends:
        yield ends


@pytest.fixture(scope="session")
def ministack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SqsPlace]:
    with sqs.ministack(tmp_path_factory.mktemp("ministack")).running() as server:
        yield SqsPlace(server, survives_a_stop=True)


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SqsPlace]:
    with sqs.moto(tmp_path_factory.mktemp("moto")).running() as server:
        yield SqsPlace(server, survives_a_stop=False)


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsPlace]:
    server = nats.NatsServer(nats.current(), tmp_path_factory.mktemp("nats"))
    with server.running():
        yield NatsPlace(server)


@pytest.fixture(scope="session")
def old_nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsPlace]:
    server = nats.NatsServer(nats.old(), tmp_path_factory.mktemp("old-nats"))
    with server.running():
        yield NatsPlace(server)


@pytest.fixture(scope="session")
def rabbitmq() -> Iterator[RabbitPlace]:
    with rabbit_server() as server:
        yield RabbitPlace(server)


@pytest.fixture(scope="session", autouse=True)
def new_queues_are_used_at_once() -> Iterator[None]:
    """RabbitMQ saves a new queue late. Each test makes several, and few kill the broker."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rabbitmq_connection, "UNSAVED_SECONDS", 0.0)
        yield


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresPlace]:
    with postgres_server() as server:
        yield PostgresPlace(server)


@pytest.fixture(scope="session")
def pooled_postgres(postgres: PostgresPlace) -> Iterator[PostgresPlace]:
    with transaction_pooler(postgres.server) as pooler:
        yield PostgresPlace(postgres.server, pooler.url)


@pytest.fixture(scope="session")
def pgmq(postgres: PostgresPlace) -> PgmqPlace:
    postgres.server.install_pgmq()
    return PgmqPlace(postgres.server)


@pytest.fixture(scope="session")
def pooled_pgmq(pgmq: PgmqPlace) -> Iterator[PgmqPlace]:
    with transaction_pooler(pgmq.server) as pooler:
        yield PgmqPlace(pgmq.server, pooler.url)


@pytest.fixture(scope="session")
def activemq(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ActiveMqPlace]:
    server = activemq_servers.ActiveMqServer(tmp_path_factory.mktemp("activemq"))
    with server.running():
        yield ActiveMqPlace(server)


@pytest.fixture(scope="session")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisPlace]:
    with RedisServer(tmp_path_factory.mktemp("redis"), durable=True).running() as server:
        yield RedisPlace(server)
