"""The durable consumer behind a queue, and which of its hand-overs are ours."""

from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec import Raw, Struct

from router.brokers.kit.pending_retries import PendingRetries
from router.brokers.nats.address import NatsAddress
from router.brokers.nats.connection import ApiError, NatsConnection
from router.core.config import QueueConfig
from router.ports import QueueRefused

DEFAULT_LEASE_SECONDS: Final = 30.0
NANOSECONDS: Final = 1_000_000_000


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
    num_pending: int = 0  # in the stream, never handed out
    num_ack_pending: int = 0  # handed out, or given back and not due
    paused: bool = False

    @property
    def terms(self) -> ConsumerTerms:
        return msgspec.json.decode(self.config, type=ConsumerTerms)


class StreamTerms(Struct, frozen=True):
    subjects: tuple[str, ...] = ()


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
    """What one consumer has handed to this process, over all connections.

    The server lets any hand-over of a message settle the last one, however old it is and on
    whatever connection. So stale ones are found here. A lease is good on any connection, but only
    for the stream that gave it: one that was deleted and made again counts from 1.
    """

    def __init__(self, stream_created: str) -> None:
        self.stream_created = stream_created
        self.pending_retries = PendingRetries()  # by sequence
        self._newest: dict[int, NatsLease] = {}
        self._next_sweep = 0.0

    def __len__(self) -> int:
        return len(self._newest)

    def take(self, sequence: int, reply: str, body: bytes, until: float) -> NatsLease:
        """Note a new hand-over: those before it are stale."""
        lease = self._newest[sequence] = NatsLease(sequence, reply, body, until)
        self.pending_retries.came(sequence)
        return lease

    def has(self, lease: NatsLease, now: float) -> bool:
        return self._newest.get(lease.sequence) is lease and now < lease.until

    def extend(self, lease: NatsLease, until: float) -> None:
        lease.until = until

    def finish(self, lease: NatsLease) -> None:
        """Forget one that is settled, or stale for another reason."""
        if self._newest.get(lease.sequence) is lease:
            del self._newest[lease.sequence]

    def nack(self, lease: NatsLease, now: float, delay: float) -> None:
        if self._newest.get(lease.sequence) is not lease:
            return  # it has come back already
        self.finish(lease)
        self.pending_retries.expect(lease.sequence, lease.body, now=now, delay=delay)

    def leases(self) -> Sequence[NatsLease]:
        return tuple(self._newest.values())

    def sweep(self, now: float, every: float) -> None:
        """Forget expired leases, now and then."""
        if now >= self._next_sweep:
            self._next_sweep = now + every
            self._newest = {
                sequence: lease for sequence, lease in self._newest.items() if now < lease.until
            }


async def find_stream(connection: NatsConnection, address: NatsAddress) -> StreamInfo:
    answer = await connection.api(f"STREAM.INFO.{address.stream}", {}, StreamInfo)
    if isinstance(answer, ApiError):
        if answer.is_not_found:
            raise QueueRefused(f"there is no stream {address.stream!r}")
        raise answer.raised()
    return answer


async def consumer_info(connection: NatsConnection, stream: str, name: str) -> ConsumerInfo | None:
    """Return what the server says about a consumer, or None if there is none."""
    answer = await connection.api(f"CONSUMER.INFO.{stream}.{name}", {}, ConsumerInfo)
    if isinstance(answer, ApiError):
        if answer.is_not_found:
            return None
        raise answer.raised()
    return answer


async def bind_consumer(
    connection: NatsConnection, queue: QueueConfig, address: NatsAddress
) -> PullConsumer:
    """Use the consumer that is there, or make it. Raises QueueRefused."""
    stream = await find_stream(connection, address)
    info = await consumer_info(connection, address.stream, address.consumer)
    wanted = queue.visibility_timeout
    if info is None:
        # Without limits of its own: pools bound what is in flight, and nothing is given up (BRK-1).
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
            # Only the lease is changed. All else is up to whoever made the consumer.
            existing = msgspec.json.decode(info.config, type=dict[str, Raw])
            info = await _put(connection, address, {**existing, "ack_wait": lease})
    return PullConsumer(
        stream=address.stream,
        name=address.consumer,
        stream_created=stream.created,
        last_handed_out=info.delivered.stream_seq,
        terms=info.terms,
    )


async def _put(
    connection: NatsConnection, address: NatsAddress, config: dict[str, object]
) -> ConsumerInfo:
    call = f"CONSUMER.DURABLE.CREATE.{address.stream}.{address.consumer}"
    question = {"stream_name": address.stream, "config": config}
    answer = await connection.api(call, question, ConsumerInfo)
    if isinstance(answer, ApiError):
        raise answer.raised()
    return answer


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
