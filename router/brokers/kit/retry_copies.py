"""What a retry copy carries, for brokers that cannot delay a message that they hold.

The adapter publishes a copy that comes back later, waits until the broker has confirmed it, and
then acknowledges the original. A crash in between duplicates a message and never loses it. The
headers make the copy the same message to us. Anyone can publish such headers, so they prove
nothing (ID-1) and whatever they hold must do no harm.
"""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Final, TypeVar

from msgspec import Struct

from router.core.message import Tally
from router.core.outcome import MAX_DELAY

T = TypeVar("T")

PREFIX: Final = "x-message-router-"
ROUNDING_SECONDS: Final = 0.5  # a copy may come back that much later than asked for

_ID: Final = f"{PREFIX}id"
_FAILURES: Final = f"{PREFIX}attempts"
_REQUESTS: Final = f"{PREFIX}posts"
_DELIVERIES: Final = f"{PREFIX}deliveries"
_DUE_AT: Final = f"{PREFIX}not-before"  # Unix time in milliseconds
_MAX_DIGITS: Final = 15


class RetryHistory(Struct, frozen=True):
    """What happened to a message before this copy of it."""

    first_id: str | None = None  # of the message that was copied first
    tally: Tally = Tally()
    deliveries: int = 0
    due_at: float = 0.0  # Unix time

    def wait(self, now: float, *, tolerance: float = 0.0) -> float:
        """Return the seconds until it may be delivered. Ignore a time that we never set."""
        left = self.due_at - now
        return left if tolerance < left <= MAX_DELAY + ROUNDING_SECONDS else 0.0


def read_history(headers: Mapping[str, object]) -> RetryHistory | None:
    """Return the history of a retry copy, or None if the message is no copy of ours."""
    if _DUE_AT not in headers:
        return None
    first_id = headers.get(_ID)
    return RetryHistory(
        first_id if isinstance(first_id, str) else None,
        Tally(_count(headers.get(_FAILURES)), _count(headers.get(_REQUESTS))),
        _count(headers.get(_DELIVERIES)),
        _count(headers.get(_DUE_AT)) / 1000,
    )


def history_headers(history: RetryHistory) -> dict[str, str | int]:
    headers: dict[str, str | int] = {} if history.first_id is None else {_ID: history.first_id}
    return headers | {
        _FAILURES: history.tally.failures,
        _REQUESTS: history.tally.requests,
        _DELIVERIES: history.deliveries,
        _DUE_AT: round(history.due_at * 1000),
    }


def publishers_headers(
    headers: Mapping[str, T], brokers: AbstractSet[str], prefixes: tuple[str, ...]
) -> dict[str, T]:
    """Return the headers to copy: all but ours and those that the broker wrote or acts upon."""
    not_copied = (*prefixes, PREFIX)
    return {
        name: value
        for name, value in headers.items()
        if name not in brokers and not name.startswith(not_copied)
    }


def _count(value: object) -> int:
    """Read a number, from a broker whose headers have types or from one that has only text."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= _MAX_DIGITS:
        return int(value)
    return value if isinstance(value, int) and value > 0 else 0
