"""Which messages the router holds: one structure, two indexes, changed together (SPEC §5)."""

from collections.abc import Iterable, Iterator
from enum import Enum, auto
from typing import Final

from router.core.job import Job, Key
from router.core.message import Delivery, Message


class Claim(Enum):
    """What an arrival is to the router (ROUTE-2, ROUTE-3)."""

    NEW = auto()
    REDELIVERED = auto()  # a message that it holds, handed over again
    REQUEUED = auto()  # a copy of one that it holds: the POST would be identical


_NEW: Final = Claim.NEW  # by its name it costs a look-up, for every message


def key_of(queue: str, delivery: Delivery, message: Message) -> Key:
    """The pipeline key (ROUTE-1).

    Where the broker has no id, the target is part of it: the same id for another target is another
    message (ROUTE-3).
    """
    if delivery.broker_id is None:
        return queue, None, f"{message.id} {message.target}"
    return queue, delivery.broker_id, ""


class Tracker:
    """Both indexes change in the same two methods, so that neither can point to what is gone."""

    def __init__(self) -> None:
        self._by_key: dict[Key, Job] = {}
        self._by_content: dict[tuple[str, str], Job] = {}  # (application id, target)

    def track(self, job: Job) -> tuple[Claim, Job]:
        """Take it in if it is new. Answers what it is, and the job that is held now."""
        held = self._by_key.setdefault(job.key, job)
        if held is not job:
            return Claim.REDELIVERED, held
        twin = self._by_content.setdefault((job.message.id, job.message.target), job)
        if twin is job:
            return _NEW, job
        del self._by_key[job.key]
        if twin.key[0] == job.key[0] and None in (twin.key[1], job.key[1]):
            return Claim.REDELIVERED, twin  # without its broker's id, nobody can tell them apart
        return Claim.REQUEUED, twin

    def untrack(self, jobs: Iterable[Job]) -> None:
        by_key, by_content = self._by_key, self._by_content
        for job in jobs:
            del by_key[job.key]
            del by_content[job.message.id, job.message.target]

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._by_key.values())
