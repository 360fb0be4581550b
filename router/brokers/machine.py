"""The machine that a router runs on: its clocks, and which boot of it this is."""

import secrets
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from msgspec import Struct

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
# On macOS, it is the monotonic clock that goes on while the machine sleeps.
_UPTIME: Final[int] = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def _uptime() -> float:
    """Seconds since the boot, sleep included. Nobody can set this clock."""
    return time.clock_gettime(_UPTIME)


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


class Machine(Struct, frozen=True):
    wall: Callable[[], float] = time.time  # may be set by anyone, to any time
    uptime: Callable[[], float] = _uptime
    boot_id: str = _boot_id()  # names what `uptime` counts from; "": unknown
    new_id: Callable[[], str] = partial(secrets.token_hex, 8)


THIS_MACHINE: Final = Machine()
