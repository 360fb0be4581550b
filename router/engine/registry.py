"""The one book-keeper: all that the router holds, and what became of it.

`track` takes a message in, `finish` lets it go. Every hand-over passes both, on every path, and
nothing else counts messages, keeps the ledger, remembers ACKs or writes history. The Journal keeps
the latest hand-overs that have ended.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from router.core.history import TEXT_KEPT_CHARACTERS, Fate, HandOver
from router.core.identity import proof_of_copy
from router.core.ledger import Failing, Ledger, RememberedAcks, Tallies
from router.core.message import ReceivedMessage
from router.core.outcome import Ending, Metric
from router.core.redact import mask_urls
from router.core.stats import Counts
from router.engine.job import Follower, Job
from router.engine.tracker import Tracker
from router.ports import Tracer

if TYPE_CHECKING:  # a pool is told of each job that ends
    from router.engine.pool import ProcessPool

_OMITTED: Final = Ending(result_omitted=True)
# The ACK went through.
REMOVED: Final = {Fate.DELIVERED, Fate.DEAD_LETTERED, Fate.CANCELLED, Fate.STORED}
RESULT_BYTES: Final = 16 * 1024 * 1024  # of all results together
_ending_of: Final = attrgetter("ending")
REMEMBERED_HAND_OVERS: Final = 10_000  # about 6 MB; 30 MB if every text in them has its full length


class InFlightRegistry:
    def __init__(self, journal: "Journal | None" = None) -> None:
        self.tracker = Tracker()
        self.ledger = Ledger()
        self.journal = Journal() if journal is None else journal
        self.remembered = RememberedAcks()
        self.tallies = Tallies()
        self.failing = Failing()
        self._untracked: dict[int, ReceivedMessage] = {}  # held without a job

    @property
    def held(self) -> int:
        return len(self.tracker) + len(self._untracked)

    @property
    def unaccounted(self) -> int:
        return self.ledger.unaccounted(self.held)

    def receive(self, hand_overs: int, counts: Counts, now: float) -> None:
        """Count what a broker has handed over. Each of it is then tracked, or held untracked."""
        self.ledger.received += hand_overs
        counts.receive(hand_overs, now)

    def track(self, job: Job) -> Job:
        """Take a job in, unless the router holds its message already. Return the one it holds."""
        if self.tallies and not job.failures:
            tally = self.tallies.of(job.key)  # its broker could not keep what was tried so far
            job.failures, job.requests = tally.failures, tally.requests
        return self.tracker.track(job)

    def finish(self, jobs: Sequence[Job], fate: Fate, counts: Counts, now: float) -> Sequence[Job]:
        """Let jobs of one queue go: their ACK or NACK went through, or never will (ROUTE-7).

        Return those that copies were waiting for.
        """
        self.tracker.untrack(jobs)
        self.ledger.end(fate, len(jobs))
        self.journal.note(jobs, fate, now)
        if (self.tallies or self.failing) and fate in REMOVED:
            for job in jobs:
                self.tallies.forget(job.key)
                self.failing.forget(job.key)
        is_delivered = fate is Fate.DELIVERED
        if is_delivered:
            counts.record(Metric.SUCCESS, now, len(jobs))
        ends: dict[tuple[ProcessPool | None, Metric | None], int] = {}
        for job in jobs:
            end = job.pool, job.metric
            ends[end] = ends.get(end, 0) + 1
        # Counting what ended together saves 1 µs for each message.
        for (pool, metric), number in ends.items():
            if not is_delivered:
                counts.record(metric, now, number)
            if pool is not None:
                pool.deliveries.record(metric, now, number)
                pool.release(number)
        return [job for job in jobs if job.followers]

    def count_try(self, job: Job, counts: Counts, now: float) -> None:
        """Count a failed delivery of a message that stays (ORD-1)."""
        counts.record(job.metric, now)
        for pool in filter(None, [job.pool]):
            pool.deliveries.record(job.metric, now)

    def hold_untracked(self, received: ReceivedMessage) -> None:
        """Hold a hand-over that is no job: a copy, a follower, or what no pool can take."""
        self._untracked[id(received)] = received

    def release_untracked(self, received: ReceivedMessage) -> None:
        """Stop holding it: it is dispatched now."""
        del self._untracked[id(received)]

    def finish_untracked(self, received: ReceivedMessage, fate: Fate) -> None:
        del self._untracked[id(received)]
        self.ledger.end(fate)

    def finish_unread(
        self, received: ReceivedMessage, fate: Fate, counts: Counts, now: float
    ) -> None:
        """Let a message go that no pool took: malformed, undispatchable, or too late."""
        counts.record(Metric.FAILURE if fate is Fate.DEAD_LETTERED else None, now)
        self.finish_untracked(received, fate)

    def supersede(self) -> None:
        """Count a hand-over that a newer one replaced (ROUTE-2)."""
        self.ledger.end(Fate.SUPERSEDED)

    def remember_tally(self, job: Job) -> None:
        """Keep what was tried: its broker cannot (WQ-5)."""
        self.tallies.keep(job.key, job.tally)

    def remember_ack(self, queue_uri: str, job: Job, now: float) -> None:
        """Acknowledge the next hand-over of this copy: its ACK may have been lost (BRK-3)."""
        proof = proof_of_copy(queue_uri, job.received)
        if proof is not None:
            self.remembered.add(proof, now, error=job.error)

    def remembered_error(self, queue_uri: str, received: ReceivedMessage, now: float) -> str | None:
        """Return the error with which its ACK is remembered, or None if none is."""
        return self.remembered.error_of(proof_of_copy(queue_uri, received), now)

    def forget_ack(self, queue_uri: str, received: ReceivedMessage) -> None:
        """Forget a remembered ACK: the broker has removed the copy now."""
        self.remembered.forget(proof_of_copy(queue_uri, received))

    def drop_followers(self, job: Job, is_dead: Callable[[Follower], bool]) -> None:
        """Forget copies that wait for a job and can no longer be settled."""
        for each in filter(is_dead, job.followers):
            self.finish_untracked(each.received, Fate.FORFEITED)
        job.followers = tuple(each for each in job.followers if not is_dead(each))


class Journal:
    """Adding costs little; readers pay for the search."""

    def __init__(self, tracer: Tracer | None = None, capacity: int = REMEMBERED_HAND_OVERS) -> None:
        self._tracer = tracer
        self._ended: deque[HandOver] = deque(maxlen=capacity)
        self._noted = 0  # so far: each hand-over has a number
        self._results: deque[tuple[int, int]] = deque()  # number and bytes, oldest first
        self._result_bytes = 0

    def note(self, jobs: Sequence[Job], fate: Fate, now: float) -> None:
        """Record that these jobs have just ended."""
        ended = [
            HandOver(
                job.message.id,
                job.key,
                job.settler.queue_name,
                job.pool_code,
                job.group,
                _shown(job.message.target),
                job.tracked_at,
                job.tries,
                now,
                fate,
                job.returned_for,
                job.error[:TEXT_KEPT_CHARACTERS],
                job.requests,
                job.received.parent,
                job.ending,
                job.failures,
                job.message.correlation_id,
                len(job.message.payload),
                job.return_reason,
            )
            for job in jobs
        ]
        self._ended += ended
        self._noted += len(ended)
        if any(map(_ending_of, jobs)):
            self._count_results(ended)
        if self._tracer is not None:
            for hand_over in ended:
                self._tracer.ended(hand_over)

    def _count_results(self, ended: Sequence[HandOver]) -> None:
        """Count new results, and forget the oldest until the others fit (P4)."""
        for number, hand_over in enumerate(ended, self._noted - len(ended)):
            if hand_over.ending is not None and hand_over.ending.result is not None:
                self._results.append((number, len(hand_over.ending.result)))
                self._result_bytes += len(hand_over.ending.result)
        first = self._noted - len(self._ended)
        while self._result_bytes > RESULT_BYTES:
            number, size = self._results.popleft()
            self._result_bytes -= size
            if number >= first:  # else its hand-over is forgotten already
                kept = self._ended[number - first]  # which readers may hold
                self._ended[number - first] = replace(kept, ending=_OMITTED)

    def of_message(self, message_id: str) -> Sequence[HandOver]:
        """Return the hand-overs of one message, the oldest first."""
        return [hand_over for hand_over in self._ended if hand_over.message_id == message_id]

    def latest_first(self) -> Iterator[HandOver]:
        return reversed(self._ended)

    def __len__(self) -> int:
        return len(self._ended)


@lru_cache(maxsize=10_000)  # targets repeat
def _shown(target: str) -> str:
    # Masked before it is cut: half of a password looks like a port.
    return mask_urls(target)[:TEXT_KEPT_CHARACTERS]
