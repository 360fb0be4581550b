"""`groups`: list, show, release and discard groups of strict queues."""

import pytest

from tests.cli.conftest import Run
from tests.support.fake_router import FakeRouter

GROUP = {
    "queue": "orders",
    "pool": "P",
    "group": "order-1",
    "messages": 3,
    "messageId": "m-1",
    "since": "2026-01-31T08:15:30Z",
    "held": True,
    "delivering": False,
    "nextTry": None,
    "failures": 2,
    "error": "HTTP 422",
}
NAMED = ("--queue", "orders", "--pool", "P", "--group", "order-1")
DECIDED = {"queue": "orders", "pool": "P", "group": "order-1", "messageId": "m-1", "deadLetter": 17}


@pytest.mark.rule("ORD-14")
def test_groups_are_listed_a_line_each(run: Run, fake: FakeRouter) -> None:
    fake.answers("GET /groups", [GROUP], [])

    result = run("groups", "list", "--url", fake.url, "--held", "--queue", "orders")
    nothing = run("groups", "list", "--url", fake.url)

    assert result.stdout.split("\t")[:5] == ["orders", "P", "order-1", "3", "true"]
    assert result.stdout.endswith("HTTP 422\n")
    assert fake.calls[0].query["held"].lower() == "true"
    assert fake.calls[0].query["queue"] == "orders"
    assert nothing.stdout == ""


@pytest.mark.rule("ORD-14")
def test_groups_are_printed_for_programs(run: Run, fake: FakeRouter) -> None:
    fake.answers("GET /groups", [GROUP])
    fake.answers("GET /groups/show", {**GROUP, "deadLetter": 17, "messageIds": ["m-1", "m-2"]})

    assert '"order-1"' in run("groups", "list", "--url", fake.url, "--json").stdout
    assert '"m-2"' in run("groups", "show", *NAMED, "--url", fake.url, "--json").stdout


@pytest.mark.rule("ORD-14")
def test_one_group_is_shown_field_by_field(run: Run, fake: FakeRouter) -> None:
    fake.answers("GET /groups/show", {**GROUP, "deadLetter": 17, "messageIds": ["m-1", "m-2"]})

    result = run("groups", "show", *NAMED, "--url", fake.url)

    assert "deadLetter" in result.stdout
    assert fake.calls[0].query == {"queue": "orders", "pool": "P", "group": "order-1"}


@pytest.mark.rule("ORD-14")
def test_a_group_is_released_or_discarded(run: Run, fake: FakeRouter) -> None:
    fake.answers("POST /groups/release", {**DECIDED, "deadLetter": None})
    fake.answers("POST /groups/discard", DECIDED)

    released = run("groups", "release", *NAMED, "--url", fake.url)
    discarded = run("groups", "discard", *NAMED, "--url", fake.url)

    assert released.stdout == "released: message m-1\n"
    assert discarded.stdout == "discarded: message m-1, dead letter 17\n"
    assert [call.query for call in fake.calls] == [
        {"queue": "orders", "pool": "P", "group": "order-1"}
    ] * 2


@pytest.mark.rule("ORD-14")
def test_a_group_that_is_not_held_is_refused_in_words(run: Run, fake: FakeRouter) -> None:
    fake.refuses("POST /groups/release", 409, "no dead letter holds this group")

    result = run("groups", "release", *NAMED, "--url", fake.url)

    assert result.exit_code == 1
    assert "no dead letter holds this group" in result.stderr
