"""Programs that take messages from a queue to a target: our router, others, users' scripts."""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import textwrap
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bench.brokers import NOTHING
from bench.load import pool_code
from bench.measure import WatchedProcess
from bench.sink import free_port
from router.core.config import QueueConfig

ROOT: Final = Path(__file__).parent.parent
CONCURRENCY: Final = 100
READY_SECONDS: Final = 60.0
STOP_SECONDS: Final = 60.0
NAME_WIDTH: Final = 50
_OURS: Final = ("MESSAGE_ROUTER_", "MEDIATOR_", "AUTH_", "STANDBY_", "NOTIFY_", "OTEL_")


@dataclass(frozen=True, slots=True)
class Contender:
    name: str
    command: Sequence[str]  # with {config}, {port} and {queue} where it wants them
    brokers: frozenset[str] | None = None  # None: all of them
    messages: int | None = None  # no more than these: it is slow


ROUTER: Final = Contender("message-router", (sys.executable, "-m", "router", "run"))


def peer(command: str) -> Contender:
    """Any other router program."""
    return Contender(textwrap.shorten(f"peer: {command}", NAME_WIDTH), shlex.split(command))


@dataclass(frozen=True, slots=True, kw_only=True)
class ContenderJob:
    """What a contender is given to do."""

    folder: Path  # for its state and its log
    queue: QueueConfig
    env: Mapping[str, str] = field(default_factory=lambda: NOTHING)
    pools: int = 1
    concurrency: int = CONCURRENCY
    options: Mapping[str, object] = field(default_factory=dict)  # of the queue

    def document(self) -> dict[str, object]:
        """The routing configuration."""
        codes = [pool_code(number) for number in range(self.pools)]
        queue = {
            "queueName": self.queue.name,
            "queueUri": self.queue.uri,
            "visibilityTimeout": self.queue.visibility_timeout,
            **self.options,
        }
        pools = [{"code": code, "concurrency": self.concurrency} for code in codes]
        return {"queues": [queue], "processingPools": pools}


@dataclass(frozen=True, slots=True)
class RunningContender:
    process: WatchedProcess
    port: int
    seconds_to_ready: float
    has_ended: Callable[[], bool]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextlib.contextmanager
def running(contender: Contender, job: ContenderJob) -> Iterator[RunningContender]:
    """Start it, and stop it as an operator would. Only our router is waited for."""
    port, started = free_port(), time.monotonic()
    process = _start(contender, job, port)
    try:
        seconds = _until_ready(process, port, started) if contender is ROUTER else 0.0
        yield RunningContender(
            WatchedProcess(process.pid), port, seconds, lambda: process.poll() is not None
        )
    except Exception as error:
        error.add_note(f"{contender.name}: {_tail(job)}")
        raise
    finally:
        _stop(process)


def _start(contender: Contender, job: ContenderJob, port: int) -> "subprocess.Popen[bytes]":
    config = job.folder / "routing.json"
    config.write_text(json.dumps(job.document()))
    given = {"{config}": config.as_uri(), "{port}": str(port), "{queue}": job.queue.uri}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    env = {
        **inherited,
        "MESSAGE_ROUTER_CONFIG_URL": config.as_uri(),
        "MESSAGE_ROUTER_PORT": str(port),
        "MESSAGE_ROUTER_STATE_DIR": str(job.folder / "state"),
        **job.env,
    }
    with _log(job).open("ab") as log:
        command = [_filled(word, given) for word in contender.command]
        return subprocess.Popen(command, env=env, cwd=ROOT, stdout=log, stderr=log)


def _filled(word: str, given: Mapping[str, str]) -> str:
    for name, value in given.items():
        word = word.replace(name, value)
    return word


def _until_ready(process: "subprocess.Popen[bytes]", port: int, started: float) -> float:
    url = f"http://127.0.0.1:{port}/health/ready"
    while time.monotonic() - started < READY_SECONDS and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=1):
            return time.monotonic() - started
        time.sleep(0.005)
    raise SystemExit("the router did not become ready")


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _log(job: ContenderJob) -> Path:
    return job.folder / "contender.log"


def _tail(job: ContenderJob) -> str:
    return _log(job).read_text(errors="replace")[-2000:]
