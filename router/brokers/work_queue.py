"""Both ends of a work queue: a queue table, whichever database keeps it (SPEC §12)."""

import asyncio
from collections.abc import Sequence
from typing import Final, Protocol, cast

from msgspec import Struct

from router.brokers.bell import Bell
from router.core.message import Delivery, Handle, Tally
from router.ports import Depth, Publication, StaleLease, Traits, Unsettled

LONG_POLL: Final = 20.0
DEFAULT_LEASE: Final = 30.0
MAX_ERROR: Final = 1024
SHORTEST_WAIT: Final = 0.001  # two clocks never agree to the last bit: no spinning in between


class Lease(Struct, frozen=True, array_like=True, gc=False):
    """The claim to settle one hand-over. The table knows it by the first two."""

    id: int
    token: int
    lane: int  # of its group, whose next one its end may let go; 0: none


class Claimed(Struct, frozen=True, gc=False):
    lease: Lease
    count: int
    tally: Tally
    body: bytes


class Claim(Struct, frozen=True):
    messages: Sequence[Claimed]  # in claim order
    wait: float  # nothing found: seconds until time alone may change that


class Table(Protocol):
    """One queue of a database, as one worker sees it.

    Whatever is done is there to stay, unless the power is cut. `keep` sees to that for what is
    published; the rest is only done again.
    """

    @property
    def bell(self) -> Bell:
        """Rung by everything here that lets a claim find more than before."""

    @property
    def holds_groups(self) -> bool: ...

    @property
    def incarnation(self) -> str:
        """Names the database among all that ever were: row ids are unique within it (ID-1)."""

    async def publish(self, items: Sequence[Publication]) -> Sequence[bool]:
        """Put them in; False for one that is in, or succeeded within the dedup window (WQ-1)."""

    async def keep(self) -> None:
        """On return, no power cut can undo what was published before."""

    async def claim(self, limit: int, lease: float) -> Claim:
        """Take the next messages (WQ-2), after ending what is due to end."""

    async def finish(self, leases: Sequence[Lease], error: str) -> Sequence[int]:
        """Remove them; answer the positions of those that are not ours to remove."""

    async def give_back(self, lease: Lease, delay: float, tally: Tally, error: str) -> bool:
        """Make it claimable again after `delay`; False: it is not ours any more."""

    async def extend(self, leases: Sequence[Lease], seconds: float) -> Sequence[int]:
        """Keep them for longer; answer the positions of those that are lost."""

    async def depth(self) -> Depth: ...

    async def wait(self, rung: asyncio.Event, seconds: float) -> None:
        """Until the bell rings, at most `seconds`; other processes' changes ring it too."""


class WorkQueuePublisher:
    def __init__(self, table: Table) -> None:
        self._table = table

    async def publish(self, items: Sequence[Publication]) -> Sequence[bool]:
        """They are kept for good on return; the first may be delivered by then."""
        added = await self._table.publish(items)
        await self._table.keep()
        return added


class WorkQueueBroker:
    """One connection. Its leases are good on any other one as well."""

    def __init__(self, table: Table, lease: float | None) -> None:
        self._table = table
        self._lease = lease
        self._interrupted = False

    @property
    def holds_groups(self) -> bool:
        return self._table.holds_groups

    @property
    def lease_seconds(self) -> float | None:
        return self._lease

    @property
    def traits(self) -> Traits:
        return Traits(ordered_here=not self._table.holds_groups)

    async def receive(self, limit: int) -> Sequence[Delivery]:
        now = asyncio.get_running_loop().time
        give_up = now() + LONG_POLL
        while not self._interrupted:
            rung = self._table.bell.listen()
            lease_until = None if self._lease is None else now() + self._lease
            claim = await self._table.claim(limit, self._lease or float("inf"))
            if claim.messages:
                return self._deliveries(claim.messages, lease_until)
            patience = give_up - now()
            if patience <= 0:
                break
            await self._table.wait(rung, max(min(claim.wait, patience), SHORTEST_WAIT))
        return ()

    def _deliveries(
        self, messages: Sequence[Claimed], lease_until: float | None
    ) -> Sequence[Delivery]:
        incarnation = self._table.incarnation
        return [
            Delivery(
                claimed.body,
                claimed.lease,
                f"{incarnation}-{claimed.lease.id}",
                claimed.count,
                lease_until,
                claimed.tally,
            )
            for claimed in messages
        ]

    def interrupt(self) -> None:
        self._interrupted = True
        self._table.bell.ring()

    async def ack(self, handles: Sequence[Handle], *, error: str = "") -> Sequence[Unsettled]:
        leases = cast("Sequence[Lease]", handles)
        lost = await self._table.finish(leases, error)
        return [_stale(leases[position]) for position in lost]

    async def nack(self, handle: Handle, delay: float, tally: Tally, *, error: str = "") -> None:
        lease = cast("Lease", handle)
        if not await self._table.give_back(lease, delay, tally, error):
            raise StaleLease(f"message {lease.id} is not ours any more")

    async def extend(self, handles: Sequence[Handle], seconds: float) -> Sequence[Unsettled]:
        leases = cast("Sequence[Lease]", handles)
        lost = await self._table.extend(leases, seconds)
        return [_stale(leases[position]) for position in lost]

    async def depth(self) -> Depth | None:
        return await self._table.depth()


def _stale(lease: Lease) -> Unsettled:
    return Unsettled(lease, "the lease was lost", stale=True)
