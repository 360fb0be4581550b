"""From how a delivery ended to what is done with the message: the table of SPEC §11 and WQ-5."""

from typing import Final

from msgspec import Struct

from router.core.backoff import Jitter, retry_delay
from router.core.config import RetryPolicy
from router.core.dead_letter import Reason
from router.core.job import Death, Job
from router.core.outcome import MAX_DELAY, Error, Outcome

_REASONS: Final[dict[Error | None, Reason]] = {Error.TARGET_REFUSED: Reason.TARGET_REFUSED}


class Return(Struct, frozen=True):
    """Back to the broker."""

    delay: float
    error: str  # "" when it was no real failure


def settlement(
    outcome: Outcome, job: Job, policy: RetryPolicy | None, jitter: Jitter
) -> Return | Death:
    """What to do with a message that was not accepted. Counts the attempt on the job."""
    if outcome.consequence.dead_letter:
        job.attempts += 1
        return _death(outcome, _REASONS.get(outcome.error, Reason.CONFIG_ERROR))
    if not outcome.counts:
        return Return(outcome.delay, "")
    job.attempts += 1
    if policy is None:
        return Return(outcome.delay, outcome.detail)
    if policy.max_attempts is not None and job.attempts >= policy.max_attempts:
        return _death(outcome, Reason.RETRIES_EXHAUSTED)
    delay = retry_delay(policy, job.attempts, jitter)
    # A longer delay asked for by the target wins.
    return Return(min(max(delay, outcome.asked_delay or 0.0), MAX_DELAY), outcome.detail)


def _death(outcome: Outcome, reason: Reason) -> Death:
    return Death(reason, outcome.detail, outcome.status, outcome.reply)
