"""Things that several connections of one process use at once."""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager
from typing import Generic, Protocol, TypeVar

K = TypeVar("K", bound=Hashable)


class Openable(Protocol):
    async def prepare(self) -> None:
        """Make sure that it is fit for use."""

    async def close(self) -> None: ...


V = TypeVar("V", bound=Openable)


class Shared(Generic[K, V]):
    """Made for their first user, closed when the last one leaves."""

    def __init__(self, make: Callable[[K], V]) -> None:
        self._make = make
        self._open: dict[K, V] = {}
        self._users: Counter[K] = Counter()

    @asynccontextmanager
    async def use(self, key: K) -> AsyncIterator[V]:
        thing = self._enter(key)
        try:
            await thing.prepare()
            yield thing
        finally:
            await self._leave(key)

    async def close(self) -> None:
        """For what is still in use: its users find it closed."""
        for thing in self._open.values():
            await thing.close()

    def _enter(self, key: K) -> V:
        if key not in self._open:
            self._open[key] = self._make(key)
        self._users[key] += 1
        return self._open[key]

    async def _leave(self, key: K) -> None:
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key]
            await self._open.pop(key).close()
