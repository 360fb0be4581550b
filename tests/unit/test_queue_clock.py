"""A queue file while somebody sets the machine's clock, or boots it with another time (WQ-11)."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

import pytest
from msgspec.structs import replace

from router.brokers.machine import Machine
from router.brokers.queue_clock import LONGEST_DELAY, anchor
from router.brokers.queue_schema import prepare
from router.brokers.queue_table import QueueTable
from router.core.message import UNTRIED
from tests.unit.test_queue_table import LEASE, WINDOW, claim_ids, publication, story

YEAR = 365 * 86_400.0
STEPS = pytest.mark.parametrize("step", [YEAR, -YEAR], ids=["a year on", "a year back"])


@dataclass
class World:
    """A machine with a wrong clock, and the processes on it that share a file."""

    db: sqlite3.Connection
    true_time: float = 1_700_000_000.0
    wall_error: float = 0.0
    booted_at: float = 1_699_999_000.0
    boots: int = 1

    def open(self, worker: str = "anna") -> QueueTable:
        """As a process that starts now sees the file."""
        machine = Machine(
            wall=lambda: self.true_time + self.wall_error,
            uptime=lambda: self.true_time - self.booted_at,
            boot_id=f"boot {self.boots}",
        )
        offset = anchor(self.db, machine).offset
        return QueueTable("orders", worker, WINDOW, lambda: machine.uptime() + offset, audit=3600.0)

    def boot(self, *, wall_error: float = 0.0) -> None:
        self.true_time += 60
        self.booted_at, self.boots = self.true_time, self.boots + 1
        self.wall_error = wall_error
        self.true_time += 10

    def due_after(self, table: QueueTable, longest: float) -> float:
        """Let time pass until a message can be had; answer how much."""
        passed = 0.0
        while not claim_ids(self.db, table)[0]:
            wait = table.claim(self.db, 1, LEASE).wait
            assert passed + wait <= longest, f"nothing comes within {longest:g} s"
            self.true_time += wait + 0.001
            passed += wait
        return passed


@pytest.fixture
def world() -> Iterator[World]:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        prepare(db)
        yield World(db)


@pytest.mark.rule("WQ-11")
@STEPS
def test_a_delay_lasts_as_long_as_it_was_asked_for_whoever_sets_the_clock(
    world: World, step: float
) -> None:
    before = world.open()
    before.publish(world.db, [publication("a")])
    _, (lease,) = claim_ids(world.db, before)
    before.give_back(world.db, lease, 30, UNTRIED, "")

    world.wall_error += step
    started_since = world.open("bert")

    assert claim_ids(world.db, started_since)[0] == []
    assert world.due_after(started_since, YEAR) == pytest.approx(30, abs=0.1)


@pytest.mark.rule("WQ-11")
@pytest.mark.parametrize("written_with", [YEAR, -YEAR], ids=["a year ahead", "a year behind"])
def test_a_delay_that_was_written_with_a_wrong_clock_ends_after_the_clock_is_set_right(
    world: World, written_with: float
) -> None:
    world.wall_error = written_with
    table = world.open()
    table.publish(world.db, [publication("a")])
    _, (lease,) = claim_ids(world.db, table)
    table.give_back(world.db, lease, 30, UNTRIED, "")

    world.wall_error = 0.0

    assert world.due_after(world.open("bert"), YEAR) == pytest.approx(30, abs=0.1)


@pytest.mark.rule("WQ-11", "P2")
@STEPS
def test_what_a_living_worker_holds_stays_its_own_whoever_sets_the_clock(
    world: World, step: float
) -> None:
    holder = world.open()
    holder.publish(world.db, [publication("a", group="g")])
    _, leases = claim_ids(world.db, holder)
    handed_out_again: list[str] = []
    lost: list[int] = []

    for number in range(10):
        if number == 3:
            world.wall_error += step
        other = world.open(f"worker {number}")
        handed_out_again += claim_ids(world.db, other)[0]
        lost += holder.extend(world.db, leases, LEASE)
        world.true_time += LEASE / 2
    lost += holder.finish(world.db, leases, "")

    assert (handed_out_again, lost) == ([], [])


@pytest.mark.rule("WQ-11")
@STEPS
def test_what_a_dead_worker_held_comes_back_after_a_lease_whoever_sets_the_clock(
    world: World, step: float
) -> None:
    dead = world.open()
    dead.publish(world.db, [publication("a")])
    claim_ids(world.db, dead)

    world.wall_error += step

    assert world.due_after(world.open("bert"), YEAR) == pytest.approx(LEASE, abs=0.1)


@pytest.mark.rule("WQ-11", "WQ-1")
@STEPS
def test_the_dedup_window_stays_as_long_as_it_is_whoever_sets_the_clock(
    world: World, step: float
) -> None:
    table = world.open()
    table.publish(world.db, [publication("a")])
    _, leases = claim_ids(world.db, table)
    table.finish(world.db, leases, "")

    world.wall_error += step
    since = world.open("bert")
    within = since.publish(world.db, [publication("a")])
    world.true_time += WINDOW
    after = since.publish(world.db, [publication("a")])

    assert (within, after) == ([False], [True])


@pytest.mark.rule("WQ-11")
@pytest.mark.parametrize("before", [YEAR, 0.0, -YEAR])
@pytest.mark.parametrize("after", [YEAR, 0.0, -YEAR])
def test_no_delay_outlasts_a_boot_by_more_than_itself(
    world: World, before: float, after: float
) -> None:
    world.wall_error = before
    table = world.open()
    table.publish(world.db, [publication("a")])
    _, (lease,) = claim_ids(world.db, table)
    table.give_back(world.db, lease, 30, UNTRIED, "")

    world.boot(wall_error=after)

    assert world.due_after(world.open(), LONGEST_DELAY) <= 30.1


@pytest.mark.rule("WQ-11")
@pytest.mark.parametrize("before", [YEAR, 0.0, -YEAR])
@pytest.mark.parametrize("after", [YEAR, 0.0, -YEAR])
def test_no_lease_outlasts_a_boot_by_more_than_its_length(
    world: World, before: float, after: float
) -> None:
    world.wall_error = before
    table = world.open()
    table.publish(world.db, [publication(name, group="g") for name in "ab"])
    _, leases = claim_ids(world.db, table)
    for _ in range(9):  # held for long, and looked at meanwhile
        world.true_time += LEASE / 2
        table.extend(world.db, leases, LEASE)
        claim_ids(world.db, table)

    world.boot(wall_error=after)
    table = world.open("bert")

    assert world.due_after(table, LONGEST_DELAY) <= LEASE + 0.1


@pytest.mark.rule("WQ-11", "WQ-1", "P4")
@pytest.mark.parametrize("before", [YEAR, 0.0, -YEAR])
@pytest.mark.parametrize("after", [YEAR, 0.0, -YEAR])
def test_nothing_finished_is_remembered_for_longer_than_the_window_after_a_boot(
    world: World, before: float, after: float
) -> None:
    world.wall_error = before
    table = world.open()
    table.publish(world.db, [publication("a"), publication("b")])
    _, leases = claim_ids(world.db, table)
    table.finish(world.db, leases, "")

    world.boot(wall_error=after)
    table = world.open()
    world.true_time += WINDOW
    again = table.publish(world.db, [publication("a")])
    world.true_time += 3600
    _, leases = claim_ids(world.db, table)
    table.finish(world.db, leases, "")
    claim_ids(world.db, table)

    kept = world.db.execute("SELECT message_id FROM queue_entries").fetchall()
    assert (again, kept) == ([True], [("a",)])
    assert {row[0] for row in story(world.db)} == {"a"}


@pytest.mark.rule("WQ-11")
def test_a_delay_that_an_old_version_wrote_with_a_wrong_clock_is_cut(world: World) -> None:
    """It went by the wall clock, and that was set right meanwhile."""
    machine = Machine(wall=lambda: world.true_time, uptime=lambda: 0.0, boot_id="")
    wrong = replace(world.open(), clock=lambda: machine.wall() + YEAR)
    wrong.publish(world.db, [publication("a")])
    _, (lease,) = claim_ids(world.db, wrong)
    wrong.give_back(world.db, lease, 30, UNTRIED, "")
    right = replace(wrong, clock=machine.wall)
    right.publish(world.db, [publication("b")])
    _, leases = claim_ids(world.db, right)
    right.finish(world.db, leases, "")

    world.boot()

    assert world.due_after(world.open(), YEAR) == pytest.approx(LONGEST_DELAY, abs=0.1)


@pytest.mark.rule("WQ-11")
def test_without_a_boot_id_each_process_goes_by_the_wall_clock_of_its_start(world: World) -> None:
    machine = Machine(wall=lambda: world.true_time, uptime=lambda: 5.0, boot_id="")

    offsets = []
    for _ in range(2):
        offsets.append(anchor(world.db, machine).offset)
        world.true_time += 10

    assert offsets[1] - offsets[0] == pytest.approx(10)
