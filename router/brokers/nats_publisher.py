"""The other end of a queue in NATS JetStream."""

import secrets
from collections.abc import Sequence
from typing import Final
from urllib.parse import quote

from msgspec import Struct

from router.brokers.nats_address import NatsAddress
from router.brokers.nats_consumer import find_stream
from router.brokers.nats_link import ApiError, NatsLink, Request, read_answer
from router.ports import Publication, QueueRefused

WILDCARD: Final = "message-router"  # published instead of a * or a > in a subject

_KEPT_IN_A_HEADER: Final = "!#$&'()*+,/:;=?@[]^`{|}~<>\""


class NatsPublisher:
    def __init__(self, link: NatsLink, queue: str, subject: str) -> None:
        self._link = link
        self._queue = queue
        self._subject = subject

    async def publish(self, items: Sequence[Publication]) -> Sequence[bool]:
        """The server takes them one by one: if it fails, some may be in. Their keys say so then."""
        requests = [self._request(item) for item in items]
        if any(each.size > self._link.max_payload for each in requests):
            raise QueueRefused("a message is larger than the NATS server allows")
        answers = await self._link.ask_all(self._subject, requests)
        return [_was_added(answer) for answer in answers]

    def _request(self, item: Publication) -> Request:
        """Only an explicit key is the server's dedup id (WQ-1). It compares those of all queues
        of a stream, so the queue's name is part of it.
        """
        if item.dedup_key is None:
            return Request(item.body, {"Nats-Msg-Id": secrets.token_hex(16)})
        # A header is ASCII and has no blank ends.
        key = quote(f"{self._queue}/{item.dedup_key}", safe=_KEPT_IN_A_HEADER)
        return Request(item.body, {"Nats-Msg-Id": key})


class PubAck(Struct, frozen=True):
    duplicate: bool = False


async def publishing_subject(link: NatsLink, address: NatsAddress) -> str:
    """The queue's own, or the first that its stream takes."""
    subject = address.subject
    if subject is None:
        subject = next(iter((await find_stream(link, address)).config.subjects), None)
    if subject is None:
        raise QueueRefused(f"stream {address.stream!r} takes no subject")
    return _without_wildcards(subject)


def _without_wildcards(subject: str) -> str:
    tokens = subject.split(".")
    return ".".join(WILDCARD if token in {"*", ">"} else token for token in tokens)


def _was_added(data: bytes | None) -> bool:
    if data is None:
        raise QueueRefused("no stream takes that subject")
    answer = read_answer(data, PubAck)
    if isinstance(answer, ApiError):
        raise answer.raised()
    return not answer.duplicate
