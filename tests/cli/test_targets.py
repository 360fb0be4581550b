"""`targets`: what holds messages back, and its reset (GATE-1, GATE-2, MED-4)."""

import json

import pytest

from tests.cli.conftest import Run
from tests.cli.test_terminal import on_a_terminal
from tests.support.fake_router import FakeRouter

ORIGIN = "https://svc.test:443"
IN_PATH = "https%3A%2F%2Fsvc.test%3A443"
FREE = {
    "origin": "http://free.test:80",
    "openRequests": 4,
    "limit": None,
    "silentUntil": None,
    "circuit": "CLOSED",
    "openSince": None,
    "fault": None,
    "retryAt": None,
    "refusals": 0,
    "waitingMessages": 0,
}
LIMITED = {
    **FREE,
    "origin": ORIGIN,
    "limit": 9,
    "silentUntil": "2027-01-15T08:00:30.000Z",
    "refusals": 31,
    "waitingMessages": 120,
}


@pytest.mark.rule("GATE-2")
def test_each_target_is_a_line(run: Run, fake: FakeRouter) -> None:
    fake.answers("GET /monitoring/targets", [LIMITED, FREE])

    result = run("targets", "--url", fake.url)

    assert result.exit_code == 0
    assert result.output == (
        f"{ORIGIN}\t4\t9\t120\t31\t2027-01-15T08:00:30.000Z\tCLOSED\t-\t-\t-\n"
        "http://free.test:80\t4\t-\t0\t0\t-\tCLOSED\t-\t-\t-\n"
    )


@pytest.mark.rule("GATE-2")
def test_programs_get_targets_as_they_came(run: Run, fake: FakeRouter) -> None:
    fake.answers("GET /monitoring/targets", [LIMITED])

    assert json.loads(run("targets", "--json", "--url", fake.url).output) == [LIMITED]


@pytest.mark.rule("GATE-2")
def test_people_get_a_table_of_targets_or_are_told_that_there_are_none(fake: FakeRouter) -> None:
    fake.answers("GET /monitoring/targets", [LIMITED], [])

    table = on_a_terminal("targets", "--url", fake.url)
    nothing = on_a_terminal("targets", "--url", fake.url)

    assert "silentUntil" in table
    assert ORIGIN in table
    assert nothing == "No target has been called yet.\n"


@pytest.mark.rule("GATE-2", "MED-4")
def test_targets_are_reset_one_by_one(run: Run, fake: FakeRouter) -> None:
    fake.answers(f"POST /monitoring/targets/{IN_PATH}/reset", {"reset": 1})
    fake.refuses("POST /monitoring/targets/other/reset", 404, "there is no such target")

    fine = run("targets", "reset", ORIGIN, "--url", fake.url)
    partly = run("targets", "reset", "other", ORIGIN, "--url", fake.url)

    assert fine.output == "reset 1\n"
    assert partly.exit_code == 1
    assert "other: the router refused (404): there is no such target" in partly.stderr
    assert len(fake.calls) == 3


@pytest.mark.rule("GATE-2", "MED-4")
def test_all_targets_are_reset_at_once(run: Run, fake: FakeRouter) -> None:
    fake.answers("POST /monitoring/targets/reset-all", {"reset": 5})

    assert run("targets", "reset", "--all", "--url", fake.url).output == "reset 5\n"


@pytest.mark.rule("GATE-2")
@pytest.mark.parametrize("words", [[], [ORIGIN, "--all"]])
def test_which_targets_to_reset_must_be_clear(run: Run, words: list[str]) -> None:
    assert run("targets", "reset", *words).exit_code == 2


TRIAL = {
    "id": "test-1",
    "url": "https://svc.test/hook",
    "entry": None,
    "verdict": "ACK",
    "outcome": "ACCEPTED",
    "status": 200,
    "detail": "",
    "requests": [
        {"method": "POST", "headers": ["X-A: ***"], "bodyBytes": 7, "timings": {"total": 5.0}}
    ],
    "reply": "ok",
}


@pytest.mark.rule("TGT-10")
def test_a_trial_shows_what_would_become_of_a_message(run: Run, fake: FakeRouter) -> None:
    fake.answers("POST /targets/test", TRIAL)

    result = run(
        "targets", "test", "https://svc.test/hook", "--payload", '{"n": 1}', "--url", fake.url
    )

    assert result.exit_code == 0
    assert "ACK" in result.output
    assert "request 1: POST, total 5.0 ms" in result.output
    assert "X-A: ***" in result.output
    assert fake.calls[-1].json == {"url": "https://svc.test/hook", "payload": {"n": 1}}


@pytest.mark.rule("TGT-10")
def test_a_trial_that_is_not_accepted_ends_with_exit_code_1(run: Run, fake: FakeRouter) -> None:
    fake.answers("POST /targets/test", {**TRIAL, "verdict": "RETRY"})

    result = run("targets", "test", "https://svc.test/hook", "--json", "--url", fake.url)

    assert result.exit_code == 1
    assert json.loads(result.output)["verdict"] == "RETRY"


@pytest.mark.rule("TGT-10")
def test_a_payload_that_is_not_json_is_a_usage_error(run: Run, fake: FakeRouter) -> None:
    result = run("targets", "test", "https://svc.test/", "--payload", "{", "--url", fake.url)

    assert result.exit_code == 2
    assert "--payload is not JSON" in result.output
