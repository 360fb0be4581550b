import json

import pytest

from tests.cli.conftest import Run
from tests.support.fake_router import FakeRouter

NOTICE = {
    "id": "7",
    "code": "QUEUE_FULL",
    "severity": "WARN",
    "message": "pool A is full\x1b[31m",
    "source": "QueueManager",
    "lastSeen": "2026-01-31T08:15:30Z",
    "count": 3,
}


@pytest.mark.rule("OPS-3")
def test_an_unhealthy_router_is_exit_code_1_with_its_issues(run: Run, fake: FakeRouter) -> None:
    health = {
        "healthy": False,
        "status": "DEGRADED",
        "message": "stuck",
        "issues": ["stuck", "pool A"],
    }
    fake.answers("GET /health", health, status=503)

    result = run("status", "--url", fake.url)

    assert result.exit_code == 1
    assert result.output == "DEGRADED  stuck\n  pool A\n"


@pytest.mark.rule("OPS-3")
def test_status_for_programs_is_the_routers_answer(run: Run, fake: FakeRouter) -> None:
    health = {"healthy": True, "status": "WARNING", "issues": []}
    fake.answers("GET /health", health)

    result = run("status", "--json", "--url", fake.url)

    assert json.loads(result.output) == health


@pytest.mark.rule("OPS-2")
def test_warnings_are_lines_in_a_pipe_and_cannot_steer_the_terminal(
    run: Run, fake: FakeRouter
) -> None:
    fake.answers("GET /warnings", [NOTICE])

    result = run("warnings", "--url", fake.url)

    line = "2026-01-31T08:15:30Z\tWARN\tQUEUE_FULL\tQueueManager\t3\tpool A is full [31m\n"
    assert result.output == line


@pytest.mark.rule("OPS-2")
@pytest.mark.parametrize(
    ("words", "query"),
    [
        ([], {"acknowledged": "false"}),
        (["--all"], {}),
        (["--severity", "error"], {"acknowledged": "false", "severity": "ERROR"}),
        (["--code", "ROUTING", "--all"], {"code": "ROUTING"}),
    ],
)
def test_warnings_can_be_chosen(
    run: Run, fake: FakeRouter, words: list[str], query: dict[str, str]
) -> None:
    fake.answers("GET /warnings", [])

    result = run("warnings", *words, "--json", "--url", fake.url)

    assert result.output == "[]\n"
    assert fake.calls[0].query == query
