"""Both ends of one queue in NATS JetStream."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import groupby
from typing import Final, cast
from urllib.parse import quote

from msgspec import Struct
from msgspec.structs import replace

from router.brokers.kit import loop_time
from router.brokers.kit.consuming import LONG_POLL_SECONDS
from router.brokers.nats import NatsSettings, read_address
from router.brokers.nats.connection import (
    JetStreamRefused,
    NatsConnection,
    NatsMessage,
    Request,
    open_connection,
    our_errors,
    read_answer,
)
from router.brokers.nats.consumer import (
    NANOSECONDS,
    LeaseTable,
    NatsLease,
    PullConsumer,
    PulledMessage,
    Puller,
    bind_consumer,
    consumer_info,
    find_stream,
)
from router.brokers.nats.sole import QueueLock, SoleConsumer
from router.brokers.nats.unsettled import HeldBack, presence, settle_first
from router.brokers.workers import ConsumerIdentity
from router.core.commands import dated_body
from router.core.config import QueueConfig
from router.core.message import Handle, ReceivedMessage, Source
from router.ports import (
    BrokerError,
    DataRefused,
    Depth,
    Disconnected,
    Nack,
    Publication,
    QueueRefused,
    Traits,
    Unsettled,
)
from router.signal import wait_for_signal

GATHER_STEP_SECONDS: Final = 0.005
CLOSING_SECONDS: Final = 3.0
HELD_AT_ONCE_MESSAGES: Final = 50
OTHERS_COME_SECONDS: Final = 60.0  # after a restart of the server: twice the longest backoff
HOLD_STEP_SECONDS: Final = 0.25  # between two looks whether older messages have come again
LOOKS_PER_LEASE: Final = 3
WILDCARD: Final = "message-router"  # published instead of a * or a > in a subject

ACK: Final = b"+ACK"
NAK: Final = b"-NAK"
IN_PROGRESS: Final = b"+WPI"
TERM: Final = b"+TERM"

_OF_SERVER: Final = ("Nats-", "nats-")  # headers that it acts upon
_LONG_REPLY_TOKENS: Final = 11  # of a reply subject that names domain and account too
_KEPT_IN_A_HEADER: Final = "!#$&'()*+,/:;=?@[]^`{|}~<>\""


class NatsQueues:
    """All queues in NATS, and the leases, which outlive their connections."""

    def __init__(self, identity: ConsumerIdentity) -> None:
        self._settings = identity.settings.of(NatsSettings)
        self._owner = f"{secrets.token_hex(8)} {identity.id}"
        self._locks: dict[tuple[tuple[str, ...], str, str], QueueLock] = {}
        self._lease_tables: dict[tuple[tuple[str, ...], str, str], LeaseTable] = {}

        self._servers: dict[tuple[tuple[str, ...], str, str], ServerSeen] = {}

    async def close(self) -> None:
        """Do nothing: connections share nothing that has to be closed."""

    @asynccontextmanager
    async def open_queue(self, queue: QueueConfig) -> AsyncIterator["NatsBroker"]:
        address = read_address(queue, self._settings)
        async with open_connection(address) as connection:
            server = self._servers.get(address.key, ServerSeen(connection.server_id))
            if server.id != connection.server_id:  # all routers connect again
                server = ServerSeen(connection.server_id, loop_time())
            self._servers[address.key] = server
            table = self._lease_tables.get(address.key)
            held = () if table is None else table.leases()
            consumer = await bind_consumer(connection, queue, address)
            # A table outlives a connection, but not the stream.
            table = self._lease_tables.get(address.key)
            if table is None or table.stream_created != consumer.stream_created:
                table = self._lease_tables[address.key] = LeaseTable(consumer.stream_created)
            # A server that was killed may have forgotten its last hand-overs: it ignores answers
            # to those, and hands the messages out again.
            for lease in held:
                if lease.sequence > consumer.last_handed_out:
                    table.finish(lease)
            sole = None
            if queue.is_strict:
                lock = self._locks.get(address.key)
                if lock is None:
                    key = f"consumer/{address.stream}.{address.consumer}"
                    lock = self._locks[address.key] = QueueLock(key, self._owner)
                sole = SoleConsumer(connection, lock, queue.name)
            is_raw = queue.route is not None
            table.pending_retries.reads_bodies = not is_raw
            broker = NatsBroker(
                connection, consumer, table, sole, may_be_alone=server.is_settled, is_raw=is_raw
            )
            async with broker.watched():
                yield broker

    @asynccontextmanager
    async def open_publisher(self, queue: QueueConfig) -> AsyncIterator["NatsPublisher"]:
        address = read_address(queue, self._settings)
        async with open_connection(address) as connection:
            subjects: tuple[str, ...] = () if address.subject is None else (address.subject,)
            if not subjects:
                subjects = (await find_stream(connection, address)).config.subjects
            if not subjects:
                raise QueueRefused(f"stream {address.stream!r} takes no subject")
            tokens = [WILDCARD if each in {"*", ">"} else each for each in subjects[0].split(".")]
            yield NatsPublisher(connection, queue.name, ".".join(tokens), subjects)


class ServerSeen(Struct, frozen=True):
    """The server of a queue, as this process has met it."""

    id: str
    restarted_at: float = -OTHERS_COME_SECONDS  # loop time

    @property
    def is_settled(self) -> bool:
        """Whether all routers that use it have had the time to connect again."""
        return loop_time() >= self.restarted_at + OTHERS_COME_SECONDS


class NatsBroker:
    """One connection. Its leases are good on the next one too, so an outage costs none of them."""

    holds_groups: Final = False

    def __init__(
        self,
        connection: NatsConnection,
        consumer: PullConsumer,
        lease_table: LeaseTable,
        sole: SoleConsumer | None,
        *,
        may_be_alone: bool = True,
        is_raw: bool = False,
    ) -> None:
        """`sole`: of a strict queue. `may_be_alone`: not just after a restart of the server."""
        self._is_raw = is_raw
        self._may_be_alone = may_be_alone
        self._sole = sole
        self._held_back: HeldBack | None = None
        self._has_settled = False  # what others have left comes first (ORD-3)
        self._stopped = asyncio.Event()
        self._connection = connection
        self._consumer = consumer
        self._lease_table = lease_table
        self._puller = Puller(connection, consumer)
        self.lease_seconds = consumer.lease
        most = consumer.max_unsettled
        self.traits = Traits(
            ordered_here=True,
            keeps_tally=False,
            defers=consumer.max_deliveries is None,
            defer_limit=None if most is None else most // 2,
            pulse=sole,
            forget=self._forget,
        )

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Keep what needs to be kept while it is used; at the end, give back what it may."""
        create_task, name = asyncio.get_running_loop().create_task, self._consumer.name
        keeping = {create_task(self._keep_held_back(), name=f"hold {name}")}
        if self._sole is not None:
            keeping.add(create_task(self._sole.keep(), name=f"keep the lock of {name}"))
        try:
            yield
        finally:
            for each in keeping:
                each.cancel()
            await asyncio.wait(keeping)
            await self.drain()
            with suppress(BrokerError):
                await self._return_held_back()
                if self._sole is not None and not len(self._lease_table):
                    await self._sole.release()

    async def receive(self, limit: int) -> Sequence[ReceivedMessage]:
        patience = LONG_POLL_SECONDS
        if self._sole is not None:
            await self._sole.wait(self._stopped, patience)
            if not self._sole.is_ours:
                return ()
        await self._settle_first()
        if self._sole is not None:  # that may have taken a while
            if not self._sole.is_ours:
                return ()
            patience = min(patience, self._sole.patience)
        if self._held_back is not None:
            return await self._receive_held_back(self._held_back, limit)
        self._lease_table.sweep(loop_time(), self.lease_seconds)
        batch = await self._fetch(limit, patience)
        await self._lease_table.pending_retries.fill(
            batch,
            limit,
            self._fetch,
            step_seconds=GATHER_STEP_SECONDS,
            lease=self.lease_seconds,
            is_stopped=lambda: self._puller.is_stopped,
        )
        return batch

    def stop(self) -> None:
        self._stopped.set()
        self._puller.stop()

    async def drain(self) -> None:
        """Let a receive under way end before its connection is closed."""
        self.stop()
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSING_SECONDS):
                await self._puller.until_idle()

    async def ack(self, handles: Sequence[Handle], *, error: str = "") -> Sequence[Unsettled]:
        live, lost = self._split(handles)
        await self._tell(live, *[TERM if error else ACK] * len(live))
        for lease in live:
            self._lease_table.finish(lease)
        return lost

    async def nack(self, items: Sequence[Nack]) -> Sequence[Unsettled]:
        """Return them in order. NATS has no place for tallies and errors."""
        # Else they would come back to the receive that is just ending, and lose their place.
        await self._puller.until_withdrawn()
        by_handle = {item.handle: item for item in items}
        live, lost = self._split([item.handle for item in items])
        await self._tell(live, *(_nak(by_handle[lease].delay) for lease in live))
        for lease in live:
            item = by_handle[lease]
            self._lease_table.nack(lease, loop_time(), item.delay, in_order=item.in_order)
        return lost

    async def extend(self, handles: Sequence[Handle], seconds: float) -> Sequence[Unsettled]:
        """Extend by the consumer's own lease: the server knows no other."""
        del seconds
        until = loop_time() + self.lease_seconds
        live, lost = self._split(handles)
        await self._tell(live, *[IN_PROGRESS] * len(live))
        for lease in live:
            self._lease_table.extend(lease, until)
        return lost

    async def depth(self) -> Depth | None:
        info = await consumer_info(self._connection, self._consumer.stream, self._consumer.name)
        if info is None:
            raise Disconnected("the consumer is gone")
        delayed = max(info.num_ack_pending - len(self._lease_table), 0)
        most = self._consumer.max_unsettled
        is_full = most is not None and info.num_ack_pending >= most
        is_elsewhere = self._sole is not None and not self._sole.is_ours
        return Depth(
            waiting=info.num_pending + delayed,
            in_flight=info.num_ack_pending - delayed,
            due=0 if is_full or is_elsewhere or info.paused else info.num_pending,
            delayed=delayed,
            delayed_limit=most,
        )

    def _forget(self, handles: Sequence[Handle]) -> None:
        """Hold these no longer: the next connection has them settled first (ORD-3)."""
        for handle in handles:
            self._lease_table.finish(cast("NatsLease", handle))

    async def _settle_first(self) -> None:
        is_new = self._sole is not None and self._sole.is_new
        if self._has_settled and not is_new:
            return
        self._held_back, advice = await settle_first(
            self._connection,
            self._consumer,
            self._lease_table,
            is_sole=self._sole is not None,
            is_new=is_new,
            may_be_alone=self._may_be_alone,
        )
        if self._sole is not None:
            self._sole.note_settled()
        if not self._has_settled:  # from now on, others are not alone
            await self._connection.listen(presence(self._consumer), self._tell_presence)
        self._has_settled = True
        self.traits = replace(self.traits, advice=advice)

    async def _receive_held_back(self, held: HeldBack, limit: int) -> Sequence[ReceivedMessage]:
        """Hold back what arrives until all that is older has come again."""
        give_up = loop_time() + LONG_POLL_SECONDS
        while not held.is_over(loop_time()):
            if self._stopped.is_set() or loop_time() >= give_up:
                return ()
            missing = held.missing
            wanted = HELD_AT_ONCE_MESSAGES if held.takes_batches else 1
            for each in await self._fetch(wanted):
                held.add(each)
            if held.missing == missing:  # nothing that is older has come
                await wait_for_signal(self._stopped, HOLD_STEP_SECONDS)
        batch = held.release(limit)
        if not held:
            self._held_back = None
        return batch

    async def _keep_held_back(self) -> None:
        """Extend the leases of what is held back: only this class knows of it."""
        while True:
            await asyncio.sleep(self.lease_seconds / LOOKS_PER_LEASE)
            if self._held_back:
                with suppress(BrokerError):
                    await self.extend(self._held_back.handles, self.lease_seconds)

    async def _return_held_back(self) -> None:
        held, self._held_back = self._held_back, None
        if held:
            await self.nack([Nack(handle) for handle in held.handles])

    async def _tell_presence(self, message: NatsMessage) -> None:
        with suppress(BrokerError):
            await self._connection.send(message.reply, b"")

    async def _fetch(self, limit: int, patience: float = 0.0) -> list[ReceivedMessage]:
        with our_errors():
            return [self._received(each) for each in await self._puller.fetch(limit, patience)]

    def _received(self, message: PulledMessage) -> ReceivedMessage:
        consumer = self._consumer
        # `$JS.ACK.[domain.account.]stream.consumer.count.sequence.delivery.nanoseconds.…`
        tokens = message.reply.split(".")
        at = 6 if len(tokens) >= _LONG_REPLY_TOKENS else 4
        count, sequence = int(tokens[at]), int(tokens[at + 1])
        until = message.at + self.lease_seconds
        lease = self._lease_table.take(sequence, message.reply, message.body, until)
        return ReceivedMessage(
            message.body,
            lease,
            broker_id=f"{consumer.stream}@{consumer.stream_created}#{sequence}",
            receive_count=count,
            lease_until=lease.until,
            is_last=count == consumer.max_deliveries,
            parent=message.parent,
            published_at=int(tokens[at + 3]) / NANOSECONDS,
            source=_source_of(message) if self._is_raw else None,
        )

    def _split(self, handles: Sequence[Handle]) -> tuple[list[NatsLease], list[Unsettled]]:
        """Return the leases that we hold, and those that we no longer hold."""
        now = loop_time()
        live: list[NatsLease] = []
        lost: list[Unsettled] = []
        for lease in cast("Sequence[NatsLease]", handles):
            if self._lease_table.has(lease, now):
                live.append(lease)
            else:
                lost.append(Unsettled(lease, "the lease was lost", stale=True))
        return live, lost

    async def _tell(self, leases: Sequence[NatsLease], *words: bytes) -> None:
        """Send each its word; the answer to the last one says that the server has heard all."""
        if not leases:
            return
        with our_errors():
            for lease, word in zip(leases[:-1], words, strict=False):
                await self._connection.send(lease.reply, word)
            await self._connection.ask(leases[-1].reply, words[-1])


def _nak(delay: float) -> bytes:
    return NAK + b' {"delay":%d}' % round(delay * NANOSECONDS) if delay > 0 else NAK


class NatsPublisher:
    def __init__(
        self,
        connection: NatsConnection,
        queue: str,
        subject: str,
        subjects: Sequence[str] = (),
    ) -> None:
        self._connection = connection
        self._queue = queue
        self._subject = subject
        self._subjects = subjects  # of the queue, with wildcards

    async def publish(self, items: Sequence[Publication]) -> Sequence[bool]:
        """Publish one by one. After a failure, the server recognizes what it has by its keys."""
        requests = []
        for item in items:
            # Only an explicit key is the server's dedup id (WQ-1). The server compares those of all
            # queues of a stream, so the queue's name is part of it. A header is ASCII.
            key = secrets.token_hex(16)
            if item.dedup_key is not None:
                key = quote(f"{self._queue}/{item.dedup_key}", safe=_KEPT_IN_A_HEADER)
            body = dated_body(item.message, item.body, item.not_before)
            headers = {} if item.source is None else _raw_headers(item.source)
            requests.append(Request(body, {**headers, "Nats-Msg-Id": key}))
        if any(each.size > self._connection.max_payload for each in requests):
            raise DataRefused("a message is larger than the NATS server allows")
        added = []
        for data in await self._ask(items, requests):
            if data is None:
                raise QueueRefused("no stream takes that subject")
            try:
                added.append(not read_answer(data, PubAck).duplicate)
            except JetStreamRefused as error:  # this message, such as for its size
                raise DataRefused(str(error)) from error
        return added

    async def _ask(
        self, items: Sequence[Publication], requests: Sequence[Request]
    ) -> list[bytes | None]:
        """Publish. What came to a raw queue goes to the subject that it had (RAW-4)."""
        answers: list[bytes | None] = []
        for subject, together in groupby(
            zip(items, requests, strict=True), key=lambda pair: self._subject_for(pair[0])
        ):
            part = [request for _, request in together]
            answers += await self._connection.ask_all(subject, part)
        return answers

    def _subject_for(self, item: Publication) -> str:
        subject = None if item.source is None else item.source.subject
        is_ours = subject is not None and any(_fits(subject, each) for each in self._subjects)
        return subject if subject is not None and is_ours else self._subject


def _fits(subject: str, pattern: str) -> bool:
    tokens, wanted = subject.split("."), pattern.split(".")
    if wanted[-1] == ">":
        wanted = wanted[:-1] + ["*"] * (len(tokens) - len(wanted) + 1)
    pairs = zip(tokens, wanted, strict=False)
    return len(tokens) == len(wanted) and all(want in {"*", token} for token, want in pairs)


def _source_of(message: PulledMessage) -> Source:
    headers = dict(message.headers or {})
    content_type = next((headers[name] for name in headers if name.lower() == "content-type"), None)
    return Source(attributes=headers, subject=message.subject, content_type=content_type)


def _raw_headers(source: Source) -> dict[str, str]:
    """Return the headers of a message that is published once more, without those for the server."""
    return {
        name: text for name, text in source.attributes.items() if not name.startswith(_OF_SERVER)
    }


class PubAck(Struct, frozen=True):
    duplicate: bool = False
