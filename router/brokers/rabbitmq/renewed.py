"""The renewed queue: where messages go that came back so often that a broker may drop them.

They are older than all that is in the queue, and are consumed before it: so order holds. A restart
finds them there. In a copy at the end of the queue itself, a message would wait behind its group.
"""

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import Final

from msgspec.structs import replace

from router.brokers.rabbitmq.connection import NewQueues, NoSuchQueue, RabbitConnection, Table
from router.brokers.rabbitmq.connection import RabbitMessage as Message
from router.brokers.rabbitmq.limits import ARGUMENT, OUT_OF_REACH, FoundQueue
from router.brokers.rabbitmq.retry import copy_of
from router.ports import Disconnected

MOVED_AT_ONCE_MESSAGES: Final = 50  # few: what was moved is safe, also if we are killed now
# A broker that is short of memory does not read what we publish. To give up would be one more loss
# of the connection, and it counts these.
PATIENCE_SECONDS: Final = 600.0


class RenewedQueue:
    """Of one queue. Made when first needed, and never removed."""

    def __init__(
        self,
        connection: RabbitConnection,
        publishing: RabbitConnection,  # may be blocked, so nothing else is asked there
        queue: str,
        new_queues: NewQueues,
    ) -> None:
        self.queue = queue
        self.name = f"{queue}.retry.renewed"  # as retry queues: whoever may make those may make it
        self.exists = False  # as far as we know
        self._connection = connection
        self._publishing = publishing
        self._new_queues = new_queues

    async def look(self) -> bool:
        """Find out whether there is one."""
        self.exists = await self._connection.exists(self.name)
        return self.exists

    async def waiting(self) -> int:
        """Count the messages not handed to anyone."""
        return await self._connection.waiting(self.name) if self.exists else 0

    async def make(self) -> None:
        """Make sure that what is put there is safe. Raises QueueRefused, or Disconnected."""
        if not await self.look():
            arguments: Table = {"x-queue-type": "quorum", ARGUMENT: OUT_OF_REACH}
            await self._connection.declare(self.name, arguments)
            self._new_queues.add(self.name)
            self.exists = True
        await self._new_queues.wait_for(self.name)

    async def put(self, messages: Sequence[Message]) -> None:
        """Store copies, in this order; confirmed on return. Raises Disconnected."""
        await all_confirmed((self._put_one(each) for each in messages), f"renew {self.name}")

    async def _put_one(self, message: Message) -> None:
        history = replace(message.history, receive_count=message.receive_count - 1)
        properties = copy_of(message.properties, history)
        try:
            await self._publishing.publish(
                self.name, message.body, properties, within=PATIENCE_SECONDS
            )
        except NoSuchQueue as error:
            raise Disconnected(f"no queue {self.name}") from error


class RenewedFirst:
    """Which of the two is consumed: what was renewed, and then the queue itself."""

    def __init__(self, renewed: RenewedQueue, found: FoundQueue) -> None:
        self.queue = renewed.queue
        self.renewed = renewed
        self.limit = found.limit
        self.has_worn = False  # in the window: messages that came back too often
        self.current = self.queue
        self._may_renew = found.may_be_quorum
        self.restart()

    @property
    def is_renewed(self) -> bool:
        return self.current != self.queue

    def restart(self) -> None:
        self.has_worn = False
        self.current = self.renewed.name if self.renewed.exists else self.queue

    def note(self, message: Message) -> None:
        """Look at a message that came before."""
        if self._may_renew and not self.is_renewed:
            self.has_worn |= message.returned >= self.limit.renewed_at

    def give_up(self) -> None:
        """Go on without: there can be no renewed queue."""
        self.has_worn = self._may_renew = False

    async def is_waiting(self) -> bool:
        """Return whether somebody has moved messages while we consume the queue itself."""
        if not self._may_renew or self.is_renewed:
            return False
        return await self.renewed.look() and await self.renewed.waiting() > 0


async def all_confirmed(publishing: Iterable[Coroutine[None, None, None]], name: str) -> None:
    """Send one after the other, and wait for all confirms together."""
    try:
        async with asyncio.TaskGroup() as confirming:
            for each in publishing:
                confirming.create_task(each, name=name)
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
