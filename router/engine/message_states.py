"""What became of a message, and cancelling it (CMD-2)."""

from collections.abc import Sequence
from typing import Final, Protocol

from msgspec import Struct

from router.core.config import QueueConfig
from router.core.dead_letter import KeptLetter
from router.core.ending import Ending, Failure
from router.core.history import HandOver, MessageHistory
from router.core.job import Fate, Try
from router.core.waiting import Held
from router.engine.publishing import QueuePublisher
from router.engine.stores import NoWorkQueue, QueueStores
from router.ports import (
    Cancellation,
    MessageRecord,
    MessageStatus,
    MessageStore,
    Outgoing,
)


class UnknownMessage(Exception):
    """No work queue has a message of this id, and the router remembers none."""


class NotCancellable(Exception):
    """The message is in flight or has ended, or it is not clear which one is meant."""


class FoundMessage(Struct, frozen=True):
    queue: str
    record: MessageRecord


class Memory(Protocol):
    """What the router itself remembers of messages."""

    async def history(self, message_id: str) -> MessageHistory: ...


class MessageStates:
    def __init__(self, stores: QueueStores, memory: Memory, publishing: QueuePublisher) -> None:
        self._stores = stores
        self._memory = memory
        self._publishing = publishing

    async def find(self, message_id: str, queue: str | None) -> FoundMessage:
        """Return the newest publication under this id, in this queue or in any.

        Work queues keep it. Of other queues, the router remembers the latest messages. Raises
        UnknownMessage, UnknownQueue or BrokeOff.
        """
        try:
            work_queues = self._stores.work_queues(queue)
        except NoWorkQueue:
            work_queues = ()
        found = await self._stores.ask(work_queues, lambda store: store.find(message_id))
        if found:
            newest, record = max(found, key=lambda each: each[1].created_at)
            return FoundMessage(newest.name, record)
        remembered = remembered_message(await self._memory.history(message_id), queue)
        if remembered is None:
            raise UnknownMessage(
                "nothing is known of it: it never came, waits in a queue of a broker that tells "
                "nothing of it, or is long gone"
            )
        return remembered

    async def cancel(self, message_id: str, queue: str | None) -> None:
        """Cancel a message that is neither in flight nor ended.

        Raises UnknownMessage, NotCancellable, UnknownQueue, NoWorkQueue or BrokeOff.
        """
        work_queues = self._stores.work_queues(queue)
        if len(work_queues) > 1:
            found = await self._stores.ask(work_queues, lambda store: store.find(message_id))
            work_queues = [each for each, _ in found]
        if len(work_queues) > 1:
            names = ", ".join(each.name for each in work_queues)
            raise NotCancellable(f"several queues have a message of this id, name one: {names}")
        outcome = Cancellation.UNKNOWN
        for only in work_queues:
            async with self._stores.open(only) as store:
                outcome = await self._cancel_in(store, only, message_id)
        if outcome is Cancellation.UNKNOWN:
            raise UnknownMessage("no work queue has a message of this id")
        if outcome is not Cancellation.CANCELLED:
            raise NotCancellable(_REFUSALS[outcome])

    async def _cancel_in(
        self, store: MessageStore, queue: QueueConfig, message_id: str
    ) -> Cancellation:
        """Cancel it, with its reply: in the same transaction where the queue can do that."""
        sent: set[str | None] = set()

        def reply(broker_id: str, body: bytes) -> Sequence[Outgoing]:
            replies = self._publishing.replies_to_cancelled(queue, broker_id, body)
            left = [each for each in replies if each.publication.dedup_key not in sent]
            for outgoing in left:
                if not store.takes(outgoing.queue):
                    raise _ReplyElsewhere(outgoing)
            return left

        while True:
            try:
                return await store.cancel(message_id, reply)
            except _ReplyElsewhere as error:
                # Before the message is cancelled: a reply may come twice, but none is lost.
                await self._publishing.put(error.outgoing.queue, [error.outgoing.publication])
                sent.add(error.outgoing.publication.dedup_key)


_REFUSALS: Final = {
    Cancellation.AMBIGUOUS: "several messages of this id wait in the queue",
    Cancellation.TOO_LATE: "it is in flight, or has ended",
}


class _ReplyElsewhere(Exception):
    """The reply goes to a queue that is not in the same database."""

    def __init__(self, outgoing: Outgoing) -> None:
        super().__init__("the reply goes to another broker")
        self.outgoing = outgoing


def remembered_message(history: MessageHistory, queue: str | None) -> FoundMessage | None:
    """Return what the router itself remembers of a message, if it came from this queue.

    Only its broker knows when it was published: here, it counts from when the router got it.
    """
    held = [each for each in history.held if queue in (None, each.queue)]
    if held:
        return _held(held[-1])
    ended = [
        each
        for each in history.ended
        if queue in (None, each.queue) and each.fate is not Fate.SUPERSEDED
    ]
    letter = history.letter
    if letter is not None and queue not in (None, letter.letter.queue):
        letter = None
    if ended:
        return _ended(ended[-1], letter)
    return None if letter is None else _dead(letter)


def _held(held: Held) -> FoundMessage:
    record = MessageRecord(
        id=held.message_id,
        status=MessageStatus.IN_FLIGHT,
        failures=held.failures,
        requests=held.attempt,
        created_at=held.received_at,
        started_at=_start(held.tries),
        correlation_id=held.correlation_id,
        payload_bytes=held.payload_bytes,
        last_error=_last_error(held.tries),
    )
    return FoundMessage(held.queue, record)


def _ended(ended: HandOver, letter: KeptLetter | None) -> FoundMessage:
    ending, status = None, MessageStatus.READY  # its broker has it again
    if ended.fate is Fate.DELIVERED:
        ending, status = ended.ending or Ending(), MessageStatus.SUCCEEDED
    elif ended.fate is Fate.DEAD_LETTERED:
        http_status = ended.tries[-1].status if ended.tries else None
        reason = "FAILED" if letter is None else letter.letter.reason.name
        known = _failure(reason, ended.error, http_status)
        ending, status = ended.ending or known, MessageStatus.FAILED
    record = MessageRecord(
        id=ended.message_id,
        status=status,
        failures=ended.failures,
        requests=ended.requests,
        created_at=ended.received_at,
        started_at=_start(ended.tries),
        ended_at=None if ending is None else ended.ended_at,
        correlation_id=ended.correlation_id,
        payload_bytes=ended.payload_bytes,
        last_error=_last_error(ended.tries),
        ending=ending,
    )
    return FoundMessage(ended.queue, record)


def _dead(kept: KeptLetter) -> FoundMessage:
    letter = kept.letter
    record = MessageRecord(
        id=letter.message_id or "",
        status=MessageStatus.FAILED,
        failures=letter.failures,
        requests=letter.requests,
        created_at=letter.first_seen,
        ended_at=letter.dead_at,
        ending=_failure(letter.reason.name, letter.error, letter.http_status),
    )
    return FoundMessage(letter.queue, record)


def _failure(reason: str, error: str, http_status: int | None) -> Ending:
    code = reason if http_status is None else f"HTTP_{http_status}"
    return Ending(Failure(code, error or code, http_status))


def _start(tries: tuple[Try, ...]) -> float | None:
    return tries[0].started_at if tries else None


def _last_error(tries: tuple[Try, ...]) -> str | None:
    return next((each.error for each in reversed(tries) if each.error), None)
