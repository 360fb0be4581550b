import json

import pytest

from tests.cli.conftest import Run
from tests.support.fake_router import FakeRouter

LETTER = {
    "id": 17,
    "messageId": "m-1",
    "queue": "orders",
    "pool": None,
    "target": "http://t/",
    "reason": "CONFIG_ERROR",
    "httpStatus": 404,
    "error": "HTTP 404",
    "deadAt": "2026-01-31T08:15:30Z",
    "failures": 2,
    "requests": 6,
}


@pytest.mark.rule("DLQ-2")
def test_letters_are_listed_a_line_each_with_the_way_to_the_next_page(
    run: Run, fake: FakeRouter
) -> None:
    fake.answers("GET /dead-letters", {"items": [LETTER], "next": "16"})

    result = run("dead-letters", "list", "--url", fake.url)

    line = (
        "17\t2026-01-31T08:15:30Z\tCONFIG_ERROR\torders\t-\tm-1\t404\thttp://t/\t2\t6\tHTTP 404\n"
    )
    assert result.stdout == line
    assert result.stderr == "There are more: --cursor 16\n"


@pytest.mark.rule("DLQ-2")
def test_filters_reach_the_router(run: Run, fake: FakeRouter) -> None:
    fake.answers("GET /dead-letters", {"items": [], "next": None})

    run(
        *("dead-letters", "list", "--url", fake.url, "--json"),
        *("--queue", "a b", "--reason", "malformed", "--limit", "5", "--cursor", "9"),
    )

    assert fake.calls[0].query == {
        "queue": "a b",
        "reason": "MALFORMED",
        "limit": "5",
        "cursor": "9",
    }


@pytest.mark.rule("DLQ-2")
def test_one_letter_is_shown_field_by_field(run: Run, fake: FakeRouter) -> None:
    fake.answers("GET /dead-letters/17", {"id": 17, "reply": "no\nway"})

    result = run("dead-letters", "show", "17", "--url", fake.url)

    assert result.output == "id     17\nreply  no way\n"


@pytest.mark.rule("DLQ-2")
def test_one_letter_can_be_shown_as_json(run: Run, fake: FakeRouter) -> None:
    fake.answers("GET /dead-letters/17", LETTER)

    result = run("dead-letters", "show", "17", "--json", "--url", fake.url)

    assert json.loads(result.output) == LETTER


@pytest.mark.rule("DLQ-2")
def test_a_refused_replay_does_not_keep_the_others_from_theirs(run: Run, fake: FakeRouter) -> None:
    fake.answers("POST /dead-letters/1/replay", {"replayed": 1})
    fake.refuses("POST /dead-letters/2/replay", 409, "replayed before")
    fake.answers("POST /dead-letters/3/replay", {"replayed": 1})

    result = run("dead-letters", "replay", "1", "2", "3", "--url", fake.url)

    assert result.exit_code == 1
    assert [call.what[-8] for call in fake.calls] == ["1", "2", "3"]
    assert "2: the router refused (409): replayed before" in result.stderr
    assert "1 of 3 were refused" in result.stderr


@pytest.mark.rule("DLQ-2")
def test_a_second_replay_needs_force(run: Run, fake: FakeRouter) -> None:
    fake.answers("POST /dead-letters/1/replay", {"replayed": 1})

    result = run("dead-letters", "replay", "1", "--force", "--url", fake.url)

    assert result.output == "replayed 1\n"
    assert fake.calls[0].query == {"force": "true"}


@pytest.mark.rule("DLQ-2")
def test_many_are_replayed_by_filter_or_only_counted(run: Run, fake: FakeRouter) -> None:
    report = {"replayed": 4, "skipped": 2, "reasons": {"replayed before": 2}}
    fake.answers("POST /dead-letters/replay", report)

    result = run("dead-letters", "replay", "--all", "--pool", "A", "--dry-run", "--url", fake.url)

    assert result.stdout == "would replay 4\n"
    assert result.stderr == "left out 2: replayed before\n"
    assert fake.calls[0].query == {"pool": "A", "dryRun": "true", "force": "false"}


@pytest.mark.rule("DLQ-2")
def test_one_is_replayed_to_another_queue(run: Run, fake: FakeRouter) -> None:
    fake.answers("POST /dead-letters/1/replay", {"replayed": 1})

    result = run("dead-letters", "replay", "1", "--to", "a b", "--url", fake.url)

    assert result.output == "replayed 1\n"
    assert fake.calls[0].query == {"to": "a b"}


@pytest.mark.rule("DLQ-2")
def test_letters_are_replayed_to_another_target(run: Run, fake: FakeRouter) -> None:
    fake.answers("POST /dead-letters/1/replay", {"replayed": 1})
    change = ("--target-from", "https://a", "--target-to", "https://b", "--keep-secrets")

    result = run("dead-letters", "replay", "1", *change, "--url", fake.url)
    half = run("dead-letters", "replay", "1", *change[:2], "--url", fake.url)

    assert result.output == "replayed 1\n"
    assert fake.calls[0].query == {
        "targetFrom": "https://a",
        "targetTo": "https://b",
        "keepSecrets": "true",
    }
    assert half.exit_code == 2
    assert "give both --target-from and --target-to" in half.stderr


@pytest.mark.rule("DLQ-2")
def test_many_are_replayed_to_another_queue(run: Run, fake: FakeRouter) -> None:
    fake.answers("POST /dead-letters/replay", {"replayed": 4})

    run("dead-letters", "replay", "--all", "--queue", "old", "--to", "new", "--url", fake.url)

    assert fake.calls[0].query == {
        "queue": "old",
        "to": "new",
        "dryRun": "false",
        "force": "false",
    }


@pytest.mark.rule("DLQ-2")
def test_those_named_are_replayed_oldest_first_and_no_further_than_a_failure(
    run: Run, fake: FakeRouter
) -> None:
    fake.answers("POST /dead-letters/9/replay", {"replayed": 1})
    fake.refuses("POST /dead-letters/10/replay", 502, "reset")

    result = run("dead-letters", "replay", "10", "11", "9", "--url", fake.url)

    assert result.exit_code == 1
    assert "stopped at 10: the router refused (502): reset" in result.stderr
    assert [call.what for call in fake.calls] == [
        "POST /dead-letters/9/replay",
        "POST /dead-letters/10/replay",
    ]


@pytest.mark.rule("DLQ-2")
@pytest.mark.parametrize("words", [[], ["1", "--all"], ["1", "--pool", "A"], ["1", "--dry-run"]])
def test_what_to_replay_must_be_clear(run: Run, words: list[str]) -> None:
    result = run("dead-letters", "replay", *words)

    assert result.exit_code == 2


@pytest.mark.rule("DLQ-2")
def test_discarding_asks_first(run: Run, fake: FakeRouter) -> None:
    result = run("dead-letters", "discard", "1", "--url", fake.url, stdin=b"n\n")

    assert result.exit_code == 1
    assert fake.calls == []


@pytest.mark.rule("DLQ-2")
def test_an_id_cannot_lead_elsewhere(run: Run, fake: FakeRouter) -> None:
    fake.answers("DELETE /dead-letters/..%2Fwarnings", {})

    result = run("dead-letters", "discard", "../warnings", "--yes", "--url", fake.url)

    assert result.output == "discarded 1\n"
