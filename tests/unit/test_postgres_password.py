"""Which databases get the password of the environment (C2)."""

import pytest

from router.brokers.postgres.database import is_for_environment


@pytest.mark.rule("CFG-7")
@pytest.mark.parametrize(
    ("dsn", "is_for"),
    [
        ("postgresql:///?", True),
        ("postgresql://db.example/app?", True),
        ("postgresql://DB.example:5433/app?", True),
        ("postgresql://me@db.example,spare.example:5433/app?", True),
        ("postgresql://me:own@evil.example/app?", True),  # it brings its own
        ("postgresql://evil.example/app?", False),
        ("postgresql://me@evil.example/app?", False),
        ("postgresql://db.example,evil.example/app?", False),
        ("postgresql://db.example@evil.example/app?", False),
        ("postgresql://localhost/app?", False),
    ],
)
def test_c2_the_password_is_for_the_hosts_that_operators_name(
    dsn: str, monkeypatch: pytest.MonkeyPatch, *, is_for: bool
) -> None:
    monkeypatch.setenv("PGHOST", "db.example,spare.example")

    assert is_for_environment(dsn) is is_for


@pytest.mark.rule("CFG-7")
@pytest.mark.parametrize(
    ("dsn", "is_for"),
    [
        ("postgresql://localhost:5433/app?", True),
        ("postgresql://127.0.0.1/app?", True),
        ("postgresql://[::1]:5433/app?", True),
        ("postgresql:///app?", True),
        ("postgresql://db.example/app?", False),
    ],
)
def test_c2_without_pghost_the_password_is_for_this_machine(
    dsn: str, monkeypatch: pytest.MonkeyPatch, *, is_for: bool
) -> None:
    monkeypatch.delenv("PGHOST", raising=False)

    assert is_for_environment(dsn) is is_for
