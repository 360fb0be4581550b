"""What several adapters share. See the README of `router.brokers`."""

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Hashable, Mapping
from contextlib import asynccontextmanager
from typing import Final, Generic, Protocol, TypeVar

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
