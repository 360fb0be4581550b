"""Figures from samples, and what a process costs, seen from outside."""

import math
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

TICKS: Final = os.sysconf("SC_CLK_TCK")
KIB_PER_MIB: Final = 1024
# Places in /proc/…/stat behind the name: user and system time, and that of children that ended.
_TIMES: Final = slice(11, 15)


@dataclass(frozen=True, slots=True)
class Spread:
    """One figure over several rounds."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of them do not exceed."""
    place = math.ceil(len(values) * share)
    return sorted(values)[max(place, 1) - 1]


@dataclass(frozen=True, slots=True)
class WatchedProcess:
    """A process with all its children."""

    pid: int

    @property
    def cpu_seconds(self) -> float:
        """User and system time of all of them, those that ended included."""
        return sum(map(_cpu_ticks, _family(self.pid))) / TICKS

    @property
    def peak_mib(self) -> float:
        return sum(_status(pid, "VmHWM") for pid in _family(self.pid))

    @property
    def resident_mib(self) -> float:
        return sum(_status(pid, "VmRSS") for pid in _family(self.pid))


def _family(pid: int) -> Iterator[int]:
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*"):
        for child in _read(pid, f"task/{task.name}/children").split():
            yield from _family(int(child))


def _cpu_ticks(pid: int) -> int:
    fields = _read(pid, "stat").rpartition(")")[2].split()
    return sum(map(int, fields[_TIMES]))


def _status(pid: int, name: str) -> float:
    for line in _read(pid, "status").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / KIB_PER_MIB
    return 0.0  # it has ended and holds nothing


def _read(pid: int, what: str) -> str:
    """Nothing of a child that has just ended: its times are its parent's now."""
    try:
        return Path(f"/proc/{pid}/{what}").read_text()
    except OSError:
        return ""
