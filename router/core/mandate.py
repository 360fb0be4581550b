"""How long a router may act on its queues: for ever, or while it holds the leader lock (CFG-9)."""

from collections.abc import Callable
from typing import Final

FOREVER: Final = float("inf")
NEVER: Final = float("-inf")


class Mandate:
    """Looked at before every request and every settlement.

    It is the clock that ends it, not somebody's call: a process that was stopped for a while finds
    out by the first look. So the clock must not be one that an event loop reads once per turn.
    """

    __slots__ = ("now", "until")

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.until = FOREVER

    @property
    def is_over(self) -> bool:
        return self.until != FOREVER and self.until <= self.now()


def unlimited() -> Mandate:
    """For a router that shares its work with nobody."""
    return Mandate(lambda: 0.0)
