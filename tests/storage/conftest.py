"""One store of each kind, empty."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.servers.postgres import PostgresServer, postgres_server

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    with postgres_server() as server:
        yield server


@pytest.fixture
def database(postgres: PostgresServer) -> str:
    """The URL of an empty database."""
    name = f"letters_{next(_numbers)}"
    postgres.sql(f"CREATE DATABASE {name}")
    return postgres.url.removesuffix("/postgres") + f"/{name}"


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store of each kind."""
    if request.param == "sqlite":
        return f"sqlite://{tmp_path}/letters/dead-letters.db"
    found: str = request.getfixturevalue("database")
    return found
