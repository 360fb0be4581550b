"""What happened to a message, one hand-over by its broker at a time."""

from collections.abc import Sequence
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from router.core.dead_letter import KeptLetter
from router.core.ending import Ending
from router.core.identity import MessageKey, shown_id
from router.core.job import Fate, Try
from router.core.trace import Span
from router.core.waiting import Held, PastWait, past_waits

TEXT_KEPT: Final = 256  # characters of a target or an error: thousands of hand-overs are kept


class HandOver(Struct, frozen=True, gc=False):
    """One stay in the router that has ended. All times are on one clock, whichever that is."""

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
    returned_for: float | None = None  # seconds, if it was returned to the broker
    error: str = ""  # why it became a dead letter
    requests: int = 0  # sent so far, those of earlier hand-overs included
    parent: Span | None = None  # of the publisher, if it sent one
    ending: Ending | None = None  # its result or error, if more is known than its fate (CMD-2)
    failures: int = 0  # deliveries that ended in a real failure, earlier hand-overs included
    correlation_id: str | None = None
    payload_bytes: int = 0

    @property
    def broker_id(self) -> str | None:
        return shown_id(self.key, self.message_id)

    @property
    def waits(self) -> list[PastWait]:
        return list(past_waits(self.received_at, self.tries, self.ended_at))

    @property
    def due_at(self) -> float | None:
        """When the broker may hand it out again, or None if it was not returned."""
        returned = self.fate is Fate.RETURNED
        return self.ended_at + (self.returned_for or 0.0) if returned else None

    def moved(self, seconds: float) -> "HandOver":
        """Return the same hand-over on a clock that is ahead by so much."""
        return replace(
            self,
            received_at=self.received_at + seconds,
            tries=moved_tries(self.tries, seconds),
            ended_at=self.ended_at + seconds,
        )


def moved_tries(tries: tuple[Try, ...], seconds: float) -> tuple[Try, ...]:
    return tuple(replace(each, started_at=each.started_at + seconds) for each in tries)


class MessageHistory(Struct, frozen=True, kw_only=True):
    """Everything the router knows about one message. Times are Unix seconds."""

    message_id: str
    ended: Sequence[HandOver] = ()  # the oldest first
    held: Sequence[Held] = ()  # more than one: the same id for several targets
    letter: KeptLetter | None = None

    @property
    def hand_overs(self) -> Sequence[HandOver | Held]:
        return (*self.ended, *self.held)

    @property
    def is_empty(self) -> bool:
        return not (self.ended or self.held or self.letter)
