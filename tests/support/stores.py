"""Work queues in lists: what they keep of messages, batches and ticks, with a plug to pull."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field

from msgspec.structs import replace

from router.core.config import QueueConfig
from router.core.identity import digest_of
from router.ports import (
    BatchRecord,
    BrokerError,
    Cancellation,
    CancelReply,
    Conflict,
    MessageFilter,
    MessageLister,
    MessagePage,
    MessageRecord,
    MessageStatus,
    MessageStore,
    OutgoingMessage,
    Publication,
    QueueRefused,
    no_reply,
)

NOW = 1_800_000_000.25
WAITING = (MessageStatus.READY, MessageStatus.SCHEDULED)
ENDED = (MessageStatus.SUCCEEDED, MessageStatus.FAILED, MessageStatus.CANCELLED)


@dataclass
class FakeBatch:
    record: BatchRecord
    callback: bytes
    members: set[tuple[str, str]] = field(default_factory=set)


@dataclass
class FakeStore:
    """One work queue. A test may add records, as if messages had been consumed."""

    records: list[MessageRecord] = field(default_factory=list)  # the oldest first
    published: list[Publication] = field(default_factory=list)
    batches: dict[str, FakeBatch] = field(default_factory=dict)
    ticks: dict[str, int] = field(default_factory=dict)
    replies: list[OutgoingMessage] = field(default_factory=list)  # of what was cancelled

    async def find(self, message_id: str) -> MessageRecord | None:
        return next((each for each in reversed(self.records) if each.id == message_id), None)

    async def page(
        self, wanted: MessageFilter, *, limit: int, before: int | None = None
    ) -> MessagePage:
        """The positions are those in the list of records, from 1."""
        numbered = list(enumerate(self.records, 1))[: None if before is None else before - 1]
        fitting = [
            (number, each)
            for number, each in reversed(numbered)
            if wanted.status in (None, each.status)
            and wanted.group in (None, each.group)
            and (wanted.since is None or each.created_at >= wanted.since)
        ]
        shown = [each for _, each in fitting[:limit]]
        return MessagePage(shown, fitting[limit - 1][0] if len(fitting) > limit else None)

    def takes(self, queue: QueueConfig) -> bool:
        return queue.uri.startswith("work:")

    async def cancel(
        self, message_id: str, reply: CancelReply = no_reply, *, running: bool = False
    ) -> Cancellation:
        known = [each for each in self.records if each.id == message_id]
        unsettled = [each for each in known if each.status not in ENDED]
        if not known:
            return Cancellation.UNKNOWN
        if len(unsettled) > 1:
            return Cancellation.AMBIGUOUS
        if not unsettled:
            return Cancellation.TOO_LATE
        if unsettled[0].status not in WAITING:
            return Cancellation.ASKED if running else Cancellation.IN_FLIGHT
        bodies = [item.body for item in self.published if item.message.id == message_id]
        self.replies += [each for body in bodies for each in reply("1", body)]
        cancelled = replace(unsettled[0], status=MessageStatus.CANCELLED, ended_at=NOW)
        self.records[self.records.index(unsettled[0])] = cancelled
        return Cancellation.CANCELLED

    async def open_batch(
        self, batch_id: str, size: int | None, callback: Publication, items: Sequence[Publication]
    ) -> int:
        known = self.batches.get(batch_id)
        if known is None:
            record = BatchRecord(id=batch_id, size=len(items) if size is None else size, total=0)
            self.batches[batch_id] = FakeBatch(record, callback.body)
        elif known.callback != callback.body:
            raise Conflict(f"batch {batch_id!r} exists with another callback")
        return await self.add_to_batch(batch_id, items)

    async def add_to_batch(self, batch_id: str, items: Sequence[Publication]) -> int:
        batch = self.batches.get(batch_id)
        if batch is None:
            raise Conflict(f"there is no batch {batch_id!r}")
        named = {(item.message.id, digest_of(item.body)): item for item in items}
        new = {name: item for name, item in named.items() if name not in batch.members}
        if batch.record.total + len(new) > batch.record.size:
            raise Conflict(f"batch {batch_id!r} is full")
        batch.members |= set(new)
        batch.record = replace(batch.record, total=batch.record.total + len(new))
        for item in new.values():
            self._put(item, batch_id)
        return len(new)

    async def find_batch(self, batch_id: str) -> BatchRecord | None:
        batch = self.batches.get(batch_id)
        return None if batch is None else batch.record

    async def publish_tick(self, schedule: str, tick: int, item: Publication) -> bool:
        if tick <= self.ticks.get(schedule, 0):
            return False
        self.ticks[schedule] = tick
        self._put(item, None)
        return True

    async def last_tick(self, schedule: str) -> int | None:
        return self.ticks.get(schedule)

    async def forget_tick(self, schedule: str, tick: int) -> None:
        if self.ticks.get(schedule) == tick:
            del self.ticks[schedule]

    def _put(self, item: Publication, batch_id: str | None) -> None:
        self.published.append(item)
        record = MessageRecord(
            id=item.message.id,
            status=MessageStatus.READY,
            failures=0,
            requests=0,
            created_at=NOW,
            batch_id=batch_id,
            correlation_id=item.message.correlation_id,
            payload_bytes=len(item.message.payload),
        )
        self.records.append(record)


@dataclass
class FakeStores:
    """The queues with the scheme `work` are work queues."""

    stores: dict[str, FakeStore] = field(default_factory=lambda: defaultdict(FakeStore))
    failures: dict[str, BrokerError] = field(default_factory=dict)  # by queue, to open it
    takes: float = 0.0  # to open one

    def open_store(self, queue: QueueConfig) -> AbstractAsyncContextManager[MessageStore] | None:
        if queue.uri.startswith("nonsense:"):
            raise QueueRefused("no such scheme")
        return self._open(queue) if queue.uri.startswith("work:") else None

    def open_lister(self, queue: QueueConfig) -> AbstractAsyncContextManager[MessageLister] | None:
        return self.open_store(queue)

    @asynccontextmanager
    async def _open(self, queue: QueueConfig) -> AsyncIterator[MessageStore]:
        await asyncio.sleep(self.takes)
        if queue.name in self.failures:
            raise self.failures[queue.name]
        yield self.stores[queue.name]
