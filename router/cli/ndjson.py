"""Reading messages from NDJSON: one JSON object per line, each checked on its own."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, Final

import msgspec

from router.core.message import MAX_BODY, Malformed, Message, parse

MAX_MESSAGES: Final = 500  # half of what the API accepts at once
MAX_BYTES: Final = 8 * 1024 * 1024  # what the API accepts

_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"  # some editors put one in front
_fields: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True, slots=True)
class MessageLine:
    """One message to send, and the line that it came from."""

    line: int
    message: Message
    body: bytes


@dataclass(frozen=True, slots=True)
class BadLine:
    line: int
    reason: str


def read_items(stream: BinaryIO, new_id: Callable[[], str]) -> Iterator[MessageLine | BadLine]:
    """Read each line that is not blank. A message without an id gets a new one."""
    for number, line in _lines(stream):
        if text := line.strip():
            yield _read(number, text, new_id)


def batches(items: Iterable[MessageLine], most: int = MAX_MESSAGES) -> Iterator[list[MessageLine]]:
    """Split into what one call may carry."""
    batch: list[MessageLine] = []
    size = len("[]")
    for item in items:
        if batch and (len(batch) == most or size + len(item.body) + 1 > MAX_BYTES):
            yield batch
            batch, size = [], len("[]")
        batch.append(item)
        size += len(item.body) + len(",")
    if batch:
        yield batch


def _lines(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Number the lines. Of a line that is too long, keep just enough to show that it is."""
    for number in itertools.count(1):
        line = stream.readline(MAX_BODY + 2)
        if not line:
            return
        yield number, line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
        while line and not line.endswith(b"\n"):
            line = stream.readline(MAX_BODY)


def _read(number: int, text: bytes, new_id: Callable[[], str]) -> MessageLine | BadLine:
    try:
        return MessageLine(number, parse(text), text)
    except Malformed as error:
        reason = str(error)
    try:
        with_id = _add_id(text, new_id)
        return MessageLine(number, parse(with_id), with_id) if with_id else BadLine(number, reason)
    except Malformed as error:
        return BadLine(number, str(error))


def _add_id(text: bytes, new_id: Callable[[], str]) -> bytes | None:
    """Return the message with a new id, or None if it has one or is not a JSON object."""
    try:
        fields = _fields.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
    if bytes(fields.get("id", b"null")) != b"null":
        return None
    return msgspec.json.encode({**fields, "id": new_id()})
