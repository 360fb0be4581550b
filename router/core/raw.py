"""Messages of raw queues: any body, from producers that know nothing of us (RAW-1 to RAW-4).

The route of the queue says where they go, and where their ids, groups and headers are found.
"""

from collections.abc import Callable, Mapping
from enum import Enum
from functools import cached_property
from typing import Final
from urllib.parse import quote

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from router.core.headers import MAX_HEADER_BYTES, header_text, is_header_value
from router.core.identity import digest_of
from router.core.message import (
    CONTROL,
    MAX_MESSAGE_BYTES,
    NOT_JSON,
    Malformed,
    RawMessage,
    ReceivedMessage,
    Source,
    is_too_deep,
)
from router.core.redact import mask_urls
from router.core.timestamps import iso

MAX_VALUE_CHARACTERS: Final = 512  # of an id or a group
MAX_STEPS: Final = 16  # of a pointer
JSON_TYPE: Final = "application/json"
BINARY_TYPE: Final = "application/octet-stream"
TEXT: Final = "text"  # a kind: the body was text to its broker, not bytes

_MAX_INDEX_DIGITS: Final = 9
_SPECIAL: Final = "~"


class BadPointer(ValueError):
    """It is no JSON pointer. The text says why."""


class Fact(Enum):
    """The facts that a broker knows of a message."""

    ID = "id"
    GROUP = "group"
    SUBJECT = "subject"
    PUBLISHED_AT = "publishedAt"


class Pointer(Struct, frozen=True):
    """A JSON pointer into a body (RFC 6901)."""

    text: str

    def __str__(self) -> str:
        return f"text or number at {self.text} in its body"

    def check(self) -> None:
        """Raise BadPointer unless it is one."""
        if not self.text.startswith("/"):
            raise BadPointer("must begin with a slash")
        if _SPECIAL in self.text.replace("~0", "").replace("~1", ""):
            raise BadPointer("has a ~ that is neither ~0 nor ~1")
        if len(self.steps) > MAX_STEPS:
            raise BadPointer(f"has more than {MAX_STEPS} steps")

    @property
    def steps(self) -> tuple[str, ...]:
        steps = self.text[1:].split("/")
        return tuple(step.replace("~1", "/").replace("~0", _SPECIAL) for step in steps)

    def find(self, document: "Document") -> str | None:
        """Return the text or number there. Anything else counts as absent."""
        value = document.at(self.steps)
        if isinstance(value, str):
            return value
        is_number = isinstance(value, int | float)
        return msgspec.json.encode(value).decode() if is_number else None


class Document:
    """A body in JSON. Only what pointers lead through is taken apart.

    Half a million lists, all built at once, would hold up the loop for a quarter of a second.
    """

    def __init__(self, body: bytes) -> None:
        """Raises one of NOT_JSON if it is none."""
        body.decode()
        if is_too_deep(body):
            raise RecursionError
        self._found: dict[tuple[str, ...], _Level] = {(): _level_reader.decode(body)}

    def at(self, steps: tuple[str, ...]) -> "_Level":
        """Return what is there, with its members as they are written; None: nothing."""
        value = self._found[()]
        for end, step in enumerate(steps, 1):
            if isinstance(value, dict):
                member = value.get(step)
            elif isinstance(value, list) and _is_index(step, len(value)):
                member = value[int(step)]
            else:
                return None
            if member is None:
                return None
            way = steps[:end]
            if way not in self._found:
                self._found[way] = _level_of(member)
            value = self._found[way]
        return value


_Level = dict[str, msgspec.Raw] | list[msgspec.Raw] | str | int | float | bool | None
_level_reader: Final[msgspec.json.Decoder[_Level]] = msgspec.json.Decoder(_Level)


def _level_of(written: msgspec.Raw) -> _Level:
    try:
        return _level_reader.decode(written)
    except msgspec.ValidationError:
        return None  # a number that Python cannot hold


def _is_index(step: str, size: int) -> bool:
    is_number = step.isascii() and step.isdigit() and len(step) <= _MAX_INDEX_DIGITS
    return is_number and (step == "0" or not step.startswith("0")) and int(step) < size


class Attribute(Struct, frozen=True):
    """An attribute of a message. Many brokers call it a header."""

    name: str

    def __str__(self) -> str:
        return f"attribute {self.name!r}"


class BrokerFact(Struct, frozen=True):
    fact: Fact

    def __str__(self) -> str:
        return f"{self.fact.value} from its broker"


Lookup = Attribute | Pointer | BrokerFact
Value = str | Lookup  # a constant, or where it is found


class RawRoute(Struct, frozen=True, kw_only=True):
    """Where the messages of a raw queue go, and what they are called."""

    target: str
    pool: str | None = None
    id: Lookup | None = None  # None: the broker's
    group: Value | None = None
    headers: tuple[tuple[str, Value], ...] = ()
    content_type: Value | None = None  # None: as the message says
    reads_reply: bool = False  # the target speaks the router's protocol

    def __repr__(self) -> str:
        """Return it without secrets."""
        return f"RawRoute({mask_urls(self.target)!r})"


def read_raw(route: RawRoute | None, received: ReceivedMessage) -> RawMessage:
    """Return the message that the route of its queue makes of a hand-over. Raises Malformed."""
    source = received.source or Source()
    if route is None:  # it was stored when there was one
        raise Malformed("it comes from a raw queue, and this one is not")
    if len(received.body) > MAX_MESSAGE_BYTES:
        raise Malformed(f"the body is larger than {MAX_MESSAGE_BYTES} bytes")
    reading = _Reading(received, source)
    given_id = None if route.id is None else reading.name("id", route.id)
    group = source.group if route.group is None else reading.name("messageGroupId", route.group)
    headers = reading.headers(route.headers)
    return RawMessage(
        id=given_id or reading.own_id,
        target=route.target,
        pool=route.pool,
        group=group if group is not None and group.strip() else None,
        headers=headers or None,
        body=received.body,
        content_type=reading.content_type(route.content_type),
        published_at=received.published_at,
        reads_reply=route.reads_reply,
    )


class _Reading:
    """The values that can be found in one message."""

    def __init__(self, received: ReceivedMessage, source: Source) -> None:
        self._received = received
        self._source = source

    @property
    def own_id(self) -> str:
        """The id its publisher or broker gave it, the same for all copies; else its digest."""
        received = self._received
        named = received.claimed_id or received.broker_id
        is_usable = named and len(named) <= MAX_VALUE_CHARACTERS and not CONTROL.search(named)
        return named if named and is_usable else digest_of(received.body)

    def name(self, field: str, value: Value) -> str:
        """Return an id or a group that was asked for. Raises Malformed if there is none."""
        found = self._find(value)
        text = quote(found, safe="") if isinstance(found, bytes) else found
        if text is None or not text.strip():
            raise Malformed(f"`{field}`: it has no {value}")
        if len(text) > MAX_VALUE_CHARACTERS:
            raise Malformed(f"`{field}`: longer than {MAX_VALUE_CHARACTERS} characters")
        if CONTROL.search(text):
            raise Malformed(f"`{field}` contains a control character")
        return text

    def headers(self, wanted: tuple[tuple[str, Value], ...]) -> dict[str, str]:
        """Return headers as they are sent. What is not there or empty is left out."""
        headers, room = {}, MAX_HEADER_BYTES
        for name, value in wanted:
            found = self._find(value)
            if not found:
                continue
            # A constant goes out as it is. What is too long already is not quoted: that takes time.
            is_as_it_is = found is value or len(found) > room
            headers[name] = text = str(found) if is_as_it_is else header_text(found)
            room -= len(name) + len(text)
            if room < 0:
                raise Malformed(f"`headers`: larger than {MAX_HEADER_BYTES} bytes together")
        return headers

    def content_type(self, wanted: Value | None) -> str:
        for given in (None if wanted is None else self._find(wanted), self._source.content_type):
            if isinstance(given, str) and is_header_value(given):
                return given
        return BINARY_TYPE if self._document is None else JSON_TYPE

    def _find(self, value: Value) -> str | bytes | None:
        if isinstance(value, str):
            return value
        if isinstance(value, Attribute):
            attributes = self._source.attributes
            return attributes.get(value.name) or self._source.binary.get(value.name)
        if isinstance(value, Pointer):
            return None if self._document is None else value.find(self._document)
        return self._facts[value.fact]()

    @property
    def _facts(self) -> Mapping[Fact, Callable[[], str | None]]:
        published_at = self._received.published_at
        return {
            Fact.ID: lambda: self.own_id,
            Fact.GROUP: lambda: self._source.group,
            Fact.SUBJECT: lambda: self._source.subject,
            Fact.PUBLISHED_AT: lambda: None if published_at is None else iso(published_at),
        }

    @cached_property
    def _document(self) -> Document | None:
        try:
            return Document(self._received.body)
        except NOT_JSON:
            return None


# Kept messages: what is not part of a body is in front of it, whatever the body is.

_MARK: Final = b"\0message-router kept\n"  # no JSON begins so


class _Kept(Struct, frozen=True, omit_defaults=True):
    id: str | None = None
    source: Source | None = None
    published_at: float | None = None


def letter_body(received: ReceivedMessage, message_id: str | None) -> bytes:
    """Return what a dead letter keeps: the body, after its source if its queue is raw (RAW-4)."""
    if received.source is None:
        return received.body
    return _with_facts(received, _Kept(message_id, received.source, received.published_at))


def stored_body(received: ReceivedMessage, message_id: str) -> bytes:
    """Return what the order store keeps: the body, after what else is known (ORD-8)."""
    source, published_at = received.source, received.published_at
    if source is None and published_at is None:
        return received.body
    return _with_facts(
        received, _Kept(None if source is None else message_id, source, published_at)
    )


def _with_facts(received: ReceivedMessage, kept: _Kept) -> bytes:
    return b"".join([_MARK, msgspec.json.encode(kept), b"\n", received.body])


def opened(stored: ReceivedMessage) -> ReceivedMessage:
    """Return a message as it was before it was kept so. What has no facts in front stays."""
    if not stored.body.startswith(_MARK):
        return stored if stored.published_at is None else replace(stored, published_at=None)
    head, _, body = stored.body.removeprefix(_MARK).partition(b"\n")
    try:
        kept = msgspec.json.decode(head, type=_Kept)
    except NOT_JSON:
        return stored
    return replace(
        stored,
        body=body,
        source=kept.source,
        claimed_id=kept.id or stored.claimed_id,
        published_at=kept.published_at,
    )


def received_letter(body: bytes) -> ReceivedMessage:
    """Return the message of a dead letter as it was handed over, but for what has ended."""
    return opened(ReceivedMessage(body, handle=None, broker_id=None))


def letter_source(body: bytes) -> tuple[Source | None, bytes]:
    """Return the source and the body of a dead letter; None: its queue is not raw."""
    letter = received_letter(body)
    return letter.source, letter.body


def as_letter(stored: bytes) -> bytes:
    """Return what a dead letter keeps of what the order store keeps."""
    letter = received_letter(stored)
    return letter.body if letter.source is None else stored
