"""The jobs that the router holds, by their key and by their body (ROUTE-2, ROUTE-3)."""

import itertools
from collections.abc import Iterable, Iterator

from router.core.identity import MessageKey
from router.engine.job import EXPIRED, Job


class Tracker:
    """Two indexes that change in the same methods, so that neither points to what is gone."""

    def __init__(self) -> None:
        self._by_key: dict[MessageKey, Job] = {}
        # By queue and body, which holds the application id: another queue may let its messages do
        # other things, and has an end of its own to record (ROUTE-3).
        self._by_body: dict[tuple[str, bytes], Job] = {}
        self._forfeited = itertools.count(1)

    def track(self, job: Job) -> Job:
        """Take in a job if it is new. Return the one that is held now.

        One with the same key is this message, handed over again (ROUTE-2); one with another key is
        a copy of it in the same queue: an identical POST (ROUTE-3).
        """
        body = job.received.body
        held = self._by_key.setdefault(job.key, job)
        if held is not job:
            if held.received.body == body:
                return held
            self._forfeit(held)
            self._by_key[job.key] = job
        if job.received.source is not None:  # its body holds no id (ID-1)
            return job
        twin = self._by_body.setdefault((job.key.queue, body), job)
        if twin is not job:
            del self._by_key[job.key]
        return twin

    def untrack(self, jobs: Iterable[Job]) -> None:
        by_key, by_body = self._by_key, self._by_body
        for job in jobs:
            del by_key[job.key]
            body = job.key.queue, job.received.body
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
        self._by_body.pop((held.key.queue, held.received.body), None)  # of a raw queue: not there

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._by_key.values())
