"""Reads and writes one entry of a configuration document: a queue, pool, schedule or target.

A number that is too large is cut and noted; any other error makes the entry a bad one.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from inspect import isclass
from typing import Annotated, Any, Final, Literal, TypeVar, cast, get_args, get_origin
from urllib.parse import urlsplit
from zoneinfo import ZoneInfo

import msgspec
from cronsim import CronSim, CronSimError
from msgspec import Meta, Raw, Struct

from router.core.broker import (
    UNKNOWN_BROKER,
    BrokerCatalog,
    BrokerFacts,
    BrokerUnusable,
    QueueNames,
)
from router.core.config import (
    COMMAND_BUS,
    MAX_CONCURRENCY,
    PARTITION,
    RAW,
    BodyFormat,
    FairShare,
    OnFailure,
    Ordering,
    PoolConfig,
    QueueConfig,
    RetryPolicy,
    Route,
    Schedule,
    TargetConfig,
    effective_concurrency,
)
from router.core.headers import (
    MAX_HEADERS,
    BadHeader,
    check_header,
    check_headers,
    is_header_value,
)
from router.core.message import CONTROL, Malformed, parse
from router.core.partitions import MAX_PARTITIONS
from router.core.raw import Attribute, BadPointer, BrokerFact, Fact, Pointer, RawRoute, Value
from router.core.redact import mask_urls, public_uri
from router.core.returning import MAX_DELAY_SECONDS
from router.core.target import PROCESS, BadTarget, TargetPolicy, read_target
from router.core.target_table import has_dots
from router.core.typos import UNKNOWN_FIELD, advice, fields_of, shown_name
from router.core.warnings import Code

MAX_NAME_CHARACTERS: Final = 512
MAX_URI_CHARACTERS: Final = 4096
MAX_CONNECTIONS: Final = 100
MAX_RATE_PER_MINUTE: Final = 60_000_000
MAX_TIMEOUT_MS: Final = 24 * 3600 * 1000
MAX_AGE_SECONDS: Final = 366 * 24 * 3600.0
MAX_COUNT: Final = 1_000_000
MAX_LOOK_AHEAD: Final = 100_000  # messages
MAX_TAKE_AHEAD: Final = 1_000  # messages for each worker
MAX_SCHEDULE_DELAYS: Final = 1000
MAX_ROUTES: Final = 1000  # of one queue

_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")

Number = int | float
T = TypeVar("T", bound=Struct)
CRON_FIELDS: Final = 5
EVENT_SOURCE: Final = "//message-router/"  # and the name of the target
_FACTS: Final = {fact.value: fact for fact in Fact}
_ANY_DAY: Final = datetime(2026, 1, 1)  # noqa: DTZ001  a local time of no zone
_EVERY_KIND_OF_YEAR_DAYS: Final = 28 * 366  # leap years or not, on whichever weekday they begin
MAX_EVERY_SECONDS: Final = 366 * 24 * 3600


class Problem(Struct, frozen=True):
    """A problem of one entry."""

    path: str  # in the JSON document
    code: Code  # of the warning to raise
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
    """The problems of one place in the document."""

    path: str
    code: Code
    problems: list[Problem] = field(default_factory=list)

    def add(self, where: str, text: str, *, skipped: bool) -> None:
        path = f"{self.path}.{where}" if where else self.path
        self.problems.append(Problem(path, self.code, text, skipped))

    def whole(self, where: str, value: Number | None, most: int) -> int | None:
        """Return a count of at least 1; one that is too large is cut."""
        if value is None:
            return None
        if value != value // 1:
            raise BadEntry(where, "must be a whole number")
        if value < 1:
            raise BadEntry(where, "must be above 0")
        return int(self.cut(where, value, most))

    def whole_or_none(self, where: str, value: Number | None, most: int) -> int | None:
        """Read a number as `whole` does; zero and less mean that none is given (POOL-6)."""
        return None if value is None or value <= 0 else self.whole(where, value, most)

    def seconds(
        self, where: str, value: Number | None, most: float = MAX_DELAY_SECONDS
    ) -> float | None:
        if value is None:
            return None
        if value <= 0:
            raise BadEntry(where, "must be above 0")
        return float(self.cut(where, value, most))

    def cut(self, where: str, value: Number, most: Number) -> Number:
        if value <= most:
            return value
        self.add(where, f"more than {most:g}, which is used instead", skipped=False)
        return most


class _RetryEntry(Struct, rename="camel", omit_defaults=True):
    max_attempts: Number | None = None
    backoff: Literal["exponential"] | list[float] | None = None
    statuses: list[int] | None = None


class _RouteEntry(Struct, rename="camel", omit_defaults=True):
    mediation_target: str
    pool_code: str | None = None
    message_group_id: str | None = None  # the name of a field in the command's data
    auth_token: str | None = None


class _RawRouteEntry(Struct, rename="camel", omit_defaults=True, forbid_unknown_fields=True):
    mediation_target: str
    pool_code: str | None = None
    message_group_id: object = None
    id: object = None
    headers: dict[str, object] | None = None
    content_type: object = None
    reply_body: Literal["ignored", "protocol"] | None = None


class _QueueEntry(Struct, rename="camel", omit_defaults=True, kw_only=True):
    queue_name: str | None = None
    queue_uri: str | None = None
    connections: Number | None = None
    visibility_timeout: Number | None = None
    max_messages: Number | None = None
    look_ahead: Number | None = None
    max_age_seconds: Number | None = None
    retry: _RetryEntry | None = None
    ordering: Literal["batch", "strict"] | None = None
    on_failure: Literal["block", "park", "skip"] | None = None
    on_dead_letter: Literal["continue", "hold"] | None = None
    share: bool | None = None
    partitions: Number | None = None
    envelope: Literal["command-bus", "raw"] | None = None
    routes: dict[str, object] | None = None
    route: dict[str, object] | None = None


class _PoolEntry(Struct, rename="camel", omit_defaults=True, kw_only=True):
    code: str
    concurrency: Number | None = None
    rate_limit_per_minute: Number | None = None
    rate_limit_burst: Number | None = None
    ordering: Literal["batch", "strict"] | None = None
    ungrouped: Literal["serial", "parallel"] | None = None
    retry: _RetryEntry | None = None
    timeout_ms: Number | None = None
    take_ahead: Number | str | None = None
    fair_share: Literal["target", "tenant", "none"] | None = None


def convert_entry(raw: object, entry_type: type[T]) -> T:
    """Check the types of an entry. Raises BadEntry with the field that is wrong."""
    try:
        return msgspec.convert(raw, entry_type)
    except msgspec.ValidationError as error:
        text, _, where = str(error).partition(" - at `$")
        name = where.strip(".`")
        if text.startswith("Invalid enum value"):  # the given one is of any length and content
            text = f"not one of {', '.join(_choices(entry_type, name))}"
        elif text.startswith(UNKNOWN_FIELD):
            unknown = text.removeprefix(UNKNOWN_FIELD).removesuffix("`")
            meant = advice(unknown, fields_of(entry_type))
            text = f"unknown field `{shown_name(unknown)}`{meant}"
        raise BadEntry(name, text) from None


def _choices(entry_type: type[Struct], path: str) -> Sequence[str]:
    """Return the texts that a field may have."""
    parts: Sequence[Any] = (entry_type,)
    for name in path.split("."):
        (entry,) = [each for each in parts if isclass(each) and issubclass(each, Struct)]
        (found,) = [each.type for each in msgspec.structs.fields(entry) if each.encode_name == name]
        parts = (found, *get_args(found))
    return [text for part in parts if get_origin(part) is Literal for text in get_args(part)]


def queue_identity(raw: object, catalog: BrokerCatalog) -> str | None:
    """Return the queue's name without credentials, if the entry has one: even a bad one may."""
    if not isinstance(raw, dict):
        return None
    given = (raw.get("queueName"), raw.get("queueUri"))
    name = next((text for text in given if isinstance(text, str) and text.strip()), None)
    if name is None:
        return None
    try:
        broker = catalog.find(name.partition("://")[0].lower()) or UNKNOWN_BROKER
    except BrokerUnusable:
        broker = UNKNOWN_BROKER
    return public_uri(name, broker.shown_options)


def read_queue(raw: object, notes: Notes, *, naming: QueueNames, connections: int) -> QueueConfig:
    entry = convert_entry(raw, _QueueEntry)
    name = _text("queueName", queue_identity(raw, naming.catalog), MAX_NAME_CHARACTERS)
    given = _text("queueUri", entry.queue_uri, MAX_URI_CHARACTERS)
    given = given or _text("queueName", entry.queue_name, MAX_URI_CHARACTERS)
    if name is None or given is None:
        raise BadEntry("", "needs `queueUri` or `queueName`")
    uri, broker = _resolve(given, naming)
    partitions = _read_partitions(entry, name, uri, broker)
    own_connections = notes.whole("connections", entry.connections, MAX_CONNECTIONS)
    _check_order(entry, own_connections)
    if entry.share:
        _check_share(entry, naming, uri, broker)
    if entry.ordering == "strict" and broker.may_be_shared(uri) and not naming.locks_queues:
        text = f"{broker.name} does not keep a second router from this queue: STANDBY_ENABLED does"
        notes.add("ordering", text, skipped=False)
    if entry.ordering == "strict":
        connections = 1
    return QueueConfig(
        name=name,
        uri=uri,
        connections=own_connections or connections,
        visibility_timeout=notes.seconds("visibilityTimeout", entry.visibility_timeout),
        max_messages=notes.whole("maxMessages", entry.max_messages, MAX_COUNT),
        look_ahead=notes.whole("lookAhead", entry.look_ahead, MAX_LOOK_AHEAD),
        retry=None if entry.retry is None else _read_policy(entry.retry, notes),
        ordering=None if entry.ordering is None else Ordering(entry.ordering),
        on_failure=None if entry.on_failure is None else OnFailure(entry.on_failure),
        holds_letters=entry.on_dead_letter == "hold",
        is_shared=entry.share is True,
        max_age=notes.seconds("maxAgeSeconds", entry.max_age_seconds, MAX_AGE_SECONDS),
        envelope=entry.envelope,
        routes=_read_routes(entry),
        route=_read_raw_route(entry, broker),
        broker=broker,
        partitions=partitions,
    )


def _read_partitions(entry: _QueueEntry, name: str, uri: str, broker: BrokerFacts) -> int | None:
    """Return into how many queues an entry is divided, if it is (PART-1)."""
    count = entry.partitions
    if count is None:
        if PARTITION in uri or PARTITION in name:
            raise BadEntry("partitions", f"must say how many there are, as {PARTITION} is there")
        return None
    if count != count // 1 or not 1 <= count <= MAX_PARTITIONS:
        raise BadEntry("partitions", f"must be a whole number from 1 to {MAX_PARTITIONS}")
    if not (entry.queue_name or "").strip() or PARTITION in name:
        raise BadEntry("queueName", f"must be given with `partitions`, without {PARTITION}")
    if uri.count(PARTITION) != 1:
        raise BadEntry("queueUri", f"must have {PARTITION} once, as there are `partitions`")
    if PARTITION not in public_uri(uri, broker.naming_options):
        raise BadEntry("queueUri", f"{PARTITION} must be in what names the queue")
    if broker.holds_groups(uri):
        text = f"{broker.name} keeps groups together itself: leave it out, and let all routers work"
        raise BadEntry("partitions", text)
    return int(count)


def _check_order(entry: _QueueEntry, connections: int | None) -> None:
    """Raise BadEntry if an entry cannot keep the order that it asks for (ORD-1, ORD-2)."""
    if entry.ordering == "strict":
        if connections is not None and connections > 1:
            text = "must be 1 with `ordering` `strict`: one connection keeps the order"
            raise BadEntry("connections", text)
        if entry.on_dead_letter == "hold" and entry.on_failure == "skip":
            text = "`hold` needs a failed message to wait in its group: leave out `onFailure`"
            raise BadEntry("onDeadLetter", text)
    elif entry.on_failure in ("block", "park"):
        raise BadEntry("onFailure", "needs `ordering` `strict`")
    elif entry.on_dead_letter == "hold":
        raise BadEntry("onDeadLetter", "`hold` needs `ordering` `strict`")


def _check_share(entry: _QueueEntry, naming: QueueNames, uri: str, broker: BrokerFacts) -> None:
    """Raise BadEntry if the routers of an installation cannot share a queue (ORD-13)."""
    if entry.ordering != "strict":
        raise BadEntry("share", "needs `ordering` `strict`")
    if entry.on_failure in ("block", "skip"):
        text = "`share` keeps failed messages in the order store: leave it out, or use `park`"
        raise BadEntry("onFailure", text)
    if broker.holds_groups(uri):
        text = f"is not for this queue of {broker.name}: all routers deliver from it as it is"
        raise BadEntry("share", text)
    if not naming.has_shared_store:
        text = "needs an order store that all routers use: set MESSAGE_ROUTER_ORDER_STORE"
        raise BadEntry("share", text)


def _read_routes(entry: _QueueEntry) -> tuple[tuple[str, Route], ...]:
    """Return where the commands of a queue go (CMD-7)."""
    if entry.envelope != COMMAND_BUS:
        if entry.routes is not None:
            raise BadEntry("routes", "needs `envelope` `command-bus`")
        return ()
    if not entry.routes:
        raise BadEntry("routes", "must say where commands go")
    if len(entry.routes) > MAX_ROUTES:
        raise BadEntry("routes", f"more than {MAX_ROUTES} routes")
    return tuple((kind, _read_route(kind, raw)) for kind, raw in entry.routes.items())


def _read_raw_route(entry: _QueueEntry, broker: BrokerFacts) -> RawRoute | None:
    """Return where all of a raw queue goes (RAW-1)."""
    if entry.envelope != RAW:
        if entry.route is not None:
            raise BadEntry("route", "needs `envelope` `raw`")
        return None
    if not broker.takes_raw:
        text = f"`raw` is not for queues of {broker.name}: only this router publishes there"
        raise BadEntry("envelope", text)
    if entry.route is None:
        raise BadEntry("route", "must say where the messages of a raw queue go")
    try:
        given = convert_entry(entry.route, _RawRouteEntry)
    except BadEntry as bad:
        raise BadEntry(f"route.{bad.where}".rstrip("."), bad.text) from None
    if not given.mediation_target.lower().startswith(("https://", "http://")):
        raise BadEntry("route.mediationTarget", "must begin with https:// or http://")
    sample = {"id": "any", "mediationTarget": given.mediation_target, "poolCode": given.pool_code}
    try:
        message = parse(msgspec.json.encode(sample))  # what no message may have, no route may
    except Malformed as error:
        raise BadEntry("route", str(error)) from None
    own_id = _read_value("route.id", given.id)
    if isinstance(own_id, str):
        raise BadEntry("route.id", "must not be the same for all messages")
    headers = given.headers or {}
    if len(headers) > MAX_HEADERS:
        raise BadEntry("route.headers", f"more than {MAX_HEADERS} headers")
    return RawRoute(
        target=message.target,
        pool=message.pool,
        id=own_id,
        group=_read_value("route.messageGroupId", given.message_group_id),
        headers=tuple(_read_raw_header(name, value) for name, value in headers.items()),
        content_type=_read_content_type(given.content_type),
        reads_reply=given.reply_body == "protocol",
    )


def _read_raw_header(name: str, raw: object) -> tuple[str, Value]:
    value = _read_value(f"route.headers.{name}", raw)
    try:
        check_header(name, value if isinstance(value, str) else "any")
    except BadHeader as error:
        raise BadEntry("route.headers", str(error)) from None
    if value is None:
        raise BadEntry(f"route.headers.{name}", "must not be empty")
    return name, value


def _read_content_type(raw: object) -> Value | None:
    value = _read_value("route.contentType", raw)
    if isinstance(value, str) and not is_header_value(value):
        raise BadEntry("route.contentType", "is not printable ASCII")
    return value


def _read_value(where: str, raw: object) -> Value | None:
    """Return a constant, or where a value is found in each message (RAW-2)."""
    if raw is None or isinstance(raw, str):
        return _text(where, raw, MAX_NAME_CHARACTERS)
    text = "" if where == "route.id" else "a text, "
    shapes = f'must be {text}{{"attribute": name}}, {{"body": pointer}} or {{"broker": fact}}'
    if not isinstance(raw, dict) or len(raw) != 1:
        raise BadEntry(where, shapes)
    ((kind, given),) = raw.items()
    name = _text(where, given, MAX_NAME_CHARACTERS) if isinstance(given, str) else None
    if name is None:
        raise BadEntry(where, shapes)
    match kind:
        case "attribute":
            return Attribute(name)
        case "body":
            try:
                Pointer(name).check()
            except BadPointer as error:
                raise BadEntry(where, f"the JSON pointer {error}") from None
            return Pointer(name)
        case "broker" if name in _FACTS:
            return BrokerFact(_FACTS[name])
        case "broker":
            raise BadEntry(where, f"the broker knows {', '.join(_FACTS)}")
        case _:
            raise BadEntry(where, shapes)


def _value_entry(value: Value | None) -> object:
    match value:
        case Attribute(name):
            return {"attribute": name}
        case Pointer(text):
            return {"body": text}
        case BrokerFact(fact):
            return {"broker": fact.value}
        case _:
            return value


def _raw_route_entry(route: RawRoute) -> dict[str, object]:
    headers = {name: _value_entry(value) for name, value in route.headers}
    shown = _RawRouteEntry(
        mediation_target=mask_urls(route.target),
        pool_code=route.pool,
        message_group_id=_value_entry(route.group),
        id=_value_entry(route.id),
        headers=headers or None,
        content_type=_value_entry(route.content_type),
        reply_body="protocol" if route.reads_reply else None,
    )
    return cast("dict[str, object]", msgspec.to_builtins(shown))


def _read_route(kind: str, raw: object) -> Route:
    if not kind.strip() or len(kind) > MAX_NAME_CHARACTERS or CONTROL.search(kind):
        raise BadEntry("routes", "a command type is blank, too long or has a control character")
    where = f"routes.{kind}"
    try:
        entry = convert_entry(raw, _RouteEntry)
    except BadEntry as bad:
        raise BadEntry(f"{where}.{bad.where}".rstrip("."), bad.text) from None
    sample = {
        "id": "any",
        "mediationTarget": entry.mediation_target,
        "mediationType": "PROCESS" if entry.mediation_target.startswith(f"{PROCESS}:") else None,
        "poolCode": entry.pool_code,
        "authToken": entry.auth_token,
    }
    try:
        message = parse(msgspec.json.encode(sample))  # what no message may have, no route may
    except Malformed as error:
        raise BadEntry(where, str(error)) from None
    return Route(
        target=message.target,
        pool=message.pool,
        group_field=_text(f"{where}.messageGroupId", entry.message_group_id, MAX_NAME_CHARACTERS),
        token=message.token,
    )


_REPLY_FIELDS: Final = ("queueName", "queueUri", "partitions")


def read_reply_queue(raw: object, notes: Notes, *, naming: QueueNames) -> QueueConfig:
    """Read a queue that is only published to, so that nothing but its place counts (CMD-3)."""
    if isinstance(raw, dict):
        raw = {name: raw[name] for name in _REPLY_FIELDS if name in raw}
    return read_queue(raw, notes, naming=naming, connections=1)


def reply_entry(queue: QueueConfig) -> Mapping[str, object]:
    partitions = {} if queue.partitions is None else {"partitions": queue.partitions}
    return {"queueName": queue.name, "queueUri": queue.public_uri, **partitions}


def _text(where: str, value: str | None, longest: int) -> str | None:
    """Return None for what is absent or blank."""
    if value is None or not value.strip():
        return None
    if len(value) > longest:
        raise BadEntry(where, f"longer than {longest} characters")
    if CONTROL.search(value):
        raise BadEntry(where, "contains a control character")
    return value


def _resolve(given: str, naming: QueueNames) -> tuple[str, BrokerFacts]:
    """Return the URI of a queue, and its broker. Error texts show only the scheme.

    The scheme is in lower case, so that two spellings of one database are one database.
    """
    uri = given if _SCHEME.match(given) else naming.uri(given)
    before, colon, _ = given.partition(":")
    if uri is not given and colon and _find_broker(before.lower(), naming) is not None:
        raise BadEntry("queueUri", f"needs {before.lower()}:// in front")
    scheme = uri.partition("://")[0].lower()
    broker = _find_broker(scheme, naming)
    if broker is None:
        raise BadEntry("queueUri", f"unknown scheme {scheme[:20]!r}")
    try:
        wrong = broker.why_malformed(urlsplit(uri))
    except ValueError:
        raise BadEntry("queueUri", "not a URL") from None
    if wrong is not None:
        raise BadEntry("queueUri", wrong)
    return scheme + uri[len(scheme) :], broker


def _find_broker(scheme: str, naming: QueueNames) -> BrokerFacts | None:
    try:
        return naming.catalog.find(scheme)
    except BrokerUnusable as error:
        raise BadEntry("queueUri", str(error)) from None


def identity_in(field: str, raw: object) -> str | None:
    """Return what names a pool or a schedule, if the entry has it: even a bad one may."""
    name = raw.get(field) if isinstance(raw, dict) else None
    return name if isinstance(name, str) else None


def read_pool(raw: object, notes: Notes) -> PoolConfig:
    entry = convert_entry(raw, _PoolEntry)
    code = _text("code", entry.code, MAX_NAME_CHARACTERS)
    if code is None:
        raise BadEntry("code", "must not be blank")
    if entry.ordering == "strict":
        text = "`ordering` is a field of queues: here it makes all those strict that have none"
        notes.add("ordering", text, skipped=False)
    concurrency = notes.whole_or_none("concurrency", entry.concurrency, MAX_CONCURRENCY)
    rate = notes.whole_or_none(
        "rateLimitPerMinute", entry.rate_limit_per_minute, MAX_RATE_PER_MINUTE
    )
    timeout_ms = notes.whole("timeoutMs", entry.timeout_ms, MAX_TIMEOUT_MS)
    return PoolConfig(
        code=code,
        concurrency=effective_concurrency(concurrency, rate),
        rate_per_minute=rate,
        burst=notes.whole_or_none("rateLimitBurst", entry.rate_limit_burst, MAX_RATE_PER_MINUTE),
        parallel_ungrouped=entry.ungrouped == "parallel",
        retry=None if entry.retry is None else _read_policy(entry.retry, notes),
        timeout=None if timeout_ms is None else timeout_ms / 1000,
        take_ahead=_read_take_ahead(entry.take_ahead, notes),
        fair_share=FairShare(entry.fair_share or FairShare.TARGET.value),
        is_strict=entry.ordering == "strict",
    )


def _read_take_ahead(value: Number | str | None, notes: Notes) -> int | None:
    """Return the waiting messages for each worker; None: the pool finds out (POOL-1)."""
    if value is None or value == "auto":
        return None
    if isinstance(value, str) or value < 0:
        raise BadEntry("takeAhead", 'must be "auto" or a number, 0 or more')
    return 0 if value == 0 else notes.whole("takeAhead", value, MAX_TAKE_AHEAD)


def read_retry(raw: object) -> RetryPolicy:
    """Read the policy of an entry. Raises BadEntry if it would not be used as written."""
    notes = Notes("", Code.CONFIGURATION)
    policy = _read_policy(convert_entry(raw, _RetryEntry), notes)
    for problem in notes.problems:
        raise BadEntry(problem.path.strip("."), problem.text.partition(",")[0])
    return policy


def _read_policy(entry: _RetryEntry, notes: Notes) -> RetryPolicy:
    attempts = notes.whole("retry.maxAttempts", entry.max_attempts, MAX_COUNT)
    for index, status in enumerate(entry.statuses or ()):
        if status // 100 != 4:  # noqa: PLR2004 - 4xx
            raise BadEntry(f"retry.statuses[{index}]", "must be a status from 400 to 499")
    statuses = frozenset(entry.statuses or ())
    if not isinstance(entry.backoff, list):
        return RetryPolicy(attempts, statuses=statuses)
    if len(entry.backoff) > MAX_SCHEDULE_DELAYS:
        raise BadEntry("retry.backoff", f"more than {MAX_SCHEDULE_DELAYS} delays")
    if min(entry.backoff, default=0.0) < 0:
        raise BadEntry("retry.backoff", "must not be negative")
    notes.cut("retry.backoff", max(entry.backoff, default=0.0), MAX_DELAY_SECONDS)
    schedule = tuple(min(delay, MAX_DELAY_SECONDS) for delay in entry.backoff)
    return RetryPolicy(attempts, schedule, statuses)


def queue_entry(queue: QueueConfig) -> _QueueEntry:
    shown = [(kind, route.without_secrets()) for kind, route in queue.routes]
    routes: dict[str, object] = {
        kind: _RouteEntry(route.target, route.pool, route.group_field, route.token)
        for kind, route in shown
    }
    return _QueueEntry(
        queue_name=queue.name,
        queue_uri=queue.public_uri,
        partitions=queue.partitions,
        connections=queue.connections,
        visibility_timeout=queue.visibility_timeout,
        max_messages=queue.max_messages,
        look_ahead=queue.look_ahead,
        max_age_seconds=queue.max_age,
        retry=retry_entry(queue.retry),
        ordering=None if queue.ordering is None else queue.ordering.value,
        on_failure=None if queue.on_failure is None else queue.on_failure.value,
        on_dead_letter="hold" if queue.holds_letters else None,
        share=True if queue.is_shared else None,
        envelope=cast("Literal['command-bus', 'raw'] | None", queue.envelope),
        routes=routes or None,
        route=None if queue.route is None else _raw_route_entry(queue.route),
    )


def pool_entry(pool: PoolConfig) -> _PoolEntry:
    return _PoolEntry(
        code=pool.code,
        concurrency=pool.concurrency,
        rate_limit_per_minute=pool.rate_per_minute,
        rate_limit_burst=pool.burst,
        ungrouped="parallel" if pool.parallel_ungrouped else None,
        retry=retry_entry(pool.retry),
        timeout_ms=None if pool.timeout is None else round(pool.timeout * 1000),
        take_ahead=pool.take_ahead,
        fair_share=_share_entry(pool.fair_share),
        ordering="strict" if pool.is_strict else None,
    )


def _share_entry(share: FairShare) -> Literal["tenant", "none"] | None:
    """Return what a pool says of its shares; None: nothing, as by default."""
    match share:
        case FairShare.TENANT:
            return "tenant"
        case FairShare.NONE:
            return "none"
        case _:
            return None


def retry_entry(policy: RetryPolicy | None) -> _RetryEntry | None:
    if policy is None:
        return None
    return _RetryEntry(
        policy.max_attempts,
        "exponential" if policy.schedule is None else list(policy.schedule),
        sorted(policy.statuses) or None,
    )


class _ScheduleEntry(Struct, rename="camel", omit_defaults=True, kw_only=True):
    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,128}\Z")]
    queue: Annotated[str, Meta(min_length=1, max_length=512)]
    cron: Annotated[str, Meta(max_length=256)] | None = None
    every_seconds: Annotated[int, Meta(ge=1, le=MAX_EVERY_SECONDS)] | None = None
    timezone: Annotated[str, Meta(max_length=64)] = "UTC"
    message: dict[str, object] = {}


def read_schedule(raw: object, _notes: Notes) -> Schedule:
    """Read an entry, or raise BadEntry with the field that is wrong."""
    entry = convert_entry(raw, _ScheduleEntry)
    if (entry.cron is None) == (entry.every_seconds is None):
        raise BadEntry("", "needs `cron` or `everySeconds`, and not both")
    check_cron(entry.cron or "* * * * *", entry.timezone)
    if "id" in entry.message:
        raise BadEntry("message.id", "must be absent: the schedule makes the id")
    schedule = Schedule(
        name=entry.name,
        queue=entry.queue,
        message=msgspec.json.encode(entry.message),
        every_seconds=entry.every_seconds,
        cron=entry.cron,
        timezone=entry.timezone,
    )
    try:
        parse(schedule.body_of(0))
    except Malformed as error:
        raise BadEntry("message", str(error)) from None
    return schedule


def check_cron(expression: str, timezone: str) -> None:
    """Raise BadEntry if there is no such time zone or expression, or if it never comes due."""
    if len(expression.split()) != CRON_FIELDS:
        raise BadEntry("", "`cron` must have five fields: minute, hour, day, month and weekday")
    try:
        CronSim(expression, _ANY_DAY)
    except CronSimError as error:
        raise BadEntry("", f"`cron` is not a cron expression: {error}") from None
    try:
        ZoneInfo(timezone)
    except (KeyError, ValueError, OSError):
        raise BadEntry("", f"`timezone` is not a known time zone: {timezone!r}") from None
    problem = _why_never(expression, timezone)
    if problem is not None:
        raise BadEntry("", f"`cron` never comes due: {problem}")


@lru_cache(maxsize=10_000)  # a document is read again at each sync
def _why_never(expression: str, timezone: str) -> str | None:
    """Return why a cron expression never comes due, or None if it does."""
    if not _names_a_day(CronSim(expression, _ANY_DAY)):
        return "no day fits its day, month and weekday"
    schedule = Schedule(name="", queue="", message=b"", cron=expression, timezone=timezone)
    if schedule.next_tick(_ANY_DAY.replace(tzinfo=UTC).timestamp()) is None:
        return f"clocks in {timezone} skip this local time on every day that fits"
    return None


def _names_a_day(cron: CronSim) -> bool:
    """Return whether any day fits. The library itself would look for one up to the year 9999."""
    days = (_ANY_DAY.date() + timedelta(days=n) for n in range(_EVERY_KIND_OF_YEAR_DAYS))
    return any(day.month in cron.months and cron.match_day(day) for day in days)


def schedule_entry(schedule: Schedule) -> dict[str, object]:
    """Return the entry for people to read. The message may hold a token, so only a few fields."""
    fields = msgspec.json.decode(schedule.message, type=dict[str, Raw])
    shown = ("mediationTarget", "mediationType", "poolCode", "messageGroupId", "priority")
    given = {name: msgspec.json.decode(fields[name]) for name in shown if name in fields}
    message = {
        name: mask_urls(value) if isinstance(value, str) else value for name, value in given.items()
    }
    times = {"cron": schedule.cron, "everySeconds": schedule.every_seconds}
    return {
        "name": schedule.name,
        "queue": schedule.queue,
        **{name: value for name, value in times.items() if value is not None},
        "timezone": schedule.timezone,
        "message": message,
    }


class _TargetEntry(Struct, rename="camel", omit_defaults=True, kw_only=True):
    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,128}\Z")]
    match: str
    credentials: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,128}\Z")] | None = None
    headers: dict[str, str] | None = None
    timeout_ms: Number | None = None
    http_version: Literal["HTTP_1_1", "HTTP_2"] | None = None
    concurrency: Number | None = None
    rate_limit_per_minute: Number | None = None
    method: Literal["POST", "PUT", "PATCH"] = "POST"
    format: Literal["message", "payload", "cloudEvent", "cloudEventStructured"] = "message"
    ce_type: str | None = None
    ce_source: str | None = None


def read_target_entry(raw: object, notes: Notes) -> TargetConfig:
    """Read an entry of `targets` (TGT-1), or raise BadEntry with the field that is wrong."""
    entry = convert_entry(raw, _TargetEntry)
    timeout_ms = notes.whole("timeoutMs", entry.timeout_ms, MAX_TIMEOUT_MS)
    try:
        headers = check_headers(entry.headers or {})
    except BadHeader as error:
        raise BadEntry("headers", str(error)) from None
    rate = notes.whole("rateLimitPerMinute", entry.rate_limit_per_minute, MAX_RATE_PER_MINUTE)
    return TargetConfig(
        name=entry.name,
        match=_read_match(entry.match),
        credentials=entry.credentials,
        headers=headers,
        timeout=None if timeout_ms is None else timeout_ms / 1000,
        http_version=entry.http_version,
        concurrency=notes.whole("concurrency", entry.concurrency, MAX_CONCURRENCY),
        rate_per_minute=rate,
        method=entry.method,
        format=BodyFormat(entry.format),
        event_type=_read_event(entry, "ceType", entry.ce_type) or "",
        event_source=_read_event(entry, "ceSource", entry.ce_source) or "",
    )


def _read_event(entry: _TargetEntry, field: str, value: str | None) -> str | None:
    """Return an attribute of CloudEvents."""
    if entry.format not in {"cloudEvent", "cloudEventStructured"}:
        if value is not None:
            raise BadEntry(field, "is for the format cloudEvent")
        return None
    if value is None and field == "ceType":
        raise BadEntry(field, f"is needed for the format {entry.format}")
    given = f"{EVENT_SOURCE}{entry.name}" if value is None else value
    if not is_header_value(given):
        raise BadEntry(field, "is empty, or not printable ASCII")
    return given


def _read_match(match: str) -> str:
    """Return the origin and the path that URLs of a target begin with."""
    try:
        target = read_target(match)
    except BadTarget as error:
        raise BadEntry("match", str(error)) from None
    if target.scheme not in {"http", "https"}:
        raise BadEntry("match", "must begin with https:// or http://")
    if target.has_credentials:
        raise BadEntry("match", "must not have credentials")
    if not match.isascii():
        raise BadEntry("match", "must be ASCII: percent-encode the path")
    if "*" in target.host:
        raise BadEntry("match", "must name one host: `*.` is for `hosts` of credentials only")
    if (refusal := TargetPolicy().refuse_url(target)) is not None:
        raise BadEntry("match", f"would never be used: {refusal}")
    parts = urlsplit(match)
    if "?" in match or "#" in match:
        raise BadEntry("match", "must not have a query or a fragment")
    if has_dots(parts.path):
        raise BadEntry("match", "must not have `.` or `..` in its path")
    return target.origin + parts.path.rstrip("/")


def target_entry(target: TargetConfig) -> _TargetEntry:
    return _TargetEntry(
        name=target.name,
        match=target.match,
        credentials=target.credentials,
        headers=dict(target.headers) or None,
        timeout_ms=None if target.timeout is None else round(target.timeout * 1000),
        http_version=cast("Literal['HTTP_1_1', 'HTTP_2'] | None", target.http_version),
        concurrency=target.concurrency,
        rate_limit_per_minute=target.rate_per_minute,
        method=cast("Literal['POST', 'PUT', 'PATCH']", target.method),
        format=target.format.value,
        ce_type=target.event_type or None,
        ce_source=target.event_source if target.event_type else None,
    )


def _keys(entry_type: type[Struct]) -> frozenset[str]:
    return frozenset(entry_type.__struct_encode_fields__)


# What a document may have, by section. Unknown keys are ignored.
KEYS: Final = {
    "queues": _keys(_QueueEntry),
    "replyQueues": _keys(_QueueEntry),
    "processingPools": _keys(_PoolEntry),
    "schedules": _keys(_ScheduleEntry),
    "targets": _keys(_TargetEntry),
    "retry": _keys(_RetryEntry),
}
