"""Bringing messages in from one queue: its connections, each a receive loop that survives (§3)."""

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import Final

from router.core.backoff import reconnect_delays
from router.core.config import MAX_BATCH, QueueConfig
from router.core.message import Delivery
from router.core.stats import Counts
from router.core.warnings import Code, Severity
from router.engine.context import Context
from router.engine.leases import LOOKS_PER_LEASE, renew
from router.engine.line import Line
from router.engine.periodic import every
from router.engine.process_pool import ProcessPool
from router.engine.reading import read_ahead
from router.engine.settler import Settler
from router.ports import Broker, Depth, Disconnected, QueueRefused

log = logging.getLogger(__name__)

SILENT_AFTER: Final = 60.0  # BRK-1
UNREACHABLE_AFTER: Final = 60.0  # BRK-6
FRUITLESS_PAUSE: Final = 2.0  # ROUTE-5
RECEIVE_GRACE: Final = 25.0  # a long poll ends by itself (OPS-4)


class Connection:
    """One receiver of a queue."""

    def __init__(self, queue: QueueConfig, context: Context, counts: Counts) -> None:
        self.queue = queue
        self.settler = Settler(queue, context, counts)
        self.task: asyncio.Task[None] | None = None
        self.is_running = False
        self.last_poll = _now()  # the last successful one, or its start
        self.has_polled = False
        self._last_message = _now()  # likewise
        self._due_since: float | None = None  # its queue has messages that nobody fetches
        self._is_waiting = False  # for the broker, or for room: no reason to call it silent
        self._waited_until = _now()
        self._context = context
        self._counts = counts
        self._line: Line | None = None
        self._stopped_at: float | None = None
        self._fed: frozenset[ProcessPool] = frozenset()  # by the last batch
        self._delays = reconnect_delays(context.jitter)
        self._lost_at: float | None = None

    def start(self) -> None:
        self.is_running = True
        self.task = self._context.tasks.create_task(self._run(), name=f"receive {self.queue.name}")

    def stop(self) -> None:
        """Receive no more; what was brought is still settled."""
        self._stopped_at = _now()
        self.settler.stop()
        self._wake()

    def cut_off(self, now: float) -> None:
        """End a receive that does not return: by now it would only bring what is unwanted."""
        overdue = self._stopped_at is not None and now - self._stopped_at >= RECEIVE_GRACE
        if overdue and self.task is not None and self.settler.is_idle:
            self.task.cancel()

    def is_healthy(self, now: float) -> bool:
        if not self.is_running or self._is_waiting:
            return True
        silent = now - max(self.last_poll, self._waited_until)
        return silent <= SILENT_AFTER and not self._is_starved(now)

    def note_depth(self, depth: Depth, now: float) -> None:
        """Only messages that could be handed out now tell that a receiver misses them (OPS-3)."""
        if not depth.due:
            self._due_since = None
        elif self._due_since is None:
            self._due_since = now

    @property
    def is_connected(self) -> bool:
        return self._line is not None

    async def depth(self) -> Depth | None:
        return None if self._line is None else await self._line.depth()

    def _is_starved(self, now: float) -> bool:
        if self._due_since is None:
            return False
        return now - max(self._due_since, self._last_message, self._waited_until) > SILENT_AFTER

    @property
    def _is_done(self) -> bool:
        return self._stopped_at is not None and self.settler.is_idle

    @property
    def _may_receive(self) -> bool:
        broken = self._line is None or self._line.is_broken
        return not self._is_stopped and not broken

    @property
    def _is_stopped(self) -> bool:
        return self._stopped_at is not None or self._context.mandate.is_over

    def _wake(self) -> None:
        """Whatever it waits for: there is something to do."""
        if self._line is not None:
            self._line.interrupt()
        self._context.bell.ring()
        self.settler.emptied.ring()

    async def _run(self) -> None:
        try:
            while not self._is_done:
                await self._connect()
        finally:
            self.is_running = False

    async def _connect(self) -> None:
        """Open the queue and serve it until its end, or until the connection is lost (BRK-6)."""
        try:
            async with self._context.brokers.open_queue(self.queue) as broker:
                await self._serve(broker)
        except QueueRefused as error:
            self._warn(Code.QUEUE_VALIDATION, f"{self.queue.name} cannot be consumed: {error}")
            await self._back_off(UNREACHABLE_AFTER)
        except Disconnected as error:
            self._note_loss(error)
            await self._back_off(next(self._delays))
        except Exception:
            # The bulkhead: a bug met on one connection must end neither it nor the others.
            log.exception("connection failed", extra={"queue": self.queue.name})
            await self._back_off(next(self._delays))

    async def _serve(self, broker: Broker) -> None:
        """Receive until told to stop; then stay until all that was brought is settled."""
        self._line = line = Line(broker, self._wake, self._counts, self._context.mandate)
        self.settler.connected(line)
        self._warn_of_lost_order(line)
        self._warn_of_slow_targets(line)
        keeper = self._keep_leases(line)
        try:
            await self._receive(broker)
            if self._is_stopped:
                await self.settler.return_deferred()
            while not self._is_done and not line.is_broken:
                await self.settler.emptied.wait()
        finally:
            if keeper is not None:
                keeper.cancel()
            self._line = None
            self.settler.disconnected()
        if line.is_broken:
            raise Disconnected("a call failed")

    def _warn_of_lost_order(self, line: Line) -> None:
        if self.queue.connections > 1 and not line.holds_groups:
            text = f"{self.queue.name} does not hold groups back: several connections break order"
            self._warn(Code.QUEUE_VALIDATION, text)

    def _warn_of_slow_targets(self, line: Line) -> None:
        limit = line.traits.answer_within
        if limit is not None and self._context.longest_delivery > limit:
            text = f"a delivery may take longer than {self.queue.name} waits for its answer"
            self._warn(Code.BROKER_LIMIT, text)

    def _keep_leases(self, line: Line) -> asyncio.Task[None] | None:
        lease = line.lease_seconds
        if lease is None:
            return None
        look = partial(renew, self.settler.held, line, lease, self._context.extended)
        name = f"leases {self.queue.name}"
        return self._context.tasks.create_task(every(lease / LOOKS_PER_LEASE, look), name=name)

    async def _receive(self, broker: Broker) -> None:
        while self._may_receive:
            limit = await self._wait_for_room()
            if not self._may_receive:
                return
            with self._counts.calling("receive"):
                deliveries = await broker.receive(limit)
            self._note_poll()
            if deliveries:
                await self._take(deliveries)

    async def _take(self, deliveries: Sequence[Delivery]) -> None:
        self._last_message = _now()
        read = await read_ahead(deliveries)
        if self._may_receive:  # looked at after the wait: nothing is routed after a stop or a loss
            self._fed = frozenset((await self.settler.admit(deliveries, read)).fed)
        else:
            self.settler.reject(deliveries)

    def _note_poll(self) -> None:
        self.last_poll = _now()
        self.has_polled = True
        # Only an answer tells that the broker is back: many let us connect to nothing.
        self._delays = reconnect_delays(self._context.jitter)
        self._lost_at = None

    async def _wait_for_room(self) -> int:
        """Back pressure is asking for less (BRK-1, ROUTE-5). Answers how many to ask for."""
        pools = self._context.routing.pools
        await self._place_deferred()
        if self._is_in_no_hurry():
            await self._hold_back(FRUITLESS_PAUSE)
        while self._may_receive and not pools.have_room:
            await self._hold_back(None)
        most = min(self.queue.max_messages or MAX_BATCH, MAX_BATCH)
        return min(
            most, max((pool.lasting_room for pool in self._fed if pool.has_room), default=most)
        )

    def _is_in_no_hurry(self) -> bool:
        """The last batch led to nothing, or its pools are full now: only others have room."""
        fruitless, self.settler.is_fruitless = self.settler.is_fruitless, False
        full = bool(self._fed) and not any(pool.has_room for pool in self._fed)
        return fruitless or full

    async def _place_deferred(self) -> None:
        self.settler.place_deferred()
        while self._may_receive and self.settler.deferred:
            await self._hold_back(FRUITLESS_PAUSE)
            self.settler.place_deferred()

    async def _hold_back(self, at_most: float | None) -> None:
        if self._may_receive:
            await self._wait(at_most)

    async def _wait(self, at_most: float | None) -> None:
        """A pause that ends early when a pool has room again, or when there is something to do."""
        bell = self._context.bell if self._stopped_at is None else self.settler.emptied
        self._is_waiting = True
        await bell.wait(at_most)
        self._is_waiting = False
        self._waited_until = _now()

    async def _back_off(self, seconds: float) -> None:
        deadline = _now() + seconds
        while not self._is_done and (left := deadline - _now()) > 0:
            await self._wait(left)

    def _note_loss(self, error: Disconnected) -> None:
        """Warn of a queue that never answered at once, of a lost one after a minute."""
        log.warning("connection lost: %s", error, extra={"queue": self.queue.name})
        if self._lost_at is None:
            self._lost_at = _now()
        if _now() - self._lost_at >= UNREACHABLE_AFTER or not self.has_polled:
            self._warn(Code.QUEUE_UNREACHABLE, f"{self.queue.name} cannot be reached: {error}")

    def _warn(self, code: Code, text: str) -> None:
        source = f"Consumer:{self.queue.name}"
        self._context.alerts.raise_warning(code, Severity.WARN, source, text)


class Intake:
    """The consumer of one queue."""

    def __init__(
        self, queue: QueueConfig, context: Context, counts: Counts, restarts: int = 0
    ) -> None:
        self.queue = queue
        self.counts = counts
        self.restarts = restarts
        self.last_depth: Depth | None = None  # as its broker told; None: it has not, or does not
        self.connections = [Connection(queue, context, counts) for _ in range(queue.connections)]

    def start(self) -> None:
        for connection in self.connections:
            connection.start()

    def stop(self) -> None:
        for connection in self.connections:
            connection.stop()

    def cut_off(self, now: float) -> None:
        for connection in self.connections:
            connection.cut_off(now)

    def overrule(self) -> None:
        for connection in self.connections:
            connection.settler.overrule()

    async def until_settled(self) -> None:
        for connection in self.connections:
            await connection.settler.until_idle()

    @property
    def is_stopped(self) -> bool:
        return not any(connection.is_running for connection in self.connections)

    @property
    def has_polled(self) -> bool:
        return any(connection.has_polled for connection in self.connections)

    def is_healthy(self, now: float) -> bool:
        return all(connection.is_healthy(now) for connection in self.connections)

    async def depth(self) -> Depth | None:
        """Asked over the first connection that is open; what it answers concerns all of them."""
        connected = [each for each in self.connections if each.is_connected]
        depth = await connected[0].depth() if connected else None
        if depth is not None:
            self.last_depth = depth
            for connection in self.connections:
                connection.note_depth(depth, _now())
        return depth


def _now() -> float:
    return asyncio.get_running_loop().time()
