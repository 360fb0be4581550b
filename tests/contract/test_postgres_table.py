"""The work queue in PostgreSQL against the same model as the one in SQLite."""

import asyncio
import time
from contextlib import nullcontext
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

from router.brokers.postgres.database import PostgresDatabase
from router.brokers.postgres.store import PostgresMessageStore
from router.brokers.postgres.work_queue import PostgresQueue
from router.brokers.work_queue import Lease
from router.core.message import Tally
from router.ports import Cancellation, Publication, StaleLease
from tests.contract.postgres_place import PostgresPlace
from tests.support.work_queues import LEASE, WINDOW, lease_of, publication
from tests.unit.test_queue_table import PUBLISHED, Model

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


class PostgresComparison(RuleBasedStateMachine):
    """Two workers on one queue do as they please; table and model agree on everything."""

    def __init__(self, place: PostgresPlace) -> None:
        super().__init__()
        self.loop = asyncio.Runner()
        self.model = Model()
        self.queue = place.new_uri().rpartition("=")[2]
        self.database = self.loop.run(_open(place.server.url))
        self.tables = {
            worker: PostgresQueue(
                self.database, self.queue, worker_id=worker, dedup_window=WINDOW, lease=LEASE
            )
            for worker in WORKERS
        }
        self.loop.run(self.tables["anna"].configure(keep=0.0, audit=0.0))
        self.store = PostgresMessageStore(
            self.database, self.queue, dedup_window=WINDOW, sinks=lambda _: None
        )
        self.leases: list[Lease] = []

    def teardown(self) -> None:
        self.loop.run(self.database.close())
        self.loop.close()

    @rule(
        bodies=PUBLISHED,
        pool=st.sampled_from([None, None, "P"]),
        group=st.sampled_from(["g", "g", "h", None]),
        priority=st.sampled_from([0, 0, 0, 3, 8, 9]),
        delay=st.sampled_from([None, None, None, 5.0, 400.0]),
    )
    def publish(
        self,
        bodies: list[str],
        pool: str | None,
        group: str | None,
        priority: int,
        delay: float | None,
    ) -> None:
        items = [
            publication(
                body.rstrip("'"),
                pool=pool,
                group=group,
                priority=priority,
                body=body,
                not_before=delay,
            )
            for body in bodies
        ]
        expected = [
            self.model.publish(_moved(item, None if delay is None else self.model.now + delay))
            for item in items
        ]
        now = time.time()

        added = self.loop.run(
            self.tables["anna"].publish(
                [_moved(item, None if delay is None else now + delay) for item in items]
            )
        )

        assert list(added) == expected
        self._learn_ids()

    @rule(worker=st.sampled_from(WORKERS), limit=st.sampled_from([1, 1, 2, 5]))
    def claim(self, worker: str, limit: int) -> None:
        expected = self.model.claimable(worker, limit)

        messages = self.loop.run(self.tables[worker].claim(limit)).messages

        for row, received in zip(expected, messages, strict=True):
            lease = lease_of(received.handle)
            row.state, row.worker, row.deliveries = "in-flight", worker, row.deliveries + 1
            row.lease, row.lease_until = lease, self.model.now + LEASE
            self.leases.append(lease)
        assert [(lease_of(one.handle).id, one.count, one.tally) for one in messages] == [
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

        unsettled = self.loop.run(self.tables["anna"].ack(leases, error=error))

        assert [one.handle for one in unsettled] == [leases[position] for position in lost]

    @precondition(lambda self: self.leases)
    @rule(
        pick=st.integers(0, 99), delay=st.sampled_from([0.0, 5.0, 60.0]), requests=st.integers(1, 3)
    )
    def nack(self, pick: int, delay: float, requests: int) -> None:
        lease = self._pick(pick)
        tally = Tally(failures=1, requests=requests)
        row = self.model.holder_of(lease)
        if row:
            row.state, row.lease, row.tally = "ready", None, tally
            row.due = self.model.now + delay

        with nullcontext() if row else pytest.raises(StaleLease):
            self.loop.run(self.tables["bert"].nack(lease, delay, tally))

    @precondition(lambda self: self.leases)
    @rule(pick=st.integers(0, 99), seconds=st.sampled_from([10.0, 90.0]))
    def extend(self, pick: int, seconds: float) -> None:
        lease = self._pick(pick)
        row = self.model.holder_of(lease)
        alive = row is not None and row.state == "in-flight" and row.lease_until > self.model.now
        if row and alive:
            row.lease_until = self.model.now + seconds

        lost = self.loop.run(self.tables["anna"].extend([lease], seconds))

        assert [one.handle for one in lost] == ([] if alive else [lease])

    @rule(number=st.integers(0, 40))
    def cancel(self, number: int) -> None:
        message_id = f"m{number}"
        is_sure = not self.model.may_have_forgotten_id(message_id)
        expected = self.model.cancel(message_id)

        answer = self.loop.run(self.store.cancel(message_id))

        assert answer is expected or (not is_sure and answer is Cancellation.UNKNOWN)

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


def _moved(item: Publication, not_before: float | None) -> Publication:
    return replace(item, not_before=not_before)


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
