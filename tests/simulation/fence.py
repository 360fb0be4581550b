"""Watches hand-overs of a work queue: a lease that was lost settles and starts nothing (WQ-3)."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from msgspec.structs import replace

from router.core.config import QueueConfig
from router.core.message import Handle, ReceivedMessage, Tally
from router.ports import Broker, Depth, Finish, MessageStore, Publisher, Traits, Unsettled
from tests.simulation.loop import Process
from tests.simulation.networked import Opener
from tests.simulation.oracle import Oracle


class Fence:
    """Who was handed each message last, over all routers."""

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self._newest: dict[str, Handle] = {}  # by the broker's id
        self._ids: dict[Handle, str] = {}
        self.stalls: dict[
            Process, asyncio.Future[None]
        ] = {}  # who is to stand still when it settles

    def around(self, brokers: Opener, process: Process) -> Opener:
        return _Watched(self, brokers, process)

    def handed_over(self, deliveries: Sequence[ReceivedMessage], process: Process) -> None:
        for received in deliveries:
            key = f"{received.broker_id}"
            self._newest[key] = received.handle
            self._ids[received.handle] = key
            self._oracle.handed_over(received.body, process)

    async def settling(self, process: Process) -> None:
        """What is decided by now is carried out when the process goes on."""
        stall = self.stalls.pop(process, None)
        if stall is not None and not stall.done() and not process.is_frozen:
            process.is_frozen = True
            stall.set_result(None)
            await asyncio.sleep(0)

    def settled(self, handle: Handle, how: str) -> None:
        key = self._ids.get(handle)
        if key is not None and self._newest[key] != handle:
            self._oracle.violate("WQ-3", f"a lost lease could still {how} row {key}")


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
        refused = await finisher.finish(items)
        problems = {each.handle for each in refused}
        for item in items:
            if item.handle not in problems:
                self._fence.settled(item.handle, "end")
        return refused

    def interrupt(self) -> None:
        self._broker.interrupt()

    async def receive(self, limit: int) -> Sequence[ReceivedMessage]:
        deliveries = await self._broker.receive(limit)
        self._fence.handed_over(deliveries, self._process)
        return deliveries

    async def ack(self, handles: Sequence[Handle], *, error: str = "") -> Sequence[Unsettled]:
        await self._fence.settling(self._process)
        refused = await self._broker.ack(handles, error=error)
        problems = {each.handle for each in refused}
        for handle in handles:
            if handle not in problems:
                self._fence.settled(handle, "remove")
        return refused

    async def nack(self, handle: Handle, delay: float, tally: Tally, *, error: str = "") -> None:
        await self._fence.settling(self._process)
        await self._broker.nack(handle, delay, tally, error=error)
        self._fence.settled(handle, "give back")

    async def extend(self, handles: Sequence[Handle], seconds: float) -> Sequence[Unsettled]:
        refused = await self._broker.extend(handles, seconds)
        problems = {each.handle for each in refused}
        for handle in handles:
            if handle not in problems:
                self._fence.settled(handle, "extend")
        return refused

    async def depth(self) -> Depth | None:
        return await self._broker.depth()
