"""The demo as people start it: a process of its own, with a real router in it."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.cli.conftest import Run

pytestmark = pytest.mark.slow

SUMMARY = re.compile(
    r"published (\d+), delivered (\d+), retried \d+, dead letters (\d+), lost (-?\d+)"
)


@contextmanager
def demo(*words: str) -> Iterator[subprocess.Popen[str]]:
    # Output to a pipe, unbuffered, in a group of its own: a signal reaches nobody else.
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "router", "demo", "--port", "0", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "MESSAGE_ROUTER_PORT": "nonsense that must not matter"},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.rule("OPS-6")
def test_the_demo_ends_by_itself_with_everything_accounted_for() -> None:
    with demo("--seconds", "2", "--rate", "200") as process:
        output, _ = process.communicate(timeout=60)

    summary = SUMMARY.search(output.splitlines()[-1])
    assert process.returncode == 0, output
    assert summary, output
    published, delivered, dead, lost = map(int, summary.groups())
    assert published >= 200
    assert (delivered + dead, lost) == (published, 0)


@pytest.mark.rule("OPS-4")
def test_ctrl_c_ends_the_demo_with_a_summary() -> None:
    with demo() as process:
        assert process.stdout is not None
        lines = [process.stdout.readline(), process.stdout.readline()]
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)

    assert lines[0].startswith("router at http://127.0.0.1:")
    assert process.returncode == 0
    assert "lost 0" in output.splitlines()[-1]


@pytest.mark.rule("OPS-4", "P1")
def test_a_second_ctrl_c_does_not_wait_and_still_loses_nothing() -> None:
    with demo("--rate", "2000") as process:
        assert process.stdout is not None
        for _ in range(3):
            process.stdout.readline()
        process.send_signal(signal.SIGINT)
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)

    assert process.returncode == 0
    assert "lost 0" in output.splitlines()[-1]


def test_a_port_that_is_taken_is_said_in_one_line(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        result = run("demo", "--port", str(port))

    assert result.exit_code == 1
    assert result.stderr == f"Error: port {port} is taken; choose another with --port\n"
