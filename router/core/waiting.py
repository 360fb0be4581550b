"""Why a message that the router holds is not on its way: one question, one vocabulary.

Metrics count messages by `WaitReason`, the dashboard shows that of a group, and `explain` puts it
into a sentence.
"""

from collections.abc import Iterator
from enum import StrEnum
from itertools import pairwise

from msgspec import Struct

from router.core.job import State, Try


class WaitReason(StrEnum):
    """An open circuit is not among them: it sends the message back to its queue."""

    ROOM = "room"  # its pool is full
    DRAINING = "draining"  # its pool is giving the group back
    GROUP = "group"  # earlier messages of its group
    RATE = "rate"
    PERMIT = "permit"
    RETRY = "retry"  # the pause between two tries
    SETTLE = "settle"  # its ACK or NACK
    QUEUED = "queued"  # group, rate or permit: for a past wait it is not recorded which


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


class Standing(Struct, frozen=True, kw_only=True):
    """Where a waiting message stands in its pool."""

    in_a_pool: bool = True  # False: no pool had room for it
    held_back: bool = False  # its group is being returned: the pool drains, or a lease was lost
    in_front: "Held | None" = None  # the first of its group
    ahead: int = 0  # messages of its group in front of it
    lanes_ahead: int = 0  # groups that are served before its own
    has_free_permit: bool = True
    rate_wait: float = 0.0  # seconds until the rate limit admits one more
    rate_step: float = 0.0  # seconds between two admissions; 0: no limit


class Held(Struct, frozen=True, kw_only=True):
    """A message that the router holds. Times are Unix seconds."""

    message_id: str
    queue: str
    pool: str
    group: str
    target: str
    state: State
    attempt: int  # requests sent so far, the open one included
    received_at: float
    started_at: float  # of the latest try
    resume_at: float | None = None  # of the next try, during the pause before it
    tries: tuple[Try, ...] = ()  # with the open one
    standing: Standing = Standing()
    failures: int = 0  # deliveries that ended in a real failure
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
    standing = held.standing
    if held.state is State.DELIVERING:
        return None
    if held.state is State.SETTLING:
        return WaitReason.SETTLE
    if held.state is State.WAITING and held.resume_at is not None:
        return WaitReason.RETRY
    if not standing.in_a_pool:
        return WaitReason.ROOM
    if standing.held_back:
        return WaitReason.DRAINING
    if held.state is State.WAITING:  # its pause is over
        return WaitReason.PERMIT
    if standing.in_front is not None:
        return WaitReason.GROUP
    return WaitReason.RATE if standing.has_free_permit and standing.rate_step else WaitReason.PERMIT
