"""Batches of messages with a callback (CMD-4)."""

import re
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Final

import msgspec
from msgspec import Raw, Struct

from router.engine.publishing import QueuePublisher, Rejected
from router.engine.stores import QueueStores
from router.ports import BatchRecord

MAX_BATCH_ID: Final = 500  # characters: the id of the callback is longer, and a message's id
MAX_BATCH_SIZE: Final = 100_000_000  # messages
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")


class UnknownBatch(Exception):
    """No work queue knows a batch of this id."""


class AmbiguousBatch(Exception):
    """Several queues have a batch of this id."""


class BatchStatus(StrEnum):
    OPEN = "OPEN"  # more messages can be added
    RUNNING = "RUNNING"
    COMPLETE = "COMPLETE"


class NewBatch(Struct, frozen=True, kw_only=True):
    """What a publisher asks for. Bodies are as they came."""

    id: str | None = None
    size: int | None = None  # None: no messages but these
    messages: Sequence[bytes] = ()
    callback: bytes


class AcceptedMembers(Struct, frozen=True):
    id: str  # of the batch
    accepted: int
    duplicates: int  # that were members already


class BatchState(Struct, frozen=True):
    queue: str
    record: BatchRecord

    @property
    def pending(self) -> int:
        """Members that have not ended."""
        record = self.record
        return record.total - record.succeeded - record.failed - record.cancelled

    @property
    def status(self) -> BatchStatus:
        if self.record.total < self.record.size:
            return BatchStatus.OPEN
        return BatchStatus.RUNNING if self.pending else BatchStatus.COMPLETE


class Batches:
    def __init__(
        self, stores: QueueStores, publishing: QueuePublisher, new_id: Callable[[], str]
    ) -> None:
        self._stores = stores
        self._publishing = publishing
        self._new_id = new_id

    async def open(self, queue: str | None, batch: NewBatch) -> AcceptedMembers:
        """Publish the first members of a batch, and remember its callback.

        No queue named: the only work queue. Asking again with the same id adds what is missing.
        Raises Rejected, UnknownQueue, NoWorkQueue, BatchConflict or BrokeOff.
        """
        chosen = self._stores.only_work_queue(queue)
        batch_id = self._new_id() if batch.id is None else batch.id
        if not 1 <= len(batch_id) <= MAX_BATCH_ID or _CONTROL.search(batch_id):
            raise Rejected(f"`id` must be 1 to {MAX_BATCH_ID} characters, no control characters")
        if batch.size is not None and not len(batch.messages) <= batch.size <= MAX_BATCH_SIZE:
            least = max(len(batch.messages), 1)
            raise Rejected(f"`size` must be from {least}, the messages given, to {MAX_BATCH_SIZE}")
        body = _callback_body(batch.callback, batch_id)
        try:
            (callback,) = self._publishing.check_all(chosen, [body])
        except Rejected as error:
            raise Rejected(f"`callback`: {error.reason}") from None
        items = self._publishing.check_all(chosen, batch.messages)
        async with self._stores.open(chosen) as store:
            added = await store.open_batch(batch_id, batch.size, callback, items)
        return AcceptedMembers(batch_id, added, len(items) - added)

    async def add(
        self, batch_id: str, queue: str | None, messages: Sequence[bytes]
    ) -> AcceptedMembers:
        """Publish more members of an open batch. Raises as `open` does, and UnknownBatch."""
        state = await self.find(batch_id, queue)
        chosen = self._stores.only_work_queue(state.queue)
        items = self._publishing.check_all(chosen, messages)
        async with self._stores.open(chosen) as store:
            added = await store.add_to_batch(batch_id, items)
        return AcceptedMembers(batch_id, added, len(items) - added)

    async def find(self, batch_id: str, queue: str | None) -> BatchState:
        """Raises UnknownBatch, AmbiguousBatch, UnknownQueue, NoWorkQueue or BrokeOff."""
        found = await self._stores.ask(
            self._stores.work_queues(queue), lambda store: store.find_batch(batch_id)
        )
        if not found:
            raise UnknownBatch("there is no such batch")
        if len(found) > 1:
            names = ", ".join(each.name for each, _ in found)
            raise AmbiguousBatch(f"several queues have a batch of this id, name one: {names}")
        ((chosen, record),) = found
        return BatchState(chosen.name, record)


def _callback_body(callback: bytes, batch_id: str) -> bytes:
    """Return the callback with an id of its own, always the same for the batch."""
    try:
        fields = msgspec.json.decode(callback, type=dict[str, Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Rejected(f"`callback` cannot be read: {error}") from None
    for name, why in _NOT_IN_A_CALLBACK.items():
        if name in fields and bytes(fields[name]) != b"null":
            raise Rejected(f"`callback.{name}` must be absent: {why}")
        fields.pop(name, None)
    return msgspec.json.encode({"id": f"{batch_id}-callback", **fields})


_NOT_IN_A_CALLBACK: Final = {
    "id": "the batch makes the id",
    "payload": "the payload is the result of the batch",
}
