"""The work queues of the configuration, and what they keep."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final, TypeVar

from router.core.config import QueueConfig, RoutingConfig
from router.engine.publishing import BrokeOff, UnknownQueue
from router.ports import BrokerError, MessageStore, MessageStores

STORE_TIMEOUT_SECONDS: Final = 30.0

T = TypeVar("T")


class NoWorkQueue(Exception):
    """The call is for work queues, and there is none, or it is not clear which one is meant."""


class QueueStores:
    def __init__(self, stores: MessageStores, config: Callable[[], RoutingConfig]) -> None:
        self._stores = stores
        self._config = config

    def work_queues(self, name: str | None = None) -> Sequence[QueueConfig]:
        """Return the work queues, or the one of this name. Raises UnknownQueue or NoWorkQueue."""
        queues = [each for each in self._config().queues if name in (None, each.name)]
        if name is not None and not queues:
            raise UnknownQueue(f"there is no queue {name!r} in the configuration")
        found = [each for each in queues if self._is_work_queue(each)]
        if not found:
            which = "no queue of the configuration is" if name is None else f"queue {name!r} is not"
            raise NoWorkQueue(f"{which} a work queue (SQLite or PostgreSQL)")
        return found

    def only_work_queue(self, name: str | None) -> QueueConfig:
        """Return the work queue of this name, or the only one. Raises as `work_queues` does."""
        found = self.work_queues(name)
        if len(found) > 1:
            raise NoWorkQueue(f"name a queue: {len(found)} are work queues")
        return found[0]

    @asynccontextmanager
    async def open(self, queue: QueueConfig) -> AsyncIterator[MessageStore]:
        """Open a work queue for one call. Raises BrokeOff."""
        try:
            opening = self._stores.open_store(queue)
            assert opening is not None  # noqa: S101  for the type checker: it is a work queue
            async with asyncio.timeout(STORE_TIMEOUT_SECONDS), opening as store:
                yield store
        except TimeoutError:
            raise BrokeOff(f"no answer within {STORE_TIMEOUT_SECONDS:.0f} s") from None
        except BrokerError as error:
            raise BrokeOff(str(error)) from error

    async def ask(
        self, queues: Sequence[QueueConfig], question: Callable[[MessageStore], Awaitable[T | None]]
    ) -> Sequence[tuple[QueueConfig, T]]:
        """Return the answers of those that have one. Raises BrokeOff.

        A queue that fails does not matter if another one has the answer.
        """
        found, failures = list[tuple[QueueConfig, T]](), list[BrokeOff]()
        for queue in queues:
            try:
                async with self.open(queue) as store:
                    answer = await question(store)
            except BrokeOff as failure:
                failures.append(failure)
            else:
                if answer is not None:
                    found.append((queue, answer))
        if failures and not found:
            raise failures[0]
        return found

    def _is_work_queue(self, queue: QueueConfig) -> bool:
        try:
            return self._stores.open_store(queue) is not None
        except BrokerError:  # a queue that cannot even be consumed
            return False
