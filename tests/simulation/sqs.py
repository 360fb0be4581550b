"""Amazon SQS as its adapter's client sees it: standard and FIFO queues.

What it knows: ids are SQS's own; each receive gives a new receipt handle; a message is invisible
for a while and comes back; a standard queue takes a late receipt handle and keeps no order; a FIFO
queue locks a group while one of it is out and drops what has the same deduplication id within five
minutes.
"""

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any, Final, TypeVar

from msgspec import Struct

from router.brokers.sqs.client import (
    Action,
    AttributesReply,
    BatchReply,
    BatchRequest,
    DeleteEntry,
    FailedEntry,
    GetQueueAttributes,
    GetQueueUrl,
    QueueUrlReply,
    ReceiveMessage,
    ReceiveReply,
    SendEntry,
    SendReply,
    SentEntry,
    SqsMessage,
    SystemAttributes,
    VisibilityEntry,
)
from router.core.message import Message
from router.ports import Disconnected
from tests.simulation.loop import Process
from tests.simulation.network import Put, Weather, Wire, unheard
from tests.simulation.plan import START

T = TypeVar("T")

DEDUP_WINDOW: Final = 300.0
LOOK: Final = 0.25  # a long poll looks again that often, at the latest


class SqsStored(Struct, eq=False):
    id: str
    body: str
    group: str | None
    visible_at: float
    receipts: list[str]
    sent_at: float  # by Unix time
    received: int = 0

    def is_out(self, now: float) -> bool:
        return bool(self.receipts) and now < self.visible_at


class SqsQueueModel:
    def __init__(self, url: str) -> None:
        self.url = url
        self.is_fifo = url.endswith(".fifo")
        self.messages: list[SqsStored] = []
        self.known: dict[str, tuple[float, str]] = {}  # deduplication ids: until, message id


class SqsModel:
    def __init__(self, weather: Weather) -> None:
        self.weather = weather
        self.queues: dict[str, SqsQueueModel] = {}
        self.on_put: Put = unheard
        self._numbers = itertools.count(1)
        self._now = asyncio.get_running_loop().time
        self._news = asyncio.Event()

    # What producers and the world do.

    def make(self, url: str) -> None:
        self.queues.setdefault(url, SqsQueueModel(url))

    def publish(self, url: str, body: bytes, message: Message | None) -> None:
        number = next(self._numbers)
        group = (message and message.group) or f"alone-{number}"
        self.send(url, body.decode(), group, f"unique-{number}")

    def contents(self) -> list[bytes]:
        return [each.body.encode() for queue in self.queues.values() for each in queue.messages]

    def drop(self, process: Process | None = None, *, restarted: bool = False) -> None:
        """Each call is on its own: there is no connection to lose."""

    # What clients do.

    def send(
        self,
        url: str,
        body: str,
        group: str | None,
        dedup_id: str | None,
        delay: int | None = None,
    ) -> str:
        queue = self.queues[url]
        number = f"id-{next(self._numbers)}"
        if queue.is_fifo and dedup_id is not None:
            until, first = queue.known.get(dedup_id, (0.0, ""))
            if self._now() < until:
                return first
            queue.known[dedup_id] = self._now() + DEDUP_WINDOW, number
        self.on_put(url, body.encode())
        visible_at = self._now() + (delay or 0)
        group, sent_at = group if queue.is_fifo else None, START + self._now()
        queue.messages.append(SqsStored(number, body, group, visible_at, [], sent_at))
        self._ring()
        return number

    async def receive(self, request: ReceiveMessage) -> ReceiveReply:
        give_up = self._now() + request.wait_time_seconds
        while True:
            found = self._hand_out(request)
            if found or self._now() >= give_up:
                return ReceiveReply(found)
            await self._wait(min(give_up, self._next_visible(request.queue_url)) - self._now())

    def delete(self, url: str, entries: Sequence[DeleteEntry]) -> BatchReply:
        queue, failed = self.queues[url], []
        for entry in entries:
            stored = self._find(queue, entry.receipt_handle)
            if stored is None:
                if queue.is_fifo:
                    failed.append(_bad_receipt(entry.id))
                continue  # gone already: a delete says yes
            queue.messages.remove(stored)
        self._ring()
        return BatchReply(failed)

    def change(self, url: str, entries: Sequence[VisibilityEntry]) -> BatchReply:
        queue, failed = self.queues[url], []
        for entry in entries:
            stored = self._find(queue, entry.receipt_handle)
            if stored is None or not stored.is_out(self._now()):
                failed.append(_bad_receipt(entry.id))
            else:
                stored.visible_at = self._now() + entry.visibility_timeout
        self._ring()
        return BatchReply(failed)

    def counts(self, url: str) -> tuple[int, int, int]:
        now, messages = self._now(), self.queues[url].messages
        out = sum(each.is_out(now) for each in messages)
        return len(messages) - out, 0, out

    def _hand_out(self, request: ReceiveMessage) -> list[SqsMessage]:
        queue, now = self.queues[request.queue_url], self._now()
        candidates = queue.messages
        is_shuffled = (
            not queue.is_fifo and not self.weather.is_calm and self.weather.rng.random() < 0.2
        )
        if is_shuffled:
            candidates = self.weather.rng.sample(candidates, len(candidates))
        # One that is out locks its group, also for those before it that were returned.
        locked = {each.group for each in candidates if now < each.visible_at} - {None}
        found: list[SqsStored] = []
        for stored in candidates:
            if len(found) == request.max_number_of_messages:
                break
            if stored.group in locked or now < stored.visible_at:
                continue
            found.append(stored)
        return [self._hand_over(each, request.visibility_timeout) for each in found]

    def _hand_over(self, stored: SqsStored, seconds: float) -> SqsMessage:
        receipt = f"{stored.id}/{next(self._numbers)}"
        stored.receipts.append(receipt)
        stored.received += 1
        stored.visible_at = self._now() + seconds
        attributes = SystemAttributes(str(stored.received), str(int(stored.sent_at * 1000)))
        return SqsMessage(stored.id, receipt, stored.body, attributes)

    def _find(self, queue: SqsQueueModel, receipt: str) -> SqsStored | None:
        for stored in queue.messages:
            is_newest = bool(stored.receipts) and stored.receipts[-1] == receipt
            if queue.is_fifo:
                if is_newest and stored.is_out(self._now()):
                    return stored
            elif receipt in stored.receipts:
                return stored
        return None

    def _next_visible(self, url: str) -> float:
        hidden = (each.visible_at for each in self.queues[url].messages)
        return min((at for at in hidden if at > self._now()), default=float("inf"))

    def _ring(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def _wait(self, seconds: float) -> None:
        news = self._news
        try:
            async with asyncio.timeout(max(seconds, 0.001)):
                await news.wait()
        except TimeoutError:
            return


class SimClient:
    """Fits what the adapter uses of `sqs.client.SqsClient`."""

    server: SqsModel  # set for each world

    def __init__(
        self, endpoint: str, region: str, account: object, *, connections: int, timeout: float
    ) -> None:
        del endpoint, region, account, connections
        self._timeout = timeout

    async def open(self) -> None:
        """Nothing is connected before the first call."""

    async def close(self) -> None:
        """There is no connection."""

    async def call(self, action: Action[T], request: Any) -> T:
        wire = Wire(self.server.weather, timeout=self._timeout)
        if self.server.weather.is_down:
            await wire.open()

        async def work() -> Any:
            if isinstance(request, ReceiveMessage):
                return await self.server.receive(request)
            return _answer(self.server, action.name, request)

        reply: T = await wire.carry(work)
        return reply


class SimAccount:
    @classmethod
    async def find(cls) -> "SimAccount":
        return cls()


def _answer(server: SqsModel, action: str, request: object) -> object:
    match request:
        case GetQueueUrl():
            return QueueUrlReply(request.queue_name)
        case GetQueueAttributes():
            counts = map(str, server.counts(request.queue_url))
            names = request.attribute_names
            return AttributesReply(dict(zip(names, counts, strict=False)) if len(names) > 1 else {})
        case BatchRequest():
            return _change(server, action, request)
    raise Disconnected(f"unknown: {action}")


def _change(server: SqsModel, action: str, batch: BatchRequest) -> object:
    deletes = [each for each in batch.entries if isinstance(each, DeleteEntry)]
    changes = [each for each in batch.entries if isinstance(each, VisibilityEntry)]
    sends = [each for each in batch.entries if isinstance(each, SendEntry)]
    if action == "SendMessageBatch":
        return SendReply(
            [
                SentEntry(
                    each.id,
                    server.send(
                        batch.queue_url,
                        each.message_body,
                        each.message_group_id,
                        each.message_deduplication_id,
                        each.delay_seconds,
                    ),
                )
                for each in sends
            ]
        )
    if deletes:
        return server.delete(batch.queue_url, deletes)
    return server.change(batch.queue_url, changes)


def _bad_receipt(entry_id: str) -> FailedEntry:
    return FailedEntry(entry_id, "ReceiptHandleIsInvalid", sender_fault=True)
