"""How receivers that found nothing learn that something has changed."""

import asyncio


class Bell:
    """Wakes everyone who listens.

    Listen first, then look, then wait: a ring in between is not missed.
    """

    def __init__(self) -> None:
        self._next_ring = asyncio.Event()

    def listen(self) -> asyncio.Event:
        """Set at the next ring."""
        return self._next_ring

    def ring(self) -> None:
        self._next_ring.set()
        self._next_ring = asyncio.Event()


async def wait_for_ring(rung: asyncio.Event, seconds: float) -> None:
    """Until the bell rings, at most `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            await rung.wait()
    except TimeoutError:
        return
