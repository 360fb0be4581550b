"""Both ends of one queue in NATS JetStream."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final, cast
from urllib.parse import quote

from msgspec import Struct

from router.brokers.kit import loop_time
from router.brokers.kit.consuming import LONG_POLL_SECONDS
from router.brokers.nats import NatsSettings, read_address
from router.brokers.nats.connection import (
    JetStreamRefused,
    NatsConnection,
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
from router.brokers.workers import ConsumerIdentity
from router.core.commands import dated_body
from router.core.config import QueueConfig
from router.core.message import Handle, ReceivedMessage
from router.ports import (
    DataRefused,
    Depth,
    Disconnected,
    Nack,
    Publication,
    QueueRefused,
    Traits,
    Unsettled,
)

GATHER_STEP_SECONDS: Final = 0.005
CLOSING_SECONDS: Final = 3.0
WILDCARD: Final = "message-router"  # published instead of a * or a > in a subject

ACK: Final = b"+ACK"
NAK: Final = b"-NAK"
IN_PROGRESS: Final = b"+WPI"
TERM: Final = b"+TERM"

_LONG_REPLY_TOKENS: Final = 11  # of a reply subject that names domain and account too
_KEPT_IN_A_HEADER: Final = "!#$&'()*+,/:;=?@[]^`{|}~<>\""


class NatsQueues:
    """All queues in NATS, and the leases, which outlive their connections."""

    def __init__(self, identity: ConsumerIdentity) -> None:
        self._settings = identity.settings.of(NatsSettings)
        self._lease_tables: dict[tuple[tuple[str, ...], str, str], LeaseTable] = {}

    async def close(self) -> None:
        """Do nothing: connections share nothing that has to be closed."""

    @asynccontextmanager
    async def open_queue(self, queue: QueueConfig) -> AsyncIterator["NatsBroker"]:
        address = read_address(queue, self._settings)
        async with open_connection(address) as connection:
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
            broker = NatsBroker(connection, consumer, table)
            try:
                yield broker
            finally:
                await broker.drain()

    @asynccontextmanager
    async def open_publisher(self, queue: QueueConfig) -> AsyncIterator["NatsPublisher"]:
        address = read_address(queue, self._settings)
        async with open_connection(address) as connection:
            subject = address.subject
            if subject is None:
                stream = await find_stream(connection, address)
                subject = next(iter(stream.config.subjects), None)
            if subject is None:
                raise QueueRefused(f"stream {address.stream!r} takes no subject")
            tokens = [WILDCARD if each in {"*", ">"} else each for each in subject.split(".")]
            yield NatsPublisher(connection, queue.name, ".".join(tokens))


class NatsBroker:
    """One connection. Its leases are good on the next one too, so an outage costs none of them."""

    holds_groups: Final = False

    def __init__(
        self, connection: NatsConnection, consumer: PullConsumer, lease_table: LeaseTable
    ) -> None:
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
        )

    async def receive(self, limit: int) -> Sequence[ReceivedMessage]:
        self._lease_table.sweep(loop_time(), self.lease_seconds)
        batch = await self._fetch(limit, LONG_POLL_SECONDS)
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
        self._puller.stop()

    async def drain(self) -> None:
        """Let a receive under way end before its connection is closed."""
        self._puller.stop()
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
        delays = {item.handle: item.delay for item in items}
        live, lost = self._split([item.handle for item in items])
        await self._tell(live, *(_nak(delays[lease]) for lease in live))
        for lease in live:
            self._lease_table.nack(lease, loop_time(), delays[lease])
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
        return Depth(
            waiting=info.num_pending + delayed,
            in_flight=info.num_ack_pending - delayed,
            due=0 if is_full or info.paused else info.num_pending,
            delayed=delayed,
            delayed_limit=most,
        )

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
        )

    def _split(self, handles: Sequence[Handle]) -> tuple[list[NatsLease], list[Unsettled]]:
        """Return the leases that we hold, and those that we do not hold any more."""
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
    def __init__(self, connection: NatsConnection, queue: str, subject: str) -> None:
        self._connection = connection
        self._queue = queue
        self._subject = subject

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
            requests.append(Request(body, {"Nats-Msg-Id": key}))
        if any(each.size > self._connection.max_payload for each in requests):
            raise DataRefused("a message is larger than the NATS server allows")
        added = []
        for data in await self._connection.ask_all(self._subject, requests):
            if data is None:
                raise QueueRefused("no stream takes that subject")
            try:
                added.append(not read_answer(data, PubAck).duplicate)
            except JetStreamRefused as error:  # this message, such as for its size
                raise DataRefused(str(error)) from error
        return added


class PubAck(Struct, frozen=True):
    duplicate: bool = False
