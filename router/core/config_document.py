"""Reads and writes routing configuration documents (CFG-5).

A document that is not of the right shape is refused as a whole. One bad entry is skipped and
reported, and the rest is applied (CFG-5): an error in one queue or pool never affects another.
"""

import re
from codecs import BOM_UTF8
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Generic, TypeVar

import msgspec
from msgspec import Raw, Struct

from router.core.broker import QueueNames
from router.core.config import (
    DEFAULT_POOL_CONFIG,
    EMBEDDED_QUEUE,
    MAX_SCHEDULES,
    MAX_TARGETS,
    QueueConfig,
    RoutingConfig,
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
    read_target_entry,
    reply_entry,
    schedule_entry,
    target_entry,
)
from router.core.message import LEVELS_AROUND, has_more_containers, is_given, is_too_deep
from router.core.partitions import all_queues, entries_of
from router.core.warnings import Code

MAX_DOCUMENT_BYTES: Final = 10 * 1024 * 1024
MAX_ENTRIES: Final = 100_000  # of one kind
MAX_VALUES: Final = 1_000_000  # of the whole document: to split it keeps Python's lock for 50 ms
MAX_ENTRY_CONTAINERS: Final = 100_000  # lists and objects: to decode them takes 50 ms
MAX_PROBLEMS: Final = 100  # reported of one kind; a document can hold millions
_PLACE: Final = re.compile(r" \(byte (\d+)\)$")

T = TypeVar("T")


class BadDocument(ValueError):
    """Nothing of it can be applied. The attempt has failed; the last good document stays."""

    def __init__(self, path: str, text: str) -> None:
        super().__init__(f"{path}: {text}")
        self.path = path
        self.text = text


class Document(Struct, frozen=True, kw_only=True):
    config: RoutingConfig
    problems: tuple[Problem, ...] = ()
    # By section, the names of bad entries: what runs under them stays as it was.
    skipped: Mapping[str, Sequence[str]] = {}


def is_slow_to_read(body: bytes) -> bool:
    """Return whether even a small one can take long: to check a `cron` takes up to 50 ms."""
    return b"cron" in body or b"\\u" in body  # a key may be written with escapes


def read_document(body: bytes, naming: QueueNames) -> Document:
    """Read what a source sent, or raise BadDocument."""
    top = _decode(body)
    if not any(is_given(top.get(name, Raw())) for name in ("queues", "processingPools")):
        raise BadDocument("$", "neither `queues` nor `processingPools` is there")
    whole = Notes("$", Code.CONFIGURATION)
    try:
        given = msgspec.json.decode(top.get("connections", b"null"), type=Number | None)
        connections = whole.whole("connections", given, MAX_CONNECTIONS) or 1
    except (msgspec.ValidationError, BadEntry):
        raise BadDocument("$.connections", "not a whole number above 0") from None
    read_entry = partial(read_queue, naming=naming, connections=connections)
    identity = partial(queue_identity, catalog=naming.catalog)
    queues = _Section("queues", Code.QUEUE_VALIDATION, identity, read_entry)
    by_code, by_name = partial(identity_in, "code"), partial(identity_in, "name")
    pools = _Section("processingPools", Code.CONFIGURATION, by_code, read_pool)
    read_reply = partial(read_reply_queue, naming=naming)
    replies = _Section("replyQueues", Code.QUEUE_VALIDATION, identity, read_reply)
    schedules = _Section("schedules", Code.CONFIGURATION, by_name, read_schedule, MAX_SCHEDULES)
    targets = _Section("targets", Code.CONFIGURATION, by_name, read_target_entry, MAX_TARGETS)
    entries = queues.read(top)
    if sum(each.partitions or 1 for each in entries) > MAX_ENTRIES:
        raise BadDocument("$.queues", f"more than {MAX_ENTRIES} queues with all partitions")
    config = RoutingConfig(
        all_queues(entries),
        pools.read(top),
        replies.read(top),
        schedules.read(top),
        targets.read(top),
    )
    sections = (queues, pools, replies, schedules, targets)
    problems = (*whole.problems, *(each for part in sections for each in part.reported()))
    skipped = {part.name: part.skipped for part in sections if part.skipped}
    return Document(config=config, problems=problems, skipped=skipped)


def as_document(config: RoutingConfig) -> Mapping[str, object]:
    """Return the configuration as a document for people to read, without credentials."""
    return {
        "queues": [msgspec.to_builtins(queue_entry(queue)) for queue in entries_of(config.queues)],
        "processingPools": [msgspec.to_builtins(pool_entry(pool)) for pool in config.pools],
        **(
            {"replyQueues": [*map(reply_entry, config.reply_queues)]} if config.reply_queues else {}
        ),
        **({"schedules": [*map(schedule_entry, config.schedules)]} if config.schedules else {}),
        **(
            {"targets": [msgspec.to_builtins(target_entry(each)) for each in config.targets]}
            if config.targets
            else {}
        ),
    }


def embedded_document(naming: QueueNames) -> bytes:
    """Return the document of a router that was given none."""
    uri = naming.embedded_uri(EMBEDDED_QUEUE)
    queue = QueueConfig(name=EMBEDDED_QUEUE, uri=uri, broker=naming.embedded)
    config = RoutingConfig((queue,), (DEFAULT_POOL_CONFIG,))
    return msgspec.json.encode(as_document(config))


def _decode(body: bytes) -> dict[str, Raw]:
    if len(body) > MAX_DOCUMENT_BYTES:
        raise BadDocument("$", f"larger than {MAX_DOCUMENT_BYTES} bytes")
    try:
        body.decode()  # msgspec does not check what it leaves raw
        if is_too_deep(body, LEVELS_AROUND):
            raise BadDocument("$", "nested too deep")
        if body.count(b",") >= MAX_VALUES:
            raise BadDocument("$", f"more than {MAX_VALUES} values")
        return msgspec.json.decode(body.removeprefix(BOM_UTF8), type=dict[str, Raw])
    except UnicodeDecodeError:
        raise BadDocument("$", "not UTF-8") from None
    except msgspec.ValidationError:
        raise BadDocument("$", "not a JSON object") from None
    except msgspec.MsgspecError as error:
        raise BadDocument("$", f"not JSON: {_with_line(str(error), body)}") from None


def _with_line(text: str, body: bytes) -> str:
    """Name the line of an error, too: editors do not count bytes."""
    if (place := _PLACE.search(text)) is None:
        return text
    line = body.removeprefix(BOM_UTF8).count(b"\n", 0, int(place[1])) + 1
    return f"{text[: place.start()]} (line {line}, byte {place[1]})"


@dataclass(slots=True)
class _Section(Generic[T]):
    """Reads the entries of one kind: those that count. Notes what is wrong with the others."""

    name: str
    code: Code
    identify: Callable[[object], str | None]
    read_entry: Callable[[object, Notes], T]
    most: int = MAX_ENTRIES
    skipped: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def read(self, top: Mapping[str, Raw]) -> tuple[T, ...]:
        """Decode entry by entry: all at once would keep Python's lock for 50 ms."""
        try:
            entries = msgspec.json.decode(top.get(self.name, b"null"), type=list[Raw] | None) or []
        except msgspec.ValidationError:
            raise BadDocument(f"$.{self.name}", "not a list") from None
        if len(entries) > self.most:
            raise BadDocument(f"$.{self.name}", f"more than {self.most} entries")
        accepted: list[T] = []
        paths: dict[str, str] = {}
        for index, entry in enumerate(entries):
            notes = Notes(f"$.{self.name}[{index}]", self.code, self.problems)
            if has_more_containers(bytes(entry), MAX_ENTRY_CONTAINERS):
                text = f"more than {MAX_ENTRY_CONTAINERS} lists and objects"
                raise BadDocument(notes.path, text)
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
                accepted.append(self.read_entry(raw, notes))
            except BadEntry as bad:
                notes.add(bad.where, bad.text, skipped=True)
                if identity is not None:
                    self.skipped.append(identity)
        return tuple(accepted)

    def reported(self) -> list[Problem]:
        if len(self.problems) <= MAX_PROBLEMS:
            return self.problems
        more = Problem(f"$.{self.name}", self.code, "more problems like these are not listed")
        return [*self.problems[:MAX_PROBLEMS], more]
