"""The durable consumer behind a queue: binding to it, its leases, and fetching from it."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
from msgspec import Raw, Struct

from router.brokers.kit import DEFAULT_LEASE_SECONDS, loop_time
from router.brokers.kit.consuming import WINDOW_BYTES
from router.brokers.kit.retries import PendingRetries
from router.brokers.nats import NatsAddress
from router.brokers.nats.connection import Inbox, NatsConnection, NatsMessage, NotFound, our_errors
from router.core.config import QueueConfig
from router.core.trace import Span, carried_in
from router.ports import Disconnected, QueueRefused
from router.signal import wait_for_signal

NANOSECONDS: Final = 1_000_000_000
HEARTBEAT_SECONDS: Final = 5.0
SILENCE_SECONDS: Final = 2.5 * HEARTBEAT_SECONDS  # then the request is lost, or the server
LAST_MESSAGE_SECONDS: Final = 0.1  # nothing more came for this long: the rest is held back
CHECK_SECONDS: Final = 1.0  # a lost connection does not always wake us
MAX_RETURNED_MESSAGES: Final = 100_000  # as many as gathering minds
PAUSE_SECONDS: Final = 0.5  # before asking again, after the server said no for a while

_HEARTBEAT_STATUS: Final = "100"
_REFUSED: Final = frozenset({"400", "423"})  # the request is not as this consumer wants it
_GONE: Final = "Consumer Deleted"


class ConsumerTerms(Struct, frozen=True):
    """The parts of a consumer's configuration that concern us. Durations are in nanoseconds."""

    ack_policy: str = "none"
    ack_wait: int = 0
    backoff: tuple[int, ...] = ()  # ack_wait by delivery, if given
    deliver_subject: str = ""  # a push consumer
    filter_subject: str = ""
    filter_subjects: tuple[str, ...] = ()
    headers_only: bool = False
    max_deliver: int = -1
    max_ack_pending: int = -1
    max_batch: int = 0
    max_expires: int = 0


class Position(Struct, frozen=True):
    stream_seq: int = 0


class ConsumerInfo(Struct, frozen=True):
    config: Raw
    delivered: Position = Position()
    ack_floor: Position = Position()
    num_pending: int = 0  # in the stream, never handed out
    num_ack_pending: int = 0  # handed out, or returned and not due
    paused: bool = False

    @property
    def terms(self) -> ConsumerTerms:
        return msgspec.json.decode(self.config, type=ConsumerTerms)


class StreamTerms(Struct, frozen=True):
    subjects: tuple[str, ...] = ()
    retention: str = "limits"


class StreamInfo(Struct, frozen=True):
    created: str
    config: StreamTerms


class PullConsumer(Struct, frozen=True):
    """A consumer that we may pull from."""

    stream: str
    name: str
    stream_created: str  # distinguishes it from an earlier stream of that name
    last_handed_out: int  # the sequence, as the server remembers it
    terms: ConsumerTerms
    keeps_acknowledged: bool  # its stream does, unlike a work queue

    @property
    def longest_lease(self) -> float:
        """In seconds."""
        return max(self.terms.backoff, default=self.terms.ack_wait) / NANOSECONDS

    @property
    def lease(self) -> float:
        """In seconds."""
        return min(self.terms.backoff, default=self.terms.ack_wait) / NANOSECONDS

    @property
    def max_deliveries(self) -> int | None:
        return self.terms.max_deliver if self.terms.max_deliver > 0 else None

    @property
    def max_unsettled(self) -> int | None:
        return self.terms.max_ack_pending if self.terms.max_ack_pending > 0 else None


class NatsLease(Struct, eq=False):
    """One hand-over, and the handle to settle it. Equal to no other one."""

    sequence: int  # in the stream
    reply: str  # the subject that settles it
    body: bytes
    until: float  # loop time; changed only by its table


class LeaseTable:
    """The messages that one consumer has handed to this process, over all connections.

    The server lets any hand-over of a message settle the last one, however old it is and on
    whatever connection. So stale ones are found here. A lease is good on any connection, but only
    for the stream that gave it: one that was deleted and made again counts from 1.
    """

    def __init__(self, stream_created: str) -> None:
        self.stream_created = stream_created
        self.pending_retries = PendingRetries()  # by sequence
        self._newest: dict[int, NatsLease] = {}
        self._returned: dict[int, float] = {}  # by sequence: when it is due
        self._next_sweep = 0.0

    def __len__(self) -> int:
        return len(self._newest)

    def take(self, sequence: int, reply: str, body: bytes, until: float) -> NatsLease:
        """Note a new hand-over: those before it are stale."""
        lease = self._newest[sequence] = NatsLease(sequence, reply, body, until)
        self.pending_retries.returned(sequence)
        self._returned.pop(sequence, None)
        return lease

    def has(self, lease: NatsLease, now: float) -> bool:
        return self._newest.get(lease.sequence) is lease and now < lease.until

    def extend(self, lease: NatsLease, until: float) -> None:
        lease.until = until

    def finish(self, lease: NatsLease) -> None:
        """Forget one that is settled, or stale for another reason."""
        if self._newest.get(lease.sequence) is lease:
            del self._newest[lease.sequence]

    def nack(self, lease: NatsLease, now: float, delay: float, *, in_order: bool = True) -> None:
        if self._newest.get(lease.sequence) is not lease:
            return  # it has come back already
        self.finish(lease)
        if len(self._returned) < MAX_RETURNED_MESSAGES:
            self._returned[lease.sequence] = now + delay
        if in_order:
            self.pending_retries.expect(lease.sequence, lease.body, now=now, delay=delay)

    def leases(self) -> Sequence[NatsLease]:
        return tuple(self._newest.values())

    def accounts_for(self, now: float) -> int:
        """Count what the server may call unsettled on our account: held, or returned by us."""
        return sum(now < lease.until for lease in self._newest.values()) + len(self._returned)

    def forget_after(self, sequence: int) -> None:
        """Forget hand-overs that the server has forgotten: it ignores what we say of them."""
        for lease in self.leases():
            if lease.sequence > sequence:
                self.finish(lease)
        self._returned.clear()

    def sweep(self, now: float, every: float) -> None:
        """Forget expired leases, now and then."""
        if now >= self._next_sweep:
            self._next_sweep = now + every
            self._newest = {
                sequence: lease for sequence, lease in self._newest.items() if now < lease.until
            }
            # What is overdue by as much has gone to another router.
            self._returned = {
                sequence: due for sequence, due in self._returned.items() if now < due + every
            }


async def find_stream(connection: NatsConnection, address: NatsAddress) -> StreamInfo:
    try:
        return await connection.api(f"STREAM.INFO.{address.stream}", {}, StreamInfo)
    except NotFound:
        raise QueueRefused(f"there is no stream {address.stream!r}") from None


async def consumer_info(connection: NatsConnection, stream: str, name: str) -> ConsumerInfo | None:
    """Return what the server says about a consumer, or None if there is none."""
    try:
        return await connection.api(f"CONSUMER.INFO.{stream}.{name}", {}, ConsumerInfo)
    except NotFound:
        return None


async def bind_consumer(
    connection: NatsConnection, queue: QueueConfig, address: NatsAddress
) -> PullConsumer:
    """Use the consumer that is there, or make it. Raises QueueRefused."""
    stream = await find_stream(connection, address)
    info = await consumer_info(connection, address.stream, address.consumer)
    wanted = queue.visibility_timeout
    if info is None:
        # Without limits: pools bound what is in flight, and nothing is given up (BRK-1).
        config: dict[str, object] = {
            "durable_name": address.consumer,
            "description": "made by message-router",
            "deliver_policy": "all",
            "replay_policy": "instant",
            "ack_policy": "explicit",
            "ack_wait": round((wanted or DEFAULT_LEASE_SECONDS) * NANOSECONDS),
            "max_deliver": -1,
            "max_ack_pending": -1,
        }
        if address.subject is not None:
            config["filter_subject"] = address.subject
        info = await _put(connection, address, config)
    else:
        terms = info.terms
        problems = _problems(terms, address)
        if problems:
            raise QueueRefused(f"consumer {address.consumer!r} {' and '.join(problems)}")
        lease = None if wanted is None or terms.backoff else round(wanted * NANOSECONDS)
        if lease not in {None, terms.ack_wait}:
            # Only the lease is changed. Everything else is up to the owner of the consumer.
            existing = msgspec.json.decode(info.config, type=dict[str, Raw])
            info = await _put(connection, address, {**existing, "ack_wait": lease})
    return PullConsumer(
        stream=address.stream,
        name=address.consumer,
        stream_created=stream.created,
        last_handed_out=info.delivered.stream_seq,
        terms=info.terms,
        keeps_acknowledged=stream.config.retention != "workqueue",
    )


async def _put(
    connection: NatsConnection, address: NatsAddress, config: dict[str, object]
) -> ConsumerInfo:
    call = f"CONSUMER.DURABLE.CREATE.{address.stream}.{address.consumer}"
    question = {"stream_name": address.stream, "config": config}
    return await connection.api(call, question, ConsumerInfo)


def _problems(terms: ConsumerTerms, address: NatsAddress) -> list[str]:
    filters = {*terms.filter_subjects, *filter(None, [terms.filter_subject])}
    is_other = address.subject is not None and filters != {address.subject}
    checks = {
        "is a push consumer": bool(terms.deliver_subject),
        "acknowledges other than explicitly": terms.ack_policy != "explicit",
        "hands out headers without bodies": terms.headers_only,
        "has another subject than the URI": is_other,
    }
    return [problem for problem, is_so in checks.items() if is_so]


class PulledMessage(Struct, frozen=True):
    body: bytes
    reply: str
    at: float  # loop time
    parent: Span | None  # the span that published it
    subject: str
    headers: Mapping[str, str] | None


class Puller:
    """Fetches from a consumer: one request at a time, and none left over when a fetch ends.

    A request is a one-shot: the server waits for a first message, sends what else there is, and
    says that this was all (404 or 408). So nothing arrives unasked, and back pressure
    is exact. Heart-beats show that the server still knows the request.
    """

    def __init__(self, connection: NatsConnection, consumer: PullConsumer) -> None:
        self._connection = connection
        self._consumer = consumer
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{consumer.stream}.{consumer.name}"
        self._inbox: Inbox | None = None
        self._arrived: list[PulledMessage] = []
        self._status: NatsMessage | None = None  # what ended the request
        self._last_sign = 0.0  # of life, loop time
        self._sign = asyncio.Event()
        self._is_busy = asyncio.Lock()
        self.is_stopped = False
        connection.on_loss = self._sign.set

    async def fetch(self, limit: int, patience: float) -> Sequence[PulledMessage]:
        """Return up to `limit` messages as soon as there is one; none after `patience` seconds.

        Raises Disconnected or QueueRefused, but never while it has messages to return.
        """
        terms = self._consumer.terms
        most = min(limit, terms.max_batch) if terms.max_batch > 0 else limit
        longest = terms.max_expires / NANOSECONDS
        async with self._is_busy:
            if self.is_stopped:
                return ()
            try:
                await self._fetch(most, min(patience, longest) if longest > 0 else patience)
            except (Disconnected, QueueRefused):
                if not self._arrived and not self.is_stopped:
                    raise
            arrived, self._arrived = self._arrived, []
            return arrived

    def stop(self) -> None:
        self.is_stopped = True
        self._sign.set()

    async def until_idle(self) -> None:
        async with self._is_busy:
            pass

    async def until_withdrawn(self) -> None:
        """Wait, once stopped, until the server sends us nothing more."""
        if self.is_stopped:
            await self.until_idle()

    async def _fetch(self, limit: int, patience: float) -> None:
        await self._request(limit, patience)
        while self._status is None and len(self._arrived) < limit:
            now = loop_time()
            # The consumer's limit was reached in the middle: the rest comes once others settle.
            is_held_back = bool(self._arrived) and now >= self._last_sign + LAST_MESSAGE_SECONDS
            if self.is_stopped or is_held_back:
                await self._withdraw()
                return
            if not self._connection.is_open:
                raise Disconnected("the connection to NATS is lost")
            if now >= self._last_sign + SILENCE_SECONDS:
                raise Disconnected("NATS sends neither messages nor heart-beats")
            self._sign.clear()
            at_most = LAST_MESSAGE_SECONDS if self._arrived else CHECK_SECONDS
            await wait_for_signal(self._sign, at_most)
        if self._status is not None and not self._arrived:
            await self._react(self._status)

    async def _request(self, limit: int, patience: float) -> None:
        """Ask for messages. Without patience, the server answers at once."""
        if self._inbox is None:
            self._inbox = await self._connection.listen(self._connection.new_inbox(), self._take)
        self._status = None
        self._sign.clear()
        self._last_sign = loop_time()
        most_bytes = max(WINDOW_BYTES, 2 * self._connection.max_payload)  # one fits in any case
        request: dict[str, object] = {"batch": limit, "no_wait": True, "max_bytes": most_bytes}
        if patience > 0:
            heartbeat = min(HEARTBEAT_SECONDS, patience / 4)
            request["expires"] = round(patience * NANOSECONDS)
            request["idle_heartbeat"] = round(heartbeat * NANOSECONDS)
        payload = msgspec.json.encode(request)
        await self._connection.send(self._subject, payload, self._inbox.subject)

    async def _take(self, message: NatsMessage) -> None:
        self._last_sign = loop_time()
        if message.reply:
            parent = carried_in(message.headers) if message.headers else None
            arrived = PulledMessage(
                message.data,
                message.reply,
                self._last_sign,
                parent,
                message.subject,
                message.headers,
            )
            self._arrived.append(arrived)
        elif _status_of(message) != _HEARTBEAT_STATUS:
            self._status = message
        self._sign.set()

    async def _withdraw(self) -> None:
        """Take the request back. What the server sent until then has arrived; no more will."""
        inbox, self._inbox = self._inbox, None
        if inbox is None or not self._connection.is_open:
            return
        with our_errors():
            await inbox.stop()
            # The server looks at abandoned requests only when asked about the consumer. Until then
            # one of them confuses it: what is returned goes nowhere, and loses its place.
            await consumer_info(self._connection, self._consumer.stream, self._consumer.name)
            await inbox.close()

    async def _react(self, status: NatsMessage) -> None:
        """React to a request that ended without a message."""
        code, text = _status_of(status), (status.headers or {}).get("Description", "")
        if code in _REFUSED:
            raise QueueRefused(f"JetStream: {text}")
        if code == "503" or _GONE in text:
            raise Disconnected("the consumer is gone, or JetStream is off")
        if code == "409" and not self.is_stopped:  # leader changed, server shuts down, limits
            await asyncio.sleep(PAUSE_SECONDS)


def _status_of(message: NatsMessage) -> str:
    return (message.headers or {}).get("Status", "")
