"""What becomes of a message that was not accepted: the table of SPEC §11, and retry policies."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.config import RetryPolicy
from router.core.dead_letter import Reason
from router.core.job import Death
from router.core.message import Tally
from router.core.outcome import (
    NO_OUTCOME,
    Answer,
    Error,
    Fault,
    NoReply,
    Outcome,
    Reply,
    Result,
    circuit_open,
    judge,
)
from router.core.settlement import Return, settlement
from tests.support.jobs import make_job

pytestmark = pytest.mark.rule("WQ-5")

NOW = datetime(2026, 1, 31, tzinfo=UTC).timestamp()
POLICY = RetryPolicy(max_attempts=3, schedule=(10.0, 60.0))


def longest(_low: float, high: float) -> float:
    return high


def judged(answer: Answer) -> Outcome:
    return judge(answer, lambda: NOW)


UNAVAILABLE = judged(Reply(503, b"busy"))
DEFERRED = judged(Reply(200, b'{"ack": false, "delaySeconds": 7}'))
RATE_LIMITED = judged(Reply(429, retry_after="90"))


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (judged(Reply(404, b"no")), Death(Reason.CONFIG_ERROR, "HTTP 404", 404, b"no")),
        (judged(Reply(501)), Death(Reason.CONFIG_ERROR, "HTTP 501", 501)),
        (
            judged(NoReply(Fault.TARGET_REFUSED, "link-local")),
            Death(Reason.TARGET_REFUSED, "link-local"),
        ),
        (judged(NoReply(Fault.BAD_REQUEST, "no")), Death(Reason.CONFIG_ERROR, "no")),
        (UNAVAILABLE, Return(30.0, "HTTP 503")),
        (judged(NoReply(Fault.NETWORK, "reset")), Return(30.0, "reset")),
        (judged(NoReply(Fault.TIMEOUT, "late")), Return(30.0, "late")),
        (DEFERRED, Return(7.0, "")),
        (RATE_LIMITED, Return(90.0, "")),
        (circuit_open(31.0), Return(31.0, "")),
        (NO_OUTCOME, Return(30.0, "the mediator gave no outcome")),
    ],
)
@pytest.mark.rule("BRK-4", "DLQ-1")
def test_without_a_policy_the_outcome_alone_decides(
    outcome: Outcome, expected: Return | Death
) -> None:
    assert settlement(outcome, make_job(), None, longest) == expected


@pytest.mark.parametrize(
    ("outcome", "uses_up"),
    [
        (UNAVAILABLE, 1),
        (judged(Reply(302)), 1),
        (judged(NoReply(Fault.NETWORK)), 1),
        (judged(NoReply(Fault.TIMEOUT)), 1),
        (judged(NoReply(Fault.UNFORESEEN)), 1),
        (NO_OUTCOME, 1),
        (judged(Reply(404)), 1),
        (judged(NoReply(Fault.TARGET_REFUSED)), 1),
        (DEFERRED, 0),
        (RATE_LIMITED, 0),
        (circuit_open(30.0), 0),
    ],
)
def test_only_a_real_failure_uses_up_an_attempt(outcome: Outcome, uses_up: int) -> None:
    job = make_job(tally=Tally(attempts=5))

    settlement(outcome, job, None, longest)

    assert job.attempts == 5 + uses_up


def test_the_schedule_is_walked_and_then_the_message_is_given_up() -> None:
    job = make_job()

    endings = [settlement(UNAVAILABLE, job, POLICY, longest) for _ in range(3)]

    assert endings == [
        Return(10.0, "HTTP 503"),
        Return(60.0, "HTTP 503"),
        Death(Reason.RETRIES_EXHAUSTED, "HTTP 503", 503, b"busy"),
    ]


def test_without_a_last_attempt_it_is_retried_for_ever() -> None:
    job = make_job(tally=Tally(attempts=1_000_000))

    ending = settlement(UNAVAILABLE, job, RetryPolicy(), longest)

    assert ending == Return(30.0, "HTTP 503")


def test_what_is_no_attempt_exhausts_nothing() -> None:
    job = make_job(tally=Tally(attempts=2))

    ending = settlement(DEFERRED, job, POLICY, longest)

    assert ending == Return(7.0, "")


@pytest.mark.parametrize(("asked", "delay"), [(5.0, 10.0), (500.0, 500.0)])
def test_a_longer_delay_asked_for_by_the_target_wins(asked: float, delay: float) -> None:
    outcome = Outcome(Result.ERROR_PROCESS, Error.HTTP, asked_delay=asked, counts=True)

    ending = settlement(outcome, make_job(), POLICY, longest)

    assert ending == Return(delay, "")


@given(st.floats(0, 1e9), st.integers(0, 100))
@pytest.mark.rule("BRK-4")
def test_no_delay_is_longer_than_a_broker_can_do(scheduled: float, attempts: int) -> None:
    job = make_job(tally=Tally(attempts=attempts))

    ending = settlement(UNAVAILABLE, job, RetryPolicy(schedule=(scheduled,)), longest)

    assert isinstance(ending, Return)
    assert 0 <= ending.delay <= 43_200
