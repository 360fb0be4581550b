"""A hand-made router behind the real API."""

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager

import httpx
from msgspec.structs import replace

from router.api.access import Access
from router.api.app import create_app
from router.core.config_plan import Plan
from router.core.outcome import DELIVERED
from router.core.state import CredentialState, RouterState, StandbyStatus, SyncCounts
from router.core.target import read_target
from router.core.trial import SentRequest, Timings, Trial
from router.core.warnings import WarningBook
from router.engine.beat import ScheduleState
from router.engine.config_sync import SourceStatus, SyncFailed, SyncStatus
from router.engine.dead_letters import DeadLetterReplay
from router.engine.publishing import QueuePublisher
from router.engine.stores import Batches, MessageStates, QueueStores
from router.engine.tracker import Tracker
from router.ports import Conflict, DeadLetterStore
from tests.support.queues import ONE_QUEUE, ORDERS, FakeQueues
from tests.support.states import (
    ORIGIN,
    FixedLookup,
    NotingControls,
    NotingGroups,
    circuit,
    fresh_state,
    pool_state,
    queue_state,
    target_state,
)
from tests.support.stores import FakeStores

NOW = 1_800_000_000.25
LOCAL = Access()
TRIAL = Trial(
    id="test-1",
    url="https://svc.test/hook",
    entry="svc",
    credentials=None,
    outcome=DELIVERED,
    requests=[SentRequest("POST", ("X-Api-Key: ***",), 7, Timings(1.0, 2.0, 3.0, 4.0, 5.0))],
    reply=b"ok \xff",
)
CREDENTIALS = (
    CredentialState(
        name="partner",
        type="oauth2",
        hosts=("api.partner.test",),
        ok=True,
        uses=12,
        expires_at=NOW + 60,
    ),
    CredentialState(
        name="bank",
        type="mtls",
        hosts=("api.bank.test:8443",),
        ok=False,
        error="certFile and keyFile do not fit, or are not PEM",
        certificate_expires_at=1_800_000_000.0,
    ),
)


class HandMadeRouter:
    """What the API asks for, each part real or set by the test."""

    def __init__(
        self, queues: FakeQueues, publishing: QueuePublisher, letters: DeadLetterStore
    ) -> None:
        self.queues = queues
        self.warnings = WarningBook()
        self.publishing = publishing
        self.letters = letters
        self.replays = DeadLetterReplay(letters, publishing, wall=self.now, new_id=lambda: "NEW")
        self.made = replace(
            fresh_state(),
            uptime=12.3456,
            ledger={"received": 10, "delivered": 6, "dead_lettered": 2},
            dead_letters={"CONFIG_ERROR": 2, "MALFORMED": 0},
            loop_lag=0.002,
            loop_stalls=2,
            loop_stalled_seconds=0.75,
            spans={"exported": 4, "failed": 0, "dropped": 1},
            syncs=SyncCounts(succeeded=3, failed=1, last_success=NOW - 60),
            standby=StandbyStatus(enabled=False, instance="router-1", primary=True),
        )
        self.tested: list[tuple[str, bytes | None]] = []
        self.trial: Trial | Exception = TRIAL
        self.pool_codes: Iterable[str] = ("POOL-A",)
        self.queue_names: Iterable[str] = ("orders",)
        self.depth: int | None = 25
        self.document: Mapping[str, object] = {
            "queues": [{"queueName": "orders", "queueUri": "memory://orders"}],
            "processingPools": [{"code": "POOL-A", "concurrency": 10}],
        }
        self.plan = Plan(start=(ORDERS,))
        self.sync_failure = ""
        self.tracker = Tracker()
        self.lookup = FixedLookup(self.tracker, wall=self.now)
        self.controls = NotingControls()
        self.groups = NotingGroups()
        self.stores = FakeStores()
        self.config = ONE_QUEUE
        stores = QueueStores(self.stores, lambda: self.config)
        self.messages = MessageStates(stores, self.lookup, publishing)
        self.batches = Batches(stores, publishing, new_id=lambda: "NEW-BATCH")
        self.released: list[str] = []
        self.scheduled: Sequence[ScheduleState] = ()

    def now(self) -> float:
        return NOW

    def release_queue(self, name: str) -> None:
        if name != "a/queue":
            raise Conflict("this router does not hold the lease of the queue")
        self.released.append(name)

    def state(self) -> RouterState:
        """What the test has made, with queues and pools unless it made some."""
        made = self.made
        return replace(
            made,
            now=NOW,
            queues=made.queues or [queue_state(name, self.depth) for name in self.queue_names],
            pools=map(pool_state, self.pool_codes),
            breakers=[circuit(ORIGIN)],
            credentials=CREDENTIALS,
            failures={(ORIGIN, "network"): 5},
            refusals={(ORIGIN,): 4},
            target_count=1,
            targets=made.targets or [target_state(ORIGIN)],
            warnings=self.warnings.summary(NOW),
        )

    async def schedules(self) -> Sequence[ScheduleState]:
        return self.scheduled

    def config_status(self) -> SyncStatus:
        return SyncStatus(
            last_success=NOW - 60,
            document=self.document,
            sources=(SourceStatus("https://user:hidden@config/", NOW - 60, ""),),
        )

    async def test_target(self, url: str, payload: bytes | None) -> Trial:
        read_target(url)
        self.tested.append((url, payload))
        if isinstance(self.trial, Exception):
            raise self.trial
        return self.trial

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
