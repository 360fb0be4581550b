"""Both ends of one ActiveMQ queue."""

import asyncio
import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from router.brokers.activemq import ActiveMqAddress, ActiveMqSettings, read_address
from router.brokers.activemq.connection import Frame, StompConnection, StompRefused, open_connection
from router.brokers.activemq.retry import (
    DELAY,
    PERSISTENT,
    SCHEDULED,
    RetryPublisher,
    group_header,
    history_of,
    open_retry_publisher,
    raw_headers,
    source_of,
)
from router.brokers.kit import loop_time
from router.brokers.kit.consuming import (
    NEVER,
    STALE,
    ClaimedBatch,
    LongPoll,
    OpenTickets,
    PrefetchLimit,
)
from router.brokers.kit.retries import PendingRetries, RetryHistory
from router.brokers.workers import ConsumerIdentity
from router.core.commands import dated_body
from router.core.config import QueueConfig
from router.core.flow import HELD_LOOK_AHEAD_MESSAGES
from router.core.identity import MessageKey, digest_of
from router.core.ledger import RememberedAcks
from router.core.message import Handle, ReceivedMessage
from router.core.trace import carried_in
from router.ports import Depth, Disconnected, Nack, Publication, QueueRefused, Traits, Unsettled
from router.signal import wait_for_signal

FIRST_PUSH_SECONDS: Final = 0.050  # after subscribing, until all that waits begins to come
MAX_PUSH_SECONDS: Final = 0.010
QUIET_SECONDS: Final = 0.002  # nothing came for this long: what comes next is another batch
GATHER_STEP_SECONDS: Final = 0.05
# With this many unsettled, the broker looks for more only when something happens (maxPageSize).
PAGE_MESSAGES: Final = 200
NUDGE_SECONDS: Final = (
    0.05,
    5.0,
)  # the first pause without news until we make it look; the longest


class ActiveMqQueues:
    """All queues in ActiveMQ, and what outlives their connections."""

    def __init__(self, identity: ConsumerIdentity) -> None:
        self._identity = identity
        self._connections = itertools.count(1)
        self._copied = RememberedAcks()
        self._pending_retries: defaultdict[str, PendingRetries] = defaultdict(PendingRetries)
        self._prefetch: defaultdict[str, PrefetchLimit] = defaultdict(PrefetchLimit)
        self._reported: set[tuple[str, str]] = set()

    async def close(self) -> None:
        """Do nothing: connections share nothing that has to be closed."""

    @asynccontextmanager
    async def open_queue(self, queue: QueueConfig) -> AsyncIterator["ActiveMqBroker"]:
        address = read_address(queue, self._identity.settings.of(ActiveMqSettings))
        alarm, is_raw = partial(self._alarm, queue.name), queue.route is not None
        self._pending_retries[queue.uri].reads_bodies = not is_raw
        if queue.is_strict:  # to widen the window later, the connection would have to be given up
            self._prefetch[queue.uri].widen(queue.look_ahead or HELD_LOOK_AHEAD_MESSAGES)
        async with (
            open_connection(address.servers, address.login, address.heartbeat) as connection,
            open_retry_publisher(connection, address, alarm, is_raw=is_raw) as retry_publisher,
        ):
            broker = ActiveMqBroker(
                connection,
                retry_publisher,
                address,
                number=next(self._connections),
                copied=self._copied,
                pending_retries=self._pending_retries[queue.uri],
                limit=self._prefetch[queue.uri],
                clock=self._identity.clock,
                exclusive=queue.is_strict,
                is_raw=is_raw,
            )
            try:
                yield broker
            finally:
                broker.stop()

    @asynccontextmanager
    async def open_publisher(self, queue: QueueConfig) -> AsyncIterator["ActiveMqPublisher"]:
        address = read_address(queue, self._identity.settings.of(ActiveMqSettings))
        opening = open_connection(address.servers, address.login, address.heartbeat)
        async with opening as connection:
            yield ActiveMqPublisher(connection, address, self._identity.clock)

    def _alarm(self, queue: str, text: str) -> None:
        """Warn once: every connection would find out the same."""
        if (queue, text) not in self._reported:
            self._reported.add((queue, text))
            self._identity.warn(queue, text)


class StompMessage(Struct, frozen=True):
    """One message, ours as long as the connection."""

    place: int  # in the order of arrival
    frame: Frame
    history: RetryHistory

    @property
    def id(self) -> str:
        return self.frame.headers["message-id"]

    @property
    def key(self) -> tuple[str | None, bytes]:
        """The key that a message shares with its copies."""
        return self.history.first_id, self.frame.body

    def ack(self) -> Frame:
        return Frame("ACK", {"id": self.frame.headers["ack"]})


class PrefetchBuffer:
    """Messages that came over one connection and wait to be asked for.

    Gives what is due in the order of arrival, also if it was put back.
    """

    def __init__(self) -> None:
        self._due: list[tuple[int, StompMessage]] = []  # a heap, by place
        self._later: list[tuple[float, int, StompMessage]] = []  # a heap, by time and place

    def put(self, message: StompMessage) -> None:
        heapq.heappush(self._due, (message.place, message))

    def hold_back(self, message: StompMessage, until: float) -> None:
        heapq.heappush(self._later, (until, message.place, message))

    def take(self, limit: int, now: float) -> list[StompMessage]:
        count = min(limit, self.count_due(now))
        return [heapq.heappop(self._due)[1] for _ in range(count)]

    def first(self, limit: int) -> list[StompMessage]:
        """Return what the next take would give, at the time of the latest count."""
        return [message for _, message in heapq.nsmallest(limit, self._due)]

    def count_due(self, now: float) -> int:
        while self._later and self._later[0][0] <= now:
            self.put(heapq.heappop(self._later)[2])
        return len(self._due)

    def count_later(self) -> int:
        """Return how many were not due at the latest count."""
        return len(self._later)

    def sizes(self) -> Iterator[int]:
        """Return the bytes of each message."""
        for message in (*(each[1] for each in self._due), *(each[2] for each in self._later)):
            yield len(message.frame.body)

    def next_due(self) -> float:
        """Return when the first of those held back is due."""
        return self._later[0][0] if self._later else NEVER


class ActiveMqBroker:
    """One connection. The broker pushes as many messages as the prefetch window allows."""

    holds_groups: Final = False
    lease_seconds: Final = None

    def __init__(
        self,
        connection: StompConnection,
        retry_publisher: RetryPublisher,
        address: ActiveMqAddress,
        *,
        number: int,
        copied: RememberedAcks,
        pending_retries: PendingRetries,
        limit: PrefetchLimit,
        clock: Callable[[], float],
        exclusive: bool = False,
        is_raw: bool = False,
    ) -> None:
        self._is_raw = is_raw
        self._exclusive = exclusive
        self._limit = limit
        self._connection = connection
        self._retry_publisher = retry_publisher
        self._address = address
        self._copied = copied  # originals that still have to be removed
        self._pending_retries = pending_retries
        self._clock = clock  # the machine's: copies are due by it
        self._numbers = itertools.count(1)
        self._places = itertools.count(1)
        self._prefetched = PrefetchBuffer()
        self._tickets: OpenTickets[StompMessage] = OpenTickets(number)
        self._window = 0  # messages that the broker lets us have unsettled; 0: not subscribed yet
        self._nudge_pause, self._nudge_at = NUDGE_SECONDS[0], 0.0
        self.traits = Traits(ordered_here=True, window=self, pulse=connection)
        self._poll = LongPoll()
        self.stop = self._poll.stop
        connection.on_message = self._arrive
        connection.on_loss = self._poll.news.ring

    async def receive(self, limit: int) -> Sequence[ReceivedMessage]:
        prefetched = self._prefetched

        def returned() -> list[bytes]:
            if self._poll.stopped.is_set() or prefetched.count_due(loop_time()) >= limit:
                return []
            return [
                each.frame.body for each in prefetched.first(limit) if each.history.receive_count
            ]

        async def await_more() -> None:
            self._connection.check()
            await self._poll.news.wait(GATHER_STEP_SECONDS)

        async def look() -> ClaimedBatch:
            self._connection.check()
            await self._subscribe()
            if not prefetched.count_due(loop_time()):
                wait = await self._nudge()
                return ClaimedBatch((), min(prefetched.next_due() - loop_time(), wait))
            self._nudge_pause = NUDGE_SECONDS[0]
            self._nudge_at = loop_time() + self._nudge_pause
            await self._gather_pushed(limit)
            # The scheduler wakes up now and then: wait for those that were delayed together.
            await self._pending_retries.gather(returned, await_more)
            self._connection.check()
            taken = prefetched.take(limit, loop_time())
            wait = prefetched.next_due() - loop_time()
            return ClaimedBatch([self._received(each) for each in taken], wait)

        return await self._poll.receive(look)

    def widen(self, messages: int) -> None:
        """Start again with a wider window, once all that fits into this one waits for full pools.

        A second subscription would not do: the broker gives all of a group to one of them, and
        looks for messages of other groups among the next 200 only.
        """
        if not self._window or self._prefetched.count_due(loop_time()):
            return
        if len(self._tickets) + self._prefetched.count_later() < self._window:
            return
        self._limit.widen(messages)
        wider = self._limit.of(self._address.prefetch)
        if wider > self._window:
            text = f"full pools: the prefetch window is widened to {wider}"
            self._connection.give_up(Disconnected(text))

    async def ack(self, handles: Sequence[Handle], *, error: str = "") -> Sequence[Unsettled]:
        del error  # nothing is kept of a message that is gone
        self._connection.check()
        messages, stale = self._tickets.claim_all(handles)
        if messages:
            await self._connection.exchange(*[message.ack() for message in messages])
        return stale

    async def nack(self, items: Sequence[Nack]) -> Sequence[Unsettled]:
        self._connection.check()
        stale: list[Unsettled] = []
        for item in items:
            message = self._tickets.claim(item.handle)
            if message is None:
                stale.append(Unsettled(item.handle, STALE, stale=True))
            else:
                await self._return(message, item)
        return stale

    async def extend(self, handles: Sequence[Handle], seconds: float) -> Sequence[Unsettled]:
        del seconds  # they are ours as long as the connection anyway
        self._connection.check()
        return self._tickets.stale(handles)

    async def depth(self) -> Depth | None:
        """Return None: STOMP has no way to ask."""
        return None

    async def _return(self, message: StompMessage, item: Nack) -> None:
        """Return it. Without a delay, hand it out from here: STOMP cannot return one message.

        Without another request, the connection is closed and the broker has it back.
        """
        history = replace(
            message.history,
            tally=item.tally,
            receive_count=message.history.receive_count + 1,
            due_at=self._clock() + item.delay,
        )
        asked_at = loop_time()
        if item.delay > 0 and await self._retry_publisher.keep(message.frame, history, item.delay):
            await self._remove_original(message, asked_at, item)
            return
        self._prefetched.hold_back(replace(message, history=history), asked_at + item.delay)
        self._poll.news.ring()

    async def _subscribe(self) -> None:
        """Subscribe, at the first receive: before it, the broker must not push anything."""
        if self._window:
            return
        self._window = self._limit.of(self._address.prefetch)
        headers = {
            "id": "queue",
            "destination": self._address.destination,
            "ack": "client-individual",
            "activemq.prefetchSize": str(self._window),
            # One consumer gets all messages, the others wait (ORD-2). Never with a priority: a
            # higher one takes over while this one still holds messages.
            **({"activemq.exclusive": "true"} if self._exclusive else {}),
        }
        try:
            await self._connection.exchange(Frame("SUBSCRIBE", headers))
        except StompRefused as refused:
            if refused.is_forbidden:
                raise QueueRefused("this user may not read from the queue") from None
            raise
        await asyncio.sleep(FIRST_PUSH_SECONDS)

    async def _nudge(self) -> float:
        """Make the broker look for more. Return after how many seconds to do so again.

        A new subscription does that, also one that takes nothing.
        """
        unsettled = len(self._tickets) + self._prefetched.count_later()
        if not PAGE_MESSAGES <= unsettled < self._window:
            return NEVER
        if self._nudge_at <= loop_time():
            name = {"id": "nudge"}
            headers = {
                **name,
                "destination": self._address.destination,
                "ack": "client-individual",
                "selector": "1 = 0",
            }
            await self._connection.exchange(Frame("SUBSCRIBE", headers), Frame("UNSUBSCRIBE", name))
            self._nudge_at = loop_time() + self._nudge_pause
            self._nudge_pause = min(self._nudge_pause * 2, NUDGE_SECONDS[1])
        return self._nudge_at - loop_time()

    async def _gather_pushed(self, limit: int) -> None:
        """Wait for what comes right behind: a failure holds back its group in its batch (FIFO-1).

        The broker pushes messages one by one, also those that were published together.
        """
        give_up = loop_time() + MAX_PUSH_SECONDS
        while self._prefetched.count_due(loop_time()) < limit and loop_time() < give_up:
            rung = self._poll.news.listen()
            await wait_for_signal(rung, QUIET_SECONDS)
            if not rung.is_set():
                return

    def _arrive(self, frame: Frame) -> None:
        message = StompMessage(next(self._places), frame, history_of(frame))
        if self._copied and self._copied.knows(self._proof(message), loop_time()):
            self._connection.tell(message.ack())
            return
        self._pending_retries.returned(message.key)
        wait = message.history.wait(self._clock())
        if not wait:
            self._prefetched.put(message)
        else:
            self._prefetched.hold_back(message, loop_time() + wait)
            if SCHEDULED not in frame.headers:
                self._retry_publisher.give_up("a message came back too early (schedulerSupport)")
        overflow = self._limit.overflow(len(frame.body), self._prefetched.sizes())
        if overflow is not None:
            self._connection.give_up(Disconnected(overflow))
        self._poll.news.ring()

    def _received(self, message: StompMessage) -> ReceivedMessage:
        return ReceivedMessage(
            message.frame.body,
            self._tickets.issue(next(self._numbers), message),
            broker_id=message.id,
            receive_count=message.history.receive_count + 1,
            tally=message.history.tally,
            parent=carried_in(message.frame.headers),
            claimed_id=message.history.first_id,
            published_at=message.history.published_at,
            source=source_of(message.frame) if self._is_raw else None,
        )

    async def _remove_original(self, message: StompMessage, asked_at: float, item: Nack) -> None:
        """Remove a message whose copy is safe; if the connection breaks, when it comes again.

        But only while the copy waits at the broker. Later, another router may have taken the copy
        for a duplicate because it held the original: to remove that would lose the message.
        """
        if item.in_order:
            body, now = message.frame.body, loop_time()
            self._pending_retries.expect(message.key, body, now=now, delay=item.delay)
        proof = self._proof(message)
        self._copied.add(proof, asked_at, lifetime=item.delay)
        await self._connection.exchange(message.ack())
        self._copied.forget(proof)

    def _proof(self, message: StompMessage) -> MessageKey:
        """Return the frame's own id: the broker made it for this very copy (ID-1)."""
        return MessageKey(self._address.destination, message.id, digest_of(message.frame.body))


class ActiveMqPublisher:
    def __init__(
        self, connection: StompConnection, address: ActiveMqAddress, clock: Callable[[], float]
    ) -> None:
        self._connection = connection
        self._address = address
        self._clock = clock  # the machine's
        self._transactions = itertools.count(1)

    async def publish(self, items: Sequence[Publication]) -> Sequence[bool]:
        """Publish in one transaction, except for what the scheduler holds back (CMD-5).

        That is stored only after a commit, so it must not be part of a transaction.
        """
        transaction = {"transaction": str(next(self._transactions))}
        now = self._clock()
        sends: list[Frame] = []
        for item in items:
            left = 0.0 if item.not_before is None else item.not_before - now
            if left > 0:
                delay = {DELAY: str(math.ceil(left * 1000))}
                await self._connection.exchange(self._send(item, delay))
            else:
                sends.append(self._send(item, transaction))
        if sends:
            begin, commit = Frame("BEGIN", transaction), Frame("COMMIT", transaction)
            await self._connection.exchange(begin, *sends, commit)
        return [True] * len(items)

    def _send(self, item: Publication, more: dict[str, str]) -> Frame:
        body = dated_body(item.message, item.body, item.not_before)
        if item.source is not None:
            destination = {"destination": self._address.destination}
            headers = {**raw_headers(item.source, body), **PERSISTENT, **destination, **more}
            return Frame("SEND", headers, body)
        headers = {
            **PERSISTENT,
            **group_header(item.message.group),
            "destination": self._address.destination,
            "content-length": str(len(body)),
            "content-type": "application/json",
            **more,
        }
        return Frame("SEND", headers, body)
