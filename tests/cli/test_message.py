"""`message`: one message, once or until it has ended (CMD-2)."""

import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from router.cli.kit import changes
from tests.cli.conftest import Run
from tests.support.fake_router import FakeRouter

WATCH = ("--watch", "--interval", "0.1")
FOUND: dict[str, Any] = {
    "id": "a/1",
    "queue": "orders",
    "state": "SUCCEEDED",
    "failures": 0,
    "requests": 1,
    "workerId": None,
    "payloadBytes": 17,
    "result": {"n": 1},
    "resultOmitted": False,
    "error": None,
}
ERROR = {"code": "HTTP_404", "message": "no\x1b[31m", "httpStatus": 404}


@pytest.mark.rule("CMD-2")
def test_the_state_and_the_result_are_shown(run: Run, fake: FakeRouter) -> None:
    fake.answers("GET /messages/a%2F1", FOUND)

    result = run("message", "a/1", "--queue", "orders", "--url", fake.url)

    assert result.exit_code == 0
    assert result.output == (
        "id            a/1\n"
        "queue         orders\n"
        "state         SUCCEEDED\n"
        "failures      0\n"
        "requests      1\n"
        "payloadBytes  17\n"
        'result        {"n":1}\n'
    )
    assert fake.calls[0].query == {"queue": "orders"}


@pytest.mark.rule("CMD-2")
def test_the_error_is_one_line(run: Run, fake: FakeRouter) -> None:
    fake.answers("GET /messages/a", {**FOUND, "state": "FAILED", "error": ERROR})

    result = run("message", "a", "--url", fake.url)

    assert result.exit_code == 0  # it was asked for, and shown
    assert "error         HTTP_404: no [31m\n" in result.output


@pytest.mark.rule("CMD-2")
def test_programs_get_the_answer_as_it_came(run: Run, fake: FakeRouter) -> None:
    fake.answers("GET /messages/a", FOUND)

    result = run("message", "a", "--json", "--url", fake.url)

    assert json.loads(result.output) == FOUND


@pytest.mark.rule("CMD-2")
def test_an_unknown_message_is_a_failure(run: Run, fake: FakeRouter) -> None:
    fake.refuses("GET /messages/a", 404, "nothing is known of it")

    result = run("message", "a", *WATCH, "--url", fake.url)

    assert (result.exit_code, result.stdout) == (1, "")
    assert "nothing is known of it" in result.stderr


@pytest.mark.rule("CMD-2")
def test_an_id_is_needed(run: Run) -> None:
    assert run("message").exit_code == 2


@pytest.mark.rule("CMD-2")
@pytest.mark.parametrize(("state", "code"), [("SUCCEEDED", 0), ("FAILED", 1), ("CANCELLED", 1)])
def test_watching_ends_when_the_message_does(
    run: Run, fake: FakeRouter, state: str, code: int
) -> None:
    waiting = {**FOUND, "state": "READY", "requests": 0}
    again = {
        **waiting,
        "requests": 1,
        "failures": 1,
        "error": {"code": "HTTP_503", "message": "busy"},
        "nextAttemptAt": "2027-01-15T08:00:00.250Z",
    }
    fake.answers("GET /messages/a", waiting, waiting, again, {**FOUND, "state": state})

    result = run("message", "a", *WATCH, "--url", fake.url)

    lines = result.output.splitlines()
    assert result.exit_code == code
    assert lines[:3] == [
        "READY\t0 requests, 0 failures",
        "READY\t1 requests, 1 failures\tHTTP_503: busy\tuntil 2027-01-15T08:00:00.250Z",
        "id            a/1",
    ]
    assert f"state         {state}" in lines


@pytest.mark.rule("CMD-2")
def test_watching_goes_on_while_the_router_is_restarted(run: Run, fake: FakeRouter) -> None:
    fake.answers("GET /messages/a", {**FOUND, "state": "READY"})
    for _ in range(2):
        fake.hangs_up("GET /messages/a")
    fake.answers("GET /messages/a", {**FOUND, "state": "SUCCEEDED"})

    result = run("message", "a", *WATCH, "--url", fake.url)

    assert result.exit_code == 0
    assert result.stderr.count("still waiting") == 1


@pytest.mark.rule("CMD-2")
def test_watching_does_not_wait_for_a_router_that_never_answered(run: Run) -> None:
    result = run("message", "a", *WATCH, "--url", "http://127.0.0.1:9")

    assert result.exit_code == 1
    assert "no router answers" in result.stderr


@pytest.mark.rule("CMD-2")
def test_programs_that_watch_get_a_line_for_each_change(run: Run, fake: FakeRouter) -> None:
    waiting = {**FOUND, "state": "IN_FLIGHT"}
    fake.answers("GET /messages/a", waiting, waiting, FOUND)

    result = run("message", "a", "--json", *WATCH, "--url", fake.url)

    assert [json.loads(line) for line in result.output.splitlines()] == [waiting, FOUND]


@pytest.mark.slow
@pytest.mark.rule("CMD-2")
def test_ctrl_c_ends_watching_without_a_word(fake: FakeRouter) -> None:
    fake.answers("GET /messages/a", {**FOUND, "state": "READY"})
    words = ["message", "a", *WATCH, "--url", fake.url]
    with subprocess.Popen(
        [sys.executable, "-m", "router", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "MESSAGE_ROUTER_API_TOKEN": ""},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"READY")
        process.send_signal(signal.SIGINT)
        rest = process.communicate(timeout=20)

    assert (process.returncode, *rest) == (130, b"", b"")


class _EndsBadly:
    """Python ignores what its end raises."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


@pytest.mark.rule("CMD-2")
def test_ctrl_c_is_not_lost_where_python_ignores_exceptions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ignored: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda each: ignored.append(each.exc_type))
    answers = []

    def ask() -> int:
        answers.append(_EndsBadly())
        answers.clear()
        return 1

    with pytest.raises(KeyboardInterrupt):
        list(changes(ask, 0.0))

    assert ignored == [KeyboardInterrupt]


@pytest.mark.rule("CMD-2", "CMD-13")
@pytest.mark.parametrize(
    ("options", "query", "status", "answer", "said"),
    [
        ((), {}, 200, {}, "cancelled\n"),
        (("--queue", "orders", "--running"), {"queue": "orders", "running": "true"}, 202,
         {"id": "a/1", "state": "IN_FLIGHT"}, "it is in flight, and ends as soon as that can be\n"),
    ],
)  # fmt: skip
def test_a_message_is_cancelled(  # noqa: PLR0917
    run: Run,
    fake: FakeRouter,
    options: tuple[str, ...],
    query: dict[str, str],
    status: int,
    answer: dict[str, str],
    said: str,
) -> None:
    fake.answers("DELETE /messages/a%2F1", answer, status=status)

    result = run("cancel", "a/1", *options, "--url", fake.url)

    assert (result.exit_code, result.output) == (0, said)
    assert fake.calls[0].query == query


@pytest.mark.rule("CMD-2", "CMD-13")
def test_what_cannot_be_cancelled_is_said(run: Run, fake: FakeRouter) -> None:
    fake.refuses("DELETE /messages/a", 409, "it is in flight: `running=true` stops it")

    result = run("cancel", "a", "--url", fake.url)

    assert result.exit_code == 1
    assert "it is in flight: `running=true` stops it" in result.output
