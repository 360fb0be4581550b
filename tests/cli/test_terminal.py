"""What is drawn on a terminal, on a real (pseudo) one."""

import os
import pty
import re
import subprocess
import sys

import pytest

from tests.support.fake_router import FakeRouter

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def on_a_terminal(*words: str) -> str:
    """Run `message-router …` with a terminal for its output, and give what a person reads."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "router", *words],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "120"},
    )
    os.close(theirs)
    seen = b""
    with process, os.fdopen(ours, "rb", buffering=0) as terminal:
        while chunk := _read(terminal.fileno()):
            seen += chunk
    return ESCAPES.sub("", seen.decode()).replace("\r\n", "\n")


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # how Linux says that the other end is closed
        return b""


@pytest.mark.rule("OPS-2")
def test_warnings_are_a_table_with_a_heading(fake: FakeRouter) -> None:
    fake.answers("GET /warnings", [{"code": "ROUTING", "message": "no pool [bold]X"}])

    shown = on_a_terminal("warnings", "--url", fake.url)

    assert "severity" in shown
    assert "no pool [bold]X" in shown


@pytest.mark.rule("OPS-2")
def test_a_table_that_is_wider_than_the_terminal_is_not_cut(fake: FakeRouter) -> None:
    long = "the target " + "x" * 200
    fake.answers("GET /warnings", [{"code": "CONFIGURATION", "message": long}])

    assert long in on_a_terminal("warnings", "--url", fake.url)


@pytest.mark.rule("OPS-2")
def test_no_warnings_are_said_in_words(fake: FakeRouter) -> None:
    fake.answers("GET /warnings", [])

    assert on_a_terminal("warnings", "--url", fake.url) == "No warnings.\n"


@pytest.mark.rule("P1")
def test_sending_shows_how_far_it_is(fake: FakeRouter) -> None:
    fake.answers("POST /messages", {"accepted": 500}, status=202)

    shown = on_a_terminal("send", "--target", "http://t/", "--count", "1500", "--url", fake.url)

    assert re.search(r"[\d,]+ sent, [\d,]+/s", shown)
    assert "sent 1500 in " in shown
