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


@pytest.mark.rule("OPS-2")
@pytest.mark.parametrize("words", [[], ["list"]])
def test_warnings_are_lines_in_a_pipe_and_cannot_steer_the_terminal(
    run: Run, fake: FakeRouter, words: list[str]
) -> None:
    fake.answers("GET /warnings", [NOTICE])

    result = run("warnings", *words, "--url", fake.url)

    line = "7\t2026-01-31T08:15:30Z\tWARN\tQUEUE_FULL\tQueueManager\t3\tpool A is full [31m\n"
    assert result.output == line


@pytest.mark.rule("OPS-2")
@pytest.mark.parametrize(
    ("words", "query"),
    [
        ([], {"acknowledged": "false"}),
        (["--all"], {}),
        (["--severity", "error"], {"acknowledged": "false", "severity": "ERROR"}),
        (["--code", "ROUTING", "--all"], {"code": "ROUTING"}),
        (["list", "--code", "ROUTING"], {"acknowledged": "false", "code": "ROUTING"}),
    ],
)
def test_warnings_can_be_chosen(
    run: Run, fake: FakeRouter, words: list[str], query: dict[str, str]
) -> None:
    fake.answers("GET /warnings", [])

    result = run("warnings", *words, "--json", "--url", fake.url)

    assert result.output == "[]\n"
    assert fake.calls[0].query == query


@pytest.mark.rule("OPS-2")
def test_warnings_are_acknowledged_one_by_one(run: Run, fake: FakeRouter) -> None:
    fake.answers("POST /warnings/1-7/acknowledge", {"acknowledged": 1})
    fake.refuses("POST /warnings/1-8/acknowledge", 404, "there is no such warning")

    fine = run("warnings", "ack", "1-7", "--url", fake.url)
    partly = run("warnings", "ack", "1-8", "1-7", "--url", fake.url)

    assert fine.output == "acknowledged 1\n"
    assert partly.exit_code == 1
    assert "1-8: the router refused (404): there is no such warning" in partly.stderr
    assert len(fake.calls) == 3


@pytest.mark.rule("OPS-2")
def test_all_warnings_are_acknowledged_at_once(run: Run, fake: FakeRouter) -> None:
    fake.answers("POST /warnings/acknowledge-all", {"acknowledged": 5})

    assert run("warnings", "ack", "--all", "--url", fake.url).output == "acknowledged 5\n"


@pytest.mark.rule("OPS-2")
@pytest.mark.parametrize("words", [[], ["1-7", "--all"]])
def test_what_to_acknowledge_must_be_clear(run: Run, words: list[str]) -> None:
    assert run("warnings", "ack", *words).exit_code == 2


@pytest.mark.rule("OPS-2")
def test_clearing_all_asks_first(run: Run, fake: FakeRouter) -> None:
    fake.answers("DELETE /warnings", {"cleared": 3})

    refused = run("warnings", "clear", "--url", fake.url, stdin=b"n\n")
    asked = list(fake.calls)
    done = run("warnings", "clear", "--yes", "--url", fake.url)

    assert refused.exit_code == 1
    assert asked == []
    assert done.output == "cleared 3\n"


@pytest.mark.rule("OPS-2")
def test_old_warnings_are_cleared_without_a_question(run: Run, fake: FakeRouter) -> None:
    fake.answers("DELETE /warnings/old", {"cleared": 3})

    result = run("warnings", "clear", "--older-than", "1.5", "--url", fake.url)

    assert result.output == "cleared 3\n"
    assert fake.calls[0].query == {"hours": "1.5"}
