"""Reads and writes routing configuration documents (CFG-5).

A document that is not of the right shape is refused as a whole. One bad entry is skipped and
reported, and the rest is applied (CFG-5): an error in one queue or pool never affects another.
"""

from codecs import BOM_UTF8
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Generic, TypeVar

import msgspec
from msgspec import Raw, Struct

from router.core.config import (
    DEFAULT_POOL_CONFIG,
    EMBEDDED_QUEUE,
    MAX_SCHEDULES,
    PoolConfig,
    QueueConfig,
    QueueNaming,
    RoutingConfig,
    Schedule,
)
from router.core.config_entry import (
    MAX_CONNECTIONS,
    BadEntry,
    Notes,
    Number,
    Problem,
    identity_in,
    pool_entry,
    queue_entry,
    queue_identity,
    read_pool,
    read_queue,
    read_reply_queue,
    read_schedule,
    reply_entry,
    schedule_entry,
)
from router.core.warnings import Code

MAX_DOCUMENT: Final = 10 * 1024 * 1024  # bytes
MAX_ENTRIES: Final = 100_000  # of one kind
MAX_PROBLEMS: Final = 100  # reported of one kind; a document can hold millions

T = TypeVar("T")


class BadDocument(ValueError):
    """Nothing of it can be applied. The attempt has failed; the last good document stays."""

    def __init__(self, path: str, text: str) -> None:
        super().__init__(f"{path}: {text}")
        self.path = path
        self.text = text


class Document(Struct, frozen=True, kw_only=True):
    queues: tuple[QueueConfig, ...]
    pools: tuple[PoolConfig, ...]
    problems: tuple[Problem, ...] = ()
    skipped_queues: tuple[str, ...] = ()  # by name: what runs under it stays as it was
    skipped_pools: tuple[str, ...] = ()
    reply_queues: tuple[QueueConfig, ...] = ()
    skipped_reply_queues: tuple[str, ...] = ()
    schedules: tuple[Schedule, ...] = ()
    skipped_schedules: tuple[str, ...] = ()


def read_document(body: bytes, naming: QueueNaming) -> Document:
    """Read what a source sent, or raise BadDocument."""
    top = _decode(body)
    queue_entries, pool_entries = _entries(top, "queues"), _entries(top, "processingPools")
    if queue_entries is None and pool_entries is None:
        raise BadDocument("$", "neither `queues` nor `processingPools` is there")
    whole = Notes("$", Code.CONFIGURATION)
    try:
        given = msgspec.json.decode(top.get("connections", b"null"), type=Number | None)
        connections = whole.whole("connections", given, MAX_CONNECTIONS) or 1
    except (msgspec.ValidationError, BadEntry):
        raise BadDocument("$.connections", "not a whole number above 0") from None
    read_entry = partial(read_queue, naming=naming, connections=connections)
    queues = _Section("queues", Code.QUEUE_VALIDATION, queue_identity, read_entry)
    queues.read(queue_entries or [])
    by_code, by_name = partial(identity_in, "code"), partial(identity_in, "name")
    pools = _Section("processingPools", Code.CONFIGURATION, by_code, read_pool)
    pools.read(pool_entries or [])
    read_reply = partial(read_reply_queue, naming=naming)
    replies = _Section("replyQueues", Code.QUEUE_VALIDATION, queue_identity, read_reply)
    replies.read(_entries(top, "replyQueues") or [])
    schedules = _Section("schedules", Code.CONFIGURATION, by_name, read_schedule)
    schedules.read(_entries(top, "schedules", MAX_SCHEDULES) or [])
    return Document(
        queues=tuple(queues.accepted),
        pools=tuple(pools.accepted),
        problems=(
            *whole.problems,
            *queues.reported(),
            *pools.reported(),
            *replies.reported(),
            *schedules.reported(),
        ),
        skipped_queues=tuple(queues.skipped),
        skipped_pools=tuple(pools.skipped),
        reply_queues=tuple(replies.accepted),
        skipped_reply_queues=tuple(replies.skipped),
        schedules=tuple(schedules.accepted),
        skipped_schedules=tuple(schedules.skipped),
    )


def as_document(config: RoutingConfig) -> Mapping[str, object]:
    """Return the configuration as a document for people to read, without credentials."""
    return {
        "queues": [msgspec.to_builtins(queue_entry(queue)) for queue in config.queues],
        "processingPools": [msgspec.to_builtins(pool_entry(pool)) for pool in config.pools],
        **(
            {"replyQueues": [*map(reply_entry, config.reply_queues)]} if config.reply_queues else {}
        ),
        **({"schedules": [*map(schedule_entry, config.schedules)]} if config.schedules else {}),
    }


def embedded_document(naming: QueueNaming) -> bytes:
    """Return the document of a router that was given none."""
    uri = naming.embedded_uri(EMBEDDED_QUEUE)
    queue = QueueConfig(name=EMBEDDED_QUEUE, uri=uri)
    config = RoutingConfig((queue,), (DEFAULT_POOL_CONFIG,))
    return msgspec.json.encode(as_document(config))


def _decode(body: bytes) -> dict[str, Raw]:
    if len(body) > MAX_DOCUMENT:
        raise BadDocument("$", f"larger than {MAX_DOCUMENT} bytes")
    try:
        body.decode()  # msgspec does not check what it leaves raw
        return msgspec.json.decode(body.removeprefix(BOM_UTF8), type=dict[str, Raw])
    except UnicodeDecodeError:
        raise BadDocument("$", "not UTF-8") from None
    except RecursionError:
        raise BadDocument("$", "nested too deep") from None
    except msgspec.ValidationError:
        raise BadDocument("$", "not a JSON object") from None
    except msgspec.MsgspecError as error:
        raise BadDocument("$", f"not JSON: {error}") from None


def _entries(top: Mapping[str, Raw], name: str, most: int = MAX_ENTRIES) -> list[Raw] | None:
    try:
        entries = msgspec.json.decode(top.get(name, b"null"), type=list[Raw] | None)
    except msgspec.ValidationError:
        raise BadDocument(f"$.{name}", "not a list") from None
    if entries is not None and len(entries) > most:
        raise BadDocument(f"$.{name}", f"more than {most} entries")
    return entries


@dataclass(slots=True)
class _Section(Generic[T]):
    """The entries of one kind: those that count, and what is wrong with the others."""

    name: str
    code: Code
    identify: Callable[[object], str | None]
    read_entry: Callable[[object, Notes], T]
    accepted: list[T] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def read(self, entries: list[Raw]) -> None:
        """Decode entry by entry: all at once would keep Python's lock for 50 ms."""
        paths: dict[str, str] = {}
        for index, entry in enumerate(entries):
            notes = Notes(f"$.{self.name}[{index}]", self.code, self.problems)
            try:
                raw = msgspec.json.decode(entry)
            except msgspec.MsgspecError as error:  # a number that is too large
                raise BadDocument(notes.path, f"not JSON: {error}") from None
            identity = self.identify(raw)
            first = notes.path if identity is None else paths.setdefault(identity, notes.path)
            if first != notes.path:
                notes.add("", f"named twice: {first} counts", skipped=True)
                continue
            try:
                self.accepted.append(self.read_entry(raw, notes))
            except BadEntry as bad:
                notes.add(bad.where, bad.text, skipped=True)
                if identity is not None:
                    self.skipped.append(identity)

    def reported(self) -> list[Problem]:
        if len(self.problems) <= MAX_PROBLEMS:
            return self.problems
        more = Problem(f"$.{self.name}", self.code, "more problems like these are not listed")
        return [*self.problems[:MAX_PROBLEMS], more]
