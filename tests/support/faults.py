"""Brokers that go wrong on purpose: one with a plug to pull, one that does what a test says."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field

from router.core.config import QueueConfig
from router.core.message import Handle, ReceivedMessage
from router.ports import (
    Broker,
    Brokers,
    Depth,
    Disconnected,
    Nack,
    Publisher,
    QueueRefused,
    Traits,
    Unsettled,
)
from tests.support.passing import PassingBroker, T
from tests.support.virtual_time import now


class Unpluggable:
    """Any brokers, with a plug: while it is out, every call fails, and receives end."""

    def __init__(self, brokers: Brokers) -> None:
        self.is_plugged = True
        self.opened: list[float] = []  # when someone tried to
        self._brokers = brokers
        self._open: list[_Plugged] = []

    def unplug(self) -> None:
        self.is_plugged = False
        for connection in self._open:
            connection.die()

    def plug_in(self) -> None:
        self.is_plugged = True

    @asynccontextmanager
    async def open_queue(self, queue: QueueConfig) -> AsyncIterator[Broker]:
        self.opened.append(now())
        if not self.is_plugged:
            raise Disconnected("unplugged")
        async with self._brokers.open_queue(queue) as broker:
            connection = _Plugged(broker)
            self._open.append(connection)
            try:
                yield connection
            finally:
                self._open.remove(connection)

    def open_publisher(self, queue: QueueConfig) -> AbstractAsyncContextManager[Publisher]:
        return self._brokers.open_publisher(queue)


class _Plugged(PassingBroker):
    """One connection; dead for good once the plug was out."""

    def __init__(self, broker: Broker) -> None:
        super().__init__(broker)
        self._is_dead = False

    def die(self) -> None:
        self._is_dead = True
        self.stop()

    async def carry(self, call: Callable[[], Awaitable[T]]) -> T:
        self._check()
        return await call()

    async def receive(self, limit: int) -> Sequence[ReceivedMessage]:
        messages = await super().receive(limit)
        self._check()
        return messages

    def _check(self) -> None:
        if self._is_dead:
            raise Disconnected("unplugged")


@dataclass
class ScriptedQueue:
    """A queue whose hand-overs a test makes by hand. It redelivers only if it is told to."""

    holds_groups: bool = True
    lease_seconds: float | None = None
    traits: Traits | None = None
    is_deaf: bool = False  # a receive never returns, whatever happens
    redelivers: bool = False  # what was returned comes again when its delay is over
    depth: Depth | None = None
    failing: dict[str, Exception] = field(default_factory=dict)  # by verb, until taken out
    takes: dict[str, float] = field(default_factory=dict)  # by verb, seconds
    unsettled: dict[Handle, Unsettled] = field(default_factory=dict)  # by ACKs and extensions
    not_returned: dict[Handle, Unsettled] = field(default_factory=dict)
    acked: list[tuple[float, Handle]] = field(default_factory=list)
    nacked: list[tuple[float, Handle, float]] = field(default_factory=list)  # when, what, delay
    extended: list[tuple[float, Handle]] = field(default_factory=list)
    calls: list[tuple[float, str, int]] = field(default_factory=list)  # when, verb, how many
    limits: list[int] = field(default_factory=list)
    ready: list[ReceivedMessage] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    out: dict[Handle, ReceivedMessage] = field(default_factory=dict)  # handed over, by handle

    def hand_over(self, *messages: ReceivedMessage) -> None:
        self.ready += messages
        self.changed.set()


class Scripted:
    """Opens scripted queues, by their names."""

    def __init__(self, **queues: ScriptedQueue) -> None:
        self.queues = queues
        self.opened: list[tuple[float, str]] = []

    @asynccontextmanager
    async def open_queue(self, queue: QueueConfig) -> AsyncIterator["_Connection"]:
        self.opened.append((now(), queue.name))
        connection = _Connection(self.queues[queue.name])
        await connection.do("open", 1)
        try:
            yield connection
        finally:
            await connection.do("close", 1)

    def open_publisher(self, queue: QueueConfig) -> AbstractAsyncContextManager[Publisher]:
        raise QueueRefused(f"nothing is published to {queue.name} here")


class _Connection:
    def __init__(self, queue: ScriptedQueue) -> None:
        self._queue = queue
        self._stopped = False

    @property
    def holds_groups(self) -> bool:
        return self._queue.holds_groups

    @property
    def lease_seconds(self) -> float | None:
        return self._queue.lease_seconds

    @property
    def traits(self) -> Traits:
        return self._queue.traits or Traits(ordered_here=not self._queue.holds_groups)

    async def do(self, verb: str, count: int) -> None:
        queue = self._queue
        queue.calls.append((now(), verb, count))
        if verb in queue.takes:
            await asyncio.sleep(queue.takes[verb])
        if verb in queue.failing:
            raise queue.failing[verb]

    async def receive(self, limit: int) -> Sequence[ReceivedMessage]:
        queue = self._queue
        queue.limits.append(limit)
        await self.do("receive", limit)
        give_up = now() + 20.0
        while queue.is_deaf or not (queue.ready or self._stopped or now() >= give_up):
            queue.changed.clear()
            try:
                async with asyncio.timeout_at(None if queue.is_deaf else give_up):
                    await queue.changed.wait()
            except TimeoutError:
                break
        taken, queue.ready = queue.ready[:limit], queue.ready[limit:]
        queue.out |= {each.handle: each for each in taken}
        return taken

    def stop(self) -> None:
        self._stopped = True
        self._queue.changed.set()
        if "stop" in self._queue.failing:
            raise self._queue.failing["stop"]

    async def ack(self, handles: Sequence[Handle], *, error: str = "") -> Sequence[Unsettled]:
        await self.do("ack" if not error else "ack failed", len(handles))
        problems = self._problems(handles)
        bad = {problem.handle for problem in problems}
        self._queue.acked += [(now(), handle) for handle in handles if handle not in bad]
        return problems

    async def nack(self, items: Sequence[Nack]) -> Sequence[Unsettled]:
        await self.do("nack", len(items))
        bad = self._queue.not_returned
        self._queue.nacked += [
            (now(), item.handle, item.delay) for item in items if item.handle not in bad
        ]
        if self._queue.redelivers:
            again: defaultdict[float, list[ReceivedMessage]] = defaultdict(list)
            for item in items:
                again[item.delay].append(self._queue.out[item.handle])
            for delay, messages in again.items():
                asyncio.get_running_loop().call_later(delay, self._queue.hand_over, *messages)
        return [bad[item.handle] for item in items if item.handle in bad]

    async def extend(self, handles: Sequence[Handle], seconds: float) -> Sequence[Unsettled]:
        _ = seconds
        await self.do("extend", len(handles))
        self._queue.extended += [(now(), handle) for handle in handles]
        return self._problems(handles)

    async def depth(self) -> Depth | None:
        await self.do("depth", 1)
        return self._queue.depth

    def _problems(self, handles: Sequence[Handle]) -> list[Unsettled]:
        unsettled = self._queue.unsettled
        return [unsettled[handle] for handle in handles if handle in unsettled]


def handed(
    body: bytes,
    handle: Handle,
    broker_id: str | None = None,
    *,
    lease: float | None = None,
    published_at: float | None = None,
) -> ReceivedMessage:
    """One hand-over, its lease counted from now."""
    lease_until = None if lease is None else now() + lease
    return ReceivedMessage(
        body, handle, broker_id, lease_until=lease_until, published_at=published_at
    )


def lost(handle: Handle) -> Unsettled:
    return Unsettled(handle, "lost", stale=True)


def not_now(handle: Handle) -> Unsettled:
    return Unsettled(handle, "not now", stale=False)
