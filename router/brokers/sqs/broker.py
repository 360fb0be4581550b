"""The consuming end of one SQS queue.

A receipt handle is good on any connection, and on a standard queue even after its lease: SQS would
let it settle someone else's hand-over. So a receipt knows its own end.
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final, cast

from msgspec import Struct

from router.brokers.kit import DEFAULT_LEASE_SECONDS, loop_time, whole_number
from router.brokers.sqs import SqsAddress, SqsSettings, read_address
from router.brokers.sqs.client import (
    ALL_ATTRIBUTES,
    ALL_NAMES,
    CHANGE_VISIBILITY,
    DELETE_MESSAGES,
    GET_QUEUE_ATTRIBUTES,
    GET_QUEUE_URL,
    MAX_ENTRIES,
    RECEIVE_MESSAGE,
    Action,
    BatchReply,
    BatchRequest,
    DeleteEntry,
    Entry,
    GetQueueAttributes,
    GetQueueUrl,
    ReceiveMessage,
    SqsClient,
    SqsMessage,
    VisibilityEntry,
    find_account,
)
from router.brokers.sqs.publisher import SqsPublisher
from router.brokers.workers import ConsumerIdentity
from router.core.config import QueueConfig
from router.core.message import Handle, ReceivedMessage, Source
from router.core.trace import carried_in, read_xray
from router.curl.aws import Account
from router.ports import BrokerError, Depth, Nack, Traits, Unsettled
from router.signal import wait_for_signal

log = logging.getLogger(__name__)

CALL_SECONDS: Final = 10.0
POLL_GRACE_SECONDS: Final = 5.0  # that a poll may take beyond its own wait
CALLS_AT_ONCE: Final = 10
HELD_LEASE_SECONDS: Final = 300.0  # each extension is a paid call, and thousands may be held
MAX_HOLD_SECONDS: Final = 43_200.0  # SQS hides nothing for longer, counted from its receive
PARTIAL_PAUSE_SECONDS: Final = 0.1  # after a batch that was not full: the next one has more in it
SETTLED: Final = float("-inf")

_LEASE: Final = "VisibilityTimeout"
_REDRIVE: Final = "RedrivePolicy"
_WAITING: Final = "ApproximateNumberOfMessages"
_DELAYED: Final = "ApproximateNumberOfMessagesDelayed"
_IN_FLIGHT: Final = "ApproximateNumberOfMessagesNotVisible"


class SqsQueues:
    """All queues of SQS, and the account that their connections share."""

    def __init__(self, identity: ConsumerIdentity) -> None:
        self._settings = identity.settings.of(SqsSettings)
        self._clock = identity.clock
        self._account: Account | None = None
        self._closing: set[asyncio.Task[None]] = set()  # they wait for their last poll

    async def close(self) -> None:
        """Wait for the last polls; what they still bring is returned."""
        if self._closing:
            await asyncio.wait(self._closing)

    @asynccontextmanager
    async def open_queue(self, queue: QueueConfig) -> AsyncIterator["SqsBroker"]:
        address = read_address(queue, self._settings)
        most, wait = self._settings.max_messages, round(self._settings.wait)
        async with AsyncExitStack() as unless_connected:
            calls = await self._client(address, CALLS_AT_ONCE, CALL_SECONDS)
            unless_connected.push_async_callback(calls.close)
            polls = await self._client(address, 1, wait + POLL_GRACE_SECONDS)
            unless_connected.push_async_callback(polls.close)
            url = await _find_url(address, calls)
            # Asked for even if the lease is given: a missing queue is better noticed now.
            wanted = GetQueueAttributes(url, (_LEASE, _REDRIVE))
            reply = await calls.call(GET_QUEUE_ATTRIBUTES, wanted)
            found = float(reply.attributes.get(_LEASE, DEFAULT_LEASE_SECONDS))
            lease = max(queue.visibility_timeout or found, self._settings.shortest_lease)
            unless_connected.pop_all()
        counts_receives = _REDRIVE in reply.attributes
        queue_found = SqsQueue(
            url,
            address.is_fifo,
            math.ceil(lease),
            most,
            wait,
            counts_receives,
            is_raw=queue.route is not None,
        )
        broker = SqsBroker(queue_found, polls, calls)
        try:
            yield broker
        finally:
            broker.stop()
            # Only a poll under way takes time, and only we have to wait for it.
            if broker.is_polling:
                loop = asyncio.get_running_loop()
                closing = loop.create_task(broker.close(), name="sqs last poll")
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)
            else:
                await broker.close()

    @asynccontextmanager
    async def open_publisher(self, queue: QueueConfig) -> AsyncIterator[SqsPublisher]:
        address = read_address(queue, self._settings)
        client = await self._client(address, 1, CALL_SECONDS)
        try:
            url = await _find_url(address, client)
            yield SqsPublisher(client, url, is_fifo=address.is_fifo, clock=self._clock)
        finally:
            await client.close()

    async def _client(self, address: SqsAddress, connections: int, timeout: float) -> SqsClient:
        if self._account is None:
            self._account = await find_account()
        client = SqsClient(
            address.endpoint,
            address.region,
            self._account,
            connections=connections,
            timeout=timeout,
        )
        await client.open()
        return client


class SqsQueue(Struct, frozen=True):
    """A queue as it is known before its first message, and how to poll it."""

    url: str
    is_fifo: bool
    lease: int  # seconds
    most: int  # messages of one receive
    wait: int  # seconds of one long poll
    counts_receives: bool = False  # and moves what was received too often to another queue
    is_raw: bool = False


class Receipt(Struct, eq=False, gc=False):
    """One hand-over. Compared by identity: every hand-over has its own."""

    handle: str  # SQS's
    received: float  # loop time
    lease_until: float  # loop time; SETTLED: it has ended

    def is_ours(self, now: float) -> bool:
        return now < self.lease_until

    def may_last(self, seconds: float, now: float) -> bool:
        """Return whether SQS would hide it for that long from now on."""
        return now - self.received + seconds <= MAX_HOLD_SECONDS

    def hidden_for(self, delay: float, now: float) -> int:
        """Return whole seconds: no fewer than asked for, unless SQS allows no more."""
        allowed = math.floor(MAX_HOLD_SECONDS - (now - self.received))
        return max(min(math.ceil(delay), allowed), 0)


class ReceiptChange(Struct, frozen=True):
    """The decision about one receipt."""

    receipt: Receipt
    seconds: int | None = None  # until it is visible; None: delete it

    def entry(self, position: int) -> Entry:
        if self.seconds is None:
            return DeleteEntry(str(position), self.receipt.handle)
        return VisibilityEntry(str(position), self.receipt.handle, self.seconds)


class SqsBroker:
    """One connection: a client for the long polls, another for all else, which never waits."""

    def __init__(self, queue: SqsQueue, polls: SqsClient, calls: SqsClient) -> None:
        self.traits = Traits(
            keeps_tally=False,
            acks_per_call=MAX_ENTRIES,
            defers=not queue.counts_receives,
            # What can be deferred is held for moments. After a crash, its group is back soon.
            held_lease_seconds=HELD_LEASE_SECONDS if queue.counts_receives else None,
        )
        self.holds_groups = queue.is_fifo
        self.lease_seconds: float = queue.lease
        self._queue = queue
        self._polls = polls
        self._calls = calls
        self._poll: asyncio.Task[list[SqsMessage]] | None = None
        self._is_stopped = False
        self._news = asyncio.Event()  # a poll has ended, or `stop` was called
        self._was_partial = False

    @property
    def is_polling(self) -> bool:
        return self._poll is not None

    async def receive(self, limit: int) -> Sequence[ReceivedMessage]:
        """Poll. A poll cannot be cancelled, as SQS would still hand out to it: it outlives us."""
        self._news.clear()
        if self._was_partial and not self._is_stopped:
            await wait_for_signal(self._news, PARTIAL_PAUSE_SECONDS)
        if self._is_stopped:
            return ()
        most = min(limit, self._queue.most)
        started = loop_time()
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
        received = min(loop_time(), started + self._queue.wait)
        lease, is_raw = self._queue.lease, self._queue.is_raw
        return [received_message(each, received, lease, is_raw=is_raw) for each in messages]

    def stop(self) -> None:
        self._is_stopped = True
        self._news.set()

    async def ack(self, handles: Sequence[Handle], *, error: str = "") -> Sequence[Unsettled]:
        del error  # SQS has no place for it
        changes = [ReceiptChange(receipt) for receipt in cast("Sequence[Receipt]", handles)]
        refused = await self._change(DELETE_MESSAGES, changes)
        for receipt in _changed(changes, refused):
            receipt.lease_until = SETTLED
        return refused

    async def nack(self, items: Sequence[Nack]) -> Sequence[Unsettled]:
        """Hide them until they are due. SQS has no place for tallies and errors."""
        now = loop_time()
        changes = []
        for item in items:
            receipt = cast("Receipt", item.handle)
            changes.append(ReceiptChange(receipt, receipt.hidden_for(item.delay, now)))
        refused = await self._change(CHANGE_VISIBILITY, changes)
        for receipt in _changed(changes, refused):
            receipt.lease_until = SETTLED
        return refused

    async def extend(self, handles: Sequence[Handle], seconds: float) -> Sequence[Unsettled]:
        now, whole = loop_time(), math.ceil(seconds)
        changes: list[ReceiptChange] = []
        spent: list[Unsettled] = []
        for receipt in cast("Sequence[Receipt]", handles):
            if receipt.may_last(whole, now):
                changes.append(ReceiptChange(receipt, whole))
            else:
                spent.append(Unsettled(receipt, "held for twelve hours", stale=True))
        refused = await self._change(CHANGE_VISIBILITY, changes)
        for receipt in _changed(changes, refused):
            receipt.lease_until = now + seconds
        return refused + spent

    async def depth(self) -> Depth | None:
        request = GetQueueAttributes(self._queue.url, (_WAITING, _DELAYED, _IN_FLIGHT))
        reply = await self._calls.call(GET_QUEUE_ATTRIBUTES, request)
        waiting, delayed, in_flight = (
            int(reply.attributes.get(name, "0")) for name in request.attribute_names
        )
        # SQS does not say how many messages of a FIFO queue are held back by their groups.
        due = None if self._queue.is_fifo else waiting
        return Depth(waiting + delayed, in_flight, due)

    async def close(self) -> None:
        """Wait for the last poll, return what it brings, close."""
        try:
            messages = [] if self._poll is None else await self._poll
            if messages:
                batch = BatchRequest(self._queue.url, releases(messages))
                await self._calls.call(CHANGE_VISIBILITY, batch)
        except BrokerError as error:
            log.info("messages of a last poll return when their lease ends: %s", error)
        finally:
            await self._polls.close()
            await self._calls.close()

    async def _receive(self, most: int) -> list[SqsMessage]:
        queue = self._queue
        request = ReceiveMessage(queue.url, most, queue.wait, queue.lease)
        if queue.is_raw:
            request.message_system_attribute_names = ALL_NAMES
            request.message_attribute_names = ALL_ATTRIBUTES
        try:
            return (await self._polls.call(RECEIVE_MESSAGE, request)).messages or []
        finally:
            self._news.set()

    async def _change(
        self, action: Action[BatchReply], changes: Sequence[ReceiptChange]
    ) -> list[Unsettled]:
        """Return those that stay as they were. Calls of ten are made side by side."""
        now = loop_time()
        ours = [change for change in changes if change.receipt.is_ours(now)]
        refused = [
            Unsettled(change.receipt, "the lease was lost", stale=True)
            for change in changes
            if not change.receipt.is_ours(now)
        ]
        if 0 < len(ours) <= MAX_ENTRIES:  # the usual case needs no task
            return refused + await self._change_ten(action, ours)
        async with asyncio.TaskGroup() as tasks:
            calls = [
                tasks.create_task(
                    self._change_ten(action, ours[start : start + MAX_ENTRIES]), name=action.name
                )
                for start in range(0, len(ours), MAX_ENTRIES)
            ]
        return refused + [each for call in calls for each in call.result()]

    async def _change_ten(
        self, action: Action[BatchReply], ten: Sequence[ReceiptChange]
    ) -> list[Unsettled]:
        entries = [change.entry(position) for position, change in enumerate(ten)]
        try:
            reply = await self._calls.call(action, BatchRequest(self._queue.url, entries))
        except BrokerError as error:
            # A new connection would not help: each call is on its own. The engine tries again.
            return [Unsettled(change.receipt, str(error), stale=False) for change in ten]
        # The sender's fault means a stale handle; SQS's own may pass.
        return [
            Unsettled(ten[int(failed.id)].receipt, failed.code, stale=failed.sender_fault)
            for failed in reply.failed
        ]


async def _find_url(address: SqsAddress, client: SqsClient) -> str:
    if address.url is not None:
        return address.url
    return (await client.call(GET_QUEUE_URL, GetQueueUrl(address.name))).queue_url


def releases(messages: Sequence[SqsMessage]) -> list[VisibilityEntry]:
    """Return the last first: a group comes back when its first message does, as a whole."""
    return [
        VisibilityEntry(str(position), message.receipt_handle, 0)
        for position, message in enumerate(reversed(messages))
    ]


def _changed(changes: Sequence[ReceiptChange], refused: Sequence[Unsettled]) -> list[Receipt]:
    problems = {each.handle for each in refused}
    return [change.receipt for change in changes if change.receipt not in problems]


def received_message(
    message: SqsMessage, received: float, lease: float, *, is_raw: bool = False
) -> ReceivedMessage:
    """Return a message as SQS handed it over at that moment, with a lease of so many seconds."""
    lease_until = received + lease
    # As its publisher says, else as AWS itself does where X-Ray is on.
    given, xray = message.message_attributes, message.attributes.xray
    parent = given and carried_in({name: value.string_value for name, value in given.items()})
    sent = whole_number(message.attributes.sent)
    return ReceivedMessage(
        message.body.encode(),
        Receipt(message.receipt_handle, received, lease_until),
        broker_id=message.message_id,
        receive_count=whole_number(message.attributes.receive_count),
        lease_until=lease_until,
        parent=parent or (read_xray(xray) if xray else None),
        published_at=None if sent is None else sent / 1000,
        source=_source_of(message) if is_raw else None,
    )


def _source_of(message: SqsMessage) -> Source:
    given = message.message_attributes or {}
    texts = {name: each.string_value for name, each in given.items()}
    return Source(
        attributes={name: text for name, text in texts.items() if text is not None},
        binary={
            name: each.binary_value for name, each in given.items() if each.binary_value is not None
        },
        kinds={
            name: each.data_type
            for name, each in given.items()
            if each.data_type not in {None, "String", "Binary"}
        },
        group=message.attributes.group,
    )
