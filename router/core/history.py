"""The history of a message: one hand-over by its broker at a time, and what it waits for.

There is one vocabulary for waiting: metrics count messages by `WaitReason`, the dashboard shows
that of a group, and `explain` puts it into a sentence.
"""

from collections.abc import Iterator, Sequence
from enum import Enum, StrEnum, auto
from itertools import pairwise
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from router.core.dead_letter import KeptLetter
from router.core.identity import MessageKey, shown_id
from router.core.outcome import Ending
from router.core.returning import RETURNS, ReturnReason
from router.core.trace import Span

TEXT_KEPT_CHARACTERS: Final = 256  # of a target or an error: thousands of hand-overs are kept


class WaitReason(StrEnum):
    """An open circuit is not among them: it sends the message back to its queue."""

    ROOM = "room"  # its pool is full
    DRAINING = "draining"  # its pool is giving the group back
    GROUP = "group"  # earlier messages of its group
    RATE = "rate"
    PERMIT = "permit"
    SHARE = "share"  # a worker: its target or tenant has its share of them
    TARGET = "target"  # a place at its target, or the end of its silence
    RETRY = "retry"  # the pause between two tries
    SETTLE = "settle"  # its ACK or NACK
    QUEUED = "queued"  # group, rate or permit: for a past wait it is not recorded which


class State(Enum):
    QUEUED = auto()
    WAITING = auto()  # for its next try, for room in a pool, or for a draining pool to let go
    DELIVERING = auto()  # a POST of it is open
    SETTLING = auto()  # its ACK or NACK is on its way


class Fate(StrEnum):
    """How a hand-over ended (OPS-6)."""

    DELIVERED = "delivered"  # accepted and acknowledged
    DEAD_LETTERED = "deadLettered"
    CANCELLED = "cancelled"  # while the router held it, and acknowledged (CMD-13)
    RETURNED = "returned"  # NACKed
    SUPERSEDED = "superseded"  # a redelivered or requeued copy, or a remembered ack
    STORED = "stored"  # moved to the order store, and acknowledged (ORD-12)
    FORFEITED = "forfeited"  # its lease or its connection was lost


class Try(Struct, frozen=True, gc=False):
    """One request of a delivery, as the history shows it."""

    started_at: float
    seconds: float | None  # None: the request is still open
    status: int | None = None  # of the HTTP answer, if there was one
    error: str | None = None  # in the operators' words; None: it was accepted

    @property
    def ended_at(self) -> float:
        return self.started_at + (self.seconds or 0.0)


class PastWait(Struct, frozen=True):
    """A time in which no request of a message was open."""

    reason: WaitReason
    since: float
    until: float | None  # None: it still waits


def past_waits(
    received_at: float, tries: tuple[Try, ...], ended_at: float | None
) -> Iterator[PastWait]:
    """Return the waits of one hand-over in order. `ended_at` is None while the router holds it."""
    first = tries[0].started_at if tries else ended_at
    yield PastWait(WaitReason.QUEUED, received_at, first)
    for before, after in pairwise(tries):
        yield PastWait(WaitReason.RETRY, before.ended_at, after.started_at)
    if tries and tries[-1].seconds is not None and ended_at is not None:
        yield PastWait(WaitReason.SETTLE, tries[-1].ended_at, ended_at)


class PoolPosition(Struct, frozen=True, kw_only=True):
    """Where a waiting message stands in its pool."""

    in_a_pool: bool = True  # False: no pool had room for it
    held_back: bool = False  # its group is being returned: the pool drains, or a lease was lost
    in_front: "Held | None" = None  # the first of its group
    ahead: int = 0  # messages of its group in front of it
    lanes_ahead: int = 0  # groups that are served before its own
    has_free_permit: bool = True
    rate_wait: float = 0.0  # seconds until the rate limit admits one more
    rate_step: float = 0.0  # seconds between two admissions; 0: no limit
    share: int | None = None  # workers of its target or tenant, which has that many
    at_target: bool = False  # it waits for a place at its target, or for the end of its silence
    silent_until: float | None = None  # the target asked for it; Unix seconds
    target_limit: float = 0.0  # requests at once that the target takes


class Held(Struct, frozen=True, kw_only=True):
    """A message that the router holds. Times are Unix seconds."""

    message_id: str
    queue: str
    pool: str
    group: str
    target: str
    state: State
    requests: int  # sent so far, the open one included
    received_at: float
    started_at: float  # of the latest try
    resume_at: float | None = None  # of the next try, during the pause before it
    tries: tuple[Try, ...] = ()  # with the open one
    position: PoolPosition = PoolPosition()
    failures: int = 0  # deliveries that ended in a real failure
    attempt: int = 1  # the number of the delivery under way, or of the next one (WQ-14)
    correlation_id: str | None = None
    payload_bytes: int = 0

    @property
    def waits(self) -> list[PastWait]:
        return list(past_waits(self.received_at, self.tries, None))


class HeldGroup(Struct, frozen=True):
    """A message group that waits."""

    first: Held
    waiting: int  # messages


def why_waiting(held: Held) -> WaitReason | None:  # noqa: PLR0911  a table of cases, in their order
    """Return what the message waits for, or None while a request of it is open."""
    position = held.position
    if held.state is State.DELIVERING:
        return None
    if held.state is State.SETTLING:
        return WaitReason.SETTLE
    if held.state is State.WAITING and held.resume_at is not None:
        return WaitReason.RETRY
    if not position.in_a_pool:
        return WaitReason.ROOM
    if position.held_back:
        return WaitReason.DRAINING
    if position.at_target:
        return WaitReason.TARGET
    if held.state is State.WAITING:  # its pause is over
        return WaitReason.PERMIT
    if position.in_front is not None:
        return WaitReason.GROUP
    if position.has_free_permit and position.rate_step:
        return WaitReason.RATE
    return WaitReason.PERMIT if position.share is None else WaitReason.SHARE


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
    error: str = ""  # why it became a dead letter or was returned
    requests: int = 0  # sent so far, those of earlier hand-overs included
    parent: Span | None = None  # of the publisher, if it sent one
    ending: Ending | None = None  # its result or error, if more is known than its fate (CMD-2)
    failures: int = 0  # deliveries that ended in a real failure, earlier hand-overs included
    correlation_id: str | None = None
    payload_bytes: int = 0
    return_reason: ReturnReason | None = None  # if it was returned to the broker

    @property
    def attempt(self) -> int:
        """The number of its delivery (WQ-14)."""
        rule = None if self.return_reason is None else RETURNS[self.return_reason]
        has_failed = self.fate is Fate.DEAD_LETTERED or (rule is not None and rule.counts)
        return max(self.failures, 1) if has_failed else self.failures + 1

    @property
    def broker_id(self) -> str | None:
        return shown_id(self.key, self.message_id)

    @property
    def waits(self) -> list[PastWait]:
        return list(past_waits(self.received_at, self.tries, self.ended_at))

    @property
    def due_at(self) -> float | None:
        """When it may be handed out again, or None if it was neither returned nor stored."""
        returned = self.fate in (Fate.RETURNED, Fate.STORED)
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
