import json
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.config import RetryPolicy
from router.core.outcome import (
    DELIVERED,
    REPLY_KEPT_BYTES,
    RULES,
    About,
    Cause,
    Disposition,
    Fault,
    Metric,
    NoReply,
    Outcome,
    Reply,
    circuit_open,
    judge,
)
from router.core.returning import (
    DEFAULT_DELAY_SECONDS,
    MAX_DELAY_SECONDS,
    MIN_DELAY_SECONDS,
    Retry,
    clamp_delay,
    decide,
)
from router.core.warnings import Code, Severity
from tests.support.rig import middle

TODAY = datetime(2026, 1, 31, 8, 15, 30, tzinfo=UTC)


def now() -> float:
    return TODAY.timestamp()


# What follows from an outcome: what is done with the message, and how it is counted (section 17).
ACK = (Disposition.ACK, Metric.SUCCESS)
CONFIG = (Disposition.DEAD_LETTER, Metric.FAILURE)
CANCELLED = (Disposition.ACK, Metric.TRANSIENT)
PROCESS = (Disposition.RETRY, Metric.TRANSIENT)
CONNECTION = (Disposition.RETRY, Metric.FAILURE)

# Which warning it raises (section 6.2).
ERROR = (Code.CONFIGURATION, Severity.ERROR)
CRITICAL = (Code.CONFIGURATION, Severity.CRITICAL)
OVERLOADED = (Code.CONFIGURATION, Severity.WARN)
REJECTED = (Code.TARGET_REJECTED, Severity.WARN)
LOCKED_OUT = (Code.CREDENTIALS, Severity.CRITICAL)
GONE = (Code.TARGET_GONE, Severity.ERROR)
UNFORESEEN = (Code.PROCESSING, Severity.WARN)

Follows = tuple[Disposition, Metric]
Warns = tuple[Code, Severity] | None

REPLIES = st.fixed_dictionaries(
    {"ack": st.booleans()},
    optional={
        "delaySeconds": st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        "permanent": st.booleans() | st.text(),
    },
)
NUMBERS = st.integers(-(10**30), 10**30).map(str) | st.from_regex(r"[0-9]{1,400}", fullmatch=True)
DATES = st.builds(  # such as HTTP has, with numbers that no calendar has
    "{}, {} {} {} {}:{}:{} {}".format,
    st.sampled_from(["Sat", "Saturday", ""]),
    NUMBERS,
    st.sampled_from(["Jan", "Dec", "Foo"]),
    NUMBERS,
    NUMBERS,
    NUMBERS,
    NUMBERS,
    st.sampled_from(["GMT", "", "EST", "+0000"]) | NUMBERS.map("+{}".format),
)
HEADERS = st.text() | NUMBERS | DATES
POLICY = RetryPolicy(statuses=frozenset({404, 423, 429}))


def delay_of(outcome: Outcome) -> float:
    """Return for how long its message goes back, if it does."""
    action = decide(outcome, 0, None, middle).action
    return action.delay if isinstance(action, Retry) else DEFAULT_DELAY_SECONDS


def verdict(outcome: Outcome) -> tuple[Follows, str | None, Warns, bool]:
    rule = outcome.rule
    return (rule.disposition, rule.metric), rule.word, rule.warning, outcome.may_try_again


# The table of section 6.2 for HTTP statuses: result, error, warning, tried again at once?
STATUSES = {
    100: (PROCESS, "HttpError", None, False),
    101: (PROCESS, "HttpError", None, False),
    200: (ACK, None, None, False),
    202: (ACK, None, None, False),
    204: (ACK, None, None, False),
    299: (ACK, None, None, False),
    301: (PROCESS, "HttpError", None, False),
    304: (PROCESS, "HttpError", None, False),
    400: (CONFIG, "HttpError", REJECTED, False),
    401: (CONFIG, "HttpError", ERROR, False),
    403: (CONFIG, "HttpError", ERROR, False),
    404: (CONFIG, "HttpError", ERROR, False),
    405: (CONFIG, "HttpError", ERROR, False),
    406: (CONFIG, "HttpError", REJECTED, False),
    407: (CONFIG, "HttpError", ERROR, False),
    408: (CONFIG, "HttpError", REJECTED, False),
    410: (CONFIG, "HttpError", GONE, False),
    428: (CONFIG, "HttpError", REJECTED, False),
    429: (PROCESS, "RateLimited", None, False),
    430: (CONFIG, "HttpError", REJECTED, False),
    499: (CONFIG, "HttpError", REJECTED, False),
    500: (PROCESS, "HttpError", None, True),
    501: (CONFIG, "HttpError", CRITICAL, False),
    502: (PROCESS, "HttpError", None, True),
    503: (PROCESS, "HttpError", None, True),
    599: (PROCESS, "HttpError", None, True),
    600: (PROCESS, "HttpError", None, False),
}

# … and for what is no reply at all.
FAULTS = {
    Cause.NETWORK: (CONNECTION, "NetworkError", None, True),
    Cause.BROKEN: (CONNECTION, "NetworkError", None, True),
    Cause.TIMEOUT: (PROCESS, "Timeout", None, True),
    Cause.UNRESOLVED: (CONNECTION, "NetworkError", None, True),
    Cause.TARGET_REFUSED: (CONFIG, "TargetRefused", ERROR, False),
    Cause.BAD_REQUEST: (CONFIG, "BadRequest", ERROR, False),
    Cause.OVERLOADED: (PROCESS, "RouterOverloaded", OVERLOADED, True),
    Cause.NO_NAMES: (PROCESS, "NoNames", ERROR, True),
    Cause.NO_PROXY: (PROCESS, "NoProxy", ERROR, True),
    Cause.NO_CREDENTIALS: (PROCESS, "NoCredentials", LOCKED_OUT, False),
    Cause.UNFORESEEN: (PROCESS, "Unforeseen", UNFORESEEN, True),
    # … on this machine (CMD-8, CMD-9).
    Cause.TASK_FAILED: (PROCESS, "TaskFailed", None, False),
    Cause.TASK_TIMEOUT: (PROCESS, "Timeout", None, False),
    Cause.NOT_STARTED: (PROCESS, "NotStarted", OVERLOADED, False),
    Cause.NO_HANDLER: (PROCESS, "NoHandler", OVERLOADED, False),
    Cause.PERMANENT: (CONFIG, "Permanent", None, False),
    Cause.DEFERRED: (PROCESS, "Deferred", None, False),
}


@pytest.mark.rule("MED-3")
@pytest.mark.parametrize("status", STATUSES)
def test_the_status_decides(status: int) -> None:
    outcome = judge(Reply(status), now)

    assert verdict(outcome) == STATUSES[status]


@pytest.mark.rule("MED-3")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_missing_reply_is_judged_by_its_cause(fault: Cause) -> None:
    outcome = judge(NoReply(fault, "because"), now)

    assert verdict(outcome) == FAULTS[fault]
    assert outcome.detail == "because"


@pytest.mark.rule("MED-3")
@pytest.mark.parametrize("cause", Cause)
def test_every_cause_has_its_row(cause: Cause) -> None:
    rule = RULES[cause]

    assert (rule.disposition, rule.metric) in {ACK, CANCELLED, CONFIG, PROCESS, CONNECTION}
    assert (rule.word is None) is (cause is Cause.ACCEPTED)
    assert (rule.returns is None) is (rule.disposition is not Disposition.RETRY)


# … and with `retry.statuses` of 404, 423 and 429.
STATUSES_BY_POLICY = {
    400: (CONFIG, "HttpError", REJECTED, False),
    403: (CONFIG, "HttpError", ERROR, False),
    404: (PROCESS, "HttpError", None, False),
    423: (PROCESS, "HttpError", None, False),
    429: (PROCESS, "RateLimited", None, False),
    501: (CONFIG, "HttpError", CRITICAL, False),
    503: (PROCESS, "HttpError", None, True),
}


@pytest.mark.rule("WQ-5")
@pytest.mark.parametrize("status", STATUSES_BY_POLICY)
def test_the_policy_makes_statuses_retryable(status: int) -> None:
    outcome = judge(Reply(status), now, POLICY)

    assert verdict(outcome) == STATUSES_BY_POLICY[status]
    assert outcome.rule.counts is (status in {404, 423, 503})


@pytest.mark.rule("WQ-5")
@pytest.mark.parametrize(
    ("answer", "counts"),
    [
        (Reply(200), False),
        (Reply(200, b'{"ack":false}'), False),
        (Reply(302), True),
        (Reply(404), False),
        (Reply(429), False),
        (Reply(500), True),
        (NoReply(Cause.NETWORK), True),
        (NoReply(Cause.TIMEOUT), True),
        (NoReply(Cause.UNFORESEEN), True),
        (NoReply(Cause.TARGET_REFUSED), False),
        (NoReply(Cause.OVERLOADED), False),
    ],
)
def test_only_real_failures_use_up_an_attempt(answer: Reply | NoReply, *, counts: bool) -> None:
    assert judge(answer, now).rule.counts is counts


@pytest.mark.rule("MED-3")
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"OK",
        b"null",
        b"[]",
        b"{}",
        b'"ack"',
        b'{"ack": true}',
        b'{"ack": null}',
        b'{"ack": 0}',
        b'{"ack": "false"}',
        b'{"nack": false}',
        b'[{"ack": false}]',
        b'{"ack": false',
        b'{"ack": false} trailing',
        b'{"ack": false, "delaySeconds": NaN}',  # no JSON
        b'\xff{"ack": false}',
        b'{"ack": ' + b"[" * 100_000,
    ],
    ids=repr,
)
def test_anything_but_ack_false_is_a_success(body: bytes) -> None:
    assert judge(Reply(200, body), now) is DELIVERED


@pytest.mark.rule("MED-3")
@pytest.mark.parametrize(
    ("delay", "asked", "delayed"),
    [
        ("1", 1, 1),
        ("60", 60, 60),
        ("0.2", 1, 1),
        ("59.01", 60, 60),
        ("43200", 43200, 43200),
        ("43201", 43200, 43200),
        ("1e999", 43200, 43200),
        ("9" * 400, 43200, 43200),
        ("0", None, 30),
        ("-5", None, 30),
        ("-1e999", None, 30),
        ("null", None, 30),
        ("true", None, 30),
        ('"60"', None, 30),
        ("[60]", None, 30),
        ("{}", None, 30),
    ],
)
def test_ack_false_defers_for_the_asked_delay(
    delay: str, asked: float | None, delayed: float
) -> None:
    outcome = judge(Reply(200, f'{{"ack": false, "delaySeconds": {delay}}}'.encode()), now)

    assert verdict(outcome) == (PROCESS, "Deferred", None, False)
    assert (outcome.asked_delay, delay_of(outcome)) == (asked, delayed)


@pytest.mark.rule("MED-3")
@pytest.mark.parametrize(
    "reply",
    [
        Reply(200, b'{"ack": false, "permanent": true}'),
        Reply(202, b'{"permanent":true,"delaySeconds":60,"ack":false}'),
        Reply(429, b'{"permanent": true}', "60"),
        Reply(500, b'{"permanent": true}'),
        Reply(503, rb'{"\u0070ermanent": true}', "60"),
        Reply(302, b'{"permanent": true, "ack": true}'),
        Reply(404, b'{"permanent": true}'),  # one of the policy's statuses
    ],
)
def test_a_permanent_failure_is_given_up_at_once_and_without_a_warning(reply: Reply) -> None:
    outcome = judge(reply, now, POLICY)

    assert verdict(outcome) == (CONFIG, "Permanent", None, False)
    assert (outcome.status, outcome.reply) == (reply.status, reply.body)


@pytest.mark.rule("MED-3")
@pytest.mark.parametrize(
    "body",
    [
        b'{"permanent": "true"}',
        b'{"permanent": 1}',
        b'{"permanent": false, "ack": true}',
        b'{"transient": true}',
        b'[{"permanent": true}]',
        b'{"permanent": true',
        b'"permanent": true',
        b'\xff{"permanent": true}',
    ],
)
def test_only_true_means_permanent(body: bytes) -> None:
    assert judge(Reply(503, body), now).rule.word == "HttpError"


@pytest.mark.rule("MED-3")
def test_an_accepted_message_is_accepted_whatever_else_is_said() -> None:
    assert judge(Reply(200, b'{"ack": true, "permanent": true}'), now) is DELIVERED
    assert judge(Reply(404, b'{"permanent": true}'), now).rule.word == "HttpError"


@pytest.mark.rule("MED-3")
@pytest.mark.parametrize(
    "body",
    [
        b'{"ack":false}',
        rb'{"\u0061ck": false}',
        b'{"ack": false, "why": "\xff"}',
        b'{"deep": {"ack": true}, "ack": false}',
    ],
)
def test_ack_false_is_understood_however_it_is_written(body: bytes) -> None:
    outcome = judge(Reply(202, body), now)

    assert (outcome.rule.word, delay_of(outcome), outcome.status) == (
        "Deferred",
        DEFAULT_DELAY_SECONDS,
        202,
    )


@pytest.mark.rule("MED-3")
def test_a_reply_past_the_cap_is_judged_by_its_status_alone() -> None:
    cut = b'{"ack": false}'

    assert judge(Reply(200, cut, too_long=True), now) is DELIVERED
    assert judge(Reply(500, cut, too_long=True), now).rule.word == "HttpError"
    assert judge(Reply(500, b'{"permanent": true}', too_long=True), now).rule.word == "HttpError"


def http_date(after: timedelta) -> str:
    return (TODAY + after).strftime("%a, %d %b %Y %H:%M:%S GMT")


@pytest.mark.rule("MED-3")
@pytest.mark.parametrize(
    ("header", "delay"),
    [
        (None, 30),
        ("", 30),
        ("soon", 30),
        ("1.5", 30),
        ("-5", 30),
        ("١٢", 30),
        ("0", 1),
        ("1", 1),
        (" 120 ", 120),
        ("43200", 43200),
        ("43201", 43200),
        ("9" * 5000, 43200),
        (http_date(timedelta(minutes=2)), 120),
        (http_date(timedelta(0)), 1),
        (http_date(timedelta(days=-400)), 1),
        (http_date(timedelta(days=400)), 43200),
        ("Saturday, 31-Jan-26 08:16:30 GMT", 60),
        ("Sat Jan 31 08:16:30 2026", 60),
        ("Sat, 31 Jan 99999 08:16:30 GMT", 30),
        ("Sat, 31 Jan 99999999999999999999 08:16:30 GMT", 30),
        ("Sat, 31 Jan 2026 08:16:30 +9999999999999999", 30),
        (http_date(timedelta(minutes=2)) + " " * 100 + "x", 30),
    ],
)
def test_retry_after_says_when_to_come_back(header: str | None, delay: float) -> None:
    outcome = judge(Reply(429, retry_after=header), now)

    assert delay_of(outcome) == delay


@pytest.mark.rule("WQ-5", "MED-2")
@pytest.mark.parametrize("status", [100, 302, 404, 423, 500, 503, 599])
@pytest.mark.parametrize(
    ("header", "asked"),
    [(None, None), ("soon", None), ("0", 1), ("120", 120), (http_date(timedelta(minutes=2)), 120)],
)
def test_retry_after_counts_on_every_retried_status_and_ends_the_tries(
    status: int, header: str | None, asked: float | None
) -> None:
    outcome = judge(Reply(status, retry_after=header), now, POLICY)

    assert ((outcome.rule.disposition, outcome.rule.metric), outcome.asked_delay) == (
        PROCESS,
        asked,
    )
    assert outcome.may_try_again is (status >= 500 and asked is None)


@pytest.mark.rule("WQ-5")
@given(st.integers(0, 999), HEADERS)
def test_no_retry_after_is_too_strange(status: int, header: str) -> None:
    outcome = judge(Reply(status, retry_after=header), now, POLICY)

    assert MIN_DELAY_SECONDS <= delay_of(outcome) <= MAX_DELAY_SECONDS


@pytest.mark.rule("MED-3")
def test_a_date_is_never_reached_early() -> None:
    outcome = judge(Reply(429, retry_after=http_date(timedelta(seconds=10))), lambda: now() + 0.9)

    assert delay_of(outcome) == 10


# Whose fault it is (MED-4).
BLAMED = {
    Fault.TARGET: {Cause.SERVER_ERROR, Cause.BROKEN, Cause.TIMEOUT},
    Fault.NETWORK: {Cause.NETWORK, Cause.UNRESOLVED},
    Fault.ROUTER: {Cause.OVERLOADED, Cause.NO_NAMES, Cause.NO_PROXY, Cause.NO_CREDENTIALS},
}


@pytest.mark.rule("MED-4")
def test_each_failure_is_somebodys_fault() -> None:
    found = {fault: {c for c in Cause if RULES[c].fault is fault} for fault in Fault}

    assert found == BLAMED


@pytest.mark.rule("MED-4", "WQ-5")
@pytest.mark.parametrize("cause", [c for c in Cause if c in BLAMED[Fault.ROUTER]])
def test_a_fault_of_the_router_opens_no_circuit_and_uses_no_attempt(cause: Cause) -> None:
    rule = RULES[cause]

    assert (rule.breaker, rule.counts, rule.was_sent) == (None, False, False)
    assert rule.warning is not None
    assert rule.about is About.ROUTER


@pytest.mark.rule("MED-4", "BRK-4")
@pytest.mark.parametrize(
    ("outage", "delay"),
    [(0.0, 30.0), (120.0, 30.0), (124.0, 31.0), (1200.0, 300.0), (86_400.0, 300.0)],
)
def test_an_open_circuit_returns_for_a_quarter_of_its_outage_and_is_no_failure(
    outage: float, delay: float
) -> None:
    outcome, longest = circuit_open(outage, middle), circuit_open(outage, lambda _, high: high)

    assert verdict(outcome) == (PROCESS, "CircuitOpen", None, False)
    assert (delay_of(outcome), outcome.rule.counts) == (delay, False)
    assert delay_of(longest) == pytest.approx(1.1 * delay)


@pytest.mark.rule("DLQ-1")
def test_only_the_first_of_a_reply_is_kept() -> None:
    outcome = judge(Reply(400, b"x" * 5000), now)

    assert (len(outcome.reply), outcome.status) == (REPLY_KEPT_BYTES, 400)


@pytest.mark.rule("BRK-4")
@given(st.floats(allow_nan=False))
def test_a_delay_is_always_one_that_every_broker_can_do(seconds: float) -> None:
    delay = clamp_delay(seconds)

    assert MIN_DELAY_SECONDS <= delay <= MAX_DELAY_SECONDS
    assert delay == int(delay)
    assert delay >= min(seconds, MAX_DELAY_SECONDS)


@pytest.mark.rule("MED-3")
@given(
    st.integers(0, 999),
    st.binary() | REPLIES.map(lambda said: json.dumps(said).encode()),
    st.none() | HEADERS,
)
def test_every_reply_has_an_outcome(status: int, body: bytes, retry_after: str | None) -> None:
    outcome = judge(Reply(status, body, retry_after), now)

    assert MIN_DELAY_SECONDS <= delay_of(outcome) <= MAX_DELAY_SECONDS
    assert (outcome.rule.disposition is Disposition.ACK) <= (200 <= status < 300)
