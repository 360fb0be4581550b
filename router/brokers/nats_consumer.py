"""The durable consumer behind a queue: found or made, and fit for us or refused."""

from typing import Final

import msgspec
from msgspec import Raw, Struct

from router.brokers.nats_address import NatsAddress
from router.brokers.nats_link import ApiError, NatsLink
from router.core.config import QueueConfig
from router.ports import QueueRefused

DEFAULT_LEASE: Final = 30.0
NANOSECONDS: Final = 1_000_000_000


class Terms(Struct, frozen=True):
    """A consumer's configuration, as far as it concerns us. Durations are in nanoseconds."""

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


class StreamTerms(Struct, frozen=True):
    subjects: tuple[str, ...] = ()


class StreamInfo(Struct, frozen=True):
    created: str
    config: StreamTerms


class Consumer(Struct, frozen=True):
    """One that we may pull from."""

    stream: str
    name: str
    stream_created: str  # tells it from an earlier stream of that name
    last_handed_out: int  # the sequence, as the server remembers it
    terms: Terms

    @property
    def lease(self) -> float:
        """In seconds."""
        return min(self.terms.backoff, default=self.terms.ack_wait) / NANOSECONDS

    @property
    def most_deliveries(self) -> int | None:
        return self.terms.max_deliver if self.terms.max_deliver > 0 else None

    @property
    def most_unsettled(self) -> int | None:
        return self.terms.max_ack_pending if self.terms.max_ack_pending > 0 else None


async def find_stream(link: NatsLink, address: NatsAddress) -> StreamInfo:
    answer = await link.api(f"STREAM.INFO.{address.stream}", {}, StreamInfo)
    if isinstance(answer, ApiError):
        if answer.is_not_found:
            raise QueueRefused(f"there is no stream {address.stream!r}")
        raise answer.raised()
    return answer


async def bind_consumer(link: NatsLink, queue: QueueConfig, address: NatsAddress) -> Consumer:
    """Use the one that is there, or make it. Raises QueueRefused."""
    stream = await find_stream(link, address)
    info = await consumer_info(link, address.stream, address.consumer)
    if info is None:
        info = await _make(link, address, queue.visibility_timeout or DEFAULT_LEASE)
    else:
        _check(_terms(info), address)
        info = await _adapt(link, address, info, queue.visibility_timeout)
    return Consumer(
        stream=address.stream,
        name=address.consumer,
        stream_created=stream.created,
        last_handed_out=info.delivered.stream_seq,
        terms=_terms(info),
    )


async def consumer_info(link: NatsLink, stream: str, name: str) -> ConsumerInfo | None:
    """None: there is none."""
    answer = await link.api(f"CONSUMER.INFO.{stream}.{name}", {}, ConsumerInfo)
    if isinstance(answer, ApiError):
        if answer.is_not_found:
            return None
        raise answer.raised()
    return answer


async def _make(link: NatsLink, address: NatsAddress, lease: float) -> ConsumerInfo:
    """Without limits of its own: the pools bound what is out, and nothing is given up (SPEC §3)."""
    config = {
        "durable_name": address.consumer,
        "description": "made by message-router",
        "deliver_policy": "all",
        "replay_policy": "instant",
        "ack_policy": "explicit",
        "ack_wait": round(lease * NANOSECONDS),
        "max_deliver": -1,
        "max_ack_pending": -1,
    }
    if address.subject is not None:
        config["filter_subject"] = address.subject
    return await _put(link, address, Raw(msgspec.json.encode(config)))


async def _adapt(
    link: NatsLink, address: NatsAddress, info: ConsumerInfo, lease: float | None
) -> ConsumerInfo:
    """Give it the lease that the document asks for. All else of it is its maker's."""
    terms = _terms(info)
    if lease is None or terms.backoff or terms.ack_wait == round(lease * NANOSECONDS):
        return info
    config = msgspec.json.decode(info.config, type=dict[str, Raw])
    config["ack_wait"] = Raw(msgspec.json.encode(round(lease * NANOSECONDS)))
    return await _put(link, address, Raw(msgspec.json.encode(config)))


async def _put(link: NatsLink, address: NatsAddress, config: Raw) -> ConsumerInfo:
    call = f"CONSUMER.DURABLE.CREATE.{address.stream}.{address.consumer}"
    question = {"stream_name": address.stream, "config": config}
    answer = await link.api(call, question, ConsumerInfo)
    if isinstance(answer, ApiError):
        raise answer.raised()
    return answer


def _terms(info: ConsumerInfo) -> Terms:
    return msgspec.json.decode(info.config, type=Terms)


def _check(terms: Terms, address: NatsAddress) -> None:
    problems = _problems(terms, address)
    if problems:
        raise QueueRefused(f"consumer {address.consumer!r} {' and '.join(problems)}")


def _problems(terms: Terms, address: NatsAddress) -> list[str]:
    filters = {*terms.filter_subjects, *filter(None, [terms.filter_subject])}
    checks = {
        "is a push consumer": bool(terms.deliver_subject),
        "acknowledges other than explicitly": terms.ack_policy != "explicit",
        "hands out headers without bodies": terms.headers_only,
        "has another subject than the URI": address.subject is not None
        and filters != {address.subject},
    }
    return [problem for problem, is_so in checks.items() if is_so]
