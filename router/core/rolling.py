"""Totals that only grow, and how much they grew lately, at constant cost and in bounded memory."""

from array import array
from collections.abc import Sequence
from typing import Final

MINUTE: Final = 60.0
LONGEST: Final = 30  # minutes, the longest period
_INTEGERS: Final = "q"  # of 8 bytes each: the notes of ten thousand pools are millions of them


class Rolling:
    """A fixed number of totals. Their values are noted once in each minute that changes them.

    So counting costs a comparison and an addition, a period is the difference of two notes, and
    totals that do not change cost nothing. Reading changes nothing.
    """

    __slots__ = ("_noted_until", "_notes", "totals")

    def __init__(self, size: int) -> None:
        self.totals = [0] * size  # counting in a list costs half of counting in an array
        self._noted_until = 0.0  # the end of the minute of the latest note
        self._notes: list[tuple[int, array[int]]] = []  # minute, and the totals as it began

    def at(self, now: float) -> list[int]:
        """Return the totals for adding to them at this instant."""
        if now >= self._noted_until:
            self._note(int(now // MINUTE))
        return self.totals

    def growth(self, minutes: int, now: float) -> Sequence[int]:
        """Return how much each total grew in so many minutes, the current one included."""
        before = self.as_of(minutes, now)
        return [total - earlier for total, earlier in zip(self.totals, before, strict=True)]

    def as_of(self, minutes: int, now: float) -> Sequence[int]:
        """Return the totals at the start of the first of so many minutes."""
        first = int(now // MINUTE) - minutes + 1
        if not self._notes or self._notes[-1][0] < first:
            return self.totals  # nothing has changed since
        return next(totals for minute, totals in self._notes if minute >= first)

    def _note(self, minute: int) -> None:
        self._noted_until = (minute + 1) * MINUTE
        self._notes.append((minute, array(_INTEGERS, self.totals)))
        del self._notes[:-LONGEST]


def covered(minutes: int, now: float) -> float:
    """Return the seconds in so many minutes; of the current minute only what has passed."""
    return (minutes - 1) * MINUTE + now % MINUTE
