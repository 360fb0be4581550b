"""Constant headers of requests: which ones may be set, and which stay the router's own."""

import re
from collections.abc import Mapping
from typing import Final
from urllib.parse import quote

MAX_HEADERS: Final = 32
MAX_HEADER_BYTES: Final = 8 * 1024  # of all names and values together

_INSTEAD: Final = ": give a token in `authToken`, or `credentials` to the target"
_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}")
_AS_IT_IS: Final = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")
_VALUE: Final = re.compile(r"[!-~](?:[\t -~]*[!-~])?")
# Those that say who we are, how the body is read, or belong to one connection.
_RESERVED: Final = frozenset(
    {
        "accept",
        "authorization",
        "connection",
        "content-encoding",
        "content-length",
        "content-type",
        "cookie",
        "expect",
        "forwarded",
        "host",
        "keep-alive",
        "te",
        "traceparent",
        "tracestate",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "x-correlation-id",
    }
)
_OURS: Final = "user-agent"  # the routing document may set it, a message may not
_RESERVED_PREFIXES: Final = (
    "ce-",
    "proxy-",
    "webhook-",
    "x-amz-",
    "x-flowcatalyst-",
    "x-forwarded-",
    "x-message-",
)


class BadHeader(ValueError):
    """A header that may not be set. The text names it, and never shows its value."""


def is_reserved(name: str) -> bool:
    """Return whether only the router may set this header."""
    lower = name.lower()
    return lower in _RESERVED or lower.startswith(_RESERVED_PREFIXES)


def check_message_headers(headers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the headers of a message as pairs, or raise BadHeader (MSG-1)."""
    for name in headers:
        if name.lower() == _OURS:
            raise BadHeader(f"{name} may not be set here")
    return check_headers(headers)


def check_headers(headers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return constant headers as pairs, or raise BadHeader."""
    if len(headers) > MAX_HEADERS:
        raise BadHeader(f"more than {MAX_HEADERS} headers")
    if sum(len(name) + len(value) for name, value in headers.items()) > MAX_HEADER_BYTES:
        raise BadHeader(f"larger than {MAX_HEADER_BYTES} bytes together")
    seen: set[str] = set()
    for name, value in headers.items():
        check_header(name, value)
        if name.lower() in seen:
            raise BadHeader(f"{name} is there twice")
        seen.add(name.lower())
    return tuple(headers.items())


def check_header(name: str, value: str) -> None:
    if not is_header_name(name):
        # Not all of it: somebody may have written the whole header as its name.
        begin = _NAME.match(name)
        raise BadHeader(f"{begin[0] if begin else ''}… is no header name")
    if is_reserved(name):
        instead = _INSTEAD if name.lower() == "authorization" else ""
        raise BadHeader(f"{name} may not be set here{instead}")
    if not is_header_value(value):
        raise BadHeader(f"the value of {name} is empty, or not printable ASCII")


def is_header_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def is_header_value(value: str) -> bool:
    """Return whether a header shows it as it is: printable ASCII without blanks at its ends."""
    return _VALUE.fullmatch(value) is not None


def header_text(text: str | bytes) -> str:
    """Return a text that unquoting gives back: blanks at its ends would be lost."""
    quoted = quote(text, safe=_AS_IT_IS)
    left = len(quoted) - len(quoted.lstrip(" "))
    inner = quoted.strip(" ")
    return f"{'%20' * left}{inner}{'%20' * (len(quoted) - len(inner) - left)}"
