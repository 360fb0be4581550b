"""One of several routers works at a time: the one that holds the leader lock (CFG-9)."""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Final

from router.core.config import RoutingConfig
from router.core.config_plan import Plan
from router.core.leadership import LONG_AGO
from router.core.state import StandbyStatus
from router.core.warnings import Code
from router.engine.alerts import Alerts
from router.engine.leases import QueueLeases
from router.engine.periodic import keep_running
from router.engine.queue_manager import ABORT_GRACE_SECONDS, QueueManager, settled
from router.engine.tenure import REFRESH_SHARE, Tenure
from router.ports import Lock

log = logging.getLogger(__name__)

LOOK_SECONDS: Final = 1.0  # between two attempts at a lock that another router holds
SOURCE: Final = "Standby"


def warn_of_own_stores(manager: QueueManager, config: RoutingConfig) -> None:
    """Name the strict queues with which a router on another machine could not go on (ORD-4)."""
    order = manager.deps.order
    for queue in config.queues:
        if queue.is_stored and order is not None and not order.is_shared:
            text = (
                f"{queue.name} is strict, and its order store is a file of this router: a router"
                " on another machine that takes it over cannot go on with the groups in it. Set"
                " MESSAGE_ROUTER_ORDER_STORE, or use one state directory"
            )
            manager.deps.alerts.of(f"Consumer:{queue.name}")(Code.QUEUE_VALIDATION, text)


class Alone:
    """The election of a router without a standby: it works from its start to its end."""

    def __init__(self, manager: QueueManager, instance: str, *, has_replicas: bool = False) -> None:
        """`has_replicas`: others work, too, and take over what this one leaves."""
        self._manager = manager
        self._instance = instance
        self._has_replicas = has_replicas

    def status(self) -> StandbyStatus:
        return StandbyStatus(enabled=False, instance=self._instance, primary=True)

    async def apply(self, config: RoutingConfig) -> Plan:
        if self._has_replicas:
            warn_of_own_stores(self._manager, config)
        return await self._manager.apply(config)

    def may_publish(self, _queue: str) -> bool:
        """Return whether this router publishes the schedules of a queue."""
        return True

    def start(self, tasks: asyncio.TaskGroup) -> None: ...

    def stop(self) -> None: ...

    async def close(self) -> None: ...


class Standby:
    def __init__(
        self,
        lock: Lock,
        manager: QueueManager,
        alerts: Alerts,
        *,
        instance: str,
        ttl: float,  # of the lock, seconds
        wall: Callable[[], float],
        on_change: Callable[[bool], None],  # whether this router is the primary now
    ) -> None:
        self._instance = instance
        self._manager = manager
        self._alert = alerts.of(SOURCE)
        self._wall = wall
        self._on_change = on_change
        self._leadership = manager.deps.leadership
        warn = partial(self._alert, Code.STANDBY_LOCK)
        self._tenure = Tenure(lock, self._leadership, ttl=ttl, name="the leader lock", warn=warn)
        self._is_primary = False
        self._is_stopping = False
        self._task: asyncio.Task[None] | None = None

    def status(self) -> StandbyStatus:
        refreshed_at = self._tenure.refreshed_at
        age = None if refreshed_at is None else self._leadership.now() - refreshed_at
        return StandbyStatus(
            enabled=True,
            instance=self._instance,
            primary=self._is_primary,
            lock_holder=self._tenure.holder,
            last_refresh=None if age is None else self._wall() - age,
        )

    def may_publish(self, _queue: str) -> bool:
        """Return whether this router publishes the schedules of a queue."""
        return self._is_primary

    async def apply(self, config: RoutingConfig) -> Plan:
        """Run it, or keep it until this router becomes the primary."""
        warn_of_own_stores(self._manager, config)
        if self._is_primary:
            return await self._manager.apply(config)
        return self._manager.keep(config)

    def start(self, tasks: asyncio.TaskGroup) -> None:
        running = keep_running("standby", self.run, self._alert)
        self._task = tasks.create_task(running, name="standby")

    def stop(self) -> None:
        """Take the lock no more; keep it, if this router has it: it is about to end."""
        self._is_stopping = True
        if self._task is not None and not self._is_primary:
            self._task.cancel()

    async def close(self) -> None:
        """Release the lock, so that another router can take over at once."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.wait((self._task,))
        await self._tenure.release()

    async def run(self) -> None:
        """Wait for the lock, work while this router has it, again and again, until cancelled."""
        while not self._is_stopping:
            await self._take_lock()
            log.info("this router is the primary now", extra={"fence": self._tenure.fence})
            self._tenure.begin()
            self._change_role(primary=True)
            await self._manager.apply(self._manager.applied)
            while await self._tenure.is_kept():
                pass
            await self._step_down()

    async def _take_lock(self) -> None:
        """Ask for the lock until this router has it."""
        while True:
            if await self._tenure.take():
                return
            await asyncio.sleep(min(LOOK_SECONDS, self._tenure.share(REFRESH_SHARE)))

    async def _step_down(self) -> None:
        """End all work while this router has the lock; leave the rest to the brokers."""
        log.warning("this router is no longer the primary")
        self._change_role(primary=False)
        self._manager.stop()
        if not await settled(self._manager, self._tenure.left):
            self._manager.abort(settling=True)
            await settled(self._manager, ABORT_GRACE_SECONDS)
        self._leadership.until = LONG_AGO

    def _change_role(self, *, primary: bool) -> None:
        self._is_primary = primary
        self._on_change(primary)


Election = Alone | Standby | QueueLeases
