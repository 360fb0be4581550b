import httpx
import pytest

from router.core.config import NOTHING
from router.core.config_document import as_document
from router.core.config_plan import Plan
from tests.support.api import HandMadeRouter, assert_problem

pytestmark = pytest.mark.anyio


@pytest.mark.rule("CFG-8")
async def test_the_applied_document_is_shown_with_its_source_and_time(
    api: httpx.AsyncClient,
) -> None:
    answer = await api.get("/config")

    assert answer.json() == {
        "queues": [{"queueName": "orders", "queueUri": "memory://orders"}],
        "processingPools": [{"code": "POOL-A", "concurrency": 10}],
        "replyQueues": [],
        "schedules": [],
        "targets": [],
        "lastSync": "2027-01-15T07:59:00.250Z",
        "sources": [
            {
                "name": "https://***@config/",
                "lastSuccess": "2027-01-15T07:59:00.250Z",
                "error": "",
            }
        ],
    }


@pytest.mark.rule("CFG-8")
async def test_a_reload_answers_what_it_changed(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    answer = await api.post("/config/reload")

    assert answer.status_code == 200
    assert answer.json() == {"changes": router.plan.lines(), **router.plan.as_json()}
    assert answer.json()["queues"]["started"] == ["orders"]


@pytest.mark.rule("CFG-8")
async def test_a_reload_may_change_nothing(api: httpx.AsyncClient, router: HandMadeRouter) -> None:
    router.plan = Plan()

    answer = await api.post("/config/reload")

    assert answer.json()["changes"] == []


@pytest.mark.rule("CFG-8")
async def test_a_reload_that_failed_tells_why_without_secrets(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    router.sync_failure = "https://user:hidden@config/?token=hidden: HTTP 500"

    answer = await api.post("/config/reload")

    assert_problem(answer, 502, "https://***@config/?***")


@pytest.mark.rule("CFG-8")
def test_a_document_has_the_keys_that_the_view_expects() -> None:
    assert set(as_document(NOTHING)) == {"queues", "processingPools"}
