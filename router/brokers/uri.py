"""Taking a queue's URI apart."""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from urllib.parse import parse_qsl, unquote, urlsplit

from msgspec import Struct

from router.core.config import QueueConfig
from router.ports import QueueRefused


class QueueUri(Struct, frozen=True):
    """A URI in parts. It is never shown: the address of some brokers holds a password."""

    address: str  # what stands between the second slash and the third
    path: str  # with its first slash, percent-decoded
    options: Mapping[str, str]


def read_uri(queue: QueueConfig, allowed: AbstractSet[str]) -> QueueUri:
    """Take the URI apart; an option that is not `allowed` is refused, as it may be a typo."""
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


def refusal(queue: QueueConfig, why: str) -> QueueRefused:
    return QueueRefused(f"the URI of queue {queue.name!r} {why}")
