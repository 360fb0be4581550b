"""The work queues of the configuration, and what they keep: messages and batches (CMD-2, CMD-4)."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from enum import StrEnum
from typing import Final, Protocol, TypeVar

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from router.core.config import QueueConfig, RoutingConfig
from router.core.dead_letter import KeptLetter
from router.core.explain import Explanation, QueuedMessage, Situation, explain_queued
from router.core.history import Fate, HandOver, Held, MessageHistory
from router.core.message import CONTROL, NOT_JSON
from router.core.outcome import Ending, Failure
from router.engine.groups import GroupDesk
from router.engine.publishing import BrokeOff, QueuePublisher, Rejected, WrongQueue
from router.engine.state import MessageLookup
from router.ports import (
    BatchRecord,
    BrokerError,
    Cancellation,
    Conflict,
    MessageFilter,
    MessageListers,
    MessagePage,
    MessageRecord,
    MessageStatus,
    MessageStore,
    MessageStores,
    OutgoingMessage,
    Unknown,
)

STORE_TIMEOUT_SECONDS: Final = 30.0
END_SECONDS: Final = 2.0  # that a caller waits for what was cancelled while it ran
EXPLAIN_SECONDS: Final = 5.0  # for asking all queues: operators wait for the answer

_PERHAPS_STORED: Final = {Situation.NOT_HERE, Situation.STORED, Situation.DEAD_LETTER}

T = TypeVar("T")
MAX_BATCH_ID_CHARACTERS: Final = 500  # the callback's message id is longer, and has a limit, too
MAX_BATCH_MEMBERS: Final = 100_000_000


class StoreOpener(MessageStores, MessageListers, Protocol):
    """Opens what queues keep of their messages."""


class QueueStores:
    def __init__(self, stores: StoreOpener, config: Callable[[], RoutingConfig]) -> None:
        self._stores = stores
        self._config = config

    def work_queues(self, name: str | None = None) -> Sequence[QueueConfig]:
        """Return the work queues, or the one of this name. Raises Unknown or WrongQueue."""
        return self._all_with(self._stores.open_store, name, "a work queue")

    def only_work_queue(self, name: str | None) -> QueueConfig:
        """Return the work queue of this name, or the only one. Raises as `work_queues` does."""
        found = self.work_queues(name)
        if len(found) > 1:
            raise WrongQueue(f"`queue` is required: {len(found)} work queues are configured")
        return found[0]

    async def page(
        self, name: str | None, wanted: MessageFilter, *, limit: int, before: int | None
    ) -> tuple[QueueConfig, MessagePage]:
        """Look through the queue of this name, or the only one whose messages can be listed.

        Raises Unknown, WrongQueue or BrokeOff.
        """
        found = self._all_with(self._stores.open_lister, name, "one whose messages can be listed")
        if len(found) > 1:
            raise WrongQueue(f"`queue` is required: {len(found)} queues can be listed")
        async with self._opened(self._stores.open_lister(found[0])) as lister:
            return found[0], await lister.page(wanted, limit=limit, before=before)

    @asynccontextmanager
    async def open(self, queue: QueueConfig) -> AsyncIterator[MessageStore]:
        """Open a work queue for one call. Raises BrokeOff."""
        async with self._opened(self._stores.open_store(queue)) as store:
            yield store

    async def ask(
        self, queues: Sequence[QueueConfig], question: Callable[[MessageStore], Awaitable[T | None]]
    ) -> Sequence[tuple[QueueConfig, T]]:
        """Return the answers of those that have one. Raises BrokeOff.

        A queue that fails does not matter if another one has the answer.
        """
        found, failures = list[tuple[QueueConfig, T]](), list[BrokeOff]()
        for queue in queues:
            try:
                async with self.open(queue) as store:
                    answer = await question(store)
            except BrokeOff as failure:
                failures.append(failure)
            else:
                if answer is not None:
                    found.append((queue, answer))
        if failures and not found:
            raise failures[0]
        return found

    @asynccontextmanager
    async def _opened(self, opening: AbstractAsyncContextManager[T] | None) -> AsyncIterator[T]:
        assert opening is not None  # noqa: S101  for the type checker: it was chosen for that
        try:
            async with asyncio.timeout(STORE_TIMEOUT_SECONDS), opening as opened:
                yield opened
        except TimeoutError:
            raise BrokeOff(f"no answer within {STORE_TIMEOUT_SECONDS:.0f} s") from None
        except BrokerError as error:
            raise BrokeOff(str(error)) from error

    def _all_with(
        self, opener: Callable[[QueueConfig], object | None], name: str | None, what: str
    ) -> Sequence[QueueConfig]:
        """Return the queues that can be opened so, or the one of this name."""
        queues = [each for each in self._config().queues if name is None or each.is_called(name)]
        if name is not None and not queues:
            raise Unknown(f"there is no queue {name!r} in the configuration")
        found = [each for each in queues if _can(opener, each)]
        if not found:
            which = "no queue of the configuration is" if name is None else f"queue {name!r} is not"
            raise WrongQueue(f"{which} {what}")
        return found


def _can(opener: Callable[[QueueConfig], object | None], queue: QueueConfig) -> bool:
    try:
        return opener(queue) is not None
    except BrokerError:  # a queue that cannot even be consumed
        return False


class FoundMessage(Struct, frozen=True):
    queue: str
    record: MessageRecord


class MessageStates:
    def __init__(
        self,
        stores: QueueStores,
        lookup: MessageLookup,
        publishing: QueuePublisher,
        groups: GroupDesk | None = None,
    ) -> None:
        """`groups`: of strict queues, which may be in an order store."""
        self._groups = groups
        self._stores = stores
        self._lookup = lookup
        self._publishing = publishing

    async def find(self, message_id: str, queue: str | None) -> FoundMessage:
        """Return the newest publication under this id, in this queue or in any.

        Work queues keep it. Of other queues, the router remembers the latest messages. Raises
        Unknown or BrokeOff.
        """
        kept = await self._kept(message_id, queue)
        if kept is not None:
            return kept
        remembered = remembered_message(await self._lookup.history(message_id), queue)
        if remembered is None:
            raise Unknown(
                "nothing is known of it: it never arrived, waits at a broker that cannot be asked "
                "about it, or ended long ago"
            )
        return remembered

    async def page(
        self, queue: str | None, wanted: MessageFilter, *, limit: int, before: int | None
    ) -> tuple[Sequence[FoundMessage], int | None]:
        """Return the newest messages of a queue that fit, and where to go on.

        Raises Unknown, WrongQueue or BrokeOff.
        """
        chosen, page = await self._stores.page(queue, wanted, limit=limit, before=before)
        return [FoundMessage(chosen.name, record) for record in page.records], page.next

    async def explain(self, message_id: str) -> Explanation:
        """Explain where a message is, also if it is in a work queue and was not handed over."""
        known = await self._lookup.explain_message(message_id)
        stored = await self._explain_stored(message_id, known)
        if stored is not None or known.situation is not Situation.NOT_HERE:
            return stored or known
        try:
            async with asyncio.timeout(EXPLAIN_SECONDS):
                kept = await self._kept(message_id, None)
        except (BrokeOff, TimeoutError) as error:
            note = f"a queue could not be asked for it: {str(error) or 'no answer'}"
            return replace(known, notes=(note, *known.notes))
        if kept is None:
            return known
        record = kept.record
        if record.ended_at is not None:
            note = f"{record.status} in queue {kept.queue}: `message-router message` shows more"
            return replace(known, notes=(note, *known.notes))
        is_put_off = record.status is MessageStatus.SCHEDULED
        is_held = record.status is MessageStatus.IN_FLIGHT
        queued = QueuedMessage(
            message_id=message_id,
            queue=kept.queue,
            pool=record.pool,
            group=record.group,
            published_at=record.created_at,
            not_before=record.not_before if is_put_off else None,
            worker_id=record.worker_id if is_held else None,
        )
        has_group = record.group is not None
        of_group = self._lookup.explain_group(record.group, record.pool) if has_group else None
        return explain_queued(queued, of_group=of_group, notes=known.notes)

    async def _explain_stored(self, message_id: str, known: Explanation) -> Explanation | None:
        """Ask the order stores, if it may be there; they know more than the router remembers."""
        if self._groups is None or known.situation not in _PERHAPS_STORED:
            return None
        try:
            found = await self._groups.explain(message_id)
        except BrokeOff as error:
            note = f"an order store could not be asked for it: {error}"
            return replace(known, notes=(note, *known.notes))
        return None if found is None else replace(found, target=known.target, notes=known.notes)

    async def _kept(self, message_id: str, queue: str | None) -> FoundMessage | None:
        """Return what the work queues keep of it: the newest publication. Raises BrokeOff."""
        try:
            work_queues = self._stores.work_queues(queue)
        except WrongQueue:
            return None
        found = await self._stores.ask(work_queues, lambda store: store.find(message_id))
        if not found:
            return None
        newest, record = max(found, key=lambda each: each[1].created_at)
        return FoundMessage(newest.name, record)

    async def cancel(self, message_id: str, queue: str | None, *, running: bool = False) -> bool:
        """Cancel a message that has not ended. `running`: also one that is in flight.

        Return False if it is yet to end: somebody holds it. Raises Unknown, Conflict, WrongQueue or
        BrokeOff.
        """
        work_queues = self._stores.work_queues(queue)
        if len(work_queues) > 1:
            found = await self._stores.ask(work_queues, lambda store: store.find(message_id))
            work_queues = [each for each, _ in found]
        if len(work_queues) > 1:
            names = ", ".join(each.name for each in work_queues)
            raise Conflict(f"several queues have a message of this id, name one: {names}")
        outcome = Cancellation.UNKNOWN
        for only in work_queues:
            async with self._stores.open(only) as store:
                outcome = await self._cancel_in(store, only, message_id, running=running)
            if outcome is Cancellation.ASKED:
                return await self._end_here(only, message_id)
        if outcome is Cancellation.UNKNOWN:
            raise Unknown("no work queue has a message of this id")
        if outcome is not Cancellation.CANCELLED:
            raise Conflict(_REFUSALS[outcome])
        return True

    async def _end_here(self, queue: QueueConfig, message_id: str) -> bool:
        """End a message if this router holds it. Return whether it has ended as cancelled."""
        held = self._lookup.held_of(queue, message_id)
        for job in held:
            job.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                for job in held:
                    while job in job.settler.held:
                        await job.settler.ended.wait()
        return {self._lookup.fate_of(job) for job in held} == {Fate.CANCELLED}

    async def _cancel_in(
        self, store: MessageStore, queue: QueueConfig, message_id: str, *, running: bool
    ) -> Cancellation:
        """Cancel it, with its reply: in the same transaction where the queue can do that."""
        sent: set[str | None] = set()

        def reply(broker_id: str, body: bytes) -> Sequence[OutgoingMessage]:
            replies = self._publishing.replies_to_cancelled(queue, broker_id, body)
            left = [each for each in replies if each.publication.dedup_key not in sent]
            for outgoing in left:
                if not store.takes(outgoing.queue):
                    raise _ReplyElsewhere(outgoing)
            return left

        while True:
            try:
                return await store.cancel(message_id, reply, running=running)
            except _ReplyElsewhere as error:
                # Before the message is cancelled: a reply may come twice, but none is lost.
                await self._publishing.put(error.outgoing.queue, [error.outgoing.publication])
                sent.add(error.outgoing.publication.dedup_key)


_REFUSALS: Final = {
    Cancellation.AMBIGUOUS: "several messages of this id wait in the queue",
    Cancellation.IN_FLIGHT: "it is in flight: `running=true` stops it (`cancel --running`)",
    Cancellation.TOO_LATE: "it has ended",
}


class _ReplyElsewhere(Exception):
    """The reply goes to a queue that is not in the same database."""

    def __init__(self, outgoing: OutgoingMessage) -> None:
        super().__init__("the reply goes to another broker")
        self.outgoing = outgoing


def remembered_message(history: MessageHistory, queue: str | None) -> FoundMessage | None:
    """Return what the router itself remembers of a message, if it came from this queue.

    Only its broker knows when it was published: here, it counts from when the router got it.
    """
    held = [each for each in history.held if queue in (None, each.queue)]
    if held:
        return _seen(held[-1], MessageStatus.IN_FLIGHT)
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


def _ended(ended: HandOver, letter: KeptLetter | None) -> FoundMessage:
    if ended.fate is Fate.DELIVERED:
        return _seen(ended, MessageStatus.SUCCEEDED, ended.ending or Ending())
    if ended.fate is Fate.CANCELLED:
        return _seen(ended, MessageStatus.CANCELLED, ended.ending)
    if ended.fate is Fate.DEAD_LETTERED:
        http_status = ended.tries[-1].status if ended.tries else None
        reason = "FAILED" if letter is None else letter.letter.reason.name
        known = _failure(reason, ended.error, http_status)
        return _seen(ended, MessageStatus.FAILED, ended.ending or known)
    return _seen(ended, MessageStatus.READY)  # its broker has it again


def _seen(
    seen: Held | HandOver, status: MessageStatus, ending: Ending | None = None
) -> FoundMessage:
    record = MessageRecord(
        id=seen.message_id,
        status=status,
        failures=seen.failures,
        requests=seen.requests,
        created_at=seen.received_at,
        started_at=seen.tries[0].started_at if seen.tries else None,
        ended_at=None if isinstance(seen, Held) or ending is None else seen.ended_at,
        correlation_id=seen.correlation_id,
        payload_bytes=seen.payload_bytes,
        last_failure=_last_failure(seen),
        next_attempt_at=seen.resume_at if isinstance(seen, Held) else seen.due_at,
        updated_at=_changed_at(seen) if isinstance(seen, Held) else seen.ended_at,
        ending=ending,
    )
    return FoundMessage(seen.queue, record)


def _last_failure(seen: Held | HandOver) -> Failure | None:
    """Return the error of its last failed request, in the target's words if they are known."""
    if isinstance(seen, HandOver) and seen.ending is not None and seen.ending.failure is not None:
        return seen.ending.failure
    last = next((each for each in reversed(seen.tries) if each.error), None)
    if last is None or last.error is None:
        return None
    said = seen.error if isinstance(seen, HandOver) else ""
    code = last.error if last.status is None else f"HTTP_{last.status}"
    return Failure(code, said or last.error, last.status)


def _changed_at(held: Held) -> float:
    return max((each.ended_at for each in held.tries), default=held.received_at)


def _dead(kept: KeptLetter) -> FoundMessage:
    letter = kept.letter
    record = MessageRecord(
        id=letter.message_id or "",
        status=MessageStatus.FAILED,
        failures=letter.failures,
        requests=letter.requests,
        created_at=letter.first_seen,
        ended_at=letter.dead_at,
        updated_at=letter.dead_at,
        ending=_failure(letter.reason.name, letter.error, letter.http_status),
    )
    return FoundMessage(letter.queue, record)


def _failure(reason: str, error: str, http_status: int | None) -> Ending:
    code = reason if http_status is None else f"HTTP_{http_status}"
    return Ending(Failure(code, error or code, http_status))


class BatchStatus(StrEnum):
    OPEN = "OPEN"  # more messages can be added
    RUNNING = "RUNNING"
    COMPLETE = "COMPLETE"


class NewBatch(Struct, frozen=True, kw_only=True):
    """A publisher's request. Bodies are as they came."""

    id: str | None = None
    size: int | None = None  # None: no messages but these
    messages: Sequence[bytes] = ()
    callback: bytes
    allow_unknown: bool = False  # fields that no message has are ignored


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
        Raises Rejected, Unknown, WrongQueue, Conflict or BrokeOff.
        """
        chosen = self._stores.only_work_queue(queue)
        batch_id = self._new_id() if batch.id is None else batch.id
        if not 1 <= len(batch_id) <= MAX_BATCH_ID_CHARACTERS or CONTROL.search(batch_id):
            raise Rejected(
                f"`id` must be 1 to {MAX_BATCH_ID_CHARACTERS} characters, no control characters"
            )
        if batch.size is not None and not len(batch.messages) <= batch.size <= MAX_BATCH_MEMBERS:
            least = max(len(batch.messages), 1)
            raise Rejected(
                f"`size` must be from {least}, the messages given, to {MAX_BATCH_MEMBERS}"
            )
        body = _callback_body(batch.callback, batch_id)
        try:
            (callback,) = await self._publishing.check_all(
                chosen, [body], allow_unknown=batch.allow_unknown
            )
        except Rejected as error:
            raise Rejected(f"`callback`: {error.reason}") from None
        items = await self._publishing.check_all(
            chosen, batch.messages, allow_unknown=batch.allow_unknown
        )
        async with self._stores.open(chosen) as store:
            added = await store.open_batch(batch_id, batch.size, callback, items)
        return AcceptedMembers(batch_id, added, len(items) - added)

    async def add(
        self,
        batch_id: str,
        queue: str | None,
        messages: Sequence[bytes],
        *,
        allow_unknown: bool = False,
    ) -> AcceptedMembers:
        """Publish more members of an open batch. Raises as `open` does."""
        state = await self.find(batch_id, queue)
        chosen = self._stores.only_work_queue(state.queue)
        items = await self._publishing.check_all(chosen, messages, allow_unknown=allow_unknown)
        async with self._stores.open(chosen) as store:
            added = await store.add_to_batch(batch_id, items)
        return AcceptedMembers(batch_id, added, len(items) - added)

    async def find(self, batch_id: str, queue: str | None) -> BatchState:
        """Find a batch. Raises Unknown, Conflict (several have this id), WrongQueue or BrokeOff."""
        found = await self._stores.ask(
            self._stores.work_queues(queue), lambda store: store.find_batch(batch_id)
        )
        if not found:
            raise Unknown("there is no such batch")
        if len(found) > 1:
            names = ", ".join(each.name for each, _ in found)
            raise Conflict(f"several queues have a batch of this id, name one: {names}")
        ((chosen, record),) = found
        return BatchState(chosen.name, record)


def _callback_body(callback: bytes, batch_id: str) -> bytes:
    """Return the callback with its id, always the same for the batch."""
    try:
        fields = msgspec.json.decode(callback, type=dict[str, Raw])
    except NOT_JSON as error:
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
