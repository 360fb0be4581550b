"""A leader lock in NATS: a key of a key-value bucket, written only over the revision last seen.

Each router needs only its own clock: the holder writes the key again and again, and the lock is
free once its revision has not changed for a TTL. A bucket without the key is treated likewise: the
server may have lost the key.
"""

import hashlib
import re
from typing import Final

import msgspec
from msgspec import Struct

from router.brokers.kit import loop_time
from router.brokers.nats import NatsSettings, read_address
from router.brokers.nats.connection import (
    JetStreamRefused,
    NatsConnection,
    NotFound,
    Request,
    read_answer,
)
from router.core.config import QueueConfig
from router.locks import LockRequest, instance_of, lock_errors
from router.ports import Disconnected, LockState, LockUnavailable

BUCKET: Final = "message-router-locks"
_STREAM: Final = f"KV_{BUCKET}"
_EXPECTED: Final = "Nats-Expected-Last-Subject-Sequence"
_WRONG_REVISION: Final = 10071
_KEY: Final = re.compile(r"[-/_=.a-zA-Z0-9]+")
_CONFIG: Final = {  # as NATS itself makes buckets; an existing one is used as it is
    "name": _STREAM,
    "subjects": [f"$KV.{BUCKET}.>"],
    "max_msgs_per_subject": 1,
    "discard": "new",
    "allow_rollup_hdrs": True,
    "deny_delete": True,
    "storage": "file",
}


class LockRecord(Struct, frozen=True):
    """What is stored under the key."""

    owner: str = ""  # "": released
    fence: int = 0
    ttl: float = 0.0


class _Stored(Struct, frozen=True):
    seq: int = 0  # 0: there is no record
    data: bytes = b"{}"


class _Got(Struct, frozen=True):
    message: _Stored = _Stored()


class _Revision(Struct, frozen=True):
    seq: int


class NatsLock:
    """Without credentials in the URL, those of the settings go to the settings' own servers."""

    def __init__(self, url: str, request: LockRequest, settings: NatsSettings) -> None:
        self._address = read_address(QueueConfig(name=request.key, uri=url), settings)
        self._request = request
        allowed = _KEY.fullmatch(request.key)
        key = request.key if allowed else hashlib.sha256(request.key.encode()).hexdigest()
        self._subject = f"$KV.{BUCKET}.{key}"
        self._connection: NatsConnection | None = None
        self._written = (0, LockRecord())  # revision and record, by us, the last time
        self._seen_revision = -1
        self._seen_at = 0.0  # since when it has not changed

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def acquire(self) -> LockState:
        request = self._request
        with lock_errors():
            connection = await self._connect()
            revision, record = await self._read(connection)
            if self._may_be_taken(revision, record):
                fence = record.fence + (record.owner != request.owner)
                ours = LockRecord(request.owner, fence, request.ttl)
                if await self._write(connection, ours, revision):
                    return LockState(holder=request.instance, is_ours=True, fence=fence)
        return LockState(
            holder=instance_of(record.owner),
            is_ours=False,
            fence=record.fence,
            age=loop_time() - self._seen_at,
        )

    async def renew(self, fence: int) -> bool:
        ours = LockRecord(self._request.owner, fence, self._request.ttl)
        with lock_errors():
            connection = await self._connect()
            revision, record = self._written
            if record == ours and await self._write(connection, ours, revision):
                return True
            # Our last write may have got through without an answer.
            revision, record = await self._read(connection)
            if (record.owner, record.fence) != (ours.owner, fence):
                return False
            return await self._write(connection, ours, revision)

    async def release(self) -> None:
        with lock_errors():
            connection = await self._connect()
            revision, record = await self._read(connection)
            if record.owner == self._request.owner:
                await self._write(connection, LockRecord(fence=record.fence), revision)

    def _may_be_taken(self, revision: int, record: LockRecord) -> bool:
        now = loop_time()
        if revision != self._seen_revision:
            # Noted after reading, so never earlier than its holder wrote it.
            self._seen_revision, self._seen_at = revision, now
        is_released = revision > 0 and not record.owner
        if is_released or record.owner == self._request.owner:
            return True
        return now - self._seen_at >= max(record.ttl, self._request.ttl)

    async def _connect(self) -> NatsConnection:
        if self._connection is not None and self._connection.is_open:
            return self._connection
        await self.close()
        connection = NatsConnection()
        try:
            await connection.connect(self._address)
            await _make_bucket(connection)
        except BaseException:
            await connection.close()
            raise
        self._connection = connection
        return connection

    async def _read(self, connection: NatsConnection) -> tuple[int, LockRecord]:
        wanted = {"last_by_subj": self._subject}
        try:
            got = await connection.api(f"STREAM.MSG.GET.{_STREAM}", wanted, _Got)
        except NotFound:
            got = _Got()
        try:
            return got.message.seq, msgspec.json.decode(got.message.data, type=LockRecord)
        except msgspec.MsgspecError:
            raise LockUnavailable("NATS holds something else under this key") from None

    async def _write(self, connection: NatsConnection, record: LockRecord, revision: int) -> bool:
        """Return False if somebody else has written it in between."""
        request = Request(msgspec.json.encode(record), {_EXPECTED: str(revision)})
        (answer,) = await connection.ask_all(self._subject, [request])
        if answer is None:
            await self.close()  # the bucket is gone: the next connection makes it again
            raise Disconnected("nobody answers there")
        try:
            self._written = read_answer(answer, _Revision).seq, record
        except JetStreamRefused as error:
            if error.err_code != _WRONG_REVISION:
                raise
            return False
        return True


async def _make_bucket(connection: NatsConnection) -> None:
    try:
        await connection.api(f"STREAM.INFO.{_STREAM}", {}, object)
    except NotFound:
        await connection.api(f"STREAM.CREATE.{_STREAM}", _CONFIG, object)
