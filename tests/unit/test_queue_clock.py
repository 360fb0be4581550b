"""A queue file while somebody sets the machine's clock, or boots it with another time (WQ-11)."""

import asyncio
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

import pytest

from router.brokers.memory.broker import MemoryDatabase
from router.brokers.sqlite.connection import set_clock
from router.brokers.sqlite.queue_table import QueueTable
from router.brokers.workers import Machine
from router.core.returning import MAX_DELAY_SECONDS
from router.ports import Depth
from tests.support.work_queues import LEASE, WINDOW, Queue, publication, story

YEAR = 365 * 86_400.0
STEPS = pytest.mark.parametrize("step", [YEAR, -YEAR], ids=["a year on", "a year back"])


@dataclass
class ClockWorld:
    """A machine with a wrong clock, and the processes on it that share a file."""

    memory: MemoryDatabase
    runner: asyncio.Runner
    true_time: float = 1_700_000_000.0
    wall_error: float = 0.0
    booted_at: float = 1_699_999_000.0
    boots: int = 1

    def open(self, worker: str = "anna") -> Queue:
        """As a process that starts now sees the file."""
        machine = Machine(
            wall=lambda: self.true_time + self.wall_error,
            uptime=lambda: self.true_time - self.booted_at,
            boot_id=f"boot {self.boots}",
        )
        _, offset = set_clock(self.memory.db, machine)

        def clock() -> float:
            return machine.uptime() + offset

        table = QueueTable("orders", worker, WINDOW, clock, machine.wall, audit=3600.0)
        return Queue(self.memory, table, self.runner)

    def boot(self, *, wall_error: float = 0.0) -> None:
        self.true_time += 60
        self.booted_at, self.boots = self.true_time, self.boots + 1
        self.wall_error = wall_error
        self.true_time += 10

    def due_after(self, table: Queue, longest: float) -> float:
        """Let time pass until a message can be had; answer how much."""
        passed = 0.0
        while not (claim := table.claim()).messages:
            wait = claim.wait
            assert passed + wait <= longest, f"nothing comes within {longest:g} s"
            self.true_time += wait + 0.001
            passed += wait
        return passed


@pytest.fixture
def world() -> Iterator[ClockWorld]:
    with closing(MemoryDatabase()) as memory, asyncio.Runner() as runner:
        yield ClockWorld(memory, runner)


@pytest.mark.rule("WQ-11")
@STEPS
def test_a_delay_lasts_as_long_as_it_was_asked_for_whoever_sets_the_clock(
    world: ClockWorld, step: float
) -> None:
    before = world.open()
    before.publish([publication("a")])
    _, (lease,) = before.claim_ids()
    before.nack(lease, 30)

    world.wall_error += step
    started_since = world.open("bert")

    assert started_since.claim_ids()[0] == []
    assert world.due_after(started_since, YEAR) == pytest.approx(30, abs=0.1)


@pytest.mark.rule("WQ-11")
@pytest.mark.parametrize("written_with", [YEAR, -YEAR], ids=["a year ahead", "a year behind"])
def test_a_delay_that_was_written_with_a_wrong_clock_ends_after_the_clock_is_set_right(
    world: ClockWorld, written_with: float
) -> None:
    world.wall_error = written_with
    table = world.open()
    table.publish([publication("a")])
    _, (lease,) = table.claim_ids()
    table.nack(lease, 30)

    world.wall_error = 0.0

    assert world.due_after(world.open("bert"), YEAR) == pytest.approx(30, abs=0.1)


@pytest.mark.rule("WQ-11", "P2")
@STEPS
def test_what_a_living_worker_holds_stays_its_own_whoever_sets_the_clock(
    world: ClockWorld, step: float
) -> None:
    holder = world.open()
    holder.publish([publication("a", group="g")])
    _, leases = holder.claim_ids()
    handed_out_again: list[str] = []
    lost: list[int] = []

    for number in range(10):
        if number == 3:
            world.wall_error += step
        other = world.open(f"worker {number}")
        handed_out_again += other.claim_ids()[0]
        lost += holder.extend(leases, LEASE)
        world.true_time += LEASE / 2
    lost += holder.ack(leases)

    assert (handed_out_again, lost) == ([], [])


@pytest.mark.rule("WQ-11")
@STEPS
def test_what_a_dead_worker_held_comes_back_after_a_lease_whoever_sets_the_clock(
    world: ClockWorld, step: float
) -> None:
    dead = world.open()
    dead.publish([publication("a")])
    dead.claim_ids()

    world.wall_error += step

    assert world.due_after(world.open("bert"), YEAR) == pytest.approx(LEASE, abs=0.1)


@pytest.mark.rule("WQ-11", "WQ-1")
@STEPS
def test_the_dedup_window_stays_as_long_as_it_is_whoever_sets_the_clock(
    world: ClockWorld, step: float
) -> None:
    table = world.open()
    table.publish([publication("a")])
    _, leases = table.claim_ids()
    table.ack(leases)

    world.wall_error += step
    since = world.open("bert")
    within = since.publish([publication("a")])
    world.true_time += WINDOW
    after = since.publish([publication("a")])

    assert (within, after) == ([False], [True])


@pytest.mark.rule("WQ-11")
@pytest.mark.parametrize("before", [YEAR, 0.0, -YEAR])
@pytest.mark.parametrize("after", [YEAR, 0.0, -YEAR])
def test_no_delay_outlasts_a_boot_by_more_than_itself(
    world: ClockWorld, before: float, after: float
) -> None:
    world.wall_error = before
    table = world.open()
    table.publish([publication("a")])
    _, (lease,) = table.claim_ids()
    table.nack(lease, 30)

    world.boot(wall_error=after)

    assert world.due_after(world.open(), MAX_DELAY_SECONDS) <= 30.1


@pytest.mark.rule("WQ-11")
@pytest.mark.parametrize("before", [YEAR, 0.0, -YEAR])
@pytest.mark.parametrize("after", [YEAR, 0.0, -YEAR])
def test_no_lease_outlasts_a_boot_by_more_than_its_length(
    world: ClockWorld, before: float, after: float
) -> None:
    world.wall_error = before
    table = world.open()
    table.publish([publication(name, group="g") for name in "ab"])
    _, leases = table.claim_ids()
    for _ in range(9):  # held for long, and looked at meanwhile
        world.true_time += LEASE / 2
        table.extend(leases, LEASE)
        table.claim_ids()

    world.boot(wall_error=after)
    table = world.open("bert")

    assert world.due_after(table, MAX_DELAY_SECONDS) <= LEASE + 0.1


@pytest.mark.rule("WQ-11")
def test_a_boot_ends_no_lease_early(world: ClockWorld) -> None:
    table = world.open()
    table.publish([publication("a")])
    _, leases = table.claim_ids()
    table.extend(leases, 300)
    ends_at = world.true_time + 300

    world.boot()
    world.due_after(world.open("bert"), 300)

    assert world.true_time == pytest.approx(ends_at, abs=0.1)


@pytest.mark.rule("WQ-11", "WQ-1", "P4")
@pytest.mark.parametrize("before", [YEAR, 0.0, -YEAR])
@pytest.mark.parametrize("after", [YEAR, 0.0, -YEAR])
def test_nothing_finished_is_remembered_for_longer_than_the_window_after_a_boot(
    world: ClockWorld, before: float, after: float
) -> None:
    world.wall_error = before
    table = world.open()
    table.publish([publication("a"), publication("b")])
    _, leases = table.claim_ids()
    table.ack(leases)

    world.boot(wall_error=after)
    table = world.open()
    world.true_time += WINDOW
    again = table.publish([publication("a")])
    world.true_time += 3600
    _, leases = table.claim_ids()
    table.ack(leases)
    table.claim_ids()

    kept = world.memory.db.execute("SELECT message_id FROM queue_messages").fetchall()
    assert (again, kept) == ([True], [("a",)])
    assert {row[0] for row in story(world.memory.db)} == {"a"}


@pytest.mark.rule("WQ-11")
def test_a_delay_of_more_than_twelve_hours_is_cut_at_the_next_boot(world: ClockWorld) -> None:
    world.wall_error = YEAR
    table = world.open()
    table.publish([publication("a")])
    _, (lease,) = table.claim_ids()
    table.nack(lease, 2 * MAX_DELAY_SECONDS)

    world.boot()

    assert world.due_after(world.open(), YEAR) == pytest.approx(MAX_DELAY_SECONDS, abs=0.1)


@pytest.mark.rule("WQ-11")
def test_without_a_boot_id_each_process_goes_by_the_wall_clock_of_its_start(
    world: ClockWorld,
) -> None:
    machine = Machine(wall=lambda: world.true_time, uptime=lambda: 5.0, boot_id="")

    offsets = []
    for _ in range(2):
        offsets.append(set_clock(world.memory.db, machine)[1])
        world.true_time += 10

    assert offsets[1] - offsets[0] == pytest.approx(10)


@pytest.mark.rule("WQ-11", "CMD-5")
@pytest.mark.parametrize("before", [0.0, -YEAR])
def test_a_scheduled_message_waits_for_its_date_whatever_the_clock_said_before(
    world: ClockWorld, before: float
) -> None:
    """It is not cut to twelve hours: it means the calendar."""
    world.wall_error = before
    table = world.open()
    date = world.true_time + 3 * 86_400.0
    table.publish([publication("a", not_before=date)])

    world.boot()
    table = world.open()

    world.due_after(table, 4 * 86_400.0)
    assert world.true_time == pytest.approx(date, abs=1.0)


@pytest.mark.rule("WQ-11", "CMD-5")
def test_each_scheduled_message_waits_for_its_own_date_after_a_boot(world: ClockWorld) -> None:
    dates = [world.true_time + 60 * minutes for minutes in (20, 10, 30)]
    table = world.open()
    table.publish([publication(f"{date}", not_before=date) for date in dates])
    table.publish([publication("unscheduled")])

    world.boot()
    table = world.open()

    for date in sorted(dates):
        _, (found,) = table.claim_ids()  # the one that is due before it
        table.ack([found])
        world.true_time = date - 1.0
        assert table.claim_ids()[0] == []
        world.true_time = date + 1.0
    assert len(table.claim_ids()[0]) == 1


@pytest.mark.rule("WQ-11", "CMD-5")
def test_a_clock_that_is_set_within_a_boot_moves_no_schedule(world: ClockWorld) -> None:
    table = world.open()
    table.publish([publication("a", not_before=world.true_time + 3600)])
    world.wall_error = -YEAR

    assert world.due_after(table, 3601) == pytest.approx(3600, abs=1.0)


@pytest.mark.rule("WQ-11", "CMD-5")
def test_a_scheduled_message_that_was_tried_waits_for_its_delay_and_not_for_its_date(
    world: ClockWorld,
) -> None:
    table = world.open()
    table.publish([publication("a", not_before=world.true_time + 60)])
    world.true_time += 60
    _, (lease,) = table.claim_ids()
    table.nack(lease, 300)
    due_at = world.true_time + 300

    world.boot()
    world.due_after(world.open(), 300)

    assert world.true_time == pytest.approx(due_at, abs=0.1)


@pytest.mark.rule("WQ-11", "CMD-5")
def test_a_scheduled_message_that_was_cancelled_stays_so_after_a_boot(world: ClockWorld) -> None:
    world.wall_error = YEAR
    table = world.open()
    table.publish([publication("a", not_before=world.true_time + YEAR + 60)])
    table.cancel("a")

    world.boot()
    table = world.open()
    world.true_time += 2 * YEAR

    assert table.depth() == Depth(0, 0, due=0)
    assert table.claim_ids()[0] == []
