"""When a message is tried again, and when it is given up (WQ-5). Nothing here changes anything."""

from collections.abc import Callable, Iterator
from itertools import count
from typing import Final

from msgspec import Struct

from router.core.config import RetryPolicy
from router.core.dead_letter import Reason
from router.core.job import GiveUp
from router.core.outcome import DEFAULT_DELAY_SECONDS, MAX_DELAY_SECONDS, Disposition, Outcome

Jitter = Callable[[float, float], float]  # random.uniform, or a constant in tests

_FIRST_DELAY_SECONDS: Final = 0.5
_LONGEST_DELAY_SECONDS: Final = 30.0
_DOUBLINGS: Final = 6  # 0.5 · 2^6 exceeds the longest delay: no need to count further


class Retry(Struct, frozen=True):
    """NACK it, to be handed out again after a delay."""

    delay: float  # seconds
    error: str  # "" if it was no real failure


class Decision(Struct, frozen=True):
    action: Retry | GiveUp
    failures: int  # of the message, including this one if it counts


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
    return jitter(0.0, min(ceiling, _LONGEST_DELAY_SECONDS))


def _give_up(outcome: Outcome, reason: Reason) -> GiveUp:
    failure = None if outcome.ending is None else outcome.ending.failure
    return GiveUp(reason, outcome.kept_error, outcome.status, outcome.reply, failure)
