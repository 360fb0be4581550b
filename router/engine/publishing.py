"""Puts messages into queues: for the API, replays, replies, next steps and schedules."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import lru_cache
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from router.core.commands import (
    content_key,
    not_before_of,
    outcome_of,
    reply_body,
)
from router.core.config import QueueConfig, RoutingConfig
from router.core.envelope import BESIDE, reader_of
from router.core.identity import MessageKey
from router.core.message import (
    YEAR_SECONDS,
    Malformed,
    Message,
    is_given,
    parse,
    refuse_unknown_fields,
    steps_of,
    with_id,
)
from router.core.outcome import CANCELLED, Ending
from router.core.partitions import entries_of, queue_for
from router.core.target import Target, read_target
from router.engine.slices import Slices
from router.ports import (
    BrokerError,
    Brokers,
    DataRefused,
    Disconnected,
    OutgoingMessage,
    Publication,
    Publisher,
    QueueRefused,
    Receipt,
    Unknown,
)

log = logging.getLogger(__name__)

MAX_MESSAGES: Final = 1000  # in one call
CHUNK_MESSAGES: Final = 100  # a queue takes these all or none
PUBLISH_TIMEOUT_SECONDS: Final = 30.0
MAX_BYTES_ON_LOOP: Final = 64 * 1024  # of payloads whose content makes a key: about 15 ms
IDLE_TIMEOUT_SECONDS: Final = 60.0  # a connection that is unused for this long is closed


class Rejected(Exception):
    """A message breaks the rules, or there are too many. Nothing was published."""

    def __init__(self, reason: str, index: int | None = None) -> None:
        super().__init__(reason if index is None else f"message {index}: {reason}")
        self.reason = reason
        self.index = index  # None: it is not about one of them


RAW_QUEUE: Final = (
    "{name} is a raw queue, whose messages come from clients of its broker: publish with one of"
    " them, or to another queue"
)


class WrongQueue(Exception):
    """No queue can do what is asked, or not this one, or it is not clear which one is meant."""


class BrokeOff(Exception):
    """The queue failed. Those of `accepted` are in it; the others may be."""

    def __init__(self, reason: str, accepted: Sequence[str] = ()) -> None:
        super().__init__(reason)
        self.accepted = accepted


class Published(Struct, frozen=True):
    """The result of one call, for each of its messages."""

    ids: Sequence[str]  # of all of them, in their order
    duplicates: int  # of them, those that the queue had already, so that nothing was done (WQ-1)

    @property
    def accepted(self) -> int:
        return len(self.ids) - self.duplicates


# Returns why messages of that queue may not go to a target, as far as its URL shows (MED-5).
RefuseUrl = Callable[[Target, QueueConfig], str | None]


class PublishingRules(Struct, frozen=True):
    """The rules for every message that is published: by the API, in a batch, or by `send`."""

    refuse_url: RefuseUrl
    has_reply_queue: Callable[[str], bool]

    def check(
        self,
        message: Message,
        body: bytes,
        queue: QueueConfig,
        now: float,
        *,
        allow_unknown: bool = False,
    ) -> Publication:
        """Return it, to be published `with_content_key`. Raises Malformed.

        `allow_unknown`: fields that no message has are ignored, not refused.
        """
        self._check("", message, queue, now)
        for place, step in steps_of(message):
            self._check(f"{place}.", step, queue, now)
        if b'"batchId"' in body and is_given(_batch_field.decode(body).batch_id):
            raise Malformed("`batchId` must be absent: use POST /batches")
        if not allow_unknown:
            refuse_unknown_fields(message, body)
        return Publication(message, body, message.explicit_dedup_key, not_before_of(message, now))

    def _check(self, place: str, message: Message, queue: QueueConfig, now: float) -> None:
        """Raise Malformed if it asks for what cannot be done. `place`: that of a step."""
        if reason := self.refuse_url(read_target(message.target), queue):
            raise Malformed(f"`{place}mediationTarget`: {reason}")
        if message.reply_to is not None and not self.has_reply_queue(message.reply_to):
            raise Malformed(f"`{place}replyTo`: there is no reply queue of this name")
        not_before, longest = not_before_of(message, now), queue.broker.longest_delay
        expires_at = message.expires_at
        if expires_at is not None and expires_at.timestamp() <= max(now, not_before or 0.0):
            raise Malformed(f"`{place}expiresAt` is over before it could be delivered")
        if not_before is not None and not_before - now > longest:
            field = "notBefore" if message.delay_seconds is None else "delaySeconds"
            raise Malformed(f"`{place}{field}` is more than {longest / 3600:g} h ahead")


def place_of(queue: QueueConfig, item: Publication) -> QueueConfig:
    """Return the queue that a publication goes to: one of the partitions, if there are any."""
    return queue_for(queue, item.message.group, item.dedup_key or item.message.id)


def with_content_key(item: Publication) -> Publication:
    """Return it with the dedup key that its content makes, if it asks for one (CMD-6)."""
    return replace(item, dedup_key=content_key(item.message)) if _wants_key(item) else item


def _wants_key(item: Publication) -> bool:
    return item.dedup_key is None and item.message.dedup == "content"


@asynccontextmanager
async def open_publishing(
    brokers: Brokers,
    config: Callable[[], RoutingConfig],
    *,
    refuse_url: RefuseUrl,
    new_id: Callable[[], str],
    wall: Callable[[], float] = time.time,
) -> AsyncIterator["QueuePublisher"]:
    """Open a publisher. Its connections are opened when needed, and closed with the context."""
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
        refuse_url: RefuseUrl,
        new_id: Callable[[], str],
        *,
        tasks: asyncio.TaskGroup,
        wall: Callable[[], float],
    ) -> None:
        self._brokers = brokers
        self._config = config
        self._rules = PublishingRules(refuse_url, lambda name: self.reply_queue(name) is not None)
        self._new_id = new_id
        self._tasks = tasks
        self.wall = wall
        self._links: dict[QueueConfig, _Link] = {}
        self._is_closed = False
        self._indexed: RoutingConfig | None = None
        self._reply_queues: dict[str, QueueConfig] = {}
        self._beside: QueueConfig | None = None  # whose commands may name queues of its database

    async def publish(
        self, queue: str | None, bodies: Sequence[bytes], *, allow_unknown: bool = False
    ) -> Published:
        """Check all of them, then put all into the queue.

        No queue named: the only one of the configuration. Raises Rejected, Unknown, WrongQueue or
        BrokeOff.
        """
        chosen = self._only_queue() if queue is None else self.queue_named(queue)
        items = await self.check_all(chosen, bodies, allow_unknown=allow_unknown)
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

    async def check_all(
        self, queue: QueueConfig, bodies: Sequence[bytes], *, allow_unknown: bool = False
    ) -> Sequence[Publication]:
        """Return them ready to be published to a queue, with ids. Raises Rejected or WrongQueue."""
        if queue.route is not None:
            raise WrongQueue(RAW_QUEUE.format(name=queue.name))
        if len(bodies) > MAX_MESSAGES:
            raise Rejected(f"at most {MAX_MESSAGES} messages at once, not {len(bodies)}")
        now = self.wall()  # read once: what comes in one call is due at one time
        checked, slices = [], Slices()
        for index, given in enumerate(bodies):
            if slices.is_full:
                await slices.pause()
            slices.add(given)
            body = with_id(given, self._new_id)
            try:
                message = parse(body)
                checked.append(
                    self._rules.check(message, body, queue, now, allow_unknown=allow_unknown)
                )
            except Malformed as error:
                raise Rejected(str(error), index) from None
        read_again = sum(len(item.message.payload) for item in checked if _wants_key(item))
        if read_again <= MAX_BYTES_ON_LOOP:
            return [with_content_key(item) for item in checked]
        return await asyncio.to_thread(lambda: [with_content_key(item) for item in checked])

    def refuse_target(self, message: Message, queue: QueueConfig) -> str | None:
        """Return why a message of that queue may not go to its target, or None (MED-5)."""
        return self._rules.refuse_url(read_target(message.target), queue)

    def queue_named(self, name: str) -> QueueConfig:
        """Return the queue or the entry of partitions of this name. Raises Unknown."""
        for queue in self._config().queues:
            if queue.name == name:
                return queue
            if queue.entry is not None and queue.entry.name == name:
                return queue.entry
        raise Unknown(f"there is no queue {name!r} in the configuration")

    def reply_queue(self, name: str) -> QueueConfig | None:
        """Return the reply queue of this name, if there is one (CMD-3)."""
        config = self._config()
        if config is not self._indexed:
            self._indexed = config
            self._reply_queues = {queue.name: queue for queue in config.reply_queues}
            self._beside = next((each for each in config.queues if each.has_handlers), None)
        found = self._reply_queues.get(name)
        if found is None and self._beside is not None:
            found = _queue_beside(self._beside, name)
        return found

    def replies(self, message: Message, fingerprint: str, ending: Ending) -> list[OutgoingMessage]:
        """Return the reply to a message that ended so, if it wants one (CMD-3).

        `fingerprint` is that of its publication: the same end is reported once where that can be.
        """
        queue = None if message.reply_to is None else self.reply_queue(message.reply_to)
        if queue is None:
            return []
        key = f"reply-{fingerprint}-{outcome_of(ending)}"
        # Without a target, it is not delivered. Its id is near the one of the message: most are
        # published in the order of their ids: a file then has fewer pages to write (10 µs less).
        reply = Message(id=f"{message.id}-reply", target="")
        place = queue_for(queue, message.group, message.id)
        return [OutgoingMessage(place, Publication(reply, reply_body(message, ending), key))]

    def replies_to_cancelled(
        self, queue: QueueConfig, broker_id: str, body: bytes
    ) -> Sequence[OutgoingMessage]:
        """Return the reply to a message of this queue that is cancelled, if it wants one."""
        fingerprint = MessageKey(queue.uri, broker_id).fingerprint(body)
        try:
            return self.replies(reader_of(queue)(body), fingerprint, CANCELLED)
        except Malformed:
            return ()

    def schedule(self, item: Publication) -> Publication:
        """Return it with the time that it asks for, if it does (CMD-5).

        No broker waits for longer than a year: what comes early then is returned for the rest.
        """
        now = self.wall()
        not_before = not_before_of(item.message, now)
        if not_before is None:
            return item
        return replace(item, not_before=min(not_before, now + YEAR_SECONDS))

    async def put(self, queue: QueueConfig, items: Sequence[Publication]) -> Sequence[Receipt]:
        """Publish over the one connection of the queue, or of each partition.

        Raises BrokerError.
        """
        if queue.partitions is not None:
            return await self._put_apart(queue, items)
        if self._is_closed:
            raise Disconnected(_CLOSED)
        if queue.route is not None and any(item.source is None for item in items):
            raise QueueRefused(RAW_QUEUE.format(name=queue.name))
        link = self._links.get(queue)
        if link is None:
            link = self._links[queue] = _Link(lambda: self._brokers.open_publisher(queue))
            attending = self._attend(queue, link)
            link.owner = self._tasks.create_task(attending, name=f"publisher of {queue.name}")
        try:
            async with asyncio.timeout(PUBLISH_TIMEOUT_SECONDS):
                return await link.send(items)
        except TimeoutError:
            self._close(queue, link)
            raise Disconnected(f"no answer within {PUBLISH_TIMEOUT_SECONDS:.0f} s") from None

    async def _put_apart(
        self, entry: QueueConfig, items: Sequence[Publication]
    ) -> Sequence[Receipt]:
        """Publish each to its partition (PART-2). If one fails, the others may have theirs."""
        by_queue: dict[QueueConfig, list[int]] = {}
        for position, item in enumerate(items):
            by_queue.setdefault(place_of(entry, item), []).append(position)
        calls = [self.put(queue, [items[n] for n in some]) for queue, some in by_queue.items()]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        receipts: list[Receipt] = [False] * len(items)
        for some, answer in zip(by_queue.values(), answers, strict=True):
            if isinstance(answer, BaseException):
                raise answer
            for position, receipt in zip(some, answer, strict=True):
                receipts[position] = receipt
        return receipts

    def close(self) -> None:
        """Close all connections. What is under way, or comes later, ends as Disconnected."""
        self._is_closed = True
        for queue, link in tuple(self._links.items()):
            self._close(queue, link)

    def _only_queue(self) -> QueueConfig:
        queues = entries_of(self._config().queues)
        if len(queues) != 1:
            raise WrongQueue(f"`queue` is required: {len(queues)} queues are configured")
        return queues[0]

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


@lru_cache(maxsize=1000)
def _queue_beside(queue: QueueConfig, name: str) -> QueueConfig | None:
    """Return the queue of the same database that a command names for its reply (CMD-9)."""
    beside, uri_beside = name.removeprefix(BESIDE), queue.broker.uri_beside
    if uri_beside is None or beside == name:
        return None
    return QueueConfig(name=name, uri=uri_beside(queue.uri, beside), broker=queue.broker)


class _Parcel:
    """Messages on their way into a queue, and the future of the caller that waits."""

    def __init__(self, items: Sequence[Publication]) -> None:
        self.items = items
        self.confirmation: asyncio.Future[Sequence[Receipt]] = _future()

    def confirm(self, results: Sequence[Receipt]) -> None:
        if not self.confirmation.done():  # else its caller has stopped waiting
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
                    try:
                        parcel.confirm(await publisher.publish(parcel.items))
                    except DataRefused as error:  # the connection is good for the next parcel
                        parcel.fail(error)
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
_CLOSED: Final = "the connection was closed"
