"""How long a router may act on its queues: always, or while it has the leader lock (CFG-9)."""

from collections.abc import Callable
from typing import Final

FOREVER: Final = float("inf")
LONG_AGO: Final = float("-inf")


class Leadership:
    """Checked before every request and every settlement.

    The clock ends it, not a call: a process that was stopped for a while finds out at the first
    check. So the clock must not be one that an event loop reads once per turn.
    """

    __slots__ = ("is_ending", "now", "until")

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.until = FOREVER
        self.is_ending = False  # nothing new begins; what has begun may end

    @property
    def is_over(self) -> bool:
        return self.until != FOREVER and self.until <= self.now()


def unlimited() -> Leadership:
    """Return the leadership of a router without a standby."""
    return Leadership(lambda: 0.0)
