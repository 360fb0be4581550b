"""Which hand-overs of one consumer are ours. The server takes any, however old: we must not.

An acknowledgement is addressed by consumer and stream sequence alone, so that the server lets the
hand-over before last settle the last one, on whatever connection. It is here that a stale one is
found out.
"""

import heapq
from collections.abc import Sequence

from msgspec import Struct


class Lease(Struct, eq=False):
    """One hand-over, and the handle to settle it: equal to no other one."""

    sequence: int  # in the stream
    reply: str  # the subject that settles it
    until: float  # loop time; changed only by its holdings


class Holdings:
    """What one consumer has handed to this process, over all connections, and what we know of it.

    A lease is good on any connection, but only for the stream that gave it: one that was deleted
    and made anew counts its messages from 1 again.
    """

    def __init__(self, stream_created: str) -> None:
        self.stream_created = stream_created
        self._newest: dict[int, Lease] = {}
        self._deferred: dict[int, float] = {}  # when what was given back comes again, loop time
        self._dues: list[tuple[float, int]] = []  # the same as a heap, and some that came since
        self._next_sweep = 0.0

    def __len__(self) -> int:
        return len(self._newest)

    def take(self, sequence: int, reply: str, until: float) -> Lease:
        """A new hand-over: those before it are stale."""
        lease = self._newest[sequence] = Lease(sequence, reply, until)
        self._deferred.pop(sequence, None)
        return lease

    def has(self, lease: Lease, now: float) -> bool:
        return self._newest.get(lease.sequence) is lease and now < lease.until

    def prolong(self, lease: Lease, until: float) -> None:
        lease.until = until

    def finish(self, lease: Lease) -> None:
        """It is settled, or stale for another reason."""
        if self._newest.get(lease.sequence) is lease:
            del self._newest[lease.sequence]

    def give_back(self, lease: Lease, due: float) -> None:
        if self._newest.get(lease.sequence) is not lease:
            return  # it has come back already
        self.finish(lease)
        self._deferred[lease.sequence] = due
        heapq.heappush(self._dues, (due, lease.sequence))

    def next_due(self, after: float) -> float | None:
        """When the next one comes back of those that we gave back. What is overdue others have."""
        while self._dues:
            due, sequence = self._dues[0]
            is_awaited = self._deferred.get(sequence) == due
            if is_awaited and due >= after:
                return due
            heapq.heappop(self._dues)
            if is_awaited:
                del self._deferred[sequence]
        return None

    def leases(self) -> Sequence[Lease]:
        return tuple(self._newest.values())

    def sweep(self, now: float, every: float) -> None:
        """Forget what was let go without a word, now and then."""
        if now >= self._next_sweep:
            self._next_sweep = now + every
            self._newest = {
                sequence: lease for sequence, lease in self._newest.items() if now < lease.until
            }
            self.next_due(now - every)
