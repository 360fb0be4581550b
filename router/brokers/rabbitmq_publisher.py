"""The publishing end of one RabbitMQ queue."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Final

from router.brokers.rabbitmq_link import Link, Properties, Unroutable
from router.brokers.rabbitmq_retry import PERSISTENT
from router.ports import Publication, QueueRefused

PUBLISHED_AT_ONCE: Final = 200


class RabbitPublisher:
    def __init__(self, link: Link, queue: str) -> None:
        self._link = link
        self._queue = queue

    async def publish(self, items: Sequence[Publication]) -> Sequence[bool]:
        """RabbitMQ knows no duplicates. When it breaks off, the first ones may be in."""
        for start in range(0, len(items), PUBLISHED_AT_ONCE):
            await self._publish(items[start : start + PUBLISHED_AT_ONCE])
        return [True] * len(items)

    async def _publish(self, items: Iterable[Publication]) -> None:
        """Sent one after the other, confirmed together."""
        try:
            async with asyncio.TaskGroup() as confirming:
                for item in items:
                    confirming.create_task(self._publish_one(item), name=f"publish {self._queue}")
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _publish_one(self, item: Publication) -> None:
        properties = Properties(
            content_type="application/json",
            delivery_mode=PERSISTENT,
            message_id=item.dedup_key or item.message.id,
        )
        try:
            await self._link.publish(self._queue, item.body, properties)
        except Unroutable:
            raise QueueRefused(f"there is no queue {self._queue!r}") from None
