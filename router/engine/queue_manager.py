"""The owner of pools and intakes: brings what runs in line with the configuration (CFG-6, -7)."""

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from router.core.backoff import Jitter
from router.core.config import (
    DEFAULT_POOL_CONFIG,
    PoolConfig,
    QueueConfig,
    RetryPolicy,
    RoutingConfig,
)
from router.core.job import Job, State
from router.core.mandate import Mandate, unlimited
from router.core.message import DEFAULT_POOL
from router.core.outcome import FAST_FAIL_DELAY
from router.core.stats import Counts
from router.core.warnings import Code, Severity
from router.engine.alerts import Alerts
from router.engine.bell import Bell
from router.engine.context import Context
from router.engine.courier import Deliverer
from router.engine.crew import Crew
from router.engine.intake import Intake
from router.engine.journal import Journal
from router.engine.letters import Letters
from router.engine.process_pool import ProcessPool
from router.engine.routing import Routing
from router.ports import Brokers

log = logging.getLogger(__name__)

SOURCE = "QueueManager"


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the queue manager is given."""

    brokers: Brokers
    mediator: Deliverer
    letters: Letters
    alerts: Alerts
    tasks: asyncio.TaskGroup
    jitter: Jitter
    journal: Journal = field(default_factory=Journal)
    mandate: Mandate = field(default_factory=unlimited)
    longest_delivery: float = 0.0  # seconds, with all its tries
    default_retry: RetryPolicy | None = None  # for pools and queues without one
    max_pools: int = 10_000
    pool_warning_threshold: int = 5_000


class QueueManager:
    def __init__(self, given: Surroundings) -> None:
        self.pools: dict[str, ProcessPool] = {}
        self.draining_pools: dict[str, ProcessPool] = {}
        self.intakes: dict[str, Intake] = {}
        self.stopping_intakes: list[Intake] = []
        self.routing = Routing(self, given.alerts, given.journal)
        self.unknown_pools: Counter[str] = (
            Counter()
        )  # messages for a pool that is not there, by queue
        self.applied = RoutingConfig()
        self.mandate = given.mandate
        self._given = given
        self._full: set[ProcessPool] = set()
        self._bell = Bell()
        self._crew = Crew(given.tasks)
        self._is_stopped = False
        self._context = Context(
            brokers=given.brokers,
            routing=self.routing,
            letters=given.letters,
            alerts=given.alerts,
            tasks=given.tasks,
            bell=self._bell,
            extended=Bell(),
            jitter=given.jitter,
            mandate=given.mandate,
            longest_delivery=given.longest_delivery,
            default_retry=given.default_retry,
        )

    async def apply(self, config: RoutingConfig) -> None:
        """Make it so. What is as it should be is left untouched."""
        self.applied = config
        self._is_stopped = False
        self._crew.recall()
        self._apply_pools({pool.code: pool for pool in config.pools})
        self._apply_queues({queue.name: queue for queue in config.queues})

    def keep(self, config: RoutingConfig) -> None:
        """Know it without running it: a standby publishes by it, and may have to run it soon."""
        self.applied = config

    # What routing asks.

    @property
    def have_room(self) -> bool:
        return not self.pools or len(self._full) < len(self.pools)

    def pool_for(self, job: Job) -> ProcessPool:
        """By its code; a draining one of that code if it still holds its group (§7)."""
        code = job.message.pool or DEFAULT_POOL
        if self.draining_pools:
            drained = self.draining_pools.get(code)
            if drained is not None and drained.holds_group_of(job):
                return drained
        return self.pools.get(code) or self._pool_instead_of(code, job)

    # What operators and chores ask.

    def change_pool(self, config: PoolConfig) -> None:
        """Change a running pool by hand, until the next sync. KeyError: there is none."""
        self.pools[config.code].change(config)

    def let_go_finished(self, now: float) -> None:
        """Forget drained pools and stopped intakes (OPS-1)."""
        for code in [code for code, pool in self.draining_pools.items() if pool.is_drained]:
            del self.draining_pools[code]
            log.info("pool drained", extra={"pool": code})
        for intake in self.stopping_intakes:
            intake.cut_off(now)
        self.stopping_intakes = [each for each in self.stopping_intakes if not each.is_stopped]

    def restart(self, intake: Intake) -> None:
        """Replace an intake that has fallen silent."""
        self._stop(intake)
        self._start(intake.queue, intake.counts, restarts=intake.restarts + 1)

    def stop(self) -> None:
        """Receive no more and send no more; what is held goes back, open POSTs finish.

        Not for good: `apply` starts it again, as when this router becomes the primary (CFG-9).
        """
        self._is_stopped = True
        for intake in list(self.intakes.values()):
            self._stop(intake)
        for code in list(self.pools):
            self._drain(code)
        self._crew.dismiss()

    async def until_settled(self) -> None:
        """Once stopped: until nothing is held any more."""
        for intake in self.stopping_intakes:
            await intake.until_settled()

    def abort(self) -> None:
        """Once stopped: end the POSTs that are still open; their messages go back."""
        for pool in self.draining_pools.values():
            pool.abort()

    def overrule(self) -> None:
        """Once stopped: this router may neither send nor settle any more (CFG-9)."""
        self.abort()
        for intake in self.stopping_intakes:
            intake.overrule()

    # Pools.

    def _apply_pools(self, wanted: dict[str, PoolConfig]) -> None:
        for code in [code for code in self.pools if code not in wanted]:
            if code == DEFAULT_POOL:  # made on demand, it is never drained (CFG-6)
                self.pools[code].change(DEFAULT_POOL_CONFIG)
            else:
                self._drain(code)
        for code, config in wanted.items():
            if code in self.pools:
                self.pools[code].change(config)
            elif code in self.draining_pools:
                self._revive(config)
            else:
                self._create_within_limits(config)

    def _create_within_limits(self, config: PoolConfig) -> None:
        if len(self.pools) >= self._given.max_pools:
            text = f"pool {config.code} was not created: MESSAGE_ROUTER_MAX_POOLS is reached"
            self._given.alerts.raise_warning(Code.POOL_LIMIT, Severity.CRITICAL, SOURCE, text)
            return
        if len(self.pools) >= self._given.pool_warning_threshold:
            self._warn(Code.POOL_LIMIT, "the number of pools comes close to its limit")
        self._create(config)

    def _create(self, config: PoolConfig) -> ProcessPool:
        given = self._given
        pool = ProcessPool(
            config,
            given.mediator,
            self._crew,
            given.alerts,
            jitter=given.jitter,
            mandate=given.mandate,
            on_room=self._room_changed,
            on_group_free=self._group_is_free,
        )
        self.pools[config.code] = pool
        self._bell.ring()
        return pool

    def _pool_instead_of(self, code: str, job: Job) -> ProcessPool:
        """Return the default pool, made on demand (ROUTE-4).

        By queue, because producers can make up any number of pool codes.
        """
        if code != DEFAULT_POOL:
            # One that waited for room was counted when it came.
            self.unknown_pools[job.home.queue_name] += job.state is State.QUEUED
            text = f"no pool {code!r}: its messages go to {DEFAULT_POOL}"
            self._warn(Code.ROUTING, text)
        return self.pools.get(DEFAULT_POOL) or self._default_pool()

    def _default_pool(self) -> ProcessPool:
        if DEFAULT_POOL in self.draining_pools:
            return self._revive(DEFAULT_POOL_CONFIG)
        return self._create(DEFAULT_POOL_CONFIG)

    def _revive(self, config: PoolConfig) -> ProcessPool:
        pool = self.pools[config.code] = self.draining_pools.pop(config.code)
        pool.revive(config)
        self._room_changed(pool)
        log.info("draining pool revived", extra={"pool": config.code})
        return pool

    def _drain(self, code: str) -> None:
        pool = self.draining_pools[code] = self.pools.pop(code)
        self._full.discard(pool)
        self._bell.ring()  # fewer pools that must have room
        pool.drain()
        log.info("pool draining", extra={"pool": code})

    def _room_changed(self, pool: ProcessPool) -> None:
        if pool.has_room:
            self._full.discard(pool)
            self._bell.ring()
        elif not pool.draining:
            self._full.add(pool)

    def _group_is_free(self, waiting: Sequence[Job]) -> None:
        """Jobs that waited for a draining pool's group can be placed now (§7)."""
        refused = waiting if self._is_stopped else self.routing.resubmit(waiting)
        if refused:
            delay = 0.0 if self._is_stopped else FAST_FAIL_DELAY
            self._context.tasks.create_task(_give_back(refused, delay), name="return")

    # Queues.

    def _apply_queues(self, wanted: dict[str, QueueConfig]) -> None:
        replaced: dict[str, Counts] = {}
        for name, intake in list(self.intakes.items()):
            if wanted.get(name) != intake.queue:
                replaced[name] = intake.counts
                self._stop(intake)
        for name, queue in wanted.items():
            if name not in self.intakes:
                self._start(queue, replaced.get(name) or Counts())

    def _start(self, queue: QueueConfig, counts: Counts, restarts: int = 0) -> None:
        intake = self.intakes[queue.name] = Intake(queue, self._context, counts, restarts)
        intake.start()
        log.info("consumer started", extra={"queue": queue.name})

    def _stop(self, intake: Intake) -> None:
        del self.intakes[intake.queue.name]
        intake.stop()
        self.stopping_intakes.append(intake)
        log.info("consumer stopping", extra={"queue": intake.queue.name})

    def _warn(self, code: Code, text: str) -> None:
        self._given.alerts.raise_warning(code, Severity.WARN, SOURCE, text)


async def _give_back(jobs: Sequence[Job], delay: float) -> None:
    for job in jobs:
        await job.home.give_back(job, delay)
