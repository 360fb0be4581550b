"""`batch`: publish many messages with a callback, and watch them end (CMD-4)."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run
from tests.cli.test_terminal import on_a_terminal
from tests.support.fake_router import FakeRouter

WATCH = ("--watch", "--interval", "0.1")
CALLBACK = '{"mediationTarget":"https://svc/done"}'
STATE: dict[str, Any] = {
    "id": "b/1",
    "queue": "jobs",
    "size": 4,
    "total": 4,
    "succeeded": 1,
    "failed": 0,
    "cancelled": 0,
    "pending": 3,
    "state": "RUNNING",
    "callbackPublishedAt": None,
}
DONE = {**STATE, "succeeded": 4, "pending": 0, "state": "COMPLETE", "callbackPublishedAt": "now"}


def line(message_id: str | None = None) -> str:
    named = {} if message_id is None else {"id": message_id}
    return json.dumps({**named, "mediationTarget": "http://t/"}) + "\n"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.ndjson"
    path.write_text("".join(line(f"m{number}") for number in range(2500)))
    return path


def takes(fake: FakeRouter, *accepted: int) -> None:
    fake.answers("POST /batches", {"id": "b/1", "accepted": 0}, status=202)
    for count in accepted:
        answer = {"id": "b/1", "accepted": count, "duplicates": 0}
        fake.answers("POST /batches/b%2F1/messages", answer, status=202)


@pytest.mark.rule("CMD-4")
def test_a_file_is_published_in_calls_of_a_thousand(run: Run, fake: FakeRouter, rows: Path) -> None:
    takes(fake, 1000, 1000, 500)

    result = run("batch", str(rows), "--callback", CALLBACK, "--id", "b/1", "--queue", "jobs",
                 "--url", fake.url)  # fmt: skip

    assert result.exit_code == 0
    assert result.stdout == "published 2500 messages as batch b/1\n"
    opening, *more = fake.calls
    assert opening.json == {"id": "b/1", "size": 2500, "callback": json.loads(CALLBACK)}
    assert [len(call.json) for call in more] == [1000, 1000, 500]
    assert {call.query["queue"] for call in fake.calls} == {"jobs"}


@pytest.mark.rule("CMD-4")
def test_the_callback_may_be_in_a_file(run: Run, fake: FakeRouter, tmp_path: Path) -> None:
    takes(fake, 2)
    path = tmp_path / "callback.json"
    path.write_text(CALLBACK)

    result = run("batch", "-", "--callback", str(path), "--id", "b/1", "--json", "--url", fake.url,
                 stdin=(line() + "\n" + line("x")).encode())  # fmt: skip

    assert json.loads(result.stdout) == {"id": "b/1", "accepted": 2}
    assert fake.calls[0].json["callback"] == json.loads(CALLBACK)
    assert [each["id"] for each in fake.calls[1].json] == ["b/1-1", "x"]


@pytest.mark.rule("CMD-4")
def test_a_new_batch_gets_an_id(run: Run, fake: FakeRouter) -> None:
    fake.answers("POST /batches", {}, status=202)

    result = run("batch", "-", "--callback", CALLBACK, "--url", fake.url, stdin=line("a").encode())

    batch_id = fake.calls[0].json["id"]
    assert len(batch_id) == 13
    assert fake.calls[1].what == f"POST /batches/{batch_id}/messages"
    assert result.exit_code == 1  # the stand-in knows no such path


@pytest.mark.rule("CMD-4")
def test_a_wrong_line_stops_all_before_anything_is_published(run: Run, fake: FakeRouter) -> None:
    result = run("batch", "-", "--callback", CALLBACK, "--url", fake.url,
                 stdin=(line("a") + "{}\n" + line("b")).encode())  # fmt: skip

    assert result.exit_code == 1
    assert result.stderr.startswith("line 2: ")
    assert "1 lines are wrong: nothing was published" in result.stderr
    assert fake.calls == []


@pytest.mark.rule("CMD-4")
def test_the_same_line_twice_is_one_member(run: Run, fake: FakeRouter) -> None:
    takes(fake, 1)

    result = run("batch", "-", "--callback", CALLBACK, "--id", "b/1", "--url", fake.url,
                 stdin=(line("a") * 3).encode())  # fmt: skip

    assert "2 lines repeat others" in result.stderr
    assert fake.calls[0].json["size"] == 1


@pytest.mark.rule("CMD-4")
def test_no_messages_are_no_batch(run: Run, fake: FakeRouter) -> None:
    result = run("batch", "-", "--callback", CALLBACK, "--url", fake.url, stdin=b"\n")

    assert (result.exit_code, fake.calls) == (1, [])
    assert "there are no messages" in result.stderr


@pytest.mark.rule("CMD-4")
def test_what_the_router_refuses_is_named_with_how_to_go_on(
    run: Run, fake: FakeRouter, rows: Path
) -> None:
    takes(fake, 1000)
    fake.refuses("POST /batches/b%2F1/messages", 422, "message 3: no", index=3)

    result = run("batch", str(rows), "--callback", CALLBACK, "--id", "b/1", "--url", fake.url)

    assert (result.exit_code, result.stdout) == (1, "")
    assert "line 1004: " in result.stderr
    assert "1000 of 2500 messages are in the batch" in result.stderr
    assert "run the same command with --id b/1" in result.stderr


@pytest.mark.rule("CMD-4")
def test_what_was_there_counts_when_it_goes_on(run: Run, fake: FakeRouter) -> None:
    takes(fake)
    answer = {"id": "b/1", "accepted": 1, "duplicates": 1}
    fake.answers("POST /batches/b%2F1/messages", answer, status=202)

    result = run("batch", "-", "--callback", CALLBACK, "--id", "b/1", "--url", fake.url,
                 stdin=(line("a") + line("b")).encode())  # fmt: skip

    assert result.stdout == "published 1 messages as batch b/1; 1 were published before\n"


@pytest.mark.rule("CMD-4")
def test_a_batch_that_cannot_be_published_says_how_to_go_on(run: Run, rows: Path) -> None:
    result = run("batch", str(rows), "--callback", CALLBACK, "--url", "http://127.0.0.1:9")

    assert result.exit_code == 1
    assert "0 of 2500 messages are in the batch" in result.stderr
    assert "run the same command with --id 0" in result.stderr  # the id that it was given


@pytest.mark.rule("CMD-4")
def test_another_batch_with_this_id_is_not_continued(run: Run, fake: FakeRouter) -> None:
    takes(fake)
    fake.refuses("POST /batches/b%2F1/messages", 409, "batch 'b/1' is full")

    result = run("batch", "-", "--callback", CALLBACK, "--id", "b/1", "--url", fake.url,
                 stdin=line("a").encode())  # fmt: skip

    assert result.stderr == "Error: the router refused (409): batch 'b/1' is full\n"


@pytest.mark.rule("CMD-4")
def test_a_file_without_a_callback_is_not_taken_for_an_id(run: Run, rows: Path) -> None:
    result = run("batch", str(rows))

    assert result.exit_code == 2
    assert "give a --callback" in result.stderr


@pytest.mark.rule("CMD-4")
@pytest.mark.parametrize(
    "words",
    [
        [],
        ["b", "--id", "b"],
        ["/no/such/file", "--callback", "{}"],
        ["-", "--callback", "{"],
        ["-", "--callback", "/no/such/file"],
        ["-", "--callback", '{"a":\xff}'],
        ["-", "--callback", '{"a":' * 100_000],
    ],
)
def test_wrong_usage(run: Run, words: list[str]) -> None:
    assert run("batch", *words, stdin=b"").exit_code == 2


@pytest.mark.rule("CMD-4")
def test_a_batch_is_shown(run: Run, fake: FakeRouter) -> None:
    fake.answers("GET /batches/b%2F1", STATE)

    shown = run("batch", "b/1", "--queue", "jobs", "--url", fake.url)
    as_json = run("batch", "b/1", "--json", "--url", fake.url)

    assert shown.exit_code == 0
    assert "state      RUNNING\n" in shown.output
    assert "callbackPublishedAt" not in shown.output
    assert json.loads(as_json.output) == STATE
    assert fake.calls[0].query == {"queue": "jobs"}


@pytest.mark.rule("CMD-4")
@pytest.mark.parametrize(("failed", "code"), [(0, 0), (1, 1)])
def test_watching_ends_when_the_batch_is_complete(
    run: Run, fake: FakeRouter, failed: int, code: int
) -> None:
    done = {**DONE, "succeeded": 4 - failed, "failed": failed}
    fake.answers("GET /batches/b", STATE, STATE, done)

    result = run("batch", "b", *WATCH, "--url", fake.url)

    assert result.exit_code == code
    lines = result.output.splitlines()
    assert lines[:2] == ["RUNNING\t1/4\t0 failed", f"COMPLETE\t4/4\t{failed} failed"]
    assert "state                COMPLETE" in lines


@pytest.mark.rule("CMD-4")
def test_programs_that_watch_get_a_line_for_each_change(run: Run, fake: FakeRouter) -> None:
    fake.answers("GET /batches/b", STATE, STATE, DONE)

    result = run("batch", "b", "--json", *WATCH, "--url", fake.url)

    assert [json.loads(line) for line in result.output.splitlines()] == [STATE, DONE]


@pytest.mark.rule("CMD-4")
def test_a_batch_is_published_and_watched_with_a_bar_on_a_terminal(
    fake: FakeRouter, rows: Path
) -> None:
    takes(fake, 1000, 1000, 500)
    fake.answers("GET /batches/b%2F1", {**STATE, "size": 2500, "succeeded": 700}, DONE)

    shown = on_a_terminal("batch", str(rows), "--callback", CALLBACK, "--id", "b/1", *WATCH,
                          "--url", fake.url)  # fmt: skip

    assert "2,500 of 2,500 published" in shown
    assert "published 2500 messages as batch b/1" in shown
    assert "700 of 2,500 ended" in shown
    assert "COMPLETE" in shown
