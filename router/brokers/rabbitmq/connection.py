"""One connection to RabbitMQ in our terms: the only module that imports its client.

aio-pika opens connections and channels. Messages and acknowledgements go through the layer below
it, which saves a task and a write for each. Its `connect_robust` is not used: a connection that
renews itself would leave dead handles without an error.
"""

import asyncio
import itertools
import re
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import cached_property
from typing import Final

import aio_pika
from aio_pika.abc import AbstractConnection
from aiormq import exceptions as amqp
from aiormq import spec
from aiormq.abc import AbstractChannel, DeliveredMessage, FieldTable, FieldValue
from msgspec import Struct
from pamqp import decode

from router.brokers.kit import loop_time
from router.brokers.kit.consuming import ProofOfLife
from router.brokers.kit.retries import RetryHistory, read_history
from router.core.identity import digest_of
from router.ports import Disconnected, QueueRefused

CALL_SECONDS: Final = 15.0  # of one call, and of opening a connection
CLOSE_SECONDS: Final = 3.0
CLOSING_TURNS: Final = 8  # of the event loop
BEATS_TRUSTED: Final = 2  # the broker keeps a silent connection for at least this many heartbeats
QUESTIONS_PER_BEAT: Final = 2
# The broker's tables keep what is new in memory for up to 3 s before they write it to their files.
UNSAVED_SECONDS: Final = 5.0

MAX_ARGUMENTS: Final = 20  # of one queue; there are fewer

_OTHER_ARGUMENT: Final = re.compile(
    r"inequivalent arg '(?P<name>[^']*)' .* but current is "
    r"(?:none|'?(?:false|true)'?"
    r"|(?:the value )?'(?P<value>.*?)'(?: of type '(?P<type>\w+)'.*)?)$"
)
_COUNT: Final = "x-delivery-count"
_USER: Final = re.compile(r" (?:for|by) user '[^']*'")

Properties = spec.Basic.Properties
Table = FieldTable  # arguments, headers


# Set in the tasks that read our connections. The client's decoder is shared by the whole process,
# and a program that uses the library may have RabbitMQ connections of its own.
_reads_leniently: Final = ContextVar("reads_leniently", default=False)


def _short_text(value: bytes) -> tuple[int, str]:
    if not _reads_leniently.get():
        return decode.short_str(value)
    length = value[0]
    return 1 + length, value[1 : 1 + length].decode(errors="ignore")


def _moment(value: bytes) -> tuple[int, datetime]:
    try:
        return decode.timestamp(value)
    except (ValueError, OverflowError, OSError):
        if not _reads_leniently.get():
            raise
        return 8, datetime.fromtimestamp(0, UTC)


def _table(value: bytes) -> tuple[int, FieldTable]:
    try:
        return decode.field_table(value)
    except Exception:  # whatever it is: a message without headers can be settled
        if not _reads_leniently.get():
            raise
        return 4 + int.from_bytes(value[:4]), {}


# What the client's decoder raises ends the connection, and the broker hands the message out again.
# A publisher may write anything: a year 584556019, a text that is not UTF-8, tables in tables.
decode.METHODS |= {"shortstr": _short_text, "timestamp": _moment, "table": _table}


def can_be_sent(name: str, value: FieldValue) -> bool:
    """Return whether the client can encode this header. It cannot encode all that it decodes."""
    try:
        Properties(headers={name: value}).marshal()
    except Exception:  # noqa: BLE001 it raises whatever comes
        return False
    return True


class RabbitMessage(Struct, frozen=True, dict=True):
    """One message that the broker has handed to this connection."""

    tag: int
    body: bytes
    properties: Properties
    redelivered: bool
    at: float  # loop time

    @property
    def headers(self) -> Table:
        return self.properties.headers or {}

    @cached_property
    def history(self) -> RetryHistory:
        return read_history(self.headers) or RetryHistory(self.properties.message_id or None)

    @property
    def returned(self) -> int:
        """How often it came back to its queue. Classic queues only say whether it did."""
        returned = self.headers.get(_COUNT)
        return returned if isinstance(returned, int) else int(self.redelivered)

    @property
    def receive_count(self) -> int:
        return self.history.receive_count + self.returned + 1

    @property
    def published_at(self) -> float | None:
        """When it was published, in Unix seconds, if its publisher or the broker says so."""
        moment = self.properties.timestamp
        return moment.timestamp() or None if moment is not None else None

    @property
    def key(self) -> Hashable:
        """The key that a message shares with its copies."""
        return self.history.first_id, self.body

    @property
    def proof(self) -> Hashable:
        """The key that a redelivery shares with the message, and a copy does not.

        A copy has a higher receive count. The body is part of it: not every publisher gives ids,
        and some give one id to several messages.
        """
        return self.history.first_id, digest_of(self.body), self.history.receive_count


class NoSuchQueue(Exception):
    """The queue to publish to does not exist."""


class NewQueues:
    """The queues at one broker that we made a moment ago.

    The broker declares a queue before it has saved that the queue exists, and confirms messages in
    it. If it is killed in between, the queue is gone or empty after a restart, and confirmed
    messages are lost with it.
    """

    def __init__(self) -> None:
        self._saved_at: dict[str, float] = {}

    def add(self, queue: str) -> None:
        self._saved_at[queue] = loop_time() + UNSAVED_SECONDS

    async def wait_for(self, queue: str) -> None:
        """Wait until what the broker confirms in this queue is safe."""
        wait = self._saved_at.get(queue, 0.0) - loop_time()
        if wait > 0:
            await asyncio.sleep(wait)


class RabbitConnection:
    """One connection with one channel for everything that leaves it open."""

    def __init__(self, connection: AbstractConnection, channel: AbstractChannel) -> None:
        properties = getattr(channel.connection, "server_properties", None) or {}
        self.version: object = properties.get("version")  # a text, if the broker says it
        self.on_change: Callable[[], None] = lambda: None  # called when the connection is lost
        self._lost: str | None = None  # why it is no longer usable
        self._unsettled: dict[int, None] = {}  # tags, oldest first
        self._last_tag = 0
        # Each consumer has a window of its own: an ACK of what an earlier one brought frees no
        # place in it.
        self.in_window = 0  # unsettled messages that the latest consumer brought
        self._last_of_others = 0  # the last tag that an earlier one brought
        self._proof: ProofOfLife | None = None  # None: not asked for
        self._connection = connection
        self._channel = channel
        channel.closing.add_done_callback(self._note_closed)
        ended = "the broker ended the consumer"
        channel.on_consumer_cancel_callbacks.add(lambda _: self.lose(ended))

    def check(self) -> None:
        if self._lost is not None:
            raise Disconnected(self._lost)

    def is_silent(self) -> bool:
        """Return whether the broker may have given us up (ORD-9)."""
        return self._proof is not None and self._proof.is_over()

    async def prove(self, heartbeat: float) -> None:
        """Ask again and again whether the broker still has us, until the connection is lost.

        An answer counts from its question: the client hides the broker's own heartbeats, and those
        that arrive after a pause of ours may be old.
        """
        self._proof = ProofOfLife(BEATS_TRUSTED * heartbeat)
        while self._lost is None:
            await asyncio.sleep(heartbeat / QUESTIONS_PER_BEAT)
            with suppress(Disconnected):  # the next request that is to start finds out
                await self.catch_up()

    # Queues.

    async def waiting(self, queue: str) -> int:
        """Count the messages not handed to anyone. Without such a queue, the channel closes."""
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

    async def arguments_of(self, queue: str) -> Table | None:
        """Return its arguments, with its type; None if they cannot be told.

        The broker names one of them each time that it refuses a wrong guess.
        """
        guess: Table = {"x-queue-type": "quorum"}
        for _ in range(MAX_ARGUMENTS):
            try:
                await self.declare(queue, guess)
            except QueueRefused as refusal:
                found = read_argument(str(refusal))
                if found is None:
                    return None
                name, value = found
                if name in {"durable", "x-queue-type"}:
                    return {"x-queue-type": value or "classic"}
                if name in guess:
                    return None  # we cannot write it as it was written
                guess[name] = value
            else:
                return guess
        return None

    # Consuming.

    async def consume(
        self,
        queue: str,
        prefetch: int,
        take: Callable[[RabbitMessage], None],
        *,
        exclusive: bool = False,
    ) -> str:
        """Pass messages to `take` from now on. Return the name by which to cancel it.

        `exclusive`: with no other consumer. While there is one, the broker closes the channel.
        """
        now = asyncio.get_running_loop().time

        async def on_message(message: DeliveredMessage) -> None:
            if self._lost is not None:
                return  # the broker has it back when the connection is closed
            tag, properties = message.delivery_tag or 0, message.header.properties
            self._unsettled[tag] = None
            self._last_tag = tag
            self.in_window += 1
            take(RabbitMessage(tag, message.body, properties, bool(message.redelivered), now()))

        self.in_window, self._last_of_others = 0, self._last_tag
        async with self._call():
            await self._channel.basic_qos(prefetch_count=prefetch)
            consuming = await self._channel.basic_consume(queue, on_message, exclusive=exclusive)
        return consuming.consumer_tag or ""

    async def cancel(self, consumer: str) -> None:
        """End a consumer. On return, whatever was on its way has been taken."""
        async with self._call():
            await self._channel.basic_cancel(consumer)

    async def catch_up(self) -> None:
        """Wait for all that the broker has sent so far."""
        async with self._call():
            await self._until_heard()

    async def ack(self, tags: Sequence[int]) -> None:
        """Acknowledge these; an unbroken run of the oldest goes in one frame."""
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

    async def publish(
        self, queue: str, body: bytes, properties: Properties, *, within: float = CALL_SECONDS
    ) -> None:
        """Publish a message; durable on return. Raises NoSuchQueue."""
        async with self._call(within):
            try:
                await self._channel.basic_publish(
                    body, routing_key=queue, properties=properties, mandatory=True
                )
            except amqp.PublishError:
                raise NoSuchQueue(queue) from None

    # Helpers.

    def _forget(self, tags: Sequence[int]) -> None:
        """Forget tags, after all were sent: until then no frame may include them."""
        for tag in tags:
            del self._unsettled[tag]
            self.in_window -= tag > self._last_of_others

    async def _until_heard(self) -> None:
        """Wait for any later answer: acknowledgements have none, and a channel works in order."""
        asked_at = ProofOfLife.now()
        await self._channel.flow(active=True)
        if self._proof is not None:
            self._proof.renew(asked_at)

    @asynccontextmanager
    async def _call(self, within: float = CALL_SECONDS) -> AsyncIterator[None]:
        self.check()
        with our_errors():
            async with asyncio.timeout(within):
                yield

    @asynccontextmanager
    async def _side_channel(self) -> AsyncIterator[AbstractChannel]:
        """Open a channel for a question that the broker may answer by closing it."""
        self.check()
        async with asyncio.timeout(CALL_SECONDS), self._connection.channel() as channel:
            yield await channel.get_underlay_channel()

    def _note_closed(self, closing: "asyncio.Future[object]") -> None:
        error = None if closing.cancelled() else closing.exception()
        self.lose(_said(error) if error is not None else "the connection was closed")

    def lose(self, why: str) -> None:
        """Note that the connection is no longer usable; its users get an error."""
        if self._lost is None:
            self._lost = why
            self.on_change()


@asynccontextmanager
async def open_connection(url: str, name: str) -> AsyncIterator[RabbitConnection]:
    """Connect. Raises QueueRefused or Disconnected on entering."""
    mark = _reads_leniently.set(True)
    try:
        with our_errors(opening=True):
            async with asyncio.timeout(CALL_SECONDS):
                properties: Table = {"connection_name": name}
                connection = await aio_pika.connect(url, client_properties=properties)
    finally:
        _reads_leniently.reset(mark)
    try:
        with our_errors(opening=True):
            async with asyncio.timeout(CALL_SECONDS):
                channel = connection.channel(on_return_raises=True)
                await channel.initialize()
                underlay = await channel.get_underlay_channel()
        yield RabbitConnection(connection, underlay)
    finally:
        with suppress(Disconnected, QueueRefused), our_errors():
            async with asyncio.timeout(CLOSE_SECONDS):
                await connection.close()
                for _ in range(CLOSING_TURNS):
                    await asyncio.sleep(0)  # the client leaves tasks that have nothing to wait for


def read_argument(refusal: str) -> tuple[str, FieldValue] | None:
    """Return the argument that a queue has and a declaration lacked, in the broker's words."""
    found = _OTHER_ARGUMENT.search(refusal)
    if found is None:
        return None
    value: FieldValue = found["value"]
    if found["type"] is not None and found["type"] not in {"longstr", "bool"}:
        with suppress(TypeError, ValueError):
            value = int(found["value"])
    elif found["type"] == "bool":
        value = value == "true"
    return found["name"], value


@contextmanager
def our_errors(*, opening: bool = False) -> Iterator[None]:
    """Turn what the engine can act on into our errors. Let bugs through as they are.

    While `opening`, a refusal is final: the broker would refuse again.
    """
    try:
        yield
    except (amqp.ProbableAuthenticationError, amqp.AuthenticationError):
        raise QueueRefused("the broker does not accept this user and password") from None
    except amqp.InvalidFrameError as error:
        # The client reports this when the broker closes a connection right after opening it.
        raise Disconnected(
            "the broker closed the connection: is there such a virtual host, for this user?"
        ) from error
    except TimeoutError:
        raise Disconnected("the broker does not answer") from None
    except (amqp.AMQPError, amqp.ChannelInvalidStateError, OSError) as error:
        if opening and isinstance(error, amqp.AMQPChannelError):
            raise QueueRefused(_said(error)) from error
        raise Disconnected(_said(error)) from error
    except asyncio.CancelledError:
        # The client ends the calls of a lost connection like this. It must not end our task.
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise Disconnected("the connection was closed") from None
    except Exception as error:
        # The client's reader of frames ends with StopAsyncIteration if the connection breaks while
        # it is opened. Its calls end with a plain Exception if one is closed without a reason.
        if type(error) not in (StopAsyncIteration, Exception):
            raise
        raise Disconnected("the connection was closed") from error


def _said(error: BaseException) -> str:
    """Return the broker's words without the user's name."""
    words = " ".join(str(each) for each in error.args if each is not None)
    return _USER.sub("", words) or type(error).__name__
