"""Locks in NATS: keys of a key-value bucket."""

import asyncio

from router.brokers.kit import loop_time
from router.brokers.nats import NatsSettings, read_address
from router.brokers.nats.connection import NatsConnection
from router.brokers.nats.lock import KeyLock, NoBucket, make_bucket
from router.core.config import QueueConfig
from router.locks import LockRequest, instance_of, lock_errors
from router.ports import LockState


class NatsLocks:
    """Without credentials in the URL, those of the settings go to the settings' own servers."""

    def __init__(self, url: str, request: LockRequest, settings: NatsSettings) -> None:
        self._address = read_address(QueueConfig(name=request.key, uri=url), settings)
        self._request = request
        self._connection: NatsConnection | None = None
        self._connecting = asyncio.Lock()

    def lock(self, name: str) -> "NatsLock":
        return NatsLock(self, self._request.of_queue(name))

    async def number(self, name: str) -> int:
        with lock_errors():
            return await self._record(name).number(await self.connect())

    async def keep_number(self, name: str, number: int) -> None:
        with lock_errors():
            connection = await self.connect()
            try:
                await self._record(name).keep_number(connection, number)
            except NoBucket:
                await self.close()
                raise

    def _record(self, name: str) -> KeyLock:
        return KeyLock(self._request.number_key(name), self._request.owner, self._request.ttl)

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def connect(self) -> NatsConnection:
        async with self._connecting:
            if self._connection is not None and self._connection.is_open:
                return self._connection
            await self.close()
            connection = NatsConnection()
            try:
                await connection.connect(self._address)
                await make_bucket(connection)
            except BaseException:
                await connection.close()
                raise
            self._connection = connection
            return connection


class NatsLock:
    def __init__(self, locks: NatsLocks, request: LockRequest) -> None:
        self._locks = locks
        self._request = request
        self._lock = KeyLock(request.key, request.owner, request.ttl)

    async def acquire(self) -> LockState:
        with lock_errors():
            connection = await self._locks.connect()
            try:
                record = await self._lock.acquire(connection)
            except NoBucket:
                await self._locks.close()  # the next connection makes it again
                raise
        if record.owner == self._request.owner:
            return LockState(holder=self._request.instance, is_ours=True, fence=record.fence)
        return LockState(
            holder=instance_of(record.owner),
            is_ours=False,
            fence=record.fence,
            age=loop_time() - self._lock.seen_at,
        )

    async def renew(self, fence: int) -> bool:
        with lock_errors():
            connection = await self._locks.connect()
            try:
                return await self._lock.renew(connection, fence)
            except NoBucket:
                await self._locks.close()
                raise

    async def release(self) -> None:
        with lock_errors():
            await self._lock.release(await self._locks.connect())
