"""What was given back for a while, until it comes again.

A failure takes along what the router has of its group (FIFO-1). So a group that went back message
by message must come in together again: if its first one were handed over alone and failed once
more, those behind it would pass.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Hashable, Iterable
from typing import Final

import msgspec
from msgspec import Struct, field

from router.core.message import Mode

SOON: Final = 1.0  # seconds between two that were given back one after the other, at most
LATE: Final = 1.0  # what is overdue for so long has gone to another router
LONGEST_GATHERING: Final = 2.0
CAPACITY: Final = 100_000  # about 30 MB; what is put off beyond that is not waited for


class _Grouped(Struct):
    group: str | None = field(default=None, name="messageGroupId")
    dispatch: str | None = field(default=None, name="dispatchMode")


def group_of(body: bytes) -> str | None:
    """As the publisher wrote it: a broker that knows no groups cannot tell."""
    return _read(body).group


def _read(body: bytes) -> _Grouped:
    try:
        return msgspec.json.decode(body, type=_Grouped)
    except msgspec.MsgspecError:
        return _Grouped()


class _Expected(Struct, frozen=True):
    due: float
    number: int
    key: Hashable
    group: str | None

    def __lt__(self, other: "_Expected") -> bool:
        return (self.due, self.number) < (other.due, other.number)


class Comebacks:
    """Of one queue. Times are the event loop's."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._missing: dict[Hashable, _Expected] = {}
        self._later: list[_Expected] = []  # a heap
        self._soon: deque[_Expected] = deque()  # and overdue; by time

    def __len__(self) -> int:
        return len(self._missing)

    def expect(self, key: Hashable, body: bytes, *, now: float, delay: float) -> None:
        self._look(now)
        message = _read(body)
        if message.dispatch == Mode.IMMEDIATE.value or len(self._later) >= CAPACITY:
            return
        expected = _Expected(now + delay, next(self._numbers), key, message.group)
        self._missing[key] = expected
        heapq.heappush(self._later, expected)

    def came(self, key: Hashable) -> None:
        self._missing.pop(key, None)

    def awaits_mates_of(self, bodies: Iterable[bytes], now: float) -> bool:
        """Whether some of their groups comes in any moment, and is not here."""
        self._look(now)
        groups = {each.group for each in self._soon if self._is_missing(each)}
        return bool(groups) and any(group_of(body) in groups for body in bodies)

    def _look(self, now: float) -> None:
        """Every call forgets what will not come any more, so that it does not pile up (P4)."""
        while self._later and self._later[0].due <= now + SOON:
            self._soon.append(heapq.heappop(self._later))
        while self._soon and self._soon[0].due < now - LATE:
            overdue = self._soon.popleft()
            if self._is_missing(overdue):
                del self._missing[overdue.key]

    def _is_missing(self, expected: _Expected) -> bool:
        return self._missing.get(expected.key) is expected
