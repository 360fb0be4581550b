"""Many kinds of faults at once, on every router and on their broker."""

import asyncio
import os
import random
import shutil
import subprocess
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.chaos.brokers import ChaosQueue
from tests.chaos.slot import Slot
from tests.outbound.servers import skip_or_fail

BETWEEN_FAULTS: Final = (0.3, 2.0)  # seconds from the start of one to the start of the next
PAUSED: Final = 1.6  # leases, at most
FROZEN: Final = 12.0  # seconds, at most
BROKER_DOWN: Final = 3.0  # seconds, at most
CLOCK_STEPS: Final = (10, 3600, 86_400, 31_536_000)  # seconds, forward or back
SLOW_NAMES_MS: Final = 2000
SLOW_NAMES: Final = 5.0  # seconds
FAKETIME: Final = "*/faketime/libfaketimeMT.so.1"


@dataclass(frozen=True)
class Fault:
    kind: str
    slot: int | None  # None: the broker
    began: float
    ended: float


@dataclass
class Storm:
    """Starts a new fault every second or so. Faults of different things overlap."""

    slots: Sequence[Slot]
    queue: ChaosQueue
    dice: random.Random
    tell: Callable[[Fault], None]
    faults: list[Fault] = field(default_factory=list)
    _busy: set[str] = field(default_factory=set)

    async def run(self, seconds: float) -> None:
        """End with everything healed, but for the clocks: they stay wrong."""
        end = time.monotonic() + seconds
        async with asyncio.TaskGroup() as tasks:
            while time.monotonic() < end:
                await asyncio.sleep(self.dice.uniform(*BETWEEN_FAULTS))
                self._start(tasks)

    def _start(self, tasks: asyncio.TaskGroup) -> None:
        slot = self.dice.choice(self.slots)
        process = f"process {slot.number}"
        choices: list[tuple[str, str, int, Callable[[], Awaitable[None]]]] = [
            ("kill", process, 4, lambda: self._kill(slot)),
            ("stop", process, 1, lambda: self._stop(slot)),
            ("pause", process, 3, lambda: self._pause(slot)),
            ("clock", f"clock {slot.number}", 2, lambda: self._step_clock(slot)),
            ("names", f"names {slot.number}", 1, lambda: self._slow_names(slot)),
        ]
        if self.queue.server is not None:
            choices += [
                ("cut", f"wire {slot.number}", 3, lambda: self._cut(slot)),
                ("freeze", f"wire {slot.number}", 2, lambda: self._freeze(slot)),
                ("broker", "broker", 1, self._restart_broker),
            ]
        choices = [each for each in choices if each[1] not in self._busy]
        weights = [each[2] for each in choices]
        ((kind, subject, _, fault),) = self.dice.choices(choices, weights)
        self._busy.add(subject)
        whose = slot.number if subject[-1].isdigit() else None
        tasks.create_task(self._carry_out(kind, subject, whose, fault), name=kind)

    async def _carry_out(
        self, kind: str, subject: str, slot: int | None, fault: Callable[[], Awaitable[None]]
    ) -> None:
        began = time.monotonic()
        try:
            await fault()
        finally:
            self._busy.discard(subject)
        self.faults.append(Fault(kind, slot, began, time.monotonic()))
        self.tell(self.faults[-1])

    async def _kill(self, slot: Slot) -> None:
        await slot.kill()
        await asyncio.sleep(self.dice.uniform(0, 2))
        slot.spawn()
        await slot.ready()

    async def _stop(self, slot: Slot) -> None:
        await slot.stop()
        slot.spawn()
        await slot.ready()

    async def _pause(self, slot: Slot) -> None:
        slot.pause()
        try:
            longest = min(PAUSED * self.queue.promises.lease, FROZEN)
            await asyncio.sleep(self.dice.uniform(0.2, longest))
        finally:
            slot.go_on()

    async def _cut(self, slot: Slot) -> None:
        assert slot.cable is not None
        slot.cable.cut()

    async def _freeze(self, slot: Slot) -> None:
        assert slot.cable is not None
        slot.cable.freeze()
        try:
            await asyncio.sleep(self.dice.uniform(0.5, FROZEN))
        finally:
            slot.cable.thaw()

    async def _restart_broker(self) -> None:
        server = self.queue.server
        assert server is not None
        can_kill = self.queue.promises.survives_a_kill
        await asyncio.to_thread(
            server.kill if can_kill and self.dice.random() < 0.5 else server.stop
        )
        await asyncio.sleep(self.dice.uniform(0, BROKER_DOWN))
        await asyncio.to_thread(server.start)

    async def _step_clock(self, slot: Slot) -> None:
        step = self.dice.choice(CLOCK_STEPS) * self.dice.choice((1, -1))
        write_whole(slot.clock_file, f"{step:+d}\n")

    async def _slow_names(self, slot: Slot) -> None:
        write_whole(slot.names_file, f"{SLOW_NAMES_MS}\n")
        await asyncio.sleep(SLOW_NAMES)
        write_whole(slot.names_file, "0\n")


def write_whole(file: Path, text: str) -> None:
    """Let nobody read half of it."""
    new = file.with_name(f"{file.name}.new")
    new.write_text(text)
    new.replace(file)


def shims(folder: Path) -> str:
    """Return what to preload, so that a process has a clock and names that can be changed."""
    found = sorted(Path("/usr/lib").glob(FAKETIME))
    if not found:
        skip_or_fail("libfaketime is missing: ./dev brokers installs it")
    return os.pathsep.join((str(build_names(folder)), str(found[0])))


def build_names(folder: Path) -> Path:
    """Compile the shim that makes names slow."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        skip_or_fail("a C compiler is missing: ./dev brokers installs it")
    library = folder / "names.so"
    source = Path(__file__).with_name("names.c")
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", str(library), str(source), "-ldl"]
    subprocess.run([compiler, *flags], check=True)
    return library


def preloading(libraries: str, slot: Slot) -> dict[str, str]:
    """The environment of a router whose clock and names can be changed. Elapsed time stays true."""
    write_whole(slot.clock_file, "+0\n")
    return {
        "LD_PRELOAD": libraries,
        "FAKETIME_TIMESTAMP_FILE": str(slot.clock_file),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",
        "NO_FAKE_STAT": "1",
        "NAMES_FILE": str(slot.names_file),
    }
