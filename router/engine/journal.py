"""Remembering the latest hand-overs that have ended, as compact records."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Final

from msgspec.structs import force_setattr

from router.core.ending import Ending
from router.core.history import TEXT_KEPT, HandOver
from router.core.job import Fate, Job
from router.core.message import DEFAULT_POOL
from router.core.redact import mask_urls
from router.ports import Tracer

RESULT_BYTES: Final = 16 * 1024 * 1024  # of all results together
REMEMBERED: Final = 10_000  # about 6 MB; 30 MB if every text in them has its full length


class Journal:
    """Adding costs little; readers pay for the search."""

    def __init__(self, tracer: Tracer | None = None, capacity: int = REMEMBERED) -> None:
        self._tracer = tracer
        self._ended: deque[HandOver] = deque(maxlen=capacity)
        self._results: deque[Ending] = deque()  # those with a result, oldest first
        self._result_bytes = 0

    def note(self, jobs: Iterable[Job], fate: Fate, now: float) -> None:
        """Record that these jobs have just ended."""
        ended = [_hand_over(job, fate, now) for job in jobs]
        self._ended += ended
        if self._tracer is not None:
            for hand_over in ended:
                self._tracer.ended(hand_over)

    def limit_results(self, new: Iterable[Ending | None]) -> None:
        """Forget the oldest results when they take too much memory (P4)."""
        for ending in new:
            if ending is not None and ending.result is not None:
                self._results.append(ending)
                self._result_bytes += len(ending.result)
        while self._result_bytes > RESULT_BYTES:
            oldest = self._results.popleft()
            self._result_bytes -= len(oldest.result or b"")
            force_setattr(oldest, "result", None)
            force_setattr(oldest, "result_omitted", True)

    def of_message(self, message_id: str) -> Sequence[HandOver]:
        """Return the hand-overs of one message, the oldest first."""
        return [hand_over for hand_over in self._ended if hand_over.message_id == message_id]

    def latest_first(self) -> Iterator[HandOver]:
        return reversed(self._ended)

    def __len__(self) -> int:
        return len(self._ended)


def _hand_over(job: Job, fate: Fate, now: float) -> HandOver:
    message = job.message
    return HandOver(
        message.id,
        job.key,
        job.settler.queue_name,
        pool_code(job),
        job.group,
        _shown(message.target),
        job.tracked_at,
        job.tries,
        now,
        fate,
        job.returned_for,
        job.error[:TEXT_KEPT],
        job.requests,
        job.received.parent,
        job.ending,
        job.failures,
        message.correlation_id,
        len(message.payload),
    )


@lru_cache(maxsize=10_000)  # targets repeat
def _shown(target: str) -> str:
    # Masked before it is cut: half of a password looks like a port.
    return mask_urls(target)[:TEXT_KEPT]


def pool_code(job: Job) -> str:
    """Return the pool that holds the job, or the one that it asks for while none does."""
    return job.message.pool or DEFAULT_POOL if job.pool is None else job.pool.code
