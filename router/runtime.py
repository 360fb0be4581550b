"""The process that the router runs in: garbage collection, threads and file descriptors."""

import gc
import logging
import resource
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from msgspec import Struct

log = logging.getLogger(__name__)

MAX_IDLE_CONNECTIONS: Final = 1000  # to targets, kept open for the next delivery
MIN_API_CONNECTIONS: Final = 8  # however few descriptors there are
# A thread that reads a large document, and one of a SQLite file, must not starve each other or the
# loop: with Python's own 5 ms, each of the loop's many system calls waits that long for the lock.
SWITCH_SECONDS: Final = 0.0001
COLLECT_AFTER_OBJECTS: Final = 10_000  # new ones that could be in a cycle
REPORTED_STALL_SECONDS: Final = 1.0  # of the event loop
LOOK_SECONDS: Final = 0.25  # between two looks at it
SHOWN_FRAMES: Final = 20  # of a stack, the innermost


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


class DescriptorBudget(Struct, frozen=True):
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


def shares(limit: int, api: int) -> DescriptorBudget:
    """Leave three quarters to deliveries and brokers, whatever the API is allowed to use.

    Connections that wait for their next delivery take at most half, so that at least a quarter is
    free for deliveries to other targets, for brokers and for files.
    """
    if limit < 0:  # unlimited
        return DescriptorBudget(limit, api, MAX_IDLE_CONNECTIONS)
    least = max(limit // 4, MIN_API_CONNECTIONS)
    return DescriptorBudget(limit, min(api, least), min(MAX_IDLE_CONNECTIONS, limit // 2))


@contextmanager
def stalls_reported(beats: Callable[[], int]) -> Iterator[None]:
    """Log where the calling thread is whenever its event loop makes no progress (OPS-7).

    `beats` grows as long as the loop goes on. A thread of its own looks at it.
    """
    stopped = threading.Event()
    watcher = threading.Thread(
        target=_report_stalls,
        args=(beats, threading.get_ident(), stopped),
        name="loop watcher",
        daemon=True,
    )
    watcher.start()
    try:
        yield
    finally:
        stopped.set()
        watcher.join()


def _report_stalls(beats: Callable[[], int], thread: int, stopped: threading.Event) -> None:
    seen, stood, is_reported = -1, 0.0, False
    looked, used = time.monotonic(), time.process_time()
    while not stopped.wait(LOOK_SECONDS):
        passed, worked = time.monotonic() - looked, time.process_time() - used
        looked, used = looked + passed, used + worked
        if (count := beats()) != seen:
            seen, stood, is_reported = count, 0.0, False
        elif passed < 2 * LOOK_SECONDS or worked > passed / 2:  # else the process was stopped
            stood += passed
        if stood >= REPORTED_STALL_SECONDS and not is_reported:
            is_reported = True
            frames = traceback.format_stack(sys._current_frames()[thread])[-SHOWN_FRAMES:]  # noqa: SLF001  there is no other way
            log.error("the event loop has stood still for %.1f s in:\n%s", stood, "".join(frames))
