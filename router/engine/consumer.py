"""Consuming one queue: receivers that poll, hold back, reconnect and keep leases (BRK-1, 5, 6)."""

import asyncio
import logging
from collections.abc import Awaitable, Iterator, Sequence
from functools import partial
from typing import Final

from router.core.config import QueueConfig
from router.core.raw import opened
from router.core.returning import reconnect_delays
from router.core.stats import Counts
from router.core.warnings import Code
from router.engine.broker_guard import LOOKS_PER_LEASE, GuardedBroker
from router.engine.deps import EngineDeps
from router.engine.dispatch import Dispatcher, read_ahead
from router.engine.flow import Ask, FlowControl
from router.engine.job import Job
from router.engine.periodic import every
from router.engine.pool import Pools
from router.engine.settle import Settler
from router.engine.transfer import QueueOrder
from router.ports import Broker, BrokerError, DataRefused, Depth, Disconnected, QueueRefused

log = logging.getLogger(__name__)

SILENT_SECONDS: Final = 60.0  # BRK-1
UNREACHABLE_SECONDS: Final = 60.0  # BRK-6
PREDECESSOR_SECONDS: Final = 0.2  # between two looks whether the consumer before has ended
RECEIVE_GRACE_SECONDS: Final = 25.0  # a long poll ends by itself (OPS-4)


class PollHealth:
    """Whether a receiver is silent: it should bring messages, and does not."""

    def __init__(self, now: float) -> None:
        self.last_poll = now  # the last successful one, or the start
        self.has_polled = False
        self.is_waiting = False  # for the broker, or for room: then it may be silent
        self.is_selective = False  # it does not ask for full pools: their messages may be due
        self.waited_until = now
        self.last_message = now  # or the start
        self._due_since: float | None = None  # its queue has messages that are not fetched

    def note_depth(self, depth: Depth, now: float) -> None:
        """Note the depth. Only messages that are due show that a receiver misses some (OPS-3)."""
        if not depth.due:
            self._due_since = None
        elif self._due_since is None:
            self._due_since = now

    def is_silent(self, now: float) -> bool:
        if self.is_waiting:
            return False
        if now - max(self.last_poll, self.waited_until) > SILENT_SECONDS:
            return True
        if self._due_since is None or self.is_selective:
            return False
        starved_since = max(self._due_since, self.last_message, self.waited_until)
        return now - starved_since > SILENT_SECONDS


class Receiver:
    """One connection of a queue: receives, and keeps the connection until all is settled."""

    def __init__(
        self,
        queue: QueueConfig,
        deps: EngineDeps,
        dispatcher: Dispatcher,
        counts: Counts,
        flow: FlowControl,
        *,
        order: QueueOrder | None = None,
        stored: QueueOrder | None = None,
        after: Sequence["QueueConsumer"] = (),
    ) -> None:
        """`order`: of a strict queue. `stored`: of the one whose order store this is.

        `after`: it receives nothing before these consumers have ended.
        """
        self.queue = queue
        self._is_store = stored is not None  # raw messages are kept there
        self._after = after
        self.settler = Settler(queue, deps, dispatcher, counts, flow, order=order, stored=stored)
        self._flow = flow
        self._warn = self.settler.warn
        self._advice: str | None = None  # of the broker's adapter, as we passed it on
        self._now = asyncio.get_running_loop().time
        self.health = PollHealth(self._now())
        self.task: asyncio.Task[None] | None = None
        self.is_running = False
        self._deps = deps
        self._counts = counts
        self._guarded: GuardedBroker | None = None
        self._stopped_at: float | None = None
        self._delays: Iterator[float] | None = None  # before it connects again; None: all is well
        self._lost_at: float | None = None
        self._is_refused = False  # it cannot be consumed as it is set up

    def start(self) -> None:
        self.is_running = True
        self.task = self._deps.tasks.create_task(self._run(), name=f"receive {self.queue.name}")

    def stop(self) -> None:
        """Receive no more; what was brought is still settled."""
        self._stopped_at = self._now()
        self.settler.stop()
        self._wake()

    def abort_overdue(self, now: float) -> None:
        """Cut a receive that does not return: its messages would only be returned."""
        overdue = self._stopped_at is not None and now - self._stopped_at >= RECEIVE_GRACE_SECONDS
        if overdue and self.task is not None and self.settler.is_idle:
            self.task.cancel()

    def is_silent(self, now: float) -> bool:
        return self.is_running and self.health.is_silent(now)

    def is_healthy(self, now: float) -> bool:
        return not self._is_refused and not self.is_silent(now)

    @property
    def is_connected(self) -> bool:
        return self._guarded is not None

    async def depth(self) -> Depth | None:
        return None if self._guarded is None else await self._guarded.depth()

    @property
    def _is_done(self) -> bool:
        return self._stopped_at is not None and self.settler.is_idle

    @property
    def _may_receive(self) -> bool:
        guarded = self._guarded
        return not self._is_stopped and guarded is not None and not guarded.is_broken

    @property
    def _is_stopped(self) -> bool:
        return self._stopped_at is not None or self._deps.leadership.is_over

    def _wake(self) -> None:
        """End whatever the receiver waits for: there is something to do."""
        if self._guarded is not None:
            self._guarded.stop()
        self._deps.room.ring()
        self.settler.ended.ring()

    async def _run(self) -> None:
        """Connect and serve the queue, again and again, until all is settled (BRK-6)."""
        try:
            while not (self._is_done or all(each.is_stopped for each in self._after)):
                await self._wait(PREDECESSOR_SECONDS)
            self._after = ()
            while not self._is_done:
                try:
                    async with self._deps.brokers.open_queue(self.queue) as broker:
                        await self._serve(broker)
                except QueueRefused as error:
                    text = f"{self.queue.name} cannot be consumed: {error}"
                    self._warn(Code.QUEUE_VALIDATION, text)
                    self._is_refused = True
                    await self._back_off(UNREACHABLE_SECONDS)
                except (Disconnected, DataRefused) as error:
                    log.warning("connection lost: %s", error, extra={"queue": self.queue.name})
                    self._lost_at = self._now() if self._lost_at is None else self._lost_at
                    lost_for = self._now() - self._lost_at
                    # A queue that never answered is reported at once, a lost one after a minute.
                    if lost_for >= UNREACHABLE_SECONDS or not self.health.has_polled:
                        text = f"{self.queue.name} cannot be reached: {error}"
                        self._warn(Code.QUEUE_UNREACHABLE, text)
                    await self._back_off()
                except Exception:
                    # The bulkhead: a bug on one connection must not end this receiver or others.
                    log.exception("connection failed", extra={"queue": self.queue.name})
                    await self._back_off()
        finally:
            self.is_running = False

    async def _serve(self, broker: Broker) -> None:
        """Receive until stopped; then stay until all that was brought is settled."""
        deps, settler = self._deps, self.settler
        self._guarded = guarded = GuardedBroker(broker, self._wake, self._counts, deps.leadership)
        self._is_refused = False
        settler.connected(guarded)
        self._flow.connected(guarded.traits, only_holds=settler.keeps_front)
        name = self.queue.name
        self._check_limits(guarded)
        lease, heartbeat = guarded.lease_seconds, None
        if lease is not None:
            extend = partial(guarded.extend_leases, settler.held, deps.extended)
            heartbeat = deps.tasks.create_task(
                every(lease / LOOKS_PER_LEASE, extend), name=f"leases {name}"
            )
        try:
            while self._may_receive:
                await self._receive_next(guarded)
            if self._is_stopped:
                await settler.return_waiting()
            while not self._is_done and not guarded.is_broken:
                await settler.ended.wait()
        finally:
            if heartbeat is not None:
                heartbeat.cancel()
            self._guarded = None
            self._flow.disconnected(guarded.traits)
            settler.disconnected()
        if guarded.is_broken:
            raise Disconnected("a call failed")

    def _check_limits(self, guarded: GuardedBroker) -> None:
        """Warn of what the broker cannot do as it is configured."""
        name, answer_within = self.queue.name, guarded.traits.answer_within
        if self.queue.connections > 1 and not guarded.holds_groups:
            text = f"{name} does not hold groups back: several connections break order"
            self._warn(Code.QUEUE_VALIDATION, text)
        if answer_within is not None and self._deps.longest_request > answer_within:
            text = f"a request may take longer than the broker of {name} waits for its ACK"
            self._warn(Code.BROKER_LIMIT, text)
        self._pass_on_advice(guarded)

    async def _receive_next(self, guarded: GuardedBroker) -> None:
        """Receive one batch, or wait for what has to come first."""
        order = self.settler.order
        if order is not None and not order.is_ready:
            await self._wait_for(order.get_ready())
            return
        carries = order is not None and order.carries  # nothing waits here for a pool
        ask = Ask(self._flow.most) if carries else self._flow.ask(guarded.traits)
        if ask is None:
            await self._wait(self._flow.patience())
        else:
            await self._receive(guarded, ask)

    def _pass_on_advice(self, guarded: GuardedBroker) -> None:
        """Warn once of what the adapter found out."""
        advice = guarded.advice
        if advice is not None and advice != self._advice:
            self._advice = advice
            self._warn(Code.BROKER_LIMIT, f"{self.queue.name}: {advice}")

    async def _receive(self, guarded: GuardedBroker, ask: Ask) -> None:
        """Receive one batch and dispatch it."""
        self.health.is_selective = ask.pools is not None
        messages = await guarded.receive(ask.limit, ask.pools)
        self._pass_on_advice(guarded)
        now = self._now()
        self.health.last_poll, self.health.has_polled = now, True
        # Only an answer shows that the broker is back: many let us connect to nothing.
        self._delays = self._lost_at = None
        if not messages:
            self._flow.note_empty()
            return
        self.health.last_message = now
        if self._is_store:
            messages = [opened(received) for received in messages]
        settler = self.settler
        read = await read_ahead(messages, settler.read)
        if settler.order is not None and settler.asks_first:
            try:
                await settler.order.look(messages, read)
            except BrokerError as error:  # the messages come again on the next connection
                settler.forget([received.handle for received in messages])
                raise Disconnected(f"the order store does not answer: {error}") from error
        self._deps.registry.receive(len(messages), self._counts, self._now())
        # Checked after the wait: nothing is dispatched after a stop or a loss.
        if self._may_receive:
            unroutable = settler.dispatch(messages, read)
            if unroutable:
                await settler.clear(unroutable)
        else:
            for received in messages:
                self._deps.registry.hold_untracked(received)
            settler.reject(messages)

    async def _wait(self, at_most: float | None) -> None:
        """Wait until a pool has room again, or until there is something to do."""
        signal = self._deps.room if self._stopped_at is None else self.settler.ended
        await self._wait_for(signal.wait(at_most))

    async def _wait_for(self, wanted: Awaitable[object]) -> None:
        self.health.is_waiting = True
        await wanted
        self.health.is_waiting = False
        self.health.waited_until = self._now()

    async def _back_off(self, seconds: float | None = None) -> None:
        """Wait as told, or longer each time until the broker answers (BRK-6)."""
        self._delays = self._delays or reconnect_delays(self._deps.jitter)
        deadline = self._now() + (next(self._delays) if seconds is None else seconds)
        while not self._is_done and (left := deadline - self._now()) > 0:
            await self._wait(left)


class QueueConsumer:
    """The consumer of one queue: its receivers."""

    def __init__(
        self,
        queue: QueueConfig,
        deps: EngineDeps,
        dispatcher: Dispatcher,
        pools: Pools,
        counts: Counts,
        *,
        order: QueueOrder | None = None,
        restarts: int = 0,
        after: Sequence["QueueConsumer"] = (),
        is_carried: bool = False,
    ) -> None:
        """`order`: of a queue whose failed messages park in the order store.

        `after`: its predecessors, if they have to end before this one receives. `is_carried`:
        another router receives the queue, and this one delivers from the order store (ORD-13).
        """
        self.queue = queue
        self.counts = counts
        self.restarts = restarts
        warn = deps.alerts.of(f"Consumer:{queue.name}")
        self.flow = FlowControl(queue, pools, deps.look_ahead_bytes, warn, jitter=deps.jitter)
        self.last_depth: Depth | None = None  # as the broker reported it; None: it has not
        self.held_groups = 0  # behind dead letters, when last counted (ORD-11)
        self.order = order
        self.is_carried = is_carried
        self.connections = [
            Receiver(queue, deps, dispatcher, counts, self.flow, order=order, after=after)
            for _ in range(0 if is_carried else queue.connections)
        ]
        self.receivers = list(self.connections)  # with that of the order store
        if order is not None:
            flow = FlowControl(order.queue, pools, deps.look_ahead_bytes, warn, jitter=deps.jitter)
            store = Receiver(order.queue, deps, dispatcher, counts, flow, stored=order)
            self.receivers.append(store)
        if is_carried:  # then the store is its queue
            self.connections = list(self.receivers)

    @property
    def stored_by(self) -> QueueOrder | None:
        """The store of its groups; None: its broker holds groups, or they are never stored."""
        return self.order if self.is_carried else self.connections[0].settler.order

    def start(self) -> None:
        for receiver in self.receivers:
            receiver.start()

    def stop(self) -> None:
        for receiver in self.receivers:
            receiver.stop()
        if self.order is not None:
            self.order.stop()

    def abort_overdue(self, now: float) -> None:
        for receiver in self.receivers:
            receiver.abort_overdue(now)

    def abort(self) -> None:
        """Cut the calls that settle: this router may no longer settle."""
        for receiver in self.receivers:
            receiver.settler.abort()

    @property
    def held(self) -> list[Job]:
        """The messages it has received and not settled."""
        return [job for receiver in self.receivers for job in receiver.settler.held]

    async def until_settled(self) -> None:
        for settler in [receiver.settler for receiver in self.receivers]:
            while not settler.is_idle:
                await settler.ended.wait()

    @property
    def is_stopped(self) -> bool:
        return not any(receiver.is_running for receiver in self.receivers)

    @property
    def has_polled(self) -> bool:
        return any(receiver.health.has_polled for receiver in self.connections)

    def is_silent(self, now: float) -> bool:
        return any(receiver.is_silent(now) for receiver in self.connections)

    def is_healthy(self, now: float) -> bool:
        return all(receiver.is_healthy(now) for receiver in self.connections)

    async def depth(self) -> Depth | None:
        """Ask over the first open connection; the answer concerns all of them."""
        connected = [receiver for receiver in self.connections if receiver.is_connected]
        is_known = connected and not self.is_carried
        depth = await connected[0].depth() if is_known else None
        if depth is not None:
            self.last_depth = depth
            if self.queue.may_be_anothers:
                return depth  # what is due may be on its way to another router (OPS-3)
            now = asyncio.get_running_loop().time()
            for receiver in self.connections:
                receiver.health.note_depth(depth, now)
        return depth
