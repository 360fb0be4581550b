"""Remembering what became of messages, for a while: the latest visits, as compact records."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Final

from router.core.job import Fate, Job
from router.core.message import DEFAULT_POOL
from router.core.redact import mask_urls
from router.core.story import TEXT_KEPT, Visit
from router.ports import Tracer

REMEMBERED: Final = 10_000  # about 6 MB; 30 MB if every text in them is as long as it may be


class Journal:
    """Noting a visit costs little; whoever reads pays for the search."""

    def __init__(self, tracer: Tracer | None = None, capacity: int = REMEMBERED) -> None:
        self._tracer = tracer
        self._visits: deque[Visit] = deque(maxlen=capacity)

    def note(self, jobs: Iterable[Job], fate: Fate, now: float) -> None:
        """They have ended so, just now."""
        visits = [_visit(job, fate, now) for job in jobs]
        self._visits += visits
        if self._tracer is not None:
            for visit in visits:
                self._tracer.ended(visit)

    def of_message(self, message_id: str) -> Sequence[Visit]:
        """Those of one message, the oldest first."""
        return [visit for visit in self._visits if visit.message_id == message_id]

    def latest_first(self) -> Iterator[Visit]:
        return reversed(self._visits)

    def __len__(self) -> int:
        return len(self._visits)


def _visit(job: Job, fate: Fate, now: float) -> Visit:
    message = job.message
    return Visit(
        message.id,
        job.key,
        job.home.queue_name,
        pool_code(job),
        job.group,
        _shown(message.target),
        job.tracked_at,
        job.tries,
        now,
        fate,
        job.returned_for,
        job.error[:TEXT_KEPT],
        job.posts,
        job.delivery.parent,
    )


@lru_cache(maxsize=10_000)  # targets repeat
def _shown(target: str) -> str:
    # Masked before it is cut: half of a password could not be told from a port.
    return mask_urls(target)[:TEXT_KEPT]


def pool_code(job: Job) -> str:
    """The pool that holds it; while none does, the one that it asks for."""
    return job.message.pool or DEFAULT_POOL if job.keeper is None else job.keeper.code
