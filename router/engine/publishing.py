"""Putting messages into queues: for the API, and for replays of dead letters."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final

import msgspec
from msgspec import Struct

from router.core.config import QueueConfig, RoutingConfig
from router.core.message import Malformed, parse
from router.core.target import Target, read_target
from router.ports import BrokerError, Brokers, Disconnected, Publication, Publisher

log = logging.getLogger(__name__)

MAX_MESSAGES: Final = 1000  # in one call
CHUNK: Final = 100  # a queue takes these all or none
PUBLISH_TIMEOUT: Final = 30.0
IDLE_TIMEOUT: Final = 60.0  # a connection that nobody used for so long is closed


class Rejected(Exception):
    """A message breaks the rules, or there are too many. Nothing was published."""

    def __init__(self, reason: str, index: int | None = None) -> None:
        super().__init__(reason if index is None else f"message {index}: {reason}")
        self.index = index  # None: it is not about one of them


class UnknownQueue(Exception):
    """The configuration has no queue of this name."""


class NotPublishable(Exception):
    """The queue can only be consumed, or it is not clear which one is meant."""


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
    refuse_url: Callable[[Target], str | None],
    new_id: Callable[[], str],
) -> AsyncIterator["Publishing"]:
    """Connections are opened when they are needed, and closed with the context.

    `refuse_url` tells why a target may not be called, as far as it can be seen (MED-5).
    """
    async with asyncio.TaskGroup() as tasks:
        publishing = Publishing(brokers, config, refuse_url, new_id, tasks)
        try:
            yield publishing
        finally:
            publishing.close()


class Publishing:
    def __init__(
        self,
        brokers: Brokers,
        config: Callable[[], RoutingConfig],
        refuse_url: Callable[[Target], str | None],
        new_id: Callable[[], str],
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._brokers = brokers
        self._config = config
        self._refuse_url = refuse_url
        self._new_id = new_id
        self._tasks = tasks
        self._lines: dict[QueueConfig, _Line] = {}

    async def publish(self, queue: str | None, bodies: Sequence[bytes]) -> Published:
        """Check all of them, then put all into the queue.

        No queue named: the only one that can publish. Raises Rejected, UnknownQueue,
        NotPublishable or BrokeOff.
        """
        if len(bodies) > MAX_MESSAGES:
            raise Rejected(f"at most {MAX_MESSAGES} messages at once, not {len(bodies)}")
        chosen = self._only_queue() if queue is None else self.queue_named(queue)
        items = [self._check(index, body) for index, body in enumerate(bodies)]
        ids = [item.message.id for item in items]
        duplicates = 0
        for start in range(0, len(items), CHUNK):
            try:
                added = await self.put(chosen, items[start : start + CHUNK])
            except BrokerError as error:
                raise BrokeOff(str(error), accepted=ids[:start]) from error
            duplicates += added.count(False)
        return Published(ids, duplicates)

    def queue_named(self, name: str) -> QueueConfig:
        """A queue that can be published to. Raises UnknownQueue or NotPublishable."""
        for queue in self._config().queues:
            if queue.name == name:
                if not self._can_publish(queue):
                    raise NotPublishable(f"queue {name!r} can only be consumed")
                return queue
        raise UnknownQueue(f"there is no queue {name!r} in the configuration")

    async def put(self, queue: QueueConfig, items: Sequence[Publication]) -> Sequence[bool]:
        """As Publisher.publish, over the queue's one connection. Raises BrokerError."""
        line = self._lines.get(queue) or self._start(queue)
        try:
            async with asyncio.timeout(PUBLISH_TIMEOUT):
                return await line.send(items)
        except TimeoutError:
            self._hang_up(queue, line)
            raise Disconnected(f"no answer within {PUBLISH_TIMEOUT:.0f} s") from None

    def close(self) -> None:
        """Hang up. What is under way ends as Disconnected."""
        for queue, line in tuple(self._lines.items()):
            self._hang_up(queue, line)

    def _only_queue(self) -> QueueConfig:
        candidates = [queue for queue in self._config().queues if self._can_publish(queue)]
        if len(candidates) != 1:
            raise NotPublishable(f"name a queue: {len(candidates)} can be published to")
        return candidates[0]

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

    def _start(self, queue: QueueConfig) -> "_Line":
        line = self._lines[queue] = _Line(lambda: self._open(queue))
        line.owner = self._tasks.create_task(
            self._attend(queue, line), name=f"publisher of {queue.name}"
        )
        return line

    async def _attend(self, queue: QueueConfig, line: "_Line") -> None:
        await line.run()
        self._forget(queue, line)

    def _hang_up(self, queue: QueueConfig, line: "_Line") -> None:
        if self._forget(queue, line):
            line.hang_up()

    def _forget(self, queue: QueueConfig, line: "_Line") -> bool:
        """False: it was forgotten before, and another may have its place."""
        if self._lines.get(queue) is not line:
            return False
        del self._lines[queue]
        return True

    def _check(self, index: int, body: bytes) -> Publication:
        body = _with_id(body, self._new_id)
        try:
            message = parse(body)
        except Malformed as error:
            raise Rejected(str(error), index) from None
        if reason := self._refuse_url(read_target(message.target)):
            raise Rejected(f"`mediationTarget`: {reason}", index)
        return Publication(message, body, dedup_key=message.explicit_dedup_key)


class _Parcel:
    """Some messages on their way into a queue, and who waits for them."""

    def __init__(self, items: Sequence[Publication]) -> None:
        self.items = items
        self.confirmation: asyncio.Future[Sequence[bool]] = _future()

    def confirm(self, results: Sequence[bool]) -> None:
        if not self.confirmation.done():  # else nobody waits any more
            self.confirmation.set_result(results)

    def fail(self, error: Exception) -> None:
        if not self.confirmation.done():
            self.confirmation.set_exception(error)


class _Line:
    """The connection to one queue, owned by one task: opened when needed, anew when it broke."""

    owner: asyncio.Task[None]

    def __init__(self, connect: Callable[[], AbstractAsyncContextManager[Publisher]]) -> None:
        self._connect = connect
        self._waiting: deque[_Parcel] = deque()
        self._arrival = _future()
        self._hung_up = False

    async def send(self, items: Sequence[Publication]) -> Sequence[bool]:
        parcel = _Parcel(items)
        self._waiting.append(parcel)
        if not self._arrival.done():
            self._arrival.set_result(None)
        return await parcel.confirmation

    async def run(self) -> None:
        """Carry parcels until none came for a while."""
        # A publisher that fails to close hides that this task was cancelled.
        while not self._hung_up and (parcel := await self._next()):
            await self._carry(parcel)

    def hang_up(self) -> None:
        self._hung_up = True
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
        """None: nothing came for a while."""
        if not self._waiting:
            self._arrival = _future()
            await asyncio.wait([self._arrival], timeout=IDLE_TIMEOUT)
        return self._waiting.popleft() if self._waiting else None


def _future() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


def _with_id(body: bytes, new_id: Callable[[], str]) -> bytes:
    """The message as it is, or with an id where it has none. Wrong ones are left to the parser."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return body
    if bytes(fields.get("id", _NULL)) != b"null":
        return body
    return msgspec.json.encode({**fields, "id": new_id()})


_CLOSED: Final = "the connection was closed"
_NULL: Final = msgspec.Raw(b"null")
