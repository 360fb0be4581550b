"""The leader lock: one module per kind of server. Only this file knows which."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

from router.brokers.nats.address import NatsSettings
from router.locks.request import LockRequest
from router.ports import Lock


class ClosableLock(Lock, Protocol):
    async def close(self) -> None: ...


@asynccontextmanager
async def open_lock(url: str, request: LockRequest, nats: NatsSettings) -> AsyncIterator[Lock]:
    """Connect on first use. Raises ModuleNotFoundError, or ValueError if the URL is unusable."""
    lock = _make_lock(url, request, nats)
    try:
        yield lock
    finally:
        await lock.close()


def _make_lock(url: str, request: LockRequest, nats: NatsSettings) -> ClosableLock:
    match url.partition(":")[0].lower():
        case "postgresql":
            from router.locks.postgres_lock import PostgresLock  # noqa: PLC0415  on use

            return PostgresLock(url, request)
        case "nats":
            from router.locks.nats_lock import NatsLock  # noqa: PLC0415  on use

            return NatsLock(url, request, nats)
        case _:
            from router.locks.redis_lock import RedisLock  # noqa: PLC0415  on use

            return RedisLock(url, request)
