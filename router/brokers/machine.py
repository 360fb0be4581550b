"""The machine that a router runs on: its clocks, and which boot of it this is."""

import secrets
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from msgspec import Struct

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
# Seconds since the boot, sleep included. On macOS, the monotonic clock goes on while it sleeps.
_UPTIME: Final[int] = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


class Machine(Struct, frozen=True):
    wall: Callable[[], float] = time.time  # may be set by anyone, to any time
    uptime: Callable[[], float] = partial(time.clock_gettime, _UPTIME)  # nobody can set it
    boot_id: str = _boot_id()  # names what `uptime` counts from; "": unknown
    new_id: Callable[[], str] = partial(secrets.token_hex, 8)


THIS_MACHINE: Final = Machine()
