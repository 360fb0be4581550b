"""How often an idle queue is looked at for what no notification announces (WQ-6)."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import asyncpg
import pytest

from router.brokers import BrokerRegistry
from router.brokers.workers import PollPause
from router.core.config import QueueConfig
from tests.contract.cases import bodies, publication, queue_at
from tests.contract.pgmq_place import PgmqPlace
from tests.contract.postgres_place import PostgresPlace

pytestmark = pytest.mark.anyio

SILENT_INSERT = """
INSERT INTO message_router.queue_messages (queue, message_id, body, identity)
VALUES ($1, 'a', 'a', 'a')
"""
Insert = Callable[[], Awaitable[object]]


@pytest.fixture(params=["sqlite", "postgres", "pgmq"])
async def queue_and_insert(
    request: pytest.FixtureRequest, tmp_path: Path
) -> tuple[QueueConfig, Insert]:
    """A queue, and how somebody else puts a message into it without telling anyone."""
    if request.param == "sqlite":
        return _file(f"sqlite:///{tmp_path}/q.db?queue=orders")
    if request.param == "postgres":
        return _postgres(request.getfixturevalue("postgres"))
    return _pgmq(request.getfixturevalue("pgmq"))


def _file(uri: str) -> tuple[QueueConfig, Insert]:
    queue = queue_at(uri)

    async def insert() -> None:
        async with (
            BrokerRegistry(worker_id="other", dedup_window=300.0) as others,
            others.open_publisher(queue) as publisher,
        ):
            await publisher.publish([publication("a")])

    return queue, insert


def _postgres(place: PostgresPlace) -> tuple[QueueConfig, Insert]:
    queue = queue_at(place.new_uri())
    name = queue.uri.partition("queue=")[2].partition("&")[0]

    async def insert() -> None:
        connection = await asyncpg.connect(place.server.url)
        await connection.execute("SET session_replication_role = replica")  # without triggers
        await connection.execute(SILENT_INSERT, name)
        await connection.close()

    return queue, insert


def _pgmq(place: PgmqPlace) -> tuple[QueueConfig, Insert]:
    name = place.new_queue()

    async def insert() -> None:
        connection = await asyncpg.connect(place.server.url)
        await connection.execute("SELECT pgmq.send($1, '\"a\"'::jsonb)", name)
        await connection.close()

    return queue_at(place.uri(name, "&notify=false")), insert


@pytest.mark.rule("WQ-6")
@pytest.mark.parametrize(("interval", "is_seen"), [(0.05, True), (30.0, False)])
async def test_an_idle_queue_is_looked_at_as_often_as_the_interval_says(
    queue_and_insert: tuple[QueueConfig, Insert],
    interval: float,
    is_seen: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in ("sqlite.database", "postgres.work_queue", "pgmq.broker"):
        # By itself, it is looked at once, and then not for a long time.
        monkeypatch.setattr(f"router.brokers.{module}.FIRST_POLL_SECONDS", 30.0)
        monkeypatch.setattr(f"router.brokers.{module}.LAST_POLL_SECONDS", 0.05)
    queue, insert = queue_and_insert
    async with (
        BrokerRegistry(worker_id="w", dedup_window=300.0, poll_interval=interval) as brokers,
        brokers.open_queue(queue) as broker,
    ):
        waiting = asyncio.ensure_future(broker.receive(1))
        await asyncio.sleep(0.3)
        await insert()

        done, _ = await asyncio.wait([waiting], timeout=10.0 if is_seen else 1.0)

        assert bool(done) == is_seen
        broker.stop()
        assert bodies(await waiting) == (["a"] if is_seen else [])


@pytest.mark.rule("WQ-6")
async def test_the_pause_doubles_up_to_the_interval_and_starts_again() -> None:
    pause = PollPause(0.05, 0.3)
    idle = [pause.lengthen() for _ in range(5)]
    pause.reset()

    assert idle == [0.05, 0.1, 0.2, 0.3, 0.3]
    assert pause.lengthen() == 0.05
    assert PollPause(0.05, 0.01).lengthen() == 0.01
