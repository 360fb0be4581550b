"""Reading a queue's URI."""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from urllib.parse import parse_qsl, unquote, urlsplit

from msgspec import Struct

from router.brokers.kit import whole_number
from router.core.config import QueueConfig
from router.ports import QueueRefused


class QueueUri(Struct, frozen=True):
    """A URI in parts. Never log it: the address of some brokers holds a password."""

    address: str  # between the second slash and the third
    path: str  # with its first slash, percent-decoded
    options: Mapping[str, str]


def read_uri(queue: QueueConfig, allowed: AbstractSet[str]) -> QueueUri:
    """Split the URI. Refuse an option that is not `allowed`: it may be a typo."""
    try:
        parts = urlsplit(queue.uri)
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:
        raise refusal(queue, "is not a URI") from None
    options = dict(pairs)
    unknown = ", ".join(sorted(options.keys() - allowed))
    if unknown:
        raise refusal(queue, f"has an unknown option ({unknown})")
    return QueueUri(parts.netloc, unquote(parts.path), options)


def number_option(queue: QueueConfig, uri: QueueUri, name: str, limits: tuple[int, int]) -> int:
    """Return an option that is a whole number; `limits` are its default and its maximum."""
    default, most = limits
    number = whole_number(uri.options.get(name, str(default)))
    if number is None or not 1 <= number <= most:
        raise refusal(queue, f"has an option {name} that is not a number from 1 to {most}")
    return number


def seconds_option(queue: QueueConfig, uri: QueueUri, name: str, default: float) -> float:
    """Return an option that is a number of seconds."""
    try:
        seconds = float(uri.options.get(name, default))
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise refusal(queue, f"has an option {name} that is not a number of seconds")
    return seconds


def switch_option(queue: QueueConfig, uri: QueueUri, name: str, *, default: bool) -> bool:
    """Return an option that is true or false."""
    given = uri.options.get(name, str(default).lower())
    if given not in {"true", "false"}:
        raise refusal(queue, f"has an option {name} that is neither true nor false")
    return given == "true"


def refusal(queue: QueueConfig, why: str) -> QueueRefused:
    return QueueRefused(f"the URI of queue {queue.name!r} {why}")
