"""Several routers work at the same time, each on the queues whose leases it holds (CFG-10).

A queue whose broker does not hold groups back is received by one router only: the one that holds
its lease. A router takes leases the more slowly, the more it holds, so free ones go to those that
have few.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import Final

from router.core.config import QueueConfig, RoutingConfig
from router.core.config_plan import Plan
from router.core.leadership import LONG_AGO, Leadership
from router.core.returning import Jitter
from router.core.state import LeaseState, StandbyStatus
from router.core.warnings import Code, Severity
from router.engine.alerts import Alerts
from router.engine.consumer import QueueConsumer
from router.engine.periodic import keep_running
from router.engine.queue_manager import QueueManager
from router.engine.tenure import REFRESH_SHARE, Tenure
from router.ports import Conflict, Locks, Unknown

log = logging.getLogger(__name__)

STEP_SECONDS: Final = 1.0  # a router takes a lease so much later for each that it has
LOOK_SECONDS: Final = 0.2  # between two looks whether a queue is drained
SOURCE: Final = "Leases"


class Phase(Enum):
    WAITING = "WAITING"  # another router has it, or none yet
    HELD = "HELD"
    DRAINING = "DRAINING"  # it is given back once nothing of its queue is open


class QueueLease:
    """The lease of one queue, as this router sees it."""

    def __init__(self, queue: str, tenure: Tenure) -> None:
        self.queue = queue
        self.tenure = tenure
        self.phase = Phase.WAITING
        self.rests_until = LONG_AGO  # others may have it first
        self.is_wanted = True  # its queue is in the configuration
        self.keeper: asyncio.Task[None]  # while this router has it


class QueueLeases:
    def __init__(
        self,
        locks: Locks,
        manager: QueueManager,
        alerts: Alerts,
        *,
        instance: str,
        ttl: float,  # of a lease, seconds
        wall: Callable[[], float],
        now: Callable[[], float],  # it runs while the process is stopped
        jitter: Jitter,
    ) -> None:
        self._locks = locks
        self._manager = manager
        self._alerts = alerts
        self._warn = partial(alerts.of(SOURCE), Code.STANDBY_LOCK)
        self._instance = instance
        self._ttl = ttl
        self._wall = wall
        self._now = now
        self._jitter = jitter
        self._leases: dict[str, QueueLease] = {}
        self._refused: set[str] = set()  # queues whose order would not hold
        self._first_partitions: dict[str, str] = {}  # by their entries
        self._tasks = manager.deps.tasks
        self._running: set[asyncio.Task[None]] = set()
        self._taking: asyncio.Task[None] | None = None
        manager.leadership_of = self._leadership_of

    def status(self) -> StandbyStatus:
        states = tuple(self._state(lease) for lease in self._leases.values())
        return StandbyStatus(enabled=True, instance=self._instance, primary=True, leases=states)

    def may_publish(self, queue: str) -> bool:
        """Return whether this router publishes the schedules of a queue.

        Those of partitions are published by whoever has the first one.
        """
        queue = self._first_partitions.get(queue, queue)
        lease = self._leases.get(queue)
        if lease is None:
            return queue not in self._refused
        return lease.phase is Phase.HELD and not lease.tenure.leadership.is_over

    async def apply(self, config: RoutingConfig) -> Plan:
        """Run it, as far as this router has the leases."""
        leased = {queue.name: queue for queue in config.queues if self._needs_lease(queue)}
        self._first_partitions = {
            queue.entry.name: queue.name for queue in reversed(config.queues) if queue.entry
        }
        self._refused = {queue.name for queue in config.queues if self._loses_order(queue)}
        for name in self._refused:
            text = (
                f"{name} is strict and its order store is a file of this router, which no other"
                " one could go on with: it is not consumed. Set MESSAGE_ROUTER_ORDER_STORE"
            )
            warn = self._alerts.of(f"Consumer:{name}")
            warn(Code.QUEUE_VALIDATION, text, Severity.CRITICAL)
        for name, lease in self._leases.items():
            lease.is_wanted = name in leased and name not in self._refused
        for name in leased:
            if name not in self._refused and name not in self._leases:
                self._leases[name] = QueueLease(name, self._tenure_of(name))
        plan = await self._manager.apply(config)
        for lease in list(self._leases.values()):
            if lease.is_wanted:
                continue
            if lease.phase is Phase.HELD:
                self._give_back(lease)
            elif lease.phase is Phase.WAITING:
                del self._leases[lease.queue]
        return plan

    def start(self, tasks: asyncio.TaskGroup) -> None:
        running = keep_running("leases", self.run, self._alerts.of(SOURCE))
        self._taking = tasks.create_task(running, name="leases")
        self._keep(self._taking)

    def stop(self) -> None:
        """Take no more leases; keep those that this router has: it is about to end."""
        if self._taking is not None:
            self._taking.cancel()

    async def close(self) -> None:
        """Release all leases, so that other routers can take over at once."""
        running = list(self._running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        # Those that it does not have, too: it may have been asking for one right now.
        await asyncio.gather(*(lease.tenure.release() for lease in self._leases.values()))

    def release(self, queue: str) -> None:
        """Give the lease of a queue to another router. Raises Unknown or Conflict."""
        lease = self._leases.get(queue)
        if lease is None:
            raise Unknown(f"queue {queue!r} has no lease")
        if lease.phase is Phase.WAITING:
            raise Conflict("this router does not hold the lease of the queue")
        if lease.phase is Phase.HELD:
            self._give_back(lease)

    async def run(self) -> None:
        """Take leases that are free, until cancelled."""
        while True:
            while await self._take_one():
                pass
            await asyncio.sleep(self._ttl * REFRESH_SHARE)

    async def _take_one(self) -> bool:
        """Take a free lease, the later the more this router has. Return False if none is free."""
        held = sum(lease.phase is not Phase.WAITING for lease in self._leases.values())
        wait = min(held * STEP_SECONDS, self._ttl * REFRESH_SHARE)
        await asyncio.sleep(wait + self._jitter(0.0, min(STEP_SECONDS, self._ttl * REFRESH_SHARE)))
        now = self._now()
        waiting = [
            lease
            for lease in self._leases.values()
            if lease.phase is Phase.WAITING and lease.rests_until <= now
        ]
        # Routers that start together do not ask for the same ones.
        for lease in sorted(waiting, key=lambda _: self._jitter(0.0, 1.0)):
            is_ours = await lease.tenure.take()
            if is_ours is None:  # the server does not answer: neither would it for the others
                return False
            if is_ours and lease.is_wanted:
                self._begin(lease)
                return True
        return False

    def _begin(self, lease: QueueLease) -> None:
        lease.tenure.begin()
        lease.phase = Phase.HELD
        log.info("lease of a queue taken", extra=_facts(lease))
        self._manager.take_queue(lease.queue)
        lease.keeper = self._tasks.create_task(self._hold(lease), name=f"lease of {lease.queue}")
        self._keep(lease.keeper)

    async def _hold(self, lease: QueueLease) -> None:
        """Keep a lease until it is given back or lost."""
        while await lease.tenure.is_kept():
            pass
        log.warning("lease of a queue lost", extra=_facts(lease))
        lease.tenure.leadership.is_ending = True
        consumers = self._manager.give_up_queue(lease.queue)
        await self._ended(consumers, lease.tenure.left)
        lease.tenure.leadership.until = LONG_AGO
        self._manager.abort_queue(consumers)
        self._end(lease)

    def _give_back(self, lease: QueueLease) -> None:
        lease.phase = Phase.DRAINING
        lease.tenure.leadership.is_ending = True
        consumers = self._manager.give_up_queue(lease.queue)
        draining = self._drain(lease, consumers)
        self._keep(self._tasks.create_task(draining, name=f"drain {lease.queue}"))

    async def _drain(self, lease: QueueLease, consumers: Sequence[QueueConsumer]) -> None:
        """Give a lease back once nothing of its queue is held (open requests end)."""
        tenure = lease.tenure
        await self._ended(consumers)
        # Else it was lost meanwhile, and perhaps taken again.
        if lease.phase is Phase.DRAINING and lease.tenure is tenure:
            lease.keeper.cancel()
            self._end(lease)
            lease.rests_until = self._now() + self._ttl
            log.info("lease of a queue given back", extra=_facts(lease))
            await tenure.release()

    def _end(self, lease: QueueLease) -> None:
        """Note that this router has the lease no more."""
        lease.phase = Phase.WAITING
        # Consumers of the past stay under the leadership of the past.
        fence, holder = lease.tenure.fence, lease.tenure.holder
        lease.tenure = self._tenure_of(lease.queue)
        lease.tenure.fence, lease.tenure.holder = fence, holder
        if not lease.is_wanted:
            del self._leases[lease.queue]

    async def _ended(
        self, consumers: Sequence[QueueConsumer], at_most: float | None = None
    ) -> None:
        """Wait until these have received and settled everything."""
        deadline = None if at_most is None else self._now() + at_most
        while not all(consumer.is_stopped for consumer in consumers):
            if deadline is not None and self._now() >= deadline:
                return
            await asyncio.sleep(LOOK_SECONDS)

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def _tenure_of(self, queue: str) -> Tenure:
        return Tenure(
            self._locks.lock(queue),
            Leadership(self._now),
            ttl=self._ttl,
            name=f"the lease of queue {queue}",
            warn=self._warn,
        )

    def _needs_lease(self, queue: QueueConfig) -> bool:
        return not queue.broker.holds_groups(queue.uri)

    def _loses_order(self, queue: QueueConfig) -> bool:
        """Return whether another router could not go on where this one has stopped."""
        order = self._manager.deps.order
        return queue.is_stored and order is not None and not order.is_shared

    def _leadership_of(self, queue: QueueConfig) -> Leadership | None:
        """Return under which leadership it is consumed here; None: not here."""
        if queue.name in self._refused:
            return None
        if not self._needs_lease(queue):
            return self._manager.deps.leadership
        lease = self._leases.get(queue.name)
        if lease is None or lease.phase is not Phase.HELD or not lease.is_wanted:
            return None
        leadership = lease.tenure.leadership
        return None if leadership.is_ending else leadership  # given up, though not yet free

    def _state(self, lease: QueueLease) -> LeaseState:
        tenure = lease.tenure
        age = None if tenure.refreshed_at is None else self._now() - tenure.refreshed_at
        return LeaseState(
            queue=lease.queue,
            phase=lease.phase.value,
            holder=self._instance if lease.phase is not Phase.WAITING else tenure.holder,
            fence=tenure.fence,
            last_refresh=None if age is None else self._wall() - age,
        )


def _facts(lease: QueueLease) -> dict[str, object]:
    return {"queue": lease.queue, "fence": lease.tenure.fence}
