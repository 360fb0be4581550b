"""The work queue's table against a model that says the rules of WQ-2 in plain words."""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import groupby, takewhile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from router.brokers.queue_schema import QUERIES, prepare
from router.brokers.queue_story import TIDIED_AT_ONCE
from router.brokers.queue_table import QueueTable
from router.brokers.work_queue import MAX_ERROR, Lease
from router.core.message import UNTRIED, Message, Mode, Tally
from router.ports import Depth, Publication, QueueRefused

pytestmark = pytest.mark.rule("WQ-1", "WQ-2", "WQ-3", "WQ-4", "P3")

WINDOW = 300.0
LEASE = 30.0


def publication(
    message_id: str,
    *,
    pool: str | None = None,
    group: str | None = None,
    high: bool = False,
    body: str | None = None,
    key: str | None = None,
) -> Publication:
    message = Message(
        id=message_id, target="https://svc.example/", pool=pool, group=group, high_priority=high
    )
    return Publication(message, (body or message_id).encode(), key)


@dataclass
class Row:
    id: int
    message_id: str
    body: bytes
    group: tuple[str, str] | None
    high: bool
    state: str = "ready"
    due: float = 0.0
    lease: Lease | None = None
    lease_until: float = 0.0
    worker: str = ""
    deliveries: int = 0
    tally: Tally = UNTRIED
    finished: float = 0.0

    @property
    def unsettled(self) -> bool:
        return self.state in {"ready", "in-flight"}

    @property
    def lane(self) -> tuple[object, ...]:
        return (str(self.group), self.high) if self.group else ("", False, self.id)


@dataclass
class Model:
    """SPEC WQ-1 to WQ-4, slowly."""

    rows: list[Row] = field(default_factory=list)
    now: float = 0.0

    def publish(self, item: Publication) -> bool:
        message = item.message
        if any(
            (row.message_id, row.body) == (message.id, item.body) and self._keeps_out_copies(row)
            for row in self.rows
        ):
            return False
        group = (message.pool or "DEFAULT-POOL", message.group) if message.group else None
        self.rows.append(Row(0, message.id, item.body, group, bool(message.high_priority)))
        return True

    def claimable(self, worker: str, limit: int) -> list[Row]:
        self._end_leases()
        runs = [row for lane in self._lanes() for row in self._run_of(lane, worker)]
        return sorted(runs, key=lambda row: (not row.high, row.id))[:limit]

    def holder_of(self, lease: Lease) -> Row | None:
        return next((row for row in self.rows if row.lease == lease and row.unsettled), None)

    def has_finished(self, lease: Lease) -> bool:
        return any(row.lease == lease and not row.unsettled for row in self.rows)

    def may_have_forgotten(self, lease: Lease) -> bool:
        """Whether the message is finished and pruned, or would be by the next traffic."""
        horizon = self.now - WINDOW
        return any(
            row.lease == lease and not row.unsettled and row.finished <= horizon
            for row in self.rows
        )

    def depth(self) -> Depth:
        out = sum(row.state == "in-flight" for row in self.rows)
        return Depth(sum(row.state == "ready" for row in self.rows), out)

    def _keeps_out_copies(self, row: Row) -> bool:
        has_just_succeeded = row.state == "succeeded" and row.finished > self.now - WINDOW
        return row.unsettled or has_just_succeeded

    def _end_leases(self) -> None:
        for row in self.rows:
            if row.state == "in-flight" and row.lease_until <= self.now:
                row.state, row.lease = "ready", None

    def _lanes(self) -> Iterator[list[Row]]:
        unsettled = sorted(
            (row for row in self.rows if row.unsettled), key=lambda row: (row.lane, row.id)
        )
        for _, lane in groupby(unsettled, key=lambda row: row.lane):
            yield list(lane)

    def _run_of(self, lane: list[Row], worker: str) -> list[Row]:
        if any(row.state == "in-flight" for row in lane):
            return []
        holders = {
            row.worker
            for row in self.rows
            if row.state == "in-flight" and row.group and row.group == lane[0].group
        }
        if holders - {worker}:
            return []
        return list(takewhile(lambda row: row.due <= self.now, lane))


# Bodies, each of the message with its name; with a stroke it is another body under the same id.
PUBLISHED = st.lists(
    st.builds("m{}{}".format, st.integers(0, 40), st.sampled_from(["", "", "'"])),
    min_size=1,
    max_size=4,
)


class QueueComparison(RuleBasedStateMachine):
    """Two workers on one queue do as they please; table and model agree on everything."""

    def __init__(self) -> None:
        super().__init__()
        self.db = database()
        self.model = Model()
        self.tables = {
            worker: QueueTable("orders", worker, WINDOW, lambda: self.model.now)
            for worker in ("anna", "bert")
        }
        self.leases: list[Lease] = []

    def teardown(self) -> None:
        self.db.close()

    @rule(
        bodies=PUBLISHED,
        pool=st.sampled_from([None, None, "P"]),
        group=st.sampled_from(["g", "g", "h", None]),
        high=st.booleans(),
    )
    def publish(self, bodies: list[str], pool: str | None, group: str | None, high: bool) -> None:
        items = [
            publication(body.rstrip("'"), pool=pool, group=group, high=high, body=body)
            for body in bodies
        ]
        expected = [self.model.publish(item) for item in items]

        added = self.tables["anna"].publish(self.db, items)

        assert list(added) == expected
        self._learn_ids()

    @rule(worker=st.sampled_from(["anna", "bert"]), limit=st.sampled_from([1, 1, 2, 5]))
    def claim(self, worker: str, limit: int) -> None:
        expected = self.model.claimable(worker, limit)

        claim = self.tables[worker].claim(self.db, limit, LEASE)

        for row, claimed in zip(expected, claim.messages, strict=True):
            row.state, row.worker, row.deliveries = "in-flight", worker, row.deliveries + 1
            row.lease, row.lease_until = claimed.lease, self.model.now + LEASE
            self.leases.append(claimed.lease)
        assert [(one.lease.id, one.count, one.tally) for one in claim.messages] == [
            (row.id, row.deliveries, row.tally) for row in expected
        ]

    @precondition(lambda self: self.leases)
    @rule(
        picks=st.lists(st.integers(0, 99), min_size=1, max_size=4), error=st.sampled_from(["", "x"])
    )
    def ack(self, picks: list[int], error: str) -> None:
        picked = dict.fromkeys(self._pick(pick) for pick in picks)
        leases = [lease for lease in picked if not self.model.may_have_forgotten(lease)]
        lost = []
        for position, lease in enumerate(leases):
            if row := self.model.holder_of(lease):
                row.state, row.finished = ("failed" if error else "succeeded"), self.model.now
            elif not self.model.has_finished(lease):
                lost.append(position)

        assert list(self.tables["anna"].finish(self.db, leases, error)) == lost

    @precondition(lambda self: self.leases)
    @rule(pick=st.integers(0, 99), delay=st.sampled_from([0.0, 5.0, 60.0]), posts=st.integers(1, 3))
    def nack(self, pick: int, delay: float, posts: int) -> None:
        lease = self._pick(pick)
        tally = Tally(attempts=1, posts=posts)
        row = self.model.holder_of(lease)
        if row:
            row.state, row.lease, row.tally = "ready", None, tally
            row.due = self.model.now + delay

        ours = self.tables["bert"].give_back(self.db, lease, delay, tally, "")

        assert ours == (row is not None)

    @precondition(lambda self: self.leases)
    @rule(pick=st.integers(0, 99), seconds=st.sampled_from([10.0, 90.0]))
    def extend(self, pick: int, seconds: float) -> None:
        lease = self._pick(pick)
        row = self.model.holder_of(lease)
        alive = row is not None and row.state == "in-flight" and row.lease_until > self.model.now
        if row and alive:
            row.lease_until = self.model.now + seconds

        lost = self.tables["anna"].extend(self.db, [lease], seconds)

        assert list(lost) == ([] if alive else [0])

    @rule(worker=st.sampled_from(["anna", "bert"]))
    def let_go(self, worker: str) -> None:
        for row in self.model.rows:
            if row.state == "in-flight" and row.worker == worker:
                row.state, row.lease = "ready", None

        self.tables[worker].let_go(self.db)

    @rule(seconds=st.sampled_from([1.0, 1.0, 5.0, 29.0, 30.0, 400.0]))
    def time_passes(self, seconds: float) -> None:
        self.model.now += seconds

    def _pick(self, number: int) -> Lease:
        return self.leases[number % len(self.leases)]

    def _learn_ids(self) -> None:
        """A refused duplicate uses up an id, so the model asks for them."""
        ids = dict(self.db.execute("SELECT body, id FROM queue_messages ORDER BY id"))
        for row in self.model.rows:
            row.id = row.id or ids[row.body]

    @invariant()
    def the_depth_agrees(self) -> None:
        depth = self.tables["anna"].depth(self.db)

        assert replace(depth, due=None) == self.model.depth()


def database() -> sqlite3.Connection:
    db = sqlite3.connect(":memory:", isolation_level=None)
    prepare(db)
    return db


@pytest.fixture
def db() -> Iterator[sqlite3.Connection]:
    with closing(database()) as db:
        yield db


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def table(clock: Clock) -> QueueTable:
    return QueueTable("orders", "anna", WINDOW, clock)


def claim_ids(
    db: sqlite3.Connection, table: QueueTable, limit: int = 100
) -> tuple[list[str], list[Lease]]:
    """The message ids and the leases of a claim."""
    claim = table.claim(db, limit, LEASE)
    return [one.body.decode() for one in claim.messages], [one.lease for one in claim.messages]


@pytest.mark.rule("WQ-1", "ID-3")
def test_another_body_under_the_same_id_is_another_message(
    db: sqlite3.Connection, table: QueueTable
) -> None:
    items = [publication("a", body=body) for body in ("to one", "to another", "to one")]

    at_once = table.publish(db, items)
    later = table.publish(db, [publication("a", body="to a third"), items[0]])

    assert (at_once, later) == ([True, True, False], [True, False])
    assert claim_ids(db, table)[0] == ["to one", "to another", "to a third"]


@pytest.mark.rule("WQ-1")
def test_an_explicit_key_is_taken_at_its_word(db: sqlite3.Connection, table: QueueTable) -> None:
    items = [publication("a", key="k"), publication("b", key="k"), publication("k")]

    added = table.publish(db, items)
    later = table.publish(db, [publication("c", key="k"), publication("a")])

    assert (added, later) == ([True, False, True], [False, True])


@pytest.mark.rule("WQ-1")
@pytest.mark.parametrize("key", [None, "k"])
@pytest.mark.parametrize(("error", "may_come_again"), [("", False), ("HTTP 404", True)])
def test_what_has_died_may_be_published_again_at_once(
    db: sqlite3.Connection, table: QueueTable, key: str | None, error: str, may_come_again: bool
) -> None:
    table.publish(db, [publication("a", key=key)])
    _, leases = claim_ids(db, table)
    table.finish(db, leases, error)

    again = table.publish(db, [publication("a", key=key)])

    assert again == [may_come_again]
    assert claim_ids(db, table)[0] == ["a"] * may_come_again


@pytest.mark.rule("WQ-10")
def test_what_a_dead_worker_held_is_given_back_in_every_queue_and_in_order(
    db: sqlite3.Connection, table: QueueTable
) -> None:
    other = replace(table, worker_id="bert", audit=3600.0)
    bills = replace(table, name="bills")
    table.publish(db, [publication(f"g{number}", group="g") for number in range(4)])
    bills.publish(db, [publication("bill")])
    other.publish(db, [publication("mine")])
    claim_ids(db, table, limit=2)
    claim_ids(db, bills)
    claim_ids(db, other)

    other.bury(db, ["anna"])

    assert claim_ids(db, other)[0] == ["g0", "g1", "g2", "g3"]
    assert claim_ids(db, replace(bills, worker_id="bert"))[0] == ["bill"]
    assert ("g0", "ready", 1000.0, "bert", "the worker died") in story(db)


TestQueueComparison = QueueComparison.TestCase
TestQueueComparison.settings = settings(
    max_examples=120, stateful_step_count=30, deadline=None, derandomize=True
)


def test_high_priority_goes_first_then_the_order_of_publication(
    db: sqlite3.Connection, table: QueueTable
) -> None:
    table.publish(db, [publication("a", group="g"), publication("b"), publication("c", group="h")])
    table.publish(db, [publication("d", group="g", high=True), publication("e", group="g")])

    ids, _ = claim_ids(db, table)

    assert ids == ["d", "a", "b", "c", "e"]


def test_all_of_high_priority_goes_before_the_first_regular_one(
    db: sqlite3.Connection, table: QueueTable
) -> None:
    table.publish(db, [publication("a", group="g")])
    table.publish(db, [publication(name, group="h", high=True) for name in "bc"])

    ids, _ = claim_ids(db, table, limit=2)

    assert ids == ["b", "c"]


def test_a_run_of_a_lane_ends_at_a_message_that_must_wait(
    db: sqlite3.Connection, table: QueueTable, clock: Clock
) -> None:
    table.publish(db, [publication(name, group="g") for name in "abc"])
    _, (first, second, third) = claim_ids(db, table)
    table.give_back(db, second, 10, UNTRIED, "")
    table.give_back(db, third, 0, UNTRIED, "")
    table.give_back(db, first, 0, UNTRIED, "")

    before, leases = claim_ids(db, table)
    clock.now += 10
    still_held, _ = claim_ids(db, table)
    table.finish(db, leases, "")
    after, _ = claim_ids(db, table)

    assert (before, still_held, after) == (["a"], [], ["b", "c"])


def test_a_high_priority_message_reaches_only_the_worker_that_holds_its_group(
    db: sqlite3.Connection, table: QueueTable
) -> None:
    other = replace(table, worker_id="bert")
    table.publish(db, [publication("a", group="g")])
    claim_ids(db, table)
    table.publish(db, [publication("b", group="g", high=True), publication("c", group="h")])

    others, _ = claim_ids(db, other)
    ours, _ = claim_ids(db, table)

    assert (others, ours) == (["c"], ["b"])


def test_the_next_of_a_group_is_for_the_worker_that_still_holds_its_high_priority_message(
    db: sqlite3.Connection, table: QueueTable
) -> None:
    other = replace(table, worker_id="bert")
    table.publish(db, [publication("a", group="g"), publication("b", group="g")])
    _, leases = claim_ids(db, table, limit=1)
    table.publish(db, [publication("c", group="g", high=True)])
    claim_ids(db, table)
    table.finish(db, leases, "")

    others, _ = claim_ids(db, other)
    ours, _ = claim_ids(db, table)

    assert (others, ours) == ([], ["b"])


def test_the_rest_of_a_group_is_for_the_worker_that_took_its_high_priority_message(
    db: sqlite3.Connection, table: QueueTable
) -> None:
    other = replace(table, worker_id="bert")
    table.publish(db, [publication("a", group="g"), publication("b", group="g", high=True)])
    claim_ids(db, table, limit=1)

    others, _ = claim_ids(db, other)
    ours, _ = claim_ids(db, table)

    assert (others, ours) == ([], ["a"])


def test_what_was_kept_for_a_worker_is_handed_out_once(
    db: sqlite3.Connection, table: QueueTable
) -> None:
    table.publish(db, [publication("a", group="g"), publication("b", group="g", high=True)])
    claim_ids(db, table, limit=1)

    kept, _ = claim_ids(db, table)
    again, _ = claim_ids(db, table)

    assert (kept, again) == (["a"], [])


@pytest.mark.rule("P5")
def test_what_has_waited_for_its_delay_goes_before_what_came_after_it(
    db: sqlite3.Connection, table: QueueTable, clock: Clock
) -> None:
    table.publish(db, [publication("a", group="g"), publication("b", group="h")])
    _, (lease,) = claim_ids(db, table, limit=1)
    table.give_back(db, lease, 10, UNTRIED, "")
    clock.now += 10

    ids, _ = claim_ids(db, table, limit=1)

    assert ids == ["a"]


def test_a_message_whose_lease_has_ended_goes_before_what_came_after_it(
    db: sqlite3.Connection, table: QueueTable, clock: Clock
) -> None:
    table.publish(db, [publication("a", group="g"), publication("b", group="h")])
    claim_ids(db, table, limit=1)
    clock.now += LEASE

    ids, _ = claim_ids(db, table, limit=1)

    assert ids == ["a"]


def test_a_high_priority_message_for_this_worker_alone_goes_before_regular_ones(
    db: sqlite3.Connection, table: QueueTable
) -> None:
    table.publish(db, [publication("a", group="g")])
    claim_ids(db, table)
    table.publish(db, [publication("b", group="h"), publication("c", group="g", high=True)])

    ids, _ = claim_ids(db, table, limit=1)

    assert ids == ["c"]


def test_the_same_group_id_in_another_pool_is_another_group(
    db: sqlite3.Connection, table: QueueTable
) -> None:
    table.publish(
        db, [publication("a", pool="P", group="g"), publication("b", pool="Q", group="g")]
    )
    first, _ = claim_ids(db, table, limit=1)

    second, _ = claim_ids(db, table)

    assert (first, second) == (["a"], ["b"])


@pytest.mark.rule("POOL-7")
def test_an_immediate_message_has_no_group(db: sqlite3.Connection, table: QueueTable) -> None:
    message = Message(
        id="b", target="https://svc.example/", group="g", dispatch=Mode.IMMEDIATE.value
    )
    table.publish(db, [publication("a", group="g"), Publication(message, b"b", "b")])

    first, _ = claim_ids(db, table, limit=1)
    second, _ = claim_ids(db, table, limit=1)

    assert (first, second) == (["a"], ["b"])


def test_the_depth_tells_whether_anything_could_be_had_now(
    db: sqlite3.Connection, table: QueueTable, clock: Clock
) -> None:
    table.publish(db, [publication("a", group="g"), publication("b", group="g")])
    offered = table.depth(db)
    _, (first, second) = claim_ids(db, table)
    held = table.depth(db)
    table.give_back(db, second, 0, UNTRIED, "")
    table.give_back(db, first, 10, UNTRIED, "")
    delayed = table.depth(db)
    clock.now += 10
    due = table.depth(db)

    assert [one.due for one in (offered, held, delayed, due)] == [1, 0, 0, 1]


def test_a_row_tells_its_story(db: sqlite3.Connection, table: QueueTable, clock: Clock) -> None:
    table.publish(db, [publication("a")])
    clock.now = 1001.0
    _, (lease,) = claim_ids(db, table)
    table.give_back(db, lease, 0, Tally(attempts=1, posts=3), "HTTP 503")
    clock.now = 1002.0
    _, (lease,) = claim_ids(db, table)
    clock.now = 1003.0
    table.finish(db, [lease], "x" * 5000)

    (row,) = db.execute(
        "SELECT state, worker_id, lease_version, deliveries, attempts, posts, published_at,"
        " first_claimed_at, last_claimed_at, finished_at FROM queue_messages"
    )
    (last_error,) = db.execute("SELECT last_error FROM queue_messages").fetchone()

    assert row == ("failed", "anna", 2, 2, 1, 3, 1000.0, 1001.0, 1002.0, 1003.0)
    assert last_error == "x" * MAX_ERROR


def bodies(db: sqlite3.Connection) -> list[bytes]:
    return [body for (body,) in db.execute("SELECT body FROM queue_messages ORDER BY id")]


def test_an_idle_queue_keeps_no_body_of_a_finished_message(
    db: sqlite3.Connection, table: QueueTable
) -> None:
    table.publish(db, [publication(name) for name in "abc"])
    _, (first, second, third) = claim_ids(db, table)
    table.finish(db, [first], "")
    table.finish(db, [second], "HTTP 400")
    table.give_back(db, third, 10, UNTRIED, "")

    claim_ids(db, table)

    assert bodies(db) == [b"", b"", b"c"]


@pytest.mark.rule("P4")
def test_a_busy_queue_keeps_few_bodies_of_finished_messages(
    db: sqlite3.Connection, table: QueueTable
) -> None:
    table.publish(db, [publication(str(number)) for number in range(100)])
    _, leases = claim_ids(db, table)
    kept = []
    for lease in leases:
        table.finish(db, [lease], "")
        kept.append(sum(map(bool, bodies(db)[: lease.id])))

    assert max(kept) < TIDIED_AT_ONCE


def test_a_finished_message_that_must_stay_beyond_its_time_has_no_body(
    db: sqlite3.Connection, table: QueueTable, clock: Clock
) -> None:
    table.publish(db, [publication(name, group="g") for name in "ab"])
    _, (first, second) = claim_ids(db, table)
    table.finish(db, [second], "")
    table.extend(db, [first], 9 * WINDOW)
    clock.now += WINDOW

    for _ in range(2):
        claim_ids(db, table)

    assert bodies(db) == [b"a", b""]


def test_ids_are_never_used_again(db: sqlite3.Connection, table: QueueTable, clock: Clock) -> None:
    table.publish(db, [publication("a")])
    _, leases = claim_ids(db, table)
    table.finish(db, leases, "")
    clock.now += WINDOW
    claim_ids(db, table)  # prunes it
    table.publish(db, [publication("a")])

    _, (lease,) = claim_ids(db, table)

    assert lease.id > leases[0].id


def messages_kept(db: sqlite3.Connection) -> int:
    """They themselves, or what became of them: neither may be left behind."""
    (entries,) = db.execute("SELECT count(*) FROM queue_entries").fetchone()
    (progress,) = db.execute("SELECT count(*) FROM queue_progress").fetchone()
    return max(int(entries), int(progress))


def test_an_idle_queue_is_pruned_in_small_steps(
    db: sqlite3.Connection, table: QueueTable, clock: Clock
) -> None:
    table.publish(db, [publication(str(number)) for number in range(40)])
    _, leases = claim_ids(db, table)
    for lease in leases:
        table.finish(db, [lease], "")
    clock.now += WINDOW

    kept = []
    for _ in range(3):
        claim_ids(db, table)
        kept.append(messages_kept(db))

    assert kept == [24, 8, 0]


@pytest.mark.rule("P4")
def test_pruning_keeps_up_with_what_gets_finished(
    db: sqlite3.Connection, table: QueueTable, clock: Clock
) -> None:
    for number in range(100):
        table.publish(db, [publication(str(number))])
        _, leases = claim_ids(db, table)
        table.finish(db, leases, "")
        clock.now += WINDOW

    assert messages_kept(db) <= TIDIED_AT_ONCE


def test_a_finished_message_stays_while_one_in_front_of_it_waits(
    db: sqlite3.Connection, table: QueueTable, clock: Clock
) -> None:
    table.publish(db, [publication(name, group="g") for name in "abc"])
    _, (first, second, third) = claim_ids(db, table)
    table.finish(db, [second], "")
    table.give_back(db, third, 0, UNTRIED, "")
    table.give_back(db, first, 2 * WINDOW, UNTRIED, "")

    clock.now += WINDOW
    claim_ids(db, table)  # prunes what it can
    kept = messages_kept(db)
    published_again = table.publish(db, [publication("b")])
    clock.now += WINDOW
    after, leases = claim_ids(db, table)
    table.finish(db, leases, "")
    clock.now += WINDOW
    for _ in range(2):
        claim_ids(db, table)

    assert (kept, published_again, after) == (3, [True], ["a", "c", "b"])
    assert messages_kept(db) == 0


@pytest.mark.rule("P1")
def test_an_ack_that_is_partly_stale_never_removes_what_another_worker_holds(
    db: sqlite3.Connection, table: QueueTable, clock: Clock
) -> None:
    other = replace(table, worker_id="bert")
    table.publish(db, [publication("a"), publication("b")])
    _, (first, second) = claim_ids(db, table)
    table.extend(db, [first], 2 * LEASE)
    clock.now += LEASE
    _, (taken_over,) = claim_ids(db, other)
    lost = table.finish(db, [first, second], "")
    other.extend(db, [taken_over], 3 * WINDOW)
    succeeded = [row for row in story(db) if row[1] == "succeeded"]

    clock.now += WINDOW
    claim_ids(db, table)  # prunes

    assert succeeded == [("a", "succeeded", 1000.0 + LEASE, "anna", None)]
    assert (lost, messages_kept(db)) == ([1], 1)
    assert other.finish(db, [taken_over], "") == ()


def test_a_token_is_never_used_again(
    db: sqlite3.Connection, table: QueueTable, clock: Clock
) -> None:
    tokens = set()
    for number in range(20):
        table.publish(db, [publication(str(number))])
        _, (lease,) = claim_ids(db, table)
        table.finish(db, [lease], "")
        clock.now += WINDOW
        claim_ids(db, table)  # forgets all that it may
        tokens.add(lease.token)

    assert len(tokens) == 20


@pytest.mark.rule("WQ-6")
def test_a_claim_tells_when_to_look_again(
    db: sqlite3.Connection, table: QueueTable, clock: Clock
) -> None:
    table.publish(db, [publication("a"), publication("b")])
    _, (first, second) = claim_ids(db, table)

    held = table.claim(db, 1, LEASE).wait
    table.give_back(db, first, 10, UNTRIED, "")
    delayed = table.claim(db, 1, LEASE).wait
    clock.now += 10
    _, (again,) = claim_ids(db, table)
    table.finish(db, [again, second], "")
    idle = table.claim(db, 1, LEASE).wait

    assert (held, delayed, idle) == (LEASE, 10, float("inf"))


def test_leases_end_whichever_queue_of_the_file_is_asked(
    db: sqlite3.Connection, table: QueueTable, clock: Clock
) -> None:
    bills = replace(table, name="bills")
    table.publish(db, [publication("a", group="g"), publication("b")])
    claim_ids(db, table)
    clock.now += LEASE

    claim_ids(db, bills)

    assert table.depth(db) == Depth(waiting=2, in_flight=0, due=2)


def test_delays_end_whichever_queue_of_the_file_is_asked(
    db: sqlite3.Connection, table: QueueTable, clock: Clock
) -> None:
    bills = replace(table, name="bills")
    table.publish(db, [publication("a", group="g"), publication("b")])
    _, leases = claim_ids(db, table)
    for lease in leases:
        table.give_back(db, lease, 10, UNTRIED, "")
    clock.now += 10

    of_bills, _ = claim_ids(db, bills)
    ids, _ = claim_ids(db, table)

    assert (of_bills, ids) == ([], ["a", "b"])


@pytest.mark.rule("WQ-8")
def test_what_several_claims_took_is_finished_at_once(
    db: sqlite3.Connection, table: QueueTable
) -> None:
    table.publish(db, [publication(name, group=name) for name in "abc"])
    leases = [lease for _ in range(3) for lease in claim_ids(db, table, limit=1)[1]]

    lost = table.finish(db, leases, "")

    finished = db.execute("SELECT ids FROM queue_changes WHERE state = 'succeeded'").fetchall()
    assert (list(lost), finished) == ([], [("[1,2,3]",)])
    assert table.depth(db) == Depth(waiting=0, in_flight=0, due=0)


def story(db: sqlite3.Connection) -> list[tuple[object, ...]]:
    audit = "SELECT message_id, audit.state, at, audit.worker_id, error FROM queue_audit AS audit"
    return list(db.execute(f"{audit} JOIN queue_messages USING (id) ORDER BY id, at"))


@pytest.mark.rule("WQ-8")
def test_each_change_of_state_is_written_down(
    db: sqlite3.Connection, table: QueueTable, clock: Clock
) -> None:
    audited = replace(table, audit=3600.0)
    audited.publish(db, [publication("a"), publication("b")])
    clock.now = 1001.0
    _, (first, _) = claim_ids(db, audited)
    clock.now = 1002.0
    audited.give_back(db, first, 100, UNTRIED, "HTTP 503")
    clock.now = 1031.0
    _, leases = claim_ids(db, replace(audited, worker_id="bert"))
    clock.now = 1032.0
    audited.finish(db, leases, "HTTP 400")

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
    (kept,) = db.execute("SELECT count(*) FROM queue_changes").fetchone()
    return int(kept)


@pytest.mark.rule("WQ-8", "P4")
@pytest.mark.parametrize(("audit", "kept"), [(0.0, 1), (WINDOW, 1), (3 * WINDOW, 3)])
def test_the_story_is_pruned_by_its_age(
    db: sqlite3.Connection, table: QueueTable, clock: Clock, audit: float, kept: int
) -> None:
    audited = replace(table, audit=audit)
    audited.publish(db, [publication("a")])
    _, leases = claim_ids(db, audited)
    audited.finish(db, leases, "")

    clock.now += WINDOW
    claim_ids(db, audited)

    assert (messages_kept(db), changes_kept(db)) == (0, kept)


def test_a_database_of_a_later_version_is_refused(db: sqlite3.Connection) -> None:
    db.execute("PRAGMA user_version = 99")

    with pytest.raises(QueueRefused, match="version 99"):
        prepare(db)


@pytest.fixture(params=[1, 2, 3])
def old_db(request: pytest.FixtureRequest) -> Iterator[sqlite3.Connection]:
    """As that version left it at the instant 1300: a bit of everything."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        script = Path(__file__).parent / f"queue_file_{request.param}.sql"
        db.executescript(script.read_text())
        yield db


def change_old(db: sqlite3.Connection, part: str, change: str) -> None:
    """Before version 3, all parts of a message were in one table."""
    (version,) = db.execute("PRAGMA user_version").fetchone()
    db.execute(f"UPDATE {'queue_messages' if version < 3 else part} SET {change}")  # noqa: S608


@pytest.mark.rule("P1")
def test_a_file_of_an_old_version_loses_nothing(old_db: sqlite3.Connection, clock: Clock) -> None:
    clock.now = 1300.0
    anna = QueueTable("orders", "anna", WINDOW, clock)
    bert = replace(anna, worker_id="bert")
    before = old_db.execute(EVERYTHING).fetchall()

    prepare(old_db)
    after = old_db.execute(EVERYTHING).fetchall()
    depth = anna.depth(old_db)
    again = anna.publish(old_db, [publication("g1"), publication("late"), publication("gone")])
    to_bert, _ = claim_ids(old_db, bert)
    to_anna, _ = claim_ids(old_db, anna)

    assert after == before
    assert depth == Depth(waiting=9, in_flight=1, due=4)
    assert list(again) == [False, False, True]
    assert to_bert == ["g1", "g3", "loose", "g4", "fresh", "gone"]
    assert to_anna == ["H1", "H2"]


EVERYTHING = (
    "SELECT id, queue, message_id, pool, group_id, high_priority, state, run_after,"
    " lease_token, lease_version, lease_until, worker_id, deliveries, attempts, posts, last_error,"
    " published_at, first_claimed_at, last_claimed_at, finished_at, body"
    " FROM queue_messages ORDER BY id"
)


@pytest.mark.rule("P1")
def test_what_an_old_version_handed_over_comes_back_when_its_lease_ends(
    old_db: sqlite3.Connection, clock: Clock
) -> None:
    clock.now = 1300.0
    anna = QueueTable("orders", "anna", WINDOW, clock)
    prepare(old_db)

    clock.now = 1330.0
    bills, _ = claim_ids(old_db, replace(anna, name="bills"))
    clock.now = 1360.0
    orders, _ = claim_ids(old_db, anna)

    assert bills == ["bill"]
    assert orders == ["H1", "H2", "g1", "g3", "h1", "h2", "loose", "late", "g4", "fresh"]


@pytest.mark.rule("P1", "WQ-3")
def test_a_token_that_an_old_version_left_behind_keeps_nobody_from_a_message(
    old_db: sqlite3.Connection, clock: Clock
) -> None:
    clock.now = 1300.0
    bert = QueueTable("orders", "bert", WINDOW, clock)
    change_old(old_db, "queue_progress", "lease_token = 5 WHERE id IN (4, 9)")  # g1, loose
    prepare(old_db)

    claimed = bert.claim(old_db, 10, 30.0).messages
    lost = bert.finish(old_db, [each.lease for each in claimed], "")

    assert {each.body: each.count for each in claimed}.items() >= {b"loose": 2, b"g1": 2}.items()
    assert not lost


@pytest.mark.rule("ID-1")
def test_an_old_file_gets_an_incarnation_of_its_own(old_db: sqlite3.Connection) -> None:
    prepare(old_db)
    with closing(database()) as new_db:
        found = [incarnation(db) for db in (old_db, new_db)]
    prepare(old_db)

    assert "" not in found
    assert len(set(found)) == 2
    assert incarnation(old_db) == found[0]


def incarnation(db: sqlite3.Connection) -> str:
    ((found,),) = db.execute("SELECT incarnation FROM queue_file")
    return str(found)


def test_ids_of_an_old_version_are_not_used_again(old_db: sqlite3.Connection, clock: Clock) -> None:
    old_db.execute("UPDATE sqlite_sequence SET seq = 100")
    prepare(old_db)
    table = QueueTable("orders", "anna", WINDOW, clock)

    table.publish(old_db, [publication("new")])

    assert old_db.execute("SELECT max(id) FROM queue_messages").fetchone() == (101,)


@pytest.mark.rule("WQ-1")
def test_explicit_keys_of_an_old_version_stay_explicit(
    old_db: sqlite3.Connection, clock: Clock
) -> None:
    clock.now = 1300.0
    change_old(old_db, "queue_entries", "dedup_key = 'k' || id WHERE id IN (2, 4)")  # old, g1
    prepare(old_db)
    anna = QueueTable("orders", "anna", WINDOW, clock)

    added = anna.publish(old_db, [publication(name, key=name) for name in ("k2", "k4", "k9")])

    assert added == [False, False, True]


@pytest.mark.rule("P4")
def test_what_an_old_version_finished_is_pruned(old_db: sqlite3.Connection, clock: Clock) -> None:
    clock.now = 1300.0 + WINDOW
    table = QueueTable("orders", "anna", WINDOW, clock)
    prepare(old_db)

    for _ in range(2):
        _, leases = claim_ids(old_db, table)
        table.finish(old_db, leases, "")
    claim_ids(old_db, table)

    states = old_db.execute("SELECT finished_at FROM queue_messages WHERE finished_at <= 1300")
    assert states.fetchall() == []


def test_a_database_of_something_else_is_refused() -> None:
    with closing(sqlite3.connect(":memory:")) as db:
        db.execute("CREATE TABLE accounts (name)")

        with pytest.raises(QueueRefused, match="something else"):
            prepare(db)


# Names within a statement that stand for a few rows, not for a table.
FEW = {
    *("CONSTANT", "sqlite_sequence", "heads", "last_head", "race", "winner", "walk", "seen"),
    "change",
}


@pytest.mark.rule("P4")
@pytest.mark.parametrize("name", sorted(QUERIES.keys() - {"forget_changes"}))
def test_no_statement_reads_through_the_whole_table(db: sqlite3.Connection, name: str) -> None:
    statement = QUERIES[name]
    arguments = ["[]"] * len(statement.parameters)

    plan = [step for *_, step in db.execute(f"EXPLAIN QUERY PLAN {statement.sql}", arguments)]

    scanned = {step.split()[1] for step in plan if step.startswith("SCAN") and "INDEX" not in step}
    assert {table for table in scanned if not table.startswith("(")} <= FEW


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


def steps_of_a_claim(db: sqlite3.Connection, table: QueueTable) -> int:
    with counted_steps(db) as steps:
        claim_ids(db, table, limit=10)
    return steps[0]


BACKLOGS: dict[str, Callable[[int], Publication]] = {
    "ungrouped": lambda number: publication(f"m{number}"),
    "one group": lambda number: publication(f"m{number}", group="g"),
    "many groups": lambda number: publication(f"m{number}", group=f"g{number // 10}"),
}


@pytest.mark.rule("P4")
@pytest.mark.parametrize("shape", BACKLOGS)
def test_a_claim_costs_the_same_whatever_waits_behind_it(clock: Clock, shape: str) -> None:
    costs = []
    for size in (100, 5000):
        with closing(database()) as db:
            table = QueueTable("orders", "anna", WINDOW, clock)
            table.publish(db, [BACKLOGS[shape](number) for number in range(size)])
            costs.append(steps_of_a_claim(db, table))

    assert costs[1] <= costs[0] * 1.2


@pytest.mark.rule("P4")
@pytest.mark.parametrize("shape", BACKLOGS)
def test_an_ack_costs_the_same_whatever_waits_behind_it(clock: Clock, shape: str) -> None:
    costs = []
    for size in (100, 5000):
        with closing(database()) as db:
            table = QueueTable("orders", "anna", WINDOW, clock)
            table.publish(db, [BACKLOGS[shape](number) for number in range(size)])
            _, leases = claim_ids(db, table, limit=10)
            with counted_steps(db) as steps:
                table.finish(db, leases, "")
            costs += steps

    assert costs[1] <= costs[0] * 1.2


@pytest.mark.rule("P4", "P5")
@pytest.mark.parametrize("blocked_by", ["a lease", "a delay", "another worker"])
def test_a_claim_costs_the_same_whatever_is_blocked_in_front_of_it(
    clock: Clock, blocked_by: str
) -> None:
    costs = []
    for size in (10, 1000):
        with closing(database()) as db:
            table = QueueTable("orders", "anna", WINDOW, clock)
            block(db, table, size, blocked_by)
            table.publish(db, [publication(f"free{number}") for number in range(10)])
            costs.append(steps_of_a_claim(db, table))

    assert costs[1] <= costs[0] * 1.2


def block(db: sqlite3.Connection, table: QueueTable, size: int, how: str) -> None:
    """Groups of ten that nobody may have now, or not this worker."""
    other = replace(table, worker_id="bert")
    groups = [f"g{number}" for number in range(size)]
    table.publish(db, [publication(f"first-{group}", group=group) for group in groups])
    _, leases = claim_ids(db, other if how == "another worker" else table, limit=size)
    table.publish(
        db,
        [
            publication(f"{group}-{number}", group=group, high=how == "another worker")
            for group in groups
            for number in range(10)
        ],
    )
    if how == "a delay":
        for lease in leases:
            table.give_back(db, lease, 60, UNTRIED, "")
