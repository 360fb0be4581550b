import json
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.support.fake_router import FakeRouter

GOOD = b'{"id":"a","mediationTarget":"http://t/"}\n'
BAD = b'{"id":"b"}\n'
ACCEPTED = {"accepted": 1, "duplicates": 0, "ids": ["a"]}


def sent_ids(fake: FakeRouter) -> list[list[str]]:
    return [[message["id"] for message in call.json] for call in fake.calls]


@pytest.mark.rule("P1")
def test_standard_input_goes_to_the_queue_of_the_router(run: Run, fake: FakeRouter) -> None:
    fake.answers("POST /messages", ACCEPTED, status=202)

    result = run("send", "--queue", "orders & co", "--url", fake.url, stdin=GOOD)

    assert result.exit_code == 0
    assert result.stdout.startswith("sent 1 in ")
    assert fake.calls[0].query == {"queue": "orders & co"}
    assert fake.calls[0].body == b"[" + GOOD.strip() + b"]"


@pytest.mark.rule("P1")
def test_a_file_goes_in_batches(run: Run, fake: FakeRouter, tmp_path: Path) -> None:
    fake.answers("POST /messages", ACCEPTED, status=202)
    path = tmp_path / "messages.ndjson"
    path.write_bytes(GOOD * 1200)

    result = run("send", str(path), "--url", fake.url)

    assert result.stdout.startswith("sent 1200 in ")
    assert [len(batch) for batch in sent_ids(fake)] == [500, 500, 200]


@pytest.mark.rule("P5")
def test_a_bad_line_is_named_and_the_good_ones_are_sent(run: Run, fake: FakeRouter) -> None:
    fake.answers("POST /messages", ACCEPTED, status=202)

    result = run("send", "--json", "--url", fake.url, stdin=GOOD + BAD + GOOD)

    assert result.exit_code == 1
    assert result.stderr.startswith("line 2: ")
    assert json.loads(result.stdout)["sent"] == 2
    assert [bad["line"] for bad in json.loads(result.stdout)["refused"]] == [2]


@pytest.mark.rule("P5")
def test_strict_stops_at_the_first_bad_line(run: Run, fake: FakeRouter) -> None:
    fake.answers("POST /messages", ACCEPTED, status=202)

    result = run("send", "--strict", "--url", fake.url, stdin=GOOD + BAD + GOOD)

    assert result.exit_code == 1
    assert sent_ids(fake) == [["a"]]


@pytest.mark.rule("P5")
def test_what_only_the_router_refuses_is_left_out_too(run: Run, fake: FakeRouter) -> None:
    lines = b"".join(b'{"id":"%d","mediationTarget":"http://t/"}\n' % n for n in range(3))
    fake.refuses("POST /messages", 422, "message 1: no such scheme", index=1)
    fake.answers("POST /messages", ACCEPTED, status=202)

    result = run("send", "--url", fake.url, stdin=lines)

    assert result.exit_code == 1
    assert sent_ids(fake) == [["0", "1", "2"], ["0", "2"]]
    assert result.stderr == "line 2: no such scheme\n"
    assert ", refused 1" in result.stdout


@pytest.mark.rule("P5")
def test_a_batch_that_is_bad_to_the_last_message_ends_without_an_empty_call(
    run: Run, fake: FakeRouter
) -> None:
    fake.refuses("POST /messages", 422, "message 0: no", index=0)

    result = run("send", "--url", fake.url, stdin=GOOD + GOOD)

    assert result.stdout.startswith("sent 0 in ")
    assert sent_ids(fake) == [["a", "a"], ["a"]]


@pytest.mark.rule("P1")
@pytest.mark.parametrize("index", [None, 7])
def test_a_refusal_of_the_whole_call_ends_it_with_what_was_sent(
    run: Run, fake: FakeRouter, index: int | None
) -> None:
    fake.answers("POST /messages", ACCEPTED, status=202)
    fake.refuses("POST /messages", 422, "which queue?", index=index)

    result = run("send", "--url", fake.url, stdin=GOOD * 501)

    assert result.exit_code == 1
    assert result.stdout.startswith("sent 500 in ")
    assert "which queue?" in result.stderr


@pytest.mark.rule("P1")
def test_messages_are_made_on_the_spot(run: Run, fake: FakeRouter) -> None:
    fake.answers("POST /messages", ACCEPTED, status=202)

    result = run("send", "--target", "http://t/", "--count", "3", "--pool", "A", "--url", fake.url)

    assert result.exit_code == 0
    messages = fake.calls[0].json
    assert len({message["id"] for message in messages}) == 3
    assert [message["id"] for message in messages] == sorted(m["id"] for m in messages)
    assert messages[0] == {
        "id": messages[0]["id"],
        "mediationTarget": "http://t/",
        "poolCode": "A",
    }


@pytest.mark.rule("P1")
@pytest.mark.parametrize(
    "words",
    [
        ["--queue", "q", "--uri", "memory://q"],
        ["-", "--uri", "amqp://host/?queue=q.{partition}"],
        ["--target", "not a url"],
        ["--target", "http://t/", "--count", "0"],
        ["no-such-file.ndjson"],
        ["-", "--target", "http://t/"],
        ["--count", "5"],
        ["--pool", "A", "-"],
    ],
)
def test_wrong_usage_is_exit_code_2(run: Run, fake: FakeRouter, words: list[str]) -> None:
    result = run("send", *words, "--url", fake.url)

    assert result.exit_code == 2
    assert fake.calls == []


@pytest.mark.rule("P1")
def test_a_publish_that_broke_off_counts_what_got_in(run: Run, fake: FakeRouter) -> None:
    fake.answers("POST /messages", {"detail": "disk full", "accepted": 100}, status=502)

    result = run("send", "--url", fake.url, stdin=GOOD * 600)

    assert result.exit_code == 1
    assert result.stdout.startswith("sent 100 in ")
    assert "disk full" in result.stderr
    assert len(fake.calls) == 1


@pytest.mark.rule("P1", "WQ-1")
def test_messages_go_straight_into_a_queue_and_a_second_time_change_nothing(
    run: Run, tmp_path: Path
) -> None:
    uri = f"sqlite:///{tmp_path}/q.db?queue=orders"

    first = run("send", "--uri", uri, "--json", stdin=GOOD)
    second = run("send", "--uri", uri, "--json", stdin=GOOD)

    assert (first.exit_code, second.exit_code) == (0, 0)
    assert (json.loads(first.stdout)["sent"], json.loads(first.stdout)["duplicates"]) == (1, 0)
    assert (json.loads(second.stdout)["sent"], json.loads(second.stdout)["duplicates"]) == (0, 1)


@pytest.mark.rule("CMD-5", "MED-5", "CMD-11", "CMD-4")
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"delaySeconds": 1e300}, "Expected `float` <= 31622400.0 - at `$.delaySeconds`"),
        ({"then": {"delaySeconds": 1e300}}, "`then`: Expected `float` <= 31622400.0 - at"),
        ({"then": {"then": {"notBefore": "9999-01-01T00:00:00Z"}}}, "`then.then.notBefore` is"),
        ({"mediationTarget": "ftp://t/"}, "`mediationTarget`: the target's scheme is ftp"),
        ({"mediationTarget": "http://me:word@t/"}, "`mediationTarget`: the target has credentials"),
        ({"batchId": "b"}, "`batchId` must be absent"),
    ],
)
def test_a_queue_without_a_router_gets_nothing_that_the_api_refuses(
    run: Run, tmp_path: Path, fields: dict[str, object], reason: str
) -> None:
    uri = f"sqlite:///{tmp_path}/q.db?queue=orders"
    target = {"mediationTarget": "http://t/"}

    def complete(given: dict[str, object]) -> dict[str, object]:
        then = given.get("then")
        steps = {"then": complete(then)} if isinstance(then, dict) else {}
        return {**target, **given, **steps}

    bad = json.dumps({"id": "b", **complete(fields)}).encode() + b"\n"

    only = run("send", "--uri", uri, "--json", stdin=bad)
    mixed = run("send", "--uri", uri, "--json", stdin=GOOD + bad)

    assert (only.exit_code, mixed.exit_code) == (1, 1)
    assert only.stderr.startswith(f"line 1: {reason}")
    assert mixed.stderr.startswith(f"line 2: {reason}")
    assert (json.loads(only.stdout)["sent"], json.loads(mixed.stdout)["sent"]) == (0, 1)


@pytest.mark.rule("CMD-5", "CMD-6", "CMD-9")
def test_a_message_for_a_worker_waits_and_is_deduplicated_without_a_router(
    run: Run, tmp_path: Path
) -> None:
    path = tmp_path / "q.db"
    fields = {"mediationTarget": "handler:hello", "delaySeconds": 3600, "dedup": "content"}
    lines = [json.dumps({"id": each, **fields}).encode() for each in "ab"]

    result = run("send", "--uri", f"sqlite:///{path}", "--json", stdin=b"\n".join(lines))

    sent = json.loads(result.stdout)
    assert (sent["sent"], sent["duplicates"]) == (1, 1)
    with closing(sqlite3.connect(path)) as database:
        ((not_before,),) = database.execute("SELECT not_before FROM queue_messages")
    assert 3500 < not_before - time.time() < 3601


@pytest.mark.rule("P1")
@pytest.mark.parametrize(
    "uri", ["nats://ada:secret@[::1]:1/", "nonsense", "sqlite:///no/such/dir/q.db"]
)
def test_a_queue_that_cannot_be_opened_is_one_line(run: Run, uri: str) -> None:
    result = run("send", "--uri", uri, stdin=GOOD)

    assert result.exit_code == 1
    assert "Error: " in result.stderr
    assert "secret" not in result.output


@pytest.mark.rule("P5")
def test_strict_stops_as_well_where_only_the_router_refuses(run: Run, fake: FakeRouter) -> None:
    fake.refuses("POST /messages", 422, "message 0: no such scheme", index=0)
    fake.answers("POST /messages", ACCEPTED, status=202)

    result = run("send", "--strict", "--url", fake.url, stdin=GOOD * 501)

    assert result.exit_code == 1
    assert [len(batch) for batch in sent_ids(fake)] == [500, 499]


@pytest.mark.rule("P1")
def test_a_message_over_several_lines_is_refused_with_the_reason(
    run: Run, fake: FakeRouter
) -> None:
    result = run("send", "--strict", "--url", fake.url, stdin=b'{\n"id": "a"\n}\n')

    assert result.exit_code == 1
    assert result.stderr == "line 1: each message must be on one line\n"
