"""Which messages the router holds: one structure, two indexes, changed together (SPEC §5)."""

import itertools
from collections.abc import Iterable, Iterator
from enum import Enum, auto
from typing import Final

from router.core.identity import MessageKey
from router.core.job import EXPIRED, Job


class Claim(Enum):
    """What an arrival is to the router (ROUTE-2, ROUTE-3)."""

    NEW = auto()
    REDELIVERED = auto()  # a message that it holds, handed over again
    REQUEUED = auto()  # a copy of one that it holds: the POST would be identical


_NEW: Final = Claim.NEW  # by its name it costs a look-up, for every message


class Tracker:
    """Both indexes change in the same methods, so that neither can point to what is gone."""

    def __init__(self) -> None:
        self._by_key: dict[MessageKey, Job] = {}
        # A body holds its application id: identical bodies have the same one (ROUTE-3).
        self._by_body: dict[bytes, Job] = {}
        self._forfeited = itertools.count(1)

    def track(self, job: Job) -> tuple[Claim, Job]:
        """Take in what is new. Return what the arrival is, and the job that is held now."""
        body = job.delivery.body
        held = self._by_key.setdefault(job.key, job)
        if held is not job:
            if held.delivery.body == body:
                return Claim.REDELIVERED, held
            self._forfeit(held)
            self._by_key[job.key] = job
        twin = self._by_body.setdefault(body, job)
        if twin is job:
            return _NEW, job
        del self._by_key[job.key]
        return Claim.REQUEUED, twin

    def untrack(self, jobs: Iterable[Job]) -> None:
        by_key, by_body = self._by_key, self._by_body
        for job in jobs:
            del by_key[job.key]
            body = job.delivery.body
            if by_body.get(body) is job:  # else it was forfeited
                del by_body[body]

    def _forfeit(self, held: Job) -> None:
        """Take the key from a job: its broker gave that id to another message (ID-2).

        Its handle may settle that other message now, so it is not used again. Nor does it stand for
        copies of its body any more: its own may be gone.
        """
        del self._by_key[held.key]
        held.key = MessageKey(held.key.queue, held.key.id, f"forfeited-{next(self._forfeited)}")
        held.lease_until = EXPIRED
        self._by_key[held.key] = held
        del self._by_body[held.delivery.body]

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._by_key.values())
