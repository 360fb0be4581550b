"""A leader lock in NATS: a key of a key-value bucket, written only over the revision last seen.

No clock but one's own is needed: who holds the lock writes it again and again, and it is free when
its revision has not changed for a TTL. A bucket without the key is no better than one that does not
change: the server may have lost it.
"""

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import msgspec
from msgspec import Struct

from router.brokers.nats_address import NatsAddress, read_address
from router.brokers.nats_link import ApiError, NatsLink, Request, read_answer
from router.brokers.nats_settings import NatsSettings
from router.core.config import QueueConfig
from router.locks.claim import Claim, instance_of
from router.locks.errors import lock_errors
from router.ports import Disconnected, LockUnavailable, Tenure

BUCKET: Final = "message-router-locks"
_STREAM: Final = f"KV_{BUCKET}"
_EXPECTED: Final = "Nats-Expected-Last-Subject-Sequence"
_WRONG_REVISION: Final = 10071
_KEY: Final = re.compile(r"[-/_=.a-zA-Z0-9]+")
_CONFIG: Final = {  # as NATS itself makes buckets; one that is there already is used as it is
    "name": _STREAM,
    "subjects": [f"$KV.{BUCKET}.>"],
    "max_msgs_per_subject": 1,
    "discard": "new",
    "allow_rollup_hdrs": True,
    "deny_delete": True,
    "storage": "file",
}


class Record(Struct, frozen=True):
    """What is written under the key."""

    owner: str = ""  # "": released
    fence: int = 0
    ttl: float = 0.0


class _Stored(Struct, frozen=True):
    seq: int = 0
    data: bytes = b"{}"


class _Got(Struct, frozen=True):
    message: _Stored = _Stored()


class _Written(Struct, frozen=True):
    seq: int


class _Done(Struct, frozen=True):
    """An answer of which nothing is needed."""


class _Found(Struct, frozen=True):
    revision: int  # 0: there is none
    record: Record

    @property
    def is_released(self) -> bool:
        return self.revision > 0 and not self.record.owner


@asynccontextmanager
async def open_nats_lock(
    url: str, claim: Claim, settings: NatsSettings
) -> AsyncIterator["NatsLock"]:
    """Without credentials in the URL, those of the settings go to the settings' own servers."""
    address = read_address(QueueConfig(name=claim.key, uri=url), settings)
    lock = NatsLock(address, claim)
    try:
        yield lock
    finally:
        await lock.close()


class NatsLock:
    def __init__(self, address: NatsAddress, claim: Claim) -> None:
        self._address = address
        self._claim = claim
        self._subject = f"$KV.{BUCKET}.{_key(claim.key)}"
        self._link: NatsLink | None = None
        self._written = _Found(0, Record())  # by us, the last time
        self._seen_revision = -1
        self._seen_at = 0.0  # since when it has not changed

    async def close(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            await link.close()

    async def acquire(self) -> Tenure:
        claim = self._claim
        with lock_errors():
            link = await self._connected()
            found = await self._read(link)
            record = found.record
            if self._may_be_taken(found):
                fence = record.fence + (record.owner != claim.owner)
                if await self._write(link, self._ours(fence), found.revision):
                    return Tenure(holder=claim.instance, is_ours=True, fence=fence)
        return Tenure(
            holder=instance_of(record.owner) or None,
            is_ours=False,
            fence=record.fence,
            age=_now() - self._seen_at,
        )

    async def renew(self, fence: int) -> bool:
        with lock_errors():
            link = await self._connected()
            if await self._write_over(link, self._written, fence):
                return True
            # Our last one may have got through without an answer.
            return await self._write_over(link, await self._read(link), fence)

    async def release(self) -> None:
        with lock_errors():
            link = await self._connected()
            found = await self._read(link)
            if found.record.owner == self._claim.owner:
                await self._write(link, Record(fence=found.record.fence), found.revision)

    async def _write_over(self, link: NatsLink, found: _Found, fence: int) -> bool:
        if (found.record.owner, found.record.fence) != (self._claim.owner, fence):
            return False
        return await self._write(link, self._ours(fence), found.revision)

    def _ours(self, fence: int) -> Record:
        return Record(self._claim.owner, fence, self._claim.ttl)

    def _may_be_taken(self, found: _Found) -> bool:
        """Seen once it was read, so never earlier than its holder wrote it."""
        if found.revision != self._seen_revision:
            self._seen_revision, self._seen_at = found.revision, _now()
        if found.is_released or found.record.owner == self._claim.owner:
            return True
        return _now() - self._seen_at >= max(found.record.ttl, self._claim.ttl)

    async def _connected(self) -> NatsLink:
        if self._link is not None and self._link.is_open:
            return self._link
        await self.close()
        link = NatsLink()
        try:
            await link.connect(self._address)
            await _make_bucket(link)
        except BaseException:
            await link.close()
            raise
        self._link = link
        return link

    async def _read(self, link: NatsLink) -> _Found:
        got = await link.api(f"STREAM.MSG.GET.{_STREAM}", {"last_by_subj": self._subject}, _Got)
        if isinstance(got, ApiError):
            if not got.is_not_found:
                raise got.raised()
            got = _Got()
        try:
            record = msgspec.json.decode(got.message.data, type=Record)
        except msgspec.MsgspecError:
            raise LockUnavailable("NATS keeps something else under this key") from None
        return _Found(got.message.seq, record)

    async def _write(self, link: NatsLink, record: Record, revision: int) -> bool:
        """False: it was written by somebody else in between."""
        request = Request(msgspec.json.encode(record), {_EXPECTED: str(revision)})
        (answer,) = await link.ask_all(self._subject, [request])
        if answer is None:
            await self.close()  # the bucket is gone: it is made anew with the next connection
            raise Disconnected("nobody answers there")
        written = read_answer(answer, _Written)
        if isinstance(written, ApiError):
            if written.err_code != _WRONG_REVISION:
                raise written.raised()
            return False
        self._written = _Found(written.seq, record)
        return True


async def _make_bucket(link: NatsLink) -> None:
    there = await link.api(f"STREAM.INFO.{_STREAM}", {}, _Done)
    if not isinstance(there, ApiError):
        return
    if not there.is_not_found:
        raise there.raised()
    made = await link.api(f"STREAM.CREATE.{_STREAM}", _CONFIG, _Done)
    if isinstance(made, ApiError):
        raise made.raised()


def _key(name: str) -> str:
    """As NATS allows it."""
    return name if _KEY.fullmatch(name) else hashlib.sha256(name.encode()).hexdigest()


def _now() -> float:
    return asyncio.get_running_loop().time()
