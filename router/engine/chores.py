"""Scheduled work, one run-once function each (OPS-1). They start once the router is initialized."""

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from router.core.config import MAX_BATCH
from router.core.warnings import Code, Severity
from router.engine.alerts import Alerts
from router.engine.breaker import Breakers
from router.engine.intake import Intake
from router.engine.periodic import every
from router.engine.queue_manager import SOURCE, QueueManager
from router.ports import BrokerError, Depth

BACKLOG: Final = 1000
GROWTH: Final = 100
GROWTHS_IN_A_ROW: Final = 3
NEARLY_ALL: Final = 0.8


class Chores:
    def __init__(self, manager: QueueManager, breakers: Breakers, alerts: Alerts) -> None:
        self._manager = manager
        self._breakers = breakers
        self._alerts = alerts
        self._waiting: dict[str, list[int]] = {}  # the last depths of each queue
        self.depths: dict[str, int] = {}

    def start(self, tasks: asyncio.TaskGroup) -> Sequence[asyncio.Task[None]]:
        schedule = (
            (60.0, self.restart_silent_consumers),
            (10.0, self.let_go_finished),
            (30.0, self.look_for_leaks),
            (30.0, self.measure_queues),
            (60.0, self.give_back_overdue),
        )
        return [
            tasks.create_task(every(seconds, chore), name=chore.__name__)
            for seconds, chore in schedule
        ]

    async def restart_silent_consumers(self) -> None:
        now = asyncio.get_running_loop().time()
        for intake in list(self._manager.intakes.values()):
            if not intake.is_healthy(now):
                self._warn_of_silence(intake)
                self._manager.restart(intake)

    async def let_go_finished(self) -> None:
        now = asyncio.get_running_loop().time()
        self._manager.let_go_finished(now)
        self._breakers.drop_idle(now)

    async def look_for_leaks(self) -> None:
        """TRK-1. An intake may hold one batch per connection on top of what is in the pools."""
        manager = self._manager
        pools = (*manager.pools.values(), *manager.draining_pools.values())
        intakes = (*manager.intakes.values(), *manager.stopping_intakes)
        bound = sum(pool.capacity + pool.config.concurrency for pool in pools)
        bound += sum(MAX_BATCH * len(intake.connections) for intake in intakes)
        if len(manager.routing.tracker) > bound:
            self._warn(Code.PIPELINE_MAP_LEAK, "more messages are tracked than the pools can hold")

    async def give_back_overdue(self) -> None:
        """BRK-5: what waits for longer than its broker allows goes back before it is taken away."""
        now = asyncio.get_running_loop().time()
        for pool in list(self._manager.pools.values()):
            for job in pool.take_overdue(now):
                await job.home.give_back(job, 0.0)

    async def measure_queues(self) -> None:
        for name, intake in list(self._manager.intakes.items()):
            try:
                depth = await intake.depth()
            except BrokerError:
                continue  # the connection itself tells of that
            if depth is not None:
                self.depths[name] = depth.waiting
                self._judge_depth(name, depth.waiting)
                self._judge_deferred(name, depth)
        for name in self.depths.keys() - self._manager.intakes.keys():
            del self.depths[name], self._waiting[name]

    def _warn_of_silence(self, intake: Intake) -> None:
        name = intake.queue.name
        if intake.restarts and not intake.has_polled:
            text = f"consumer of {name} is silent although it was restarted"
            self._warn(Code.CONSUMER_RESTART_FAILED, text, Severity.CRITICAL)
        else:
            self._warn(Code.CONSUMER_RESTART, f"consumer of {name} is silent and is restarted")

    def _judge_deferred(self, name: str, depth: Depth) -> None:
        limit = depth.deferred_limit
        if limit is not None and depth.deferred >= limit * NEARLY_ALL:
            text = f"messages of {name} that wait for a retry use up its limit of unsettled ones"
            self._warn(Code.BROKER_LIMIT, text)

    def _judge_depth(self, name: str, waiting: int) -> None:
        if waiting > BACKLOG:
            self._warn(Code.QUEUE_BACKLOG, f"more than {BACKLOG} messages wait in {name}")
        seen = self._waiting.setdefault(name, [])
        seen.append(waiting)
        del seen[: -(GROWTHS_IN_A_ROW + 1)]
        steps = [after - before for before, after in pairwise(seen)]
        if len(steps) == GROWTHS_IN_A_ROW and min(steps) >= GROWTH:
            self._warn(Code.QUEUE_GROWING, f"{name} grows faster than it is delivered")

    def _warn(self, code: Code, text: str, severity: Severity = Severity.WARN) -> None:
        self._alerts.raise_warning(code, severity, SOURCE, text)
