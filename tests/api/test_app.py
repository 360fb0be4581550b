import asyncio

import httpx
import pytest

from router.core.config import QueueConfig
from router.core.config_plan import Plan
from router.engine.dead_letters import REPLAYED_BEFORE
from tests.support.api import assert_problem
from tests.support.pace import longest_turn, slowdown

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("path", ["/nowhere", "/health/", "/docs", "/redoc", "/%2e%2e/etc"])
async def test_an_unknown_path_is_a_problem(api: httpx.AsyncClient, path: str) -> None:
    answer = await api.get(path)

    assert_problem(answer, 404)


@pytest.mark.parametrize(
    ("method", "path", "right"),
    [
        ("PUT", "/health", "GET"),
        ("PUT", "/messages", "GET, POST"),
        ("POST", "/messages/a/b", "DELETE, GET"),
        ("OPTIONS", "/warnings", "DELETE, GET"),
        ("PATCH", "/monitoring/pools/POOL-A", "PUT"),
    ],
)
async def test_a_wrong_method_is_a_problem_that_names_the_right_ones(
    api: httpx.AsyncClient, method: str, path: str, right: str
) -> None:
    answer = await api.request(method, path)

    assert_problem(answer, 405)
    assert answer.headers["allow"] == right


@pytest.mark.rule("P5")
async def test_a_first_scrape_has_no_other_routes_to_make_ready(api: httpx.AsyncClient) -> None:
    described = (await api.get("/openapi.json")).json()

    assert next(iter(described["paths"])) == "/metrics"


@pytest.mark.timing
@pytest.mark.rule("OPS-7", "P5")
async def test_the_description_is_made_without_holding_up_the_loop(api: httpx.AsyncClient) -> None:
    call = asyncio.create_task(api.get("/openapi.json"))
    longest = await longest_turn([call])

    assert call.result().status_code == 200
    assert longest < 0.25 * slowdown()


async def test_the_description_names_every_call_and_its_errors(api: httpx.AsyncClient) -> None:
    described = (await api.get("/openapi.json")).json()

    calls = {
        f"{method.upper()} {path}"
        for path, methods in described["paths"].items()
        for method in methods
    }
    assert calls == {
        "GET /health",
        "GET /health/live",
        "GET /health/ready",
        "GET /health/startup",
        "GET /warnings",
        "POST /warnings/{warning_id}/acknowledge",
        "POST /warnings/acknowledge-all",
        "DELETE /warnings",
        "DELETE /warnings/old",
        "POST /messages",
        "GET /messages",
        "GET /groups",
        "GET /groups/show",
        "POST /groups/release",
        "POST /groups/discard",
        "GET /messages/{message_id}",
        "DELETE /messages/{message_id}",
        "POST /batches",
        "POST /batches/{batch_id}/messages",
        "GET /batches/{batch_id}",
        "GET /schedules",
        "GET /dead-letters",
        "GET /dead-letters/{letter_id}",
        "POST /dead-letters/replay",
        "POST /dead-letters/{letter_id}/replay",
        "DELETE /dead-letters/{letter_id}",
        "GET /config",
        "POST /config/reload",
        "GET /events",
        "GET /metrics",
        "GET /monitoring/health",
        "GET /monitoring/queue-stats",
        "GET /monitoring/pool-stats",
        "PUT /monitoring/pools/{code}",
        "GET /monitoring/circuit-breakers",
        "GET /monitoring/credentials",
        "POST /monitoring/circuit-breakers/{name}/reset",
        "POST /monitoring/circuit-breakers/reset-all",
        "GET /monitoring/targets",
        "POST /monitoring/targets/{origin}/reset",
        "POST /monitoring/targets/reset-all",
        "POST /targets/test",
        "POST /queues/{name}/release",
        "GET /monitoring/consumer-health",
        "GET /monitoring/leases",
        "GET /monitoring/standby-status",
        "GET /monitoring/in-flight-messages",
        "POST /monitoring/in-flight-messages/check",
        "GET /monitoring/messages/{message_id}",
        "GET /monitoring/explain",
    }
    answers = described["paths"]["/dead-letters"]["get"]["responses"]
    assert set(answers) == {"200", "default"}
    assert "application/problem+json" in answers["default"]["content"]


async def test_the_example_of_a_reload_is_what_a_reload_answers(api: httpx.AsyncClient) -> None:
    orders, invoices = (
        QueueConfig(name=name, uri=f"sqs://{name}") for name in ("orders", "invoices")
    )
    plan = Plan(start=(orders,), keep=(invoices,))

    described = (await api.get("/openapi.json")).json()["components"]["schemas"]

    assert described["Reloaded"]["example"] == {"changes": plan.lines(), **plan.as_json()}


async def test_the_example_of_a_replay_is_what_a_replay_answers(api: httpx.AsyncClient) -> None:
    described = (await api.get("/openapi.json")).json()["components"]["schemas"]
    example = described["ReplayedMany"]["example"]

    assert example["reasons"] == {REPLAYED_BEFORE: example["skipped"]}
