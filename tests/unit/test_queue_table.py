"""The work queue's table against the model, and case by case."""

import asyncio
import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from router.brokers.memory.broker import MemoryDatabase
from router.brokers.sqlite import queue_table
from router.brokers.sqlite.connection import (
    OLDEST_VERSION,
    QUERIES,
    SCHEMA_VERSION,
    prepare_schema,
)
from router.brokers.sqlite.order import SqliteOrderLog
from router.brokers.sqlite.queue_table import PRUNED_AT_ONCE, QueueTable
from router.brokers.sqlite.work_queue import PRUNE_EVERY_MESSAGES, PRUNE_PAUSE_SECONDS
from router.brokers.work_queue import MAX_ERROR_CHARACTERS
from router.brokers.workers import THIS_MACHINE
from router.core.message import UNTRIED, Message, Mode, Tally, parse
from router.core.outcome import Ending, Failure
from router.ports import Depth, PoolFilter, Publication, QueueRefused, StoredMessage
from tests.support.queue_model import WorkQueueComparison
from tests.support.work_queues import LEASE, WINDOW, Queue, QueueClock, publication, story


class QueueComparison(WorkQueueComparison):
    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.memory = MemoryDatabase()
        anna = Queue.of(self.memory, lambda: self.model.now, self.runner)
        self.queues = {"anna": anna, "bert": anna.but(worker_id="bert")}
        self.tables = self.queues

    def teardown(self) -> None:
        self.memory.close()
        self.runner.close()

    def ids(self) -> Mapping[bytes, int]:
        return dict(self.memory.db.execute("SELECT body, id FROM queue_bodies ORDER BY id"))

    @rule(worker=st.sampled_from(["anna", "bert"]))
    def end_leases(self, worker: str) -> None:
        for row in self.model.rows:
            if row.state == "in-flight" and row.worker == worker:
                row.state, row.lease = "ready", None

        self.queues[worker].end_leases([worker])


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture
def memory() -> Iterator[MemoryDatabase]:
    with closing(MemoryDatabase()) as memory:
        yield memory


@pytest.fixture
def db(memory: MemoryDatabase) -> sqlite3.Connection:
    return memory.db


@pytest.fixture
def clock() -> QueueClock:
    return QueueClock()


@pytest.fixture(params=[None, PoolFilter(frozenset(), excludes=True)], ids=["", "all-but-none"])
def table(
    request: pytest.FixtureRequest,
    memory: MemoryDatabase,
    clock: QueueClock,
    runner: asyncio.Runner,
) -> Queue:
    """A queue; also one that excludes no pool, which must do the same in all."""
    queue = Queue.of(memory, clock, runner)
    queue.select(request.param)
    return queue


@pytest.mark.rule("WQ-1", "ID-3")
def test_another_body_under_the_same_id_is_another_message(table: Queue) -> None:
    items = [publication("a", body=body) for body in ("to one", "to another", "to one")]

    at_once = table.publish(items)
    later = table.publish([publication("a", body="to a third"), items[0]])

    assert (at_once, later) == ([True, True, False], [True, False])
    assert table.claim_ids()[0] == ["to one", "to another", "to a third"]


@pytest.mark.rule("WQ-1")
def test_an_explicit_key_is_taken_at_its_word(table: Queue) -> None:
    items = [publication("a", key="k"), publication("b", key="k"), publication("k")]

    added = table.publish(items)
    later = table.publish([publication("c", key="k"), publication("a")])

    assert (added, later) == ([True, "a", True], ["a", True])


@pytest.mark.rule("WQ-1")
@pytest.mark.parametrize("key", [None, "k"])
@pytest.mark.parametrize(("error", "may_come_again"), [("", False), ("HTTP 404", True)])
def test_what_has_died_may_be_published_again_at_once(
    table: Queue, key: str | None, error: str, may_come_again: bool
) -> None:
    table.publish([publication("a", key=key)])
    _, leases = table.claim_ids()
    table.ack(leases, error)

    again = table.publish([publication("a", key=key)])

    assert again == [may_come_again]
    assert table.claim_ids()[0] == ["a"] * may_come_again


@pytest.mark.rule("WQ-10")
def test_what_a_dead_worker_held_is_returned_in_every_queue_and_in_order(
    db: sqlite3.Connection, table: Queue
) -> None:
    other = table.but(worker_id="bert", audit=3600.0)
    bills = table.but(queue="bills")
    table.publish([publication(f"g{number}", group="g") for number in range(4)])
    bills.publish([publication("bill")])
    other.publish([publication("mine")])
    table.claim_ids(limit=2)
    bills.claim_ids()
    other.claim_ids()

    other.end_leases(["anna"])

    assert other.claim_ids()[0] == ["g0", "g1", "g2", "g3"]
    assert bills.but(worker_id="bert").claim_ids()[0] == ["bill"]
    assert ("g0", "ready", 1000.0, "bert", "the worker died") in story(db)


TestQueueComparison = pytest.mark.rule("WQ-1", "WQ-2", "WQ-3", "WQ-4", "P3")(
    QueueComparison.TestCase
)
TestQueueComparison.settings = settings(max_examples=120, stateful_step_count=30, derandomize=True)


@pytest.mark.rule("WQ-2")
def test_high_priority_goes_first_then_the_order_of_publication(table: Queue) -> None:
    table.publish([publication("a", group="g"), publication("b"), publication("c", group="h")])
    table.publish([publication("d", group="g", high=True), publication("e", group="g")])

    ids, _ = table.claim_ids()

    assert ids == ["d", "a", "b", "c", "e"]


@pytest.mark.rule("WQ-2")
def test_all_of_high_priority_goes_before_the_first_regular_one(table: Queue) -> None:
    table.publish([publication("a", group="g")])
    table.publish([publication(name, group="h", high=True) for name in "bc"])

    ids, _ = table.claim_ids(limit=2)

    assert ids == ["b", "c"]


@pytest.mark.rule("WQ-2")
def test_a_run_of_a_lane_ends_at_a_message_that_must_wait(table: Queue, clock: QueueClock) -> None:
    table.publish([publication(name, group="g") for name in "abc"])
    _, (first, second, third) = table.claim_ids()
    table.nack(second, 10)
    table.nack(third, 0)
    table.nack(first, 0)

    before, leases = table.claim_ids()
    clock.now += 10
    still_held, _ = table.claim_ids()
    table.ack(leases)
    after, _ = table.claim_ids()

    assert (before, still_held, after) == (["a"], [], ["b", "c"])


@pytest.mark.rule("WQ-2")
@pytest.mark.parametrize("high", [False, True])
def test_a_lane_waits_for_a_message_in_the_middle_of_it_that_is_in_flight(
    table: Queue, *, high: bool
) -> None:
    table.publish([publication(name, group="g", high=high) for name in "abc"])
    _, (first, second) = table.claim_ids(limit=2)
    table.nack(first, 0)

    before, _ = table.claim_ids()
    table.nack(second, 0)
    after, _ = table.claim_ids()

    assert (before, after) == ([], ["a", "b", "c"])


@pytest.mark.rule("WQ-2")
@pytest.mark.parametrize("high", [False, True])
def test_a_group_belongs_to_the_worker_that_holds_a_message_in_the_middle_of_its_other_lane(
    table: Queue, *, high: bool
) -> None:
    other = table.but(worker_id="bert")
    table.publish([publication(name, group="g", high=high) for name in "abc"])
    _, (first, _) = table.claim_ids(limit=2)
    table.nack(first, 10)
    table.publish([publication("d", group="g", high=not high)])

    others, _ = other.claim_ids()
    ours, _ = table.claim_ids()

    assert (others, ours) == ([], ["d"])


@pytest.mark.rule("WQ-2")
def test_a_high_priority_message_reaches_only_the_worker_that_holds_its_group(table: Queue) -> None:
    other = table.but(worker_id="bert")
    table.publish([publication("a", group="g")])
    table.claim_ids()
    table.publish([publication("b", group="g", high=True), publication("c", group="h")])

    others, _ = other.claim_ids()
    ours, _ = table.claim_ids()

    assert (others, ours) == (["c"], ["b"])


@pytest.mark.rule("WQ-2")
def test_the_next_of_a_group_is_for_the_worker_that_still_holds_its_high_priority_message(
    table: Queue,
) -> None:
    other = table.but(worker_id="bert")
    table.publish([publication("a", group="g"), publication("b", group="g")])
    _, leases = table.claim_ids(limit=1)
    table.publish([publication("c", group="g", high=True)])
    table.claim_ids()
    table.ack(leases)

    others, _ = other.claim_ids()
    ours, _ = table.claim_ids()

    assert (others, ours) == ([], ["b"])


@pytest.mark.rule("WQ-2")
def test_the_rest_of_a_group_is_for_the_worker_that_took_its_high_priority_message(
    table: Queue,
) -> None:
    other = table.but(worker_id="bert")
    table.publish([publication("a", group="g"), publication("b", group="g", high=True)])
    table.claim_ids(limit=1)

    others, _ = other.claim_ids()
    ours, _ = table.claim_ids()

    assert (others, ours) == ([], ["a"])


@pytest.mark.rule("WQ-2")
def test_what_was_kept_for_a_worker_is_handed_out_once(table: Queue) -> None:
    table.publish([publication("a", group="g"), publication("b", group="g", high=True)])
    table.claim_ids(limit=1)

    kept, _ = table.claim_ids()
    again, _ = table.claim_ids()

    assert (kept, again) == (["a"], [])


@pytest.mark.rule("P5")
def test_what_has_waited_for_its_delay_goes_before_what_came_after_it(
    table: Queue, clock: QueueClock
) -> None:
    table.publish([publication("a", group="g"), publication("b", group="h")])
    _, (lease,) = table.claim_ids(limit=1)
    table.nack(lease, 10)
    clock.now += 10

    ids, _ = table.claim_ids(limit=1)

    assert ids == ["a"]


@pytest.mark.rule("WQ-4")
def test_a_message_whose_lease_has_ended_goes_before_what_came_after_it(
    table: Queue, clock: QueueClock
) -> None:
    table.publish([publication("a", group="g"), publication("b", group="h")])
    table.claim_ids(limit=1)
    clock.now += LEASE

    ids, _ = table.claim_ids(limit=1)

    assert ids == ["a"]


@pytest.mark.rule("WQ-3")
def test_a_lease_that_ends_at_this_instant_cannot_be_extended(
    table: Queue, clock: QueueClock
) -> None:
    table.publish([publication("a"), publication("b")])
    _, (first, second) = table.claim_ids()

    clock.now += LEASE / 2
    assert table.extend([first], LEASE) == []
    clock.now += LEASE / 2
    assert table.extend([first, second], LEASE) == [1]


@pytest.mark.rule("WQ-2")
def test_a_high_priority_message_for_this_worker_alone_goes_before_regular_ones(
    table: Queue,
) -> None:
    table.publish([publication("a", group="g")])
    table.claim_ids()
    table.publish([publication("b", group="h"), publication("c", group="g", high=True)])

    ids, _ = table.claim_ids(limit=1)

    assert ids == ["c"]


@pytest.mark.rule("CMD-6")
def test_of_what_is_for_this_worker_alone_the_highest_priority_goes_first(table: Queue) -> None:
    for group, priority in (("g", 3), ("h", 7), ("i", 5)):
        table.publish([publication(f"high {group}", group=group, high=True)])
        table.publish([publication(f"of {group}", group=group, priority=priority)])
    table.claim_ids(limit=3)

    in_turn = [table.claim_ids(limit=1)[0] for _ in range(3)]

    assert in_turn == [["of h"], ["of i"], ["of g"]]


@pytest.mark.rule("P3")
def test_the_same_group_id_in_another_pool_is_another_group(table: Queue) -> None:
    table.publish([publication("a", pool="P", group="g"), publication("b", pool="Q", group="g")])
    first, _ = table.claim_ids(limit=1)

    second, _ = table.claim_ids()

    assert (first, second) == (["a"], ["b"])


@pytest.mark.rule("POOL-7")
def test_an_immediate_message_has_no_group(table: Queue) -> None:
    message = Message(
        id="b", target="https://svc.example/", group="g", dispatch=Mode.IMMEDIATE.value
    )
    table.publish([publication("a", group="g"), Publication(message, b"b", "b")])

    first, _ = table.claim_ids(limit=1)
    second, _ = table.claim_ids(limit=1)

    assert (first, second) == (["a"], ["b"])


@pytest.mark.rule("WQ-2")
def test_the_depth_tells_whether_anything_could_be_had_now(table: Queue, clock: QueueClock) -> None:
    table.publish([publication("a", group="g"), publication("b", group="g")])
    offered = table.depth()
    _, (first, second) = table.claim_ids()
    held = table.depth()
    table.nack(second, 0)
    table.nack(first, 10)
    delayed = table.depth()
    clock.now += 10
    due = table.depth()

    assert [one.due for one in (offered, held, delayed, due)] == [1, 0, 0, 1]


@pytest.mark.rule("WQ-2")
def test_what_a_lease_or_a_delay_has_just_set_free_counts_to_its_own_queue(
    table: Queue, clock: QueueClock
) -> None:
    other = table.but(queue="bills")
    table.publish([publication("a"), publication("b")])
    _, (first, _) = table.claim_ids()
    table.nack(first, LEASE)

    clock.now += LEASE - 0.1
    before = [table.depth(), other.depth()]
    clock.now += 0.1
    after = [table.depth(), other.depth()]

    assert before == [Depth(1, 1, due=0), Depth(0, 0, due=0)]
    assert after == [Depth(1, 1, due=2), Depth(0, 0, due=0)]


@pytest.mark.rule("WQ-8")
def test_a_row_tells_its_story(db: sqlite3.Connection, table: Queue, clock: QueueClock) -> None:
    table.publish([publication("a")])
    clock.now = 1001.0
    _, (lease,) = table.claim_ids()
    table.nack(lease, 0, Tally(failures=1, requests=3), "HTTP 503")
    clock.now = 1002.0
    _, (lease,) = table.claim_ids()
    clock.now = 1003.0
    table.ack([lease], "x" * 5000)

    (row,) = db.execute(
        "SELECT state, worker_id, lease_version, deliveries, attempts, posts, published_at,"
        " first_claimed_at, last_claimed_at, finished_at FROM queue_messages"
    )
    (last_error,) = db.execute("SELECT last_error FROM queue_messages").fetchone()

    assert row == ("failed", "anna", 2, 2, 1, 3, 1000.0, 1001.0, 1002.0, 1003.0)
    assert last_error == "x" * MAX_ERROR_CHARACTERS


def bodies(db: sqlite3.Connection) -> list[bytes]:
    query = "SELECT coalesce(body, x'') FROM queue_messages LEFT JOIN queue_bodies USING (id)"
    return [body for (body,) in db.execute(f"{query} ORDER BY id")]


@pytest.mark.rule("WQ-1")
def test_an_idle_queue_keeps_no_body_of_a_finished_message(
    db: sqlite3.Connection, table: Queue
) -> None:
    table.publish([publication(name) for name in "abc"])
    _, (first, second, third) = table.claim_ids()
    table.ack([first])
    table.ack([second], "HTTP 400")
    table.nack(third, 10)

    table.claim_ids()

    assert bodies(db) == [b"", b"", b"c"]


@pytest.mark.rule("P4")
def test_a_busy_queue_keeps_no_bodies_of_finished_messages(
    db: sqlite3.Connection, table: Queue
) -> None:
    table.publish([publication(str(number)) for number in range(100)])
    _, leases = table.claim_ids()
    kept = []
    for lease in leases:
        table.ack([lease])
        kept.append(sum(map(bool, bodies(db)[: lease.id])))

    assert max(kept) == 0


@pytest.mark.rule("WQ-1")
def test_a_finished_message_behind_one_that_is_held_is_pruned_with_its_body(
    db: sqlite3.Connection, table: Queue, clock: QueueClock
) -> None:
    table.publish([publication(name, group="g") for name in "ab"])
    _, (first, second) = table.claim_ids()
    table.ack([second])
    table.extend([first], 9 * WINDOW)
    clock.now += WINDOW

    for _ in range(2):
        table.claim_ids()

    assert bodies(db) == [b"a"]


@pytest.mark.rule("WQ-1")
def test_ids_are_never_used_again(table: Queue, clock: QueueClock) -> None:
    table.publish([publication("a")])
    _, leases = table.claim_ids()
    table.ack(leases)
    clock.now += WINDOW
    table.claim_ids()  # prunes it
    table.publish([publication("a")])

    _, (lease,) = table.claim_ids()

    assert lease.id > leases[0].id


def messages_kept(db: sqlite3.Connection) -> int:
    """They themselves, their bodies or their groups: nothing may be left behind."""
    tables = ("queue_entries", "queue_progress", "queue_bodies", "queue_groups")
    counts = [db.execute(f"SELECT count(*) FROM {name}").fetchone() for name in tables]  # noqa: S608
    return max(int(count) for (count,) in counts)


@pytest.mark.rule("WQ-1")
def test_an_idle_queue_is_pruned_in_small_steps(
    db: sqlite3.Connection, table: Queue, clock: QueueClock
) -> None:
    number = 2 * PRUNED_AT_ONCE + 100
    table.publish([publication(str(number), group=str(number)) for number in range(number)])
    _, leases = table.claim_ids(limit=number)
    table.ack(leases)
    clock.now += WINDOW

    kept = [number]
    for _ in range(3):
        table.claim_ids()
        kept.append(messages_kept(db))

    steps = sorted(before - after for before, after in pairwise(kept))
    assert steps == [100, PRUNED_AT_ONCE, PRUNED_AT_ONCE]


@pytest.mark.rule("P4")
def test_what_cannot_be_forgotten_yet_does_not_keep_the_rest(
    db: sqlite3.Connection, table: Queue, clock: QueueClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_table, "PRUNED_AT_ONCE", 1)
    table = table.but(result_retention=9 * WINDOW)
    table.publish([publication("kept", payload=b"1"), publication("held"), publication("old")])
    _, (kept, held, old) = table.claim_ids()
    table.ack([kept, old])
    table.extend([held], 9 * WINDOW)
    clock.now += WINDOW

    for _ in range(3):
        table.claim_ids()

    left = [name for (name,) in db.execute("SELECT message_id FROM queue_entries ORDER BY id")]
    assert left == ["kept", "held"]


@pytest.mark.rule("P4")
def test_a_queue_with_nothing_to_forget_is_looked_through_once_a_second(
    db: sqlite3.Connection, table: Queue, clock: QueueClock
) -> None:
    looks: list[str] = []
    db.set_trace_callback(
        lambda text: looks.append(text) if "FILTER (WHERE finished_at" in text else None
    )

    seen = []
    for _ in range(3):
        table.claim_ids()
        table.claim_ids()
        seen.append(len(looks))
        clock.now += PRUNE_PAUSE_SECONDS / 2

    assert seen == [1, 1, 2]


@pytest.mark.rule("P4")
def test_pruning_keeps_up_with_what_gets_finished(
    db: sqlite3.Connection, table: Queue, clock: QueueClock
) -> None:
    for number in range(3 * PRUNE_EVERY_MESSAGES):
        table.publish([publication(str(number), group=str(number))])
        _, leases = table.claim_ids()
        table.ack(leases)
        clock.now += WINDOW

    assert messages_kept(db) <= PRUNE_EVERY_MESSAGES


@pytest.mark.rule("P3")
def test_a_group_keeps_its_order_when_a_finished_message_in_the_middle_is_pruned(
    db: sqlite3.Connection, table: Queue, clock: QueueClock
) -> None:
    table.publish([publication(name, group="g") for name in "abc"])
    _, (first, second, third) = table.claim_ids()
    table.ack([second])
    table.nack(third, 0)
    table.nack(first, 2 * WINDOW)

    clock.now += WINDOW
    table.claim_ids()  # prunes what it can
    kept = messages_kept(db)
    published_again = table.publish([publication("b")])
    clock.now += WINDOW
    after, leases = table.claim_ids()
    table.ack(leases)
    clock.now += WINDOW
    for _ in range(2):
        table.claim_ids()

    assert (kept, published_again, after) == (2, [True], ["a", "c", "b"])
    assert messages_kept(db) == 0


@pytest.mark.rule("P3")
def test_what_comes_later_in_a_group_stays_behind_although_a_finished_one_was_pruned(
    table: Queue, clock: QueueClock
) -> None:
    table.publish([publication(name, group="g") for name in "ab"])
    table.publish([publication("other", group="h")])
    _, (first, second, other) = table.claim_ids()
    table.ack([first])
    table.nack(second, 2 * WINDOW)
    clock.now += WINDOW
    table.ack([other])
    table.claim_ids()  # prunes the first one

    table.publish([publication("c", group="g")])
    before = table.claim_ids()[0]
    clock.now += WINDOW

    assert (before, table.claim_ids()[0]) == ([], ["b", "c"])


@pytest.mark.rule("P4")
@pytest.mark.parametrize("payload", [b"", b"1"], ids=["plain", "with a payload"])
def test_what_was_finished_first_is_forgotten_first(
    table: Queue, clock: QueueClock, monkeypatch: pytest.MonkeyPatch, payload: bytes
) -> None:
    monkeypatch.setattr(queue_table, "PRUNED_AT_ONCE", 1)
    table = table.but(result_retention=WINDOW)
    table.publish([publication(name, payload=payload) for name in "abc"])
    _, leases = table.claim_ids()
    for lease in leases:
        table.ack([lease])
        clock.now += 1
    clock.now += WINDOW

    left = []
    for _ in leases:
        table.claim_ids()  # prunes
        left.append("".join(name for name in "abc" if table.find(name)))

    assert left == ["bc", "c", ""]


@pytest.mark.rule("P1")
def test_an_ack_that_is_partly_stale_never_removes_what_another_worker_holds(
    db: sqlite3.Connection, table: Queue, clock: QueueClock
) -> None:
    table = table.but(audit=3600.0)
    other = table.but(worker_id="bert")
    table.publish([publication("a"), publication("b")])
    _, (first, second) = table.claim_ids()
    table.extend([first], 2 * LEASE)
    clock.now += LEASE
    _, (taken_over,) = other.claim_ids()
    lost = table.ack([first, second])
    other.extend([taken_over], 3 * WINDOW)
    succeeded = [row for row in story(db) if row[1] == "succeeded"]

    clock.now += WINDOW
    table.claim_ids()  # prunes

    assert succeeded == [("a", "succeeded", 1000.0 + LEASE, "anna", None)]
    assert (lost, messages_kept(db)) == ([1], 1)
    assert other.ack([taken_over]) == []


@pytest.mark.rule("WQ-3")
def test_a_token_is_never_used_again(table: Queue, clock: QueueClock) -> None:
    tokens = set()
    for number in range(20):
        table.publish([publication(str(number))])
        _, (lease,) = table.claim_ids()
        table.ack([lease])
        clock.now += WINDOW
        table.claim_ids()  # forgets all that it may
        tokens.add(lease.token)

    assert len(tokens) == 20


@pytest.mark.rule("WQ-6")
def test_a_claim_tells_when_to_look_again(table: Queue, clock: QueueClock) -> None:
    table.publish([publication("a"), publication("b")])
    _, (first, second) = table.claim_ids()

    held = table.claim(1).wait
    table.nack(first, 10)
    delayed = table.claim(1).wait
    clock.now += 10
    _, (again,) = table.claim_ids()
    table.ack([again, second])
    idle = table.claim(1).wait

    assert (held, delayed, idle) == (LEASE, 10, float("inf"))


@pytest.mark.rule("WQ-4")
def test_leases_end_whichever_queue_of_the_file_is_asked(table: Queue, clock: QueueClock) -> None:
    bills = table.but(queue="bills")
    table.publish([publication("a", group="g"), publication("b")])
    table.claim_ids()
    clock.now += LEASE

    bills.claim_ids()

    assert table.depth() == Depth(waiting=2, in_flight=0, due=2)


@pytest.mark.rule("WQ-2")
def test_delays_end_whichever_queue_of_the_file_is_asked(table: Queue, clock: QueueClock) -> None:
    bills = table.but(queue="bills")
    table.publish([publication("a", group="g"), publication("b")])
    _, leases = table.claim_ids()
    for lease in leases:
        table.nack(lease, 10)
    clock.now += 10

    of_bills, _ = bills.claim_ids()
    ids, _ = table.claim_ids()

    assert (of_bills, ids) == ([], ["a", "b"])


@pytest.mark.rule("WQ-8")
@pytest.mark.parametrize("waits_for", ["its delay", "a lease"])
def test_of_very_many_that_have_waited_the_first_due_are_woken_first(
    table: Queue, clock: QueueClock, monkeypatch: pytest.MonkeyPatch, waits_for: str
) -> None:
    monkeypatch.setattr(queue_table, "WOKEN_AT_ONCE", 1)
    table.publish([publication(name) for name in "abc"])
    for lease, seconds in zip(table.claim_ids()[1], (20, 10, 30), strict=True):
        if waits_for == "its delay":
            table.nack(lease, seconds)
        else:
            table.extend([lease], seconds)
    clock.now += 30

    other = table.but(worker_id="bert")
    assert [other.claim_ids()[0] for _ in "abc"] == [["b"], ["a"], ["c"]]


@pytest.mark.rule("WQ-3")
def test_what_several_claims_took_is_finished_at_once(db: sqlite3.Connection, table: Queue) -> None:
    table = table.but(audit=3600.0)
    table.publish([publication(name, group=name) for name in "abc"])
    leases = [lease for _ in range(3) for lease in table.claim_ids(limit=1)[1]]

    lost = table.ack(leases)

    finished = db.execute("SELECT id FROM queue_audit WHERE state = 'succeeded'").fetchall()
    assert (lost, finished) == ([], [(1,), (2,), (3,)])
    assert table.depth() == Depth(waiting=0, in_flight=0, due=0)


@pytest.mark.rule("WQ-8")
def test_each_change_of_state_is_written_down(
    db: sqlite3.Connection, table: Queue, clock: QueueClock
) -> None:
    audited = table.but(audit=3600.0)
    audited.publish([publication("a"), publication("b")])
    clock.now = 1001.0
    _, (first, _) = audited.claim_ids()
    clock.now = 1002.0
    audited.nack(first, 100, UNTRIED, "HTTP 503")
    clock.now = 1031.0
    _, leases = audited.but(worker_id="bert").claim_ids()
    clock.now = 1032.0
    audited.ack(leases, "HTTP 400")

    assert story(db) == [
        ("a", "ready", 1000.0, "anna", None),
        ("a", "in-flight", 1001.0, "anna", None),
        ("a", "ready", 1002.0, "anna", "HTTP 503"),
        ("b", "ready", 1000.0, "anna", None),
        ("b", "in-flight", 1001.0, "anna", None),
        ("b", "ready", 1031.0, "bert", "the lease ended"),
        ("b", "in-flight", 1031.0, "bert", None),
        ("b", "failed", 1032.0, "anna", "HTTP 400"),
    ]


def changes_kept(db: sqlite3.Connection) -> int:
    (kept,) = db.execute("SELECT count(*) FROM queue_audit").fetchone()
    return int(kept)


@pytest.mark.rule("WQ-8", "P4")
@pytest.mark.parametrize(("audit", "kept"), [(0.0, 0), (WINDOW, 0), (3 * WINDOW, 3)])
def test_the_story_is_pruned_by_its_age(
    db: sqlite3.Connection, table: Queue, clock: QueueClock, audit: float, kept: int
) -> None:
    audited = table.but(audit=audit)
    audited.publish([publication("a")])
    _, leases = audited.claim_ids()
    audited.ack(leases)

    clock.now += WINDOW
    audited.claim_ids()

    assert (messages_kept(db), changes_kept(db)) == (0, kept)


@pytest.mark.rule("WQ-8", "P4")
@pytest.mark.parametrize("at_once", [1, PRUNED_AT_ONCE])
def test_the_oldest_of_the_story_goes_although_it_goes_on(
    db: sqlite3.Connection,
    table: Queue,
    clock: QueueClock,
    monkeypatch: pytest.MonkeyPatch,
    at_once: int,
) -> None:
    monkeypatch.setattr(queue_table, "PRUNED_AT_ONCE", at_once)
    audited = table.but(audit=60.0)
    for name in "abc":
        audited.publish([publication(name, not_before=10_000.0)])
        audited.claim_ids()  # prunes
        clock.now += 30

    assert [name for name, *_ in story(db)] == ["b", "c"]


@pytest.mark.rule("WQ-8", "P5")
def test_a_long_story_is_pruned_in_small_steps(
    db: sqlite3.Connection, table: Queue, clock: QueueClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_table, "PRUNED_AT_ONCE", 1)
    audited = table.but(audit=60.0)
    for name in "abc":
        audited.publish([publication(name, not_before=10_000.0)])
    clock.now += 60

    left = []
    for _ in "abc":
        audited.claim_ids()
        left.append("".join(str(name) for name, *_ in story(db)))

    assert left == ["bc", "c", ""]


DAY = 86_400.0


@pytest.mark.rule("CMD-2", "P4")
def test_what_has_a_payload_a_next_step_or_a_batch_is_kept_longer_but_not_what_has_a_result(
    table: Queue, db: sqlite3.Connection, clock: QueueClock
) -> None:
    table = table.but(result_retention=DAY)
    chain = parse(
        b'{"id":"chain","mediationTarget":"https://t/","then":{"mediationTarget":"https://t/"}}'
    )
    items = [publication("plain"), publication("payload", payload=b"1"), publication("result")]
    table.publish([*items, Publication(chain, b"{}", "chain")])
    table.add_batch("b", None, [publication("member")])
    _, leases = table.claim_ids()
    table.ack([leases[0], leases[1], *leases[3:]])
    table.finish(leases[2], Ending(result=b"2"))
    table.ack(table.claim_ids()[1])  # the callback

    kept = []
    for seconds in (WINDOW - 1, 1, DAY - WINDOW - 1, 1):
        clock.now += seconds
        table.claim_ids()  # prunes
        names = db.execute("SELECT message_id FROM queue_messages ORDER BY id").fetchall()
        kept.append([name for (name,) in names])

    others = ["payload", "chain", "member", "done"]
    assert kept == [["plain", "payload", "result", *others[1:]], others, others, []]


@pytest.mark.rule("CMD-2", "WQ-5")
@pytest.mark.parametrize(
    ("ending", "requests"),
    [(Ending(), 3), (Ending(result=b"1"), 3), (Ending(Failure("E", "no")), 2)],
    ids=["accepted", "with a result", "given up"],
)
def test_an_ack_that_does_not_tell_stands_for_one_request_if_it_was_accepted(
    table: Queue, ending: Ending, requests: int
) -> None:
    table.publish([publication("a")])
    _, (lease,) = table.claim_ids()
    table.nack(lease, 0, Tally(failures=1, requests=2))
    _, (lease,) = table.claim_ids()

    table.finish(lease, ending)

    found = table.find("a")
    assert found is not None
    assert (found.failures, found.requests) == (1, requests)


@pytest.mark.rule("CMD-2")
def test_the_last_error_stays_until_there_is_another(table: Queue) -> None:
    table.publish([publication("a")])

    seen = []
    for error in ("first", "", "second"):
        _, (lease,) = table.claim_ids()
        table.nack(lease, 0, error=error)
        found = table.find("a")
        seen.append(found and found.last_failure and found.last_failure.message)

    assert seen == ["first", "first", "second"]


@pytest.mark.rule("CMD-2")
def test_the_window_counts_if_results_are_kept_for_less(table: Queue, clock: QueueClock) -> None:
    table = table.but(result_retention=1.0)
    table.publish([publication("a", payload=b"1")])
    table.ack(table.claim_ids()[1])
    clock.now += WINDOW - 1
    table.claim_ids()

    assert table.publish([publication("a", payload=b"1")]) == [False]
    assert table.find("a") is not None


@pytest.mark.rule("CMD-4", "P4")
def test_a_batch_is_kept_for_seven_days_and_so_are_the_names_of_its_members(
    table: Queue, db: sqlite3.Connection, clock: QueueClock
) -> None:
    members = [publication(f"m{number}") for number in range(2 * PRUNED_AT_ONCE + 1)]
    table.add_batch("b", None, members)
    while leases := table.claim_ids(limit=1000)[1]:
        table.ack(leases)

    clock.now += 7 * DAY - 1
    for _ in range(9):
        table.claim_ids()
    again = table.add_batch("b", None, members)
    before = table.find_batch("b")
    clock.now += 1
    for _ in range(3):
        table.claim_ids()

    (left,) = db.execute("SELECT count(*) FROM queue_batch_members").fetchone()
    assert messages_kept(db) == 0
    assert (again, left, table.find_batch("b")) == (0, 0, None)
    assert before is not None
    assert before.succeeded == len(members)


@pytest.mark.rule("CMD-4", "P4")
def test_every_batch_is_forgotten_in_its_turn(
    table: Queue, db: sqlite3.Connection, clock: QueueClock
) -> None:
    for name in "abc":
        table.add_batch(name, None, [publication(f"of {name}")])
        table.ack(table.claim_ids()[1])
        clock.now += 1
    table.ack(table.claim_ids()[1])  # the callbacks
    clock.now += 7 * DAY

    left = []
    for _ in range(3):
        table.claim_ids()  # prunes
        left.append("".join(name for name in "abc" if table.find_batch(name)))

    assert left == ["bc", "c", ""]
    assert db.execute("SELECT count(*) FROM queue_batch_members").fetchone() == (0,)


@pytest.mark.rule("CMD-4", "P4")
def test_the_end_of_a_member_costs_the_same_however_large_the_batch_is(
    clock: QueueClock, runner: asyncio.Runner
) -> None:
    costs = []
    for size in (100, 5000):
        with closing(MemoryDatabase()) as memory:
            table = Queue.of(memory, clock, runner)
            table.add_batch("b", None, [publication(f"m{number}") for number in range(size)])
            _, leases = table.claim_ids(limit=10)
            with counted_steps(table.db) as steps:
                table.ack(leases)
            costs += steps

    assert costs[1] <= costs[0] * 1.2


@pytest.mark.rule("CMD-4")
def test_an_error_while_a_batch_completes_undoes_the_ack_too(
    table: Queue, db: sqlite3.Connection
) -> None:
    table.add_batch("b", None, [publication("a")])
    _, leases = table.claim_ids()
    trigger = "CREATE TRIGGER power_cut BEFORE INSERT ON queue_bodies"
    db.execute(f"{trigger} BEGIN SELECT raise(ABORT, 'no power'); END")

    with pytest.raises(sqlite3.IntegrityError):
        table.ack(leases)
    db.execute("DROP TRIGGER power_cut")
    after = table.find_batch("b")
    table.ack(leases)

    assert after is not None
    assert (after.succeeded, after.callback_published_at) == (0, None)
    assert len(table.claim_ids()[0]) == 1


@pytest.mark.rule("CFG-7", "WQ-12")
@pytest.mark.parametrize(
    ("version", "what_to_do"),
    [(OLDEST_VERSION - 1, "remove the file"), (SCHEMA_VERSION + 1, "Use the newer router")],
)
def test_a_database_of_another_version_is_refused_with_what_to_do(
    db: sqlite3.Connection, version: int, what_to_do: str
) -> None:
    db.execute(f"PRAGMA user_version = {version}")

    with pytest.raises(QueueRefused, match=f"version {version}.*{what_to_do}"):
        prepare_schema(db, THIS_MACHINE)


@pytest.mark.rule("CFG-7")
def test_a_database_of_something_else_is_refused() -> None:
    with closing(sqlite3.connect(":memory:")) as db:
        db.execute("CREATE TABLE accounts (name)")

        with pytest.raises(QueueRefused, match="something else"):
            prepare_schema(db, THIS_MACHINE)


# Names within a statement that stand for a few rows, not for a table.
FEW = {
    "CONSTANT",
    "sqlite_sequence",
    "head",
    "last_head",
    "tier",
    "taken",
    "winner",
    "changed",
    "decision",
    "queue_file",
    "ended",
    "reader",
    "stocked",
    "wanted",
    "looked_at",  # of a page: at most as many as it asks for
    "fitting",
}
ONCE_PER_BOOT = {"cut_waits", "cut_audit", "cut_batches"}
SELDOM = {"result_bytes"}  # and in a thread, for a hundredth of the time at most


@pytest.mark.rule("P4")
@pytest.mark.parametrize("name", sorted(QUERIES.keys() - ONCE_PER_BOOT - SELDOM))
def test_no_statement_reads_through_the_whole_table(db: sqlite3.Connection, name: str) -> None:
    statement = QUERIES[name]
    arguments = dict.fromkeys(re.findall(r":([a-z_]+)", statement), "[]")

    plan = [step for *_, step in db.execute(f"EXPLAIN QUERY PLAN {statement}", arguments)]

    scanned = {step.split()[1] for step in plan if step.startswith("SCAN") and "INDEX" not in step}
    few = FEW | ({"queue_changes"} if name == "prune_audit" else set())  # a limited number of rows
    assert {table for table in scanned if not table.startswith("(")} <= few


@contextmanager
def counted_steps(db: sqlite3.Connection) -> Iterator[list[int]]:
    """The steps of SQLite's machine, which are the same on every computer."""
    steps = [0]

    def count() -> int:
        steps[0] += 1
        return 0

    db.set_progress_handler(count, 1)
    yield steps
    db.set_progress_handler(None, 0)


def steps_of_a_claim(table: Queue) -> int:
    with counted_steps(table.db) as steps:
        table.claim_ids(limit=10)
    return steps[0]


@pytest.mark.rule("ORD-7", "P4")
def test_an_order_store_is_measured_as_quickly_however_much_it_has(
    memory: MemoryDatabase, clock: QueueClock, runner: asyncio.Runner
) -> None:
    table = QueueTable("order:q", "anna", WINDOW, clock, clock)
    order_log = SqliteOrderLog(memory, table)
    steps, sizes = [], []
    for count in (10, 2000):
        items = [
            StoredMessage(publication(f"{count}-{n}", key=f"{count}-{n}"), "g")
            for n in range(count)
        ]
        runner.run(order_log.append(items))
        with counted_steps(memory.db) as counted:
            sizes.append(runner.run(order_log.size()).messages)
        steps.append(counted[0])

    assert sizes == [10, 2010]
    assert steps[1] <= steps[0]  # a first call may prepare something


BACKLOGS: dict[str, Callable[[int], Publication]] = {
    "ungrouped": lambda number: publication(f"m{number}"),
    "one group": lambda number: publication(f"m{number}", group="g"),
    "many groups": lambda number: publication(f"m{number}", group=f"g{number // 10}"),
}


@pytest.mark.rule("P4")
@pytest.mark.parametrize("shape", BACKLOGS)
def test_a_claim_costs_the_same_whatever_waits_behind_it(
    clock: QueueClock, runner: asyncio.Runner, shape: str
) -> None:
    costs = []
    for size in (100, 5000):
        with closing(MemoryDatabase()) as memory:
            table = Queue.of(memory, clock, runner)
            table.publish([BACKLOGS[shape](number) for number in range(size)])
            costs.append(steps_of_a_claim(table))

    assert costs[1] <= costs[0] * 1.2


FULL = PoolFilter(frozenset({"FULL"}), excludes=True)


@pytest.mark.rule("ROUTE-5", "P4", "P5")
@pytest.mark.parametrize("pools", [FULL, PoolFilter(frozenset({"OPEN"}))], ids=["but", "only"])
@pytest.mark.parametrize("grouped", [False, True], ids=["ungrouped", "grouped"])
def test_a_claim_costs_the_same_whatever_waits_in_front_for_a_full_pool(
    clock: QueueClock, runner: asyncio.Runner, pools: PoolFilter, *, grouped: bool
) -> None:
    costs = []
    for size in (100, 5000):
        with closing(MemoryDatabase()) as memory:
            table = Queue.of(memory, clock, runner)
            codes = ["FULL"] * size + ["OPEN"] * 10
            table.publish(
                [
                    publication(f"m{number}", pool=code, group=f"g{number}" if grouped else None)
                    for number, code in enumerate(codes)
                ]
            )
            table.select(pools)
            costs.append(steps_of_a_claim(table))

    assert costs[1] <= costs[0] * 1.05


@pytest.mark.rule("ROUTE-5", "P5")
def test_a_claim_costs_the_same_more_for_each_pool_that_is_full(
    clock: QueueClock, runner: asyncio.Runner
) -> None:
    costs = []
    for size in (0, 500, 1000):
        with closing(MemoryDatabase()) as memory:
            table = Queue.of(memory, clock, runner)
            full = [f"FULL-{number}" for number in range(size)]
            codes = [*full, *full, *["OPEN"] * 10]
            table.publish([publication(f"m{n}", pool=code) for n, code in enumerate(codes)])
            table.select(PoolFilter(frozenset(full), excludes=True))
            costs.append(steps_of_a_claim(table))

    first, second = (later - sooner for sooner, later in pairwise(costs))
    assert second <= first * 1.05
    assert second / 500 < 60  # about 1 µs


@pytest.mark.rule("ROUTE-5", "WQ-2")
@pytest.mark.parametrize("limit", [1, 5, 100])
def test_of_many_pools_those_that_are_selected_are_merged_in_claim_order(
    table: Queue, limit: int
) -> None:
    codes = [f"P{number % 7}" for number in range(60)]
    priorities = [number * number % 10 for number in range(60)]
    table.publish(
        [
            publication(f"m{n}", pool=code, priority=priorities[n], group="g" if n % 3 else None)
            for n, code in enumerate(codes)
        ]
    )
    named = {"P1", "P4", "P5"}
    all_in_order, _ = table.claim_ids()
    table.end_leases(["anna"])

    found = {}
    for pools in (PoolFilter(frozenset(named)), PoolFilter(frozenset(named), excludes=True)):
        table.select(pools)
        found[pools.excludes], _ = table.claim_ids(limit)

    assert found == {
        excludes: [m for m in all_in_order if (codes[int(m[1:])] in named) != excludes][:limit]
        for excludes in (False, True)
    }


@pytest.mark.rule("ROUTE-5")
def test_what_an_older_router_publishes_to_the_file_is_found_by_its_pool(
    table: Queue, db: sqlite3.Connection
) -> None:
    table.publish([publication("a", pool="FULL"), publication("b", pool="OPEN", group="g")])
    db.execute("UPDATE queue_progress SET pool_code = NULL")

    table.select(FULL)
    open_ones, _ = table.claim_ids()
    table.select(PoolFilter(frozenset({"FULL"})))
    full_ones, _ = table.claim_ids()

    assert (open_ones, full_ones) == (["b"], ["a"])


@pytest.mark.rule("ROUTE-5", "P5")
def test_what_an_older_router_has_published_is_looked_up_in_small_steps(
    table: Queue, db: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_table, "ADOPTED_AT_ONCE", 2)
    table.publish([publication(name, pool="OPEN") for name in "abc"])
    db.execute("UPDATE queue_progress SET pool_code = NULL")

    table.select(FULL)
    claimed = [table.claim_ids()[0] for _ in range(2)]

    assert claimed == [["a", "b"], ["c"]]


@pytest.mark.rule("P4")
@pytest.mark.parametrize("shape", BACKLOGS)
def test_an_ack_costs_the_same_whatever_waits_behind_it(
    clock: QueueClock, runner: asyncio.Runner, shape: str
) -> None:
    costs = []
    for size in (100, 5000):
        with closing(MemoryDatabase()) as memory:
            table = Queue.of(memory, clock, runner)
            table.publish([BACKLOGS[shape](number) for number in range(size)])
            _, leases = table.claim_ids(limit=10)
            with counted_steps(table.db) as steps:
                table.ack(leases)
            costs += steps

    assert costs[1] <= costs[0] * 1.2


@pytest.mark.rule("P4", "P5")
@pytest.mark.parametrize("blocked_by", ["a lease", "a delay", "another worker"])
def test_a_claim_costs_the_same_whatever_is_blocked_in_front_of_it(
    clock: QueueClock, runner: asyncio.Runner, blocked_by: str
) -> None:
    costs = []
    for size in (10, 1000):
        with closing(MemoryDatabase()) as memory:
            table = Queue.of(memory, clock, runner)
            block(table, size, blocked_by)
            table.publish([publication(f"free{number}") for number in range(10)])
            costs.append(steps_of_a_claim(table))

    assert costs[1] <= costs[0] * 1.2


def block(table: Queue, size: int, how: str) -> None:
    """Groups of ten that nobody may have now, or not this worker."""
    other = table.but(worker_id="bert")
    groups = [f"g{number}" for number in range(size)]
    table.publish([publication(f"first-{group}", group=group) for group in groups])
    _, leases = (other if how == "another worker" else table).claim_ids(limit=size)
    table.publish(
        [
            publication(f"{group}-{number}", group=group, high=how == "another worker")
            for group in groups
            for number in range(10)
        ],
    )
    if how == "a delay":
        for lease in leases:
            table.nack(lease, 60)
