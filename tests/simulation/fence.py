"""Watches hand-overs of a work queue: a lease that was lost settles and starts nothing (WQ-3)."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from sqlite3 import Connection
from typing import Any, cast

from msgspec.structs import replace

from router.brokers.sqlite.operations import Claimed, QueueOperations
from router.brokers.work_queue import Lease
from router.core.config import QueueConfig
from router.core.message import Handle, ReceivedMessage, Tally
from router.ports import Broker, Depth, Finish, MessageStore, Publisher, Traits, Unsettled
from tests.simulation.loop import Process
from tests.simulation.networked import Opener
from tests.simulation.oracle import Oracle


class Fence:
    """Which lease of each message is the newest, over all routers."""

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self._newest: dict[int, int] = {}  # tokens, by row
        self.stalls: dict[
            Process, asyncio.Future[None]
        ] = {}  # who is to stand still when it settles

    def around(self, brokers: Opener, process: Process) -> Opener:
        return _Watched(self, brokers, process)

    def clear(self) -> None:
        """Rows are counted from one again."""
        self._newest.clear()

    def handed_over(self, deliveries: Sequence[ReceivedMessage], process: Process) -> None:
        self._oracle.claimed([received.body for received in deliveries])
        for received in deliveries:
            self._oracle.handed_over(received.body, process)

    async def settling(self, process: Process) -> None:
        """What is decided by now is carried out when the process goes on."""
        stall = self.stalls.pop(process, None)
        if stall is not None and not stall.done() and not process.is_frozen:
            process.is_frozen = True
            stall.set_result(None)
            await asyncio.sleep(0)

    def watched(self) -> Sequence[tuple[type, str, Callable[..., Any]]]:
        """What to put in the place of the table's operations, to see what each of them does."""
        table = QueueOperations
        claim, nack = table.claim, table.nack
        finish, end, extend = table.finish, table.end, table.extend

        def claims(table: QueueOperations, *asked: Any, **named: Any) -> Claimed:
            claimed = claim(table, *asked, **named)
            self._newest |= {message.id: claimed.token for message in claimed.messages}
            return claimed

        def nacks(table: QueueOperations, db: Connection, lease: Lease, **named: Any) -> bool:
            is_ours = nack(table, db, lease, **named)
            if is_ours:
                self._settled(lease, "give back")
            return is_ours

        def finishes(
            table: QueueOperations, db: Connection, leases: Sequence[Lease], **named: Any
        ) -> Sequence[int]:
            return self._all_settled("remove", leases, finish(table, db, leases, **named))

        def ends(
            table: QueueOperations, db: Connection, items: Sequence[Finish], **named: Any
        ) -> Sequence[int]:
            leases = [cast("Lease", item.handle) for item in items]
            return self._all_settled("end", leases, end(table, db, items, **named))

        def extends(
            table: QueueOperations, db: Connection, leases: Sequence[Lease], **named: Any
        ) -> Sequence[int]:
            return self._all_settled("extend", leases, extend(table, db, leases, **named))

        made: dict[str, Callable[..., Any]] = {
            "claim": claims,
            "nack": nacks,
            "finish": finishes,
            "end": ends,
            "extend": extends,
        }
        return [(table, name, change) for name, change in made.items()]

    def _all_settled(self, how: str, leases: Sequence[Lease], lost: Sequence[int]) -> Sequence[int]:
        for position, lease in enumerate(leases):
            if position not in lost:
                self._settled(lease, how)
        return lost

    def _settled(self, lease: Lease, how: str) -> None:
        if self._newest.get(lease.id, lease.token) != lease.token:
            self._oracle.violate("WQ-3", f"a lost lease could still {how} row {lease.id}")


class _Watched:
    def __init__(self, fence: Fence, brokers: Opener, process: Process) -> None:
        self._fence = fence
        self._brokers = brokers
        self._process = process

    @asynccontextmanager
    async def open_queue(self, queue: QueueConfig) -> AsyncIterator[Broker]:
        async with self._brokers.open_queue(queue) as broker:
            yield _WatchedBroker(self._fence, broker, self._process)

    def open_publisher(self, queue: QueueConfig) -> AbstractAsyncContextManager[Publisher] | None:
        return self._brokers.open_publisher(queue)

    def open_store(self, queue: QueueConfig) -> AbstractAsyncContextManager[MessageStore] | None:
        return self._brokers.open_store(queue)


class _WatchedBroker:
    def __init__(self, fence: Fence, broker: Broker, process: Process) -> None:
        self._fence = fence
        self._broker = broker
        self._process = process

    @property
    def holds_groups(self) -> bool:
        return self._broker.holds_groups

    @property
    def lease_seconds(self) -> float | None:
        return self._broker.lease_seconds

    @property
    def traits(self) -> Traits:
        return replace(self._broker.traits, finisher=self)

    def takes(self, queue: QueueConfig) -> bool:
        finisher = self._broker.traits.finisher
        return finisher is not None and finisher.takes(queue)

    async def finish(self, items: Sequence[Finish]) -> Sequence[Unsettled]:
        finisher = self._broker.traits.finisher
        assert finisher is not None
        await self._fence.settling(self._process)
        return await finisher.finish(items)

    def interrupt(self) -> None:
        self._broker.interrupt()

    async def receive(self, limit: int) -> Sequence[ReceivedMessage]:
        deliveries = await self._broker.receive(limit)
        self._fence.handed_over(deliveries, self._process)
        return deliveries

    async def ack(self, handles: Sequence[Handle], *, error: str = "") -> Sequence[Unsettled]:
        await self._fence.settling(self._process)
        return await self._broker.ack(handles, error=error)

    async def nack(self, handle: Handle, delay: float, tally: Tally, *, error: str = "") -> None:
        await self._fence.settling(self._process)
        await self._broker.nack(handle, delay, tally, error=error)

    async def extend(self, handles: Sequence[Handle], seconds: float) -> Sequence[Unsettled]:
        return await self._broker.extend(handles, seconds)

    async def depth(self) -> Depth | None:
        return await self._broker.depth()
