"""Both ends of one RabbitMQ queue."""

import asyncio
import hashlib
import itertools
import logging
import secrets
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Final

from msgspec.structs import replace

from router.brokers.kit import loop_time
from router.brokers.kit.consuming import STALE, ClaimedBatch, LongPoll, OpenTickets, PrefetchLimit
from router.brokers.kit.retries import PendingRetries, RetryHistory
from router.brokers.rabbitmq import (
    PREFETCH_MESSAGES,
    RabbitAddress,
    RabbitSettings,
    read_address,
)
from router.brokers.rabbitmq.connection import (
    NewQueues,
    NoSuchQueue,
    Properties,
    RabbitConnection,
    RabbitMessage,
    open_connection,
)
from router.brokers.rabbitmq.foreign import properties_of, source_of
from router.brokers.rabbitmq.limits import FoundQueue, arguments_for, major_of
from router.brokers.rabbitmq.renewed import (
    MOVED_AT_ONCE_MESSAGES,
    RenewedFirst,
    RenewedQueue,
    all_confirmed,
)
from router.brokers.rabbitmq.retry import (
    MIN_SECONDS,
    PERSISTENT,
    TOLERANCE_SECONDS,
    RetryQueues,
)
from router.brokers.workers import ConsumerIdentity
from router.core.commands import dated_body
from router.core.config import QueueConfig
from router.core.flow import HELD_LOOK_AHEAD_MESSAGES
from router.core.ledger import RememberedAcks
from router.core.message import Handle, ReceivedMessage
from router.core.returning import MAX_DELAY_SECONDS
from router.core.trace import carried_in
from router.ports import BrokerError, Depth, Nack, Publication, QueueRefused, Traits, Unsettled
from router.signal import wait_for_signal

log = logging.getLogger(__name__)

RETURN_LINGER_SECONDS: Final = 0.05  # returns come in bursts: nothing is fetched in between
GATHER_STEP_SECONDS: Final = 0.05
MAX_STAY_SECONDS: Final = 20 * 60.0  # in the window; the broker closes the channel after 30 (BRK-5)
STAY_CHECK_SECONDS: Final = 30.0
PUBLISHED_AT_ONCE_MESSAGES: Final = 200
MAX_PROPERTY_BYTES: Final = 255  # of a short string of AMQP


class RabbitQueues:
    """All queues in RabbitMQ, and what outlives their connections."""

    def __init__(self, identity: ConsumerIdentity) -> None:
        self._identity = identity
        self._connections = itertools.count(1)
        self._new_queues: defaultdict[str, NewQueues] = defaultdict(NewQueues)  # by broker
        # By queue URI:
        self._copied: defaultdict[str, RememberedAcks] = defaultdict(RememberedAcks)
        self._pending_retries: defaultdict[str, PendingRetries] = defaultdict(PendingRetries)
        self._prefetch: defaultdict[str, PrefetchLimit] = defaultdict(PrefetchLimit)

    async def close(self) -> None:
        """Do nothing: connections share nothing that has to be closed."""

    @asynccontextmanager
    async def open_queue(self, queue: QueueConfig) -> AsyncIterator["RabbitBroker"]:
        address = read_address(queue, self._identity.settings.of(RabbitSettings).url)
        name = f"message-router {self._identity.id}"
        # Copies have a connection of their own: a broker short of memory stops reading from
        # connections that publish, and acknowledgements must still get through.
        async with (
            open_connection(address.url, name) as connection,
            open_connection(address.url, f"{name} retries") as publishing,
        ):
            new_queues = self._new_queues[address.url]
            strict = queue.is_strict
            found = await _find_queue(connection, address, new_queues, strict=strict)
            if strict:  # no other router gets messages meanwhile, so the window need not be small
                self._prefetch[queue.uri].widen(queue.look_ahead or HELD_LOOK_AHEAD_MESSAGES)
            self._pending_retries[queue.uri].reads_bodies = queue.route is None
            retries = RetryQueues(publishing, address.queue, found.kind or "classic", new_queues)
            await retries.prepare()
            renewed = RenewedQueue(connection, publishing, address.queue, new_queues)
            if found.may_be_quorum:
                await renewed.look()
            broker = RabbitBroker(
                RabbitConsumer(
                    connection,
                    address,
                    self._pending_retries[queue.uri],
                    self._prefetch[queue.uri],
                    RenewedFirst(renewed, found),
                    exclusive=strict and not found.may_be_quorum and not found.is_single_active,
                    is_strict=strict,
                ),
                retries,
                OpenTickets(next(self._connections)),
                copied=self._copied[queue.uri],
                clock=self._identity.clock,
                advice=found.advice(strict=strict),
                is_raw=queue.route is not None,
            )
            async with broker.watched():
                yield broker

    @asynccontextmanager
    async def open_publisher(self, queue: QueueConfig) -> AsyncIterator["RabbitPublisher"]:
        address = read_address(queue, self._identity.settings.of(RabbitSettings).url)
        name = f"message-router {self._identity.id} publisher"
        async with open_connection(address.url, name) as connection:
            new_queues = self._new_queues[address.url]
            found = await _find_queue(connection, address, new_queues, strict=queue.is_strict)
            ladder = RetryQueues(connection, address.queue, found.kind or "classic", new_queues)
            clock = self._identity.clock
            yield RabbitPublisher(connection, address.queue, ladder, new_queues, clock)


class RabbitConsumer:
    """The prefetch window of one connection: messages that were pushed before a receive."""

    def __init__(
        self,
        connection: RabbitConnection,
        address: RabbitAddress,
        pending_retries: PendingRetries,
        limit: PrefetchLimit,
        source: RenewedFirst,
        *,
        exclusive: bool,
        is_strict: bool = False,
    ) -> None:
        self._exclusive = exclusive
        self._is_strict = is_strict
        self.connection = connection
        self.source = source
        self.address = address
        self.prefetch = min(limit.of(address.prefetch), PREFETCH_MESSAGES[1])
        self.pending_retries = pending_retries
        self._limit = limit
        self.poll = LongPoll()
        self.waiting: deque[RabbitMessage] = deque()  # oldest first
        self._name: str | None = None  # None while we do not consume
        self._switching = asyncio.Lock()  # a consumer is started, or ended
        self._resume_at = 0.0
        connection.on_change = self.poll.news.ring

    @property
    def room(self) -> int:
        """How many messages the broker may still push before any is settled."""
        used = 0 if self._name is None else self.connection.in_window
        return max(self.prefetch - used, 0)

    @property
    def can_widen(self) -> bool:
        """Whether to consume anew for a new window. While we did not, another router could."""
        return not (self._is_strict or self.waiting or self.room)

    async def start(self) -> None:
        while self._name is None and not self.poll.stopped.is_set():
            pause = self._resume_at - loop_time()
            if pause > 0:
                await asyncio.sleep(pause)
                continue
            async with self._switching:
                waiting = deque(self.waiting)
                self._name = await self.connection.consume(
                    self.source.current,
                    self.prefetch,
                    partial(self._take, waiting),
                    exclusive=self._exclusive,
                )
                self.waiting = waiting

    async def rewind(self, *returned: RabbitMessage) -> None:
        """Give back these and the whole window, which must not overtake them.

        In a strict queue, with all that is unsettled, when the connection ends: then the broker
        puts it back in order. A quorum queue has what was requeued in the order of its return.
        Also, a router that waits for the queue would get the newer messages at once.
        """
        if self._is_strict:
            if not self.poll.stopped.is_set():
                self.connection.lose("messages of a strict queue go back together")
            return
        self._resume_at = loop_time() + RETURN_LINGER_SECONDS
        async with self._switching:
            name, waiting = self._name, self.waiting
            self._name, self.waiting = None, deque()
            if name is not None:
                await self.connection.cancel(name)
            back = [*returned, *waiting]
            if back:
                await self.connection.requeue([message.tag for message in back])
            self.source.restart()

    async def pause(self) -> None:
        """Let nothing more come, and keep the window."""
        async with self._switching:
            name, self._name = self._name, None
            if name is not None:
                await self.connection.cancel(name)

    async def turn_to_queue(self) -> bool:
        """Go on with the queue itself once nothing is left in the renewed one."""
        source = self.source
        if not source.is_renewed or self.waiting or await source.renewed.waiting():
            return False
        await self.pause()  # something may still have come meanwhile: it goes first
        source.current = source.queue
        return not self.poll.stopped.is_set()

    def first(self, limit: int) -> Iterable[RabbitMessage]:
        return itertools.islice(self.waiting, limit)

    def remove(self, messages: Iterable[RabbitMessage]) -> None:
        for message in messages:
            self.waiting.remove(message)

    async def mind(self) -> None:
        """Give back what no receive will take, or has not taken for too long."""
        stopped = self.poll.stopped
        try:
            while not stopped.is_set():
                await wait_for_signal(stopped, STAY_CHECK_SECONDS)
                oldest = self.waiting[0].at if self.waiting else loop_time()
                is_late = loop_time() - oldest > MAX_STAY_SECONDS
                if stopped.is_set() or is_late or await self.source.is_waiting():
                    await self.rewind()
        except BrokerError:
            return  # the connection is lost; its users get an error

    def _take(self, waiting: deque[RabbitMessage], message: RabbitMessage) -> None:
        if self.pending_retries:
            self.pending_retries.returned(message.key)
        if message.redelivered:
            self.source.note(message)
        waiting.append(message)
        overflow = self._limit.overflow(len(message.body), (len(each.body) for each in waiting))
        if overflow is not None:
            waiting.clear()
            self.connection.lose(overflow)
        self.poll.news.ring()


class RabbitBroker:
    """One connection. The broker pushes as many messages as the prefetch window allows."""

    holds_groups: Final = False
    lease_seconds: Final = None

    def __init__(
        self,
        consumer: RabbitConsumer,
        retries: RetryQueues,
        tickets: OpenTickets[RabbitMessage],
        *,
        copied: RememberedAcks,
        clock: Callable[[], float],
        advice: str | None,
        is_raw: bool = False,
    ) -> None:
        self._is_raw = is_raw
        self._token = secrets.token_hex(8)
        self.traits = Traits(
            ordered_here=True,
            hold_seconds=1200.0,
            answer_within=1800.0,
            advice=advice,
            window=self,
            pulse=consumer.connection,
        )
        self._looks_ahead = False
        self._consumer = consumer
        self._connection = consumer.connection
        self._poll = consumer.poll
        self.stop = self._poll.stop
        self._retries = retries
        self._tickets = tickets
        self._copied = copied  # originals that may still have to be removed
        self._pending_retries = consumer.pending_retries
        self._clock = clock  # the machine's: it decides when a copy is due

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Watch the window while it is used. A task group would wrap what its user raises."""
        address, create_task = self._consumer.address, asyncio.get_running_loop().create_task
        watching = {
            create_task(self._consumer.mind(), name=f"mind {address.queue}"),
            create_task(self._connection.prove(address.heartbeat), name=f"ask {address.queue}"),
        }
        try:
            yield
        finally:
            for each in watching:
                each.cancel()
            await asyncio.wait(watching)
            self.stop()

    async def receive(self, limit: int) -> Sequence[ReceivedMessage]:
        def returned() -> list[bytes]:
            waiting = self._consumer.waiting
            if self._poll.stopped.is_set() or len(waiting) >= limit:
                return []
            return [each.body for each in waiting if each.history.receive_count]

        async def await_more() -> None:
            self._connection.check()
            await self._poll.news.wait(GATHER_STEP_SECONDS)
            await self._send_on_early(limit)

        async def look() -> ClaimedBatch:
            self._connection.check()
            await self._fill_window(limit)
            await self._send_on_early(limit)
            # Each copy has its own time: wait for those that were delayed together.
            await self._pending_retries.gather(returned, await_more)
            await self._remove_copied(limit)
            waiting = self._consumer.waiting
            there = min(limit, len(waiting))
            return ClaimedBatch([self._received(waiting.popleft()) for _ in range(there)])

        return await self._poll.receive(look)

    def widen(self, messages: int) -> None:
        self._looks_ahead = messages > 0

    async def ack(self, handles: Sequence[Handle], *, error: str = "") -> Sequence[Unsettled]:
        del error  # nothing is kept of a message that is gone
        self._connection.check()
        messages, stale = self._tickets.claim_all(handles)
        if messages:
            await self._connection.ack([message.tag for message in messages])
        return stale

    async def nack(self, items: Sequence[Nack]) -> Sequence[Unsettled]:
        """Return them in order. What goes back at once does so together, with the window."""
        self._connection.check()
        stale: list[Unsettled] = []
        back: list[RabbitMessage] = []
        for item in items:
            message = self._tickets.claim(item.handle)
            if message is None:
                stale.append(Unsettled(item.handle, STALE, stale=True))
            elif item.delay <= 0:
                back.append(message)
            else:
                await self._delay(message, item)
        if back:
            await self._consumer.rewind(*back)
        return stale

    async def extend(self, handles: Sequence[Handle], seconds: float) -> Sequence[Unsettled]:
        del seconds  # they are ours as long as the connection anyway
        self._connection.check()
        return self._tickets.stale(handles)

    async def depth(self) -> Depth | None:
        """Count the queue only: what waits in its retry queues is not included."""
        address = self._consumer.address
        in_queue = await self._connection.waiting(address.queue)
        in_queue += await self._consumer.source.renewed.waiting()
        here, out = len(self._consumer.waiting), len(self._tickets)
        return Depth(in_queue + here, out, due=here + min(in_queue, self._consumer.room))

    async def _fill_window(self, limit: int) -> None:
        consumer = self._consumer
        if self._looks_ahead and consumer.can_widen:
            # A new consumer has a window of its own; what came to the old one stays ours.
            await consumer.pause()
        while True:
            await consumer.start()
            if 0 < len(consumer.waiting) < limit:
                # Pushed one by one; a batch is all that was there with its first message (FIFO-1).
                await self._connection.catch_up()
            if consumer.source.has_worn:
                await self._renew_window()
            elif not await consumer.turn_to_queue():
                return

    async def _renew_window(self) -> None:
        """Move the whole window: what stays behind must be newer than all that was moved.

        Copies first, confirmed; then the originals are removed. A crash in between duplicates.
        """
        consumer, source = self._consumer, self._consumer.source
        limit, queue = source.limit, source.queue
        self.traits = replace(self.traits, advice=limit.advice())
        await consumer.pause()
        await self._remove_copied(len(consumer.waiting))
        try:
            await source.renewed.make()
        except QueueRefused as error:
            log.warning("messages cannot be renewed: %s", error, extra={"queue": queue})
            source.give_up()
            return
        moved = 0
        while consumer.waiting:
            there = min(MOVED_AT_ONCE_MESSAGES, len(consumer.waiting))
            worn = [consumer.waiting.popleft() for _ in range(there)]
            await source.renewed.put(worn)
            await self._connection.ack([message.tag for message in worn])
            moved += there
        source.restart()
        log.info("%d messages that came back often were renewed", moved, extra={"queue": queue})

    async def _delay(self, message: RabbitMessage, item: Nack) -> None:
        """Keep a copy that comes back when it is due, then remove the original."""
        history = replace(
            message.history,
            tally=item.tally,
            receive_count=message.receive_count,
            due_at=self._clock() + item.delay,
            token=self._token_of(message),
        )
        asked_at = loop_time()
        waits = await self._keep_copy(message, history, in_order=item.in_order)
        # If the connection breaks before the broker has removed the original, we remove it when it
        # comes again, but only while the copy cannot have been handed over. The broker may have
        # removed the original without our knowing, and what looks like it may be the same message,
        # published once more: a duplicate while the copy waits, but the only one afterwards.
        if not self._is_nameless(message):
            self._copied.add(message.proof, asked_at, lifetime=waits)
        await self._connection.ack([message.tag])
        self._copied.forget(message.proof)

    def _is_nameless(self, message: RabbitMessage) -> bool:
        """Return whether nothing tells it apart: it equals no other hand-over (RAW-3)."""
        return self._is_raw and message.history.first_id is None

    def _token_of(self, message: RabbitMessage) -> str | None:
        """Return what stands for the name of a nameless one, for its copies, too (WQ-15)."""
        if not self._is_nameless(message):
            return None
        return message.history.token or f"{self._token}-{message.tag}"

    async def _send_on_early(self, limit: int) -> None:
        """Send the next messages on again if they came before their time.

        All copies first, confirmed; then the originals are removed. A crash in between duplicates.
        """
        while True:
            now = self._clock()
            early = [
                each
                for each in self._consumer.first(limit)
                if each.history.wait(now, tolerance=TOLERANCE_SECONDS)
            ]
            if not early:
                return
            self._consumer.remove(early)
            for message in early:
                await self._keep_copy(message, message.history)
            await self._connection.ack([message.tag for message in early])

    async def _remove_copied(self, limit: int) -> None:
        """Remove those of the next messages whose copies still wait (BRK-3)."""
        while self._copied:
            copied = [
                each
                for each in self._consumer.first(limit)
                if each.redelivered and self._copied.knows(each.proof, loop_time())
            ]
            if not copied:
                return
            self._consumer.remove(copied)
            await self._connection.ack([message.tag for message in copied])
            for message in copied:
                self._copied.forget(message.proof)

    def _received(self, message: RabbitMessage) -> ReceivedMessage:
        source = None
        if self._is_raw:
            source = source_of(message.properties, self._token_of(message))
        return ReceivedMessage(
            message.body,
            self._tickets.issue(message.tag, message),
            broker_id=None,  # RabbitMQ makes none
            receive_count=message.receive_count,
            tally=message.history.tally,
            parent=carried_in(message.headers),
            claimed_id=message.history.first_id,
            published_at=message.published_at,
            source=source,
        )

    async def _keep_copy(
        self, message: RabbitMessage, history: RetryHistory, *, in_order: bool = True
    ) -> float:
        """Return for how many seconds it waits at the broker."""
        delay = max(history.due_at - self._clock(), MIN_SECONDS)
        await self._retries.make(delay)  # may take its time, and the copy only comes after it
        if in_order:
            self._pending_retries.expect(message.key, message.body, now=loop_time(), delay=delay)
        return await self._retries.put(message.body, message.properties, history, delay)


class RabbitPublisher:
    def __init__(
        self,
        connection: RabbitConnection,
        queue: str,
        ladder: RetryQueues,
        new_queues: NewQueues,
        clock: Callable[[], float],
    ) -> None:
        self._connection = connection
        self._queue = queue
        self._ladder = ladder
        self._new_queues = new_queues
        self._clock = clock  # the machine's

    async def publish(self, items: Sequence[Publication]) -> Sequence[bool]:
        """Publish; duplicates are not recognized. After an error, some may be stored."""
        # All bodies are made before anything is sent: if one cannot be, nothing was done.
        bodies = [dated_body(item.message, item.body, item.not_before) for item in items]
        await self._new_queues.wait_for(self._queue)
        for start in range(0, len(items), PUBLISHED_AT_ONCE_MESSAGES):
            part = slice(start, start + PUBLISHED_AT_ONCE_MESSAGES)
            publishing = map(self._publish_one, items[part], bodies[part])
            await all_confirmed(publishing, f"publish {self._queue}")
        return [True] * len(items)

    async def _publish_one(self, item: Publication, body: bytes) -> None:
        now = self._clock()
        moment = datetime.fromtimestamp(now, UTC)
        properties = Properties(
            content_type="application/json",
            delivery_mode=PERSISTENT,
            message_id=_short(item.dedup_key or item.message.id),
            timestamp=moment,
        )
        if item.source is not None:
            properties = properties_of(item.source, moment)
        if item.not_before is not None and item.not_before > now:
            # A longer wait is not over then, and the message is returned for the rest.
            due_at = min(item.not_before + TOLERANCE_SECONDS, now + MAX_DELAY_SECONDS)
            history = RetryHistory(properties.message_id, due_at=due_at)
            await self._ladder.put(body, properties, history, due_at - now)
            return
        try:
            await self._connection.publish(self._queue, body, properties)
        except NoSuchQueue:
            raise QueueRefused(f"there is no queue {self._queue!r}") from None


def _short(text: str) -> str:
    """Return the text if a property takes it, else its hash: it is only compared."""
    encoded = text.encode()
    return text if len(encoded) <= MAX_PROPERTY_BYTES else hashlib.sha256(encoded).hexdigest()


async def _find_queue(
    connection: RabbitConnection, address: RabbitAddress, new_queues: NewQueues, *, strict: bool
) -> FoundQueue:
    """Find the queue. Make it if it is missing and the URI names a type."""
    queue, kind, major = address.queue, address.kind, major_of(connection.version)
    if not await connection.exists(queue):
        if kind is None:
            raise QueueRefused(f"there is no queue {queue!r}: create it, or give its type")
        arguments = arguments_for(kind, major, strict=strict)
        await connection.declare(queue, arguments)
        new_queues.add(queue)
        return FoundQueue(kind, arguments, major)
    found = FoundQueue(kind, await connection.arguments_of(queue), major)
    if found.kind is None:
        log.info("queue type unknown: its retry queues are classic", extra={"queue": queue})
    if kind is None and found.kind == "stream":
        raise QueueRefused(f"{queue!r} is a stream: its messages cannot be removed")
    return found
