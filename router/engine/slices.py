"""Pauses between large bodies, so that the event loop's other work gets its turn (P5)."""

import asyncio
import time
from typing import Final

SLICE_BYTES: Final = 256 * 1024  # read without a pause
LONG_SLICE_SECONDS: Final = 0.005


class Slices:
    """Cuts the reading of many bodies into slices."""

    def __init__(self) -> None:
        self._read_bytes = 0  # in this slice
        self._began = time.thread_time()

    @property
    def is_full(self) -> bool:
        """Whether to pause before the next body is read."""
        return self._read_bytes >= SLICE_BYTES

    def add(self, body: bytes) -> None:
        """Count a body that is read now."""
        self._read_bytes += len(body)

    async def pause(self) -> None:
        took = time.thread_time() - self._began
        # As long a pause if it took long: what others do needs several turns of the loop. With
        # 50 slow bodies of 1 MiB, another message takes 0.06 s instead of 0.14 s.
        await asyncio.sleep(took if took > LONG_SLICE_SECONDS else 0)
        self._read_bytes, self._began = 0, time.thread_time()
