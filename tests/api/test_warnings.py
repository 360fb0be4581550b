import httpx
import pytest

from router.core.warnings import Code, Notice, Severity
from tests.support.api import NOW, HandMadeRouter, assert_problem

pytestmark = pytest.mark.anyio


def warn(router: HandMadeRouter, message: str, *, ago: float = 0.0) -> Notice:
    return router.warnings.add(Code.QUEUE_FULL, Severity.WARN, "ProcessPool:A", message, NOW - ago)


async def listed(api: httpx.AsyncClient, query: str = "") -> list[str]:
    answer = await api.get(f"/warnings{query}")
    assert answer.status_code == 200
    return [warning["message"] for warning in answer.json()]


@pytest.mark.rule("OPS-2")
async def test_a_warning_is_shown_with_everything_known_of_it(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    warn(router, "full", ago=60)
    notice = warn(router, "full")

    answer = await api.get("/warnings")

    assert answer.json() == [
        {
            "id": notice.id,
            "code": "QUEUE_FULL",
            "category": "QUEUE_FULL",
            "severity": "WARN",
            "message": "full",
            "source": "ProcessPool:A",
            "timestamp": "2027-01-15T07:59:00.250Z",
            "lastSeen": "2027-01-15T08:00:00.250Z",
            "count": 2,
            "acknowledged": False,
        }
    ]


@pytest.mark.rule("OPS-2")
async def test_warnings_are_listed_newest_first_and_by_filter(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    router.warnings.acknowledge(warn(router, "known", ago=60).id)
    router.warnings.add(Code.POOL_LIMIT, Severity.CRITICAL, "QueueManager", "many", NOW)

    assert await listed(api) == ["many", "known"]
    assert await listed(api, "?severity=WARN") == ["known"]
    assert await listed(api, "?code=POOL_LIMIT") == ["many"]
    assert await listed(api, "?acknowledged=true") == ["known"]
    assert await listed(api, "?acknowledged=false&severity=&code=") == ["many"]


@pytest.mark.rule("OPS-2")
@pytest.mark.parametrize("query", ["severity=LOUD", "acknowledged=perhaps"])
async def test_a_wrong_filter_is_refused_by_name(api: httpx.AsyncClient, query: str) -> None:
    answer = await api.get(f"/warnings?{query}")

    assert_problem(answer, 422, f"`{query.partition('=')[0]}`")


@pytest.mark.rule("OPS-2")
async def test_one_warning_is_acknowledged(api: httpx.AsyncClient, router: HandMadeRouter) -> None:
    notice = warn(router, "full")

    answer = await api.post(f"/warnings/{notice.id}/acknowledge")

    assert answer.json() == {"acknowledged": 1}
    assert await listed(api, "?acknowledged=true") == ["full"]


@pytest.mark.rule("OPS-2")
async def test_an_unknown_warning_is_not_found(api: httpx.AsyncClient) -> None:
    answer = await api.post("/warnings/never/acknowledge")

    assert_problem(answer, 404, "no such warning")


@pytest.mark.rule("OPS-2")
async def test_all_warnings_are_acknowledged(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    warn(router, "a")
    warn(router, "b")

    answer = await api.post("/warnings/acknowledge-all")

    assert answer.json() == {"acknowledged": 2}


@pytest.mark.rule("OPS-2")
async def test_warnings_are_cleared(api: httpx.AsyncClient, router: HandMadeRouter) -> None:
    warn(router, "a")

    answer = await api.delete("/warnings")

    assert answer.json() == {"cleared": 1}
    assert await listed(api) == []


@pytest.mark.rule("OPS-2")
@pytest.mark.parametrize(("query", "left"), [("", ["h2", "h0"]), ("?hours=1", ["h0"])])
async def test_old_warnings_are_cleared(
    api: httpx.AsyncClient, router: HandMadeRouter, query: str, left: list[str]
) -> None:
    warn(router, "h2", ago=2 * 3600)
    warn(router, "h0")

    answer = await api.delete(f"/warnings/old{query}")

    assert answer.json() == {"cleared": 2 - len(left)}
    assert sorted(await listed(api), reverse=True) == left


@pytest.mark.rule("OPS-2")
@pytest.mark.parametrize("hours", ["-1", "nan", "inf", "1e999", "soon", ""])
async def test_an_age_that_is_none_is_refused(api: httpx.AsyncClient, hours: str) -> None:
    answer = await api.delete(f"/warnings/old?hours={hours}")

    assert_problem(answer, 422, "`hours`")


@pytest.mark.rule("OPS-5")
async def test_credentials_in_a_warning_are_masked(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    warn(router, "cannot reach amqp://user:hidden@host/")

    assert await listed(api) == ["cannot reach amqp://***@host/"]
