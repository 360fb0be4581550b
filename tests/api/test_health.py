import httpx
import pytest
from msgspec.structs import replace

from router import __version__
from router.core.state import ConsumerState, RouterState, StandbyStatus
from router.core.warnings import Code, Severity
from tests.support.api import NOW, HandMadeRouter, assert_problem

pytestmark = pytest.mark.anyio

STARTED = RouterState(initialized=True)
DEAD = ConsumerState(queue="q", healthy=False)
TIMESTAMP = "2027-01-15T08:00:00.250Z"


@pytest.mark.rule("OPS-3")
async def test_a_healthy_router_tells_everything_about_itself(api: httpx.AsyncClient) -> None:
    answer = await api.get("/health")

    assert answer.status_code == 200
    assert answer.json() == {
        "healthy": True,
        "status": "HEALTHY",
        "message": "healthy",
        "issues": [],
        "version": __version__,
        "uptimeSeconds": 12.346,
        "role": "PRIMARY",
    }


@pytest.mark.rule("OPS-3")
async def test_a_router_that_cannot_do_its_work_answers_503(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    router.made = RouterState(initialized=False)

    answer = await api.get("/health")

    assert answer.status_code == 503
    assert (answer.json()["healthy"], answer.json()["status"]) == (False, "DEGRADED")
    assert answer.json()["issues"] == ["not initialized yet"]


@pytest.mark.rule("OPS-3")
async def test_a_standby_says_that_it_is_one(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    router.made = replace(router.made, standby=StandbyStatus(primary=False))

    answer = await api.get("/health")

    assert answer.status_code == 200
    assert answer.json()["role"] == "STANDBY"


@pytest.mark.rule("OPS-2")
async def test_a_critical_warning_degrades_without_failing(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    router.warnings.add(Code.POOL_LIMIT, Severity.CRITICAL, "QueueManager", "too many", NOW)

    answer = await api.get("/health")

    assert answer.status_code == 200
    assert answer.json()["status"] == "DEGRADED"


@pytest.mark.rule("OPS-3")
async def test_live_always_answers(api: httpx.AsyncClient, router: HandMadeRouter) -> None:
    router.made = RouterState(initialized=False, shutting_down=True)

    answer = await api.get("/health/live")

    assert answer.status_code == 200
    assert answer.json() == {"status": "ALIVE", "timestamp": TIMESTAMP, "issues": []}


@pytest.mark.rule("OPS-3")
@pytest.mark.parametrize(
    ("path", "state", "issues"),
    [
        ("ready", STARTED, []),
        ("ready", replace(STARTED, shutting_down=True), ["shutting down"]),
        ("ready", replace(STARTED, consumers=(DEAD,)), ["every consumer is unhealthy"]),
        ("startup", replace(STARTED, consumers=(DEAD,)), []),
        ("startup", RouterState(initialized=False), ["not initialized yet"]),
    ],
)
async def test_probes_tell_whether_and_why_not(
    api: httpx.AsyncClient, router: HandMadeRouter, path: str, state: RouterState, issues: list[str]
) -> None:
    router.made = state

    answer = await api.get(f"/health/{path}")

    assert answer.status_code == (503 if issues else 200)
    status = "NOT_READY" if issues else "READY"
    assert answer.json() == {"status": status, "timestamp": TIMESTAMP, "issues": issues}


@pytest.mark.rule("OPS-3")
async def test_head_answers_like_get_without_a_body(api: httpx.AsyncClient) -> None:
    answer = await api.head("/health")

    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.content == b""


@pytest.mark.rule("OPS-3")
async def test_a_failure_inside_is_a_problem_that_tells_no_secrets(
    api: httpx.AsyncClient, router: HandMadeRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> RouterState:
        raise RuntimeError("password=hidden")

    monkeypatch.setattr(router, "state", fail)

    answer = await api.get("/health")

    assert_problem(answer, 500)
    assert "hidden" not in answer.text
