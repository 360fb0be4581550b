"""What became of a message, visit by visit: one visit is one hand-over by a broker."""

from collections.abc import Iterator
from enum import Enum
from itertools import pairwise
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from router.core.identity import MessageKey, shown_id
from router.core.job import Fate, Try
from router.core.trace import Span

TEXT_KEPT: Final = 256  # of a target or an error: thousands of visits are remembered


class WaitReason(Enum):
    QUEUED = "QUEUED"  # for its group, the rate limit or a permit
    BETWEEN_TRIES = "BETWEEN_TRIES"
    SETTLING = "SETTLING"  # for its ACK or NACK to get through


class Wait(Struct, frozen=True):
    reason: WaitReason
    since: float
    until: float | None  # None: it still waits


class Visit(Struct, frozen=True, gc=False):
    """One stay in the router that has ended. All times are by one clock, whichever that is."""

    message_id: str
    key: MessageKey
    queue: str
    pool: str
    group: str
    target: str
    received_at: float
    tries: tuple[Try, ...]
    ended_at: float
    fate: Fate
    returned_for: float | None = None  # seconds, when it was given back
    error: str = ""  # why it was given up
    posts: int = 0  # requests of it so far, those of earlier visits included
    parent: Span | None = None  # what published it, if it said so

    @property
    def broker_id(self) -> str | None:
        return shown_id(self.key, self.message_id)

    @property
    def due_at(self) -> float | None:
        """When its broker may hand it out again; None: it has not been given back."""
        returned = self.fate is Fate.RETURNED
        return self.ended_at + (self.returned_for or 0.0) if returned else None

    def moved(self, seconds: float) -> "Visit":
        """The same visit by a clock that is so much ahead."""
        return replace(
            self,
            received_at=self.received_at + seconds,
            tries=moved_tries(self.tries, seconds),
            ended_at=self.ended_at + seconds,
        )


def moved_tries(tries: tuple[Try, ...], seconds: float) -> tuple[Try, ...]:
    return tuple(replace(each, started_at=each.started_at + seconds) for each in tries)


def waits(received_at: float, tries: tuple[Try, ...], ended_at: float | None) -> Iterator[Wait]:
    """The times in which nothing was sent, in order. `ended_at` None: it is still here."""
    first = tries[0].started_at if tries else ended_at
    yield Wait(WaitReason.QUEUED, received_at, first)
    for before, after in pairwise(tries):
        yield Wait(WaitReason.BETWEEN_TRIES, before.ended_at, after.started_at)
    if tries and tries[-1].seconds is not None and ended_at is not None:
        yield Wait(WaitReason.SETTLING, tries[-1].ended_at, ended_at)
