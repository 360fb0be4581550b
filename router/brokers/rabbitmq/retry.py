"""Delayed redelivery on RabbitMQ: a copy in a retry queue whose messages expire into the main one.

There is a fixed ladder of retry queues, each with one time to live for all of its messages: in a
queue with a time per message, a long one at the head would hold back the short ones behind it.
A delay between two steps is taken in several hops; the copy carries when it is due.
"""

import asyncio
from collections import defaultdict
from typing import Final

from router.brokers.kit.retries import (
    ROUNDING_SECONDS,
    RetryHistory,
    history_headers,
    publishers_headers,
)
from router.brokers.rabbitmq.connection import (
    NewQueues,
    NoSuchQueue,
    Properties,
    RabbitConnection,
    Table,
    can_be_sent,
)
from router.ports import Disconnected, QueueRefused

LADDER_SECONDS: Final = (1, 2, 5, 10, 30, 60, 300, 900, 3600)
FIRST_MADE_SECONDS: Final = 30  # the usual delay: shows at once whether we may make such queues
MIN_SECONDS: Final = LADDER_SECONDS[0]
TOLERANCE_SECONDS: Final = 0.1  # clocks of two machines differ: this close to its time, it is due
PERSISTENT: Final = 2

# Written by the broker on the original, or acted upon by it again.
NOT_COPIED: Final = frozenset({"CC", "BCC", "x-death", "x-delivery-count"})
NOT_COPIED_PREFIXES: Final = ("x-first-death-", "x-last-death-")


def step_for(delay: float) -> int:
    """Return the longest step that is not too long, or the first one if all are."""
    fitting = (step for step in LADDER_SECONDS if step <= delay + ROUNDING_SECONDS)
    return max(fitting, default=MIN_SECONDS)


def copy_of(original: Properties, history: RetryHistory) -> Properties:
    """Return all that the publisher said, without what concerned the original only.

    Not the user: it must be the one that publishes. Not the expiration: the retry queue has one.
    """
    given = publishers_headers(original.headers or {}, NOT_COPIED, NOT_COPIED_PREFIXES)
    kept = {name: given[name] for name in given if can_be_sent(name, given[name])}
    return Properties(
        content_type=original.content_type,
        content_encoding=original.content_encoding,
        headers={**kept, **history_headers(history)},
        delivery_mode=PERSISTENT,
        priority=original.priority,
        correlation_id=original.correlation_id,
        reply_to=original.reply_to,
        message_id=original.message_id,
        timestamp=original.timestamp,
        message_type=original.message_type,
        app_id=original.app_id,
    )


class RetryQueues:
    """The ladder of one queue. Its steps are made when first needed, and never removed."""

    def __init__(
        self, connection: RabbitConnection, queue: str, kind: str, new_queues: NewQueues
    ) -> None:
        self._connection = connection
        self._queue = queue
        self._kind = kind
        self._new_queues = new_queues
        self._made: set[int] = set()
        # By step. Many NACKs may need a new one at once, and go on in their order.
        self._making: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def prepare(self) -> None:
        """Make the first retry queue. Raises QueueRefused if we are not allowed to."""
        await self._declare(FIRST_MADE_SECONDS)

    async def make(self, delay: float) -> int:
        """Return the step for a delay. A copy in its queue is safe. Raises Disconnected."""
        step = step_for(delay)
        async with self._making[step]:
            if step not in self._made:
                try:
                    await self._declare(step)
                except QueueRefused as error:
                    raise self._no_queue(step, error) from error
                await self._new_queues.wait_for(self._name(step))
                self._made.add(step)
        return step

    async def put(
        self, body: bytes, properties: Properties, history: RetryHistory, delay: float
    ) -> float:
        """Store a copy; confirmed on return. Return how many seconds it will wait there."""
        step = await self.make(delay)
        try:
            await self._connection.publish(self._name(step), body, copy_of(properties, history))
        except NoSuchQueue as error:
            raise self._no_queue(step, error) from error
        return step

    async def _declare(self, step: int) -> None:
        """Use an existing queue as it is: operators may have made it for us."""
        name = self._name(step)
        if await self._connection.exists(name):
            return
        arguments: Table = {
            "x-queue-type": self._kind,
            "x-message-ttl": step * 1000,
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": self._queue,
        }
        if self._kind == "quorum":
            # Removed only once the main queue has the message. Classic queues cannot.
            arguments["x-dead-letter-strategy"] = "at-least-once"
            arguments["x-overflow"] = "reject-publish"
        await self._connection.declare(name, arguments)
        self._new_queues.add(name)

    def _no_queue(self, step: int, error: Exception) -> Disconnected:
        """Fail: a new connection returns the message, and begins by making these queues."""
        return Disconnected(f"no retry queue {self._name(step)}: {error}")

    def _name(self, step: int) -> str:
        return f"{self._queue}.retry.{step}s"
