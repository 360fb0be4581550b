"""STOMP 1.2 frames, as values and as bytes. No I/O.

Written by hand because existing parsers look at each byte in Python: a message of 1 MiB would stop
the whole router for a quarter of a second.
"""

import re
from collections.abc import Mapping
from typing import Final

from msgspec import Struct

BEAT: Final = b"\n"  # a heartbeat between frames
MAX_HEAD_BYTES: Final = 1024 * 1024

_ESCAPES: Final = str.maketrans({"\\": "\\\\", "\r": "\\r", "\n": "\\n", ":": "\\c"})
_UNESCAPES: Final = {"\\\\": "\\", "\\r": "\r", "\\n": "\n", "\\c": ":"}
_ESCAPED: Final = re.compile(r"\\.")
_UNESCAPED_COMMANDS: Final = frozenset({"CONNECT", "CONNECTED"})  # as they were in STOMP 1.0
_HEAD_END: Final = re.compile(rb"\n\r?\n")
_LONGEST_HEAD_END: Final = 3
_MAX_LENGTH_DIGITS: Final = 18  # Python refuses to read numbers of thousands


class BadFrame(Exception):
    """The data is not STOMP, and nothing behind it can be read either."""


class Frame(Struct, frozen=True):
    command: str
    headers: Mapping[str, str]
    body: bytes = b""


def encode(frame: Frame) -> bytes:
    if frame.command in _UNESCAPED_COMMANDS:
        lines = [f"{name}:{value}\n" for name, value in frame.headers.items()]
    else:
        lines = [f"{_escape(name)}:{_escape(value)}\n" for name, value in frame.headers.items()]
    return f"{frame.command}\n{''.join(lines)}\n".encode() + frame.body + b"\0"


class FrameReader:
    """Turns bytes, as they come, into whole frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._head: Frame | None = None  # of the frame whose body is still to come
        self._searched = 0  # bytes that need not be looked at again

    def feed(self, data: bytes) -> list[Frame]:
        """Raises BadFrame."""
        self._buffer += data
        frames: list[Frame] = []
        while True:
            self._head = self._head or self._read_head()
            body = None if self._head is None else self._read_body(self._head)
            if self._head is None or body is None:
                return frames
            frames.append(Frame(self._head.command, self._head.headers, body))
            self._head = None

    def _read_head(self) -> Frame | None:
        if self._buffer.startswith((b"\n", b"\r")):
            self._drop(len(self._buffer) - len(self._buffer.lstrip(b"\r\n")))
        found = _HEAD_END.search(self._buffer, self._searched)
        if found is None:
            self._searched = max(len(self._buffer) - _LONGEST_HEAD_END, 0)
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise BadFrame("the headers of a frame do not end")
            return None
        head = _decode_head(bytes(self._buffer[: found.start()]))
        self._drop(found.end())
        return head

    def _read_body(self, head: Frame) -> bytes | None:
        """Read up to the given length; without one, up to the first NUL."""
        given = head.headers.get("content-length")
        if given is not None and not (given.isascii() and given.isdigit()):
            raise BadFrame("a frame has a length that is not a number")
        if given is not None and len(given) > _MAX_LENGTH_DIGITS:
            raise BadFrame("a frame has a length that is too large")
        length = None if given is None else int(given)
        end = self._buffer.find(b"\0", self._searched) if length is None else length
        if end < 0 or end >= len(self._buffer):
            self._searched = len(self._buffer) if length is None else 0
            return None
        if self._buffer[end]:
            raise BadFrame("a frame is longer than it says")
        body = bytes(self._buffer[:end])
        self._drop(end + 1)
        return body

    def _drop(self, count: int) -> None:
        del self._buffer[:count]
        self._searched = 0


def _decode_head(head: bytes) -> Frame:
    try:
        command, *lines = head.decode().replace("\r\n", "\n").removesuffix("\r").split("\n")
    except UnicodeDecodeError:
        raise BadFrame("the headers of a frame are not UTF-8") from None
    is_escaped = command not in _UNESCAPED_COMMANDS
    headers: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        if is_escaped and "\\" in line:
            name, value = _unescape(name), _unescape(value)
        headers.setdefault(name, value)  # the first of repeated headers counts
    return Frame(command, headers)


def _escape(text: str) -> str:
    return text.translate(_ESCAPES)


def _unescape(text: str) -> str:
    return _ESCAPED.sub(lambda found: _UNESCAPES.get(found[0], found[0]), text)
