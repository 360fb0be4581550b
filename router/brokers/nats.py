"""Queues in NATS JetStream: each a durable pull consumer of a stream."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final, cast

from msgspec import Struct

from router.brokers.comebacks import LONGEST_GATHERING
from router.brokers.nats_address import NatsAddress, read_address
from router.brokers.nats_consumer import (
    NANOSECONDS,
    Consumer,
    ConsumerInfo,
    bind_consumer,
    consumer_info,
)
from router.brokers.nats_leases import Holdings, Lease
from router.brokers.nats_link import NatsLink, open_link, our_errors
from router.brokers.nats_publisher import NatsPublisher, publishing_subject
from router.brokers.nats_pull import Arrival, Puller
from router.brokers.worker import Worker
from router.core.config import QueueConfig
from router.core.message import Delivery, Handle, Tally
from router.ports import (
    Depth,
    Disconnected,
    StaleLease,
    Traits,
    Unsettled,
)

LONG_POLL: Final = 20.0
GATHER_STEP: Final = 0.005
GATHER_SHARE: Final = 1 / 3  # of the lease, at most: what is gathered is not extended yet
CLOSING_SECONDS: Final = 3.0

ACK: Final = b"+ACK"
NAK: Final = b"-NAK"
IN_PROGRESS: Final = b"+WPI"
TERM: Final = b"+TERM"

_LONG_REPLY: Final = 11  # tokens of a reply subject that names domain and account too

Key = tuple[tuple[str, ...], str, str]  # what tells consumers apart


class NatsQueues:
    """`nats://host:4222/?stream=S&consumer=C&subject=x.>`, and what its connections share."""

    def __init__(self, worker: Worker) -> None:
        self._settings = worker.settings.nats
        self._holdings: dict[Key, Holdings] = {}

    async def close(self) -> None:
        """Every connection is its user's own."""

    @asynccontextmanager
    async def open_queue(self, queue: QueueConfig) -> AsyncIterator["NatsBroker"]:
        address = read_address(queue, self._settings)
        async with open_link(address) as link:
            held = self._held_at(address)
            consumer = await bind_consumer(link, queue, address)
            holdings = self._holdings_of(address, consumer)
            # A server that was killed may have forgotten its last hand-overs: it never answers to
            # those, and hands them out anew.
            for lease in held:
                if lease.sequence > consumer.last_handed_out:
                    holdings.finish(lease)
            broker = NatsBroker(link, consumer, holdings)
            try:
                yield broker
            finally:
                await broker.stop()

    @asynccontextmanager
    async def open_publisher(self, queue: QueueConfig) -> AsyncIterator["NatsPublisher"]:
        address = read_address(queue, self._settings)
        async with open_link(address) as link:
            yield NatsPublisher(link, queue.name, await publishing_subject(link, address))

    def _held_at(self, address: NatsAddress) -> Sequence[Lease]:
        holdings = self._holdings.get(_key(address))
        return () if holdings is None else holdings.leases()

    def _holdings_of(self, address: NatsAddress, consumer: Consumer) -> Holdings:
        """They outlive a connection, but not the stream."""
        key = _key(address)
        known = self._holdings.get(key)
        if known is None or known.stream_created != consumer.stream_created:
            known = self._holdings[key] = Holdings(consumer.stream_created)
        return known


class NatsBroker:
    """One connection. Its leases are good on the next one too, so an outage costs none of them."""

    traits: Final = Traits(ordered_here=True, keeps_tally=False)

    def __init__(self, link: NatsLink, consumer: Consumer, holdings: Holdings) -> None:
        self._link = link
        self._consumer = consumer
        self._holdings = holdings
        self._puller = Puller(link, consumer)

    @property
    def holds_groups(self) -> bool:
        return False

    @property
    def lease_seconds(self) -> float:
        return self._consumer.lease

    async def receive(self, limit: int) -> Sequence[Delivery]:
        self._holdings.sweep(_now(), self._consumer.lease)
        batch = await self._fetch(limit, LONG_POLL)
        await self._gather_mates(batch, limit)
        return batch

    def interrupt(self) -> None:
        self._puller.interrupt()

    async def stop(self) -> None:
        """Let a receive under way end before its connection is closed."""
        self._puller.interrupt()
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSING_SECONDS):
                await self._puller.until_idle()

    async def ack(self, handles: Sequence[Handle], *, error: str = "") -> Sequence[Unsettled]:
        live, lost = self._sort(handles)
        await self._tell(live, TERM if error else ACK)
        for lease in live:
            self._holdings.finish(lease)
        return lost

    async def nack(self, handle: Handle, delay: float, tally: Tally, *, error: str = "") -> None:
        del tally, error  # there is no place for them
        # Else it would come back to the receive that is just ending, and lose its place.
        await self._puller.until_withdrawn()
        live, _ = self._sort([handle])
        if not live:
            raise StaleLease("the lease was lost")
        wait = b' {"delay":%d}' % round(delay * NANOSECONDS) if delay > 0 else b""
        await self._tell(live, NAK + wait)
        self._holdings.give_back(live[0], _now(), delay)

    async def extend(self, handles: Sequence[Handle], seconds: float) -> Sequence[Unsettled]:
        """By the consumer's own lease: the server knows no other."""
        del seconds
        until = _now() + self._consumer.lease
        live, lost = self._sort(handles)
        await self._tell(live, IN_PROGRESS)
        for lease in live:
            self._holdings.prolong(lease, until)
        return lost

    async def depth(self) -> Depth | None:
        info = await consumer_info(self._link, self._consumer.stream, self._consumer.name)
        if info is None:
            raise Disconnected("the consumer is gone")
        deferred = max(info.num_ack_pending - len(self._holdings), 0)
        return Depth(
            waiting=info.num_pending + deferred,
            in_flight=info.num_ack_pending - deferred,
            due=self._due(info),
            deferred=deferred,
            deferred_limit=self._consumer.most_unsettled,
        )

    def _due(self, info: ConsumerInfo) -> int:
        most = self._consumer.most_unsettled
        is_full = most is not None and info.num_ack_pending >= most
        return 0 if is_full or info.paused else info.num_pending

    async def _fetch(self, limit: int, patience: float) -> list[Delivery]:
        with our_errors():
            return [self._delivery(each) for each in await self._puller.fetch(limit, patience)]

    async def _gather_mates(self, batch: list[Delivery], limit: int) -> None:
        """Wait for what we gave back with those that are back: each has a time of its own."""
        give_up = _now() + min(LONGEST_GATHERING, self._consumer.lease * GATHER_SHARE)
        while len(batch) < limit and self._lacks_mates(batch) and _now() < give_up:
            await asyncio.sleep(GATHER_STEP)
            try:
                batch += await self._fetch(limit - len(batch), 0)
            except Disconnected:  # the next receive finds out; what is here is ours
                return

    def _lacks_mates(self, batch: Sequence[Delivery]) -> bool:
        comebacks = self._holdings.comebacks
        if not comebacks or self._puller.is_interrupted:
            return False
        back = [delivery.body for delivery in batch if _is_retry(delivery)]
        return comebacks.awaits_mates_of(back, _now())

    def _delivery(self, arrival: Arrival) -> Delivery:
        consumer, holdings = self._consumer, self._holdings
        receipt = _read_reply(arrival.reply)
        until = arrival.at + consumer.lease
        lease = holdings.take(receipt.sequence, arrival.reply, arrival.body, until)
        return Delivery(
            arrival.body,
            lease,
            broker_id=f"{consumer.stream}@{consumer.stream_created}#{receipt.sequence}",
            count=receipt.count,
            lease_until=lease.until,
            is_last=receipt.count == consumer.most_deliveries,
            parent=arrival.parent,
        )

    def _sort(self, handles: Sequence[Handle]) -> tuple[list[Lease], list[Unsettled]]:
        """Those that are ours, and those that are not any more."""
        now = _now()
        leases = cast("Sequence[Lease]", handles)
        live = [lease for lease in leases if self._holdings.has(lease, now)]
        lost = [
            Unsettled(lease, "the lease was lost", stale=True)
            for lease in leases
            if not self._holdings.has(lease, now)
        ]
        return live, lost

    async def _tell(self, leases: Sequence[Lease], what: bytes) -> None:
        """All of them; the answer to the last one says that the server has heard them all."""
        if not leases:
            return
        with our_errors():
            for lease in leases[:-1]:
                await self._link.send(lease.reply, what)
            await self._link.ask(leases[-1].reply, what)


class Receipt(Struct, frozen=True):
    """What a message's reply subject tells about it."""

    count: int  # of deliveries, this one included
    sequence: int  # in the stream


def _key(address: NatsAddress) -> Key:
    return address.servers, address.stream, address.consumer


def _read_reply(reply: str) -> Receipt:
    """`$JS.ACK.[domain.account.]stream.consumer.count.sequence.…`."""
    tokens = reply.split(".")
    at = 6 if len(tokens) >= _LONG_REPLY else 4
    return Receipt(int(tokens[at]), int(tokens[at + 1]))


def _is_retry(delivery: Delivery) -> bool:
    return delivery.count is not None and delivery.count > 1


def _now() -> float:
    return asyncio.get_running_loop().time()
