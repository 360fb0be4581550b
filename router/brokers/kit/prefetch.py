"""Bounds in bytes what a broker pushes ahead: brokers count messages only (P4)."""

from collections.abc import Iterable
from typing import Final

WINDOW_BYTES: Final = 64 * 1024 * 1024  # of one connection, of messages that nobody asked for yet
LARGE_BYTES: Final = 64 * 1024  # smaller messages never fill a window of the usual count


class PrefetchLimit:
    """How many messages the windows of one queue may hold. Lowered for good when they are large.

    What a broker has begun to push cannot be refused, so the connection is given up: the broker has
    all of it back, and the next window is smaller.
    """

    def __init__(self) -> None:
        self._most: int | None = None

    def of(self, configured: int) -> int:
        return configured if self._most is None else min(configured, self._most)

    def overflow(self, newest: int, sizes: Iterable[int]) -> str | None:
        """Return why the connection has to be given up, or None if all of it fits.

        `sizes`: of all messages in the window; `newest`: of the one that came just now.
        """
        if newest <= LARGE_BYTES:
            return None
        held = list(sizes)
        if len(held) == 1 or sum(held) <= WINDOW_BYTES:
            return None
        self._most = max(len(held) // 2, 1)
        return f"large messages: the prefetch window is lowered to {self._most}"
