"""One connection to RabbitMQ in our terms: the only module that knows its client.

aio-pika opens connections and channels; messages and acknowledgements go through the layer below
it, which spares a task and a write for each. Its `connect_robust` is not used: a connection that
renews itself would leave handles that are good for nothing and tell nobody.
"""

import asyncio
import itertools
import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Final

import aio_pika
from aio_pika.abc import AbstractConnection
from aiormq import exceptions as amqp
from aiormq import spec
from aiormq.abc import AbstractChannel, DeliveredMessage, FieldTable
from msgspec import Struct

from router.ports import Disconnected, QueueRefused

CALL_TIMEOUT: Final = 15.0  # of one call, and of opening a connection
CLOSE_TIMEOUT: Final = 3.0
TURNS_TO_END: Final = 8  # of the event loop

_OTHER_KIND: Final = re.compile(
    r"inequivalent arg '(?:durable|x-queue-type)' .* but current is "
    r"(?:none|'?false'?|(?:the value )?'(?P<kind>\w+)')"
)
_USER: Final = re.compile(r" (?:for|by) user '[^']*'")

Properties = spec.Basic.Properties
Table = FieldTable  # arguments, headers


class Arrival(Struct, frozen=True):
    """One message that the broker has handed to this connection."""

    tag: int
    body: bytes
    properties: Properties
    redelivered: bool
    at: float  # loop time


class Unroutable(Exception):
    """There is no such queue to publish to."""


class Link:
    """One connection with one channel for everything that leaves it open."""

    def __init__(self, connection: AbstractConnection, channel: AbstractChannel) -> None:
        self.on_change: Callable[[], None] = lambda: None  # called when it is lost
        self._lost: str | None = None  # why it is of no use any more
        self._unsettled: dict[int, None] = {}  # tags, oldest first
        self._connection = connection
        self._channel = channel
        channel.closing.add_done_callback(self._note_closed)
        channel.on_consumer_cancel_callbacks.add(self._note_cancelled)

    @property
    def is_lost(self) -> bool:
        return self._lost is not None

    def check(self) -> None:
        if self._lost is not None:
            raise Disconnected(self._lost)

    # Queues.

    async def waiting(self, queue: str) -> int:
        """How many messages nobody has been handed. It must exist: the channel depends on it."""
        async with self._call():
            declared = await self._channel.queue_declare(queue, passive=True)
        return declared.message_count or 0

    async def exists(self, queue: str) -> bool:
        with our_errors(opening=True):
            try:
                async with self._side_channel() as channel:
                    await channel.queue_declare(queue, passive=True)
            except amqp.ChannelNotFoundEntity:
                return False
        return True

    async def declare(self, queue: str, arguments: Table) -> None:
        """Make a durable queue. Raises QueueRefused if there is one with other arguments."""
        with our_errors(opening=True):
            async with self._side_channel() as channel:
                await channel.queue_declare(queue, durable=True, arguments=arguments)

    async def kind_of(self, queue: str) -> str | None:
        """Its type, if the broker tells. Nobody can ask, but a wrong guess is refused with why."""
        try:
            await self.declare(queue, {"x-queue-type": "quorum"})
        except QueueRefused as refusal:
            told = _OTHER_KIND.search(str(refusal))
            return told and (told["kind"] or "classic")
        return "quorum"

    # Consuming.

    async def consume(self, queue: str, prefetch: int, take: Callable[[Arrival], None]) -> str:
        """Let arrivals be taken from now on; answers what ends it."""
        now = asyncio.get_running_loop().time

        async def on_message(message: DeliveredMessage) -> None:
            arrival = _arrival(message, now())
            self._unsettled[arrival.tag] = None
            take(arrival)

        async with self._call():
            await self._channel.basic_qos(prefetch_count=prefetch)
            consuming = await self._channel.basic_consume(queue, on_message)
        return consuming.consumer_tag or ""

    async def cancel(self, consumer: str) -> None:
        """Nothing arrives any more; what was on its way has been taken when this returns."""
        async with self._call():
            await self._channel.basic_cancel(consumer)

    async def catch_up(self) -> None:
        """What the broker has sent by now has arrived when this returns."""
        async with self._call():
            await self._until_heard()

    async def ack(self, tags: Sequence[int]) -> None:
        """The oldest of all that are out go in one frame, as far as they are among these."""
        wanted = set(tags)
        async with self._call():
            oldest = list(itertools.takewhile(wanted.__contains__, self._unsettled))
            if oldest:
                await self._channel.basic_ack(oldest[-1], multiple=True, wait=False)
            for tag in wanted.difference(oldest):
                await self._channel.basic_ack(tag, wait=False)
            self._forget(tags)
            await self._until_heard()

    async def requeue(self, tags: Sequence[int]) -> None:
        async with self._call():
            for tag in tags:
                await self._channel.basic_nack(tag, wait=False)
            self._forget(tags)
            await self._until_heard()

    # Publishing.

    async def publish(self, queue: str, body: bytes, properties: Properties) -> None:
        """Put it in; durable on return. Raises Unroutable."""
        async with self._call():
            try:
                await self._channel.basic_publish(
                    body, routing_key=queue, properties=properties, mandatory=True
                )
            except amqp.PublishError:
                raise Unroutable(queue) from None

    # Helpers.

    def _forget(self, tags: Sequence[int]) -> None:
        """Only when all were sent: till then, no frame of another call may include them."""
        for tag in tags:
            del self._unsettled[tag]

    async def _until_heard(self) -> None:
        """Acknowledgements have no answer; a channel works in order, so any later answer does."""
        await self._channel.flow(active=True)

    @asynccontextmanager
    async def _call(self) -> AsyncIterator[None]:
        self.check()
        with our_errors():
            async with asyncio.timeout(CALL_TIMEOUT):
                yield

    @asynccontextmanager
    async def _side_channel(self) -> AsyncIterator[AbstractChannel]:
        """For questions that the broker answers by closing the channel."""
        self.check()
        async with asyncio.timeout(CALL_TIMEOUT), self._connection.channel() as channel:
            yield await channel.get_underlay_channel()

    def _note_closed(self, closing: "asyncio.Future[object]") -> None:
        error = None if closing.cancelled() else closing.exception()
        self._lose(_said(error) if error is not None else "the connection was closed")

    def _note_cancelled(self, _: spec.Basic.Cancel) -> None:
        self._lose("the broker ended the consumer")

    def _lose(self, why: str) -> None:
        if self._lost is None:
            self._lost = why
            self.on_change()


@asynccontextmanager
async def open_link(url: str, name: str) -> AsyncIterator[Link]:
    """Raises QueueRefused or Disconnected on entering."""
    with our_errors(opening=True):
        async with asyncio.timeout(CALL_TIMEOUT):
            connection = await aio_pika.connect(url, client_properties={"connection_name": name})
    try:
        with our_errors(opening=True):
            async with asyncio.timeout(CALL_TIMEOUT):
                channel = connection.channel(on_return_raises=True)
                await channel.initialize()
                underlay = await channel.get_underlay_channel()
        yield Link(connection, underlay)
    finally:
        with suppress(Disconnected, QueueRefused), our_errors():
            async with asyncio.timeout(CLOSE_TIMEOUT):
                await connection.close()
                await _let_tasks_end()


@contextmanager
def our_errors(*, opening: bool = False) -> Iterator[None]:
    """Turn what the engine can act on into our errors. Let bugs through as they are.

    `opening`: what the broker refuses now it would refuse again.
    """
    try:
        yield
    except (amqp.ProbableAuthenticationError, amqp.AuthenticationError):
        raise QueueRefused("the broker does not accept this user and password") from None
    except amqp.InvalidFrameError as error:
        # So the client puts it when the broker opens a connection only to close it.
        raise Disconnected("the broker broke off: is the virtual host there, for us?") from error
    except amqp.AMQPError as error:
        if opening and isinstance(error, amqp.AMQPChannelError):
            raise QueueRefused(_said(error)) from error
        raise Disconnected(_said(error)) from error
    except (amqp.ChannelInvalidStateError, OSError) as error:
        raise Disconnected(_said(error)) from error
    except TimeoutError:
        raise Disconnected("the broker does not answer") from None
    except asyncio.CancelledError:
        # The client ends the calls of a lost connection in this way. It must not end our task.
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise Disconnected("the connection was closed") from None


async def _let_tasks_end() -> None:
    """The client leaves some behind that have nothing more to wait for."""
    for _ in range(TURNS_TO_END):
        await asyncio.sleep(0)


def _said(error: BaseException) -> str:
    """The broker's words without the user's name."""
    words = " ".join(str(each) for each in error.args if each is not None)
    return _USER.sub("", words) or type(error).__name__


def _arrival(message: DeliveredMessage, now: float) -> Arrival:
    return Arrival(
        message.delivery_tag or 0,
        message.body,
        message.header.properties,
        bool(message.redelivered),
        now,
    )
