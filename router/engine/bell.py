"""Waking those that wait for something to change, to look again."""

import asyncio


class Bell:
    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    def ring(self) -> None:
        """Wake everyone who waits now."""
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)

    async def wait(self, at_most: float | None = None) -> None:
        loop = asyncio.get_running_loop()
        rung: asyncio.Future[None] = loop.create_future()
        timer = None if at_most is None else loop.call_later(at_most, self._give_up, rung)
        self._waiting.add(rung)
        try:
            await rung
        finally:
            self._waiting.discard(rung)
            if timer is not None:
                timer.cancel()

    def _give_up(self, rung: "asyncio.Future[None]") -> None:
        if not rung.done():
            rung.set_result(None)
