"""How a delivery ended, and what follows from it.

Every rule that turns an HTTP answer into ACK, NACK, retry or alarm lives in this file.
"""

import math
from collections.abc import Callable, Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime
from enum import Enum, IntEnum, StrEnum, auto
from http import HTTPStatus
from typing import Final

import msgspec
from msgspec import Raw, Struct

from router.core.config import RetryPolicy

DEFAULT_DELAY: Final = 30.0  # BRK-4
FAST_FAIL_DELAY: Final = 10.0
MIN_DELAY: Final = 1.0
MAX_DELAY: Final = 43_200.0  # SQS allows no more; the same everywhere
REPLY_CAP: Final = 1024 * 1024
REPLY_KEPT: Final = 1024  # of a reply in a dead letter
_LONGEST_DATE: Final = 64  # characters; an HTTP date has at most 33


class Result(IntEnum):  # hashed for every message: a plain Enum does that in Python
    """SPEC §11."""

    SUCCESS = auto()
    ERROR_CONFIG = auto()  # our request is wrong: no retry can help
    ERROR_PROCESS = auto()  # the target could not, or would not, now
    ERROR_CONNECTION = auto()  # no answer at all


class Metric(StrEnum):
    SUCCESS = "success"
    FAILURE = "failure"
    TRANSIENT = "transient"


class Consequence(Struct, frozen=True):
    ack: bool  # gone from the broker, or back to it
    dead_letter: bool
    metric: Metric
    fails_group: bool


CONSEQUENCES: Final[Mapping[Result, Consequence]] = {
    Result.SUCCESS: Consequence(
        ack=True, dead_letter=False, metric=Metric.SUCCESS, fails_group=False
    ),
    Result.ERROR_CONFIG: Consequence(
        ack=True, dead_letter=True, metric=Metric.FAILURE, fails_group=False
    ),
    Result.ERROR_PROCESS: Consequence(
        ack=False, dead_letter=False, metric=Metric.TRANSIENT, fails_group=True
    ),
    Result.ERROR_CONNECTION: Consequence(
        ack=False, dead_letter=False, metric=Metric.FAILURE, fails_group=True
    ),
}


class Error(Enum):
    """What went wrong, in the operators' words."""

    TIMEOUT = "Timeout"
    CIRCUIT_OPEN = "CircuitOpen"
    HTTP = "HttpError"
    NETWORK = "NetworkError"
    RATE_LIMITED = "RateLimited"
    DEFERRED = "Deferred"  # `ack: false`
    PERMANENT = "Permanent"  # `permanent: true`
    TARGET_REFUSED = "TargetRefused"
    BAD_REQUEST = "BadRequest"  # it could not even be built
    OVERLOADED = "RouterOverloaded"
    UNFORESEEN = "Unforeseen"


class Alarm(Enum):
    """Which warning an outcome raises, by the table of CONTRACTS §5."""

    NONE = auto()
    CONFIGURATION_ERROR = auto()
    CONFIGURATION_CRITICAL = auto()
    PROCESSING_WARN = auto()
    OVERLOADED_WARN = auto()


class Fault(Enum):
    """Why there is no HTTP answer."""

    NETWORK = auto()  # refused, reset, cut off, DNS, TLS, connect timeout, protocol error
    TIMEOUT = auto()  # sent, no complete reply in time
    TARGET_REFUSED = auto()  # MED-5
    BAD_REQUEST = auto()  # cannot be built
    OVERLOADED = auto()  # the router lacks what a request needs, such as a file descriptor
    UNFORESEEN = auto()


class Reply(Struct, frozen=True):
    """An HTTP answer, cut down to what the rules below look at."""

    status: int
    body: bytes = b""  # at most REPLY_CAP
    retry_after: str | None = None
    too_long: bool = False  # the body went past REPLY_CAP and was cut


class NoReply(Struct, frozen=True):
    fault: Fault
    detail: str = ""


Answer = Reply | NoReply


class Outcome(Struct, frozen=True):
    result: Result
    error: Error | None = None
    asked_delay: float | None = None  # by the target, clamped
    status: int | None = None
    detail: str = ""  # for people: what the target or the network said
    reply: bytes = b""  # the first of it, for the dead letter
    alarm: Alarm = Alarm.NONE
    retryable: bool = False  # may be tried again at once (MED-2)
    counts: bool = False  # a real failure: uses up an attempt (WQ-5)

    @property
    def consequence(self) -> Consequence:
        return CONSEQUENCES[self.result]

    @property
    def delay(self) -> float:
        """Seconds before the broker hands it out again, where no retry policy says more."""
        return DEFAULT_DELAY if self.asked_delay is None else self.asked_delay


# Made once: nearly every message ends in one of them.
_ACCEPTED: Final = {status: Outcome(Result.SUCCESS, status=status) for status in range(200, 300)}
DELIVERED: Final = _ACCEPTED[200]
NO_OUTCOME: Final = Outcome(
    Result.ERROR_PROCESS, Error.UNFORESEEN, detail="the mediator gave no outcome", counts=True
)


def circuit_open(delay: float) -> Outcome:
    return Outcome(
        Result.ERROR_PROCESS, Error.CIRCUIT_OPEN, asked_delay=delay, detail="circuit open"
    )


def judge(answer: Answer, wall: Callable[[], float], policy: RetryPolicy | None = None) -> Outcome:
    """Return the outcome by the table of CONTRACTS §5.

    The wall clock is asked for `Retry-After` dates only, the policy for its statuses.
    """
    if isinstance(answer, NoReply):
        return _FAULTS[answer.fault](answer.detail)
    if answer.status // 100 != 2:  # noqa: PLR2004 - 2xx
        return _judge_refused(answer, wall, policy)
    if answer.too_long or b"false" not in answer.body:  # most replies, by far
        return _ACCEPTED[answer.status]
    return _judge_words(answer)


def clamp_delay(seconds: float) -> float:
    """Into what every broker can do, rounded up: a target is never called early."""
    return float(math.ceil(min(max(seconds, MIN_DELAY), MAX_DELAY)))


def _judge_refused(reply: Reply, wall: Callable[[], float], policy: RetryPolicy | None) -> Outcome:
    retried = () if policy is None else policy.statuses
    status, is_rate_limit = reply.status, reply.status == HTTPStatus.TOO_MANY_REQUESTS
    if status == HTTPStatus.NOT_IMPLEMENTED:
        return _http(reply, Result.ERROR_CONFIG, alarm=Alarm.CONFIGURATION_CRITICAL)
    if status // 100 == 4 and not is_rate_limit and status not in retried:  # noqa: PLR2004 - 4xx
        return _http(reply, Result.ERROR_CONFIG, alarm=Alarm.CONFIGURATION_ERROR)
    if b"true" in reply.body and not reply.too_long:  # few say anything
        said = _read(reply.body)
        if bytes(said.permanent) == b"true":
            return _permanent(reply)
    delay = _retry_after(reply.retry_after, wall)
    if is_rate_limit:
        asked = DEFAULT_DELAY if delay is None else delay
        return _http(reply, Result.ERROR_PROCESS, error=Error.RATE_LIMITED, asked_delay=asked)
    # A target that says when to come back is not asked again before.
    retryable = status // 100 == 5 and delay is None  # noqa: PLR2004 - 5xx
    return _http(reply, Result.ERROR_PROCESS, asked_delay=delay, retryable=retryable, counts=True)


def _http(
    reply: Reply,
    result: Result,
    *,
    error: Error = Error.HTTP,
    alarm: Alarm = Alarm.NONE,
    asked_delay: float | None = None,
    retryable: bool = False,
    counts: bool = False,
) -> Outcome:
    return Outcome(
        result,
        error,
        asked_delay=asked_delay,
        status=reply.status,
        detail=f"HTTP {reply.status}",
        reply=reply.body[:REPLY_KEPT],
        alarm=alarm,
        retryable=retryable,
        counts=counts,
    )


class _Said(Struct, rename="camel"):
    """What we look for in a reply. Nothing else in it is read."""

    # As written: a JSON number may be larger than any float, and a list may fill the memory.
    ack: Raw = Raw(b"")
    permanent: Raw = Raw(b"")
    delay_seconds: Raw = Raw(b"")


_said: Final = msgspec.json.Decoder(_Said)
_NOTHING_SAID: Final = _Said()


def _read(body: bytes) -> _Said:
    try:
        return _said.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _NOTHING_SAID


def _judge_words(reply: Reply) -> Outcome:
    """A 2xx may still mean: not now."""
    said = _read(reply.body)
    if bytes(said.ack) != b"false":
        return _ACCEPTED[reply.status]
    if bytes(said.permanent) == b"true":
        return _permanent(reply)
    return Outcome(
        Result.ERROR_PROCESS,
        Error.DEFERRED,
        asked_delay=_usable_delay(bytes(said.delay_seconds)),
        status=reply.status,
        detail="the target answered ack: false",
        reply=reply.body[:REPLY_KEPT],
    )


def _permanent(reply: Reply) -> Outcome:
    return Outcome(
        Result.ERROR_CONFIG,
        Error.PERMANENT,
        status=reply.status,
        detail=f"HTTP {reply.status}, and the target answered permanent: true",
        reply=reply.body[:REPLY_KEPT],
    )


def _usable_delay(said: bytes) -> float | None:
    try:
        seconds = float(said)
    except ValueError:  # absent, or no number
        return None
    return clamp_delay(seconds) if seconds > 0 else None


def _retry_after(header: str | None, wall: Callable[[], float]) -> float | None:
    """Return the seconds to wait, or None if the header is missing or means nothing."""
    text = (header or "").strip()
    if text.isascii() and text.isdigit():
        return clamp_delay(float(text))
    if not text or len(text) > _LONGEST_DATE:
        return None
    try:
        date = parsedate_to_datetime(text)
        if date.tzinfo is None:
            date = date.replace(tzinfo=UTC)
        return clamp_delay(date.timestamp() - wall())
    except (ValueError, OverflowError, TypeError, IndexError):  # the parser is not strict
        return None


_FAULTS: Final = {
    Fault.NETWORK: lambda detail: Outcome(
        Result.ERROR_CONNECTION, Error.NETWORK, detail=detail, retryable=True, counts=True
    ),
    Fault.TIMEOUT: lambda detail: Outcome(
        Result.ERROR_PROCESS, Error.TIMEOUT, detail=detail, retryable=True, counts=True
    ),
    Fault.TARGET_REFUSED: lambda detail: Outcome(
        Result.ERROR_CONFIG,
        Error.TARGET_REFUSED,
        detail=detail,
        alarm=Alarm.CONFIGURATION_ERROR,
    ),
    Fault.BAD_REQUEST: lambda detail: Outcome(
        Result.ERROR_CONFIG,
        Error.BAD_REQUEST,
        detail=detail,
        alarm=Alarm.CONFIGURATION_ERROR,
    ),
    Fault.OVERLOADED: lambda detail: Outcome(  # nothing was sent, and the target is not to blame
        Result.ERROR_PROCESS,
        Error.OVERLOADED,
        asked_delay=FAST_FAIL_DELAY,
        detail=detail,
        alarm=Alarm.OVERLOADED_WARN,
        retryable=True,
    ),
    Fault.UNFORESEEN: lambda detail: Outcome(
        Result.ERROR_PROCESS,
        Error.UNFORESEEN,
        detail=detail,
        alarm=Alarm.PROCESSING_WARN,
        retryable=True,
        counts=True,
    ),
}
