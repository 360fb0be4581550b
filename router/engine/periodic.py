"""Work that is done at intervals, and how late the event loop lets it begin."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from router.core.returning import Jitter
from router.core.warnings import Code
from router.engine.alerts import Warn

log = logging.getLogger(__name__)

Chore = Callable[[], Awaitable[object]]
SPREAD_SHARE: Final = 0.1  # of a pause, either way (CFG-2)
RESTART_SECONDS: Final = 1.0  # after a bug
PAUSE_SECONDS: Final = 0.05
PROBES: Final = 600  # in a period of half a minute
STALL_SECONDS: Final = 0.25  # nothing may hold up the event loop for this long (OPS-7)


async def every(seconds: float, chore: Chore, *, jitter: Jitter | None = None) -> None:
    """Run `chore` after each pause of `seconds`, one run at a time, until cancelled.

    `jitter` spreads the pauses, so that many routers do not ask a service at the same instant.
    """
    while True:
        least, most = seconds * (1 - SPREAD_SHARE), seconds * (1 + SPREAD_SHARE)
        await asyncio.sleep(seconds if jitter is None else jitter(least, most))
        try:
            await chore()
        except Exception:
            # The bulkhead: a bug in one chore must end neither the chore nor the router.
            log.exception("%s failed", getattr(chore, "__qualname__", type(chore).__name__))
        end_if_cancelled()


async def keep_running(name: str, work: Chore, warn: Warn) -> None:
    """Run `work`, which has a loop of its own, until it returns or is cancelled.

    The bulkhead: after a bug it is started again.
    """
    while True:
        try:
            await work()
        except Exception as error:
            log.exception("%s failed", name)
            warn(Code.PROCESSING, f"{name} failed with {type(error).__name__}: started again")
            await asyncio.sleep(RESTART_SECONDS)
        else:
            return


def end_if_cancelled() -> None:
    """Raise CancelledError if this task was cancelled and a client swallowed it.

    `asyncio.wait_for` can, before Python 3.12, if its result comes at the same instant.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


class LoopLag:
    """Keeps the worst of the period under way and of the one before.

    So a scrape every half minute misses nothing, and reading resets nothing. Turns of the loop that
    took too long are counted since the start.
    """

    def __init__(self) -> None:
        self.beats = 0  # measurements so far: a thread sees by them whether the loop goes on
        self.stalls = 0
        self.stalled_seconds = 0.0
        self._worst = 0.0
        self._worst_before = 0.0
        self._probes = 0

    @property
    def seconds(self) -> float:
        return max(self._worst, self._worst_before)

    async def watch(self) -> None:
        """Measure until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + PAUSE_SECONDS
            await asyncio.sleep(PAUSE_SECONDS)
            self.note(loop.time() - due)

    def note(self, late: float) -> None:
        self.beats += 1
        if late >= STALL_SECONDS - PAUSE_SECONDS:  # it may have begun right after the last look
            self.stalls += 1
            self.stalled_seconds += late
        self._worst = max(self._worst, late)
        self._probes += 1
        if self._probes == PROBES:
            self._worst_before, self._worst, self._probes = self._worst, 0.0, 0
