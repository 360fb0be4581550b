"""Watches hand-overs and settles, for the story of a world and for lost leases (WQ-3)."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager

from router.brokers.sqlite.queue_table import FileLease
from router.core.config import QueueConfig
from router.core.message import Handle, ReceivedMessage
from router.ports import Broker, Finish, MessageLister, MessageStore, Nack, Publisher, Unsettled
from tests.simulation.loop import Process
from tests.simulation.networked import Opener
from tests.simulation.oracle import Oracle
from tests.support.passing import PassingBroker

Settled = Callable[[Sequence[Unsettled]], None]


class Fence:
    """Who was handed each message last, over all routers.

    A work queue tells of each claim as it is made: the process that made it may stand still before
    it gets the messages, and another one may claim them meanwhile.
    """

    def __init__(self, oracle: Oracle, *, stalls_when_stored: bool = False) -> None:
        """`stalls_when_stored`: not when it settles, but when the order store has something."""
        self._oracle = oracle
        self._stalls_when_stored = stalls_when_stored
        self._newest: dict[int, FileLease] = {}  # by row
        # Of their bodies, by connection: most brokers count hand-overs for each of them. None: any.
        self._numbers: dict[tuple[Broker | None, Handle], str] = {}
        self.stalls: dict[
            Process, asyncio.Future[None]
        ] = {}  # who is to stand still when it settles

    def around(self, brokers: Opener, process: Process) -> Opener:
        return _Watched(self, brokers, process)

    def claimed(self, leases: Sequence[FileLease]) -> None:
        for lease in leases:
            self._newest[lease.id] = lease

    def handed_over(
        self, messages: Sequence[ReceivedMessage], broker: Broker, queue: str, process: Process
    ) -> None:
        oracle = self._oracle
        if any(isinstance(received.handle, FileLease) for received in messages):
            oracle.claimed([received.body for received in messages])
        for received in messages:
            body, handle = oracle.find(received.body), received.handle
            number = "?" if body is None else str(body.number)
            self._numbers[broker, handle] = self._numbers[None, handle] = number
            if isinstance(handle, FileLease) and self._newest.get(handle.id) == handle:
                oracle.handed_over(received.body, process)
        if messages:
            numbers = self._named([received.handle for received in messages], broker)
            oracle.note(process.name, "is handed", numbers, "from", queue)

    async def settling(self, process: Process, *, has_stored: bool = False) -> None:
        """What is decided by now is carried out when the process goes on."""
        if has_stored is not self._stalls_when_stored:
            return
        stall = self.stalls.pop(process, None)
        if stall is not None and not stall.done() and not process.is_frozen:
            process.is_frozen = True
            stall.set_result(None)
            await asyncio.sleep(0)

    @contextmanager
    def watching(
        self, handles: Sequence[Handle], verb: str, broker: Broker, process: Process
    ) -> Iterator[Settled]:
        """Those that were lost before the call began must be refused."""
        oracle = self._oracle
        oracle.note(process.name, "does", verb, self._named(handles, broker))
        lost = [
            each
            for each in handles
            if isinstance(each, FileLease) and self._newest.get(each.id) != each
        ]

        def settled(refused: Sequence[Unsettled]) -> None:
            problems = [each.handle for each in refused]
            if problems:
                oracle.note(process.name, "could not", verb, self._named(problems, broker))
            for lease in lost:
                if lease not in problems:
                    oracle.violate("WQ-3", f"a lost lease could still {verb} row {lease.id}")

        yield settled

    def returning(self, handles: Iterable[Handle], broker: Broker, process: Process) -> None:
        """Their deliveries have ended."""
        for handle in handles:
            number = self._number(handle, broker)
            if number != "?":
                self._oracle.returned(process, int(number))

    def _named(self, handles: Iterable[Handle], broker: Broker) -> str:
        return ", ".join(self._number(handle, broker) for handle in handles)

    def _number(self, handle: Handle, broker: Broker) -> str:
        found = self._numbers.get((broker, handle))
        return self._numbers.get((None, handle), "?") if found is None else found


class _Watched:
    def __init__(self, fence: Fence, brokers: Opener, process: Process) -> None:
        self._fence = fence
        self._brokers = brokers
        self._process = process

    @asynccontextmanager
    async def open_queue(self, queue: QueueConfig) -> AsyncIterator[Broker]:
        async with self._brokers.open_queue(queue) as broker:
            yield _WatchedBroker(self._fence, broker, queue.name, self._process)

    def open_publisher(self, queue: QueueConfig) -> AbstractAsyncContextManager[Publisher]:
        return self._brokers.open_publisher(queue)

    def open_store(self, queue: QueueConfig) -> AbstractAsyncContextManager[MessageStore] | None:
        return self._brokers.open_store(queue)

    def open_lister(self, queue: QueueConfig) -> AbstractAsyncContextManager[MessageLister] | None:
        return self._brokers.open_lister(queue)


class _WatchedBroker(PassingBroker):
    def __init__(self, fence: Fence, broker: Broker, queue: str, process: Process) -> None:
        super().__init__(broker)
        self._fence = fence
        self._queue = queue
        self._process = process

    async def receive(self, limit: int) -> Sequence[ReceivedMessage]:
        messages = await super().receive(limit)
        self._fence.handed_over(messages, self, self._queue, self._process)
        return messages

    async def ack(self, handles: Sequence[Handle], *, error: str = "") -> Sequence[Unsettled]:
        await self._fence.settling(self._process)
        with self._fence.watching(handles, "remove", self, self._process) as settled:
            settled(refused := await super().ack(handles, error=error))
        return refused

    async def finish(self, items: Sequence[Finish]) -> Sequence[Unsettled]:
        await self._fence.settling(self._process)
        handles = [item.handle for item in items]
        with self._fence.watching(handles, "end", self, self._process) as settled:
            settled(refused := await super().finish(items))
        return refused

    async def nack(self, items: Sequence[Nack]) -> Sequence[Unsettled]:
        await self._fence.settling(self._process)
        handles = [item.handle for item in items]
        self._fence.returning(handles, self, self._process)
        verb = f"nack (for {', '.join(f'{item.delay:g}' for item in items)} s)"
        with self._fence.watching(handles, verb, self, self._process) as settled:
            settled(refused := await super().nack(items))
        return refused

    async def extend(self, handles: Sequence[Handle], seconds: float) -> Sequence[Unsettled]:
        verb = f"extend (by {seconds:g} s)"
        with self._fence.watching(handles, verb, self, self._process) as settled:
            settled(refused := await super().extend(handles, seconds))
        return refused
