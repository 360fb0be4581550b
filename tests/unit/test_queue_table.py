"""The work queue's table against a model that says the rules of WQ-2 in plain words."""

import re
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import groupby, takewhile

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from router.brokers.queue_table import _QUERIES, QueueTable, prepare
from router.brokers.work_queue import MAX_ERROR, Lease
from router.core.message import UNTRIED, Message, Mode, Tally
from router.ports import Depth, Publication, QueueRefused

pytestmark = pytest.mark.rule("WQ-1", "WQ-2", "WQ-3", "WQ-4", "P3")

WINDOW = 300.0
LEASE = 30.0


def publication(
    message_id: str, *, pool: str | None = None, group: str | None = None, high: bool = False
) -> Publication:
    message = Message(
        id=message_id, target="https://svc.example/", pool=pool, group=group, high_priority=high
    )
    return Publication(message, message_id.encode(), message_id)


@dataclass
class Row:
    id: int
    key: str
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
        known = [row for row in self.rows if row.key == item.dedup_key]
        if any(row.unsettled or row.finished > self.now - WINDOW for row in known):
            return False
        message = item.message
        group = (message.pool or "DEFAULT-POOL", message.group) if message.group else None
        self.rows.append(Row(0, item.dedup_key, group, bool(message.high_priority)))
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

    def _end_leases(self) -> None:
        for row in self.rows:
            if row.state == "in-flight" and row.lease_until <= self.now:
                row.state = "ready"

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
        keys=st.lists(st.integers(0, 40), min_size=1, max_size=4),
        pool=st.sampled_from([None, None, "P"]),
        group=st.sampled_from(["g", "g", "h", None]),
        high=st.booleans(),
    )
    def publish(self, keys: list[int], pool: str | None, group: str | None, high: bool) -> None:
        items = [publication(f"m{key}", pool=pool, group=group, high=high) for key in keys]
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
        ids = dict(self.db.execute("SELECT dedup_key, id FROM queue_messages"))
        for row in self.model.rows:
            row.id = row.id or ids[row.key]

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


def test_the_rest_of_a_group_is_for_the_worker_that_took_its_high_priority_message(
    db: sqlite3.Connection, table: QueueTable
) -> None:
    other = replace(table, worker_id="bert")
    table.publish(db, [publication("a", group="g"), publication("b", group="g", high=True)])
    claim_ids(db, table, limit=1)

    others, _ = claim_ids(db, other)
    ours, _ = claim_ids(db, table)

    assert (others, ours) == ([], ["a"])


@pytest.mark.rule("P5")
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
        " first_claimed_at, last_claimed_at, finished_at, body FROM queue_messages"
    )
    (last_error,) = db.execute("SELECT last_error FROM queue_messages").fetchone()

    assert row == ("failed", "anna", 2, 2, 1, 3, 1000.0, 1001.0, 1002.0, 1003.0, b"")
    assert last_error == "x" * MAX_ERROR


def test_ids_are_never_used_again(db: sqlite3.Connection, table: QueueTable, clock: Clock) -> None:
    table.publish(db, [publication("a")])
    _, leases = claim_ids(db, table)
    table.finish(db, leases, "")
    clock.now += WINDOW
    claim_ids(db, table)  # prunes it
    table.publish(db, [publication("a")])

    _, (lease,) = claim_ids(db, table)

    assert lease.id > leases[0].id


def test_pruning_is_done_in_small_steps(
    db: sqlite3.Connection, table: QueueTable, clock: Clock
) -> None:
    table.publish(db, [publication(str(number)) for number in range(20)])
    _, leases = claim_ids(db, table)
    table.finish(db, leases, "")
    clock.now += WINDOW

    kept = []
    for _ in range(5):
        claim_ids(db, table, limit=2)
        kept.append(db.execute("SELECT count(*) FROM queue_messages").fetchone()[0])

    assert kept == [16, 12, 8, 4, 0]


def test_a_database_of_a_later_version_is_refused(db: sqlite3.Connection) -> None:
    db.execute("PRAGMA user_version = 99")

    with pytest.raises(QueueRefused, match="version 99"):
        prepare(db)


def test_a_database_of_something_else_is_refused() -> None:
    with closing(sqlite3.connect(":memory:")) as db:
        db.execute("CREATE TABLE accounts (name)")

        with pytest.raises(QueueRefused, match="something else"):
            prepare(db)


@pytest.mark.rule("P4")
@pytest.mark.parametrize("name", _QUERIES)
def test_no_statement_reads_through_the_whole_table(db: sqlite3.Connection, name: str) -> None:
    parameters: dict[str, object] = defaultdict(int, leases="[]", ids="[]")
    for parameter in re.findall(r":(\w+)", _QUERIES[name]):
        parameters[parameter]

    plan = [step for *_, step in db.execute(f"EXPLAIN QUERY PLAN {_QUERIES[name]}", parameters)]

    assert not [step for step in plan if "SCAN queue_messages" in step and "INDEX" not in step]
    assert not [step for step in plan if re.match(r"SCAN (next|behind|held|first)\b", step)]


def steps_of_a_claim(db: sqlite3.Connection, table: QueueTable) -> int:
    """What a claim of ten costs in steps of SQLite's machine: the same on every computer."""
    steps = 0

    def count() -> int:
        nonlocal steps
        steps += 1
        return 0

    db.set_progress_handler(count, 1)
    claim_ids(db, table, limit=10)
    db.set_progress_handler(None, 0)
    return steps


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
