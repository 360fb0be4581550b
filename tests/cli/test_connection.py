import pytest

from tests.cli.conftest import Run
from tests.support.fake_router import FakeRouter

HEALTHY = {"healthy": True, "status": "HEALTHY", "message": "all is well", "issues": []}


def test_the_router_is_found_by_its_own_settings(
    run: Run, fake: FakeRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.answers("GET /health", HEALTHY)
    monkeypatch.setenv("MESSAGE_ROUTER_HOST", "0.0.0.0")  # noqa: S104  nothing is bound
    monkeypatch.setenv("MESSAGE_ROUTER_PORT", fake.url.rpartition(":")[2])

    result = run("status")

    assert result.exit_code == 0
    assert result.stdout == "HEALTHY\tall is well\n"


def test_a_token_of_the_environment_is_sent_and_shown_nowhere(
    run: Run, fake: FakeRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.answers("GET /health", HEALTHY)
    monkeypatch.setenv("MESSAGE_ROUTER_API_TOKEN", "tok-123")

    result = run("status", "--url", fake.url)
    explained = run("status", "--help")

    assert fake.calls[0].headers["Authorization"] == "Bearer tok-123"
    assert "tok-123" not in result.output + explained.output


def test_a_login_of_the_environment_is_sent(
    run: Run, fake: FakeRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.answers("GET /health", HEALTHY)
    monkeypatch.setenv("AUTH_BASIC_USERNAME", "ada")
    monkeypatch.setenv("AUTH_BASIC_PASSWORD", "pass:word")

    run("status", "--url", fake.url)

    assert fake.calls[0].headers["Authorization"] == "Basic YWRhOnBhc3M6d29yZA=="


def test_proxies_of_the_environment_are_not_asked(
    run: Run, fake: FakeRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.answers("GET /health", HEALTHY)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")

    assert run("status", "--url", fake.url).exit_code == 0


@pytest.mark.parametrize(
    ("words", "exit_code", "said"),
    [
        (["--url", "http://127.0.0.1:9"], 1, "no router answers at http://127.0.0.1:9"),
        (["--url", "http://ada:secret@127.0.0.1:9"], 1, "no router answers at http://127.0.0.1:9"),
        (["--url", "http://127.0.0.1:9/?key=secret"], 1, "no router answers at http://127.0.0.1:9"),
        (["--url", "127.0.0.1:8080"], 2, "--url must be a URL such as"),
        (["--url", "http://h:808O/"], 2, "(Invalid port: '808O')"),
        (["--url", "http://a:b:c/"], 2, "--url must be a URL such as"),
        (["--user", "ada"], 2, "--user must be NAME:PASSWORD"),
    ],
)
def test_what_cannot_be_reached_is_said_in_one_line(
    run: Run, words: list[str], exit_code: int, said: str
) -> None:
    result = run("status", *words)

    assert result.exit_code == exit_code
    assert said in result.stderr
    assert "Traceback" not in result.output
    assert "secret" not in result.output


def test_missing_credentials_are_explained(run: Run, fake: FakeRouter) -> None:
    fake.refuses("GET /warnings", 401, "credentials")

    result = run("warnings", "--url", fake.url)

    assert result.exit_code == 1
    assert "asks for credentials: set MESSAGE_ROUTER_API_TOKEN" in result.stderr


def test_wrong_credentials_are_not_called_missing(run: Run, fake: FakeRouter) -> None:
    fake.refuses("GET /warnings", 401, "credentials")

    result = run("warnings", "--url", fake.url, "--token", "wrong")

    assert "refuses these credentials" in result.stderr


def test_a_refusal_is_told_in_the_routers_words(run: Run, fake: FakeRouter) -> None:
    fake.refuses("GET /warnings", 403, "not from there")

    result = run("warnings", "--url", fake.url)

    assert result.exit_code == 1
    assert result.stderr == "Error: the router refused (403): not from there\n"


def test_something_else_that_answers_is_not_taken_for_a_router(run: Run, fake: FakeRouter) -> None:
    fake.answers_raw("GET /warnings", b"<html>")

    result = run("warnings", "--url", fake.url)

    assert result.exit_code == 1
    assert "is not a message-router" in result.stderr
