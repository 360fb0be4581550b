"""One of several routers works at a time: the one that holds the leader lock (CFG-9).

All times are read before the lock server is asked, so that this router trusts its lock for no
longer than the server does. If the lock cannot be refreshed, work ends while it is still held:

    0 ─────────── 1/3 ─────────────── 2/3 ───────────────────── TTL
    refreshed     refresh it          receive and send no more, nothing is sent or
                  (again and again)   return what is queued     settled any more
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final, TypeVar

from router.core.config import RoutingConfig
from router.core.config_plan import Plan
from router.core.leadership import LONG_AGO
from router.core.state import StandbyStatus
from router.core.warnings import Code
from router.engine.alerts import Alerts
from router.engine.periodic import end_if_cancelled, keep_running
from router.engine.queue_manager import ABORT_GRACE_SECONDS, QueueManager, settled
from router.ports import Lock, LockUnavailable

log = logging.getLogger(__name__)

REFRESH_SHARE: Final = 1 / 3  # of the TTL: when to refresh the lock
SURRENDER_SHARE: Final = 2 / 3  # of the TTL: when to stop working if the lock was not refreshed
LOOK_SECONDS: Final = 1.0  # between two attempts at a lock that another router holds
CALL_SECONDS: Final = 5.0
SOURCE: Final = "Standby"

T = TypeVar("T")


class Alone:
    """The election of a router without a standby: it works from its start to its end."""

    def __init__(self, manager: QueueManager, instance: str) -> None:
        self._manager = manager
        self._instance = instance

    def status(self) -> StandbyStatus:
        return StandbyStatus(enabled=False, instance=self._instance, primary=True)

    async def apply(self, config: RoutingConfig) -> Plan:
        return await self._manager.apply(config)

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
        self._lock = lock
        self._instance = instance
        self._ttl = ttl
        self._manager = manager
        self._alert = alerts.of(SOURCE)
        self._warn = partial(self._alert, Code.STANDBY_LOCK)
        self._wall = wall
        self._on_change = on_change
        self._leadership = manager.deps.leadership
        self._leadership.until = LONG_AGO
        self._is_primary = False
        self._holder: str | None = None
        self._refreshed_at: float | None = None  # the lock, by its holder
        self._is_stopping = False
        self._task: asyncio.Task[None] | None = None

    def status(self) -> StandbyStatus:
        age = None if self._refreshed_at is None else self._leadership.now() - self._refreshed_at
        return StandbyStatus(
            enabled=True,
            instance=self._instance,
            primary=self._is_primary,
            lock_holder=self._holder,
            last_refresh=None if age is None else self._wall() - age,
        )

    async def apply(self, config: RoutingConfig) -> Plan:
        """Run it, or keep it until this router becomes the primary."""
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
        self._leadership.until = LONG_AGO  # before another one can have the lock
        await self._ask(self._lock.release())

    async def run(self) -> None:
        """Wait for the lock, work while this router has it, again and again, until cancelled."""
        while not self._is_stopping:
            fence = await self._take_lock()
            log.info("this router is the primary now", extra={"fence": fence})
            self._leadership.until = self._refreshed + self._ttl
            self._change_role(primary=True)
            await self._manager.apply(self._manager.applied)
            while await self._is_kept(fence):
                pass
            await self._step_down()

    async def _take_lock(self) -> int:
        """Ask for the lock until this router has it. Return its fence."""
        while True:
            asked_at = self._leadership.now()
            lock = await self._ask(self._lock.acquire())
            if lock is not None:
                self._holder = lock.holder
                if lock.holder is not None:
                    self._refreshed_at = asked_at - lock.age
                if lock.is_ours and self._leadership.now() < asked_at + self._share(
                    SURRENDER_SHARE
                ):
                    return lock.fence
            await asyncio.sleep(min(LOOK_SECONDS, self._share(REFRESH_SHARE)))

    async def _is_kept(self, fence: int) -> bool:
        """Refresh the lock once it is due. Return False if it is lost, or cannot be refreshed."""
        give_up = self._refreshed + self._share(SURRENDER_SHARE)
        await asyncio.sleep(self._refreshed + self._share(REFRESH_SHARE) - self._leadership.now())
        while (asked_at := self._leadership.now()) < give_up:
            renewed = await self._ask(self._lock.renew(fence), within=give_up - asked_at)
            if renewed is None:
                pause = self._share(REFRESH_SHARE) / 10
                await asyncio.sleep(min(pause, max(give_up - self._leadership.now(), 0.0)))
                continue
            if renewed:
                self._refreshed_at = asked_at
                self._leadership.until = asked_at + self._ttl
            else:  # somebody took it, or the server forgot it: there may be another primary already
                self._leadership.until = LONG_AGO
                self._warn("the leader lock was lost although it was refreshed in time")
            return renewed
        return False

    async def _step_down(self) -> None:
        """End all work while this router has the lock; leave the rest to the brokers."""
        log.warning("this router is not the primary any more")
        self._change_role(primary=False)
        self._manager.stop()
        left = max(self._leadership.until - self._leadership.now(), 0.0)
        if not await settled(self._manager, left):
            self._manager.abort(settling=True)
            await settled(self._manager, ABORT_GRACE_SECONDS)
        self._leadership.until = LONG_AGO

    def _change_role(self, *, primary: bool) -> None:
        self._is_primary = primary
        self._on_change(primary)

    async def _ask(self, call: Coroutine[Any, Any, T], within: float = CALL_SECONDS) -> T | None:
        """Return the answer, or None if there was none."""
        answer: T | None = None
        try:
            async with asyncio.timeout(min(within, CALL_SECONDS, self._share(REFRESH_SHARE))):
                answer = await call
        except LockUnavailable as error:
            self._warn(f"the leader lock cannot be reached: {error}")
        except TimeoutError:
            self._warn("the leader lock cannot be reached: no answer in time")
        except Exception as error:
            # The bulkhead: a bug in an adapter costs the lock, never the router.
            log.exception("the leader lock failed unexpectedly")
            self._warn(f"the leader lock cannot be reached: {type(error).__name__}")
        end_if_cancelled()
        return answer

    @property
    def _refreshed(self) -> float:
        assert self._refreshed_at is not None  # noqa: S101  for the type checker: we have the lock
        return self._refreshed_at

    def _share(self, of_ttl: float) -> float:
        return self._ttl * of_ttl


Election = Alone | Standby
