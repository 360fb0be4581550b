"""The command line, run as a user runs it, against a stand-in for the router."""

from collections.abc import Callable, Iterator

import pytest
from click.testing import CliRunner, Result

from router.cli import main
from tests.support.fake_router import FakeRouter, fake_router

Run = Callable[..., Result]


@pytest.fixture
def fake() -> Iterator[FakeRouter]:
    with fake_router() as router:
        yield router


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `message-router …` and tell how it ended. What the router would raise, is raised."""
    for name in ("MESSAGE_ROUTER_API_TOKEN", "AUTH_BASIC_USERNAME", "MESSAGE_ROUTER_HOST"):
        monkeypatch.delenv(name, raising=False)

    def invoke(*words: str, stdin: bytes | None = None) -> Result:
        return CliRunner().invoke(main, words, input=stdin, catch_exceptions=False)

    return invoke
