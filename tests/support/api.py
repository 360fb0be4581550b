"""A hand-made router behind the real API."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

from router.api.access import Access
from router.api.app import create_app
from router.core.config_plan import Plan
from router.core.figures import StandbyStatus
from router.core.health import Vitals
from router.core.tracker import Tracker
from router.core.warnings import WarningBook
from router.engine.config_sync import SourceStatus, SyncCounts, SyncFailed, SyncStatus
from router.engine.dead_letters import Replays
from router.engine.in_flight import InFlight
from router.engine.publishing import Publishing
from router.engine.snapshot import Snapshot
from router.ports import DeadLetterStore
from tests.support.explaining import HandMadeExplaining
from tests.support.figures import HandMadeStatistics, NotingControls
from tests.support.queues import ORDERS, FakeQueues
from tests.support.snapshots import make_snapshot

NOW = 1_800_000_000.25
LOCAL = Access()


class HandMadeRouter:
    """What the API asks for, each part real or set by the test."""

    def __init__(
        self, queues: FakeQueues, publishing: Publishing, letters: DeadLetterStore
    ) -> None:
        self.queues = queues
        self.warnings = WarningBook()
        self.publishing = publishing
        self.letters = letters
        self.replays = Replays(letters, publishing, wall=self.now, new_id=lambda: "NEW")
        self.state = Vitals(initialized=True, uptime=12.3456)
        self.plan = Plan(start=(ORDERS,))
        self.sync_failure = ""
        self.tracker = Tracker()
        self.in_flight = InFlight(self.tracker, wall=self.now)
        self.explaining = HandMadeExplaining()
        self.statistics = HandMadeStatistics()
        self.controls = NotingControls()
        self.syncs = SyncCounts(succeeded=3, failed=1, last_success=NOW - 60)
        self.standby = StandbyStatus(enabled=False, instance="router-1", primary=True)

    def now(self) -> float:
        return NOW

    def vitals(self) -> Vitals:
        return self.state

    def config_status(self) -> SyncStatus:
        return SyncStatus(
            last_success=NOW - 60,
            document={
                "queues": [{"queueName": "orders", "queueUri": "memory://orders"}],
                "processingPools": [{"code": "POOL-A", "concurrency": 10}],
            },
            sources=(SourceStatus("https://user:hidden@config/", NOW - 60, ""),),
            succeeded=1,
            failed=0,
        )

    def snapshot(self) -> Snapshot:
        return make_snapshot(synced_at=self.syncs.last_success)

    def sync_counts(self) -> SyncCounts:
        return self.syncs

    def standby_status(self) -> StandbyStatus:
        return self.standby

    async def reload(self) -> Plan:
        if self.sync_failure:
            raise SyncFailed(self.sync_failure)
        return self.plan


@asynccontextmanager
async def calling(
    router: HandMadeRouter, access: Access = LOCAL, base_url: str = "http://localhost:8080"
) -> AsyncIterator[httpx.AsyncClient]:
    # A failure of the app is answered, not raised into the test.
    transport = httpx.ASGITransport(create_app(router, access), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url=base_url) as api:
        yield api


def assert_problem(answer: httpx.Response, status: int, detail: str = "") -> None:
    """Whatever went wrong, it is told in this form."""
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem["type"] == "about:blank"
    assert problem["status"] == status
    assert problem["title"]
    assert detail in problem["detail"]
