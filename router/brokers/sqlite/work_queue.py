"""One queue of a SQLite database, on disk or in memory: both ends of it."""

import asyncio
import sqlite3
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Final, Protocol, cast

from router.brokers.sqlite.connection import T, Work
from router.brokers.sqlite.operations import (
    PRUNED_AT_ONCE,
    Claimed,
    QueueOperations,
    read_bodies,
)
from router.brokers.work_queue import ClaimedBatch, ClaimPoll, Lease, stale
from router.brokers.worker_locks import Recovery
from router.core.config import QueueConfig
from router.core.message import Handle, ReceivedMessage, Tally
from router.ports import Depth, Finish, Publication, StaleLease, Traits, Unsettled
from router.signal import Signal

MANY_MESSAGES: Final = 50  # as many as a claim brings at most
LARGE_BYTES: Final = 256 * 1024  # bodies that hold the event loop up
# Finished messages are forgotten after this many, twice as fast as they come: to look for old ones
# takes 15 µs, too much for each ACK of a single message.
PRUNE_EVERY_MESSAGES: Final = PRUNED_AT_ONCE // 2


class Database(Protocol):
    """A database with work queues in it, and those who wait for it to change."""

    @property
    def incarnation(self) -> str:
        """Random: no other database has it. Known once something was run."""

    async def run(self, work: Work[T], *, is_large: bool = False) -> T:
        """Do it in a transaction, which others may share. No end of a process can undo it then.

        Large work takes longer than the event loop should be kept waiting for.
        """

    async def sync(self) -> None:
        """Wait until no power cut can undo what was done before."""

    async def look(self, work: Work[T]) -> T:
        """Read only, beside what is being written. It may take long."""

    def signal(self, queue: str) -> Signal:
        """Return what rings when a claim of that queue may find more than before."""

    async def wait(self, rung: asyncio.Event, seconds: float) -> None:
        """Wait for the signal, at most `seconds`. Other processes' changes ring it too."""


# The queue of that configuration, if it is in the same database.
Sinks = Callable[[QueueConfig], QueueOperations | None]


def no_sinks(_: QueueConfig) -> None:
    return None


class WorkQueue:
    """One connection to one queue. Its leases are good on any other connection as well."""

    def __init__(
        self,
        database: Database,
        operations: QueueOperations,
        lease: float | None = None,
        recovery: Recovery | None = None,
        sinks: Sinks = no_sinks,
    ) -> None:
        """`recovery` is for workers that may die while this process lives.

        `sinks` finds the queues of the same database.
        """
        self._database = database
        self._operations = operations
        self._recovery = recovery
        self._finished = 0  # messages, since the last pruning
        self._signal = database.signal(operations.queue)
        self._poll = ClaimPoll(self.claim, self._signal, database.wait)
        self.lease_seconds = lease
        self.holds_groups = operations.holds_groups
        self._sinks = sinks
        self.traits = Traits(ordered_here=not operations.holds_groups, finisher=self)
        self.receive = self._poll.receive
        self.interrupt = self._poll.interrupt

    async def publish(self, items: Sequence[Publication]) -> Sequence[bool]:
        """Answer when the disk has them. The first may be delivered by then."""
        is_large = len(items) > MANY_MESSAGES or sum(len(item.body) for item in items) > LARGE_BYTES
        work = partial(self._operations.publish, items=items)
        added = await self._change(work, is_large=is_large)
        await self._database.sync()
        return added

    async def claim(self, limit: int) -> ClaimedBatch:
        """Take the next messages, if there are any now."""
        claim = await self._claim(limit)
        if claim.messages or self._recovery is None:
            return claim
        if await self.recover():
            claim = await self._claim(limit)
        return ClaimedBatch(claim.messages, self._recovery.patience(claim.wait))

    async def recover(self) -> bool:
        """Give back what dead workers hold (WQ-10). Return whether there were any."""
        return self._recovery is not None and await self._recovery.run(self.end_leases)

    async def end_leases(self, worker_ids: Collection[str]) -> None:
        await self._change(
            partial(self._operations.end_leases, worker_ids=worker_ids), is_large=True
        )

    async def ack(self, handles: Sequence[Handle], *, error: str = "") -> Sequence[Unsettled]:
        leases = cast("Sequence[Lease]", handles)
        work = partial(self._operations.finish, leases=leases, error=error)
        is_large = sum(lease.size for lease in leases) > LARGE_BYTES
        if any(lease.is_grouped or lease.in_batch for lease in leases):
            self._signal.ring()
        lost = await self._database.run(work, is_large=is_large)
        await self._prune_after(len(leases))
        return stale(leases, lost)

    def takes(self, queue: QueueConfig) -> bool:
        return self._sinks(queue) is not None

    async def finish(self, items: Sequence[Finish]) -> Sequence[Unsettled]:
        leases = [cast("Lease", item.handle) for item in items]
        outgoing = []
        for position, item in enumerate(items):
            for one in item.outgoing:
                queue = self._sinks(one.queue)
                if queue is None:
                    raise ValueError(f"{one.queue.name} is not in this database")
                outgoing.append((position, queue, one.publication))
        work = partial(self._operations.end, items=items, outgoing=outgoing)
        size = sum(lease.size for lease in leases) + sum(len(one.body) for *_, one in outgoing)
        is_large = size > LARGE_BYTES or len(outgoing) > MANY_MESSAGES
        for name in {queue.queue for _, queue, _ in outgoing}:
            self._database.signal(name).ring()
        if any(lease.is_grouped or lease.in_batch for lease in leases):
            self._signal.ring()
        lost = await self._database.run(work, is_large=is_large)
        await self._prune_after(len(leases))
        return stale(leases, lost)

    async def nack(self, handle: Handle, delay: float, tally: Tally, *, error: str = "") -> None:
        lease = cast("Lease", handle)
        work = partial(self._operations.nack, lease=lease, delay=delay, tally=tally, error=error)
        if not await self._change(work):
            raise StaleLease(f"message {lease.id} is not ours any more")

    async def extend(self, handles: Sequence[Handle], seconds: float) -> Sequence[Unsettled]:
        leases = cast("Sequence[Lease]", handles)
        work = partial(self._operations.extend, leases=leases, seconds=seconds)
        return stale(leases, await self._database.run(work))

    async def depth(self) -> Depth:
        return await self._database.look(self._operations.depth)

    async def _prune_after(self, finished: int) -> None:
        self._finished += finished
        if self._finished >= PRUNE_EVERY_MESSAGES:
            self._finished = 0
            await self._database.run(self._operations.prune, is_large=True)

    async def _change(self, work: Work[T], *, is_large: bool = False) -> T:
        """Ring first: receivers that wait ask now, come next and share the transaction."""
        self._signal.ring()
        return await self._database.run(work, is_large=is_large)

    async def _claim(self, limit: int) -> ClaimedBatch:
        lease = float("inf") if self.lease_seconds is None else self.lease_seconds
        lease_until = asyncio.get_running_loop().time() + lease

        def work(db: sqlite3.Connection) -> tuple[Claimed, Mapping[int, bytes] | None]:
            claimed = self._operations.claim(db, limit, lease)
            is_large = sum(message.size for message in claimed.messages) > LARGE_BYTES
            return claimed, None if is_large else read_bodies(db, claimed.messages)

        claimed, bodies = await self._database.run(work)
        if bodies is None:
            bodies = await self._database.look(partial(read_bodies, chosen=claimed.messages))
        incarnation = self._database.incarnation
        messages = [
            ReceivedMessage(
                bodies[message.id],
                Lease(
                    message.id, claimed.token, message.is_grouped, message.size, message.in_batch
                ),
                f"{incarnation}-{message.id}",
                message.deliveries + 1,
                None if self.lease_seconds is None else lease_until,
                Tally(message.failures, message.requests),
            )
            for message in claimed.messages
            if message.id in bodies
        ]
        return ClaimedBatch(messages, claimed.wait)
