"""Opens queues that keep how a message ended, and publish in the transaction of the ACK."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field

from msgspec.structs import replace

from router.core.config import QueueConfig
from router.ports import Broker, Brokers, Finish, Publisher, Traits, Unsettled
from tests.support.passing import PassingBroker


@dataclass
class FinishingBrokers:
    """Queues named `*` are in one database; `elsewhere` names those that are not."""

    brokers: Brokers
    elsewhere: frozenset[str] = frozenset()
    finished: list[Finish] = field(default_factory=list)

    @asynccontextmanager
    async def open_queue(self, queue: QueueConfig) -> AsyncIterator[Broker]:
        async with self.brokers.open_queue(queue) as broker:
            yield FinishingBroker(broker, self)

    def open_publisher(self, queue: QueueConfig) -> AbstractAsyncContextManager[Publisher]:
        return self.brokers.open_publisher(queue)


class FinishingBroker(PassingBroker):
    def __init__(self, broker: Broker, database: FinishingBrokers) -> None:
        super().__init__(broker)
        self.database = database

    @property
    def traits(self) -> Traits:
        return replace(self.broker.traits, finisher=self)

    def takes(self, queue: QueueConfig) -> bool:
        return queue.name not in self.database.elsewhere

    async def finish(self, items: Sequence[Finish]) -> Sequence[Unsettled]:
        """The stale ones change nothing; of the others all is done, as in one transaction."""
        refused = [*await self._ack(items, failed=False), *await self._ack(items, failed=True)]
        stale = {each.handle for each in refused}
        for item in items:
            if item.handle in stale:
                continue
            self.database.finished.append(item)
            for outgoing in filter(lambda each: self.takes(each.queue), item.outgoing):
                async with self.database.open_publisher(outgoing.queue) as publisher:
                    await publisher.publish([outgoing.publication])
        return refused

    async def _ack(self, items: Sequence[Finish], *, failed: bool) -> Sequence[Unsettled]:
        some = [each.handle for each in items if (each.ending.failure is not None) is failed]
        return await self.broker.ack(some, error="failed" if failed else "") if some else ()
