"""RabbitMQ as its adapter's link sees it: no ids of its own, pushes, confirms, retry queues.

What it knows: `message_id` is the publisher's; unacknowledged messages return to their
places when a connection ends, with the redelivered flag set unless the broker itself was restarted;
an expired message of a retry queue goes to the end of the main queue.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from contextvars import copy_context
from typing import Final

from msgspec import Struct

from router.brokers.rabbitmq.connection import NoSuchQueue, Properties, RabbitMessage, Table
from router.core.message import Message
from tests.simulation.loop import OWNER, Process
from tests.simulation.network import Pipe, Put, Weather, Wire, unheard

CALL_TIMEOUT: Final = 15.0
PERSISTENT: Final = 2


class RabbitStored(Struct, eq=False):
    place: int
    body: bytes
    properties: Properties
    redelivered: bool = False


class RabbitQueue:
    def __init__(self, name: str, ttl: float | None = None, returns_to: str = "") -> None:
        self.name = name
        self.ttl = ttl
        self.returns_to = returns_to
        self.ready: list[RabbitStored] = []  # by place
        self.consumers: list[SimRabbitConsumer] = []


class SimRabbitConsumer(Struct, eq=False):
    link: "SimLink"
    tag: str
    prefetch: int
    take: Callable[[RabbitMessage], None]
    is_exclusive: bool = False
    out: int = 0  # messages that it was handed and nobody has settled: its window is its own

    @property
    def has_room(self) -> bool:
        return self.out < self.prefetch


class RabbitModel:
    def __init__(self, weather: Weather) -> None:
        self.weather = weather
        self.queues: dict[str, RabbitQueue] = {}
        self.links: list[SimLink] = []
        self.on_put: Put = unheard
        self._places = itertools.count(1)
        self._loop = asyncio.get_running_loop()
        self._context = copy_context()  # nobody's: its timers outlive the processes it serves

    # What producers and the world do.

    def make(self, queue: str) -> None:
        self.queues.setdefault(queue, RabbitQueue(queue))

    def publish(self, queue: str, body: bytes, message: Message | None) -> None:
        message_id = None if message is None else message.id
        self.put(queue, body, Properties(message_id=message_id, delivery_mode=PERSISTENT))

    def contents(self) -> list[bytes]:
        waiting = [stored.body for queue in self.queues.values() for stored in queue.ready]
        return waiting + [
            stored.body for link in self.links for _, stored, _ in link.unsettled.values()
        ]

    def drop(self, process: Process | None = None, *, restarted: bool = False) -> None:
        """Lose the connections of a process, or all of them."""
        for link in list(self.links):
            if process is None or link.wire.process is process:
                link.was_silent = process is not None and process.is_frozen
                link.end(restarted=restarted)

    # What links do.

    @asynccontextmanager
    async def open_connection(self, url: str, name: str) -> AsyncIterator["SimLink"]:
        del url, name
        link = SimLink(self)
        await link.wire.open()
        self.links.append(link)
        try:
            yield link
        finally:
            link.wire.lose("the connection was closed")

    def put(self, queue: str, body: bytes, properties: Properties) -> None:
        found = self.queues.get(queue)
        if found is None:
            raise NoSuchQueue(queue)
        self.on_put(queue, body)
        stored = RabbitStored(next(self._places), body, properties)
        found.ready.append(stored)
        if found.ttl is not None:
            self._loop.call_later(found.ttl, self._expire, found, stored, context=self._context)
        self.push(found)

    def requeue(self, queue: RabbitQueue, stored: RabbitStored, *, flagged: bool = True) -> None:
        stored.redelivered = flagged
        queue.ready.append(stored)
        queue.ready.sort(key=lambda each: each.place)

    def push(self, queue: RabbitQueue) -> None:
        """Round robin among consumers that have room in their windows."""
        while queue.ready:
            free = [each for each in queue.consumers if each.has_room]
            if not free:
                return
            chosen = free[0]
            queue.consumers.remove(chosen)
            queue.consumers.append(chosen)
            chosen.link.deliver(queue, queue.ready.pop(0), chosen)

    def _expire(self, queue: RabbitQueue, stored: RabbitStored) -> None:
        if stored in queue.ready:
            queue.ready.remove(stored)
            self.put(queue.returns_to, stored.body, stored.properties)


class SimLink:
    """Fits what the adapter uses of `rabbitmq.connection.RabbitConnection`."""

    def __init__(self, server: RabbitModel) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self.version = "3.10.8"
        self.wire = Wire(server.weather, timeout=CALL_TIMEOUT)
        self.wire.on_loss = self._ended
        self.unsettled: dict[int, tuple[RabbitQueue, RabbitStored, SimRabbitConsumer]] = {}
        self.in_window = 0  # that have arrived, of the latest consumer
        self._last_arrived = 0
        self._last_of_others = 0
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._tags = itertools.count(1)
        self._names = itertools.count(1)
        self._pushed = Pipe(server.weather)
        self._context = None if (owner := OWNER.get()) is None else owner.context
        self._flagged = True
        self.was_silent = False  # so its server has given it up

    def check(self) -> None:
        self.wire.check()

    def is_silent(self) -> bool:
        return self.was_silent

    async def prove(self, heartbeat: float) -> None:
        """Ask nothing: there are no silences to be noticed."""

    def lose(self, why: str) -> None:
        self.wire.lose(why)

    def end(self, *, restarted: bool) -> None:
        self._flagged = not restarted
        self.wire.lose("the connection was closed by the broker")

    async def waiting(self, queue: str) -> int:
        return await self.wire.call(lambda: len(self._server.queues[queue].ready))

    async def exists(self, queue: str) -> bool:
        return await self.wire.call(lambda: queue in self._server.queues)

    async def declare(self, queue: str, arguments: Table) -> None:
        ttl = arguments.get("x-message-ttl")
        back = arguments.get("x-dead-letter-routing-key")
        made = RabbitQueue(queue, ttl / 1000 if isinstance(ttl, int) else None, str(back or ""))
        await self.wire.call(lambda: self._server.queues.setdefault(queue, made))

    async def arguments_of(self, queue: str) -> Table | None:
        kind: Table = {"x-queue-type": "classic"}
        return await self.wire.call(lambda: kind if queue in self._server.queues else None)

    async def consume(
        self,
        queue: str,
        prefetch: int,
        take: Callable[[RabbitMessage], None],
        *,
        exclusive: bool = False,
    ) -> str:
        name = f"consumer-{next(self._names)}"

        def begin() -> bool:
            found = self._server.queues[queue]
            if any(exclusive or each.is_exclusive for each in found.consumers):
                return False
            found.consumers.append(SimRabbitConsumer(self, name, prefetch, take, exclusive))
            self._server.push(found)
            return True

        self.in_window, self._last_of_others = 0, self._last_arrived
        if not await self.wire.call(begin):
            self.wire.lose("another router has the queue")
            self.check()
        return name

    async def cancel(self, consumer: str) -> None:
        def end() -> None:
            for queue in self._server.queues.values():
                queue.consumers = [
                    each
                    for each in queue.consumers
                    if each.link is not self or each.tag != consumer
                ]

        await self.wire.call(end)
        await self._until_arrived()

    async def catch_up(self) -> None:
        await self.wire.call(lambda: None)
        await self._until_arrived()

    async def ack(self, tags: Sequence[int]) -> None:
        def settle() -> None:
            queues = {self._settle(tag)[0].name for tag in tags}
            for name in sorted(queues):
                self._server.push(self._server.queues[name])

        await self.wire.call(settle)
        self._forget(tags)

    async def requeue(self, tags: Sequence[int]) -> None:
        def settle() -> None:
            queues = set()
            for tag in tags:
                queue, stored = self._settle(tag)
                self._server.requeue(queue, stored)
                queues.add(queue.name)
            for name in sorted(queues):
                self._server.push(self._server.queues[name])

        await self.wire.call(settle)
        self._forget(tags)

    async def publish(
        self, queue: str, body: bytes, properties: Properties, *, within: float = CALL_TIMEOUT
    ) -> None:
        del within  # nothing of this model is short of memory
        await self.wire.call(lambda: self._server.put(queue, body, properties))

    # The broker's side.

    def deliver(
        self, queue: RabbitQueue, stored: RabbitStored, consumer: SimRabbitConsumer
    ) -> None:
        tag = next(self._tags)
        self.unsettled[tag] = queue, stored, consumer
        consumer.out += 1
        self._loop.call_at(
            self._pushed.next(),
            self._arrive,
            tag,
            stored,
            stored.redelivered,
            consumer.take,
            context=self._context,
        )

    def _arrive(
        self,
        tag: int,
        stored: RabbitStored,
        redelivered: bool,
        take: Callable[[RabbitMessage], None],
    ) -> None:
        if self.wire.lost is None:
            at = self._loop.time()
            self._last_arrived = tag
            self.in_window += 1
            take(RabbitMessage(tag, stored.body, stored.properties, redelivered, at))

    def _settle(self, tag: int) -> tuple[RabbitQueue, RabbitStored]:
        queue, stored, consumer = self.unsettled.pop(tag)
        consumer.out -= 1
        return queue, stored

    def _forget(self, tags: Sequence[int]) -> None:
        self.in_window -= sum(tag > self._last_of_others for tag in tags)

    async def _until_arrived(self) -> None:
        await self._pushed.drained()
        self.check()

    def _ended(self) -> None:
        """The broker takes back what this connection had; our side is told a little later."""
        server = self._server
        server.links.remove(self)
        for queue in server.queues.values():
            queue.consumers = [each for each in queue.consumers if each.link is not self]
        for queue, stored, _ in self.unsettled.values():
            server.requeue(queue, stored, flagged=self._flagged)
        names = sorted({queue.name for queue, _, _ in self.unsettled.values()})
        self.unsettled.clear()
        for name in names:
            server.push(server.queues[name])
        self._loop.call_soon(self.on_change, context=self._context)
