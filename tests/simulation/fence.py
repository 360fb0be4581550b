"""Watches hand-overs of a work queue: a lease that was lost settles and starts nothing (WQ-3)."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager

from router.core.config import QueueConfig
from router.core.message import Handle, ReceivedMessage
from router.ports import Broker, Finish, MessageStore, Nack, Publisher, Unsettled
from tests.simulation.loop import Process
from tests.simulation.networked import Opener
from tests.simulation.oracle import Oracle
from tests.support.passing import PassingBroker

Settled = Callable[[Sequence[Unsettled]], None]


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

    def handed_over(self, messages: Sequence[ReceivedMessage], process: Process) -> None:
        self._oracle.claimed([received.body for received in messages])
        for received in messages:
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

    @contextmanager
    def watching(self, handles: Sequence[Handle], verb: str) -> Iterator[Settled]:
        """Those that were lost before the call began must be refused."""
        lost = [each for each in handles if self._newest.get(self._ids.get(each, "")) != each]

        def settled(refused: Sequence[Unsettled]) -> None:
            problems = {each.handle for each in refused}
            for handle in lost:
                if handle not in problems:
                    text = f"a lost lease could still {verb} row {self._ids.get(handle)}"
                    self._oracle.violate("WQ-3", text)

        yield settled


class _Watched:
    def __init__(self, fence: Fence, brokers: Opener, process: Process) -> None:
        self._fence = fence
        self._brokers = brokers
        self._process = process

    @asynccontextmanager
    async def open_queue(self, queue: QueueConfig) -> AsyncIterator[Broker]:
        async with self._brokers.open_queue(queue) as broker:
            yield _WatchedBroker(self._fence, broker, self._process)

    def open_publisher(self, queue: QueueConfig) -> AbstractAsyncContextManager[Publisher]:
        return self._brokers.open_publisher(queue)

    def open_store(self, queue: QueueConfig) -> AbstractAsyncContextManager[MessageStore] | None:
        return self._brokers.open_store(queue)


class _WatchedBroker(PassingBroker):
    def __init__(self, fence: Fence, broker: Broker, process: Process) -> None:
        super().__init__(broker)
        self._fence = fence
        self._process = process

    async def receive(self, limit: int) -> Sequence[ReceivedMessage]:
        messages = await super().receive(limit)
        self._fence.handed_over(messages, self._process)
        return messages

    async def ack(self, handles: Sequence[Handle], *, error: str = "") -> Sequence[Unsettled]:
        await self._fence.settling(self._process)
        with self._fence.watching(handles, "remove") as settled:
            settled(refused := await super().ack(handles, error=error))
        return refused

    async def finish(self, items: Sequence[Finish]) -> Sequence[Unsettled]:
        await self._fence.settling(self._process)
        with self._fence.watching([item.handle for item in items], "end") as settled:
            settled(refused := await super().finish(items))
        return refused

    async def nack(self, items: Sequence[Nack]) -> Sequence[Unsettled]:
        await self._fence.settling(self._process)
        with self._fence.watching([item.handle for item in items], "nack") as settled:
            settled(refused := await super().nack(items))
        return refused

    async def extend(self, handles: Sequence[Handle], seconds: float) -> Sequence[Unsettled]:
        with self._fence.watching(handles, "extend") as settled:
            settled(refused := await super().extend(handles, seconds))
        return refused
