"""Puts messages into queues: for the API, replays, replies, next steps and schedules."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from router.core.commands import (
    content_key,
    longest_wait,
    not_before_of,
    outcome_of,
    reply_body,
)
from router.core.config import QueueConfig, RoutingConfig
from router.core.identity import MessageKey
from router.core.message import Malformed, Message, is_given, parse, steps_of, with_id
from router.core.outcome import Ending, Failure
from router.core.target import Target, read_target
from router.ports import (
    BrokerError,
    Brokers,
    Disconnected,
    OutgoingMessage,
    Publication,
    Publisher,
    Receipt,
    Unknown,
)

log = logging.getLogger(__name__)

MAX_MESSAGES: Final = 1000  # in one call
CHUNK_MESSAGES: Final = 100  # a queue takes these all or none
PUBLISH_TIMEOUT_SECONDS: Final = 30.0
IDLE_TIMEOUT_SECONDS: Final = 60.0  # a connection that nobody used for so long is closed


class Rejected(Exception):
    """A message breaks the rules, or there are too many. Nothing was published."""

    def __init__(self, reason: str, index: int | None = None) -> None:
        super().__init__(reason if index is None else f"message {index}: {reason}")
        self.reason = reason
        self.index = index  # None: it is not about one of them


class WrongQueue(Exception):
    """No queue can do what is asked, or not this one, or it is not clear which one is meant."""


class BrokeOff(Exception):
    """The queue failed. Those of `accepted` are in it; the others may be."""

    def __init__(self, reason: str, accepted: Sequence[str] = ()) -> None:
        super().__init__(reason)
        self.accepted = accepted


class Published(Struct, frozen=True):
    """What became of the messages of one call."""

    ids: Sequence[str]  # of all of them, in their order
    duplicates: int  # of them, those that the queue had already, so that nothing was done (WQ-1)

    @property
    def accepted(self) -> int:
        return len(self.ids) - self.duplicates


@asynccontextmanager
async def open_publishing(
    brokers: Brokers,
    config: Callable[[], RoutingConfig],
    *,
    refuse_url: Callable[[Target, QueueConfig], str | None],
    new_id: Callable[[], str],
    wall: Callable[[], float] = time.time,
) -> AsyncIterator["QueuePublisher"]:
    """Open a publisher. Its connections are opened when needed, and closed with the context.

    `refuse_url` returns why messages of that queue may not go to a target, as far as its URL shows
    (MED-5).
    """
    async with asyncio.TaskGroup() as tasks:
        publishing = QueuePublisher(brokers, config, refuse_url, new_id, tasks=tasks, wall=wall)
        try:
            yield publishing
        finally:
            publishing.close()


class QueuePublisher:
    def __init__(
        self,
        brokers: Brokers,
        config: Callable[[], RoutingConfig],
        refuse_url: Callable[[Target, QueueConfig], str | None],
        new_id: Callable[[], str],
        *,
        tasks: asyncio.TaskGroup,
        wall: Callable[[], float],
    ) -> None:
        self._brokers = brokers
        self._config = config
        self._refuse_url = refuse_url
        self._new_id = new_id
        self._tasks = tasks
        self.wall = wall
        self._links: dict[QueueConfig, _Link] = {}
        self._indexed: RoutingConfig | None = None
        self._reply_queues: dict[str, QueueConfig] = {}

    async def publish(self, queue: str | None, bodies: Sequence[bytes]) -> Published:
        """Check all of them, then put all into the queue.

        No queue named: the only one that can publish. Raises Rejected, Unknown, WrongQueue
        or BrokeOff.
        """
        if queue is None:
            candidates = [each for each in self._config().queues if self._can_publish(each)]
            if len(candidates) != 1:
                raise WrongQueue(f"name a queue: {len(candidates)} can be published to")
            (chosen,) = candidates
        else:
            chosen = self.queue_named(queue)
        items = self.check_all(chosen, bodies)
        ids = [item.message.id for item in items]
        duplicates = 0
        for start in range(0, len(items), CHUNK_MESSAGES):
            try:
                added = await self.put(chosen, items[start : start + CHUNK_MESSAGES])
            except BrokerError as error:
                raise BrokeOff(str(error), accepted=ids[:start]) from error
            for index, receipt in enumerate(added, start):
                duplicates += receipt is not True
                if isinstance(receipt, str):
                    ids[index] = receipt
        return Published(ids, duplicates)

    def check_all(self, queue: QueueConfig, bodies: Sequence[bytes]) -> Sequence[Publication]:
        """Return them ready to be published to a queue, with ids. Raises Rejected."""
        if len(bodies) > MAX_MESSAGES:
            raise Rejected(f"at most {MAX_MESSAGES} messages at once, not {len(bodies)}")
        now = self.wall()  # read once: what comes in one call is due at one time
        checked = []
        for index, given in enumerate(bodies):
            body = with_id(given, self._new_id)
            try:
                message = parse(body)
                self._refuse("", message, queue, now)
            except Malformed as error:
                raise Rejected(str(error), index) from None
            if b'"batchId"' in body and is_given(_batch_field.decode(body).batch_id):
                raise Rejected("`batchId` must be absent: use POST /batches", index)
            key = message.explicit_dedup_key
            if key is None and message.dedup == "content":
                key = content_key(message)
            checked.append(Publication(message, body, key, not_before_of(message, now)))
        return checked

    def queue_named(self, name: str) -> QueueConfig:
        """Return a queue that can be published to. Raises Unknown or WrongQueue."""
        for queue in self._config().queues:
            if queue.name == name:
                if not self._can_publish(queue):
                    raise WrongQueue(f"queue {name!r} can only be consumed")
                return queue
        raise Unknown(f"there is no queue {name!r} in the configuration")

    def reply_queue(self, name: str) -> QueueConfig | None:
        """Return the reply queue of this name, if there is one (CMD-3)."""
        config = self._config()
        if config is not self._indexed:
            self._indexed = config
            self._reply_queues = {queue.name: queue for queue in config.reply_queues}
        return self._reply_queues.get(name)

    def replies(self, message: Message, fingerprint: str, ending: Ending) -> list[OutgoingMessage]:
        """Return the reply to a message that ended so, if it wants one (CMD-3).

        `fingerprint` is that of its publication: the same end is reported once where that can be.
        """
        queue = None if message.reply_to is None else self.reply_queue(message.reply_to)
        if queue is None:
            return []
        key = f"reply-{fingerprint}-{outcome_of(ending)}"
        # It has no target: nobody delivers it. Its id is near that of the message, because most are
        # published in the order of their ids: SQLite then writes fewer pages (10 µs less).
        reply = Message(id=f"{message.id}-reply", target="")
        return [OutgoingMessage(queue, Publication(reply, reply_body(message, ending), key))]

    def replies_to_cancelled(
        self, queue: QueueConfig, broker_id: str, body: bytes
    ) -> Sequence[OutgoingMessage]:
        """Return the reply to a message of this queue that is cancelled, if it wants one."""
        fingerprint = MessageKey(queue.uri, broker_id).fingerprint(body)
        try:
            return self.replies(parse(body), fingerprint, _CANCELLED)
        except Malformed:
            return ()

    def schedule(self, item: Publication) -> Publication:
        """Return it with the time that it asks for, if it does (CMD-5)."""
        not_before = not_before_of(item.message, self.wall())
        return item if not_before is None else replace(item, not_before=not_before)

    async def put(self, queue: QueueConfig, items: Sequence[Publication]) -> Sequence[Receipt]:
        """Publish over the one connection of the queue. Raises BrokerError."""
        link = self._links.get(queue)
        if link is None:
            link = self._links[queue] = _Link(lambda: self._open(queue))
            attending = self._attend(queue, link)
            link.owner = self._tasks.create_task(attending, name=f"publisher of {queue.name}")
        try:
            async with asyncio.timeout(PUBLISH_TIMEOUT_SECONDS):
                return await link.send(items)
        except TimeoutError:
            self._close(queue, link)
            raise Disconnected(f"no answer within {PUBLISH_TIMEOUT_SECONDS:.0f} s") from None

    def close(self) -> None:
        """Close all connections. What is under way ends as Disconnected."""
        for queue, link in tuple(self._links.items()):
            self._close(queue, link)

    def _can_publish(self, queue: QueueConfig) -> bool:
        try:
            return self._brokers.open_publisher(queue) is not None
        except BrokerError:  # a queue that cannot even be consumed
            return False

    def _open(self, queue: QueueConfig) -> AbstractAsyncContextManager[Publisher]:
        publisher = self._brokers.open_publisher(queue)
        if publisher is None:
            raise Disconnected(f"queue {queue.name!r} can only be consumed")
        return publisher

    async def _attend(self, queue: QueueConfig, link: "_Link") -> None:
        await link.run()
        self._forget(queue, link)

    def _close(self, queue: QueueConfig, link: "_Link") -> None:
        if self._forget(queue, link):
            link.close()

    def _forget(self, queue: QueueConfig, link: "_Link") -> bool:
        """Return False if it was forgotten before: another may have its place."""
        if self._links.get(queue) is not link:
            return False
        del self._links[queue]
        return True

    def _refuse(self, place: str, message: Message, queue: QueueConfig, now: float) -> None:
        """Raise Malformed if it, or a step behind it, asks for what this router cannot do."""
        if reason := self._refuse_url(read_target(message.target), queue):
            raise Malformed(f"`{place}mediationTarget`: {reason}")
        if message.reply_to is not None and self.reply_queue(message.reply_to) is None:
            raise Malformed(f"`{place}replyTo`: there is no reply queue of this name")
        not_before, longest = not_before_of(message, now), longest_wait(queue.uri)
        if not_before is not None and not_before - now > longest:
            field = "notBefore" if message.delay_seconds is None else "delaySeconds"
            raise Malformed(f"`{place}{field}` is more than {longest / 3600:g} h ahead")
        for step_place, step in steps_of(message):
            self._refuse(f"{place}{step_place}.", step, queue, now)


class _Parcel:
    """Messages on their way into a queue, and the future of the caller that waits."""

    def __init__(self, items: Sequence[Publication]) -> None:
        self.items = items
        self.confirmation: asyncio.Future[Sequence[Receipt]] = _future()

    def confirm(self, results: Sequence[Receipt]) -> None:
        if not self.confirmation.done():  # else nobody waits any more
            self.confirmation.set_result(results)

    def fail(self, error: Exception) -> None:
        if not self.confirmation.done():
            self.confirmation.set_exception(error)


class _Link:
    """The connection to one queue, owned by one task: opened on demand, again after it broke."""

    owner: asyncio.Task[None]

    def __init__(self, connect: Callable[[], AbstractAsyncContextManager[Publisher]]) -> None:
        self._connect = connect
        self._waiting: deque[_Parcel] = deque()
        self._arrival = _future()
        self._is_closed = False

    async def send(self, items: Sequence[Publication]) -> Sequence[Receipt]:
        parcel = _Parcel(items)
        self._waiting.append(parcel)
        if not self._arrival.done():
            self._arrival.set_result(None)
        return await parcel.confirmation

    async def run(self) -> None:
        """Publish parcels until none came for a while."""
        # A publisher that fails to close hides that this task was cancelled.
        while not self._is_closed and (parcel := await self._next()):
            await self._carry(parcel)

    def close(self) -> None:
        self._is_closed = True
        self.owner.cancel()
        while self._waiting:
            self._waiting.popleft().fail(Disconnected(_CLOSED))

    async def _carry(self, parcel: _Parcel | None) -> None:
        """Connect, and stay connected as long as it is used and does not break."""
        try:
            async with self._connect() as publisher:
                while parcel:
                    parcel.confirm(await publisher.publish(parcel.items))
                    parcel = await self._next()
        except Exception as error:
            if parcel is None:
                log.exception("closing a publisher failed")
            else:  # whatever it is, it belongs to who waits for it
                parcel.fail(error)
        finally:
            if parcel:  # cancelled
                parcel.fail(Disconnected(_CLOSED))

    async def _next(self) -> _Parcel | None:
        """Return None if nothing came for a while."""
        if not self._waiting:
            self._arrival = _future()
            await asyncio.wait([self._arrival], timeout=IDLE_TIMEOUT_SECONDS)
        return self._waiting.popleft() if self._waiting else None


def _future() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


class _Batch(Struct, rename="camel"):
    batch_id: Raw = Raw(b"")


_batch_field: Final = msgspec.json.Decoder(_Batch)
_CANCELLED: Final = Ending(Failure("CANCELLED", "the message was cancelled"))
_CLOSED: Final = "the connection was closed"
