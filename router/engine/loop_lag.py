"""How late the event loop is: a timer now and then, and how long after its time it went off."""

import asyncio
from typing import Final

PAUSE: Final = 0.25
PROBES: Final = 120  # in a period of half a minute


class LoopLag:
    """Remembers the worst of the period under way and of the one before.

    So a scrape every half minute misses nothing, and reading needs to reset nothing.
    """

    def __init__(self) -> None:
        self._worst = 0.0
        self._worst_before = 0.0
        self._probes = 0

    @property
    def seconds(self) -> float:
        return max(self._worst, self._worst_before)

    async def watch(self) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + PAUSE
            await asyncio.sleep(PAUSE)
            self.note(loop.time() - due)

    def note(self, late: float) -> None:
        self._worst = max(self._worst, late)
        self._probes += 1
        if self._probes == PROBES:
            self._worst_before, self._worst, self._probes = self._worst, 0.0, 0
