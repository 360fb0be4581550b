"""A queue in a file on virtual time: the thread does the SQL, the loop's clock tells the time."""

import asyncio
from pathlib import Path
from typing import TypeVar

import pytest

from router.brokers import BrokerDoor
from router.brokers.memory import MemoryStore
from router.brokers.queue_table import QueueTable
from router.brokers.stored_table import StoredTable, Work
from router.brokers.work_queue import WorkQueuePublisher
from router.core.config import QueueConfig
from router.core.message import UNTRIED, Message
from router.ports import Publication

T = TypeVar("T")

pytestmark = [pytest.mark.anyio, pytest.mark.rule("WQ-4", "WQ-6")]


async def test_delays_and_leases_end_at_their_instant(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    queue = QueueConfig(name="orders", uri=f"sqlite:///{tmp_path}/queue.db", visibility_timeout=7)
    message = Message(id="a", target="https://svc.example/")
    instants = []

    async with BrokerDoor(worker_id="worker-1", dedup_window=300.0, clock=loop.time) as door:
        publishing = door.open_publisher(queue)
        assert publishing is not None
        async with publishing as publisher, door.open_queue(queue) as broker:
            await publisher.publish([Publication(message, b"a", "a")])
            (first,) = await broker.receive(1)
            await broker.nack(first.handle, 12, UNTRIED)
            for _ in range(3):
                assert len(await broker.receive(1)) == 1
                instants.append(loop.time())

    assert instants == pytest.approx([12, 19, 26], abs=0.01)


class NotingStore(MemoryStore):
    """Notes what was done, and when the disk had to keep it."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[str] = []

    async def run(self, work: Work[T], *, is_large: bool = False) -> T:
        self.done.append("run")
        return await super().run(work, is_large=is_large)

    async def sync(self) -> None:
        self.done.append("sync")


@pytest.mark.rule("P1")
async def test_a_publication_outlasts_a_power_cut_and_the_rest_may_be_done_again() -> None:
    store = NotingStore()
    table = StoredTable(store, QueueTable("orders", "anna", 300.0, asyncio.get_running_loop().time))
    message = Message(id="a", target="https://svc.example/")

    await WorkQueuePublisher(table).publish([Publication(message, b"a", "a")])
    (claimed,) = (await table.claim(1, 30.0)).messages
    await table.extend([claimed.lease], 30.0)
    await table.finish([claimed.lease], "")
    store.close()

    assert store.done == ["run", "sync", "run", "run", "run"]


class SizingStore(MemoryStore):
    """Notes what was left to where it holds up nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.large: list[bool] = []

    async def run(self, work: Work[T], *, is_large: bool = False) -> T:
        self.large.append(is_large)
        return await super().run(work, is_large=is_large)


@pytest.mark.rule("P5")
async def test_a_claim_that_turns_out_to_be_large_is_left_to_where_it_holds_up_nobody() -> None:
    store = SizingStore()
    table = StoredTable(store, QueueTable("orders", "anna", 300.0, asyncio.get_running_loop().time))
    bodies = [b"small", b"1" * 300_000, b"", b"2" * 65_536, b"3" * 65_537, b"last"]
    message = Message(id="a", target="https://svc.example/")
    await WorkQueuePublisher(table).publish(
        [Publication(message, body, str(number)) for number, body in enumerate(bodies)]
    )
    store.large.clear()

    first = (await table.claim(1, 30.0)).messages
    rest = (await table.claim(50, 30.0)).messages
    await table.finish([claimed.lease for claimed in (*first, *rest)], "")
    nothing = (await table.claim(50, 30.0)).messages
    store.close()

    assert [claimed.body for claimed in (*first, *rest)] == bodies
    assert [claimed.count for claimed in (*first, *rest)] == [1] * 6
    assert nothing == ()
    # The second claim is found to be large, and asked for again as such.
    assert store.large == [False, False, True, False, True]
