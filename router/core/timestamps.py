"""Times as text for people, and as ids that sort by the time they were made."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

CROCKFORD: Final = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
TSID_CHARACTERS: Final = 13
EPOCH_SECONDS: Final = 1_577_836_800.0  # 2020-01-01: 42 bits of milliseconds last until 2159
TAIL_BITS: Final = 22
_FIRST_SECONDS: Final = -62_135_596_800.0  # the year 1
_LAST_SECONDS: Final = 253_402_300_799.9995  # the end of 9999


def iso(seconds: float, precision: str = "milliseconds") -> str:
    """Return Unix seconds as ISO 8601 in UTC, such as 2026-01-31T08:15:30.123Z.

    A time before the year 1 or after 9999 becomes the first or last moment that can be written.
    """
    shown = min(max(seconds, _FIRST_SECONDS), _LAST_SECONDS)
    moment = datetime.fromtimestamp(shown, UTC).replace(tzinfo=None)
    return f"{moment.isoformat(timespec=precision)}Z"


def duration(seconds: float) -> str:
    """Return a length of time for people, such as "3 h 5 min", "5 min" or "5 s"."""
    minutes = int(seconds) // 60
    hours = minutes // 60
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min" if minutes else f"{int(seconds)} s"


class Tsids:
    """Makes ids of 13 characters for messages that came without one.

    Each is greater than the one before, also within one millisecond. `clock` answers Unix seconds,
    `random_bits(n)` a number of n random bits.
    """

    def __init__(self, clock: Callable[[], float], random_bits: Callable[[int], int]) -> None:
        self._clock = clock
        self._random_bits = random_bits
        self._last = -1

    def new(self) -> str:
        moment = int((self._clock() - EPOCH_SECONDS) * 1000) << TAIL_BITS
        # Within a millisecond, and while a clock that was set back catches up, ids count on.
        self._last = max(moment | self._random_bits(TAIL_BITS - 1), self._last + 1)
        shifts = range(5 * (TSID_CHARACTERS - 1), -1, -5)
        return "".join(CROCKFORD[self._last >> shift & 31] for shift in shifts)
