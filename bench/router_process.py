"""The router as its users run it: a process of its own, watched from outside."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Final

TICKS: Final = os.sysconf("SC_CLK_TCK")
MIB: Final = 1024 * 1024
READY_WITHIN: Final = 30.0


class RouterProcess:
    def __init__(self, process: "subprocess.Popen[bytes]", port: int, started: float) -> None:
        self.port = port
        self.seconds_to_ready = self._wait_until_ready(started)
        self._process = process

    @property
    def cpu_seconds(self) -> float:
        """User and system time, of all its threads."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    @property
    def peak_mib(self) -> float:
        return self._status("VmHWM")

    @property
    def resident_mib(self) -> float:
        return self._status("VmRSS")

    def _status(self, name: str) -> float:
        for line in Path(f"/proc/{self._process.pid}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024 / MIB
        raise RuntimeError(f"the kernel tells no {name}")

    def _wait_until_ready(self, started: float) -> float:
        url = f"http://127.0.0.1:{self.port}/health/ready"
        while time.monotonic() - started < READY_WITHIN:
            with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=1):
                return time.monotonic() - started
            time.sleep(0.005)
        raise SystemExit("the router did not become ready")


@contextlib.contextmanager
def router(state: Path, port: int, **env: str) -> Iterator[RouterProcess]:
    """Start one, and stop it as an operator would."""
    started = time.monotonic()
    with (state / "router.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "router", "run"],
            env={
                **os.environ,
                "MESSAGE_ROUTER_STATE_DIR": str(state),
                "MESSAGE_ROUTER_PORT": str(port),
                **env,
            },
            stdout=log,
            stderr=log,
        )
    try:
        yield RouterProcess(process, port, started)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
