"""Which hand-overs of one consumer are ours. The server takes any, however old: we must not.

An acknowledgement is addressed by consumer and stream sequence alone, so that the server lets the
hand-over before last settle the last one, on whatever connection. It is here that a stale one is
found out.
"""

from collections.abc import Sequence

from msgspec import Struct

from router.brokers.comebacks import Comebacks


class Lease(Struct, eq=False):
    """One hand-over, and the handle to settle it: equal to no other one."""

    sequence: int  # in the stream
    reply: str  # the subject that settles it
    body: bytes
    until: float  # loop time; changed only by its holdings


class Holdings:
    """What one consumer has handed to this process, over all connections, and what we know of it.

    A lease is good on any connection, but only for the stream that gave it: one that was deleted
    and made anew counts its messages from 1 again.
    """

    def __init__(self, stream_created: str) -> None:
        self.stream_created = stream_created
        self.comebacks = Comebacks()  # by sequence
        self._newest: dict[int, Lease] = {}
        self._next_sweep = 0.0

    def __len__(self) -> int:
        return len(self._newest)

    def take(self, sequence: int, reply: str, body: bytes, until: float) -> Lease:
        """A new hand-over: those before it are stale."""
        lease = self._newest[sequence] = Lease(sequence, reply, body, until)
        self.comebacks.came(sequence)
        return lease

    def has(self, lease: Lease, now: float) -> bool:
        return self._newest.get(lease.sequence) is lease and now < lease.until

    def prolong(self, lease: Lease, until: float) -> None:
        lease.until = until

    def finish(self, lease: Lease) -> None:
        """It is settled, or stale for another reason."""
        if self._newest.get(lease.sequence) is lease:
            del self._newest[lease.sequence]

    def give_back(self, lease: Lease, now: float, delay: float) -> None:
        if self._newest.get(lease.sequence) is not lease:
            return  # it has come back already
        self.finish(lease)
        self.comebacks.expect(lease.sequence, lease.body, now=now, delay=delay)

    def leases(self) -> Sequence[Lease]:
        return tuple(self._newest.values())

    def sweep(self, now: float, every: float) -> None:
        """Forget what was let go without a word, now and then."""
        if now >= self._next_sweep:
            self._next_sweep = now + every
            self._newest = {
                sequence: lease for sequence, lease in self._newest.items() if now < lease.until
            }
