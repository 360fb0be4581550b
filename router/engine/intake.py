"""Bringing messages in from one queue: its connections, each a receive loop that survives (§3)."""

import asyncio
import logging
from typing import Final

from router.core.backoff import reconnect_delays
from router.core.config import MAX_BATCH, QueueConfig
from router.core.stats import Counts
from router.core.warnings import Code, Severity
from router.engine.context import Context
from router.engine.periodic import every
from router.engine.process_pool import ProcessPool
from router.engine.settler import Settler
from router.ports import Broker, Depth, Disconnected, QueueRefused

log = logging.getLogger(__name__)

SILENT_AFTER: Final = 60.0  # BRK-1
UNREACHABLE_AFTER: Final = 60.0  # BRK-6
FRUITLESS_PAUSE: Final = 2.0  # ROUTE-5


class Connection:
    """One receiver of a queue."""

    def __init__(self, queue: QueueConfig, context: Context, counts: Counts) -> None:
        self.queue = queue
        self.settler = Settler(queue, context, counts)
        self.task: asyncio.Task[None] | None = None
        self.is_running = False
        self.is_waiting = False  # for the broker, or for room: no reason to call it silent
        self.last_poll = _now()  # the last successful one, or its start
        self._context = context
        self._broker: Broker | None = None
        self._stopping = False
        self._fed: frozenset[ProcessPool] = frozenset()  # by the last batch
        self._was_open = False
        self._lost_at: float | None = None

    def start(self) -> None:
        self.is_running = True
        self.task = self._context.tasks.create_task(self._run(), name=f"receive {self.queue.name}")

    def stop(self) -> None:
        """Receive no more; what was brought is still settled."""
        self._stopping = True
        if self._broker is not None:
            self._broker.interrupt()
        self._context.bell.ring()
        self.settler.emptied.ring()

    def is_healthy(self, now: float) -> bool:
        return not self.is_running or self.is_waiting or now - self.last_poll <= SILENT_AFTER

    async def depth(self) -> Depth | None:
        return None if self._broker is None else await self._broker.depth()

    async def _run(self) -> None:
        delays = reconnect_delays(self._context.jitter)
        while not self._stopping or self.settler.held:
            try:
                async with self._context.brokers.open_queue(self.queue) as broker:
                    delays = reconnect_delays(self._context.jitter)
                    await self._serve(broker)
            except QueueRefused as error:
                self._warn(Code.QUEUE_VALIDATION, f"{self.queue.name} cannot be consumed: {error}")
                await self._back_off(UNREACHABLE_AFTER)
            except Disconnected as error:
                self._note_loss(error)
                await self._back_off(next(delays))
            except Exception:
                # The bulkhead: a bug met on one connection must end neither it nor the others.
                log.exception("connection failed", extra={"queue": self.queue.name})
                await self._back_off(next(delays))
        self.is_running = False

    async def _serve(self, broker: Broker) -> None:
        """Receive until told to stop; then stay until all that was brought is settled."""
        self._was_open, self._lost_at, self._broker = True, None, broker
        self.settler.connected(broker)
        if self.queue.connections > 1 and not broker.holds_groups:
            text = f"{self.queue.name} does not hold groups back: several connections break order"
            self._warn(Code.QUEUE_VALIDATION, text)
        keeper = self._keep_leases(broker)
        try:
            await self._receive(broker)
            while self.settler.held:
                await self.settler.emptied.wait()
        finally:
            if keeper is not None:
                keeper.cancel()
            self._broker = None
            self.settler.disconnected()

    def _keep_leases(self, broker: Broker) -> asyncio.Task[None] | None:
        if broker.lease_seconds is None:
            return None
        # Twice as often as due: then an extension comes between a third and half of the lease.
        renewing = every(broker.lease_seconds / 6, self.settler.keep_alive)
        return self._context.tasks.create_task(renewing, name=f"leases {self.queue.name}")

    async def _receive(self, broker: Broker) -> None:
        while not self._stopping:
            limit = await self._wait_for_room()
            if self._stopping:
                return
            deliveries = await broker.receive(limit)
            self.last_poll = _now()
            if self._stopping:
                await self.settler.reject(deliveries)
            elif deliveries:
                self._fed = frozenset((await self.settler.admit(deliveries)).fed)

    async def _wait_for_room(self) -> int:
        """Back pressure is asking for less (BRK-1, ROUTE-5). Answers how many to ask for."""
        pools = self._context.routing.pools
        if self.settler.is_fruitless:
            self.settler.is_fruitless = False
            await self._wait(FRUITLESS_PAUSE)
        while not self._stopping and not pools.have_room:
            await self._wait(None)
        if self._fed and not any(pool.has_room for pool in self._fed):
            await self._wait(FRUITLESS_PAUSE)  # others have room: look for theirs, in no hurry
        room = max((pool.room for pool in self._fed), default=MAX_BATCH)
        most = min(self.queue.max_messages or MAX_BATCH, MAX_BATCH)
        return min(room, most) if room > 0 else most

    async def _wait(self, at_most: float | None) -> None:
        """A pause that ends early when a pool has room again, or when the intake stops."""
        if self._stopping:
            return
        self.is_waiting = True
        await self._context.bell.wait(at_most)
        self.is_waiting = False
        self.last_poll = _now()  # it was not silent, it was held back

    async def _back_off(self, seconds: float) -> None:
        deadline = _now() + seconds
        while not self._stopping and (left := deadline - _now()) > 0:
            await self._wait(left)

    def _note_loss(self, error: Disconnected) -> None:
        """Warn of a queue that never answered at once, of a lost one after a minute."""
        log.warning("connection lost: %s", error, extra={"queue": self.queue.name})
        if self._lost_at is None:
            self._lost_at = _now()
        if _now() - self._lost_at >= UNREACHABLE_AFTER or not self._was_open:
            self._warn(Code.QUEUE_UNREACHABLE, f"{self.queue.name} cannot be reached: {error}")

    def _warn(self, code: Code, text: str) -> None:
        source = f"Consumer:{self.queue.name}"
        self._context.alerts.raise_warning(code, Severity.WARN, source, text)


class Intake:
    """The consumer of one queue."""

    def __init__(self, queue: QueueConfig, context: Context, restarts: int = 0) -> None:
        self.queue = queue
        self.counts = Counts()
        self.restarts = restarts
        self.connections = [
            Connection(queue, context, self.counts) for _ in range(queue.connections)
        ]

    def start(self) -> None:
        for connection in self.connections:
            connection.start()

    def stop(self) -> None:
        for connection in self.connections:
            connection.stop()

    @property
    def is_stopped(self) -> bool:
        return not any(connection.is_running for connection in self.connections)

    def is_healthy(self, now: float) -> bool:
        return all(connection.is_healthy(now) for connection in self.connections)

    async def depth(self) -> Depth | None:
        return await self.connections[0].depth()


def _now() -> float:
    return asyncio.get_running_loop().time()
