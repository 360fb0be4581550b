"""Both ends of a work queue: a queue table, wherever it is kept (SPEC §12)."""

import asyncio
import sqlite3
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Protocol, TypeVar, cast

from router.brokers.bell import Bell
from router.brokers.queue_table import Claimed, Lease, QueueTable
from router.core.message import Delivery, Handle, Tally
from router.ports import Depth, Publication, StaleLease, Unsettled

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]

LONG_POLL: Final = 20.0
DEFAULT_LEASE: Final = 30.0
SHORTEST_WAIT: Final = 0.001  # two clocks never agree to the last bit: no spinning in between


class Store(Protocol):
    """A database that holds queue tables, and those who wait for it to change."""

    async def run(self, work: Work[T]) -> T:
        """Do it in a transaction of its own or of several; durable on return."""

    async def look(self, work: Work[T]) -> T:
        """Read only, beside what is being written."""

    def bell(self, queue: str) -> Bell:
        """Rung when a claim of that queue may find more than before."""

    async def wait(self, rung: asyncio.Event, seconds: float) -> None:
        """Until the bell rings, at most `seconds`; other processes' changes ring it too."""


class WorkQueuePublisher:
    def __init__(self, store: Store, table: QueueTable) -> None:
        self._store = store
        self._table = table
        self._bell = store.bell(table.name)

    async def publish(self, items: Sequence[Publication]) -> Sequence[bool]:
        added = await self._store.run(partial(self._table.publish, items=items))
        if any(added):
            self._bell.ring()
        return added


class WorkQueueBroker:
    """One connection. Its leases are good on any other one as well."""

    def __init__(self, store: Store, table: QueueTable, lease: float | None) -> None:
        self._store = store
        self._table = table
        self._lease = lease
        self._bell = store.bell(table.name)
        self._interrupted = False

    @property
    def holds_groups(self) -> bool:
        return self._table.holds_groups

    @property
    def lease_seconds(self) -> float | None:
        return self._lease

    async def receive(self, limit: int) -> Sequence[Delivery]:
        now = asyncio.get_running_loop().time
        give_up = now() + LONG_POLL
        while not self._interrupted:
            rung = self._bell.listen()
            lease_until = None if self._lease is None else now() + self._lease
            claim = await self._store.run(
                partial(self._table.claim, limit=limit, lease=self._lease or float("inf"))
            )
            if claim.messages:
                return [_delivery(claimed, lease_until) for claimed in claim.messages]
            patience = give_up - now()
            if patience <= 0:
                break
            await self._store.wait(rung, max(min(claim.wait, patience), SHORTEST_WAIT))
        return ()

    def interrupt(self) -> None:
        self._interrupted = True
        self._bell.ring()

    async def ack(self, handles: Sequence[Handle], *, error: str = "") -> Sequence[Unsettled]:
        leases = cast("Sequence[Lease]", handles)
        lost = await self._store.run(partial(self._table.finish, leases=leases, error=error))
        if any(lease.grouped for lease in leases):
            self._bell.ring()
        return [_stale(leases[position]) for position in lost]

    async def nack(self, handle: Handle, delay: float, tally: Tally, *, error: str = "") -> None:
        lease = cast("Lease", handle)
        ours = await self._store.run(
            partial(self._table.give_back, lease=lease, delay=delay, tally=tally, error=error)
        )
        if not ours:
            raise StaleLease(f"message {lease.id} is not ours any more")
        self._bell.ring()

    async def extend(self, handles: Sequence[Handle], seconds: float) -> Sequence[Unsettled]:
        leases = cast("Sequence[Lease]", handles)
        lost = await self._store.run(partial(self._table.extend, leases=leases, seconds=seconds))
        return [_stale(leases[position]) for position in lost]

    async def depth(self) -> Depth | None:
        return await self._store.look(self._table.depth)


def _delivery(claimed: Claimed, lease_until: float | None) -> Delivery:
    return Delivery(
        claimed.body,
        claimed.lease,
        broker_id=str(claimed.lease.id),
        count=claimed.count,
        lease_until=lease_until,
        tally=claimed.tally,
    )


def _stale(lease: Lease) -> Unsettled:
    return Unsettled(lease, "the lease was lost", stale=True)
