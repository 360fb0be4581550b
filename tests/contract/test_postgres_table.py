"""The work queue in PostgreSQL against the same model as the one in SQLite."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Final

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from msgspec.structs import replace

from router.brokers.kit.consuming import ClaimedBatch
from router.brokers.postgres.database import PostgresDatabase
from router.brokers.postgres.store import PostgresMessageStore
from router.brokers.postgres.work_queue import PostgresQueue
from router.brokers.work_queue import Lease
from router.core.message import Tally
from router.ports import Cancellation, Depth, Nack, PoolFilter, Publication, Receipt
from tests.contract.postgres_place import PostgresPlace
from tests.support.queue_model import WorkQueueComparison
from tests.support.work_queues import LEASE, WINDOW, lease_of

pytestmark = pytest.mark.slow

# The server's clock cannot be turned. So instead everything moves into the past.
_LET_TIME_PASS: Final = """
UPDATE message_router.queue_messages
SET run_after = run_after - make_interval(secs => $2),
    lease_until = lease_until - make_interval(secs => $2),
    finished_at = finished_at - make_interval(secs => $2)
WHERE queue = $1
"""


_IDS: Final = "SELECT body, id FROM message_router.queue_messages WHERE queue = $1"


class PostgresTable:
    """One worker's end. Times to come are the model's, and move to the server's clock here."""

    def __init__(self, comparison: "PostgresComparison", worker: str) -> None:
        database, name = comparison.database, comparison.queue
        self.queue = PostgresQueue(
            database, name, worker_id=worker, dedup_window=WINDOW, lease=LEASE
        )
        self._store = PostgresMessageStore(
            database, name, dedup_window=WINDOW, local_queues=lambda _: None
        )
        self._model = comparison.model
        self._run = comparison.loop.run

    def publish(self, items: Sequence[Publication]) -> Sequence[Receipt]:
        ahead = time.time() - self._model.now
        moved = [
            item if item.not_before is None else replace(item, not_before=item.not_before + ahead)
            for item in items
        ]
        return self._run(self.queue.publish(moved))

    def select(self, pools: PoolFilter | None) -> None:
        self.queue.select(pools)

    def claim(self, limit: int) -> ClaimedBatch:
        return self._run(self.queue.claim(limit))

    def ack(self, leases: Sequence[Lease], error: str) -> Sequence[int]:
        lost = self._run(self.queue.ack(leases, error=error))
        return [leases.index(lease_of(one.handle)) for one in lost]

    def nack(self, lease: Lease, delay: float, tally: Tally) -> bool:
        return not self._run(self.queue.nack([Nack(lease, delay, tally)]))

    def extend(self, leases: Sequence[Lease], seconds: float) -> Sequence[int]:
        lost = self._run(self.queue.extend(leases, seconds))
        return [leases.index(lease_of(one.handle)) for one in lost]

    def cancel(self, message_id: str) -> Cancellation:
        return self._run(self._store.cancel(message_id))

    def depth(self) -> Depth:
        return self._run(self.queue.depth())


class PostgresComparison(WorkQueueComparison):
    def __init__(self, place: PostgresPlace) -> None:
        super().__init__()
        self.loop = asyncio.Runner()
        self.queue = place.new_uri().rpartition("=")[2]
        self.database = self.loop.run(_open(place.server.url))
        anna = PostgresTable(self, "anna")
        self.tables = {"anna": anna, "bert": PostgresTable(self, "bert")}
        self.loop.run(anna.queue.configure(keep=0.0, audit=0.0))

    def teardown(self) -> None:
        self.loop.run(self.database.close())
        self.loop.close()

    def pass_time(self, seconds: float) -> None:
        self.loop.run(self.database.call(_LET_TIME_PASS, self.queue, seconds))

    def ids(self) -> Mapping[bytes, int]:
        rows = self.loop.run(self.database.call(_IDS, self.queue))
        return {row["body"]: row["id"] for row in rows}


async def _open(url: str) -> PostgresDatabase:
    database = PostgresDatabase(url)
    await database.prepare()
    return database


@pytest.mark.rule("WQ-1", "WQ-2", "WQ-3", "WQ-4", "P3")
def test_two_workers_on_one_queue_agree_with_the_model(postgres: PostgresPlace) -> None:
    class Comparison(PostgresComparison):
        def __init__(self) -> None:
            super().__init__(postgres)

    run_state_machine_as_test(
        Comparison,
        settings=settings(
            max_examples=60,
            stateful_step_count=30,
            derandomize=True,
            phases=[Phase.generate],  # looking for a shorter example would take minutes here
        ),
    )
