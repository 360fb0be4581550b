"""The work queue in PostgreSQL against the same model as the one in SQLite."""

import asyncio
from typing import Final

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from msgspec.structs import replace

from router.brokers.postgres_database import PostgresDatabase
from router.brokers.postgres_table import PostgresTable
from router.brokers.work_queue import Lease
from router.core.message import Tally
from tests.contract.postgres_place import PostgresPlace
from tests.unit.test_queue_table import LEASE, PUBLISHED, WINDOW, Model, publication

pytestmark = [
    pytest.mark.slow,
    pytest.mark.rule("WQ-1", "WQ-2", "WQ-3", "WQ-4", "P3"),
]

WORKERS: Final = ("anna", "bert")

# The server's clock cannot be turned. So instead everything moves into the past.
_LET_TIME_PASS: Final = """
UPDATE message_router.queue_messages
SET run_after = run_after - make_interval(secs => $2),
    lease_until = lease_until - make_interval(secs => $2),
    finished_at = finished_at - make_interval(secs => $2)
WHERE queue = $1
"""


_IDS: Final = "SELECT body, id FROM message_router.queue_messages WHERE queue = $1"


class StricterModel(Model):
    """A lease that has ended is lost as soon as a claim has noticed it."""

    def _end_leases(self) -> None:
        for row in self.rows:
            if row.state == "in-flight" and row.lease_until <= self.now:
                row.state, row.lease = "ready", None


class PostgresComparison(RuleBasedStateMachine):
    """Two workers on one queue do as they please; table and model agree on everything."""

    def __init__(self, place: PostgresPlace) -> None:
        super().__init__()
        self.loop = asyncio.Runner()
        self.model = StricterModel()
        self.queue = place.new_uri().rpartition("=")[2]
        self.database = self.loop.run(_open(place.server.url))
        self.tables = {
            worker: PostgresTable(self.database, self.queue, worker_id=worker, dedup_window=WINDOW)
            for worker in WORKERS
        }
        self.loop.run(self.tables["anna"].configure(keep=0.0, audit=0.0))
        self.leases: list[Lease] = []

    def teardown(self) -> None:
        self.loop.run(self.database.close())
        self.loop.close()

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

        added = self.loop.run(self.tables["anna"].publish(items))

        assert list(added) == expected
        self._learn_ids()

    @rule(worker=st.sampled_from(WORKERS), limit=st.sampled_from([1, 1, 2, 5]))
    def claim(self, worker: str, limit: int) -> None:
        expected = self.model.claimable(worker, limit)

        claim = self.loop.run(self.tables[worker].claim(limit, LEASE))

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

        assert list(self.loop.run(self.tables["anna"].finish(leases, error))) == lost

    @precondition(lambda self: self.leases)
    @rule(pick=st.integers(0, 99), delay=st.sampled_from([0.0, 5.0, 60.0]), posts=st.integers(1, 3))
    def nack(self, pick: int, delay: float, posts: int) -> None:
        lease = self._pick(pick)
        tally = Tally(attempts=1, posts=posts)
        row = self.model.holder_of(lease)
        if row:
            row.state, row.lease, row.tally = "ready", None, tally
            row.due = self.model.now + delay

        ours = self.loop.run(self.tables["bert"].give_back(lease, delay, tally, ""))

        assert ours == (row is not None)

    @precondition(lambda self: self.leases)
    @rule(pick=st.integers(0, 99), seconds=st.sampled_from([10.0, 90.0]))
    def extend(self, pick: int, seconds: float) -> None:
        lease = self._pick(pick)
        row = self.model.holder_of(lease)
        alive = row is not None and row.state == "in-flight" and row.lease_until > self.model.now
        if row and alive:
            row.lease_until = self.model.now + seconds

        lost = self.loop.run(self.tables["anna"].extend([lease], seconds))

        assert list(lost) == ([] if alive else [0])

    @rule(seconds=st.sampled_from([1.0, 1.0, 5.0, 29.0, 30.0, 400.0]))
    def time_passes(self, seconds: float) -> None:
        self.model.now += seconds
        self.loop.run(self.database.call(_LET_TIME_PASS, self.queue, seconds))

    def _pick(self, number: int) -> Lease:
        return self.leases[number % len(self.leases)]

    def _learn_ids(self) -> None:
        """A refused duplicate uses up an id, so the model asks for them."""
        rows = self.loop.run(self.database.call(_IDS, self.queue))
        ids = {row["body"]: row["id"] for row in rows}
        for row in self.model.rows:
            row.id = row.id or ids[row.body]

    @invariant()
    def the_depth_agrees(self) -> None:
        depth = self.loop.run(self.tables["anna"].depth())

        assert replace(depth, due=None) == self.model.depth()


async def _open(url: str) -> PostgresDatabase:
    database = PostgresDatabase(url)
    await database.prepare()
    return database


def test_two_workers_on_one_queue_agree_with_the_model(postgres: PostgresPlace) -> None:
    class Comparison(PostgresComparison):
        def __init__(self) -> None:
            super().__init__(postgres)

    run_state_machine_as_test(
        Comparison,
        settings=settings(
            max_examples=60,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            phases=[Phase.generate],  # looking for a shorter example would take minutes here
        ),
    )
