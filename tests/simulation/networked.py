"""A work queue behind a network: the real table, as PostgreSQL would keep it for many routers."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Final, Protocol

from router.core.config import QueueConfig
from router.core.message import Message
from router.ports import (
    BatchRecord,
    Broker,
    Brokers,
    Cancellation,
    CancelReply,
    MessageFilter,
    MessageLister,
    MessageListers,
    MessagePage,
    MessageRecord,
    MessageStore,
    MessageStores,
    Publication,
    Publisher,
    Receipt,
    no_reply,
)
from tests.simulation.loop import Process
from tests.simulation.network import Put, Weather, Wire, unheard
from tests.support.passing import PassingBroker, T

CALL_TIMEOUT: Final = 20.0


class NoServer:
    """The embedded queue has none."""

    on_put: Put = staticmethod(unheard)

    def make(self, queue: str) -> None:
        """Made by who opens it first."""

    def publish(self, queue: str, body: bytes, message: Message | None) -> None:
        raise NotImplementedError

    def contents(self) -> list[bytes]:
        return []

    def drop(self, process: Process | None = None, *, restarted: bool = False) -> None:
        """There is no connection."""


class NetworkedServer(NoServer):
    def __init__(self, weather: Weather) -> None:
        self.weather = weather
        self.wires: list[Wire] = []

    def brokers(self, brokers: "Opener") -> "Opener":
        return _Networked(self, brokers)

    def drop(self, process: Process | None = None, *, restarted: bool = False) -> None:
        del restarted
        for wire in list(self.wires):
            if process is None or wire.process is process:
                wire.lose("the connection was closed")

    async def connect(self) -> Wire:
        wire = Wire(self.weather, timeout=CALL_TIMEOUT)
        await wire.open()
        self.wires.append(wire)
        wire.on_loss = lambda: self.wires.remove(wire)
        return wire


class Opener(Brokers, MessageStores, MessageListers, Protocol):
    """Opens queues, and what else work queues offer."""


class _Networked:
    def __init__(self, server: NetworkedServer, brokers: Opener) -> None:
        self._server = server
        self._brokers = brokers

    @asynccontextmanager
    async def open_queue(self, queue: QueueConfig) -> AsyncIterator[Broker]:
        wire = await self._server.connect()
        try:
            async with self._brokers.open_queue(queue) as broker:
                yield _Remote(broker, wire)
        finally:
            wire.lose("closed")

    def open_publisher(self, queue: QueueConfig) -> AbstractAsyncContextManager[Publisher]:
        return self._open_publisher(queue)

    @asynccontextmanager
    async def _open_publisher(self, queue: QueueConfig) -> AsyncIterator[Publisher]:
        wire = await self._server.connect()
        opening = self._brokers.open_publisher(queue)
        try:
            async with opening as publisher:
                yield _RemotePublisher(publisher, wire)
        finally:
            wire.lose("closed")

    @asynccontextmanager
    async def open_store(self, queue: QueueConfig) -> AsyncIterator[MessageStore]:
        wire = await self._server.connect()
        opening = self._brokers.open_store(queue)
        assert opening is not None
        try:
            async with opening as store:
                yield _RemoteStore(store, wire)
        finally:
            wire.lose("closed")

    def open_lister(self, queue: QueueConfig) -> AbstractAsyncContextManager[MessageLister] | None:
        return self.open_store(queue)


class _RemoteStore:
    def __init__(self, store: MessageStore, wire: Wire) -> None:
        self._store = store
        self._wire = wire

    def takes(self, queue: QueueConfig) -> bool:
        return self._store.takes(queue)

    async def find(self, message_id: str) -> MessageRecord | None:
        return await self._wire.carry(lambda: self._store.find(message_id))

    async def page(
        self, wanted: MessageFilter, *, limit: int, before: int | None = None
    ) -> MessagePage:
        return await self._wire.carry(lambda: self._store.page(wanted, limit=limit, before=before))

    async def cancel(
        self, message_id: str, reply: CancelReply = no_reply, *, running: bool = False
    ) -> Cancellation:
        cancelling = partial(self._store.cancel, message_id, reply, running=running)
        return await self._wire.carry(cancelling)

    async def open_batch(
        self, batch_id: str, size: int | None, callback: Publication, items: Sequence[Publication]
    ) -> int:
        store = self._store
        return await self._wire.carry(lambda: store.open_batch(batch_id, size, callback, items))

    async def add_to_batch(self, batch_id: str, items: Sequence[Publication]) -> int:
        return await self._wire.carry(lambda: self._store.add_to_batch(batch_id, items))

    async def find_batch(self, batch_id: str) -> BatchRecord | None:
        return await self._wire.carry(lambda: self._store.find_batch(batch_id))

    async def publish_tick(self, schedule: str, tick: int, item: Publication) -> bool:
        return await self._wire.carry(lambda: self._store.publish_tick(schedule, tick, item))

    async def last_tick(self, schedule: str) -> int | None:
        return await self._wire.carry(lambda: self._store.last_tick(schedule))

    async def forget_tick(self, schedule: str, tick: int) -> None:
        await self._wire.carry(lambda: self._store.forget_tick(schedule, tick))


class _RemotePublisher:
    def __init__(self, publisher: Publisher, wire: Wire) -> None:
        self._publisher = publisher
        self._wire = wire

    async def publish(self, items: Sequence[Publication]) -> Sequence[Receipt]:
        return await self._wire.carry(lambda: self._publisher.publish(items))


class _Remote(PassingBroker):
    def __init__(self, broker: Broker, wire: Wire) -> None:
        super().__init__(broker)
        self._wire = wire

    async def carry(self, call: Callable[[], Awaitable[T]]) -> T:
        return await self._wire.carry(call)
