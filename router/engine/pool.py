"""A pool limits concurrency and rate, and keeps order within a group (POOL-1 to 7).

A group that has work is a lane; a lane that can be served is in `lanes.ready` once. Workers, at
most `concurrency` of them at once, take the next ready lane, deliver one message of it and put the
lane back. Order within a group, fairness between groups and the limit all follow from that.

State changes in plain functions only: there is no await between a check and what depends on it.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from router.core.config import PoolConfig
from router.core.history import WaitReason
from router.core.job import Job, State
from router.core.lanes import Lane, Lanes, ordering_group
from router.core.message import DEFAULT_POOL
from router.core.warnings import Code
from router.engine.alerts import Warn
from router.engine.delivery import DeliveryRunner, nack_group
from router.engine.limits import Permits, RateLimiter
from router.signal import Signal

log = logging.getLogger(__name__)

CAPACITY_PER_WORKER: Final = 20  # messages
LEAST_CAPACITY_MESSAGES: Final = 50
MOST_IDLE_WORKERS: Final = 1_000  # one that waits for work takes a kilobyte


class ProcessPool:
    def __init__(
        self,
        runner: DeliveryRunner,
        permits: Permits,
        workers: "Workers",
        *,
        on_room: Callable[["ProcessPool"], None],
        on_group_free: Callable[[Sequence[Job]], None],
    ) -> None:
        self.runner = runner
        self.deliveries = runner.deliveries
        self.config = config = runner.config
        self.code = config.code
        self.capacity = _capacity(config)
        self.draining = False
        self.has_room = True
        self.held = 0  # jobs that have not ended
        self.lanes = Lanes()
        self.gate = RateLimiter(config)
        self.permits = permits
        permits.on_free = self._pump
        self._requests = runner.requests
        self._workers = workers
        self._on_room = on_room
        self._on_group_free = on_group_free
        self.waits_for_rate: asyncio.Task[None] | None = None  # until the lane in front may go on

    @property
    def queued(self) -> int:
        """What counts against the capacity: all that has no open request (POOL-1)."""
        return self.held - len(self._requests)

    @property
    def lasting_room(self) -> int:
        """The room if every open request ended now: what may be asked of a broker."""
        return self.capacity - self.held

    @property
    def is_drained(self) -> bool:
        return self.draining and self.held == 0

    def lane_of(self, job: Job) -> Lane | None:
        """Return where its group waits; None: the group is not here, or the job has no order."""
        return self.lanes.get(ordering_group(job, self.config))

    def submit(self, job: Job) -> bool:
        """Take a job. Return False if the pool is full, or draining.

        A draining pool takes what belongs to a group that it holds, to pass it on later (CFG-6).
        """
        if self.held >= self.capacity and self.queued >= self.capacity:
            return False
        group = ordering_group(job, self.config)
        lane = self.lanes.get(group)
        if self.draining and lane is None:
            return False
        job.pool = self
        self.held += 1
        if self.held >= self.capacity:
            self._note_room()
        if lane is not None:
            if self.draining or lane.is_returning:
                lane.hold_back(job)
            else:
                lane.put(job)
            return True
        permits = self.permits
        starts_now = permits.out < permits.limit and not self.gate.is_limited
        lane = Lane(group, job if starts_now else None)
        if group is not None:
            self.lanes[group] = lane
        if starts_now:
            permits.out += 1
            self._workers.start((self, lane, job))
        else:
            lane.put(job)
            self.lanes.ready.append(lane)
            self._pump()
        return True

    def release(self) -> None:
        self.held -= 1
        if not self.has_room:
            self._note_room()

    def change(self, config: PoolConfig) -> None:
        """Take effect at once; running deliveries finish (CFG-6)."""
        self.config = self.runner.config = config
        self.capacity = _capacity(config)
        self.gate.change(config)
        self.permits.resize(config.concurrency)
        self._note_room()

    def revive(self, config: PoolConfig) -> None:
        """Cancel the drain: a pool with this code was configured again (CFG-6)."""
        self.draining = False
        self.runner.resume()
        for lane in self.lanes.values():
            if not lane.is_returning:
                lane.release_blocked()
        self.change(config)

    def drain(self) -> None:
        """Start no new try and return what has no open request; open requests finish (CFG-6)."""
        self.draining = True
        if self.waits_for_rate is not None:
            self.waits_for_rate.cancel()
            self.waits_for_rate = None
        self.runner.stop()
        waiting = list(self.lanes.ready)
        self.lanes.ready.clear()
        for lane in waiting:
            lane.is_returning = True
            self._workers.tasks.create_task(self.nack_lane(lane), name=f"{self.code} return")

    def take_overdue(self, now: float) -> list[Job]:
        """Take out what has waited for longer than its broker allows, and all behind it (BRK-5)."""
        taken: list[Job] = []
        for lane, first in self.lanes.overdue(now):
            taken += lane.take_from(first)
            if not lane and lane.current is None:
                self.lanes.ready.remove(lane)
                self._close(lane)
        return taken

    async def nack_lane(self, lane: Lane) -> None:
        """Return what waits in a lane."""
        lane.is_returning = True
        await nack_group(lane.take_all(), 0.0)
        if lane.current is None:
            self._close(lane)

    def next_after(self, lane: Lane) -> Lane | None:
        """Put a lane back if it has more. Return the next one, or release the permit."""
        ready, permits = self.lanes.ready, self.permits
        if lane.regular or lane.high:
            lane.current = None
            ready.append(lane)
        else:
            self._close(lane)
        if ready and permits.may_be_kept() and not self.gate.is_limited:
            return ready.popleft()
        permits.release()
        if ready:
            self._pump()
        return None

    def _pump(self) -> None:
        """Let ready lanes go on while there are permits."""
        while self.lanes.ready and self.permits.is_free and not self.draining:
            if not self.gate.is_limited:
                self._start_next()
                continue
            if self.waits_for_rate is None:
                waiting = self._wait_for_rate()
                name = f"{self.code} rate"
                self.waits_for_rate = self._workers.tasks.create_task(waiting, name=name)
            return

    def _start_next(self) -> None:
        lane = self.lanes.ready.popleft()
        self.permits.take()
        self._workers.start((self, lane, lane.take()))

    async def _wait_for_rate(self) -> None:
        """Wait for the rate limit on behalf of the lane in front.

        A slot that finds no free worker is spent all the same: saved for later, it would let some
        minute exceed the limit.
        """
        while self.lanes.ready and self.permits.is_free:
            if self.gate.seconds_to_wait > 0:
                self.deliveries.limit(asyncio.get_running_loop().time())
            await self.gate.pass_one()
            if self.lanes.ready and self.permits.is_free:
                self._start_next()
        self.waits_for_rate = None

    def _note_room(self) -> None:
        """Report when there is no room left, and when there is some again.

        Some, not one place: if each place were reported, consumers would fetch one by one.
        """
        room = self.lasting_room
        has_room = room > 0 if self.has_room else room >= self.capacity // 4
        if has_room is not self.has_room:
            self.has_room = has_room
            self._on_room(self)

    def _close(self, lane: Lane) -> None:
        """Drop a lane: the pool holds nothing of its group any more."""
        if lane.group is not None:
            del self.lanes[lane.group]
        if lane.blocked:
            for job in lane.blocked:
                job.pool = None
                self.release()
            self._on_group_free(lane.blocked)


def waits_in(pool: ProcessPool) -> Mapping[WaitReason, int]:
    """Count the queued messages by what they wait for. Done on demand, so it costs only the caller.

    What is neither in a lane nor between two tries is being settled, or about to be sent.
    """
    heads, permits = len(pool.lanes.ready), pool.permits
    waiting = {
        WaitReason.RATE: heads if permits.is_free else 0,
        WaitReason.PERMIT: len(permits.returning) + (0 if permits.is_free else heads),
        WaitReason.GROUP: pool.lanes.behind,
        WaitReason.RETRY: pool.runner.pausing,
    }
    return {**waiting, WaitReason.SETTLE: pool.queued - sum(waiting.values())}


def _capacity(config: PoolConfig) -> int:
    """Return how many messages a pool may hold without an open request (POOL-1)."""
    return max(config.concurrency * CAPACITY_PER_WORKER, LEAST_CAPACITY_MESSAGES)


class Pools(dict[str, ProcessPool]):
    """The pools of a router by code, and the removed ones that are not empty yet."""

    def __init__(self, create_default: Callable[[], ProcessPool], room: Signal, warn: Warn) -> None:
        """`room` is rung when a message may find a place that it did not find before."""
        super().__init__()
        self.draining: dict[str, ProcessPool] = {}
        self.unknown = Counter[str]()  # messages for a pool that is missing, by queue
        self._create_default = create_default
        self._room = room
        self._warn = warn
        self._full: set[ProcessPool] = set()

    @property
    def have_room(self) -> bool:
        """Whether any of them can take a message. A default pool can be created."""
        return not self or len(self._full) < len(self)

    def choose(self, job: Job) -> ProcessPool:
        """Return the pool of its code; a draining one of that code if it holds its group (CFG-6).

        A message for a pool that is missing goes to the default pool (ROUTE-4). These are counted
        by queue, because producers can make up any number of pool codes.
        """
        code = job.message.pool or DEFAULT_POOL
        if self.draining:
            drained = self.draining.get(code)
            if drained is not None and drained.lane_of(job) is not None:
                return drained
        pool = self.get(code)
        if pool is not None:
            return pool
        if code != DEFAULT_POOL:
            # One that waited for room was counted when it came.
            self.unknown[job.settler.queue_name] += job.state is State.QUEUED
            self._warn(Code.ROUTING, f"no pool {code!r}: its messages go to {DEFAULT_POOL}")
        return self.get(DEFAULT_POOL) or self._create_default()

    def note_room(self, pool: ProcessPool) -> None:
        """Note that a pool is full, or is not full any more."""
        if pool.has_room:
            self._full.discard(pool)
            self._room.ring()
        elif not pool.draining:
            self._full.add(pool)

    def drain(self, code: str) -> None:
        pool = self.draining[code] = self.pop(code)
        self._full.discard(pool)
        self._room.ring()  # fewer pools that must have room
        pool.drain()
        log.info("pool draining", extra={"pool": code})


Work = tuple[ProcessPool, Lane, Job]  # the job is the lane's current one


class Workers:
    """Tasks that deliver one message after the other, for all pools.

    A worker that has finished waits for more work, unless too many do: a new task for each message
    would cost 1.3 µs more.
    """

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self.tasks = tasks  # for what is no work on a lane
        self._idle: list[asyncio.Future[Work | None]] = []
        self._most_idle = MOST_IDLE_WORKERS
        self._loop = asyncio.get_running_loop()

    def start(self, work: Work) -> None:
        """Begin at the next turn of the loop."""
        while self._idle:
            waiting = self._idle.pop()
            if not waiting.done():  # else it was cancelled
                waiting.set_result(work)
                return
        self.tasks.create_task(self._work(work), name="worker")

    def stop(self) -> None:
        """Let nobody wait for work any more; what is started still runs."""
        self._most_idle = 0
        idle, self._idle = self._idle, []
        for waiting in idle:
            if not waiting.done():
                waiting.set_result(None)

    def resume(self) -> None:
        self._most_idle = MOST_IDLE_WORKERS

    async def _work(self, work: Work | None) -> None:
        """Serve lane after lane: of one pool, then of whichever needs it."""
        task = asyncio.current_task()
        assert task is not None  # noqa: S101  for the type checker: we run in one
        while work is not None:
            pool, lane, job = work
            try:
                await pool.runner.serve(lane, job, task)
            except Exception as error:  # noqa: BLE001  the bulkhead: one message's bug ends no group
                await pool.runner.survive(lane, job, error)
            if pool.draining:
                await pool.nack_lane(lane)
            following = pool.next_after(lane)
            if following is not None:
                work = pool, following, following.take()
            elif len(self._idle) < self._most_idle:
                more: asyncio.Future[Work | None] = self._loop.create_future()
                self._idle.append(more)
                work = await more
            else:
                return
