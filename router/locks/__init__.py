"""The leader lock and the leases of queues: one module per kind of server, and what they share."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from router.brokers.nats import NatsSettings
from router.ports import BrokerError, Lock, LockServer, LockUnavailable


class LockRequest(Struct, frozen=True):
    key: str  # the lock's name
    instance: str  # as people know this router
    process: str  # distinguishes it from others that were given the same name
    ttl: float  # seconds

    @property
    def owner(self) -> str:
        """The text written into the lock; `instance_of` takes it apart."""
        return f"{self.process} {self.instance}"

    def of_queue(self, name: str) -> "LockRequest":
        """Return the request for the lease of a queue; of none: for the leader lock."""
        return replace(self, key=f"{self.key}:queue:{name}") if name else self

    def number_key(self, name: str) -> str:
        """Return the name of a number that routers share. No lock has it."""
        return f"{self.key}:number:{name}"


def instance_of(owner: str) -> str | None:
    return owner.partition(" ")[2] or None


@contextmanager
def lock_errors() -> Iterator[None]:
    """Translate the errors of a lock that uses a broker's connection."""
    try:
        yield
    except BrokerError as error:
        raise LockUnavailable(str(error)) from None


class ClosableLocks(LockServer, Protocol):
    async def close(self) -> None: ...


@asynccontextmanager
async def open_locks(
    url: str, request: LockRequest, nats: NatsSettings
) -> AsyncIterator[LockServer]:
    """Connect on first use. Raises ModuleNotFoundError, or ValueError if the URL is unusable.

    The lock without a name is the leader lock, the others are leases of queues.
    """
    locks: ClosableLocks
    match url.partition(":")[0].lower():
        case "postgresql":
            from router.locks.postgres_lock import PostgresLocks  # noqa: PLC0415  on use

            locks = PostgresLocks(url, request)
        case "nats":
            from router.locks.nats_lock import NatsLocks  # noqa: PLC0415  on use

            locks = NatsLocks(url, request, nats)
        case _:
            from router.locks.redis_lock import RedisLocks  # noqa: PLC0415  on use

            locks = RedisLocks(url, request)
    try:
        yield locks
    finally:
        await locks.close()


@asynccontextmanager
async def open_lock(url: str, request: LockRequest, nats: NatsSettings) -> AsyncIterator[Lock]:
    """Open the leader lock alone."""
    async with open_locks(url, request, nats) as locks:
        yield locks.lock("")
