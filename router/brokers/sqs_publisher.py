"""The publishing end of an SQS queue."""

import hashlib
import re
import secrets
from collections.abc import Iterator, Sequence
from typing import Final

from router.brokers.sqs_client import SqsClient
from router.brokers.sqs_wire import SEND_MESSAGES, Batch, Failed, SendEntry
from router.ports import Disconnected, Publication, QueueRefused

MAX_ENTRIES: Final = 10  # of one call …
MAX_BYTES: Final = 256 * 1024  # … and their size; SQS takes more since 2025, stand-ins may not
REMEMBERED: Final = 10_000  # messages

_PLAIN: Final = re.compile(r"""[a-zA-Z0-9!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]{1,128}""")


class SqsPublisher:
    """In order, batch by batch: what is sent side by side would come out of a group in any order.

    SQS answers a duplicate (of FIFO queues) with the id of the first. So a duplicate is known as
    one if this publisher sent the first, too; otherwise it counts as sent.
    """

    def __init__(self, client: SqsClient, url: str, *, is_fifo: bool) -> None:
        self._client = client
        self._url = url
        self._is_fifo = is_fifo
        self._sent: dict[str, None] = {}  # SQS's ids, oldest first

    async def publish(self, items: Sequence[Publication]) -> Sequence[bool]:
        """Not all or none, which SQS cannot: what failed raises, and others may be in."""
        added: list[bool] = []
        for some in batches(items):
            entries = [
                send_entry(position, item, is_fifo=self._is_fifo)
                for position, item in enumerate(some)
            ]
            batch = Batch(self._url, entries)
            reply = await self._client.call(SEND_MESSAGES, batch)
            if reply.failed:
                raise _failure(some, reply.failed[0])
            ids = {done.id: done.message_id or "" for done in reply.successful}
            added += [self._is_new(ids[entry.id]) for entry in entries]
        return added

    def _is_new(self, message_id: str) -> bool:
        if message_id in self._sent:
            return False
        self._sent[message_id] = None
        if len(self._sent) > REMEMBERED:
            del self._sent[next(iter(self._sent))]
        return True


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


def send_entry(position: int, item: Publication, *, is_fifo: bool) -> SendEntry:
    try:
        body = item.body.decode()
    except UnicodeDecodeError:
        raise QueueRefused(f"message {item.message.id!r} is not text, as SQS needs") from None
    if not is_fifo:
        return SendEntry(str(position), body)
    group = plain(item.message.group or item.message.id)
    # SQS repeats nothing within 5 minutes: only what is explicitly the same may be the same (WQ-1).
    key = plain(item.dedup_key) if item.dedup_key is not None else secrets.token_hex(16)
    return SendEntry(str(position), body, group, key)


def plain(text: str) -> str:
    """As it is where SQS takes it; else something as good, for what is only compared."""
    return text if _PLAIN.fullmatch(text) else hashlib.sha256(text.encode()).hexdigest()


def _failure(batch: Sequence[Publication], failed: Failed) -> Disconnected | QueueRefused:
    text = f"message {batch[int(failed.id)].message.id!r} was not sent: {failed.code}"
    return QueueRefused(text) if failed.sender_fault else Disconnected(text)
