"""One router as an operator has it: a process, its log, its API, its signals."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

ROOT: Final = Path(__file__).parents[2]
PATIENCE: Final = 30.0  # seconds: far more than anything takes, even on a busy machine
SHOWN: Final = 8000  # characters of its output, when a test fails

Message = Mapping[str, object]


async def eventually(holds: Callable[[], bool], *, within: float = PATIENCE) -> None:
    """Wait until it is so; fail if it never is."""
    deadline = time.monotonic() + within
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not so after {within:g} s")
        await asyncio.sleep(0.02)


@dataclass
class Answer:
    """How a command of the command line ended."""

    code: int
    out: str
    err: str


@dataclass
class RouterProcess:
    process: "subprocess.Popen[bytes]"
    port: int
    stdout: Path
    stderr: Path
    env: Mapping[str, str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    # What it says.

    def log(self) -> list[dict[str, Any]]:
        """Its log so far. A last line that is not whole yet does not count."""
        whole = self.stdout.read_text().rpartition("\n")[0]
        return [json.loads(line) for line in whole.split("\n") if line]  # not at U+2028

    def errors(self) -> str:
        return self.stderr.read_text()

    def output(self) -> str:
        return f"{self.stdout.read_text()[-SHOWN:]}\n{self.errors()[-SHOWN:]}"

    def tracebacks(self) -> list[str]:
        """Of errors that nobody has foreseen."""
        logged = [entry["exception"] for entry in self.log() if "exception" in entry]
        return [*logged, self.errors()] if "Traceback" in self.errors() else logged

    def has_logged(self, text: str) -> bool:
        return any(text in entry["message"] for entry in self.log())

    async def logs(self, text: str) -> None:
        await eventually(lambda: self.has_logged(text))

    # What it does.

    async def started(self) -> None:
        """Wait until it answers, whether it can work or not."""
        await eventually(lambda: self._has_ended or self.has_logged("ready"))
        assert not self._has_ended, "the router ended while it was starting"
        self.port = next(entry["port"] for entry in self.log() if entry["message"] == "ready")

    async def ready(self) -> None:
        await self.started()
        assert (await self.get("/health/ready")).status_code == 200

    async def ends(self) -> int:
        """Its exit code."""
        return await asyncio.to_thread(self.process.wait, PATIENCE)

    async def stop(self) -> int:
        self.send(signal.SIGTERM)
        return await self.ends()

    async def kill(self) -> None:
        self.send(signal.SIGKILL)
        await self.ends()

    def send(self, number: signal.Signals) -> None:
        if not self._has_ended:
            self.process.send_signal(number)

    def cpu_seconds(self) -> float:
        """What it has used so far, by the kernel's count."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def _has_ended(self) -> bool:
        return self.process.poll() is not None

    # Its API and command line.

    async def get(self, path: str) -> httpx.Response:
        return await self._call("GET", path)

    async def post(self, path: str, content: object = None) -> httpx.Response:
        return await self._call("POST", path, content)

    async def delete(self, path: str) -> httpx.Response:
        return await self._call("DELETE", path)

    async def publish(self, messages: Sequence[Message], queue: str = "orders") -> None:
        answer = await self.post(f"/messages?queue={queue}", messages)
        assert answer.status_code == 202, answer.text

    async def warnings(self, code: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (await self.get(f"/warnings?code={code}")).json()
        return found

    async def letters(self, reason: str) -> list[dict[str, Any]]:
        """Its dead letters, once there are any."""
        found: list[dict[str, Any]] = []
        deadline = time.monotonic() + PATIENCE
        while not found and time.monotonic() < deadline:
            found = (await self.get(f"/dead-letters?reason={reason}")).json()["items"]
            await asyncio.sleep(0.05)
        return found

    async def command(self, *words: str, stdin: bytes = b"") -> Answer:
        """`message-router …`, pointed at this router."""
        return await asyncio.to_thread(run_command, [*words, "--url", self.url], self.env, stdin)

    async def _call(self, method: str, path: str, content: object = None) -> httpx.Response:
        async with httpx.AsyncClient(
            base_url=self.url, timeout=PATIENCE, trust_env=False
        ) as client:
            return await client.request(method, path, json=content)


def start(
    env: Mapping[str, str], port: int, folder: Path, output: int | None = None
) -> RouterProcess:
    """`output`: a file descriptor for its log; None: a file."""
    number = len(list(folder.glob("router-*.log"))) + 1
    stdout, stderr = folder / f"router-{number}.log", folder / f"router-{number}.err"
    with stdout.open("wb") as out, stderr.open("wb") as err:
        process = subprocess.Popen(
            _command("run"),
            env=env,
            cwd=ROOT,
            stdout=out if output is None else output,
            stderr=err,
        )
    return RouterProcess(process, port, stdout, stderr, env)


def run_command(words: Sequence[str], env: Mapping[str, str], stdin: bytes = b"") -> Answer:
    """`message-router …` until it ends."""
    done = subprocess.run(
        _command(*words),
        env=env,
        cwd=ROOT,
        input=stdin,
        capture_output=True,
        timeout=PATIENCE,
        check=False,
    )
    return Answer(done.returncode, done.stdout.decode(), done.stderr.decode())


def _command(*words: str) -> list[str]:
    return [sys.executable, "-m", "router", *words]
