"""What an operator asks first, and may turn."""

from urllib.parse import quote

import httpx
import pytest
from msgspec import UNSET
from msgspec.structs import replace

from router.api.access import Access
from router.api.monitoring import TargetStats
from router.core.outcome import Metric
from router.core.state import (
    Circuit,
    ConsumerState,
    LeaseState,
    PoolState,
    QueueState,
    StandbyStatus,
    TargetState,
)
from router.core.stats import Counts, Deliveries
from router.core.warnings import Code, Severity
from router.engine.controls import PoolSetting
from tests.support.api import NOW, HandMadeRouter, assert_problem, calling
from tests.support.states import ORIGIN

pytestmark = pytest.mark.anyio

TIMESTAMP = "2027-01-15T08:00:00.250Z"
QUEUE_TOTALS = ("totalMessages", "totalConsumed", "totalFailed", "totalDeferred")
POOL_TOTALS = (
    "totalProcessed",
    "totalSucceeded",
    "totalFailed",
    "totalTransient",
    "totalRateLimited",
)


@pytest.mark.rule("OPS-3")
async def test_the_overall_state_is_told_in_figures(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    failing, failed = Deliveries(), Counts()
    failing.record(Metric.FAILURE, now=0.0)
    failed.record(Metric.FAILURE, now=0.0)
    router.made = replace(
        router.made,
        queues=(
            QueueState(name="a", counts=Counts(), now=0.0),
            QueueState(name="b", counts=failed, now=0.0),
        ),
        active_pools=(
            PoolState(code="A", deliveries=failing, now=0.0),
            PoolState(code="B", deliveries=Deliveries(), now=0.0),
        ),
        pool_count=5,
        open_breakers=1,
    )
    router.warnings.add(Code.ROUTING, Severity.WARN, "s", "m", NOW)
    router.warnings.add(Code.POOL_LIMIT, Severity.CRITICAL, "s", "m", NOW)

    answer = await api.get("/monitoring/health")

    assert answer.status_code == 200
    assert answer.json() == {
        "status": "DEGRADED",
        "timestamp": TIMESTAMP,
        "uptimeMillis": 12346,
        "details": {
            "totalQueues": 2,
            "healthyQueues": 1,
            "totalPools": 5,
            "healthyPools": 4,
            "activeWarnings": 2,
            "criticalWarnings": 1,
            "circuitBreakersOpen": 1,
            "degradationReason": "critical warnings that need a look: 1",
        },
    }


@pytest.mark.rule("OPS-3")
async def test_a_healthy_router_has_no_reason_to_tell(api: httpx.AsyncClient) -> None:
    told = (await api.get("/monitoring/health")).json()

    assert (told["status"], told["details"]["degradationReason"]) == ("HEALTHY", None)


@pytest.mark.rule("OPS-3")
async def test_queues_are_told_by_name_with_their_windows(api: httpx.AsyncClient) -> None:
    answer = await api.get("/monitoring/queue-stats")

    told = answer.json()["orders"]
    assert answer.headers["content-type"] == "application/json"
    assert [told[total] for total in QUEUE_TOTALS] == [10, 6, 2, 1]
    assert [told[f"{total}5min"] for total in QUEUE_TOTALS] == [0, 0, 0, 0]
    assert [told[f"{total}30min"] for total in QUEUE_TOTALS] == [2, 1, 1, 0]
    rates = [told[f"successRate{window}"] for window in ("", "5min", "30min")]
    assert rates == [0.75, 1.0, 0.5]
    speeds = [told[f"throughput{window}"] for window in ("", "5min", "30min")]
    assert speeds == [0.5, 0.0, 0.333]
    assert (told["name"], told["currentSize"]) == ("orders", 37)
    assert (told["pendingMessages"], told["messagesNotVisible"]) == (25, 12)
    assert told["partitionOf"] is None
    assert len(told) == 25


@pytest.mark.rule("OPS-3")
async def test_what_a_broker_does_not_tell_is_unknown_rather_than_zero(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    router.depth = None

    told = (await api.get("/monitoring/queue-stats")).json()["orders"]

    sizes = told["currentSize"], told["pendingMessages"], told["messagesNotVisible"]
    assert sizes == (None, None, None)


@pytest.mark.rule("OPS-3")
async def test_pools_are_told_by_code_with_their_windows_and_percentiles(
    api: httpx.AsyncClient,
) -> None:
    told = (await api.get("/monitoring/pool-stats")).json()["POOL-A"]

    assert [told[total] for total in POOL_TOTALS] == [9, 6, 2, 1, 4]
    assert [told[f"{total}5min"] for total in POOL_TOTALS] == [0, 0, 0, 0, 0]
    assert [told[f"{total}30min"] for total in POOL_TOTALS] == [2, 1, 1, 0, 0]
    rates = [told[f"successRate{window}"] for window in ("", "5min", "30min")]
    assert rates == [0.75, 1.0, 0.5]
    times = [told[name] for name in ("averageProcessingTimeMs", "p50Ms", "p95Ms", "p99Ms")]
    assert times == [500.0, 250.0, 1500.0, 2000.1]
    assert (told["p99Ms5min"], told["averageProcessingTimeMs30min"]) == (0.0, 0.0)
    assert (told["activeWorkers"], told["availablePermits"], told["maxConcurrency"]) == (3, 7, 10)
    assert (told["queueSize"], told["maxQueueCapacity"], told["messageGroups"]) == (5, 200, 4)
    assert (told["poolCode"], len(told)) == ("POOL-A", 37)


@pytest.mark.rule("P5")
async def test_a_thousand_pools_are_told_in_steps(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    router.pool_codes = [f'"{n}' for n in range(1000)]

    told = (await api.get("/monitoring/pool-stats")).json()

    assert list(told) == router.pool_codes


@pytest.mark.parametrize(
    ("body", "change"),
    [
        ({"concurrency": 20}, PoolSetting(concurrency=20)),
        ({"rateLimitPerMinute": 60}, PoolSetting(rate_per_minute=60)),
        (
            {"concurrency": 1, "rateLimitPerMinute": None, "comment": "ignored"},
            PoolSetting(concurrency=1, rate_per_minute=None),
        ),
        ({"rateLimitPerMinute": 0}, PoolSetting(rate_per_minute=None)),
        ({"rateLimitPerMinute": -1}, PoolSetting(rate_per_minute=None)),
        ({"concurrency": None, "rateLimitPerMinute": 5}, PoolSetting(rate_per_minute=5)),
    ],
)
@pytest.mark.rule("POOL-6")
async def test_a_pool_is_changed_as_asked(
    api: httpx.AsyncClient, router: HandMadeRouter, body: object, change: PoolSetting
) -> None:
    answer = await api.put("/monitoring/pools/POOL-A", json=body)

    assert (answer.status_code, answer.json()["poolCode"]) == (200, "POOL-A")
    assert router.controls.changes == [("POOL-A", change)]


@pytest.mark.rule("OPS-3")
def test_a_change_says_what_it_leaves_alone() -> None:
    assert PoolSetting(concurrency=3).rate_per_minute is UNSET


@pytest.mark.rule("OPS-3")
async def test_a_pools_code_in_a_path_is_percent_encoded(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    path = f"/monitoring/pools/{quote('EU/ä', safe='')}"

    answer = await api.put(path, json={"concurrency": 2})

    assert answer.status_code == 200
    assert router.controls.changes == [("EU/ä", PoolSetting(concurrency=2))]


@pytest.mark.rule("OPS-3")
async def test_an_unknown_pool_is_not_found(api: httpx.AsyncClient) -> None:
    answer = await api.put("/monitoring/pools/NONE", json={"concurrency": 2})

    assert_problem(answer, 404, "no such pool")


@pytest.mark.rule("OPS-3")
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[]",
        b"{",
        b'{"concurrency": 0}',
        b'{"concurrency": -1}',
        b'{"concurrency": 10001}',
        b'{"concurrency": 1.5}',
        b'{"concurrency": "5"}',
        b'{"concurrency": true}',
        b'{"rateLimitPerMinute": "5"}',
        b'{"rateLimitPerMinute": 60000001}',
    ],
)
async def test_what_no_pool_can_be_is_refused(
    api: httpx.AsyncClient, router: HandMadeRouter, body: bytes
) -> None:
    answer = await api.put("/monitoring/pools/POOL-A", content=body)

    assert_problem(answer, 422)
    assert router.controls.changes == []


@pytest.mark.rule("MED-4")
async def test_breakers_are_told_by_origin(api: httpx.AsyncClient) -> None:
    told = (await api.get("/monitoring/circuit-breakers")).json()

    assert told == {
        ORIGIN: {
            "name": ORIGIN,
            "state": "HALF_OPEN",
            "successfulCalls": 9,
            "failedCalls": 5,
            "rejectedCalls": 3,
            "failureRate": 0.25,
            "bufferedCalls": 4,
            "bufferSize": 10,
            "openSince": "2027-01-15T08:00:00.000Z",
            "fault": "network",
        }
    }


@pytest.mark.rule("MED-4")
async def test_a_breaker_is_reset_by_its_percent_encoded_name(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    name = quote(ORIGIN, safe="")

    answer = await api.post(f"/monitoring/circuit-breakers/{name}/reset")

    assert (answer.status_code, answer.json()) == (200, {"reset": 1})
    assert router.controls.resets == [ORIGIN]


@pytest.mark.rule("MED-4")
async def test_an_unknown_breaker_is_not_found(api: httpx.AsyncClient) -> None:
    answer = await api.post("/monitoring/circuit-breakers/http%3A%2F%2Fother/reset")

    assert_problem(answer, 404, "no such circuit breaker")


@pytest.mark.rule("MED-4")
async def test_all_breakers_are_reset_at_once(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    answer = await api.post("/monitoring/circuit-breakers/reset-all")

    assert answer.json() == {"reset": 2}
    assert router.controls.resets == ["*"]


@pytest.mark.rule("OPS-3", "GATE-2")
async def test_targets_are_told_with_what_holds_their_messages_back(
    api: httpx.AsyncClient,
) -> None:
    answer = await api.get("/monitoring/targets")

    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == [
        {
            "origin": ORIGIN,
            "openRequests": 2,
            "limit": 3,
            "silentUntil": "2027-01-15T08:00:30.000Z",
            "circuit": "HALF_OPEN",
            "openSince": "2027-01-15T08:00:00.000Z",
            "fault": "network",
            "retryAt": "2027-01-15T08:00:05.000Z",
            "refusals": 4,
            "waitingMessages": 7,
        }
    ]


@pytest.mark.rule("OPS-3", "GATE-2")
def test_a_target_that_takes_everything_has_no_limit_and_no_times() -> None:
    free = TargetState(origin=ORIGIN, circuit=Circuit(name=ORIGIN))

    told = TargetStats.model_validate(free).model_dump(by_alias=True)

    nothing = {name for name, value in told.items() if value is None}
    assert nothing == {"limit", "silentUntil", "openSince", "fault", "retryAt"}
    assert told["circuit"] == "CLOSED"


@pytest.mark.rule("GATE-2")
async def test_a_target_is_reset_by_its_percent_encoded_origin(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    answer = await api.post(f"/monitoring/targets/{quote(ORIGIN, safe='')}/reset")

    assert (answer.status_code, answer.json()) == (200, {"reset": 1})
    assert router.controls.resets == [f"target {ORIGIN}"]


@pytest.mark.rule("GATE-2")
async def test_an_unknown_target_is_not_found(api: httpx.AsyncClient) -> None:
    answer = await api.post("/monitoring/targets/http%3A%2F%2Fother/reset")

    assert_problem(answer, 404, "no such target")


@pytest.mark.rule("GATE-2")
async def test_all_targets_are_reset_at_once(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    answer = await api.post("/monitoring/targets/reset-all")

    assert answer.json() == {"reset": 3}
    assert router.controls.resets == ["targets"]


@pytest.mark.rule("CFG-1", "GATE-2")
async def test_readers_see_targets_and_reset_none(router: HandMadeRouter) -> None:
    async with calling(router, Access(host="::")) as api:
        seen = await api.get("/monitoring/targets")
        reset = await api.post("/monitoring/targets/reset-all")

    assert (seen.status_code, len(seen.json())) == (200, 1)
    assert_problem(reset, 403)
    assert router.controls.resets == []


@pytest.mark.rule("BRK-1")
async def test_each_connection_of_a_queue_is_told_on_its_own(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    one = ConsumerState(
        queue="one", healthy=False, restarts=2, since_poll=61.5, last_poll=NOW - 61.5
    )
    silent = ConsumerState(queue="two", healthy=True)
    polled = replace(silent, connection=2, since_poll=0.25, last_poll=NOW - 0.25)
    router.made = replace(router.made, consumers=(one, silent, polled))

    told = (await api.get("/monitoring/consumer-health")).json()

    assert list(told) == ["one", "two#1", "two#2"]
    assert told["one"] == {
        "queue": "one",
        "connection": 1,
        "isHealthy": False,
        "lastPollTime": "2027-01-15T07:58:58.750Z",
        "timeSinceLastPollMs": 61500,
        "isRunning": True,
        "restarts": 2,
    }
    assert (told["two#1"]["lastPollTime"], told["two#1"]["timeSinceLastPollMs"]) == (None, None)
    assert told["two#2"]["lastPollTime"] == "2027-01-15T08:00:00.000Z"


@pytest.mark.rule("CFG-9")
async def test_a_router_without_a_standby_is_the_primary(api: httpx.AsyncClient) -> None:
    told = (await api.get("/monitoring/standby-status")).json()

    assert told == {
        "standbyEnabled": False,
        "instanceId": "router-1",
        "role": "PRIMARY",
        "lockHolder": None,
        "lastRefresh": None,
    }


@pytest.mark.rule("CFG-9")
async def test_a_standby_tells_who_holds_the_lock(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    standby = StandbyStatus(
        enabled=True, instance="b", primary=False, lock_holder="a", last_refresh=NOW
    )
    router.made = replace(router.made, standby=standby)

    told = (await api.get("/monitoring/standby-status")).json()

    assert (told["role"], told["lockHolder"], told["lastRefresh"]) == ("STANDBY", "a", TIMESTAMP)


@pytest.mark.rule("CFG-10")
async def test_the_leases_of_queues_are_shown(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    none = (await api.get("/monitoring/leases")).json()
    leases = (
        LeaseState(queue="orders", phase="HELD", holder="a", fence=7, last_refresh=NOW),
        LeaseState(queue="bills", phase="WAITING", holder=None, fence=0),
    )
    router.made = replace(router.made, standby=StandbyStatus(instance="a", leases=leases))
    told = (await api.get("/monitoring/leases")).json()
    role = (await api.get("/monitoring/standby-status")).json()["role"]

    assert none == []
    assert told == [
        {"queue": "orders", "phase": "HELD", "holder": "a", "fence": 7, "lastRefresh": TIMESTAMP},
        {"queue": "bills", "phase": "WAITING", "holder": None, "fence": 0, "lastRefresh": None},
    ]
    assert role == "ACTIVE"


@pytest.mark.rule("CFG-10")
async def test_the_lease_of_a_queue_is_given_away(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    given = await api.post("/queues/a%2Fqueue/release")
    refused = await api.post("/queues/other/release")

    assert (given.status_code, given.json(), router.released) == (
        202,
        {"released": "a/queue"},
        ["a/queue"],
    )
    assert (refused.status_code, refused.json()["detail"]) == (
        409,
        "this router does not hold the lease of the queue",
    )


@pytest.mark.rule("OPS-3")
async def test_every_answer_is_described_with_an_example_that_fits_it(
    api: httpx.AsyncClient,
) -> None:
    described = (await api.get("/openapi.json")).json()["components"]["schemas"]

    for name in (
        "MonitoringHealth",
        "QueueStats",
        "PoolStats",
        "BreakerStats",
        "BreakersReset",
        "TargetStats",
        "TargetsReset",
        "ConsumerHealth",
        "StandbyView",
    ):
        assert set(described[name]["example"]) == set(described[name]["properties"]), name


@pytest.mark.rule("OPS-3")
async def test_the_change_of_a_pool_is_described_with_an_example(api: httpx.AsyncClient) -> None:
    paths = (await api.get("/openapi.json")).json()["paths"]

    body = paths["/monitoring/pools/{code}"]["put"]["requestBody"]["content"]["application/json"]
    assert set(body["example"]) == set(body["schema"]["properties"])


@pytest.mark.rule("TGT-6")
async def test_credentials_are_shown_without_their_secrets(api: httpx.AsyncClient) -> None:
    answer = await api.get("/monitoring/credentials")

    assert answer.json() == [
        {
            "name": "partner",
            "type": "oauth2",
            "hosts": ["api.partner.test"],
            "ok": True,
            "error": "",
            "uses": 12,
            "expiresAt": "2027-01-15T08:01:00.250Z",
            "certificateExpiresAt": None,
        },
        {
            "name": "bank",
            "type": "mtls",
            "hosts": ["api.bank.test:8443"],
            "ok": False,
            "error": "certFile and keyFile do not fit, or are not PEM",
            "uses": 0,
            "expiresAt": None,
            "certificateExpiresAt": "2027-01-15T08:00:00.000Z",
        },
    ]
