"""`messages`: what a queue has, page by page (CMD-2)."""

import json
from typing import Any

import pytest

from tests.cli.conftest import Run
from tests.support.fake_router import FakeRouter


def found(name: str, **fields: Any) -> dict[str, Any]:
    row = {"id": name, "queue": "orders", "state": "READY", "failures": 0, "requests": 0}
    return {**row, "createdAt": "2026-01-31T08:15:30.123Z", "error": None, **fields}


@pytest.mark.rule("CMD-2")
def test_messages_are_listed_a_line_each(run: Run, fake: FakeRouter) -> None:
    error = {"code": "HTTP_404", "message": "no\x1b[31m", "httpStatus": 404}
    items = [found("b", state="FAILED", error=error), found("a", group="g")]
    fake.answers("GET /messages", {"items": items, "next": None})

    result = run("messages", "--queue", "orders", "--state", "failed", "--url", fake.url)

    assert result.exit_code == 0
    assert result.output == (
        "b\torders\tFAILED\t-\t-\t2026-01-31T08:15:30.123Z\t-\t-\t0\t0\tHTTP_404: no [31m\n"
        "a\torders\tREADY\t-\tg\t2026-01-31T08:15:30.123Z\t-\t-\t0\t0\t-\n"
    )
    assert fake.calls[0].query == {"queue": "orders", "state": "FAILED", "limit": "100"}


@pytest.mark.rule("CMD-2")
def test_pages_are_fetched_until_there_are_as_many_as_asked_for(run: Run, fake: FakeRouter) -> None:
    fake.answers(
        "GET /messages",
        {"items": [found("d")], "next": "30"},
        {"items": [], "next": "20"},
        {"items": [found("c")], "next": "10"},
    )

    result = run("messages", "--limit", "2", "--group", "g", "--json", "--url", fake.url)

    page = json.loads(result.output)
    assert ([each["id"] for each in page["items"]], page["next"]) == (["d", "c"], "10")
    assert [call.query for call in fake.calls] == [
        {"group": "g", "limit": "2"},
        {"group": "g", "limit": "1", "cursor": "30"},
        {"group": "g", "limit": "1", "cursor": "20"},
    ]


@pytest.mark.rule("CMD-2")
def test_the_cursor_of_the_next_page_is_shown(run: Run, fake: FakeRouter) -> None:
    fake.answers("GET /messages", {"items": [found("b")], "next": "7"})

    result = run("messages", "--limit", "1", "--cursor", "9", "--url", fake.url)

    assert "There are more: --cursor 7" in result.stderr
    assert fake.calls[0].query["cursor"] == "9"


@pytest.mark.rule("CMD-2")
def test_a_state_that_there_is_not_is_wrong_usage(run: Run, fake: FakeRouter) -> None:
    result = run("messages", "--state", "lost", "--url", fake.url)

    assert result.exit_code == 2
    assert "SCHEDULED" in result.stderr
