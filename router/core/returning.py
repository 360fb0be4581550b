"""Why a message goes back to its queue, and for how long; when it is given up instead.

`RETURNS` is the table of BRK-4: every NACK has one of its reasons. After a failed delivery the
target and the retry policy may ask for another delay, which `decide` finds (WQ-5).
"""

from collections.abc import Callable, Iterator, Mapping
from enum import Enum, auto
from itertools import count
from typing import Final

from msgspec import Struct

from router.core.config import RetryPolicy
from router.core.dead_letter import Reason
from router.core.outcome import (
    DEFAULT_DELAY_SECONDS,
    MAX_DELAY_SECONDS,
    NO_ROOM_DELAY_SECONDS,
    Disposition,
    Failure,
    Outcome,
)

Jitter = Callable[[float, float], float]  # random.uniform, or a constant in tests

MAX_REFUSALS: Final = 10  # a message whose end is refused so often is given up …
REFUSED_SECONDS: Final = 300.0  # … but not within so many seconds
_FIRST_DELAY_SECONDS: Final = 0.5
_MAX_BACKOFF_SECONDS: Final = 30.0
_DOUBLINGS: Final = 6  # 0.5 · 2^6 exceeds the longest delay: no need to count further


class ReturnReason(Enum):
    """Why a message goes back to its queue."""

    FAILED = auto()  # its delivery failed, or was not made
    BEHIND = auto()  # it is behind such a message in its group
    CRASHED = auto()  # a bug of the router was met
    NOT_STORED = auto()  # it is to be a dead letter, and the store does not take it
    EARLY = auto()  # its `notBefore` is still to come
    NO_ROOM = auto()  # its pool is full
    COPY = auto()  # too many copies of one message wait here for its end
    STOPPED = auto()  # its pool, its queue or the router stops
    OVERDUE = auto()  # it was held for as long as its broker allows
    LEASE_LOST = auto()  # a message before it in its group lost its lease


class ReturnRule(Struct, frozen=True):
    """One row of the table."""

    delay: float  # seconds, unless the message has its own; of BEHIND and EARLY the longest
    takes_group: bool  # what is behind it in its group goes back as well (FIFO-1)


RETURNS: Final[Mapping[ReturnReason, ReturnRule]] = {
    ReturnReason.FAILED: ReturnRule(DEFAULT_DELAY_SECONDS, takes_group=True),
    ReturnReason.BEHIND: ReturnRule(NO_ROOM_DELAY_SECONDS, takes_group=False),
    ReturnReason.CRASHED: ReturnRule(DEFAULT_DELAY_SECONDS, takes_group=True),
    ReturnReason.NOT_STORED: ReturnRule(DEFAULT_DELAY_SECONDS, takes_group=True),
    ReturnReason.EARLY: ReturnRule(MAX_DELAY_SECONDS, takes_group=False),
    ReturnReason.NO_ROOM: ReturnRule(NO_ROOM_DELAY_SECONDS, takes_group=False),
    ReturnReason.COPY: ReturnRule(NO_ROOM_DELAY_SECONDS, takes_group=False),
    ReturnReason.STOPPED: ReturnRule(0.0, takes_group=False),
    ReturnReason.OVERDUE: ReturnRule(0.0, takes_group=False),
    ReturnReason.LEASE_LOST: ReturnRule(0.0, takes_group=False),
}


class Refusals(Struct, frozen=True):
    """How often the end of a message was refused: its reply, a next step or its result (CMD-3)."""

    count: int
    since: float  # of the first
    reason: str  # of the last

    def is_final(self, now: float) -> bool:
        """Return whether the message is given up."""
        return self.count >= MAX_REFUSALS and now - self.since >= REFUSED_SECONDS


class Retry(Struct, frozen=True):
    """NACK it, to be handed out again after a delay."""

    delay: float  # seconds
    error: str  # "" if it was no real failure


class GiveUp(Struct, frozen=True):
    """Why a message becomes a dead letter."""

    reason: Reason
    error: str
    http_status: int | None = None
    reply: bytes = b""
    failure: Failure | None = None  # what the target's reply says of it, unmasked


class Decision(Struct, frozen=True):
    action: Retry | GiveUp
    failures: int  # of the message, including this one if it counts


def delay_behind(delay: float, *, holds_groups: bool) -> float:
    """Return for how long messages go back behind one of their group that goes back for `delay`.

    A broker that holds groups back keeps the order by itself: what is due before the head of its
    group waits for it (FIFO-1).
    """
    return min(RETURNS[ReturnReason.BEHIND].delay, delay) if holds_groups else delay


def decide(outcome: Outcome, failures: int, policy: RetryPolicy | None, jitter: Jitter) -> Decision:
    """Decide about a message that was not accepted and has failed `failures` times before."""
    rule = outcome.rule
    if rule.disposition is Disposition.DEAD_LETTER:
        return Decision(_give_up(outcome, rule.reason), failures + 1)
    failures += rule.counts
    error = outcome.kept_error if rule.counts else ""
    if policy is None or not rule.was_sent:
        return Decision(Retry(outcome.delay, error), failures)
    if rule.counts and policy.max_attempts is not None and failures >= policy.max_attempts:
        return Decision(_give_up(outcome, Reason.RETRIES_EXHAUSTED), failures)
    # The longer one wins: a target is never called before the time that it asked for.
    delay = max(retry_delay(policy, max(failures, 1), jitter), outcome.asked_delay or 0.0)
    return Decision(Retry(min(delay, MAX_DELAY_SECONDS), error), failures)


def retry_delay(policy: RetryPolicy, failures: int, jitter: Jitter) -> float:
    """Return the seconds before the retry of a message that has failed so often, from 1."""
    if policy.schedule is None:
        return _exponential(failures - 1, jitter)
    if not policy.schedule:
        return DEFAULT_DELAY_SECONDS
    return policy.schedule[min(failures, len(policy.schedule)) - 1]


def reconnect_delays(jitter: Jitter) -> Iterator[float]:
    """Yield delays for ever, exponential with full jitter: up to 0.5 s, 1 s, 2 s … 30 s (BRK-6)."""
    return (_exponential(n, jitter) for n in count())


def _exponential(n: int, jitter: Jitter) -> float:
    ceiling: float = _FIRST_DELAY_SECONDS * 2 ** min(n, _DOUBLINGS)
    return jitter(0.0, min(ceiling, _MAX_BACKOFF_SECONDS))


def _give_up(outcome: Outcome, reason: Reason) -> GiveUp:
    failure = None if outcome.ending is None else outcome.ending.failure
    return GiveUp(reason, outcome.kept_error, outcome.status, outcome.reply, failure)
