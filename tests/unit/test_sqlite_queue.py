"""A queue in a file on virtual time: the thread does the SQL, the loop's clock tells the time."""

import asyncio
from collections.abc import Collection, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from router.brokers import BrokerDoor
from router.brokers.machine import Machine
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

    machine = Machine(wall=loop.time, uptime=loop.time, boot_id="boot")
    async with BrokerDoor(worker_id="worker-1", dedup_window=300.0, machine=machine) as door:
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


@pytest.mark.rule("WQ-11")
@pytest.mark.parametrize(
    ("boot_id", "uptime_error"), [("boot", 0.0), ("next boot", -5000.0)], ids=["set", "booted"]
)
async def test_a_delay_that_was_written_a_year_ahead_ends_in_time_once_the_clock_is_right(
    tmp_path: Path, boot_id: str, uptime_error: float
) -> None:
    loop = asyncio.get_running_loop()
    wrong = Machine(wall=lambda: loop.time() + 365 * 86_400, uptime=loop.time, boot_id="boot")
    right = Machine(wall=loop.time, uptime=lambda: loop.time() + uptime_error, boot_id=boot_id)
    queue = QueueConfig(name="orders", uri=f"sqlite:///{tmp_path}/queue.db")
    message = Message(id="a", target="https://svc.example/")
    async with BrokerDoor(worker_id="anna", dedup_window=300.0, machine=wrong) as door:
        publishing = door.open_publisher(queue)
        assert publishing is not None
        async with publishing as publisher, door.open_queue(queue) as broker:
            await publisher.publish([Publication(message, b"a", None)])
            (delivery,) = await broker.receive(1)
            await broker.nack(delivery.handle, 30, UNTRIED)
    async with (
        BrokerDoor(worker_id="bert", dedup_window=300.0, machine=right) as door,
        door.open_queue(queue) as broker,
    ):
        while not await broker.receive(1):
            assert loop.time() < 60

    assert loop.time() == pytest.approx(30, abs=0.1)


class Roll:
    """Knows who is alive, as it is told."""

    def __init__(self) -> None:
        self.known: set[str] = set()
        self.dead: set[str] = set()

    def of_file(self, _: Path) -> "Roll":
        return self

    @contextmanager
    def claim_own(self, worker_id: str) -> Iterator[None]:
        self.known.add(worker_id)
        yield

    def others(self) -> Collection[str]:
        return self.known

    @contextmanager
    def dead_among(self, worker_ids: Collection[str]) -> Iterator[Collection[str]]:
        dead = self.dead & set(worker_ids)
        yield dead
        self.known -= dead


@pytest.mark.rule("WQ-10")
async def test_one_that_waits_gets_what_another_held_within_half_a_second_of_its_death(
    tmp_path: Path,
) -> None:
    loop, roll = asyncio.get_running_loop(), Roll()
    machine = Machine(wall=loop.time, uptime=loop.time, boot_id="boot")
    queue = QueueConfig(name="orders", uri=f"sqlite:///{tmp_path}/queue.db", visibility_timeout=30)
    message = Message(id="a", target="https://svc.example/")
    async with AsyncExitStack() as stack:
        doors = [
            await stack.enter_async_context(
                BrokerDoor(
                    worker_id=worker, dedup_window=300.0, machine=machine, liveness=roll.of_file
                )
            )
            for worker in ("anna", "bert")
        ]
        brokers = [await stack.enter_async_context(door.open_queue(queue)) for door in doors]
        publishing = doors[0].open_publisher(queue)
        assert publishing is not None
        publisher = await stack.enter_async_context(publishing)
        await publisher.publish([Publication(message, b"a", None)])
        (held,) = await brokers[0].receive(1)
        loop.call_at(7.1, roll.dead.add, "anna")

        (again,) = await brokers[1].receive(1)

    assert (again.broker_id, again.count) == (held.broker_id, 2)
    assert 7.1 <= loop.time() <= 7.6 + 0.01


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
