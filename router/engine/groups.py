"""The groups of strict queues, as operators deal with them (ORD-11).

A dead letter that holds its group stays in front of it in a work queue: in the queue itself, or in
the order store of a queue that is none. Here it is found again, and decided about.
"""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

from router.core.config import OnFailure, QueueConfig
from router.core.message import DEFAULT_POOL, Message
from router.core.order import GroupKey, group_in_store
from router.engine.queue_manager import QueueManager
from router.ports import Conflict, HeldLetter, OrderLog, Publication, QueueRefused, StoredMessage

STORED_ELSEWHERE: Final = (
    "the router that consumes its queue stores its group: replay it there, or use `to`"
)


class GroupDesk:
    """Finds groups that are held or stored, and decides about them."""

    def __init__(self, manager: QueueManager) -> None:
        self._manager = manager
        self._store = manager.deps.order

    async def retry_letter(
        self, queue: QueueConfig, message: Message, letter: bytes, body: bytes
    ) -> bool:
        """Deliver a dead letter once more, with this body, if it holds its group.

        It stands in front of it. Return False if it does not hold it. Raises BrokerError.
        """

        async def retry(log: OrderLog, group: GroupKey) -> bool:
            return await log.retry_letter(group, message.id, body)

        return await self._decide(queue, message, letter, retry)

    async def release_letter(self, queue: QueueConfig, message: Message, letter: bytes) -> bool:
        """Let a group go on that this dead letter holds. Raises BrokerError."""

        async def release(log: OrderLog, group: GroupKey) -> bool:
            return await log.release(group, message.id)

        return await self._decide(queue, message, letter, release)

    async def put_behind(self, queue: QueueConfig, item: Publication) -> bool:
        """Store a message behind its group, if groups of the queue are stored (DLQ-2).

        Raises BrokerError or Conflict.
        """
        consumer = self._manager.consumers.get(queue.name)
        if consumer is not None:
            order = consumer.stored_by
            if order is not None:
                await order.put(item)
            return order is not None
        store = self._store
        is_stored = queue.failing is OnFailure.PARK and not queue.broker.holds_groups(queue.uri)
        if store is None or not is_stored:
            return False
        if not store.is_shared:
            raise Conflict(STORED_ELSEWHERE)
        group = group_in_store(item.message)
        async with store.logs.open_order_log(store.queue_of(queue)) as log:
            await log.append([StoredMessage(item, group)])
        return True

    async def _decide(
        self,
        queue: QueueConfig,
        message: Message,
        letter: bytes,
        decide: Callable[[OrderLog, GroupKey], Awaitable[bool]],
    ) -> bool:
        """Do that where this dead letter holds its group. Return False if it does not."""
        store, name = self._store, group_in_store(message)
        if store is None or name is None or not queue.is_strict:
            return False
        group = message.pool or DEFAULT_POOL, name
        for place in (queue, store.queue_of(queue)):
            with suppress(QueueRefused):  # it is no work queue
                async with store.logs.open_order_log(place) as log:
                    if await log.held_letter(group) == HeldLetter(message.id, letter):
                        return await decide(log, group)
        return False
