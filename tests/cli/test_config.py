import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.support.fake_router import FakeRouter

NOBODY = ("--url", "http://127.0.0.1:9")
QUEUE = {"queueName": "orders", "queueUri": "memory://orders"}
POOL = {"code": "A", "concurrency": 3}


def written(folder: Path, document: object) -> str:
    path = folder / "routing file.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return str(path)


@pytest.mark.rule("CFG-8")
def test_a_good_document_is_shown_as_what_it_would_change(run: Run, tmp_path: Path) -> None:
    source = written(tmp_path, {"queues": [QUEUE], "processingPools": [POOL]})

    result = run("config", "check", source, *NOBODY)

    assert result.exit_code == 0
    assert "queue orders: start" in result.stdout
    assert "pool A: create" in result.stdout
    assert "Not compared with a running router" in result.stderr


@pytest.mark.rule("CFG-8")
def test_it_is_compared_with_the_running_router(run: Run, fake: FakeRouter, tmp_path: Path) -> None:
    fake.answers("GET /config", {"queues": [QUEUE], "processingPools": [POOL]})
    source = written(tmp_path, {"queues": [QUEUE]})

    result = run("config", "check", source, "--url", fake.url)

    assert result.stdout == "pool A: drain\n"
    assert result.stderr == ""


@pytest.mark.rule("CFG-8")
def test_reply_queues_are_compared_too(run: Run, fake: FakeRouter, tmp_path: Path) -> None:
    replies = [{"queueName": name, "queueUri": f"memory://{name}"} for name in ("kept", "gone")]
    fake.answers("GET /config", {"queues": [QUEUE], "replyQueues": replies})
    source = written(tmp_path, {"queues": [QUEUE], "replyQueues": replies[:1]})

    result = run("config", "check", source, "--url", fake.url)

    assert result.stdout == "reply queue gone: remove\n"


@pytest.mark.rule("CFG-8")
def test_a_document_that_changes_nothing_says_so(
    run: Run, fake: FakeRouter, tmp_path: Path
) -> None:
    fake.answers("GET /config", {"queues": [QUEUE]})
    source = written(tmp_path, {"queues": [QUEUE]})

    result = run("config", "check", source, "--url", fake.url)

    assert (result.exit_code, result.stdout) == (0, "Nothing would change.\n")


@pytest.mark.rule("CFG-8")
def test_a_key_that_looks_like_a_known_one_is_pointed_out(run: Run, tmp_path: Path) -> None:
    pool = {"code": "A", "concurency": 5, "comment": "x", "retry": {"maxAttempt": 3}}
    document = {"queues": [QUEUE], "processingPools": [pool, 5], "replyQueue": [], "note": 1}

    typos = run("config", "check", written(tmp_path, document), *NOBODY).stderr.splitlines()

    assert [line for line in typos if "did you mean" in line] == [
        "$.replyQueue is ignored: did you mean replyQueues?",
        "$.processingPools[0].concurency is ignored: did you mean concurrency?",
        "$.processingPools[0].retry.maxAttempt is ignored: did you mean maxAttempts?",
    ]


@pytest.mark.rule("CFG-8", "TGT-4")
def test_targets_that_would_send_nothing_are_errors(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crm = {"name": "crm", "type": "bearer", "hosts": ["crm.test"], "tokenEnv": "CRM"}
    file = tmp_path / "credentials.json"
    file.write_text(json.dumps({"credentials": [crm]}))
    monkeypatch.setenv("MESSAGE_ROUTER_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("CRM", "s3cret")
    hosts = {"good": "https://crm.test", "evil": "https://evil.test", "plain": "http://x.test"}
    targets = [{"name": name, "match": url, "credentials": "crm"} for name, url in hosts.items()]
    del targets[2]["credentials"]

    result = run("config", "check", written(tmp_path, {"queues": [QUEUE], "targets": targets}))

    assert result.exit_code == 1
    [line] = [line for line in result.stderr.splitlines() if "credentials" in line]
    assert line.startswith("$.targets: evil: credentials crm may not go to https://evil.test")
    assert line.endswith("evil.test is none of their `hosts` in the credentials file")


@pytest.mark.rule("CFG-8", "TGT-3")
def test_a_secret_that_cannot_be_used_here_is_shown_and_no_error(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crm = {"name": "crm", "type": "bearer", "hosts": ["crm.test"], "tokenEnv": "CRM"}
    file = tmp_path / "credentials.json"
    file.write_text(json.dumps({"credentials": [crm]}))
    monkeypatch.setenv("MESSAGE_ROUTER_CREDENTIALS_FILE", str(file))
    monkeypatch.delenv("CRM", raising=False)
    target = {"name": "t", "match": "https://crm.test", "credentials": "crm"}

    result = run("config", "check", written(tmp_path, {"queues": [QUEUE], "targets": [target]}))

    assert result.exit_code == 0
    assert "$.targets: t: credentials crm: tokenEnv (CRM) is not set\n" in result.stderr


@pytest.mark.rule("CFG-8", "TGT-3")
def test_a_wrong_credentials_file_is_wrong_usage(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "credentials.json"
    file.write_text("[]")
    monkeypatch.setenv("MESSAGE_ROUTER_CREDENTIALS_FILE", str(file))

    result = run("config", "check", written(tmp_path, {"queues": [QUEUE]}))

    assert result.exit_code == 2
    assert "MESSAGE_ROUTER_CREDENTIALS_FILE: " in result.stderr


@pytest.mark.rule("CMD-10")
def test_a_schedule_of_an_unknown_queue_is_an_error(run: Run, tmp_path: Path) -> None:
    ping = {"name": "ping", "everySeconds": 10, "message": {"mediationTarget": "http://t/"}}
    both = [{**ping, "queue": "orders"}, {**ping, "name": "lost", "queue": "oders"}]

    result = run(
        "config", "check", written(tmp_path, {"queues": [QUEUE], "schedules": both}), *NOBODY
    )

    assert result.exit_code == 1
    assert "$.schedules: lost: there is no queue 'oders'\n" in result.stderr
    assert "ping" not in result.stderr


@pytest.mark.rule("CMD-10")
def test_a_schedule_that_never_comes_due_is_an_error(run: Run, tmp_path: Path) -> None:
    never = {
        "name": "never",
        "queue": "orders",
        "cron": "30 2 * 3 7L",  # the night when clocks go from 2 to 3
        "timezone": "Europe/Berlin",
        "message": {"mediationTarget": "http://t/"},
    }

    result = run(
        "config", "check", written(tmp_path, {"queues": [QUEUE], "schedules": [never]}), *NOBODY
    )

    assert result.exit_code == 1
    assert "$.schedules[0]: `cron` never comes due: clocks in Europe/Berlin skip" in result.stderr


@pytest.mark.rule("CFG-5")
def test_a_byte_order_mark_in_front_is_ignored(run: Run, tmp_path: Path) -> None:
    source = written(tmp_path, "\ufeff" + json.dumps({"queues": [QUEUE]}))

    assert run("config", "check", source, *NOBODY).exit_code == 0


@pytest.mark.rule("CFG-5")
@pytest.mark.parametrize(
    ("document", "said"),
    [
        ("{nonsense", "not JSON"),
        ("[]", "$"),
        ({"queues": [QUEUE, {"queueUri": "gopher://x"}]}, "$.queues[1]"),
    ],
)
def test_a_bad_document_is_exit_code_1_with_the_path(
    run: Run, tmp_path: Path, document: object, said: str
) -> None:
    result = run("config", "check", written(tmp_path, document), *NOBODY)

    assert result.exit_code == 1
    assert said in result.stderr


@pytest.mark.rule("CFG-8")
def test_a_document_can_come_by_http_and_the_answer_be_for_programs(
    run: Run, fake: FakeRouter
) -> None:
    fake.answers("GET /routing", {"queues": [QUEUE]})
    fake.answers("GET /config", {"queues": []})

    result = run("config", "check", f"{fake.url}/routing", "--json", "--url", fake.url)

    assert json.loads(result.stdout) == {
        "ok": True,
        "comparedWithRunningRouter": True,
        "problems": [],
        "changes": ["queue orders: start (memory://orders)"],
    }


@pytest.mark.rule("CFG-4")
def test_the_token_goes_to_the_configured_origin_only(
    run: Run, fake: FakeRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.answers("GET /routing", {"queues": [QUEUE]})
    monkeypatch.setenv("MESSAGE_ROUTER_CONFIG_TOKEN", "tok-1")

    run("config", "check", f"{fake.url}/routing", *NOBODY)
    monkeypatch.setenv("MESSAGE_ROUTER_CONFIG_URL", "http://config.example/routing")
    run("config", "check", f"{fake.url}/routing", *NOBODY)

    assert [call.headers.get("Authorization") for call in fake.calls] == ["Bearer tok-1", None]


@pytest.mark.rule("CFG-8")
@pytest.mark.parametrize(
    ("source", "exit_code"),
    [("no-such-file.json", 1), ("http://127.0.0.1:9/x", 1), ("ftp://host/x", 2)],
)
def test_a_source_that_gives_nothing_is_said_in_one_line(
    run: Run, source: str, exit_code: int
) -> None:
    result = run("config", "check", source, *NOBODY)

    assert result.exit_code == exit_code
    assert "Traceback" not in result.output


@pytest.mark.rule("CFG-1")
def test_a_wrong_setting_is_wrong_usage(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESSAGE_ROUTER_PORT", "http")

    result = run("config", "check", written(tmp_path, {}), *NOBODY)

    assert result.exit_code == 2
    assert "MESSAGE_ROUTER_PORT" in result.stderr


@pytest.mark.rule("CFG-8")
@pytest.mark.parametrize("answer", [{"healthy": True}, []])
def test_something_else_on_that_port_is_not_compared_with(
    run: Run, fake: FakeRouter, tmp_path: Path, answer: object
) -> None:
    fake.answers("GET /config", answer)

    result = run("config", "check", written(tmp_path, {"queues": [QUEUE]}), "--url", fake.url)

    assert result.exit_code == 1
    assert "is not a message-router" in result.stderr
