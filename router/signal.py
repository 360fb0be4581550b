"""Wakes tasks that wait for a change."""

import asyncio


class Signal:
    """Wakes every waiting task when it is rung.

    Code that awaits between checking and waiting must listen first, then check, then wait, so that
    it does not miss a ring in between.
    """

    __slots__ = ("_next_ring",)

    def __init__(self) -> None:
        self._next_ring: asyncio.Event | None = None  # made on use: most rings wake no waiter

    def listen(self) -> asyncio.Event:
        """Return an event that the next ring sets."""
        if self._next_ring is None:
            self._next_ring = asyncio.Event()
        return self._next_ring

    def ring(self) -> None:
        if self._next_ring is not None:
            self._next_ring.set()
            self._next_ring = None

    async def wait(self, at_most: float | None = None) -> None:
        """Wait for the next ring, up to a time limit in seconds."""
        await wait_for_signal(self.listen(), at_most)


async def wait_for_signal(rung: asyncio.Event, at_most: float | None) -> None:
    """Wait until the event is set, up to a time limit in seconds."""
    try:
        async with asyncio.timeout(at_most):
            await rung.wait()
    except TimeoutError:
        return
