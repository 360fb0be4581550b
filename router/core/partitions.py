"""One entry of a document for several queues, and which of them a group is in (PART-1)."""

from collections.abc import Iterable
from functools import lru_cache
from typing import Final

from msgspec.structs import replace

from router.core.config import PARTITION, QueueConfig

MAX_PARTITIONS: Final = 256
_OFFSET: Final = 0x811C9DC5  # of FNV-1a with 32 bits
_PRIME: Final = 0x01000193


def partition_number(group: str, count: int) -> int:
    """Return the partition of a group, as any producer can: FNV-1a with 32 bits, modulo."""
    found = _OFFSET
    for byte in group.encode():
        found = (found ^ byte) * _PRIME & 0xFFFFFFFF
    return found % count


@lru_cache(maxsize=1000)
def partitions_of(entry: QueueConfig) -> tuple[QueueConfig, ...]:
    """Return the queues of an entry: itself, unless it has partitions."""
    if entry.partitions is None:
        return (entry,)
    return tuple(
        replace(
            entry,
            name=f"{entry.name}-{number}",
            uri=entry.uri.replace(PARTITION, str(number)),
            partitions=None,
            entry=entry,
        )
        for number in range(entry.partitions)
    )


def queue_for(queue: QueueConfig, group: str | None, key: str) -> QueueConfig:
    """Return where a message is published to: in one of the partitions, if it is such an entry.

    `key` decides about a message without a group: copies of it have the same one.
    """
    if queue.partitions is None:
        return queue
    return partitions_of(queue)[partition_number(group or key, queue.partitions)]


def all_queues(entries: Iterable[QueueConfig]) -> tuple[QueueConfig, ...]:
    return tuple(queue for entry in entries for queue in partitions_of(entry))


def entries_of(queues: Iterable[QueueConfig]) -> tuple[QueueConfig, ...]:
    """Return the entries of which these are the queues, each once."""
    entries = ((queue if queue.entry is None else queue.entry) for queue in queues)
    return tuple({entry.name: entry for entry in entries}.values())
