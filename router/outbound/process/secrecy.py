"""Keeps what the router knows from the processes that it starts (CMD-8)."""

import ctypes
import os
from pathlib import Path
from typing import Final

_PR_SET_DUMPABLE: Final = 4
_ENV_START: Final = 47  # in /proc/self/stat, counted from the field behind the name


def hide_from_tasks() -> None:
    """Keep our memory from other processes of our user, and our environment in /proc from all.

    Secrets come to us in the environment. Not being dumpable is enough against everybody but root,
    which tasks are if the router is. To be called before there are threads.
    """
    libc = ctypes.CDLL(None)
    for name, value in os.environb.items():
        os.putenv(name, value)  # the C library now has copies of its own, which others may need
    start, end = _environment()
    ctypes.memset(start, 0, end - start)
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def _environment() -> tuple[int, int]:
    """Return where the kernel has put our environment. That is what it shows to others."""
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    return int(fields[_ENV_START]), int(fields[_ENV_START + 1])
