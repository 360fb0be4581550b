"""Scheduled work, one run-once function each (OPS-1). They start once the router is initialized."""

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from router.core.config import MAX_BATCH_MESSAGES
from router.core.returning import ReturnReason
from router.core.warnings import Code, Severity
from router.engine.alerts import Alerts
from router.engine.breaker import Breaker, Breakers
from router.engine.delivery import nack_all
from router.engine.dispatch import SOURCE
from router.engine.groups import GroupDesk
from router.engine.job import Return
from router.engine.periodic import every
from router.engine.queue_manager import QueueManager
from router.ports import BrokerError

BACKLOG_MESSAGES: Final = 1000
GROWTH_MESSAGES: Final = 100  # between two measurements
GROWTHS_IN_A_ROW: Final = 3
NEARLY_FULL_SHARE: Final = 0.8  # of a limit
DOWN_SECONDS: Final = 900.0  # a target whose circuit has not closed for this long is down


class Chores:
    def __init__(
        self,
        manager: QueueManager,
        breakers: Breakers,
        alerts: Alerts,
        groups: GroupDesk | None = None,
    ) -> None:
        """`groups`: of strict queues, which are measured, too."""
        self._groups = groups
        self._manager = manager
        self._breakers = breakers
        self._warn = alerts.of(SOURCE)
        self._waiting: dict[str, list[int]] = {}  # the last depths of each queue
        self._down: dict[Breaker, str] = {}  # and what was said when it was noticed

    def start(self, tasks: asyncio.TaskGroup) -> Sequence[asyncio.Task[None]]:
        schedule = (
            (60.0, self.restart_silent_consumers),
            (10.0, self.forget_finished),
            (30.0, self.look_for_leaks),
            (30.0, self.measure_queues),
            (30.0, self.measure_stores),
            (10.0, self.report_targets_down),
            (60.0, self.nack_overdue),
        )
        return [
            tasks.create_task(every(seconds, chore), name=chore.__name__)
            for seconds, chore in schedule
        ]

    async def restart_silent_consumers(self) -> None:
        now = asyncio.get_running_loop().time()
        for consumer in list(self._manager.consumers.values()):
            if not consumer.is_silent(now):
                continue
            name = consumer.queue.name
            if consumer.restarts and not consumer.has_polled:
                text = f"consumer of {name} is silent although it was restarted"
                self._warn(Code.CONSUMER_RESTART_FAILED, text, Severity.CRITICAL)
            else:
                self._warn(Code.CONSUMER_RESTART, f"consumer of {name} is silent and is restarted")
            self._manager.restart(consumer)

    async def forget_finished(self) -> None:
        now = asyncio.get_running_loop().time()
        self._manager.forget_finished(now)
        self._manager.deps.targets.drop_idle(now)

    async def report_targets_down(self) -> None:
        """Raise a warning for as long as a target is down; its text stays the same (OPS-2)."""
        now = asyncio.get_running_loop().time()
        down = [each for each in self._breakers.all() if each.outage(now) >= DOWN_SECONDS]
        self._down = {each: self._down.get(each) or _down_text(each) for each in down}
        for text in self._down.values():
            self._warn(Code.TARGET_DOWN, text, Severity.ERROR)

    async def look_for_leaks(self) -> None:
        """Warn of a leak (TRK-1). A receiver may hold one batch on top of what is in the pools."""
        manager = self._manager
        pools = (*manager.pools.values(), *manager.draining_pools.values())
        consumers = (*manager.consumers.values(), *manager.stopping_consumers)
        bound = sum(pool.capacity + pool.config.concurrency for pool in pools)
        bound += sum(
            MAX_BATCH_MESSAGES * len(consumer.connections) + consumer.flow.waiting
            for consumer in consumers
        )
        if len(manager.registry.tracker) > bound:
            self._warn(Code.PIPELINE_MAP_LEAK, "more messages are tracked than the pools can hold")

    async def nack_overdue(self) -> None:
        """Return what waits for longer than its broker allows, before it is taken away (BRK-5)."""
        now = asyncio.get_running_loop().time()
        manager = self._manager
        flows = [consumer.flow for consumer in manager.consumers.values()]
        overdue = [job for pool in manager.pools.values() for job in pool.take_overdue(now)]
        overdue += [job for flow in flows for job in flow.take_overdue(now)]
        await nack_all([Return(job, ReturnReason.OVERDUE) for job in overdue])

    async def measure_queues(self) -> None:
        consumers = self._manager.consumers
        self._waiting = {name: self._waiting.get(name, []) for name in consumers}
        for name, consumer in list(consumers.items()):
            try:
                depth = await consumer.depth()
            except BrokerError:
                continue  # its receiver reports that
            if depth is None:
                continue
            if depth.waiting > BACKLOG_MESSAGES:
                self._warn(
                    Code.QUEUE_BACKLOG, f"more than {BACKLOG_MESSAGES} messages wait in {name}"
                )
            seen = self._waiting.setdefault(name, [])
            seen.append(depth.waiting)
            del seen[: -(GROWTHS_IN_A_ROW + 1)]
            steps = [after - before for before, after in pairwise(seen)]
            if len(steps) == GROWTHS_IN_A_ROW and min(steps) >= GROWTH_MESSAGES:
                self._warn(Code.QUEUE_GROWING, f"{name} grows faster than it is delivered")
            limit = depth.delayed_limit
            if limit is not None and depth.delayed >= limit * NEARLY_FULL_SHARE:
                text = (
                    f"messages of {name} that wait for a retry use up its limit of unsettled ones"
                )
                self._warn(Code.BROKER_LIMIT, text)

    async def measure_stores(self) -> None:
        if self._groups is not None:
            await self._groups.measure()


def _down_text(breaker: Breaker) -> str:
    waiting = f"at least {breaker.behind}" if breaker.behind else "no known"
    return (
        f"{breaker.name} has been down for 15 minutes (fault: {breaker.fault or 'unknown'}); "
        f"{waiting} messages wait for it in their queues"
    )
