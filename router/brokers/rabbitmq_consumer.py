"""Both ends of one RabbitMQ queue."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Final, cast

from msgspec import Struct
from msgspec.structs import replace

from router.brokers.bell import Bell, wait_for_ring
from router.brokers.rabbitmq_link import Arrival, Link, Properties, Unroutable
from router.brokers.rabbitmq_retry import PERSISTENT, History, RetryQueues, history_of
from router.core.message import Delivery, Handle, Tally
from router.core.trace import carried_in
from router.ports import (
    BrokerError,
    Depth,
    Publication,
    QueueRefused,
    StaleLease,
    Traits,
    Unsettled,
)

LONG_POLL: Final = 20.0
LINGER: Final = 0.05  # what is given back comes in bursts: nothing is fetched in between
LONGEST_STAY: Final = 20 * 60.0  # unasked for; after 30 min the broker closes the channel (BRK-5)
LOOK_EVERY: Final = 30.0
PUBLISHED_AT_ONCE: Final = 200


class Ticket(Struct, frozen=True):
    """A handle. Delivery tags count anew on each connection, so it knows its own."""

    line: int
    tag: int


class Consumer:
    """What the broker has pushed and nobody has asked for yet, oldest first."""

    def __init__(self, bell: Bell) -> None:
        self.name = ""
        self.arrivals: deque[Arrival] = deque()
        self._bell = bell

    def take(self, arrival: Arrival) -> None:
        self.arrivals.append(arrival)
        self._bell.ring()


class RabbitBroker:
    """One connection. The broker pushes as many messages as the prefetch window allows."""

    holds_groups: Final = False
    lease_seconds: Final = None
    traits: Final = Traits(ordered_here=True, hold_seconds=1200.0, answer_within=1800.0)

    def __init__(
        self,
        link: Link,
        retries: RetryQueues,
        queue: str,
        *,
        prefetch: int,
        line: int,
        clock: Callable[[], float],
    ) -> None:
        self._link = link
        self._retries = retries
        self._queue = queue
        self._prefetch = prefetch
        self._line = line
        self._clock = clock  # of the machine: when a copy is due
        self._out: dict[int, Arrival] = {}  # handed over and not settled, by tag
        self._consumer: Consumer | None = None
        self._switching = asyncio.Lock()  # a consumer is started, or ended
        self._resume_at = 0.0
        self._bell = Bell()
        self._interrupted = asyncio.Event()
        link.on_change = self._bell.ring

    @asynccontextmanager
    async def minded(self) -> AsyncIterator[None]:
        """As long as it is used. Not by a task group, which would wrap what its user raises."""
        minder = asyncio.get_running_loop().create_task(self._mind(), name=f"mind {self._queue}")
        try:
            yield
        finally:
            minder.cancel()
            await asyncio.wait([minder])
            self.interrupt()

    async def receive(self, limit: int) -> Sequence[Delivery]:
        give_up = _now() + LONG_POLL
        while not self._interrupted.is_set():
            self._link.check()
            rung = self._bell.listen()
            await self._consume()
            await self._gather(limit)
            due = await self._hand_over(limit)
            if due:
                return due
            patience = give_up - _now()
            if patience <= 0:
                break
            await wait_for_ring(rung, patience)
        return ()

    def interrupt(self) -> None:
        self._interrupted.set()
        self._bell.ring()

    async def ack(self, handles: Sequence[Handle], *, error: str = "") -> Sequence[Unsettled]:
        del error  # nothing is kept of a message that is gone
        self._link.check()
        ours = [handle for handle in handles if self._claim(handle) is not None]
        if ours:
            await self._link.ack([cast("Ticket", handle).tag for handle in ours])
        settled = set(ours)
        return [_stale(handle) for handle in handles if handle not in settled]

    async def nack(self, handle: Handle, delay: float, tally: Tally, *, error: str = "") -> None:
        del error
        self._link.check()
        arrival = self._claim(handle)
        if arrival is None:
            raise StaleLease("the message was settled already, or came over another connection")
        if delay <= 0:
            await self._rewind(arrival)
            return
        history = replace(
            history_of(arrival.properties),
            tally=tally,
            deliveries=_count(arrival),
            due_at=self._clock() + delay,
        )
        await self._put_off([arrival], [history])

    async def extend(self, handles: Sequence[Handle], seconds: float) -> Sequence[Unsettled]:
        del seconds  # as long as the connection anyway
        self._link.check()
        return [_stale(handle) for handle in handles if not self._is_out(handle)]

    async def depth(self) -> Depth | None:
        """Of the queue alone: what waits in its retry queues is not counted."""
        in_queue = await self._link.waiting(self._queue)
        here = len(self._consumer.arrivals) if self._consumer is not None else 0
        window = max(self._prefetch - here - len(self._out), 0)
        return Depth(in_queue + here, len(self._out), due=here + min(in_queue, window))

    # What is handed over.

    async def _consume(self) -> None:
        while self._consumer is None and not self._interrupted.is_set():
            pause = self._resume_at - _now()
            if pause > 0:
                await asyncio.sleep(pause)
                continue
            async with self._switching:
                consumer = Consumer(self._bell)
                consumer.name = await self._link.consume(self._queue, self._prefetch, consumer.take)
                self._consumer = consumer

    async def _gather(self, limit: int) -> None:
        """They are pushed one by one; a batch is all that were there with its first (FIFO-1)."""
        if self._consumer is not None and 0 < len(self._consumer.arrivals) < limit:
            await self._link.catch_up()

    async def _hand_over(self, limit: int) -> Sequence[Delivery]:
        """The oldest arrivals. Those that are early hop again."""
        due: list[Delivery] = []
        early: list[Arrival] = []
        arrivals = self._consumer.arrivals if self._consumer is not None else deque[Arrival]()
        while arrivals and len(due) < limit:
            arrival = arrivals.popleft()
            history = history_of(arrival.properties)
            if history.wait(self._clock()):
                early.append(arrival)
                continue
            self._out[arrival.tag] = arrival
            due.append(self._delivery(arrival, history))
        if early:
            await self._put_off(early, [history_of(each.properties) for each in early])
        return due

    def _delivery(self, arrival: Arrival, history: History) -> Delivery:
        return Delivery(
            arrival.body,
            Ticket(self._line, arrival.tag),
            broker_id=history.broker_id,
            count=_count(arrival),
            tally=history.tally,
            parent=carried_in(arrival.properties.headers or {}),
        )

    # What goes back.

    def _is_out(self, handle: Handle) -> bool:
        ticket = cast("Ticket", handle)
        return ticket.line == self._line and ticket.tag in self._out

    def _claim(self, handle: Handle) -> Arrival | None:
        """A tag settled twice would cost the channel, so it is ours to settle only once."""
        return self._out.pop(cast("Ticket", handle).tag) if self._is_out(handle) else None

    async def _put_off(self, arrivals: Sequence[Arrival], histories: Sequence[History]) -> None:
        """Copies first, confirmed; then the originals are removed. In between a crash doubles."""
        now = self._clock()
        for arrival, history in zip(arrivals, histories, strict=True):
            await self._retries.put(arrival, history.due_at - now, history)
        await self._link.ack([arrival.tag for arrival in arrivals])

    async def _rewind(self, *returned: Arrival) -> None:
        """Give back what nobody asked for as well: it must not overtake what is given back."""
        self._resume_at = _now() + LINGER
        async with self._switching:
            consumer, self._consumer = self._consumer, None
            back = list(returned)
            if consumer is not None:
                await self._link.cancel(consumer.name)
                back += consumer.arrivals
            if back:
                await self._link.requeue([arrival.tag for arrival in back])

    async def _mind(self) -> None:
        """Give back what nobody will ask for, or nobody has asked for too long."""
        try:
            while not self._interrupted.is_set():
                await wait_for_ring(self._interrupted, LOOK_EVERY)
                if self._interrupted.is_set() or self._keeps_too_long():
                    await self._rewind()
        except BrokerError:
            return  # the connection is lost, and whoever uses it is told

    def _keeps_too_long(self) -> bool:
        if self._consumer is None or not self._consumer.arrivals:
            return False
        return _now() - self._consumer.arrivals[0].at > LONGEST_STAY


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
            message_id=item.dedup_key,
        )
        try:
            await self._link.publish(self._queue, item.body, properties)
        except Unroutable:
            raise QueueRefused(f"there is no queue {self._queue!r}") from None


def _count(arrival: Arrival) -> int:
    """Classic queues tell no more than that it is not the first time."""
    returned = (arrival.properties.headers or {}).get("x-delivery-count")
    before = returned if isinstance(returned, int) else int(arrival.redelivered)
    return history_of(arrival.properties).deliveries + before + 1


def _stale(handle: Handle) -> Unsettled:
    return Unsettled(handle, "settled already, or of another connection", stale=True)


def _now() -> float:
    return asyncio.get_running_loop().time()
