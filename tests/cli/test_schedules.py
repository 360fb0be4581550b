"""`schedules`: what runs next (CMD-10)."""

import json

import pytest

from tests.cli.conftest import Run
from tests.cli.test_terminal import on_a_terminal
from tests.support.fake_router import FakeRouter

NIGHTLY = {
    "name": "nightly",
    "queue": "jobs",
    "cron": "30 2 * * *",
    "everySeconds": None,
    "timezone": "Europe/Berlin",
    "nextRun": "2027-01-15T01:30:00.000Z",
    "lastRun": None,
}
OFTEN = {**NIGHTLY, "name": "often", "cron": None, "everySeconds": 60, "timezone": "UTC"}


@pytest.mark.rule("CMD-10")
def test_each_schedule_is_a_line(run: Run, fake: FakeRouter) -> None:
    fake.answers("GET /schedules", [NIGHTLY, OFTEN])

    result = run("schedules", "--url", fake.url)

    assert result.exit_code == 0
    assert result.output == (
        "nightly\t30 2 * * *\tEurope/Berlin\tjobs\t2027-01-15T01:30:00.000Z\t-\n"
        "often\tevery 60 s\tUTC\tjobs\t2027-01-15T01:30:00.000Z\t-\n"
    )


@pytest.mark.rule("CMD-10")
def test_programs_get_the_answer_as_it_came(run: Run, fake: FakeRouter) -> None:
    fake.answers("GET /schedules", [NIGHTLY])

    assert json.loads(run("schedules", "--json", "--url", fake.url).output) == [NIGHTLY]


@pytest.mark.rule("CMD-10")
def test_people_get_a_table_or_are_told_that_there_are_none(fake: FakeRouter) -> None:
    fake.answers("GET /schedules", [OFTEN], [])

    table = on_a_terminal("schedules", "--url", fake.url)
    nothing = on_a_terminal("schedules", "--url", fake.url)

    assert "nextRun" in table
    assert "every 60 s" in table
    assert nothing == "No schedules.\n"


@pytest.mark.rule("CMD-10")
def test_a_router_that_refuses_is_a_failure(run: Run, fake: FakeRouter) -> None:
    fake.refuses("GET /schedules", 403, "set MESSAGE_ROUTER_AUTH_MODE")

    result = run("schedules", "--url", fake.url)

    assert result.exit_code == 1
    assert "MESSAGE_ROUTER_AUTH_MODE" in result.stderr
