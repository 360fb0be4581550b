"""Queue files of commit ec404bd are upgraded in place: nothing is lost, order is kept (WQ-12)."""

import asyncio
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from pathlib import Path

import pytest

from router.brokers import BrokerRegistry
from router.brokers.sqlite.connection import OLDEST_VERSION, SCHEMA_VERSION
from router.brokers.workers import Machine
from router.core.config import QueueConfig
from router.core.message import ReceivedMessage, Tally
from router.ports import Broker, MessageStatus, MessageStore, PoolFilter
from tests.contract.cases import Ends, bodies, both_ends, publication
from tests.support.old_queues import (
    UPTIME,
    WAITING,
    WRITTEN_AT,
    assert_nothing_is_lost,
    receive_all,
    write_old_file,
)

pytestmark = pytest.mark.anyio

_ROOT = Path(__file__).parents[2]
MANY = 100_000


def schema_version(path: Path) -> int:
    with closing(sqlite3.connect(path)) as db:
        (version,) = db.execute("PRAGMA user_version").fetchone()
    return int(version)


def layout(path: Path) -> set[tuple[str, str]]:
    """The tables, views and indexes, with their columns: what statements can see of the schema."""
    with closing(sqlite3.connect(path)) as db:
        return {
            (name, column)
            for (name,) in db.execute("SELECT name FROM sqlite_master").fetchall()
            for query in ("pragma_table_info", "pragma_index_xinfo")
            for (column,) in db.execute(f"SELECT name FROM {query}(?)", (name,))  # noqa: S608
        }


@asynccontextmanager
async def reopened_file(path: Path, name: str) -> AsyncIterator[Ends]:
    """The queue of that name, in the boot that the file was written in, on the loop's clock."""
    clock = asyncio.get_running_loop().time
    machine = Machine(lambda: WRITTEN_AT + clock(), lambda: UPTIME + clock(), "boot")
    queue = QueueConfig(name=name, uri=f"sqlite:///{path}", visibility_timeout=30.0)
    async with (
        BrokerRegistry(worker_id="new", dedup_window=300.0, machine=machine) as brokers,
        both_ends(brokers, queue) as ends,
    ):
        yield ends


def store_of(ends: Ends) -> AbstractAsyncContextManager[MessageStore]:
    store = ends.brokers.open_store(ends.queue)
    assert store is not None
    return store


async def next_batch(broker: Broker) -> Sequence[ReceivedMessage]:
    while not (batch := await broker.receive(50)):
        pass
    return batch


@pytest.mark.rule("WQ-12")
@pytest.mark.clock("virtual")
async def test_a_file_of_the_version_before_keeps_all_that_is_in_it(tmp_path: Path) -> None:
    path, loop = tmp_path / "queue.db", asyncio.get_running_loop()
    write_old_file(path)

    async with reopened_file(path, "orders") as ends, store_of(ends) as store:
        first = await ends.broker.receive(50)
        again = await ends.publisher.publish([publication("succeeded")])
        await ends.broker.ack([each.handle for each in first])
        (callback,) = await ends.broker.receive(50)
        await ends.broker.ack([callback.handle])
        flown, behind = await next_batch(ends.broker)
        at_30 = loop.time()
        await ends.broker.ack([each.handle for each in (flown, behind)])
        late = await next_batch(ends.broker)
        at_60 = loop.time()
        result, failed = await store.find("result"), await store.find("failed")
        later = await store.find("later")
        tick = await store.last_tick("nightly")

    assert bodies(first) == WAITING
    assert again == [False]
    assert callback.body.startswith(b'{"id":"done","payload":{"batchId":"batch","total":2')
    assert (bodies([flown, behind]), bodies(late)) == (
        ["flying", "behind-flying"],
        ["again", "behind-again"],
    )
    assert [at_30, at_60] == pytest.approx([30, 60], abs=0.1)
    assert [(each.receive_count, each.tally) for each in (flown, late[0])] == [
        (2, Tally(failures=0, requests=0)),
        (2, Tally(failures=1, requests=3)),
    ]
    assert result is not None
    assert result.ending is not None
    assert result.ending.result == b'{"total":7}'
    assert failed is not None
    assert failed.last_failure is not None
    assert failed.last_failure.message == "it failed"
    assert later is not None
    assert later.status is MessageStatus.SCHEDULED
    assert tick == 42


@pytest.mark.rule("WQ-12")
@pytest.mark.clock("virtual")
async def test_an_upgraded_file_knows_the_pools_of_what_is_in_it(tmp_path: Path) -> None:
    path = tmp_path / "queue.db"
    write_old_file(path)

    async with reopened_file(path, "orders") as ends:
        assert ends.broker.traits.selector is not None
        ends.broker.traits.selector.select(PoolFilter(frozenset({"SLOW"}), excludes=True))
        others = await ends.broker.receive(50)
        ends.broker.traits.selector.select(PoolFilter(frozenset({"SLOW"})))
        slow = await ends.broker.receive(50)

    assert bodies(others) == ["f4", "member-2", "f1", "f2", "f3", "d1", "d2"]
    assert bodies(slow) == ["s4", "s1", "s2", "s3", "tick"]


@pytest.mark.rule("WQ-12", "ORD-7")
@pytest.mark.clock("virtual")
async def test_an_upgraded_order_store_knows_how_much_it_has(tmp_path: Path) -> None:
    path = tmp_path / "order.db"
    write_old_file(path)
    with closing(sqlite3.connect(path)) as db:
        db.executescript(
            "UPDATE queue_entries SET queue = 'order:q' WHERE queue = 'orders';"
            "UPDATE queue_progress SET queue = 'order:q' WHERE queue = 'orders';"
            "UPDATE queue_groups SET queue = 'order:q' WHERE queue = 'orders';"
        )
        wanted = db.execute(
            "SELECT count(*), sum(size) FROM queue_progress"
            " WHERE queue = 'order:q' AND finished_at IS NULL"
        ).fetchone()
        db.commit()

    async with (
        reopened_file(path, "order:q") as ends,
        ends.brokers.open_order_log(ends.queue) as order_log,
    ):
        before = await order_log.size()
        (first, *_) = await ends.broker.receive(1)
        await ends.broker.ack([first.handle])
        after = await order_log.size()

    assert (before.messages, before.bytes) == wanted
    assert (after.messages, after.bytes) == (wanted[0] - 1, wanted[1] - len(first.body))


@pytest.mark.rule("WQ-12")
async def test_an_upgraded_file_has_the_schema_of_a_new_one(tmp_path: Path) -> None:
    write_old_file(tmp_path / "old.db")

    for name in ("old.db", "new.db"):
        async with reopened_file(tmp_path / name, "orders"):
            pass

    assert schema_version(tmp_path / "old.db") == SCHEMA_VERSION
    assert layout(tmp_path / "old.db") == layout(tmp_path / "new.db")


@pytest.mark.rule("WQ-12")
@pytest.mark.slow
@pytest.mark.clock("virtual")
async def test_a_file_survives_kills_in_the_middle_of_its_upgrade(tmp_path: Path) -> None:
    path = tmp_path / "queue.db"
    write_old_file(path, MANY)
    command = [sys.executable, "-m", "tests.contract.opening_killed", f"sqlite:///{path}"]

    for steps in (100, 100_000, 1_500_000):  # the last one while the index is made
        killed = await asyncio.to_thread(subprocess.run, [*command, str(steps)], cwd=_ROOT)
        assert killed.returncode == -signal.SIGKILL
        assert schema_version(path) == OLDEST_VERSION
    async with reopened_file(path, "many") as ends:
        received = await receive_all(ends.broker, MANY)

    assert schema_version(path) == SCHEMA_VERSION
    assert_nothing_is_lost(received, MANY)
