import pytest

from tests.cli.conftest import Run


@pytest.mark.rule("CFG-1")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MESSAGE_ROUTER_PORT", "eighty"),
        ("MESSAGE_ROUTER_AUTH_MODE", "TOKEN"),
        ("MESSAGE_ROUTER_DEFAULT_RETRY", '{"maxAttempts": 0}'),
    ],
)
def test_a_wrong_setting_is_exit_code_2_and_one_line(
    run: Run, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)

    result = run("run")

    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert name in result.stderr


@pytest.mark.rule("CFG-1")
def test_the_service_takes_no_arguments(run: Run) -> None:
    result = run("run", "now")

    assert result.exit_code == 2
