"""Which messages the router holds: one structure, two indexes, changed together (SPEC §5)."""

from collections.abc import Iterator
from enum import Enum, auto

from router.core.job import Job, Key
from router.core.message import Delivery, Message


class Claim(Enum):
    """What an arrival is to the router (ROUTE-2, ROUTE-3)."""

    NEW = auto()
    REDELIVERED = auto()  # a message that it holds, handed over again
    REQUEUED = auto()  # a copy of one that it holds: the POST would be identical


def key_of(queue: str, delivery: Delivery, message: Message) -> Key:
    """The pipeline key (ROUTE-1)."""
    if delivery.broker_id is None:
        return queue, None, message.id
    return queue, delivery.broker_id, ""


class Tracker:
    def __init__(self) -> None:
        self._by_key: dict[Key, Job] = {}
        self._by_content: dict[tuple[str, str], Job] = {}  # (application id, target)

    def look_up(self, key: Key, message: Message) -> tuple[Claim, Job | None]:
        """Say what an arrival under `key` is, and the job that it collides with."""
        held = self._by_key.get(key)
        if held is not None:
            return Claim.REDELIVERED, held
        content = message.id, message.target
        twin = self._by_content.get(content)
        if twin is None:
            return Claim.NEW, None
        if twin.key not in self._by_key:
            del self._by_content[content]  # a stale index entry heals itself
            return Claim.NEW, None
        if twin.broker_id is None and twin.key[0] == key[0]:
            return Claim.REDELIVERED, twin  # its broker could not tell which one it was
        return Claim.REQUEUED, twin

    def track(self, job: Job) -> None:
        self._by_key[job.key] = job
        self._by_content[job.message.id, job.message.target] = job

    def untrack(self, job: Job) -> None:
        del self._by_key[job.key]
        content = job.message.id, job.message.target
        if self._by_content.get(content) is job:
            del self._by_content[content]

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._by_key.values())
