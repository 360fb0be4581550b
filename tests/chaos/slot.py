"""A place for one router at a time: its folder, its wire to the broker, its clock and its names."""

import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.acceptance.process import RouterProcess, eventually, start
from tests.acceptance.site import Site
from tests.chaos.history import History
from tests.chaos.load import ApiProducer, ChaosRecorder
from tests.support.cable import Cable

START_SECONDS = 60.0
CIRCUIT_IS_OPEN: Final = "circuit breaker is open"
EVENTS: Final = {
    "full pools": "is full: what does not fit",
    "open circuits": CIRCUIT_IS_OPEN,
    "drains": "shutting down",
    "renewals": "that came back often were renewed",
}  # each is counted by a text of its log lines


@dataclass
class Slot:
    """Its routers follow each other, each with a number of its own: its incarnation."""

    number: int
    site: Site
    history: History
    recorder: ChaosRecorder
    api: ApiProducer
    cable: Cable | None = None
    more_env: Mapping[str, str] = field(default_factory=dict)
    incarnation: int = 0
    router: RouterProcess | None = None

    @property
    def clock_file(self) -> Path:
        return self.site.folder / "clock"

    @property
    def names_file(self) -> Path:
        return self.site.folder / "names"

    def spawn(self) -> RouterProcess:
        env = {**self.site.env, **self.more_env}
        self.router = start(env, self.site.port, self.site.folder)
        self.incarnation = self.recorder.welcome(self.router)
        return self.router

    async def ready(self) -> None:
        """Wait until the router says so. Its broker may be out of reach."""
        router = self.running
        await eventually(
            lambda: router.process.poll() is not None or router.has_logged("ready"),
            within=START_SECONDS,
        )
        assert router.process.poll() is None, f"it ended while it was starting: {router.output()}"
        router.port = next(each["port"] for each in router.log() if each["message"] == "ready")
        self.api.routers.append(router)
        self.history.note_start(time.monotonic())

    @property
    def running(self) -> RouterProcess:
        assert self.router is not None
        return self.router

    def pause(self) -> None:
        self.running.send(signal.SIGSTOP)

    def go_on(self) -> None:
        self.running.send(signal.SIGCONT)

    async def kill(self) -> None:
        if self._leave():
            await self.running.kill()
            self._read_log()
            self.recorder.forget(self.running)

    async def stop(self) -> None:
        """End the router in peace."""
        if self._leave():
            code = await self.running.stop()
            self._read_log()
            self.recorder.forget(self.running)
            if code != 0:
                self.history.strange.append(f"the router ended with exit code {code}")

    async def abort(self) -> None:
        """Leave no process behind, whatever happened."""
        if self.router is not None:
            self.go_on()
            await self.router.kill()

    def output(self) -> str:
        """Return the end of what the last router has written."""
        return "" if self.router is None else self.router.output()

    def _leave(self) -> bool:
        """Let nobody publish through the router. Return False if there is none."""
        if self.router is None:
            return False
        if self.router in self.api.routers:
            self.api.routers.remove(self.router)
            self.history.note_end(time.monotonic())
        if (code := self.router.process.poll()) not in (None, -signal.SIGKILL, 0):
            self.history.strange.append(f"the router ended by itself with exit code {code}")
        return True

    def _read_log(self) -> None:
        self.history.strange += self.running.tracebacks()
        written = [entry["message"] for entry in self.running.log()]
        for event, text in EVENTS.items():
            self.history.events[event] += sum(text in line for line in written)
