"""From how a delivery ended to what is done with the message: the table of SPEC §11 and WQ-5."""

from typing import Final

from msgspec import Struct

from router.core.backoff import Jitter, retry_delay
from router.core.config import RetryPolicy
from router.core.dead_letter import Reason
from router.core.job import Death
from router.core.outcome import MAX_DELAY, Error, Outcome

_UNSENT: Final = {Error.CIRCUIT_OPEN, Error.OVERLOADED}  # the target had no part in it
_REASONS: Final[dict[Error | None, Reason]] = {
    Error.TARGET_REFUSED: Reason.TARGET_REFUSED,
    Error.PERMANENT: Reason.PERMANENT,
}


class Return(Struct, frozen=True):
    """Back to the broker."""

    delay: float
    error: str  # "" when it was no real failure


class Decision(Struct, frozen=True):
    action: Return | Death
    failures: int  # of the message, this one included if it counts


def settlement(
    outcome: Outcome, failures: int, policy: RetryPolicy | None, jitter: Jitter
) -> Decision:
    """Decide what to do with a message that was not accepted and has failed so often before."""
    if outcome.consequence.dead_letter:
        reason = _REASONS.get(outcome.error, Reason.CONFIG_ERROR)
        return Decision(_death(outcome, reason), failures + 1)
    failures += outcome.counts
    error = outcome.detail if outcome.counts else ""
    if policy is None or outcome.error in _UNSENT:
        return Decision(Return(outcome.delay, error), failures)
    if outcome.counts and policy.max_attempts is not None and failures >= policy.max_attempts:
        return Decision(_death(outcome, Reason.RETRIES_EXHAUSTED), failures)
    # The longer one wins: a target is never called before the time that it asked for.
    delay = max(retry_delay(policy, max(failures, 1), jitter), outcome.asked_delay or 0.0)
    return Decision(Return(min(delay, MAX_DELAY), error), failures)


def _death(outcome: Outcome, reason: Reason) -> Death:
    return Death(reason, outcome.detail, outcome.status, outcome.reply)
