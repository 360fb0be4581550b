"""The process that the router runs in: garbage collection, threads and file descriptors."""

import gc
import resource
import sys
from contextlib import suppress
from typing import Final

from msgspec import Struct

MAX_IDLE_CONNECTIONS: Final = 1000  # to targets, kept open for the next delivery
MIN_API_CONNECTIONS: Final = 8  # however few descriptors there are
# A thread that reads a large document, and one of a SQLite file, must not starve each other or the
# loop: with Python's own 5 ms, each of the loop's many system calls waits so long for the lock.
SWITCH_SECONDS: Final = 0.0001
COLLECT_AFTER_OBJECTS: Final = 10_000  # new ones that could be in a cycle


def tune_for_start() -> None:
    """Collect no garbage until the router is ready: a start leaves none."""
    gc.disable()
    sys.setswitchinterval(SWITCH_SECONDS)


def tune_for_service() -> None:
    """Collect garbage rarely, and never look at what the start has made: it stays.

    What a message leaves behind is in no cycle, so reference counts free it. With Python's own
    threshold, merely holding a batch of messages would start a collection.
    """
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER_OBJECTS)
    gc.enable()


class Shares(Struct, frozen=True):
    """How the file descriptors are divided."""

    limit: int  # of the process
    api: int  # connections of the API
    idle: int  # connections to targets, kept for reuse


def raise_limit() -> int:
    """Raise the soft limit of open files to the hard one. Return the limit that then holds."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # if the system refuses, the limit stays as it was
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return current_limit()


def current_limit() -> int:
    """Return how many files this process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def shares(limit: int, api: int) -> Shares:
    """Leave three quarters to deliveries and brokers, whatever the API is allowed to use.

    Connections that wait for their next delivery take at most half, so that at least a quarter is
    free for deliveries to other targets, for brokers and for files.
    """
    if limit < 0:  # unlimited
        return Shares(limit, api, MAX_IDLE_CONNECTIONS)
    least = max(limit // 4, MIN_API_CONNECTIONS)
    return Shares(limit, min(api, least), min(MAX_IDLE_CONNECTIONS, limit // 2))
