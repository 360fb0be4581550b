"""A server that a test starts, stops, kills and starts again: its own port, its own directory."""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NoReturn, Self

import pytest

START_SECONDS: Final = 60.0
STOP_SECONDS: Final = 20.0


PORTS: Final = range(12_000, 32_000)  # the kernel gives out ports from 32768 on by itself
_taken: set[int] = set()
started: Final[set[str]] = set()  # the programs, for the record of a run: see compatibility.py


def free_port() -> int:
    """Return a port for a server that a test stops and starts again.

    The kernel gives none of these to a socket that asks for any port. With one that it does give
    out, a test beside this one once listened where a stopped broker was about to come back.
    """
    while True:
        port = secrets.choice(PORTS)  # at random, because tests in other processes choose too
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            if port not in _taken:
                _taken.add(port)
                return port


def missing(what: str) -> NoReturn:
    """A test needs what is not there: a skip at home, a failure in CI."""
    if os.environ.get("CI"):
        pytest.fail(f"{what} is not installed")
    pytest.skip(f"{what} is not installed: ./dev brokers installs it")


def needed(program: str, *places: str) -> str:
    """The path of a program, or the end of the test."""
    found = shutil.which(program, path=os.pathsep.join((os.environ["PATH"], *places)))
    return found or missing(program)


class ServerProcess:
    """One process in the foreground, known to be up when its port answers."""

    def __init__(
        self,
        command: Sequence[str],
        port: int,
        directory: Path,
        *,
        env: dict[str, str] | None = None,
        is_up: Callable[[], bool] | None = None,
    ) -> None:
        self.port = port
        self.directory = directory
        self._command = command
        self._env = {**os.environ, **(env or {})}
        self._is_up = is_up or self._answers
        self._process: subprocess.Popen[bytes] | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[Self]:
        self.start()
        try:
            yield self
        finally:
            self.kill()

    def start(self) -> None:
        log = (self.directory / "server.log").open("ab")
        with log:
            self._process = subprocess.Popen(
                self._command,
                cwd=self.directory,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        started.update(self._command)
        deadline = time.monotonic() + START_SECONDS
        while not self._is_up():
            if self._process.poll() is not None or time.monotonic() > deadline:
                tail = (self.directory / "server.log").read_text(errors="replace")[-2000:]
                self.kill()
                raise RuntimeError(f"{self._command[0]} did not start:\n{tail}")
            time.sleep(0.02)

    def stop(self) -> None:
        """As an operator would."""
        self._signal(signal.SIGTERM)
        self._wait()

    def kill(self) -> None:
        """As a power cut would."""
        self._signal(signal.SIGKILL)
        self._wait()

    def freeze(self) -> None:
        """Connections stay open and nothing answers."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), 0.2).close()
        except OSError:
            return False
        return True

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def _wait(self) -> None:
        if self._process is None:
            return
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait(STOP_SECONDS)
