"""The owner of pools and consumers: executes the plan of a configuration (CFG-6, CFG-7).

`shut_down` ends its work: receive no more, finish what is open, give the rest back (OPS-4).
"""

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Final, TypeVar

from msgspec.structs import replace

from router.core.config import (
    DEFAULT_POOL_CONFIG,
    PoolConfig,
    QueueConfig,
    RoutingConfig,
)
from router.core.config_plan import Plan, plan
from router.core.history import Fate, State
from router.core.leadership import Leadership
from router.core.returning import ReturnReason
from router.core.stats import Counts
from router.core.warnings import Code, Severity
from router.engine.alerts import Warn
from router.engine.consumer import RECEIVE_GRACE_SECONDS, QueueConsumer
from router.engine.delivery import DeliveryRunner, nack_all
from router.engine.deps import EngineDeps
from router.engine.dispatch import SOURCE, Dispatcher
from router.engine.job import Job, Return
from router.engine.limits import Permits
from router.engine.pool import Pools, ProcessPool, Workers
from router.engine.settle import Settler
from router.engine.shared_limits import SharedRate
from router.engine.transfer import QueueOrder

log = logging.getLogger(__name__)

SLICE_ENTRIES: Final = 50  # pools or consumers
ABORT_GRACE_SECONDS: Final = 5.0  # for the NACKs of what was aborted

T = TypeVar("T")


async def _in_slices(entries: Sequence[T], wanted: Callable[[], bool]) -> AsyncIterator[T]:
    """Let messages have their turn after each slice, because a document may name thousands.

    If the router stops or gets another configuration meanwhile, the rest is no longer wanted.
    """
    for number, entry in enumerate(entries, start=1):
        if number % SLICE_ENTRIES == 0:
            await asyncio.sleep(0)
        if not wanted():
            return
        yield entry


def _report_skipped(codes: Sequence[str], most: int, warn: Warn) -> None:
    """Raise one warning for all of them: a document can name any number of pools."""
    if codes:
        limit = f"MESSAGE_ROUTER_MAX_POOLS ({most}) is reached"
        text = f"pool {codes[0]} and {len(codes) - 1} others were not created: {limit}"
        warn(Code.POOL_LIMIT, text, Severity.CRITICAL)


class QueueManager:
    def __init__(self, deps: EngineDeps) -> None:
        self.consumers: dict[str, QueueConsumer] = {}
        self.stopping_consumers: list[QueueConsumer] = []
        self.registry = deps.registry
        self.applied = RoutingConfig()
        self.deps = deps
        self._warn = deps.alerts.of(SOURCE)
        self.pools = Pools(partial(self._create, DEFAULT_POOL_CONFIG), deps.room, self._warn)
        self.draining_pools = self.pools.draining
        publishing = deps.publishing
        self.dispatcher = Dispatcher(
            deps.registry, deps.alerts, publishing.reply_queue, wall=publishing.wall
        )
        self._workers = Workers(deps.tasks)
        self._orders: dict[str, QueueOrder] = {}  # of strict queues, by name
        self._is_stopped = False
        # Under which leadership a queue is consumed; None: not by this router now (CFG-10).
        self.leadership_of: Callable[[QueueConfig], Leadership | None] = lambda _: deps.leadership

    async def apply(self, config: RoutingConfig) -> Plan:
        """Run this configuration. Return what was changed; all else is left untouched."""
        self._is_stopped = False
        self._workers.resume()
        ours = tuple(queue for queue in config.queues if self._is_ours(queue))
        changes = plan(self.running, replace(config, queues=ours))
        self.applied = config
        self.deps.targets.configure(config.targets)

        def wanted() -> bool:
            return self.applied is config and not self._is_stopped

        for dropped in changes.drain:
            self.pools.drain(dropped.code)
        for _, changed in changes.change:
            self.pools[changed.code].change(changed)
            log.info("pool changed", extra={"pool": changed.code})
        for stopped in changes.stop:
            self._stop(self.consumers[stopped.name])
        for before, after in changes.replace:
            replaced = self.consumers[before.name]
            self._stop(replaced)
            self._start(after, replaced.counts)
        skipped: list[str] = []
        async for created in _in_slices(changes.create, wanted):
            if created.code in self.pools:  # the default pool: a message came between two slices
                self.pools[created.code].change(created)
            elif self._has_place_for(created.code):
                self._create(created)
            else:
                skipped.append(created.code)
        _report_skipped(skipped, self.deps.max_pools, self._warn)
        async for started in _in_slices(changes.start, wanted):
            self._start(started, Counts())
        return changes

    def take_queue(self, name: str) -> None:
        """Consume a queue of the configuration that this router has got."""
        queue = next((each for each in self.applied.queues if each.name == name), None)
        before = self.consumers.get(name)
        if before is not None and before.is_carried:  # another router has received it so far
            self._stop(before)
        if queue is not None and name not in self.consumers and not self._is_stopped:
            self._start(queue, Counts() if before is None else before.counts)

    def give_up_queue(self, name: str) -> Sequence[QueueConsumer]:
        """Receive no more of a queue, and return what has no open request (CFG-10).

        A shared one is still delivered from the order store. Return the consumers that may hold
        messages.
        """
        consumer = self.consumers.get(name)
        if consumer is not None:
            self._stop(consumer)
        stopping = [each for each in self.stopping_consumers if each.queue.name == name]
        now = asyncio.get_running_loop().time()
        for job in [job for each in stopping for job in each.held]:
            job.hold_until = now  # what waits behind it in its group goes with it
        pools = (*self.pools.values(), *self.draining_pools.values())
        settlers = _settlers_of(stopping)
        for pool in pools:
            pool.runner.admit([job for job in pool.runner.at_gate if job.settler in settlers])
        taken = [job for pool in pools for job in pool.take_overdue(now)]
        self._return([*taken, *_take_waiting(stopping)], f"return {name}")
        if consumer is not None and consumer.queue.is_shared and not self._is_stopped:
            self._start(consumer.queue, consumer.counts)
        return stopping

    def abort_queue(self, consumers: Sequence[QueueConsumer]) -> None:
        """Cut the open requests and calls of stopped consumers: others may have their queue.

        Their connections are closed, whatever still waits for something.
        """
        settlers = _settlers_of(consumers)
        for pool in (*self.pools.values(), *self.draining_pools.values()):
            pool.runner.abort([job for job in pool.runner.requests if job.settler in settlers])
        for consumer in consumers:
            consumer.abort()
        for settler in settlers:
            settler.close()

    def keep(self, config: RoutingConfig) -> Plan:
        """Take note of a configuration without running it: a standby publishes by it."""
        changes = plan(self.applied, config)
        self.applied = config
        return changes

    def _is_ours(self, queue: QueueConfig) -> bool:
        """Return whether this router consumes a queue, or its order store (ORD-13)."""
        return queue.is_shared or self.leadership_of(queue) is not None

    @property
    def running(self) -> RoutingConfig:
        """The configuration as it runs now, with changes by hand and stops applied to it."""
        queues = tuple(consumer.queue for consumer in self.consumers.values())
        pools = tuple(pool.config for pool in self.pools.values())
        return replace(self.applied, queues=queues, pools=pools)

    def forget_finished(self, now: float) -> None:
        """Forget drained pools, stopped consumers, and targets that pools do not use (OPS-1)."""
        for pool in self.pools.values():
            pool.forget_unused_lines()
        for code in [code for code, each in self.draining_pools.items() if each.is_drained]:
            del self.draining_pools[code]
            log.info("pool drained", extra={"pool": code})
        for consumer in self.stopping_consumers:
            consumer.abort_overdue(now)
        self.stopping_consumers = [each for each in self.stopping_consumers if not each.is_stopped]

    def restart(self, consumer: QueueConsumer) -> None:
        """Replace a consumer that has fallen silent."""
        self._stop(consumer)
        restarts = consumer.restarts + 1
        self._start(consumer.queue, consumer.counts, restarts=restarts)

    def stop(self) -> None:
        """Receive no more and send no more; what is held goes back, open requests finish.

        Not for good: `apply` starts it again, as when this router becomes the primary (CFG-9).
        """
        self._is_stopped = True
        for consumer in list(self.consumers.values()):
            self._stop(consumer)
        # Before the pools go: a default pool would be made for what waits for room.
        waiting = _take_waiting(self.stopping_consumers)
        for code in list(self.pools):
            self.pools.drain(code)
        self._return(waiting, "return")
        self._workers.stop()

    async def until_settled(self) -> None:
        """Wait, once stopped, until nothing is held."""
        for consumer in self.stopping_consumers:
            await consumer.until_settled()

    def abort(self, *, settling: bool = False) -> None:
        """Cut open requests, once stopped; their messages go back.

        With `settling`, also cut open calls to brokers: it may no longer settle (CFG-9).
        """
        for pool in self.draining_pools.values():
            pool.runner.abort()
        if settling:
            for consumer in self.stopping_consumers:
                consumer.abort()

    def _has_place_for(self, code: str) -> bool:
        """Whether one more pool is within the limits; a draining one may always come back."""
        if code in self.draining_pools:
            return True
        if len(self.pools) >= self.deps.max_pools:
            return False
        if len(self.pools) >= self.deps.pool_warning_threshold:
            self._warn(Code.POOL_LIMIT, "the number of pools comes close to its limit")
        return True

    def _create(self, config: PoolConfig) -> ProcessPool:
        """Create a pool, or revive a draining one of the same code."""
        deps, pool = self.deps, self.draining_pools.pop(config.code, None)
        if pool is not None:
            self.pools[config.code] = pool
            pool.revive(config)
            self.pools.note_room(pool)
            log.info("draining pool revived", extra={"pool": config.code})
            return pool
        permits = Permits(config.concurrency)
        runner = DeliveryRunner(
            config,
            deps.mediator,
            permits,
            deps.alerts,
            jitter=deps.jitter,
        )
        pool = self.pools[config.code] = ProcessPool(
            runner,
            permits,
            self._workers,
            deps.targets,
            on_room=self.pools.note_room,
            on_group_free=self._place_blocked,
            rate=None if deps.limits is None else SharedRate(config, deps.limits),
        )
        deps.room.ring()
        return pool

    def _place_blocked(self, blocked: Sequence[Job]) -> None:
        """Place jobs that waited for a draining pool to finish with their group (CFG-6)."""
        for job in blocked:
            job.state = State.QUEUED
        if not self._is_stopped:
            blocked = _without_stored(blocked)
        refused = [job for job in blocked if self._is_stopped or not job.settler.flow.place(job)]
        if self._is_stopped:
            self._return(refused, "return")
            return
        for settler, together in groupby(refused, key=lambda job: job.settler):
            self.deps.tasks.create_task(settler.refuse(list(together)), name="refuse")

    def _return(self, jobs: Sequence[Job], name: str) -> None:
        """Return jobs in order: they are not to be sent any more."""
        if jobs:
            returns = nack_all([Return(job, ReturnReason.STOPPED) for job in jobs])
            self.deps.tasks.create_task(returns, name=name)

    def _start(self, queue: QueueConfig, counts: Counts, *, restarts: int = 0) -> None:
        """Start a consumer. That of a strict queue begins after its predecessors (ORD-2)."""
        leadership, deps = self.leadership_of(queue), self.deps
        is_carried = leadership is None  # by another router, if it is shared (ORD-13)
        is_lost = is_carried and not queue.is_shared  # just now, or taken between two slices
        if is_lost or queue.name in self.consumers:
            return
        if leadership is not None and leadership is not deps.leadership:
            deps = dataclasses.replace(deps, leadership=leadership)
        consumer = QueueConsumer(
            queue,
            deps,
            self.dispatcher,
            self.pools,
            counts,
            order=self._order_of(queue),
            restarts=restarts,
            after=self._predecessors(queue.name) if queue.is_strict else (),
            is_carried=is_carried,
        )
        self.consumers[queue.name] = consumer
        consumer.start()
        log.info("consumer started", extra={"queue": queue.name})

    def _predecessors(self, name: str) -> list[QueueConsumer]:
        """Return the consumers of a queue that have not ended, but for those of a store alone."""
        stopping = [each for each in self.stopping_consumers if each.queue.name == name]
        return [each for each in stopping if not each.is_carried]

    def _order_of(self, queue: QueueConfig) -> QueueOrder | None:
        """Return the order of a queue whose groups may be stored. It outlives its consumers."""
        deps = self.deps
        if deps.order is None or not queue.may_be_stored:
            return None
        order = self._orders.get(queue.name)
        if order is None:
            order = self._orders[queue.name] = QueueOrder(
                queue,
                deps.order,
                self.pools,
                deps.tasks,
                targets=deps.targets,
                alerts=deps.alerts,
                jitter=deps.jitter,
            )
        order.change(queue)
        return order

    def _stop(self, consumer: QueueConsumer) -> None:
        del self.consumers[consumer.queue.name]
        consumer.stop()
        self.stopping_consumers.append(consumer)
        log.info("consumer stopping", extra={"queue": consumer.queue.name})


def _settlers_of(consumers: Sequence[QueueConsumer]) -> set[Settler]:
    return {receiver.settler for each in consumers for receiver in each.receivers}


def _take_waiting(consumers: Sequence[QueueConsumer]) -> list[Job]:
    """Take out what waits for room in pools."""
    settlers = [receiver.settler for each in consumers for receiver in each.receivers]
    return [job for settler in settlers for job in settler.flow.take_all(settler.held)]


def _without_stored(jobs: Sequence[Job]) -> Sequence[Job]:
    """Move those to the order store whose groups are there. Return the others (ORD-5)."""
    left: list[Job] = []
    for job in jobs:
        order = job.settler.order
        if order is not None and order.takes(job):
            order.add([Return(job, ReturnReason.BEHIND, 0.0)])
        else:
            left.append(job)
    return left


async def shut_down(manager: QueueManager, grace: float) -> None:
    """Give open requests `grace` seconds; return everything else at once.

    Afterwards, no task of a consumer or a pool waits for anything outside.
    """
    loop = asyncio.get_running_loop()
    started = loop.time()
    lost_before = manager.registry.ledger.ended[Fate.FORFEITED]
    manager.stop()
    if requests := sum(len(pool.runner.requests) for pool in manager.draining_pools.values()):
        facts = {"requests": requests, "seconds": grace}
        log.info("waiting for open requests; a second signal ends it at once", extra=facts)
    if not await settled(manager, grace):
        manager.abort()
        await settled(manager, ABORT_GRACE_SECONDS)
    receivers = [each for consumer in manager.stopping_consumers for each in consumer.connections]
    receives = [receiver.task for receiver in receivers if receiver.task is not None]
    if receives:  # those that do not end by themselves are cancelled
        left = max(started + RECEIVE_GRACE_SECONDS - loop.time(), 0.0)
        _, running = await asyncio.wait(receives, timeout=left)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=ABORT_GRACE_SECONDS)
    for receiver in receivers:
        receiver.settler.close()
    lost = manager.registry.ledger.ended[Fate.FORFEITED] - lost_before
    if lost:
        text = f"{lost} messages could not be returned; they come back when their leases end"
        manager.deps.alerts.of(SOURCE)(Code.SHUTDOWN_CLEANUP_ERRORS, text)
    log.info("all consumers stopped", extra={"unaccounted": manager.registry.unaccounted})


async def settled(manager: QueueManager, seconds: float) -> bool:
    """Wait some seconds for a stopped manager. Return whether it holds nothing."""
    async with asyncio.TaskGroup() as tasks:
        settling = tasks.create_task(manager.until_settled(), name="settling")
        await asyncio.wait((settling,), timeout=seconds)
        settling.cancel()
    return not settling.cancelled()
