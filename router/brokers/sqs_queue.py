"""The consuming end of an SQS queue.

A receipt handle is good on any connection. What it is not is a lease: on a standard queue SQS takes
a late one too, and would then settle someone else's hand-over. So a receipt knows its own end.
"""

import asyncio
import math
from collections.abc import Sequence
from typing import Final, cast

from msgspec import Struct

from router.brokers.bell import wait_for_ring
from router.brokers.sqs_client import SqsClient
from router.brokers.sqs_gathering import Gathering
from router.brokers.sqs_wire import (
    CHANGE_VISIBILITY,
    DELETE_MESSAGES,
    GET_QUEUE_ATTRIBUTES,
    RECEIVE_MESSAGE,
    Action,
    Batch,
    BatchReply,
    DeleteEntry,
    Entry,
    Failed,
    GetQueueAttributes,
    ReceivedMessage,
    ReceiveMessage,
    VisibilityEntry,
)
from router.core.message import Delivery, Handle, Tally
from router.core.trace import Span, carried_in, read_xray
from router.ports import BrokerError, Depth, Disconnected, StaleLease, Traits, Unsettled

MAX_ENTRIES: Final = 10  # of one call
LONGEST_HOLD: Final = 43_200.0  # SQS keeps nothing invisible for longer, counted from its receive
PARTIAL_PAUSE: Final = 0.1  # after a batch that was not full: the next one has more in it
LINGER: Final = 0.002  # seconds that a NACK waits for others to go with it
SETTLED: Final = float("-inf")

_WAITING: Final = "ApproximateNumberOfMessages"
_DELAYED: Final = "ApproximateNumberOfMessagesDelayed"
_IN_FLIGHT: Final = "ApproximateNumberOfMessagesNotVisible"


class SqsQueue(Struct, frozen=True):
    """What there is to know about a queue before its first message."""

    url: str
    is_fifo: bool
    lease: float  # seconds, whole ones


class Polling(Struct, frozen=True):
    most: int  # messages of one receive
    wait: int  # seconds


class Receipt(Struct, eq=False, gc=False):
    """One hand-over. Compared by identity: every hand-over has its own."""

    handle: str  # SQS's
    received: float  # loop time
    lease_until: float  # likewise; SETTLED: nobody's any more

    def is_ours(self, now: float) -> bool:
        return now < self.lease_until

    def may_last(self, seconds: float, now: float) -> bool:
        """Whether SQS would hide it for that long from now on."""
        return now - self.received + seconds <= LONGEST_HOLD

    def hidden_for(self, delay: float, now: float) -> int:
        """Whole seconds, no fewer than asked for, but for what SQS allows."""
        allowed = math.floor(LONGEST_HOLD - (now - self.received))
        return max(min(math.ceil(delay), allowed), 0)


class Change(Struct, frozen=True):
    """What is to become of one receipt."""

    receipt: Receipt
    seconds: int | None = None  # until it is visible; None: it is deleted

    def entry(self, position: int) -> Entry:
        if self.seconds is None:
            return DeleteEntry(str(position), self.receipt.handle)
        return VisibilityEntry(str(position), self.receipt.handle, self.seconds)


class SqsBroker:
    """One connection: a client for the long polls, another for all else, which never waits."""

    traits: Final = Traits(keeps_tally=False, acks_per_call=MAX_ENTRIES)

    def __init__(
        self, queue: SqsQueue, polling: Polling, polls: SqsClient, calls: SqsClient
    ) -> None:
        self._queue = queue
        self._polling = polling
        self._polls = polls
        self._calls = calls
        self._poll: asyncio.Task[list[ReceivedMessage]] | None = None
        self._is_interrupted = False
        self._news = asyncio.Event()  # a poll has ended, or was interrupted
        self._was_partial = False
        self._nacks = Gathering(self._change_visibility, LINGER)

    @property
    def holds_groups(self) -> bool:
        return self._queue.is_fifo

    @property
    def lease_seconds(self) -> float | None:
        return self._queue.lease

    @property
    def is_polling(self) -> bool:
        return self._poll is not None

    async def receive(self, limit: int) -> Sequence[Delivery]:
        """A poll cannot be called off: SQS would still hand out to it. So it outlives us."""
        self._news.clear()
        if self._was_partial and not self._is_interrupted:
            await wait_for_ring(self._news, PARTIAL_PAUSE)
        if self._is_interrupted:
            return ()
        most = min(limit, self._polling.most)
        started = _now()
        poll = self._poll = asyncio.get_running_loop().create_task(
            self._receive(most), name="sqs long poll"
        )
        await self._news.wait()
        if not poll.done():
            return ()
        self._poll = None
        messages = poll.result()
        self._was_partial = 0 < len(messages) < most
        # Handed out no later than this, however late we come to read the answer.
        received = min(_now(), started + self._polling.wait)
        return [self._delivery(message, received) for message in messages]

    def interrupt(self) -> None:
        self._is_interrupted = True
        self._news.set()

    async def ack(self, handles: Sequence[Handle], *, error: str = "") -> Sequence[Unsettled]:
        del error  # SQS has no place for it
        changes = [Change(receipt) for receipt in cast("Sequence[Receipt]", handles)]
        refused = await self._change(DELETE_MESSAGES, changes)
        for receipt in _changed(changes, refused):
            receipt.lease_until = SETTLED
        return refused

    async def nack(self, handle: Handle, delay: float, tally: Tally, *, error: str = "") -> None:
        del tally, error  # SQS has no place for them
        receipt = cast("Receipt", handle)
        problem = await self._nacks.ask(Change(receipt, receipt.hidden_for(delay, _now())))
        if problem is None:
            receipt.lease_until = SETTLED
        elif problem.stale:
            raise StaleLease(problem.reason)
        else:
            raise Disconnected(problem.reason)

    async def extend(self, handles: Sequence[Handle], seconds: float) -> Sequence[Unsettled]:
        now = _now()
        receipts = cast("Sequence[Receipt]", handles)
        whole = math.ceil(seconds)
        spent = [receipt for receipt in receipts if not receipt.may_last(whole, now)]
        changes = [Change(receipt, whole) for receipt in receipts if receipt.may_last(whole, now)]
        refused = await self._change(CHANGE_VISIBILITY, changes)
        for receipt in _changed(changes, refused):
            receipt.lease_until = now + seconds
        return [*refused, *(_stale(receipt, "held for twelve hours") for receipt in spent)]

    async def depth(self) -> Depth | None:
        request = GetQueueAttributes(self._queue.url, (_WAITING, _DELAYED, _IN_FLIGHT))
        reply = await self._calls.call(GET_QUEUE_ATTRIBUTES, request)
        waiting, delayed, in_flight = (
            int(reply.attributes.get(name, "0")) for name in request.attribute_names
        )
        # Of a FIFO queue's messages nobody knows which are held back by their groups.
        due = None if self._queue.is_fifo else waiting
        return Depth(waiting + delayed, in_flight, due)

    async def close(self) -> None:
        """Wait for the last poll, give back what it brings, hang up."""
        try:
            if self._poll is not None:
                await self._release(await self._poll)
        finally:
            await self._polls.close()
            await self._calls.close()

    async def _receive(self, most: int) -> list[ReceivedMessage]:
        request = ReceiveMessage(
            self._queue.url, most, self._polling.wait, math.ceil(self._queue.lease)
        )
        try:
            return (await self._polls.call(RECEIVE_MESSAGE, request)).messages or []
        finally:
            self._news.set()

    async def _release(self, messages: Sequence[ReceivedMessage]) -> None:
        if messages:
            batch = Batch(self._queue.url, releases(messages))
            await self._calls.call(CHANGE_VISIBILITY, batch)

    def _delivery(self, message: ReceivedMessage, received: float) -> Delivery:
        lease_until = received + self._queue.lease
        return Delivery(
            message.body.encode(),
            Receipt(message.receipt_handle, received, lease_until),
            broker_id=message.message_id,
            count=_count(message),
            lease_until=lease_until,
            parent=_parent(message),
        )

    async def _change_visibility(self, changes: Sequence[Change]) -> Sequence[Unsettled | None]:
        refused = await self._change(CHANGE_VISIBILITY, changes)
        problems = {each.handle: each for each in refused}
        return [problems.get(change.receipt) for change in changes]

    async def _change(
        self, action: Action[BatchReply], changes: Sequence[Change]
    ) -> list[Unsettled]:
        """Answers those that stay as they were."""
        now = _now()
        ours = [change for change in changes if change.receipt.is_ours(now)]
        if len(ours) == len(changes):
            return await self._change_ours(action, ours)
        late = [change.receipt for change in changes if not change.receipt.is_ours(now)]
        refused = [_stale(receipt, "the lease was lost") for receipt in late]
        return refused + await self._change_ours(action, ours)

    async def _change_ours(
        self, action: Action[BatchReply], changes: Sequence[Change]
    ) -> list[Unsettled]:
        """In calls of ten, side by side."""
        if 0 < len(changes) <= MAX_ENTRIES:  # most often, and then there is no need for a task
            return await self._change_ten(action, changes)
        tens = [
            changes[start : start + MAX_ENTRIES] for start in range(0, len(changes), MAX_ENTRIES)
        ]
        async with asyncio.TaskGroup() as tasks:
            calls = [
                tasks.create_task(self._change_ten(action, ten), name=action.name) for ten in tens
            ]
        return [refused for call in calls for refused in call.result()]

    async def _change_ten(
        self, action: Action[BatchReply], ten: Sequence[Change]
    ) -> list[Unsettled]:
        entries = [change.entry(position) for position, change in enumerate(ten)]
        try:
            reply = await self._calls.call(action, Batch(self._queue.url, entries))
        except BrokerError as error:
            # A new connection would not help: each call is on its own. The engine tries again.
            return [Unsettled(change.receipt, str(error), stale=False) for change in ten]
        return [_refused(ten[int(failed.id)].receipt, failed) for failed in reply.failed]


def releases(messages: Sequence[ReceivedMessage]) -> list[VisibilityEntry]:
    """The last first: a group comes back when its first message does, and then as a whole."""
    return [
        VisibilityEntry(str(position), message.receipt_handle, 0)
        for position, message in enumerate(reversed(messages))
    ]


def _changed(changes: Sequence[Change], refused: Sequence[Unsettled]) -> list[Receipt]:
    problems = {each.handle for each in refused}
    return [change.receipt for change in changes if change.receipt not in problems]


def _refused(receipt: Receipt, failed: Failed) -> Unsettled:
    """Our fault: its handle is no good any more. Else SQS's own, and it may go better next time."""
    return Unsettled(receipt, failed.code, stale=failed.sender_fault)


def _stale(receipt: Receipt, why: str) -> Unsettled:
    return Unsettled(receipt, why, stale=True)


def _count(message: ReceivedMessage) -> int | None:
    count = message.attributes.receive_count
    return int(count) if count.isdecimal() else None


def _parent(message: ReceivedMessage) -> Span | None:
    """As its publisher says, else as AWS itself does where X-Ray is on."""
    given, xray = message.message_attributes, message.attributes.xray
    parent = given and carried_in({name: value.string_value for name, value in given.items()})
    return parent or (read_xray(xray) if xray else None)


def _now() -> float:
    return asyncio.get_running_loop().time()
