"""One entry of a routing configuration document: a queue or a pool, read and written.

Too large a number is cut and noted; anything else that is wrong makes the entry a bad one.
"""

import re
from dataclasses import dataclass, field
from typing import Final, Literal, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from router.core.config import (
    MAX_CONCURRENCY,
    PoolConfig,
    QueueConfig,
    QueueNaming,
    RetryPolicy,
    effective_concurrency,
)
from router.core.outcome import MAX_DELAY
from router.core.redact import public_uri

MAX_NAME: Final = 512
MAX_URI: Final = 4096
MAX_CONNECTIONS: Final = 100
MAX_RATE: Final = 60_000_000  # a million a second
MAX_TIMEOUT_MS: Final = 24 * 3600 * 1000
MAX_COUNT: Final = 1_000_000
MAX_SCHEDULE: Final = 1000

SUPPORTED_SCHEMES: Final = frozenset(
    {
        "activemq",
        "stomp",
        "amqp",
        "amqps",
        "nats",
        "postgresql",
        "sqlite",
        "memory",
        "sqs",
        "http",
        "https",
    }
)
PLANNED_SCHEMES: Final = frozenset({"pgmq"})

QUEUE_VALIDATION: Final = "QUEUE_VALIDATION"
CONFIGURATION: Final = "CONFIGURATION"

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")

Number = int | float
T = TypeVar("T")


class Problem(Struct, frozen=True):
    """What is wrong with one entry."""

    path: str  # in the JSON document
    code: str  # of the warning to raise
    text: str
    skipped: bool = True  # False: applied, but not as it is written

    def __str__(self) -> str:
        return f"{self.path}: {self.text}"


class BadEntry(ValueError):
    """This entry is skipped; its neighbours are not."""

    def __init__(self, where: str, text: str) -> None:
        super().__init__(text)
        self.where = where  # inside of the entry; "" for the entry itself
        self.text = text


@dataclass(slots=True)
class Notes:
    """What is found wrong in one place of the document."""

    path: str
    code: str
    problems: list[Problem] = field(default_factory=list)

    def add(self, where: str, text: str, *, skipped: bool) -> None:
        path = f"{self.path}.{where}" if where else self.path
        self.problems.append(Problem(path, self.code, text, skipped))

    def whole(self, where: str, value: Number | None, most: int) -> int | None:
        """A count of at least 1; one that is too large is cut."""
        if value is None:
            return None
        if value != value // 1:
            raise BadEntry(where, "must be a whole number")
        if value < 1:
            raise BadEntry(where, "must be above 0")
        return int(self.cut(where, value, most))

    def whole_or_none(self, where: str, value: Number | None, most: int) -> int | None:
        """Like `whole`, where zero and less mean: not given (POOL-6, §9)."""
        return None if value is None or value <= 0 else self.whole(where, value, most)

    def seconds(self, where: str, value: Number | None) -> float | None:
        if value is None:
            return None
        if value <= 0:
            raise BadEntry(where, "must be above 0")
        return float(self.cut(where, value, MAX_DELAY))

    def cut(self, where: str, value: Number, most: Number) -> Number:
        if value <= most:
            return value
        self.add(where, f"more than {most:g}, which is used instead", skipped=False)
        return most


class _RetryEntry(Struct, rename="camel", omit_defaults=True):
    max_attempts: Number | None = None
    backoff: Literal["exponential"] | list[float] | None = None
    statuses: list[int] | None = None


class _QueueEntry(Struct, rename="camel", omit_defaults=True, kw_only=True):
    queue_name: str | None = None
    queue_uri: str | None = None
    connections: Number | None = None
    visibility_timeout: Number | None = None
    max_messages: Number | None = None
    retry: _RetryEntry | None = None


class _PoolEntry(Struct, rename="camel", omit_defaults=True, kw_only=True):
    code: str
    concurrency: Number | None = None
    rate_limit_per_minute: Number | None = None
    rate_limit_burst: Number | None = None
    ordering: Literal["batch", "strict"] | None = None
    ungrouped: Literal["serial", "parallel"] | None = None
    retry: _RetryEntry | None = None
    timeout_ms: Number | None = None


def _convert(raw: object, entry_type: type[T]) -> T:
    try:
        return msgspec.convert(raw, entry_type)
    except msgspec.ValidationError as error:
        text, _, where = str(error).partition(" - at `$")
        if text.startswith("Invalid enum value"):
            text = "not one of the allowed values"  # the given one is of any length and content
        raise BadEntry(where.strip(".`"), text) from None


def queue_identity(raw: object) -> str | None:
    """The queue's name, as far as even a bad entry tells it."""
    if not isinstance(raw, dict):
        return None
    name, uri = raw.get("queueName"), raw.get("queueUri")
    if isinstance(name, str) and name.strip():
        return name
    return public_uri(uri) if isinstance(uri, str) and uri.strip() else None


def read_queue(raw: object, notes: Notes, *, naming: QueueNaming, connections: int) -> QueueConfig:
    entry = _convert(raw, _QueueEntry)
    name = _text("queueName", queue_identity(raw), MAX_NAME)
    if name is None:
        raise BadEntry("", "needs `queueUri` or `queueName`")
    return QueueConfig(
        name=name,
        uri=_resolve(_text("queueUri", entry.queue_uri, MAX_URI) or name, naming),
        connections=notes.whole("connections", entry.connections, MAX_CONNECTIONS) or connections,
        visibility_timeout=notes.seconds("visibilityTimeout", entry.visibility_timeout),
        max_messages=notes.whole("maxMessages", entry.max_messages, MAX_COUNT),
        retry=_read_retry(entry.retry, notes),
    )


def _text(where: str, value: str | None, longest: int) -> str | None:
    """None for what is absent or blank."""
    if value is None or not value.strip():
        return None
    if len(value) > longest:
        raise BadEntry(where, f"longer than {longest} characters")
    if _CONTROL.search(value):
        raise BadEntry(where, "contains a control character")
    return value


def _resolve(given: str, naming: QueueNaming) -> str:
    """A URI of a broker that we can consume. Error texts name no more of it than its scheme."""
    uri = given if _SCHEME.match(given) else naming.uri(given)
    scheme = uri.partition("://")[0].lower()
    if scheme in PLANNED_SCHEMES:
        raise BadEntry("queueUri", f"{scheme} queues are not supported yet")
    if scheme not in SUPPORTED_SCHEMES:
        raise BadEntry("queueUri", f"unknown scheme {scheme[:20]!r}")
    try:
        parts = urlsplit(uri)
    except ValueError:
        raise BadEntry("queueUri", "not a URL") from None
    if scheme == "sqlite" and (parts.netloc or parts.path.endswith("/")):
        raise BadEntry("queueUri", "must be such as sqlite:///path/to/file.db?queue=name")
    if scheme == "memory" and not parts.netloc:
        raise BadEntry("queueUri", "must be such as memory://name")
    if scheme == "sqs" and not parts.netloc:
        raise BadEntry("queueUri", "must be such as sqs://name")
    if scheme in {"http", "https"} and not (parts.netloc and parts.path.strip("/")):
        raise BadEntry("queueUri", "must be such as https://host/account/name")
    return uri


def pool_identity(raw: object) -> str | None:
    code = raw.get("code") if isinstance(raw, dict) else None
    return code if isinstance(code, str) else None


def read_pool(raw: object, notes: Notes) -> PoolConfig:
    entry = _convert(raw, _PoolEntry)
    code = _text("code", entry.code, MAX_NAME)
    if code is None:
        raise BadEntry("code", "must not be blank")
    if entry.ordering == "strict":
        text = "`strict` is planned (FIFO-2): until then the pool works as `batch`"
        notes.add("ordering", text, skipped=False)
    concurrency = notes.whole_or_none("concurrency", entry.concurrency, MAX_CONCURRENCY)
    rate = notes.whole_or_none("rateLimitPerMinute", entry.rate_limit_per_minute, MAX_RATE)
    timeout_ms = notes.whole("timeoutMs", entry.timeout_ms, MAX_TIMEOUT_MS)
    return PoolConfig(
        code=code,
        concurrency=effective_concurrency(concurrency, rate),
        rate_per_minute=rate,
        burst=notes.whole_or_none("rateLimitBurst", entry.rate_limit_burst, MAX_RATE),
        parallel_ungrouped=entry.ungrouped == "parallel",
        retry=_read_retry(entry.retry, notes),
        timeout=None if timeout_ms is None else timeout_ms / 1000,
    )


def read_retry(raw: object) -> RetryPolicy:
    """Read a policy that is written by itself. BadEntry: it would not be used as it is written."""
    notes = Notes("", CONFIGURATION)
    policy = _read_policy(_convert(raw, _RetryEntry), notes)
    for problem in notes.problems:
        raise BadEntry(problem.path.strip("."), problem.text.partition(",")[0])
    return policy


def _read_retry(entry: _RetryEntry | None, notes: Notes) -> RetryPolicy | None:
    return None if entry is None else _read_policy(entry, notes)


def _read_policy(entry: _RetryEntry, notes: Notes) -> RetryPolicy:
    attempts = notes.whole("retry.maxAttempts", entry.max_attempts, MAX_COUNT)
    for index, status in enumerate(entry.statuses or ()):
        if status // 100 != 4:  # noqa: PLR2004 - 4xx
            raise BadEntry(f"retry.statuses[{index}]", "must be a status from 400 to 499")
    statuses = frozenset(entry.statuses or ())
    if not isinstance(entry.backoff, list):
        return RetryPolicy(attempts, statuses=statuses)
    if len(entry.backoff) > MAX_SCHEDULE:
        raise BadEntry("retry.backoff", f"more than {MAX_SCHEDULE} delays")
    if min(entry.backoff, default=0.0) < 0:
        raise BadEntry("retry.backoff", "must not be negative")
    notes.cut("retry.backoff", max(entry.backoff, default=0.0), MAX_DELAY)
    schedule = tuple(min(delay, MAX_DELAY) for delay in entry.backoff)
    return RetryPolicy(attempts, schedule, statuses)


def queue_entry(queue: QueueConfig) -> _QueueEntry:
    return _QueueEntry(
        queue_name=queue.name,
        queue_uri=public_uri(queue.uri),
        connections=queue.connections,
        visibility_timeout=queue.visibility_timeout,
        max_messages=queue.max_messages,
        retry=_retry_entry(queue.retry),
    )


def pool_entry(pool: PoolConfig) -> _PoolEntry:
    return _PoolEntry(
        code=pool.code,
        concurrency=pool.concurrency,
        rate_limit_per_minute=pool.rate_per_minute,
        rate_limit_burst=pool.burst,
        ungrouped="parallel" if pool.parallel_ungrouped else None,
        retry=_retry_entry(pool.retry),
        timeout_ms=None if pool.timeout is None else round(pool.timeout * 1000),
    )


def _retry_entry(policy: RetryPolicy | None) -> _RetryEntry | None:
    if policy is None:
        return None
    return _RetryEntry(
        policy.max_attempts,
        "exponential" if policy.schedule is None else list(policy.schedule),
        sorted(policy.statuses) or None,
    )
