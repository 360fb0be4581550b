"""Opens queues, and records the calls to them."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field

from router.core.config import QueueConfig
from router.core.message import Handle, Malformed, ReceivedMessage, Tally, parse
from router.core.outcome import Failure
from router.ports import Broker, Brokers, Nack, Publisher, Unsettled
from tests.support.passing import PassingBroker
from tests.support.virtual_time import now


@dataclass
class Witness:
    brokers: Brokers
    acks: list[tuple[float, str]] = field(default_factory=list)  # when, which
    nacks: list[tuple[float, str, float]] = field(default_factory=list)  # when, which, for how long
    failures: dict[str, Failure | None] = field(default_factory=dict)  # the last of each
    tallies: dict[str, Tally] = field(default_factory=dict)  # ditto
    in_order: dict[str, bool] = field(default_factory=dict)  # ditto
    ids: dict[Handle, str] = field(default_factory=dict)
    nack_takes: float = 0.0  # seconds; a network would

    @asynccontextmanager
    async def open_queue(self, queue: QueueConfig) -> AsyncIterator[Broker]:
        async with self.brokers.open_queue(queue) as broker:
            yield Watched(broker, self)

    def open_publisher(self, queue: QueueConfig) -> AbstractAsyncContextManager[Publisher]:
        return self.brokers.open_publisher(queue)


class Watched(PassingBroker):
    def __init__(self, broker: Broker, witness: Witness) -> None:
        super().__init__(broker)
        self.witness = witness

    async def receive(self, limit: int) -> Sequence[ReceivedMessage]:
        messages = await super().receive(limit)
        for received in messages:
            self.witness.ids[received.handle] = _id(received)
        return messages

    async def ack(self, handles: Sequence[Handle], *, error: str = "") -> Sequence[Unsettled]:
        for handle in handles:
            self.witness.acks.append((now(), self.witness.ids[handle]))
        return await super().ack(handles, error=error)

    async def nack(self, items: Sequence[Nack]) -> Sequence[Unsettled]:
        for item in items:
            message_id = self.witness.ids[item.handle]
            self.witness.nacks.append((now(), message_id, item.delay))
            self.witness.failures[message_id] = item.failure
            self.witness.tallies[message_id] = item.tally
            self.witness.in_order[message_id] = item.in_order
        await asyncio.sleep(self.witness.nack_takes)
        return await super().nack(items)


def _id(received: ReceivedMessage) -> str:
    try:
        return parse(received.body).id
    except Malformed:
        return received.broker_id or "?"
