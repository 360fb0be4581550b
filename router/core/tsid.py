"""Ids for messages that came without one: 13 characters that sort by the time they were made."""

from collections.abc import Callable
from typing import Final

CROCKFORD: Final = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
LENGTH: Final = 13
EPOCH: Final = 1_577_836_800.0  # 2020-01-01T00:00:00Z, which lets 42 bits of ms last until 2159
TAIL_BITS: Final = 22


class Tsids:
    """Makes ids, each greater than the one before, also within one millisecond.

    `clock` answers Unix seconds, `random_bits(n)` a number of n random bits.
    """

    def __init__(self, clock: Callable[[], float], random_bits: Callable[[int], int]) -> None:
        self._clock = clock
        self._random_bits = random_bits
        self._last = -1

    def new(self) -> str:
        moment = int((self._clock() - EPOCH) * 1000) << TAIL_BITS
        # Within a millisecond, and while a clock that was set back catches up, ids count on.
        self._last = max(moment | self._random_bits(TAIL_BITS - 1), self._last + 1)
        shifts = range(5 * (LENGTH - 1), -1, -5)
        return "".join(CROCKFORD[self._last >> shift & 31] for shift in shifts)
