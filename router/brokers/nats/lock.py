"""A lock in NATS: a key of a key-value bucket, written only over the revision last seen.

Each router needs only its own clock: the holder writes the key again and again, and the lock is
free once its revision has not changed for a TTL. So it is if the bucket has no such key: the server
may have lost it.
"""

import hashlib
import re
from typing import Final

import msgspec
from msgspec import Struct

from router.brokers.kit import loop_time
from router.brokers.nats.connection import (
    JetStreamRefused,
    NatsConnection,
    NotFound,
    Request,
    read_answer,
)
from router.ports import Disconnected, QueueRefused

BUCKET: Final = "message-router-locks"
STREAM: Final = f"KV_{BUCKET}"
_EXPECTED: Final = "Nats-Expected-Last-Subject-Sequence"
_WRONG_REVISION: Final = 10071
_KEY: Final = re.compile(r"[-/_=.a-zA-Z0-9]+")
_CONFIG: Final = {  # as NATS itself makes buckets; an existing one is used as it is
    "name": STREAM,
    "subjects": [f"$KV.{BUCKET}.>"],
    "max_msgs_per_subject": 1,
    "discard": "new",
    "allow_rollup_hdrs": True,
    "deny_delete": True,
    "storage": "file",
}


class LockRecord(Struct, frozen=True):
    """The value stored under the key."""

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


class NoBucket(Disconnected):
    """The bucket is gone. `make_bucket` makes it again."""


class KeyLock:
    """One lock for one owner, over whichever connection. Raises BrokerError."""

    def __init__(self, key: str, owner: str, ttl: float) -> None:
        name = key if _KEY.fullmatch(key) else hashlib.sha256(key.encode()).hexdigest()
        self.subject = f"$KV.{BUCKET}.{name}"
        self.seen_at = 0.0  # since when its revision has not changed, loop time
        self._owner = owner
        self._ttl = ttl
        self._written = (0, LockRecord())  # revision and record, by us, the last time
        self._seen_revision = -1

    async def acquire(self, connection: NatsConnection) -> LockRecord:
        """Take it if it is free. Return what is stored: it is ours if we are its owner."""
        revision, record = await self._read(connection)
        if self._may_be_taken(revision, record):
            fence = record.fence + (record.owner != self._owner)
            ours = LockRecord(self._owner, fence, self._ttl)
            if await self._write(connection, ours, revision):
                return ours
            # Somebody was faster. Whoever it was, it is not ours, also if we had it before.
            return LockRecord("", record.fence) if record.owner == self._owner else record
        return record

    async def renew(self, connection: NatsConnection, fence: int) -> bool:
        ours = LockRecord(self._owner, fence, self._ttl)
        revision, record = self._written
        if record == ours and await self._write(connection, ours, revision):
            return True
        # Our last write may have got through without an answer.
        revision, record = await self._read(connection)
        if (record.owner, record.fence) != (ours.owner, fence):
            return False
        return await self._write(connection, ours, revision)

    async def release(self, connection: NatsConnection) -> None:
        revision, record = await self._read(connection)
        if record.owner == self._owner:
            await self._write(connection, LockRecord(fence=record.fence), revision)

    async def number(self, connection: NatsConnection) -> int:
        """Return the fence, of a lock that no one takes: a number that outlives its writers."""
        _, record = await self._read(connection)
        return record.fence

    async def keep_number(self, connection: NatsConnection, number: int) -> None:
        record = LockRecord(fence=number)
        while not await self._write(connection, record, (await self._read(connection))[0]):
            pass  # another router has written it in between

    def _may_be_taken(self, revision: int, record: LockRecord) -> bool:
        now = loop_time()
        if revision != self._seen_revision:
            # Noted after reading, so never earlier than its holder wrote it.
            self._seen_revision, self.seen_at = revision, now
        is_released = revision > 0 and not record.owner
        if is_released or record.owner == self._owner:
            return True
        return now - self.seen_at >= max(record.ttl, self._ttl)

    async def _read(self, connection: NatsConnection) -> tuple[int, LockRecord]:
        wanted = {"last_by_subj": self.subject}
        try:
            got = await connection.api(f"STREAM.MSG.GET.{STREAM}", wanted, _Got)
        except NotFound:
            got = _Got()
        try:
            return got.message.seq, msgspec.json.decode(got.message.data, type=LockRecord)
        except msgspec.MsgspecError:
            raise QueueRefused("NATS holds something else under this key") from None

    async def _write(self, connection: NatsConnection, record: LockRecord, revision: int) -> bool:
        """Return False if somebody else has written it in between."""
        request = Request(msgspec.json.encode(record), {_EXPECTED: str(revision)})
        (answer,) = await connection.ask_all(self.subject, [request])
        if answer is None:
            raise NoBucket("there is no answer")
        try:
            self._written = read_answer(answer, _Revision).seq, record
        except JetStreamRefused as error:
            if error.err_code != _WRONG_REVISION:
                raise
            return False
        return True


async def make_bucket(connection: NatsConnection) -> None:
    try:
        await connection.api(f"STREAM.INFO.{STREAM}", {}, object)
    except NotFound:
        await connection.api(f"STREAM.CREATE.{STREAM}", _CONFIG, object)
