"""What becomes of a message that was not accepted: the table of outcomes, and retry policies."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.config import RetryPolicy
from router.core.dead_letter import Reason
from router.core.outcome import (
    NO_OUTCOME,
    Answer,
    Cause,
    Failure,
    NoReply,
    Outcome,
    Reply,
    circuit_open,
    judge,
)
from router.core.returning import (
    MAX_REFUSALS,
    REFUSED_SECONDS,
    GiveUp,
    Refusals,
    Retry,
    ReturnReason,
    decide,
)
from tests.support.rig import middle

FAILED, PUT_OFF = ReturnReason.FAILED, ReturnReason.PUT_OFF
NOT_SENT = ReturnReason.NOT_SENT
NOW = datetime(2026, 1, 31, tzinfo=UTC).timestamp()
POLICY = RetryPolicy(max_attempts=3, schedule=(10.0, 60.0))


def longest(_low: float, high: float) -> float:
    return high


def judged(answer: Answer, policy: RetryPolicy | None = None) -> Outcome:
    return judge(answer, lambda: NOW, policy)


def decided(
    outcome: Outcome, policy: RetryPolicy | None = None, failures: int = 0
) -> tuple[Retry | GiveUp, int]:
    decision = decide(outcome, failures, policy, longest)
    return decision.action, decision.failures


UNAVAILABLE = judged(Reply(503, b"busy"))
DEFERRED = judged(Reply(200, b'{"ack": false, "delaySeconds": 7}'))
RATE_LIMITED = judged(Reply(429, retry_after="90"))
PERMANENT = b'{"permanent": true}'


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (judged(Reply(404, b"no")), GiveUp(Reason.CONFIG_ERROR, "HTTP 404", 404, b"no")),
        (judged(Reply(422, b"no")), GiveUp(Reason.TARGET_REJECTED, "HTTP 422", 422, b"no")),
        (judged(Reply(410)), GiveUp(Reason.TARGET_REJECTED, "HTTP 410", 410)),
        (judged(Reply(501)), GiveUp(Reason.CONFIG_ERROR, "HTTP 501", 501)),
        (
            judged(NoReply(Cause.TARGET_REFUSED, "link-local")),
            GiveUp(Reason.TARGET_REFUSED, "link-local"),
        ),
        (judged(NoReply(Cause.BAD_REQUEST, "no")), GiveUp(Reason.CONFIG_ERROR, "no")),
        (
            judged(Reply(503, PERMANENT)),
            GiveUp(
                Reason.PERMANENT,
                "HTTP 503, and the target answered permanent: true",
                503,
                PERMANENT,
            ),
        ),
        (UNAVAILABLE, Retry(FAILED, 30.0, "HTTP 503")),
        (judged(Reply(503, retry_after="5")), Retry(FAILED, 5.0, "HTTP 503")),
        (judged(Reply(503, retry_after="500")), Retry(FAILED, 500.0, "HTTP 503")),
        (judged(NoReply(Cause.NETWORK, "reset")), Retry(FAILED, 30.0, "reset")),
        (judged(NoReply(Cause.TIMEOUT, "late")), Retry(FAILED, 30.0, "late")),
        (
            judged(NoReply(Cause.TASK_FAILED, "exit code 1", "oops")),
            Retry(FAILED, 30.0, "exit code 1: oops"),
        ),
        (judged(NoReply(Cause.TASK_TIMEOUT, "late")), Retry(FAILED, 30.0, "late")),
        (judged(NoReply(Cause.NOT_STARTED, "no memory")), Retry(NOT_SENT, 30.0, "")),
        (judged(NoReply(Cause.NO_HANDLER, "none")), Retry(NOT_SENT, 30.0, "")),
        (
            judged(NoReply(Cause.DEFERRED, "exit code 75", "busy")),
            Retry(PUT_OFF, 30.0, ""),
        ),
        (
            judged(NoReply(Cause.PERMANENT, "exit code 65", "bad")),
            GiveUp(Reason.PERMANENT, "exit code 65: bad", failure=Failure("", "bad")),
        ),
        (DEFERRED, Retry(PUT_OFF, 7.0, "")),
        (judged(Reply(200, b'{"ack": false}')), Retry(PUT_OFF, 30.0, "")),
        (RATE_LIMITED, Retry(PUT_OFF, 90.0, "")),
        (judged(Reply(429)), Retry(PUT_OFF, 30.0, "")),
        (circuit_open(124.0, middle), Retry(PUT_OFF, 31.0, "")),
        (NO_OUTCOME, Retry(FAILED, 30.0, "the mediator gave no outcome")),
    ],
)
@pytest.mark.rule("WQ-5", "BRK-4", "DLQ-1")
def test_without_a_policy_the_outcome_alone_decides(
    outcome: Outcome, expected: Retry | GiveUp
) -> None:
    assert decided(outcome)[0] == expected


@pytest.mark.parametrize(
    ("outcome", "uses_up"),
    [
        (UNAVAILABLE, 1),
        (judged(Reply(302)), 1),
        (judged(Reply(503, retry_after="9")), 1),
        (judged(Reply(423), RetryPolicy(statuses=frozenset({423}))), 1),
        (judged(NoReply(Cause.NETWORK)), 1),
        (judged(NoReply(Cause.TIMEOUT)), 1),
        (judged(NoReply(Cause.UNFORESEEN)), 1),
        (NO_OUTCOME, 1),
        (judged(Reply(404)), 1),
        (judged(NoReply(Cause.TARGET_REFUSED)), 1),
        (DEFERRED, 0),
        (RATE_LIMITED, 0),
        (judged(Reply(503, PERMANENT)), 1),
        (circuit_open(30.0, middle), 0),
    ],
)
@pytest.mark.parametrize("policy", [None, RetryPolicy()])
@pytest.mark.rule("WQ-5")
def test_only_a_real_failure_uses_up_an_attempt(
    outcome: Outcome, uses_up: int, policy: RetryPolicy | None
) -> None:
    assert decided(outcome, policy, failures=5)[1] == 5 + uses_up


@pytest.mark.rule("WQ-5")
def test_the_schedule_is_walked_and_then_the_message_is_given_up() -> None:
    assert [decided(UNAVAILABLE, POLICY, failures) for failures in range(3)] == [
        (Retry(FAILED, 10.0, "HTTP 503"), 1),
        (Retry(FAILED, 60.0, "HTTP 503"), 2),
        (GiveUp(Reason.RETRIES_EXHAUSTED, "HTTP 503", 503, b"busy"), 3),
    ]


@pytest.mark.rule("WQ-5")
def test_without_a_last_attempt_it_is_retried_without_end() -> None:
    action, _ = decided(UNAVAILABLE, RetryPolicy(), failures=1_000_000)

    assert action == Retry(FAILED, 30.0, "HTTP 503")


@pytest.mark.rule("WQ-5")
def test_what_is_no_attempt_exhausts_nothing() -> None:
    assert decided(DEFERRED, POLICY, failures=99) == (Retry(PUT_OFF, 60.0, ""), 99)


@pytest.mark.rule("WQ-5")
@pytest.mark.parametrize(
    ("answer", "delay"),
    [
        (Reply(503), 10),
        (Reply(503, retry_after="5"), 10),
        (Reply(503, retry_after="500"), 500),
        (Reply(302, retry_after="500"), 500),
        (Reply(429, retry_after="5"), 10),
        (Reply(429, retry_after="500"), 500),
        (Reply(200, b'{"ack": false, "delaySeconds": 5}'), 10),
        (Reply(200, b'{"ack": false, "delaySeconds": 500}'), 500),
        (Reply(200, b'{"ack": false}'), 10),
    ],
)
def test_a_longer_delay_asked_for_by_the_target_wins(answer: Reply, delay: float) -> None:
    action, _ = decided(judged(answer), POLICY)

    assert isinstance(action, Retry)
    assert action.delay == delay


@pytest.mark.rule("WQ-5")
@pytest.mark.parametrize(("failures", "delay"), [(0, 10), (1, 10), (2, 60), (50, 60)])
def test_ack_false_without_a_delay_follows_the_policy(failures: int, delay: float) -> None:
    outcome = judged(Reply(200, b'{"ack": false}'))

    assert decided(outcome, POLICY, failures) == (Retry(PUT_OFF, delay, ""), failures)


@pytest.mark.rule("WQ-5", "MED-4")
def test_the_policy_does_not_change_the_delay_of_an_open_circuit() -> None:
    assert decided(circuit_open(124.0, middle), POLICY) == (
        Retry(PUT_OFF, 31.0, ""),
        0,
    )


@given(st.floats(0, 1e9), st.integers(0, 100), st.none() | st.integers(0, 10**9).map(str))
@pytest.mark.rule("WQ-5", "BRK-4")
def test_no_delay_is_longer_than_a_broker_can_do(
    scheduled: float, failures: int, header: str | None
) -> None:
    outcome = judged(Reply(503, retry_after=header))

    action, _ = decided(outcome, RetryPolicy(schedule=(scheduled,)), failures)

    assert isinstance(action, Retry)
    assert 0 <= action.delay <= 43_200


@pytest.mark.rule("CMD-3")
@pytest.mark.parametrize(
    ("count", "seconds", "is_final"),
    [
        (MAX_REFUSALS, REFUSED_SECONDS, True),
        (MAX_REFUSALS - 1, 10 * REFUSED_SECONDS, False),
        (10 * MAX_REFUSALS, REFUSED_SECONDS - 1, False),
    ],
)
def test_a_message_is_given_up_after_enough_refusals_and_enough_time(
    count: int, seconds: float, is_final: bool
) -> None:
    assert Refusals(count, 100.0, "no").is_final(100.0 + seconds) == is_final
