"""What a work queue in a file promises beyond the contract: other processes, crashes, bad disks."""

import asyncio
import errno
import os
import resource
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from router.brokers import BrokerRegistry
from router.brokers.sqlite import connection, database
from router.brokers.sqlite.database import FileDatabase
from router.brokers.sqlite.queue_table import QueueTable
from router.brokers.sqlite.work_queue import WorkQueue
from router.core.config import QueueConfig
from router.core.message import ReceivedMessage
from router.ports import Broker, Disconnected, Nack, QueueRefused
from tests.contract.cases import (
    Ends,
    bodies,
    both_ends,
    locked_by_another_process,
    publication,
)

pytestmark = pytest.mark.anyio

_ROOT = Path(__file__).parents[2]


@pytest.fixture
def queue(tmp_path: Path) -> QueueConfig:
    return QueueConfig(name="orders", uri=f"sqlite:///{tmp_path}/queue.db", visibility_timeout=30.0)


@asynccontextmanager
async def opened(queue: QueueConfig) -> AsyncIterator[Ends]:
    async with (
        BrokerRegistry(worker_id="worker-1", dedup_window=300.0) as brokers,
        both_ends(brokers, queue) as ends,
    ):
        yield ends


def start_consumer(queue: QueueConfig, worker: str, *, limit: int) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.contract.shared_file_consumer",
            queue.uri,
            worker,
            str(limit),
            str(queue.visibility_timeout),
        ],
        cwd=_ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.rule("WQ-2", "P2", "P3")
async def test_two_processes_share_a_queue_without_breaking_a_group(queue: QueueConfig) -> None:
    messages = [
        publication(f"{number % 7}:{number}", group=f"g{number % 7}") for number in range(400)
    ]
    async with opened(queue) as ends:
        await ends.publisher.publish(messages)

    consumers = [start_consumer(queue, worker, limit=5) for worker in ("anna", "bert")]
    events = sorted(
        (float(at), verb, worker, body)
        for consumer in consumers
        for at, verb, worker, body in (
            line.split() for line in consumer.communicate(timeout=60)[0].splitlines()
        )
    )

    claimed = [body for _, verb, _, body in events if verb == "claimed"]
    assert sorted(claimed) == sorted(item.message.id for item in messages)
    assert len({worker for _, _, worker, _ in events}) == 2
    assert_no_group_is_shared(events)
    assert_groups_in_order(claimed)


def assert_no_group_is_shared(events: list[tuple[float, str, str, str]]) -> None:
    holding: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for _, verb, worker, body in events:
        group = holding[body.partition(":")[0]]
        (group.add if verb == "claimed" else group.discard)((worker, body))
        assert len({worker for worker, _ in group}) <= 1


def assert_groups_in_order(claimed: list[str]) -> None:
    numbers: dict[str, list[int]] = defaultdict(list)
    for body in claimed:
        group, _, number = body.partition(":")
        numbers[group].append(int(number))
    assert all(order == sorted(order) for order in numbers.values())


@asynccontextmanager
async def held_by_another_process(
    queue: QueueConfig,
) -> AsyncIterator["subprocess.Popen[str]"]:
    """Three messages of a group, by the worker `anna`, which never settles."""
    async with opened(queue) as ends:
        await ends.publisher.publish([publication(f"g:{number}", group="g") for number in range(3)])
    consumer = start_consumer(queue, "anna", limit=0)
    assert consumer.stdout is not None
    for _ in range(3):
        await asyncio.to_thread(consumer.stdout.readline)
    try:
        yield consumer
    finally:
        consumer.kill()
        consumer.communicate()


async def handed_out_again(broker: Broker) -> float:
    """Seconds until they are, all three in order."""
    began = time.monotonic()
    batch = await broker.receive(10)
    assert bodies(batch) == ["g:0", "g:1", "g:2"]
    assert {received.receive_count for received in batch} == {2}
    return time.monotonic() - began


@pytest.mark.rule("P1", "WQ-4")
async def test_what_an_idle_process_held_is_handed_out_again(
    queue: QueueConfig,
) -> None:
    brief = replace(queue, visibility_timeout=1.0)
    async with held_by_another_process(brief) as consumer, opened(brief) as ends:
        consumer.send_signal(signal.SIGSTOP)

        assert await handed_out_again(ends.broker) > 0.3


@pytest.mark.rule("P1", "WQ-10")
async def test_what_a_killed_process_held_is_handed_out_at_once_after_a_start(
    queue: QueueConfig,
) -> None:
    async with held_by_another_process(queue) as consumer:
        consumer.kill()
        consumer.communicate()
        async with opened(queue) as ends:
            assert await handed_out_again(ends.broker) < 1


@pytest.mark.rule("WQ-10")
async def test_what_a_killed_process_held_goes_before_what_came_after_it(
    queue: QueueConfig,
) -> None:
    async with held_by_another_process(queue) as consumer:
        consumer.kill()
        consumer.communicate()
        async with opened(queue) as ends:
            await ends.publisher.publish([publication("later")])
            batch = await ends.broker.receive(1)

    assert bodies(batch) == ["g:0"]


@pytest.mark.rule("P1", "WQ-10")
async def test_what_a_killed_process_held_is_handed_out_at_once_to_one_that_waits(
    queue: QueueConfig, tmp_path: Path
) -> None:
    async with held_by_another_process(queue) as consumer, opened(queue) as ends:
        waiting = asyncio.ensure_future(handed_out_again(ends.broker))
        await asyncio.sleep(1.5)
        while_alive = waiting.done()
        consumer.kill()
        killed = time.monotonic()
        await waiting
        waited = time.monotonic() - killed
        left = [name for name in modes_in(tmp_path) if "-worker-" in name]

    assert not while_alive
    assert waited < 1
    assert left == ["queue.db-worker-worker-1"]


@pytest.mark.rule("WQ-10")
async def test_two_that_recover_the_same_worker_hand_out_what_it_held_once(
    queue: QueueConfig,
) -> None:
    async with held_by_another_process(queue) as consumer:
        consumer.kill()
        consumer.communicate()
        async with (
            BrokerRegistry(worker_id="bert", dedup_window=300.0) as bert,
            BrokerRegistry(worker_id="carl", dedup_window=300.0) as carl,
            bert.open_queue(queue) as first,
            carl.open_queue(queue) as second,
        ):
            waiting = [asyncio.ensure_future(broker.receive(10)) for broker in (first, second)]
            await asyncio.sleep(1)
            first.stop()
            second.stop()
            received = [body for batch in await asyncio.gather(*waiting) for body in bodies(batch)]

    assert received == ["g:0", "g:1", "g:2"]


@pytest.mark.rule("ID-1")
async def test_a_message_keeps_its_broker_id_and_one_of_a_new_file_has_another(
    queue: QueueConfig, tmp_path: Path
) -> None:
    ids = []
    for _ in range(2):
        async with opened(queue) as ends:
            await ends.publisher.publish([publication("a")])
        for _ in range(2):
            async with opened(queue) as ends:
                (received,) = await ends.broker.receive(1)
                ids.append(received.broker_id)
                await ends.broker.nack([Nack(received.handle, 0)])
        (tmp_path / "queue.db").unlink()

    first, first_again, second, second_again = ids
    assert (first, second) == (first_again, second_again)
    assert first != second


@pytest.mark.rule("WQ-6")
async def test_what_another_process_publishes_is_seen_soon(queue: QueueConfig) -> None:
    async with opened(queue) as ours, opened(queue) as theirs:
        waiting = asyncio.ensure_future(ours.broker.receive(1))
        await asyncio.sleep(0.5)  # by now it polls at its slowest
        published = time.monotonic()
        await theirs.publisher.publish([publication("a")])

        batch = await waiting

    assert bodies(batch) == ["a"]
    assert time.monotonic() - published < 0.5


@pytest.mark.rule("WQ-6")
async def test_waiting_costs_next_to_nothing(queue: QueueConfig) -> None:
    async with opened(queue) as ends:
        waiting = asyncio.ensure_future(ends.broker.receive(1))
        await asyncio.sleep(0.2)
        before = time.process_time()
        await asyncio.sleep(2)
        used = time.process_time() - before
        ends.broker.stop()
        await waiting

    assert used / 2 < 0.01


@pytest.mark.rule("WQ-1")
async def test_all_queues_of_a_file_share_its_threads(tmp_path: Path) -> None:
    orders = QueueConfig(name="orders", uri=f"sqlite:///{tmp_path}/queue.db")
    bills = QueueConfig(name="bills", uri=f"sqlite:///{tmp_path}/./queue.db?queue=invoices")
    async with (
        BrokerRegistry(worker_id="worker-1", dedup_window=300.0) as brokers,
        both_ends(brokers, orders) as one,
        both_ends(brokers, bills) as other,
    ):
        await one.publisher.publish([publication("a")])
        await other.publisher.publish([publication("a"), publication("b")])
        threads = [each.name for each in threading.enumerate() if "queue.db" in each.name]
        received = [bodies(await ends.broker.receive(10)) for ends in (one, other)]

    assert threads == ["sqlite queue.db_0", "disk queue.db_0"]
    assert received == [["a"], ["a", "b"]]


class FileDesk:
    """Someone who has work done at a file, and asks who did it."""

    def __init__(self, file: FileDatabase) -> None:
        self.file = file

    async def worker(self, *, seconds: float = 0.0, is_large: bool = False) -> str:
        """The thread that did what takes so long."""

        def work(_: sqlite3.Connection) -> str:
            time.sleep(seconds)
            return threading.current_thread().name

        return await self.file.run(work, is_large=is_large)


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[FileDesk]:
    file = FileDatabase(tmp_path / "queue.db")
    yield FileDesk(file)
    await file.close()


LOOP, THREAD = "MainThread", "sqlite queue.db_0"


@pytest.mark.rule("P5")
async def test_the_event_loop_does_what_is_quick_and_a_thread_what_may_wait(desk: FileDesk) -> None:
    opening = await desk.worker()
    quick = await desk.worker()
    large = await desk.worker(is_large=True)
    many = await asyncio.gather(*(desk.worker() for _ in range(database.QUICK_JOBS + 1)))

    assert (opening, quick, large, set(many)) == (THREAD, LOOP, THREAD, {THREAD})


@pytest.mark.rule("P5")
async def test_a_turn_that_held_the_loop_up_is_the_last_for_a_while(
    desk: FileDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "CAUTION_SECONDS", 0.3)
    await desk.file.prepare()

    slow = await desk.worker(seconds=2 * database.QUICK_SECONDS)
    soon_after = await desk.worker()
    await asyncio.sleep(0.4)
    later = await desk.worker()

    assert (slow, soon_after, later) == (LOOP, THREAD, LOOP)


@pytest.mark.rule("P5")
async def test_another_process_with_the_lock_holds_up_no_one_else(
    desk: FileDesk, queue: QueueConfig
) -> None:
    await desk.file.prepare()
    async with locked_by_another_process(queue):
        working = asyncio.ensure_future(desk.worker())
        began = time.monotonic()
        await asyncio.sleep(0.2)
        held_up_for = time.monotonic() - began - 0.2
        done_before = working.done()

    assert await working == THREAD
    assert not done_before
    assert held_up_for < 0.2


@pytest.mark.rule("WQ-1")
async def test_the_log_is_written_back_to_the_file_now_and_then(
    desk: FileDesk, tmp_path: Path
) -> None:
    await desk.file.run(lambda db: db.execute("CREATE TABLE kept (number)").close())
    for _ in range(database.CHECKPOINT_TURNS):
        await desk.worker()

    with closing(sqlite3.connect(f"file:{tmp_path}/queue.db?immutable=1", uri=True)) as db:
        assert db.execute("SELECT count(*) FROM kept").fetchone() == (0,)


@pytest.mark.rule("WQ-1")
async def test_closing_a_file_finishes_what_was_asked_for(desk: FileDesk) -> None:
    first = asyncio.ensure_future(desk.worker(seconds=0.1, is_large=True))
    await asyncio.sleep(0.05)
    second = asyncio.ensure_future(desk.worker())
    await asyncio.sleep(0)

    await desk.file.close()

    assert (await first, await second) == (THREAD, LOOP)


@pytest.mark.rule("WQ-1")
async def test_a_new_log_is_begun_by_the_thread_as_the_disk_is_waited_for(desk: FileDesk) -> None:
    await desk.file.run(lambda db: db.execute("CREATE TABLE kept (number)").close())
    for _ in range(database.CHECKPOINT_TURNS):
        await desk.worker()

    def write(db: sqlite3.Connection) -> str:
        db.execute("INSERT INTO kept VALUES (1)")
        return threading.current_thread().name

    workers = [await desk.file.run(write) for _ in range(2)]

    assert workers == [THREAD, LOOP]


@pytest.mark.rule("WQ-1")
async def test_who_gave_up_waiting_claims_nothing(desk: FileDesk) -> None:
    done: list[str] = []
    await desk.file.prepare()
    giving_up = asyncio.ensure_future(desk.file.run(lambda _: done.append("given up")))
    staying = asyncio.ensure_future(desk.file.run(lambda _: done.append("wanted")))
    await asyncio.sleep(0)
    giving_up.cancel()

    await staying

    assert done == ["wanted"]


@pytest.mark.rule("WQ-1")
async def test_a_closed_file_keeps_nothing_more(desk: FileDesk) -> None:
    await desk.file.prepare()
    await desk.file.close()

    with pytest.raises(Disconnected, match="closed"):
        await desk.file.sync()


@pytest.mark.rule("WQ-1")
async def test_no_body_stays_behind_when_a_queue_is_closed(
    queue: QueueConfig, tmp_path: Path
) -> None:
    async with opened(queue) as ends:
        await ends.publisher.publish([publication("a", body=b"with a token")])
        (received,) = await ends.broker.receive(1)
        await ends.broker.ack([received.handle])

    with closing(sqlite3.connect(tmp_path / "queue.db")) as db:
        bodies_left = db.execute("SELECT body FROM queue_bodies").fetchall()
    assert bodies_left == []


@pytest.mark.rule("P5")
@pytest.mark.parametrize(("size", "publisher"), [(1_000, LOOP), (100_000, THREAD)])
async def test_large_bodies_are_published_by_the_thread_and_read_beside_the_loop(
    desk: FileDesk, size: int, publisher: str
) -> None:
    workers: list[str] = []

    def clock() -> float:
        workers.append(threading.current_thread().name)
        return time.time()

    queue = WorkQueue(desk.file, QueueTable("orders", "worker-1", 300.0, clock, clock), 30.0)
    await desk.file.prepare()
    published = [publication(f"m{number}", body=bytes(size)) for number in range(9)]

    await queue.publish(published)
    publishers, workers = set(workers), []
    batch = await queue.receive(8)
    claimers, workers = set(workers), []
    await queue.ack([received.handle for received in batch])

    assert [received.body for received in batch] == [bytes(size)] * 8
    assert (publishers, claimers, set(workers)) == ({publisher}, {LOOP}, {publisher})


@pytest.mark.rule("WQ-2")
async def test_what_a_receiver_waits_for_is_claimed_in_the_same_transaction(desk: FileDesk) -> None:
    queue = WorkQueue(
        desk.file, QueueTable("orders", "worker-1", 300.0, time.time, time.time), 30.0
    )
    statements: list[str] = []
    await desk.file.run(lambda db: db.set_trace_callback(statements.append))

    waiting = await waits_at(queue)
    statements.clear()
    await queue.publish([publication(f"g:{number}", group="g") for number in range(2)])
    (first,) = await waiting
    published_and_claimed = statements.count("COMMIT")

    waiting = await waits_at(queue)
    statements.clear()
    await queue.ack([first.handle])
    (second,) = await waiting
    settled_and_claimed = statements.count("COMMIT")

    assert bodies([first, second]) == ["g:0", "g:1"]
    assert (published_and_claimed, settled_and_claimed) == (1, 1)


async def waits_at(broker: WorkQueue) -> "asyncio.Future[Sequence[ReceivedMessage]]":
    waiting = asyncio.ensure_future(broker.receive(1))
    await asyncio.sleep(0.1)
    return waiting


@pytest.mark.rule("WQ-1")
async def test_the_files_are_for_their_owner_only(queue: QueueConfig, tmp_path: Path) -> None:
    async with opened(queue) as ends:
        await ends.publisher.publish([publication("a")])
        modes = modes_in(tmp_path)

    files = ("queue.db", "queue.db-wal", "queue.db-shm", "queue.db-worker-worker-1")
    assert modes == dict.fromkeys(files, 0o600)


def modes_in(directory: Path) -> dict[str, int]:
    return {file.name: stat.S_IMODE(file.stat().st_mode) for file in directory.iterdir()}


@pytest.mark.rule("P1")
async def test_a_publication_is_answered_when_the_disk_has_kept_it_and_delivered_before(
    queue: QueueConfig, disk: "SlowDisk", tmp_path: Path
) -> None:
    async with opened(queue) as ends:
        publishing = asyncio.ensure_future(ends.publisher.publish([publication("a")]))
        (received,) = await ends.broker.receive(1)
        await ends.broker.ack([received.handle])
        answered_before = publishing.done()
        disk.may_go_on.set()
        added = await publishing

    assert not answered_before
    assert added == [True]
    assert disk.kept == [tmp_path.name, "queue.db-wal"]  # the names of new files first


@pytest.mark.rule("P1")
async def test_publishers_share_what_the_disk_keeps(queue: QueueConfig, disk: "SlowDisk") -> None:
    async with opened(queue) as ends:
        publishing = [
            asyncio.ensure_future(ends.publisher.publish([publication(str(number))]))
            for number in range(10)
        ]
        received = 0
        while received < len(publishing):
            received += len(await ends.broker.receive(10))
        disk.may_go_on.set()
        await asyncio.gather(*publishing)

    assert disk.kept.count("queue.db-wal") == 2


@pytest.mark.rule("P1")
async def test_after_the_disk_has_failed_a_new_log_is_begun(
    queue: QueueConfig, disk: "SlowDisk", tmp_path: Path
) -> None:
    disk.may_go_on.set()
    async with opened(queue) as ends:
        disk.fails = True
        with pytest.raises(Disconnected):
            await ends.publisher.publish([publication("a")])
        disk.fails = False
        await ends.publisher.publish([publication("b")])
        without_log = messages_in(f"file:{tmp_path}/queue.db?immutable=1")

    assert without_log == 1


@pytest.mark.rule("P1")
async def test_a_log_that_somebody_has_deleted_keeps_nothing(
    queue: QueueConfig, tmp_path: Path
) -> None:
    async with opened(queue) as ends:
        await ends.publisher.publish([publication("a")])
        (tmp_path / "queue.db-wal").unlink()

        with pytest.raises(Disconnected):
            await ends.publisher.publish([publication("b")])


@pytest.mark.rule("P1")
async def test_opening_a_file_once_more_ends_no_lock_on_it(
    queue: QueueConfig, tmp_path: Path
) -> None:
    file = f"file:{tmp_path}/queue.db"
    async with opened(queue) as ends:
        await ends.publisher.publish([publication("a")])
        async with opened(queue):
            pass
        await asyncio.to_thread(messages_seen_elsewhere, file)  # by the last one, if it were
        await ends.publisher.publish([publication("b")])
        seen = await asyncio.to_thread(messages_seen_elsewhere, file)

    assert seen == 2


def messages_in(file: str) -> int:
    with closing(sqlite3.connect(file, uri=True)) as db:
        (count,) = db.execute("SELECT count(*) FROM queue_messages").fetchone()
        return int(count)


def messages_seen_elsewhere(file: str) -> int:
    """By another process, which closes the file again."""
    look = f"from {__name__} import messages_in; print(messages_in({file!r}))"
    found = subprocess.run([sys.executable, "-c", look], cwd=_ROOT, check=True, capture_output=True)
    return int(found.stdout)


class SlowDisk:
    """Keeps a log when it is let go on, if it can; the rest at once."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.fails = False
        self.kept: list[str] = []

    def flush(self, descriptor: int) -> None:
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        if name.endswith("-wal"):
            self.may_go_on.wait(10)
            if self.fails:
                raise OSError(errno.EIO, "Input/output error")
        self.kept.append(name)
        os.fsync(descriptor)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> SlowDisk:
    slow = SlowDisk()
    monkeypatch.setattr(connection, "_flush", slow.flush)
    return slow


@pytest.mark.rule("WQ-8")
@pytest.mark.parametrize(("option", "written"), [("", 3), ("?audit=0", 0)])
async def test_the_story_of_a_message_can_be_read_in_the_file(
    tmp_path: Path, option: str, written: int
) -> None:
    queue = QueueConfig(name="orders", uri=f"sqlite:///{tmp_path}/queue.db{option}")
    async with opened(queue) as ends:
        await ends.publisher.publish([publication("a", group="g")])
        (received,) = await ends.broker.receive(1)
        await ends.broker.ack([received.handle])
    with closing(sqlite3.connect(tmp_path / "queue.db")) as db:
        states = [state for (state,) in db.execute("SELECT state FROM queue_audit ORDER BY at")]

    assert states[:written] == ["ready", "in-flight", "succeeded"][:written]
    assert ("ready" in states) == bool(written)


@pytest.mark.rule("WQ-1")
@pytest.mark.parametrize("audit", ["-1", "soon", "inf"])
async def test_a_wrong_time_for_the_story_is_refused(tmp_path: Path, audit: str) -> None:
    queue = QueueConfig(name="orders", uri=f"sqlite:///{tmp_path}/queue.db?audit={audit}")

    with pytest.raises(QueueRefused, match="audit that is not"):
        async with opened(queue):
            pass


@pytest.mark.rule("BRK-6")
async def test_a_file_that_stays_locked_is_a_lost_connection(
    queue: QueueConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "BUSY_TIMEOUT_SECONDS", 0.1)
    async with opened(queue) as ends:
        async with locked_by_another_process(queue):
            with pytest.raises(Disconnected, match="locked"):
                await ends.publisher.publish([publication("a")])

        added = await ends.publisher.publish([publication("a")])

    assert added == [True]


@pytest.mark.rule("BRK-6")
async def test_a_full_disk_is_a_lost_connection_and_publishes_nothing(queue: QueueConfig) -> None:
    large = [publication(f"m{number}", body=bytes(100_000)) for number in range(10)]
    async with opened(queue) as ends:
        with files_of_at_most(500_000), pytest.raises(Disconnected):
            await ends.publisher.publish(large)

        added = await ends.publisher.publish(large)

    assert added == [True] * 10


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.rule("WQ-1")
async def test_a_directory_that_is_not_there_is_a_lost_connection(tmp_path: Path) -> None:
    queue = QueueConfig(name="orders", uri=f"sqlite:///{tmp_path}/nowhere/queue.db")

    with pytest.raises(Disconnected, match="No such file or directory"):
        async with opened(queue):
            pass


@pytest.mark.rule("WQ-1")
async def test_a_file_that_is_no_database_is_refused(queue: QueueConfig, tmp_path: Path) -> None:
    (tmp_path / "queue.db").write_bytes(b"These are the days of our lives. " * 100)

    with pytest.raises(QueueRefused, match="not a database"):
        async with opened(queue):
            pass


@pytest.mark.rule("WQ-1")
async def test_a_file_of_a_later_version_is_refused(queue: QueueConfig, tmp_path: Path) -> None:
    async with opened(queue):
        pass
    with closing(sqlite3.connect(tmp_path / "queue.db")) as db:
        db.execute("PRAGMA user_version = 99")

    with pytest.raises(QueueRefused, match="version 99"):
        async with opened(queue):
            pass


@pytest.mark.rule("P5")
async def test_a_publication_that_cannot_be_stored_harms_no_other(queue: QueueConfig) -> None:
    unstorable = publication("\ud800", body=b"")
    async with opened(queue) as ends:
        wrong = asyncio.ensure_future(ends.publisher.publish([unstorable]))
        right = asyncio.ensure_future(ends.publisher.publish([publication("a")]))

        with pytest.raises(UnicodeEncodeError):
            await wrong

        assert await right == [True]
