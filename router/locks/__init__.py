"""The leader lock: one module per kind of server, and here what they share."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Protocol

from msgspec import Struct

from router.brokers.nats import NatsSettings
from router.ports import BrokerError, Lock, LockUnavailable


class LockRequest(Struct, frozen=True):
    key: str  # the lock's name
    instance: str  # as people know this router
    process: str  # distinguishes it from others that were given the same name
    ttl: float  # seconds

    @property
    def owner(self) -> str:
        """What is written into the lock; `instance_of` takes it apart."""
        return f"{self.process} {self.instance}"


def instance_of(owner: str) -> str | None:
    return owner.partition(" ")[2] or None


@contextmanager
def lock_errors() -> Iterator[None]:
    """Translate the errors of a lock that uses a broker's connection."""
    try:
        yield
    except BrokerError as error:
        raise LockUnavailable(str(error)) from None


class ClosableLock(Lock, Protocol):
    async def close(self) -> None: ...


@asynccontextmanager
async def open_lock(url: str, request: LockRequest, nats: NatsSettings) -> AsyncIterator[Lock]:
    """Connect on first use. Raises ModuleNotFoundError, or ValueError if the URL is unusable."""
    lock: ClosableLock
    match url.partition(":")[0].lower():
        case "postgresql":
            from router.locks.postgres_lock import PostgresLock  # noqa: PLC0415  on use

            lock = PostgresLock(url, request)
        case "nats":
            from router.locks.nats_lock import NatsLock  # noqa: PLC0415  on use

            lock = NatsLock(url, request, nats)
        case _:
            from router.locks.redis_lock import RedisLock  # noqa: PLC0415  on use

            lock = RedisLock(url, request)
    try:
        yield lock
    finally:
        await lock.close()
