"""Measures how late the event loop is: how long after its time a timer goes off."""

import asyncio
from typing import Final

PAUSE_SECONDS: Final = 0.25
PROBES: Final = 120  # in a period of half a minute


class LoopLag:
    """Keeps the worst of the period under way and of the one before.

    So a scrape every half minute misses nothing, and reading resets nothing.
    """

    def __init__(self) -> None:
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
        self._worst = max(self._worst, late)
        self._probes += 1
        if self._probes == PROBES:
            self._worst_before, self._worst, self._probes = self._worst, 0.0, 0
