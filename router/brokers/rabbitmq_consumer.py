"""The receiving end of one RabbitMQ queue."""

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from contextlib import asynccontextmanager
from typing import Final, cast

from msgspec import Struct
from msgspec.structs import replace

from router.brokers.bell import Bell, wait_for_ring
from router.brokers.comebacks import LONGEST_GATHERING, Comebacks
from router.brokers.rabbitmq_link import Arrival, Link
from router.brokers.rabbitmq_retry import SHORTEST_WAY, History, RetryQueues, history_of
from router.core.identity import digest_of
from router.core.message import Delivery, Handle, Tally
from router.core.remembered import RememberedAcks
from router.core.trace import carried_in
from router.ports import BrokerError, Depth, StaleLease, Traits, Unsettled

LONG_POLL: Final = 20.0
LINGER: Final = 0.05  # what is given back comes in bursts: nothing is fetched in between
LOOK: Final = 0.05  # whether what is still missing will come at all
LONGEST_STAY: Final = 20 * 60.0  # unasked for; after 30 min the broker closes the channel (BRK-5)
LOOK_EVERY: Final = 30.0


class Ticket(Struct, frozen=True):
    """A handle. Delivery tags count anew on each connection, so it knows its own."""

    line: int
    tag: int


class Consumer:
    """What the broker has pushed and nobody has asked for yet, oldest first."""

    def __init__(self, bell: Bell, comebacks: Comebacks) -> None:
        self.name = ""
        self.arrivals: deque[Arrival] = deque()
        self._bell = bell
        self._comebacks = comebacks

    def take(self, arrival: Arrival) -> None:
        if self._comebacks:
            self._comebacks.came(_key(arrival))
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
        copied: RememberedAcks,
        comebacks: Comebacks,
        clock: Callable[[], float],
    ) -> None:
        self._link = link
        self._retries = retries
        self._queue = queue
        self._prefetch = prefetch
        self._line = line
        self._copied = copied  # originals that may still have to be removed
        self._comebacks = comebacks  # copies that are on their way
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
            await self._gather_mates(limit)
            await self._remove_copied(limit)
            due = self._hand_over(limit)
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
        before = history_of(arrival.properties)
        history = replace(
            before,
            tally=tally,
            deliveries=_count(arrival, before),
            due_at=self._clock() + delay,
        )
        await self._replace(arrival, history)

    async def extend(self, handles: Sequence[Handle], seconds: float) -> Sequence[Unsettled]:
        del seconds  # as long as the connection anyway
        self._link.check()
        return [_stale(handle) for handle in handles if not self._is_out(handle)]

    async def depth(self) -> Depth | None:
        """Of the queue alone: what waits in its retry queues is not counted."""
        in_queue = await self._link.waiting(self._queue)
        here = len(self._arrivals)
        window = max(self._prefetch - here - len(self._out), 0)
        return Depth(in_queue + here, len(self._out), due=here + min(in_queue, window))

    # What is handed over.

    @property
    def _arrivals(self) -> deque[Arrival]:
        return self._consumer.arrivals if self._consumer is not None else deque()

    async def _consume(self) -> None:
        while self._consumer is None and not self._interrupted.is_set():
            pause = self._resume_at - _now()
            if pause > 0:
                await asyncio.sleep(pause)
                continue
            async with self._switching:
                consumer = Consumer(self._bell, self._comebacks)
                consumer.name = await self._link.consume(self._queue, self._prefetch, consumer.take)
                self._consumer = consumer

    async def _gather(self, limit: int) -> None:
        """They are pushed one by one; a batch is all that were there with its first (FIFO-1)."""
        if 0 < len(self._arrivals) < limit:
            await self._link.catch_up()

    async def _gather_mates(self, limit: int) -> None:
        """Wait for what was put off with those that are back: each copy has a time of its own."""
        give_up = _now() + LONGEST_GATHERING
        await self._send_on_early(limit)
        while self._lacks_mates(limit) and not self._interrupted.is_set() and _now() < give_up:
            self._link.check()
            await wait_for_ring(self._bell.listen(), LOOK)
            await self._send_on_early(limit)

    def _lacks_mates(self, limit: int) -> bool:
        arrivals = self._arrivals
        if not self._comebacks or len(arrivals) >= limit:
            return False
        back = [each.body for each in arrivals if history_of(each.properties).deliveries]
        return self._comebacks.awaits_mates_of(back, _now())

    async def _send_on_early(self, limit: int) -> None:
        """Of those that come next, let hop again what comes before its time."""
        while early := self._early(limit):
            for arrival, _ in early:
                self._arrivals.remove(arrival)
            await self._put_off(early)

    def _early(self, limit: int) -> Sequence[tuple[Arrival, History]]:
        now = self._clock()
        first = itertools.islice(self._arrivals, limit)
        histories = [(each, history_of(each.properties)) for each in first]
        return [(each, history) for each, history in histories if history.wait(now)]

    async def _remove_copied(self, limit: int) -> None:
        """Of those that come next, remove what is here twice: its copy still waits (BRK-3)."""
        while copied := self._find_copied(limit):
            for arrival in copied:
                self._arrivals.remove(arrival)
            await self._link.ack([arrival.tag for arrival in copied])
            for arrival in copied:
                self._copied.forget(_proof(arrival))

    def _find_copied(self, limit: int) -> Sequence[Arrival]:
        if not self._copied:
            return ()
        returned = [each for each in itertools.islice(self._arrivals, limit) if each.redelivered]
        return [each for each in returned if self._copied.knows(_proof(each), _now())]

    def _hand_over(self, limit: int) -> Sequence[Delivery]:
        """The oldest arrivals."""
        arrivals = self._arrivals
        batch = [arrivals.popleft() for _ in range(min(limit, len(arrivals)))]
        self._out.update((arrival.tag, arrival) for arrival in batch)
        return [self._delivery(arrival) for arrival in batch]

    def _delivery(self, arrival: Arrival) -> Delivery:
        history = history_of(arrival.properties)
        return Delivery(
            arrival.body,
            Ticket(self._line, arrival.tag),
            broker_id=None,  # RabbitMQ makes none
            count=_count(arrival, history),
            tally=history.tally,
            parent=carried_in(arrival.properties.headers or {}),
            claimed_id=history.first_id,
        )

    # What goes back.

    def _is_out(self, handle: Handle) -> bool:
        ticket = cast("Ticket", handle)
        return ticket.line == self._line and ticket.tag in self._out

    def _claim(self, handle: Handle) -> Arrival | None:
        """A tag settled twice would cost the channel, so it is ours to settle only once."""
        return self._out.pop(cast("Ticket", handle).tag) if self._is_out(handle) else None

    async def _replace(self, original: Arrival, history: History) -> None:
        """By a copy. If the connection breaks before the original is removed, it is later.

        Namely when it comes again while nobody can have been handed the copy. For the broker may
        have removed it unheard, and what looks like it be the same message, published once more:
        a duplicate as long as the copy waits; afterwards, to remove it would be to lose it.
        """
        asked_at = _now()
        waits = await self._keep_copy(original, history)
        self._copied.add(_proof(original), asked_at, lifetime=waits)
        await self._link.ack([original.tag])
        self._copied.forget(_proof(original))

    async def _put_off(self, copies: Sequence[tuple[Arrival, History]]) -> None:
        """Copies first, confirmed; then the originals are removed. In between a crash doubles."""
        for arrival, history in copies:
            await self._keep_copy(arrival, history)
        await self._link.ack([arrival.tag for arrival, _ in copies])

    async def _keep_copy(self, arrival: Arrival, history: History) -> float:
        """Answers how long it waits at the broker, in seconds."""
        delay = max(history.due_at - self._clock(), SHORTEST_WAY)
        self._comebacks.expect(_key(arrival), arrival.body, now=_now(), delay=delay)
        return await self._retries.put(arrival, delay, history)

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


def _key(arrival: Arrival) -> Hashable:
    """The same for a message and its copies."""
    return history_of(arrival.properties).first_id, arrival.body


def _proof(arrival: Arrival) -> Hashable:
    """The same when it is redelivered, another for its copy, whose number of deliveries is higher.

    By its body as well: not every publisher gives ids, and some give one to several messages.
    """
    history = history_of(arrival.properties)
    return history.first_id, digest_of(arrival.body), history.deliveries


def _count(arrival: Arrival, history: History) -> int:
    """Classic queues tell no more than that it is not the first time."""
    returned = (arrival.properties.headers or {}).get("x-delivery-count")
    before = returned if isinstance(returned, int) else int(arrival.redelivered)
    return history.deliveries + before + 1


def _stale(handle: Handle) -> Unsettled:
    return Unsettled(handle, "settled already, or of another connection", stale=True)


def _now() -> float:
    return asyncio.get_running_loop().time()
