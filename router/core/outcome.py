"""How a delivery ended, and what follows from it.

`judge` turns an answer into an Outcome; `RULES` says what follows from its cause. Every rule that
leads from an HTTP answer to ACK, retry or dead letter is in this file, and the engine
reads every column of the table: to change a cell is to change what the router does. An Ending is
what replies, next steps and work queues get to know of it.
"""

from collections.abc import Callable, Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime
from enum import Enum, StrEnum, auto
from http import HTTPStatus
from typing import ClassVar, Final

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from router.core.config import RetryPolicy
from router.core.dead_letter import Reason
from router.core.message import NOT_JSON, is_given, is_too_deep
from router.core.returning import (
    DEFAULT_DELAY_SECONDS,
    MAX_SPREAD,
    MIN_SPREAD,
    RETURNS,
    ReturnReason,
    circuit_delay,
    clamp_delay,
)
from router.core.warnings import Code, Severity

MAX_RESULT_BYTES: Final = 64 * 1024
MAX_ERROR_BYTES: Final = 1024
MAX_CODE_CHARACTERS: Final = 128
MAX_REPLY_BYTES: Final = 1024 * 1024
REPLY_KEPT_BYTES: Final = 1024  # of a reply in a dead letter
_MAX_DATE_CHARACTERS: Final = 64  # an HTTP date has at most 33


class Failure(Struct, frozen=True):
    """Why a message was given up."""

    code: str  # the target's own, or HTTP_<status>, or the name of our error
    message: str  # masked; never empty
    http_status: int | None = None


class Ending(Struct, frozen=True):
    """A message that ended for good: accepted, or given up with a failure."""

    failure: Failure | None = None
    result: bytes | None = None  # JSON, at most MAX_RESULT_BYTES
    result_omitted: bool = False  # the target gave a result that is too long to keep
    is_cancelled: bool = False  # somebody wanted it to end; its target may have acted (CMD-13)


ACCEPTED: Final = Ending()  # of a message that wants a reply or next steps, and gave no result
CANCELLED: Final = Ending(Failure("CANCELLED", "the message was cancelled"), is_cancelled=True)


class Cause(Enum):
    """Why a delivery ended as it did."""

    ACCEPTED = auto()
    CLIENT_ERROR = auto()  # 401, 403, 404, 405, 407: the address or the credentials are wrong
    REJECTED = auto()  # any other 4xx: the target does not take this message
    GONE = auto()  # 410: nothing that is sent there will ever be taken
    NOT_IMPLEMENTED = auto()  # 501
    SERVER_ERROR = auto()  # 5xx
    OTHER_STATUS = auto()  # 1xx, 3xx, and 4xx that the retry policy lists
    RATE_LIMITED = auto()  # 429
    DEFERRED = auto()  # `ack: false`
    PERMANENT = auto()  # `permanent: true`
    NETWORK = auto()  # no connection: no route, no such name, refused, connect timeout
    BROKEN = auto()  # a connection without a whole reply: TLS, reset, cut off, protocol error
    TIMEOUT = auto()  # sent, no complete reply in time
    UNRESOLVED = auto()  # its name could not be looked up, too recently to say whose fault it is
    TARGET_REFUSED = auto()  # MED-5
    BAD_REQUEST = auto()  # it could not be built
    OVERLOADED = auto()  # the router lacks what a request needs, such as a file descriptor
    NO_NAMES = auto()  # it cannot look up any names
    NO_PROXY = auto()  # its proxy does not work
    NO_CREDENTIALS = auto()  # its own credentials or certificates do not
    CIRCUIT_OPEN = auto()  # MED-4
    TARGET_PAUSED = auto()  # it asked for silence (GATE-1)
    EXPIRED = auto()  # its time was over before the request (MSG-2)
    CANCELLED = auto()  # before its request, or during it (CMD-13)
    UNFORESEEN = auto()
    NO_OUTCOME = auto()  # a bug: the mediator returned nothing
    TASK_FAILED = auto()  # a process or a handler on this machine (CMD-8, CMD-9)
    TASK_TIMEOUT = auto()  # it took too long, and was ended
    NOT_STARTED = auto()  # there is no process for it
    NO_HANDLER = auto()  # this worker has none of that type


class Disposition(Enum):
    """The possible ends of a hand-over."""

    ACK = auto()  # remove it from its queue
    RETRY = auto()  # NACK it: its broker hands it out again later
    DEAD_LETTER = auto()  # store it, then remove it


class Fault(StrEnum):
    """Whose fault it is that there was no good answer."""

    TARGET = "target"
    NETWORK = "network"
    ROUTER = "router"  # opens no circuit and uses no attempt


class About(Enum):
    """The first words of a warning."""

    ORIGIN = auto()  # of the target
    URL = auto()  # of the target, masked
    ROUTER = auto()  # nothing: it is about the router itself


class Metric(StrEnum):
    """How a delivery is counted."""

    SUCCESS = "success"
    FAILURE = "failure"
    TRANSIENT = "transient"


class Rule(Struct, frozen=True):
    """One row of the table. The defaults are those of a target that cannot take it now."""

    word: str | None  # what logs and histories call it; None: it is no error
    disposition: Disposition = Disposition.RETRY
    metric: Metric = Metric.TRANSIENT
    reason: Reason = Reason.CONFIG_ERROR  # of the dead letter
    try_again: bool = False  # at once, up to three tries, unless the target asked for a delay
    returns: ReturnReason | None = None  # why it goes back to its queue; None: it does not
    was_sent: bool = True  # False: the target had no part in it, and the retry policy has no say
    # Good or bad for the target's circuit; None: neither. Bad answers count in a row, missing ones
    # in the window (MED-4).
    breaker: bool | None = True
    fault: Fault | None = None  # None: no one's, or the message's
    warning: tuple[Code, Severity] | None = None
    about: About = About.ORIGIN

    @property
    def counts(self) -> bool:
        """Whether it is a real failure."""
        return self.returns is not None and RETURNS[self.returns].counts


_DEAD, _FAILED = Disposition.DEAD_LETTER, Metric.FAILURE
_WRONG: Final = (Code.CONFIGURATION, Severity.ERROR)
_VERY_WRONG: Final = (Code.CONFIGURATION, Severity.CRITICAL)
_NOT_TAKEN: Final = (Code.TARGET_REJECTED, Severity.WARN)
_GONE: Final = (Code.TARGET_GONE, Severity.ERROR)
_LOCKED_OUT: Final = (Code.CREDENTIALS, Severity.CRITICAL)
_NO_RESOURCES: Final = (Code.CONFIGURATION, Severity.WARN)
_STRANGE: Final = (Code.PROCESSING, Severity.WARN)
_NO_RESULT: Final = (Code.MEDIATOR_NULL_RESULT, Severity.CRITICAL)

# MED-3, BRK-4; the table of section 17 in docs/specification.md.
# fmt: off
RULES: Final[Mapping[Cause, Rule]] = {
    Cause.ACCEPTED: Rule(None, Disposition.ACK, Metric.SUCCESS),
    Cause.CLIENT_ERROR: Rule("HttpError", _DEAD, _FAILED, warning=_WRONG),
    Cause.REJECTED: Rule(
        "HttpError", _DEAD, _FAILED, Reason.TARGET_REJECTED, warning=_NOT_TAKEN),
    Cause.GONE: Rule(
        "HttpError", _DEAD, _FAILED, Reason.TARGET_REJECTED, warning=_GONE, about=About.URL),
    Cause.NOT_IMPLEMENTED: Rule("HttpError", _DEAD, _FAILED, warning=_VERY_WRONG),
    Cause.SERVER_ERROR: Rule(
        "HttpError", returns=ReturnReason.FAILED, try_again=True, breaker=False,
        fault=Fault.TARGET),
    Cause.OTHER_STATUS: Rule("HttpError", returns=ReturnReason.FAILED),
    Cause.RATE_LIMITED: Rule("RateLimited", returns=ReturnReason.PUT_OFF),
    Cause.DEFERRED: Rule("Deferred", returns=ReturnReason.PUT_OFF),
    Cause.PERMANENT: Rule("Permanent", _DEAD, _FAILED, Reason.PERMANENT),
    Cause.NETWORK: Rule(
        "NetworkError", returns=ReturnReason.FAILED, metric=_FAILED, try_again=True, breaker=False,
        fault=Fault.NETWORK),
    Cause.BROKEN: Rule(
        "NetworkError", returns=ReturnReason.FAILED, metric=_FAILED, try_again=True, breaker=False,
        fault=Fault.TARGET),
    Cause.TIMEOUT: Rule(
        "Timeout", returns=ReturnReason.FAILED, try_again=True, breaker=False, fault=Fault.TARGET),
    Cause.UNRESOLVED: Rule(
        "NetworkError", returns=ReturnReason.NOT_SENT, metric=_FAILED, try_again=True,
        was_sent=False, breaker=None, fault=Fault.NETWORK),
    Cause.TARGET_REFUSED: Rule(
        "TargetRefused", _DEAD, _FAILED, Reason.TARGET_REFUSED, was_sent=False, breaker=None,
        warning=_WRONG),
    Cause.BAD_REQUEST: Rule(
        "BadRequest", _DEAD, _FAILED, was_sent=False, breaker=None, warning=_WRONG),
    Cause.OVERLOADED: Rule(
        "RouterOverloaded", returns=ReturnReason.OVERLOADED, try_again=True, was_sent=False,
        breaker=None, fault=Fault.ROUTER, warning=_NO_RESOURCES, about=About.ROUTER),
    Cause.NO_NAMES: Rule(
        "NoNames", returns=ReturnReason.NOT_SENT, try_again=True, was_sent=False, breaker=None,
        fault=Fault.ROUTER, warning=_WRONG, about=About.ROUTER),
    Cause.NO_PROXY: Rule(
        "NoProxy", returns=ReturnReason.NOT_SENT, try_again=True, was_sent=False, breaker=None,
        fault=Fault.ROUTER, warning=_WRONG, about=About.ROUTER),
    Cause.NO_CREDENTIALS: Rule(
        "NoCredentials", returns=ReturnReason.NOT_SENT, was_sent=False, breaker=None,
        fault=Fault.ROUTER, warning=_LOCKED_OUT, about=About.ROUTER),
    Cause.CIRCUIT_OPEN: Rule(
        "CircuitOpen", returns=ReturnReason.PUT_OFF, was_sent=False, breaker=None),
    Cause.TARGET_PAUSED: Rule(
        "TargetPaused", returns=ReturnReason.PUT_OFF, was_sent=False, breaker=None),
    Cause.EXPIRED: Rule("Expired", _DEAD, _FAILED, Reason.EXPIRED, was_sent=False, breaker=None),
    Cause.CANCELLED: Rule("Cancelled", Disposition.ACK, breaker=None),
    Cause.UNFORESEEN: Rule(
        "Unforeseen", returns=ReturnReason.FAILED, try_again=True, breaker=None, warning=_STRANGE),
    Cause.NO_OUTCOME: Rule(
        "Unforeseen", returns=ReturnReason.FAILED, breaker=None, warning=_NO_RESULT,
        about=About.ROUTER),
    Cause.TASK_FAILED: Rule("TaskFailed", returns=ReturnReason.FAILED, breaker=None),
    Cause.TASK_TIMEOUT: Rule("Timeout", returns=ReturnReason.FAILED, breaker=None),
    Cause.NOT_STARTED: Rule(
        "NotStarted", returns=ReturnReason.NOT_SENT, was_sent=False, breaker=None,
        warning=_NO_RESOURCES),
    Cause.NO_HANDLER: Rule(
        "NoHandler", returns=ReturnReason.NOT_SENT, was_sent=False, breaker=None,
        warning=_NO_RESOURCES),
}
# fmt: on


class Reply(Struct, frozen=True):
    """An HTTP answer, cut down to what `judge` looks at."""

    status: int
    body: bytes = b""  # at most MAX_REPLY_BYTES
    retry_after: str | None = None
    too_long: bool = False  # the body exceeded MAX_REPLY_BYTES, or came in crumbs, and was cut


class NoReply(Struct, frozen=True):
    """Why there is no HTTP answer."""

    too_long: ClassVar[bool] = False  # as in Reply

    cause: Cause
    detail: str = ""
    error: str = ""  # what a task on this machine said itself: kept, never logged
    code: str | None = None  # its own error code
    message: str = ""  # what its own error says; "": that is all it said


Answer = Reply | NoReply


class Outcome(Struct, frozen=True):
    cause: Cause
    rule: Rule
    detail: str = ""  # for people and logs: what the target or the network said
    asked_delay: float | None = None  # seconds, by the target or its circuit, clamped
    status: int | None = None
    reply: bytes = b""  # the first bytes of it, for the dead letter
    ending: Ending | None = None  # what is said of a result or an error, if anything is (CMD-2)
    error: str = ""  # as in NoReply

    @property
    def kept_error(self) -> str:
        """Return what its queue or a dead letter keeps of it. Must not be logged."""
        return f"{self.detail}: {self.error}" if self.error else self.detail

    @property
    def may_try_again(self) -> bool:
        """Whether it may be tried again at once: not before the time that a target asked for."""
        return self.rule.try_again and self.asked_delay is None


# Made once: nearly every message ends in one of them.
_ACCEPTED: Final = {
    status: Outcome(Cause.ACCEPTED, RULES[Cause.ACCEPTED], status=status)
    for status in range(200, 300)
}
DELIVERED: Final = _ACCEPTED[200]
TOO_LATE: Final = Outcome(
    Cause.EXPIRED, RULES[Cause.EXPIRED], "it was not delivered before it expired"
)
WAS_CANCELLED: Final = Outcome(
    Cause.CANCELLED, RULES[Cause.CANCELLED], "it was cancelled", ending=CANCELLED
)
NO_OUTCOME: Final = Outcome(
    Cause.NO_OUTCOME, RULES[Cause.NO_OUTCOME], "the mediator gave no outcome"
)


def circuit_open(outage: float, jitter: Callable[[float, float], float]) -> Outcome:
    """Return the outcome of a message whose circuit has not been closed for this many seconds."""
    cause, delay = Cause.CIRCUIT_OPEN, circuit_delay(outage) * jitter(MIN_SPREAD, MAX_SPREAD)
    return Outcome(cause, RULES[cause], "circuit open", asked_delay=delay)


def target_paused(delay: float) -> Outcome:
    cause = Cause.TARGET_PAUSED
    return Outcome(cause, RULES[cause], "the target asked for silence", asked_delay=delay)


def judge(
    answer: Answer,
    wall: Callable[[], float],
    policy: RetryPolicy | None = None,
    *,
    reads_reply: bool = True,
) -> Outcome:
    """Return the outcome of one request (MED-3).

    The wall clock is asked for `Retry-After` dates only, the policy for its statuses. Targets that
    know nothing of us may answer anything: `reads_reply` False, only the status counts (RAW-1).
    """
    if isinstance(answer, NoReply):
        cause, code, said = answer.cause, answer.code, answer.message or answer.error
        ending = Ending(Failure(code or "", said)) if said or code else None
        return Outcome(cause, RULES[cause], answer.detail, ending=ending, error=answer.error)
    if answer.status // 100 != 2:  # noqa: PLR2004 - 2xx
        # What is too long is not read either.
        reply = answer if reads_reply else replace(answer, too_long=True)
        return _judge_refusal(reply, wall, policy)
    body = answer.body if reads_reply else b""
    if b"false" not in body and b'"result"' not in body:
        return _ACCEPTED[answer.status]
    return _judge_acceptance(answer)


def _judge_acceptance(answer: Reply) -> Outcome:
    body = answer.body
    if b"false" in body and not answer.too_long:
        said = _read(body)
        if bytes(said.ack) == b"false":
            if bytes(said.permanent) == b"true":
                return _of_reply(answer, Cause.PERMANENT)
            return _of_reply(answer, Cause.DEFERRED, _usable_delay(bytes(said.delay_seconds)))
    ending = _result(answer) if b'"result"' in body else None
    if ending is None:
        return _ACCEPTED[answer.status]
    cause = Cause.ACCEPTED
    return Outcome(cause, RULES[cause], status=answer.status, ending=ending)


# Of the 4xx, those that say nothing about the message itself.
_REFUSALS: Final = {
    **dict.fromkeys((401, 403, 404, 405, 407), Cause.CLIENT_ERROR),
    HTTPStatus.GONE: Cause.GONE,
}


def _judge_refusal(reply: Reply, wall: Callable[[], float], policy: RetryPolicy | None) -> Outcome:
    status, is_rate_limit = reply.status, reply.status == HTTPStatus.TOO_MANY_REQUESTS
    if status == HTTPStatus.NOT_IMPLEMENTED:
        return _of_reply(reply, Cause.NOT_IMPLEMENTED)
    is_listed = policy is not None and status in policy.statuses
    if status // 100 == 4 and not is_rate_limit and not is_listed:  # noqa: PLR2004 - 4xx
        return _of_reply(reply, _REFUSALS.get(status, Cause.REJECTED))
    may_be_permanent = b"true" in reply.body and not reply.too_long  # few say anything
    if may_be_permanent and bytes(_read(reply.body).permanent) == b"true":
        return _of_reply(reply, Cause.PERMANENT)
    delay = read_retry_after(reply.retry_after, wall)
    if is_rate_limit:
        return _of_reply(
            reply, Cause.RATE_LIMITED, DEFAULT_DELAY_SECONDS if delay is None else delay
        )
    is_server_error = status // 100 == 5  # noqa: PLR2004 - 5xx
    return _of_reply(reply, Cause.SERVER_ERROR if is_server_error else Cause.OTHER_STATUS, delay)


_DETAILS: Final = {
    Cause.PERMANENT: "the target answered permanent: true",
    Cause.DEFERRED: "the target answered ack: false",
}


def _of_reply(reply: Reply, cause: Cause, asked_delay: float | None = None) -> Outcome:
    is_refusal = reply.status // 100 != 2  # noqa: PLR2004 - 2xx
    before = f"HTTP {reply.status}, and " if is_refusal else ""
    detail = f"{before}{_DETAILS[cause]}" if cause in _DETAILS else f"HTTP {reply.status}"
    kept = reply.body[:REPLY_KEPT_BYTES]
    has_error = not reply.too_long and b'"error"' in reply.body
    failure = read_error(reply.body, reply.status) if has_error else None
    ending = None if failure is None else Ending(failure)
    return Outcome(cause, RULES[cause], detail, asked_delay, reply.status, kept, ending)


class _Said(Struct, rename="camel"):
    """The fields of a reply that count. Nothing else in it is read."""

    # As written: a JSON number may be larger than any float, and a list may fill the memory.
    ack: Raw = Raw(b"")
    permanent: Raw = Raw(b"")
    delay_seconds: Raw = Raw(b"")
    result: Raw = Raw(b"")
    error: Raw = Raw(b"")


class _SaidError(Struct):
    code: str | int | None = None
    message: str | None = None


_said: Final = msgspec.json.Decoder(_Said)
_said_error: Final = msgspec.json.Decoder(_SaidError)


def _read(body: bytes) -> _Said:
    try:
        return _said.decode(body)
    except NOT_JSON:
        return _Said()


def _result(reply: Reply) -> Ending | None:
    """Return the result that a reply gives, or that it gave one which is too long to keep."""
    if reply.too_long:
        return Ending(result_omitted=True)
    result = bytes(_read(reply.body).result)
    if not is_given(Raw(result)):
        return None
    try:
        result.decode()
    except UnicodeDecodeError:
        return None  # no JSON
    if len(result) > MAX_RESULT_BYTES or is_too_deep(result):
        return Ending(result_omitted=True)
    return Ending(result=result)


def read_error(body: bytes, status: int | None = None) -> Failure | None:
    """Return the error in a JSON body `{"error": {"code", "message"}}`, if there is one."""
    try:
        said = _said_error.decode(_read(body).error)
    except NOT_JSON:
        return None
    code = "" if said.code is None else str(said.code).strip()[:MAX_CODE_CHARACTERS]
    return Failure(code, said.message or "", status)


def _usable_delay(said: bytes) -> float | None:
    try:
        seconds = float(said)
    except ValueError:  # absent, or no number
        return None
    return clamp_delay(seconds) if seconds > 0 else None


def read_retry_after(header: str | None, wall: Callable[[], float]) -> float | None:
    """Return the seconds to wait, or None if the header is missing or means nothing."""
    text = (header or "").strip()
    if text.isascii() and text.isdigit():
        return clamp_delay(float(text))
    if not text or len(text) > _MAX_DATE_CHARACTERS:
        return None
    try:
        date = parsedate_to_datetime(text)
        if date.tzinfo is None:
            date = date.replace(tzinfo=UTC)
        return clamp_delay(date.timestamp() - wall())
    except (ValueError, OverflowError, TypeError, IndexError):  # the parser is not strict
        return None
