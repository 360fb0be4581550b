"""The publishing end of one SQS queue."""

import hashlib
import math
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from router.brokers.sqs.client import (
    MAX_ENTRIES,
    SEND_MESSAGES,
    BatchRequest,
    MessageAttribute,
    SendEntry,
    SqsClient,
)
from router.core.commands import dated_body
from router.core.message import Source
from router.ports import DataRefused, Disconnected, Publication

MAX_BYTES: Final = 256 * 1024  # of one call; SQS takes more since 2025, stand-ins may not
MAX_DELAY_SECONDS: Final = 900  # that SQS holds a new message back
REMEMBERED_MESSAGES: Final = 10_000

_PLAIN: Final = re.compile(r"""[a-zA-Z0-9!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]{1,128}""")


class SqsPublisher:
    """Sends batch by batch: calls side by side would mix up the order of a group.

    SQS answers a duplicate (on FIFO queues) with the id of the first message. So a duplicate is
    noticed if this publisher sent the first one too; otherwise it counts as sent.
    """

    def __init__(
        self, client: SqsClient, url: str, *, is_fifo: bool, clock: Callable[[], float]
    ) -> None:
        self._client = client
        self._url = url
        self._is_fifo = is_fifo
        self._clock = clock  # the machine's
        self._sent: dict[str, None] = {}  # SQS's ids, oldest first

    async def publish(self, items: Sequence[Publication]) -> Sequence[bool]:
        """Publish. SQS cannot do all or none: after an error, some may be in the queue."""
        added: list[bool] = []
        now = self._clock()
        # All are encoded before any is sent: if that fails, nothing was done.
        ready = [
            send_entry(position, item, is_fifo=self._is_fifo, now=now)
            for position, item in enumerate(items)
        ]
        for some in batches(items):
            entries = ready[len(added) : len(added) + len(some)]
            try:
                reply = await self._client.call(SEND_MESSAGES, BatchRequest(self._url, entries))
            except DataRefused as error:
                raise DataRefused(str(error), range(len(added))) from error
            ids = {done.id: done.message_id or "" for done in reply.successful}
            for failed in reply.failed:
                text = f"message {items[int(failed.id)].message.id!r} was not sent: {failed.code}"
                if not failed.sender_fault:
                    raise Disconnected(text)
                raise DataRefused(text, [*range(len(added)), *map(int, ids)])
            for entry in entries:
                message_id = ids[entry.id]
                added.append(message_id not in self._sent)
                self._sent[message_id] = None
                if len(self._sent) > REMEMBERED_MESSAGES:
                    del self._sent[next(iter(self._sent))]
        return added


def batches(items: Sequence[Publication]) -> Iterator[list[Publication]]:
    batch: list[Publication] = []
    size = 0
    for item in items:
        if batch and (len(batch) == MAX_ENTRIES or size + len(item.body) > MAX_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += len(item.body)
    if batch:
        yield batch


def send_entry(position: int, item: Publication, *, is_fifo: bool, now: float) -> SendEntry:
    try:
        body = dated_body(item.message, item.body, item.not_before).decode()
    except UnicodeDecodeError:
        raise DataRefused(f"message {item.message.id!r} is not text, which SQS requires") from None
    if item.source is not None:
        return _raw_entry(position, body, item, item.source, is_fifo=is_fifo)
    if not is_fifo:
        left = 0.0 if item.not_before is None else item.not_before - now
        # What is due later comes early, and is returned for the rest (CMD-5).
        delay = min(math.ceil(left), MAX_DELAY_SECONDS) if left > 0 else None
        return SendEntry(str(position), body, delay_seconds=delay)
    group = plain(item.message.group or item.message.id)
    # SQS drops repeats for 5 minutes: only what is explicitly the same may be the same (WQ-1).
    key = plain(item.dedup_key) if item.dedup_key is not None else secrets.token_hex(16)
    return SendEntry(str(position), body, group, key)


def _raw_entry(
    position: int, body: str, item: Publication, source: Source, *, is_fifo: bool
) -> SendEntry:
    """Return what a foreign client has sent, once more (RAW-4)."""
    attributes = {
        name: MessageAttribute(string_value=text, data_type=_kind_of(name, source, "String"))
        for name, text in source.attributes.items()
    }
    for name, content in source.binary.items():
        kind = _kind_of(name, source, "Binary")
        attributes[name] = MessageAttribute(binary_value=content, data_type=kind)
    group = source.group if source.group is not None or not is_fifo else plain(item.message.id)
    key = plain(item.dedup_key or secrets.token_hex(16)) if is_fifo else None
    return SendEntry(str(position), body, group, key, message_attributes=attributes or None)


def _kind_of(name: str, source: Source, usual: str) -> str:
    """Return the type of an attribute. What another broker calls it is none of SQS' types."""
    kind = source.kinds.get(name, usual)
    return kind if kind.startswith(("String", "Number", "Binary")) else usual


def plain(text: str) -> str:
    """Return the text if SQS accepts it, else its hash: it is only compared."""
    return text if _PLAIN.fullmatch(text) else hashlib.sha256(text.encode()).hexdigest()
