"""What the embedded queue does to a file that it finds (C6)."""

import asyncio
import sqlite3
import stat
from contextlib import closing
from pathlib import Path
from threading import Barrier

import pytest

from router.brokers import BrokerRegistry
from router.brokers.sqlite.connection import FileConnection
from router.brokers.workers import THIS_MACHINE
from router.core.config import QueueConfig
from router.ports import BrokerError, QueueRefused
from tests.contract.cases import publication

pytestmark = pytest.mark.anyio


@pytest.fixture
def queue(tmp_path: Path) -> QueueConfig:
    return QueueConfig(name="orders", uri=f"sqlite:///{tmp_path}/queue.db?queue=orders")


async def publish(queue: QueueConfig) -> None:
    async with (
        BrokerRegistry(worker_id="worker-1", dedup_window=300.0) as brokers,
        brokers.open_publisher(queue) as line,
    ):
        await line.publish([publication("a")])


def make_something_else(path: Path) -> bytes:
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE accounts (name)")
    path.chmod(0o644)
    return path.read_bytes()


def files(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.glob("queue.db*")}


def modes(directory: Path) -> set[int]:
    return {stat.S_IMODE(file.stat().st_mode) for file in directory.glob("queue.db*")}


@pytest.mark.rule("OPS-5")
@pytest.mark.parametrize(
    ("found", "left"), [(0o644, 0o600), (0o666, 0o600), (0o600, 0o600), (0o660, 0o660)]
)
async def test_c6_a_file_that_everybody_can_read_is_taken_from_them(
    queue: QueueConfig, tmp_path: Path, found: int, left: int
) -> None:
    await publish(queue)
    (tmp_path / "queue.db").chmod(found)

    await publish(queue)

    assert modes(tmp_path) == {left}


@pytest.mark.rule("CFG-7")
async def test_c6_a_database_of_something_else_is_refused_as_it_is(
    queue: QueueConfig, tmp_path: Path
) -> None:
    before = make_something_else(tmp_path / "queue.db")

    with pytest.raises((QueueRefused, BrokerError), match="something else"):
        await publish(queue)

    assert files(tmp_path) == {"queue.db": before}  # its journal is the same, too
    assert modes(tmp_path) == {0o644}


@pytest.mark.rule("CFG-7")
async def test_routers_that_create_a_file_together_do_not_refuse_it(tmp_path: Path) -> None:
    together = Barrier(4)

    def open_new(path: Path) -> object:
        file = FileConnection(path, THIS_MACHINE)
        together.wait()
        (result,) = file.run_patiently([lambda _: "opened"])
        file.close()
        return result

    seen: list[object] = []
    for number in range(40):
        path = tmp_path / f"{number}.db"
        seen += await asyncio.gather(*(asyncio.to_thread(open_new, path) for _ in range(4)))

    assert "opened" in seen
    assert [each for each in seen if isinstance(each, QueueRefused)] == []
