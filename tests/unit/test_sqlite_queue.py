"""A queue in a file on virtual time: the thread does the SQL, the loop's clock tells the time."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from router.brokers import BrokerRegistry
from router.brokers.memory.broker import MemoryDatabase
from router.brokers.sqlite.connection import Work
from router.brokers.sqlite.queue_table import QueueTable
from router.brokers.sqlite.work_queue import WorkQueue
from router.brokers.workers import Machine
from router.core.config import QueueConfig
from router.core.message import Message
from router.ports import Broker, Nack, Publication, Publisher

T = TypeVar("T")

pytestmark = pytest.mark.anyio


@pytest.mark.rule("WQ-4")
async def test_delays_and_leases_end_at_their_instant(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    queue = QueueConfig(name="orders", uri=f"sqlite:///{tmp_path}/queue.db", visibility_timeout=7)
    message = Message(id="a", target="https://svc.example/")
    instants = []

    machine = Machine(wall=loop.time, uptime=loop.time, boot_id="boot")
    async with BrokerRegistry(worker_id="worker-1", dedup_window=300.0, machine=machine) as brokers:
        publishing = brokers.open_publisher(queue)
        async with publishing as publisher, brokers.open_queue(queue) as broker:
            await publisher.publish([Publication(message, b"a", "a")])
            (first,) = await broker.receive(1)
            await broker.nack([Nack(first.handle, 12)])
            for _ in range(3):
                assert len(await broker.receive(1)) == 1
                instants.append(loop.time())

    assert instants == pytest.approx([12, 19, 26], abs=0.01)


@pytest.mark.rule("WQ-2")
async def test_what_is_published_while_a_claim_takes_all_there_is_is_not_waited_for(
    tmp_path: Path,
) -> None:
    loop = asyncio.get_running_loop()
    queue = QueueConfig(name="orders", uri=f"sqlite:///{tmp_path}/queue.db")
    message = Message(id="any", target="https://svc.example/")
    machine = Machine(wall=loop.time, uptime=loop.time, boot_id="boot")
    async with BrokerRegistry(worker_id="worker-1", dedup_window=300.0, machine=machine) as brokers:
        publishing = brokers.open_publisher(queue)
        async with publishing as publisher, brokers.open_queue(queue) as broker:
            waiting = asyncio.create_task(broker.receive(1))
            await asyncio.sleep(1)  # so that it has looked for other processes' changes
            await publisher.publish([Publication(message, b"0")])
            await waiting
            await publisher.publish([Publication(message, b"a")])
            claiming = asyncio.create_task(broker.receive(10))  # both in one transaction
            await asyncio.create_task(publisher.publish([Publication(message, b"b")]))
            (first,), (second,) = await claiming, await broker.receive(10)

    assert (first.body, second.body) == (b"a", b"b")
    assert loop.time() < 2


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
    async with BrokerRegistry(worker_id="anna", dedup_window=300.0, machine=wrong) as brokers:
        publishing = brokers.open_publisher(queue)
        async with publishing as publisher, brokers.open_queue(queue) as broker:
            await publisher.publish([Publication(message, b"a", None)])
            (received,) = await broker.receive(1)
            await broker.nack([Nack(received.handle, 30)])
    async with (
        BrokerRegistry(worker_id="bert", dedup_window=300.0, machine=right) as brokers,
        brokers.open_queue(queue) as broker,
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


@asynccontextmanager
async def two_workers(folder: Path, roll: Roll) -> AsyncIterator[tuple[Publisher, Broker, Broker]]:
    """Connections of anna and bert to one queue, and a publisher for it."""
    loop = asyncio.get_running_loop()
    machine = Machine(wall=loop.time, uptime=loop.time, boot_id="boot")
    queue = QueueConfig(name="orders", uri=f"sqlite:///{folder}/queue.db", visibility_timeout=30)

    def registry(worker: str) -> BrokerRegistry:
        return BrokerRegistry(
            worker_id=worker, dedup_window=300.0, machine=machine, liveness=roll.of_file
        )

    async with registry("anna") as anna, registry("bert") as bert:
        publishing = bert.open_publisher(queue)
        async with (
            publishing as publisher,
            anna.open_queue(queue) as first,
            bert.open_queue(queue) as second,
        ):
            yield publisher, first, second


@pytest.mark.rule("WQ-10")
async def test_one_that_waits_gets_what_another_held_within_half_a_second_of_its_death(
    tmp_path: Path,
) -> None:
    loop, roll = asyncio.get_running_loop(), Roll()
    message = Message(id="a", target="https://svc.example/")
    async with two_workers(tmp_path, roll) as (publisher, dying, broker):
        await publisher.publish([Publication(message, b"a", None)])
        (held,) = await dying.receive(1)
        loop.call_at(7.1, roll.dead.add, "anna")

        (again,) = await broker.receive(1)

    assert (again.broker_id, again.receive_count) == (held.broker_id, 2)
    assert 7.1 <= loop.time() <= 7.6 + 0.01


@pytest.mark.rule("WQ-10")
async def test_what_a_dead_worker_held_is_handed_out_although_other_messages_keep_coming(
    tmp_path: Path,
) -> None:
    loop, roll = asyncio.get_running_loop(), Roll()
    message = Message(id="a", target="https://svc.example/")
    async with two_workers(tmp_path, roll) as (publisher, dying, broker):
        await publisher.publish([Publication(message, b"held", None)])
        await dying.receive(1)
        loop.call_later(1, roll.dead.add, "anna")
        received: list[bytes] = []

        async def consume() -> None:
            while True:
                batch = await broker.receive(10)
                received.extend(each.body for each in batch)
                await broker.ack([each.handle for each in batch])

        consuming = asyncio.create_task(consume())
        for number in range(20):
            await publisher.publish([Publication(message, b"%d" % number, str(number))])
            await asyncio.sleep(0.1)
        consuming.cancel()

    assert b"held" in received


@pytest.mark.rule("WQ-8", "P4")
async def test_old_audit_rows_go_although_messages_keep_coming_one_by_one() -> None:
    with closing(MemoryDatabase()) as database:
        queue = queue_in(database, audit=60.0)
        message = Message(id="a", target="https://svc.example/")

        async def consume() -> None:
            while True:
                batch = await queue.receive(10)
                await queue.ack([received.handle for received in batch])

        consuming = asyncio.create_task(consume())
        for number in range(1500):
            await queue.publish([Publication(message, b"%d" % number, str(number))])
            await asyncio.sleep(0.1)
        consuming.cancel()
        (kept,) = database.db.execute("SELECT count(*) FROM queue_changes").fetchone()

    assert 1800 <= kept <= 1850  # of 4,500: three changes of 600 messages in a minute


class NotingDatabase(MemoryDatabase):
    """Notes what was done, and where."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[str] = []

    async def run(self, work: Work[T], *, is_large: bool = False) -> T:
        self.done.append("run large" if is_large else "run")
        return await super().run(work, is_large=is_large)

    async def sync(self) -> None:
        self.done.append("sync")

    async def look(self, work: Work[T]) -> T:
        self.done.append("look")
        return await super().run(work)


def queue_in(database: MemoryDatabase, audit: float = 0.0) -> WorkQueue:
    clock = asyncio.get_running_loop().time
    table = QueueTable("orders", "anna", 300.0, clock, clock, audit=audit)
    return WorkQueue(database, table, 30.0)


@pytest.mark.rule("P1")
async def test_a_publication_outlasts_a_power_cut_and_the_rest_may_be_done_again() -> None:
    database = NotingDatabase()
    queue = queue_in(database)
    message = Message(id="a", target="https://svc.example/")

    await queue.publish([Publication(message, b"a", "a")])
    (received,) = await queue.receive(1)
    await queue.extend([received.handle], 30.0)
    await queue.ack([received.handle])
    database.close()

    assert database.done == ["run", "sync", "run", "run", "run"]


@pytest.mark.rule("P5")
async def test_large_bodies_are_read_and_deleted_where_they_hold_up_no_others() -> None:
    database = NotingDatabase()
    queue = queue_in(database)
    bodies = [b"small", b"1" * 300_000, b"", b"2" * 65_536, b"3" * 65_537, b"last"]
    message = Message(id="a", target="https://svc.example/")
    await queue.publish(
        [Publication(message, body, str(number)) for number, body in enumerate(bodies)]
    )
    database.done.clear()

    first = await queue.receive(1)
    rest = await queue.receive(50)
    await queue.ack([received.handle for received in (*first, *rest)])
    nothing = (await queue.claim(50)).messages
    database.close()

    assert [received.body for received in (*first, *rest)] == bodies
    assert [received.receive_count for received in (*first, *rest)] == [1] * 6
    assert list(nothing) == []
    assert database.done == ["run", "run", "look", "run large", "run"]


class OvertakenDatabase(MemoryDatabase):
    """Before a large body is read, its lease ends and another worker finishes the message."""

    overtake: Callable[[], Awaitable[None]] | None = None

    async def look(self, work: Work[T]) -> T:
        overtake, self.overtake = self.overtake, None
        if overtake is not None:
            await overtake()
        return await super().look(work)


@pytest.mark.rule("WQ-3", "P5")
async def test_a_large_message_that_is_finished_before_it_is_read_is_not_handed_out() -> None:
    database = OvertakenDatabase()
    slow, fast = queue_in(database), queue_in(database)
    message = Message(id="a", target="https://svc.example/")
    await slow.publish([Publication(message, body * 300_000) for body in (b"1", b"2")])

    async def overtake() -> None:
        await asyncio.sleep(31)
        (first,) = await fast.receive(1)
        await fast.ack([first.handle])

    database.overtake = overtake

    (received,) = await slow.receive(2)
    database.close()

    assert received.body == b"2" * 300_000
