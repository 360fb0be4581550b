"""Both ends of one ActiveMQ queue."""

import asyncio
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Final, cast

from msgspec import Struct
from msgspec.structs import replace

from router.brokers.activemq_address import Place
from router.brokers.activemq_frames import Frame
from router.brokers.activemq_link import Link, Refused
from router.brokers.activemq_retry import (
    PERSISTENT,
    SCHEDULED,
    Outlet,
    group_header,
    history_of,
)
from router.brokers.activemq_shelf import Arrival, Shelf
from router.brokers.bell import Bell, wait_for_ring
from router.brokers.comebacks import LONGEST_GATHERING, Comebacks
from router.core.identity import MessageKey, digest_of
from router.core.message import Delivery, Handle, Tally
from router.core.remembered import RememberedAcks
from router.core.trace import carried_in
from router.ports import Depth, Publication, QueueRefused, StaleLease, Traits, Unsettled

LONG_POLL: Final = 20.0
FIRST_GATHERING: Final = 0.050  # all that waits in the queue begins to come
LONGEST_RUSH: Final = 0.010
LOOK: Final = 0.05  # whether what is still missing will come at all
QUIET: Final = 0.002  # nothing came for so long: what comes next is another batch


class Ticket(Struct, frozen=True):
    """A handle. It knows its connection: on another one, its message is someone else's."""

    line: int
    number: int


class ActiveMqBroker:
    """One connection. The broker pushes as many messages as the prefetch window allows."""

    holds_groups: Final = False
    lease_seconds: Final = None
    traits: Final = Traits(ordered_here=True)

    def __init__(
        self,
        link: Link,
        outlet: Outlet,
        place: Place,
        *,
        line: int,
        copied: RememberedAcks,
        comebacks: Comebacks,
        clock: Callable[[], float],
    ) -> None:
        self._link = link
        self._outlet = outlet
        self._place = place
        self._line = line
        self._copied = copied  # originals that still have to be removed
        self._comebacks = comebacks  # copies that are on their way
        self._clock = clock  # of the machine: when a copy is due
        self._numbers = itertools.count(1)
        self._places = itertools.count(1)
        self._shelf = Shelf()
        self._out: dict[int, Arrival] = {}  # handed over and not settled, by ticket number
        self._is_subscribed = False
        self._interrupted = False
        self._bell = Bell()
        link.on_message = self._arrive
        link.on_loss = self._bell.ring

    async def receive(self, limit: int) -> Sequence[Delivery]:
        give_up = _now() + LONG_POLL
        while not self._interrupted:
            self._link.check()
            rung = self._bell.listen()
            await self._subscribe()
            if self._shelf.count_due(_now()):
                await self._gather(limit)
                await self._gather_mates(limit)
                self._link.check()
                return [self._hand_over(arrival) for arrival in self._shelf.take(limit, _now())]
            patience = give_up - _now()
            if patience <= 0:
                break
            await wait_for_ring(rung, min(patience, self._shelf.next_due - _now()))
        return ()

    def interrupt(self) -> None:
        self._interrupted = True
        self._bell.ring()

    async def ack(self, handles: Sequence[Handle], *, error: str = "") -> Sequence[Unsettled]:
        del error  # nothing is kept of a message that is gone
        self._link.check()
        claims = [(handle, self._claim(handle)) for handle in handles]
        ours = [arrival for _, arrival in claims if arrival is not None]
        if ours:
            await self._remove(*ours)
        return [_stale(handle) for handle, arrival in claims if arrival is None]

    async def nack(self, handle: Handle, delay: float, tally: Tally, *, error: str = "") -> None:
        """Without a delay it comes back from here: STOMP has no way to return just one message.

        Who never asks again closes the connection, and the broker has it back.
        """
        del error
        self._link.check()
        arrival = self._claim(handle)
        if arrival is None:
            raise StaleLease("the message was settled already, or came over another connection")
        history = replace(
            arrival.history,
            tally=tally,
            deliveries=arrival.history.deliveries + 1,
            due_at=self._clock() + delay,
        )
        asked_at = _now()
        due = asked_at + delay
        if delay > 0 and await self._outlet.keep(arrival.frame, history, delay):
            self._comebacks.expect(
                _message_of(arrival), arrival.frame.body, now=_now(), delay=delay
            )
            await self._replace(arrival, asked_at, delay)
            return
        self._shelf.put_off(replace(arrival, history=history), due)
        self._bell.ring()

    async def extend(self, handles: Sequence[Handle], seconds: float) -> Sequence[Unsettled]:
        del seconds  # as long as the connection anyway
        self._link.check()
        return [_stale(handle) for handle in handles if not self._is_out(handle)]

    async def depth(self) -> Depth | None:
        """STOMP does not tell."""
        return None

    # What comes.

    async def _subscribe(self) -> None:
        """At the first receive: who does not ask must not be sent anything."""
        if self._is_subscribed:
            return
        self._is_subscribed = True
        headers = {
            "id": "queue",
            "destination": self._place.destination,
            "ack": "client-individual",
            "activemq.prefetchSize": str(self._place.prefetch),
        }
        try:
            await self._link.exchange(Frame("SUBSCRIBE", headers))
        except Refused as refused:
            if refused.is_forbidden:
                raise QueueRefused("this user may not read from the queue") from None
            raise
        await asyncio.sleep(FIRST_GATHERING)

    async def _gather(self, limit: int) -> None:
        """Wait for what comes right behind: a failure holds back its group in its batch (FIFO-1).

        The broker pushes messages one by one, also those that were published together.
        """
        give_up = _now() + LONGEST_RUSH
        while self._shelf.count_due(_now()) < limit and _now() < give_up:
            rung = self._bell.listen()
            await wait_for_ring(rung, QUIET)
            if not rung.is_set():
                return

    async def _gather_mates(self, limit: int) -> None:
        """Wait for what was put off with those that are back: the scheduler works in strokes."""
        give_up = _now() + LONGEST_GATHERING
        while self._lacks_mates(limit) and not self._interrupted and _now() < give_up:
            self._link.check()
            await wait_for_ring(self._bell.listen(), LOOK)

    def _lacks_mates(self, limit: int) -> bool:
        if not self._comebacks or self._shelf.count_due(_now()) >= limit:
            return False
        back = [each.frame.body for each in self._shelf.first(limit) if each.history.deliveries]
        return self._comebacks.awaits_mates_of(back, _now())

    def _arrive(self, frame: Frame) -> None:
        arrival = Arrival(next(self._places), frame, history_of(frame))
        if self._is_copied(arrival):
            self._link.tell(_ack(arrival))
            return
        self._comebacks.came(_message_of(arrival))
        wait = arrival.history.wait(self._clock())
        if not wait:
            self._shelf.put(arrival)
        else:
            self._shelf.put_off(arrival, _now() + wait)
            if SCHEDULED not in frame.headers:
                self._outlet.give_up("a message came back too early (schedulerSupport)")
        self._bell.ring()

    def _hand_over(self, arrival: Arrival) -> Delivery:
        number = next(self._numbers)
        self._out[number] = arrival
        return Delivery(
            arrival.frame.body,
            Ticket(self._line, number),
            broker_id=arrival.message_id,
            count=arrival.history.deliveries + 1,
            tally=arrival.history.tally,
            parent=carried_in(arrival.frame.headers),
            claimed_id=arrival.history.first_id,
        )

    # What goes back.

    def _is_out(self, handle: Handle) -> bool:
        ticket = cast("Ticket", handle)
        return ticket.line == self._line and ticket.number in self._out

    def _claim(self, handle: Handle) -> Arrival | None:
        """Acknowledged twice, it would cost the connection: it is ours to settle only once."""
        return self._out.pop(cast("Ticket", handle).number) if self._is_out(handle) else None

    async def _replace(self, original: Arrival, asked_at: float, delay: float) -> None:
        """Its copy is safe. If the connection breaks now, it is removed when it comes again.

        Only while the copy waits at the broker: later, another router may have taken the copy for
        superfluous because it held the original, and to remove that would be to lose the message.
        """
        proof = self._proof(original)
        self._copied.add(proof, asked_at, lifetime=delay)
        await self._remove(original)
        self._copied.forget(proof)

    def _is_copied(self, arrival: Arrival) -> bool:
        return bool(self._copied) and self._copied.knows(self._proof(arrival), _now())

    def _proof(self, arrival: Arrival) -> MessageKey:
        """The frame's own id: the broker made it for this very copy (ID-1)."""
        body = arrival.frame.body
        return MessageKey(self._place.destination, arrival.message_id, digest_of(body))

    async def _remove(self, *arrivals: Arrival) -> None:
        await self._link.exchange(*[_ack(arrival) for arrival in arrivals])


class ActiveMqPublisher:
    def __init__(self, link: Link, place: Place) -> None:
        self._link = link
        self._place = place
        self._transactions = itertools.count(1)

    async def publish(self, items: Sequence[Publication]) -> Sequence[bool]:
        """In one transaction: all or none."""
        transaction = {"transaction": str(next(self._transactions))}
        sends = [self._send(item, transaction["transaction"]) for item in items]
        await self._link.exchange(Frame("BEGIN", transaction), *sends, Frame("COMMIT", transaction))
        return [True] * len(items)

    def _send(self, item: Publication, transaction: str) -> Frame:
        headers = {
            **PERSISTENT,
            **group_header(item.message.group),
            "destination": self._place.destination,
            "content-length": str(len(item.body)),
            "content-type": "application/json",
            "transaction": transaction,
        }
        return Frame("SEND", headers, item.body)


def _message_of(arrival: Arrival) -> Hashable:
    """The same for a message and its copies."""
    return arrival.history.first_id, arrival.frame.body


def _ack(arrival: Arrival) -> Frame:
    return Frame("ACK", {"id": arrival.ack_id})


def _stale(handle: Handle) -> Unsettled:
    return Unsettled(handle, "the connection that brought it is gone", stale=True)


def _now() -> float:
    return asyncio.get_running_loop().time()
