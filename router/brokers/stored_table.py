"""A queue table of SQLite, wherever its database is, as a work queue wants it."""

import asyncio
import sqlite3
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Final, Protocol, TypeVar

from msgspec.structs import replace

from router.brokers.bell import Bell
from router.brokers.queue_table import QueueTable, TooMuch
from router.brokers.work_queue import Claim, Lease
from router.brokers.worker_locks import Recovery
from router.core.message import Tally
from router.ports import Depth, Publication

MANY: Final = 50  # messages at once, as many as a claim brings at most
LARGE: Final = 256 * 1024  # bytes of bodies at once

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]


class Store(Protocol):
    """A database that holds queue tables, and those who wait for it to change."""

    @property
    def incarnation(self) -> str:
        """Random: no other database has it. Known once something was run."""

    async def run(self, work: Work[T], *, is_large: bool = False) -> T:
        """Do it in a transaction of its own or of several. No end of a process can undo it then.

        What is large takes longer than everybody else should be kept waiting for.
        """

    async def sync(self) -> None:
        """On return, no power cut can undo either what was done before."""

    async def look(self, work: Work[T]) -> T:
        """Read only, beside what is being written."""

    def bell(self, queue: str) -> Bell:
        """Rung when a claim of that queue may find more than before."""

    async def wait(self, rung: asyncio.Event, seconds: float) -> None:
        """Until the bell rings, at most `seconds`; other processes' changes ring it too."""


class StoredTable:
    def __init__(self, store: Store, table: QueueTable, recovery: Recovery | None = None) -> None:
        """`recovery` is for workers that may die while this process lives."""
        self._store = store
        self._table = table
        self._recovery = recovery
        self.bell = store.bell(table.name)
        self.holds_groups = table.holds_groups
        self.wait = store.wait
        self._brings_much = False  # the latest claim did, so the next one may

    @property
    def incarnation(self) -> str:
        return self._store.incarnation

    async def publish(self, items: Sequence[Publication]) -> Sequence[bool]:
        work = partial(self._table.publish, items=items)
        is_large = len(items) > MANY or sum(len(item.body) for item in items) > LARGE
        return await self._change(work, is_large=is_large)

    async def keep(self) -> None:
        await self._store.sync()

    async def claim(self, limit: int, lease: float) -> Claim:
        claim = await self._claim(limit, lease)
        if claim.messages or self._recovery is None:
            return claim
        if await self.recover():
            claim = await self._claim(limit, lease)
        return replace(claim, wait=self._recovery.patience(claim.wait))

    async def recover(self) -> bool:
        """Give back what dead workers hold (WQ-10). Was there anything?"""
        return self._recovery is not None and await self._recovery.run(self._bury)

    async def _bury(self, worker_ids: Collection[str]) -> None:
        work = partial(self._table.bury, worker_ids=worker_ids)
        await self._change(work, is_large=True)

    async def _claim(self, limit: int, lease: float) -> Claim:
        work = partial(self._table.claim, limit=limit, lease=lease)
        try:
            quick = work if self._brings_much else partial(work, most=LARGE)
            claim = await self._store.run(quick, is_large=self._brings_much)
        except TooMuch:
            claim = await self._store.run(work, is_large=True)
        found = claim.messages
        self._brings_much = bool(found) and len(found[0].body) * len(found) > LARGE
        return claim

    async def finish(self, leases: Sequence[Lease], error: str) -> Sequence[int]:
        work = partial(self._table.finish, leases=leases, error=error)
        if any(lease.lane for lease in leases):
            return await self._change(work)
        return await self._store.run(work)

    async def give_back(self, lease: Lease, delay: float, tally: Tally, error: str) -> bool:
        return await self._change(
            partial(self._table.give_back, lease=lease, delay=delay, tally=tally, error=error)
        )

    async def extend(self, leases: Sequence[Lease], seconds: float) -> Sequence[int]:
        return await self._store.run(partial(self._table.extend, leases=leases, seconds=seconds))

    async def depth(self) -> Depth:
        return await self._store.look(self._table.depth)

    async def _change(self, work: Work[T], *, is_large: bool = False) -> T:
        """Rings first: whoever waits for it asks now, comes next and shares its transaction."""
        self.bell.ring()
        return await self._store.run(work, is_large=is_large)
