"""Shared by several adapters: reading URIs, and helpers. See the README of `router.brokers`."""

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Hashable, Mapping
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager
from typing import Final, Generic, Protocol, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

from msgspec import Struct

from router.core.config import QueueConfig
from router.ports import QueueRefused

K = TypeVar("K", bound=Hashable)

DEFAULT_LEASE_SECONDS: Final = 30.0

_MAX_DIGITS: Final = 18  # Python refuses to read numbers of thousands
_STATEMENT_NAME: Final = re.compile(r"^-- name: (\w+)$", re.MULTILINE)


def loop_time() -> float:
    """Return the event loop's clock: the one by which adapters measure leases and delays."""
    return asyncio.get_running_loop().time()


def statements(text: str) -> Mapping[str, str]:
    """Return the statements of an SQL file, each by the line above it: `-- name: claim`."""
    _, *parts = _STATEMENT_NAME.split(text)
    return dict(zip(parts[::2], (part.strip() for part in parts[1::2]), strict=True))


def whole_number(text: str) -> int | None:
    """Return the number that stands there, or None if there is none."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS else None


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


class Openable(Protocol):
    async def prepare(self) -> None:
        """Make sure that it can be used."""

    async def close(self) -> None: ...


V = TypeVar("V", bound=Openable)


class Shared(Generic[K, V]):
    """Opens a resource for its first user and closes it after its last one."""

    def __init__(self, make: Callable[[K], V]) -> None:
        self._make = make
        self._open: dict[K, V] = {}
        self._users: Counter[K] = Counter()

    @asynccontextmanager
    async def use(self, key: K) -> AsyncIterator[V]:
        if key not in self._open:
            self._open[key] = self._make(key)
        self._users[key] += 1
        thing = self._open[key]
        try:
            await thing.prepare()
            yield thing
        finally:
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
                await self._open.pop(key).close()

    async def close(self) -> None:
        """Close what is still in use: its users find it closed."""
        for thing in self._open.values():
            await thing.close()
