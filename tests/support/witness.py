"""A door to the brokers that remembers what was said through it."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field

from router.core.config import QueueConfig
from router.core.message import Handle, Malformed, ReceivedMessage, Tally, parse
from router.ports import Broker, Brokers, Depth, Publisher, Traits, Unsettled
from tests.support.virtual_time import now


@dataclass
class Witness:
    door: Brokers
    acks: list[tuple[float, str]] = field(default_factory=list)  # when, which
    nacks: list[tuple[float, str, float]] = field(default_factory=list)  # when, which, for how long
    errors: dict[str, str] = field(default_factory=dict)  # the last that came with each
    tallies: dict[str, Tally] = field(default_factory=dict)  # ditto
    ids: dict[Handle, str] = field(default_factory=dict)
    nack_takes: float = 0.0  # seconds; a network would

    @asynccontextmanager
    async def open_queue(self, queue: QueueConfig) -> AsyncIterator[Broker]:
        async with self.door.open_queue(queue) as broker:
            yield Watched(broker, self)

    def open_publisher(self, queue: QueueConfig) -> AbstractAsyncContextManager[Publisher] | None:
        return self.door.open_publisher(queue)


@dataclass
class Watched:
    broker: Broker
    witness: Witness

    @property
    def holds_groups(self) -> bool:
        return self.broker.holds_groups

    @property
    def lease_seconds(self) -> float | None:
        return self.broker.lease_seconds

    @property
    def traits(self) -> Traits:
        return self.broker.traits

    async def receive(self, limit: int) -> Sequence[ReceivedMessage]:
        deliveries = await self.broker.receive(limit)
        for received in deliveries:
            self.witness.ids[received.handle] = _id(received)
        return deliveries

    def interrupt(self) -> None:
        self.broker.interrupt()

    async def ack(self, handles: Sequence[Handle], *, error: str = "") -> Sequence[Unsettled]:
        for handle in handles:
            self.witness.acks.append((now(), self.witness.ids[handle]))
        return await self.broker.ack(handles, error=error)

    async def nack(self, handle: Handle, delay: float, tally: Tally, *, error: str = "") -> None:
        message_id = self.witness.ids[handle]
        self.witness.nacks.append((now(), message_id, delay))
        self.witness.errors[message_id] = error
        self.witness.tallies[message_id] = tally
        await asyncio.sleep(self.witness.nack_takes)
        await self.broker.nack(handle, delay, tally, error=error)

    async def extend(self, handles: Sequence[Handle], seconds: float) -> Sequence[Unsettled]:
        return await self.broker.extend(handles, seconds)

    async def depth(self) -> Depth | None:
        return await self.broker.depth()


def _id(received: ReceivedMessage) -> str:
    try:
        return parse(received.body).id
    except Malformed:
        return received.broker_id or "?"
