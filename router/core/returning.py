"""Why a message goes back to its queue, and for how long; when it is given up instead.

`RETURNS` is the table of BRK-4: every NACK has one of its reasons. Its row is the delay, except for

- FAILED, PUT_OFF, NOT_SENT, OVERLOADED: `decide`, by what the target or the retry policy asks for;
  for an open circuit `circuit_delay`;
- BEHIND: `delay_behind`; 0 if it follows its group to the order store, or waits for a dead letter
  that holds the group;
- EARLY: the rest of the time until its `notBefore`;
- NO_ROOM: `deferral_seconds`, called by `FlowControl`, which knows the rate of the pool; what waits
  only for those in front of it comes back after a second. Where the broker skips full pools, the
  message need not stay away: 0.

Two things come after all of this. In a strict queue whose broker would hand out newer messages of
the group first, what keeps its place goes back for 0 (ORD-10, `Settler._in_its_place`). And an
adapter does what its broker can.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from enum import Enum, auto
from itertools import count
from typing import TYPE_CHECKING, Final

from msgspec import Struct
from msgspec.structs import replace

from router.core.config import RetryPolicy
from router.core.dead_letter import Reason

if TYPE_CHECKING:  # the table of outcomes names the reasons below
    from router.core.outcome import Failure, Outcome

Jitter = Callable[[float, float], float]  # random.uniform, or a constant in tests

DEFAULT_DELAY_SECONDS: Final = 30.0
NO_ROOM_DELAY_SECONDS: Final = 10.0
MIN_DELAY_SECONDS: Final = 1.0  # that a target can ask for
MAX_DELAY_SECONDS: Final = 43_200.0  # the strictest broker allows no more
MAX_CIRCUIT_DELAY_SECONDS: Final = 300.0
OUTAGE_SHARE: Final = 1 / 4  # of an outage: nothing waits longer after it
MIN_SPREAD: Final = 0.9  # of that delay, so that not all messages come back at once
MAX_SPREAD: Final = 1.1
MIN_DEFERRAL_SECONDS: Final = 10.0
MAX_DEFERRAL_SECONDS: Final = 60.0
MAX_IDLE_DEFERRAL_SECONDS: Final = 300.0  # of a pool that has delivered nothing for a minute
MAX_FAILURES: Final = 50  # without a retry policy: a message is given up after this many …
MAX_FAILING_SECONDS: Final = 24 * 3600.0  # … but not within this time (WQ-15)
MAX_REFUSALS: Final = 10  # a message whose end is refused so often is given up …
REFUSED_SECONDS: Final = 300.0  # … but not within this time
_FIRST_BACKOFF_SECONDS: Final = 0.5
_MAX_BACKOFF_SECONDS: Final = 30.0
_DOUBLINGS: Final = 6  # 0.5 · 2^6 exceeds the longest delay: no need to count further


class ReturnReason(Enum):
    """Why a message goes back to its queue."""

    FAILED = auto()  # its delivery failed
    PUT_OFF = auto()  # its target wants it later, or its circuit is open
    NOT_SENT = auto()  # the router could not send it
    OVERLOADED = auto()  # for want of a resource that is free again soon
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
    counts: bool = False  # a real failure: uses up an attempt of the retry policy (WQ-5)
    takes_group: bool = False  # the messages behind it in its group go back as well (FIFO-1)


RETURNS: Final[Mapping[ReturnReason, ReturnRule]] = {
    ReturnReason.FAILED: ReturnRule(DEFAULT_DELAY_SECONDS, counts=True, takes_group=True),
    ReturnReason.PUT_OFF: ReturnRule(DEFAULT_DELAY_SECONDS, takes_group=True),
    ReturnReason.NOT_SENT: ReturnRule(DEFAULT_DELAY_SECONDS, takes_group=True),
    ReturnReason.OVERLOADED: ReturnRule(NO_ROOM_DELAY_SECONDS, takes_group=True),
    ReturnReason.BEHIND: ReturnRule(NO_ROOM_DELAY_SECONDS),
    ReturnReason.CRASHED: ReturnRule(DEFAULT_DELAY_SECONDS, takes_group=True),
    ReturnReason.NOT_STORED: ReturnRule(DEFAULT_DELAY_SECONDS, takes_group=True),
    ReturnReason.EARLY: ReturnRule(MAX_DELAY_SECONDS, takes_group=True),
    ReturnReason.NO_ROOM: ReturnRule(NO_ROOM_DELAY_SECONDS),
    ReturnReason.COPY: ReturnRule(NO_ROOM_DELAY_SECONDS),
    ReturnReason.STOPPED: ReturnRule(0.0),
    ReturnReason.OVERDUE: ReturnRule(0.0),
    ReturnReason.LEASE_LOST: ReturnRule(0.0),
}


class Refusals(Struct, frozen=True):
    """How often the end of a message was refused: its reply, a next step or its result (CMD-3)."""

    count: int
    since: float  # of the first
    reason: str  # of the last

    def is_final(self, now: float) -> bool:
        """Return whether the message is given up."""
        return self.count >= MAX_REFUSALS and now - self.since >= REFUSED_SECONDS


class Endurance(Struct, frozen=True):
    """For how long a message has failed, besides how often (WQ-15)."""

    age: float  # seconds since its publication, else since its first failure that is known
    # Since its first failure in which nothing was sent; None: this one is none.
    unsent: float | None = None
    gives_up: bool = False  # without a retry policy, too


NOT_FAILING: Final = Endurance(0.0)


class Retry(Struct, frozen=True):
    """NACK it, to be handed out again after a delay."""

    reason: ReturnReason
    delay: float  # seconds
    error: str  # "" if it was no real failure


class GiveUp(Struct, frozen=True):
    """Why a message becomes a dead letter."""

    reason: Reason
    error: str
    http_status: int | None = None
    reply: bytes = b""
    failure: "Failure | None" = None  # what the target's reply says of it, unmasked


class Decision(Struct, frozen=True):
    action: Retry | GiveUp
    failures: int  # of the message, including this one if it counts


def delay_behind(delay: float, *, holds_groups: bool) -> float:
    """Return for how long messages go back behind one of their group that goes back for `delay`.

    A broker that holds groups back keeps the order by itself: what is due before the head of its
    group waits for it (FIFO-1).
    """
    return min(RETURNS[ReturnReason.BEHIND].delay, delay) if holds_groups else delay


def circuit_delay(outage: float) -> float:
    """Return for how long an open circuit returns a message, before it is spread (BRK-4)."""
    return min(max(outage * OUTAGE_SHARE, DEFAULT_DELAY_SECONDS), MAX_CIRCUIT_DELAY_SECONDS)


def clamp_delay(seconds: float) -> float:
    """Return a delay that every broker can do, rounded up: a target is never called early."""
    return float(math.ceil(min(max(seconds, MIN_DELAY_SECONDS), MAX_DELAY_SECONDS)))


def deferral_seconds(
    ahead: int, per_second: float, *, is_idle: bool, least: float = MIN_DEFERRAL_SECONDS
) -> float:
    """Return the delay of a message that has this many deferred ones before it (ROUTE-5).

    That is until its turn by the rate of its pool. `is_idle`: the pool has delivered nothing for a
    minute. A pool that has just begun says nothing about its rate yet.
    """
    if is_idle:
        return MAX_IDLE_DEFERRAL_SECONDS
    if not per_second:
        return MIN_DEFERRAL_SECONDS
    return min(max(ahead / per_second, least), MAX_DEFERRAL_SECONDS)


def policy_for(most: int, policy: RetryPolicy | None) -> RetryPolicy:
    """Return the retry policy of a message that asks for fewer attempts than its pool allows."""
    if policy is None:
        return RetryPolicy(most, schedule=())
    return replace(policy, max_attempts=min(most, policy.max_attempts or most))


def decide(
    outcome: "Outcome",
    failures: int,
    policy: RetryPolicy | None,
    jitter: Jitter,
    endurance: Endurance = NOT_FAILING,
) -> Decision:
    """Decide about a message that was not accepted and has failed `failures` times before."""
    rule, asked = outcome.rule, outcome.asked_delay
    if rule.returns is None:
        return Decision(give_up(outcome, rule.reason), failures + 1)
    row = RETURNS[rule.returns]
    unsent = endurance.unsent
    is_free = policy is not None and unsent is not None and unsent < policy.unsent_seconds
    counts = row.counts and not is_free
    failures += counts
    error = outcome.kept_error if row.counts else ""
    has_failed_enough = failures >= MAX_FAILURES and endurance.age >= MAX_FAILING_SECONDS
    if policy is None and endurance.gives_up and counts and has_failed_enough:
        return Decision(give_up(outcome, Reason.RETRIES_EXHAUSTED), failures)
    if policy is None or not rule.was_sent:
        return Decision(Retry(rule.returns, row.delay if asked is None else asked, error), failures)
    if counts and policy.max_attempts is not None and failures >= policy.max_attempts:
        return Decision(give_up(outcome, Reason.RETRIES_EXHAUSTED), failures)
    # The longer one wins: a target is never called before the time that it asked for.
    delay = max(retry_delay(policy, max(failures, 1), jitter), asked or 0.0)
    return Decision(Retry(rule.returns, min(delay, MAX_DELAY_SECONDS), error), failures)


def retry_delay(policy: RetryPolicy, failures: int, jitter: Jitter) -> float:
    """Return the seconds before the retry of a message that has failed so often, from 1."""
    if policy.schedule is None:
        return _exponential(failures - 1, jitter)
    if not policy.schedule:
        return DEFAULT_DELAY_SECONDS
    return policy.schedule[min(failures, len(policy.schedule)) - 1]


def reconnect_delays(jitter: Jitter) -> Iterator[float]:
    """Yield endless delays, exponential with full jitter: up to 0.5 s, 1 s, 2 s … 30 s (BRK-6)."""
    return (_exponential(n, jitter) for n in count())


def _exponential(n: int, jitter: Jitter) -> float:
    ceiling: float = _FIRST_BACKOFF_SECONDS * 2 ** min(n, _DOUBLINGS)
    return jitter(0.0, min(ceiling, _MAX_BACKOFF_SECONDS))


def give_up(outcome: "Outcome", reason: Reason) -> GiveUp:
    """Return why a message becomes a dead letter that had this outcome."""
    failure = None if outcome.ending is None else outcome.ending.failure
    return GiveUp(reason, outcome.kept_error, outcome.status, outcome.reply, failure)
