"""A pool limits concurrency and rate, and keeps order within a group (POOL-1 to 7).

A group that has work is a lane; a lane that can be served is in `lanes.ready` once. Workers, at
most `concurrency` of them at once, take the next ready lane, deliver one message of it and put the
lane back. Order within a group, fairness between groups and the limit all follow from that.

State changes in plain functions only: there is no await between a check and what depends on it.
"""

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Final, Protocol

from router.core.config import MAX_BATCH_MESSAGES, FairShare, PoolConfig
from router.core.flow import pool_capacity, take_ahead
from router.core.history import State, WaitReason
from router.core.message import DEFAULT_POOL
from router.core.returning import ReturnReason
from router.core.target import origin_of
from router.core.warnings import Code
from router.engine.alerts import Warn
from router.engine.delivery import DeliveryRunner, nack_all, with_held
from router.engine.job import Job, Return
from router.engine.lanes import Flow, Lane, Lanes, ordering_group
from router.engine.limits import Permits, RateLimiter
from router.engine.shared_limits import Rate
from router.engine.targets import Line, Targets
from router.signal import Signal

log = logging.getLogger(__name__)

MAX_LINES: Final = 1_000  # targets of a pool that are remembered while nothing waits for them
MAX_FLOWS: Final = 1_000  # of a pool; the others share one
SEARCH_SECONDS: Final = 10.0  # between two searches for other targets, while one fills a pool
SEARCH_MESSAGES: Final = 200  # that one of them may refuse
MAX_UNUSED_LOOKS: Final = 6  # a minute
MAX_IDLE_WORKERS: Final = 1_000  # one that waits for work takes a kilobyte


class ProcessPool:
    def __init__(
        self,
        runner: DeliveryRunner,
        permits: Permits,
        workers: "Workers",
        targets: Targets,
        *,
        on_room: Callable[["ProcessPool"], None],
        on_group_free: Callable[[Sequence[Job]], None],
        rate: Rate | None = None,
    ) -> None:
        """`rate`: its limit, if that is shared with other routers."""
        self.runner = runner
        self.deliveries = runner.deliveries
        self.config = config = runner.config
        self.code = config.code
        self.capacity = pool_capacity(config)
        self.take_ahead = take_ahead(config, None)
        self.most_parked = most_parked(config)
        self.draining = False
        self.has_room = True
        self.held = 0  # jobs that have not ended
        self.lanes = Lanes()
        self.lines: dict[str | tuple[str, str], Line] = {}  # by place, or by tenant and place
        self.flows: dict[str | None, Flow] = {}  # by target or tenant; None: the others
        self.is_shared = False  # whether there are several flows
        self._by_tenant = config.fair_share is FairShare.TENANT
        self.parked = 0  # lanes
        self._crowded = 0  # lines
        self._search: asyncio.TimerHandle | None = None  # for other targets, while one fills it
        self._searched = 0  # messages that were refused by the search that goes on
        self.rate: Rate = RateLimiter(config) if rate is None else rate
        self.permits = permits
        permits.on_free = self._pump
        self._requests = runner.requests
        self._workers = workers
        self._targets = targets
        self._place_of = targets.place_of
        self._on_room = on_room
        self._on_group_free = on_group_free
        self._loop = asyncio.get_running_loop()
        self.waits_for_rate: asyncio.Task[None] | None = None  # until the lane in front may go on
        # Lanes whose first message has failed and waits there for its next try (ORD-1).
        self.blocked: dict[Lane, asyncio.TimerHandle] = {}

    @property
    def queued(self) -> int:
        """The jobs that count against the capacity: all without an open request (POOL-1)."""
        return self.held - len(self._requests)

    @property
    def lasting_room(self) -> int:
        """The room for messages that wait for no other: what may be asked of a broker.

        As if every open request ended now, unless all workers are busy for longer.
        """
        if self._crowded and not self.is_shared:
            return 0 if self._search is not None else MAX_BATCH_MESSAGES
        return min(self.capacity - self.held, self._places)

    @property
    def may_take(self) -> bool:
        """Whether a message that waits for no other may fit, unless its target has too many."""
        return self.queued < self.capacity and self._places > 0

    @property
    def _places(self) -> int:
        """For lanes: those that wait, and the free workers."""
        permits = self.permits
        return self.take_ahead + permits.limit - permits.out - self.lanes.waiting

    @property
    def is_choosy(self) -> bool:
        """Whether it may have room for some targets only (GATE-5)."""
        return self._crowded > 0

    @property
    def is_drained(self) -> bool:
        return self.draining and self.held == 0

    def lane_of(self, job: Job) -> Lane | None:
        """Return where its group waits; None: the group is not here, or the job has no order."""
        return self.lanes.get(ordering_group(job, self.config))

    def submit(self, job: Job) -> bool:
        """Take a job. Return False if there is no room for it, or the pool is draining.

        A draining pool takes what belongs to a group that it holds, to pass it on later (CFG-6).
        """
        if self.held >= self.capacity and self.queued >= self.capacity:
            return False
        group = ordering_group(job, self.config)
        permits, lanes = self.permits, self.lanes
        lane, waiting = lanes.get(group), 0
        if lane is None:
            waiting = lanes.waiting if lanes.rivals else len(lanes.ready)
            if self.draining or (
                waiting >= self.take_ahead
                and waiting >= self.take_ahead + permits.limit - permits.out
            ):
                return False
        line = self.lines.get(self._place_of(job.message.target)) or self._find_line(job)
        target = line.target
        if (line.is_crowded or self.is_shared) and not self._has_place(line, lane):
            return False
        line.unused = 0
        job.pool = self
        job.line = line
        self.held += 1
        if lane is not None:
            self._join(lane, job)
            return True
        lane = Lane(group, job)
        if group is not None:
            lanes[group] = lane
        if permits.out < permits.limit and not self.rate.is_limited and target.open < target.limit:
            permits.out += 1
            target.open += 1
            if self.is_shared:
                line.flow.begin()
            self._workers.start((self, lane, job))
        else:
            waiting = self._wait(lane, job)
        if waiting >= self.take_ahead or self.held >= self.capacity:
            self._note_room()
        return True

    def _wait(self, lane: Lane, job: Job) -> int:
        """Let a new lane wait, if need be. Return how many do."""
        lane.current = None
        lane.put(job)
        self._put(lane, job.line.flow)
        self._pump()
        return self.lanes.waiting

    def _join(self, lane: Lane, job: Job) -> None:
        """Put a job behind others of its group."""
        if self.draining or lane.is_returning:
            lane.hold_back(job)
        else:
            lane.put(job)
            if lane.line is not None:
                self._joined_parked(lane, lane.line, job)
        if self.held >= self.capacity:
            self._note_room()

    def release(self, jobs: int = 1) -> None:
        self.held -= jobs
        if not self.has_room:
            self._note_room()

    def change(self, config: PoolConfig) -> None:
        """Take effect at once; running deliveries finish (CFG-6)."""
        is_reshared = config.fair_share is not self.config.fair_share
        self.config = self.runner.config = config
        if is_reshared:
            self._share_anew()
        self.capacity = pool_capacity(config)
        self.most_parked = most_parked(config)
        self.rate.change(config)
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
        for lane in (*self._take_waiting(), *self._take_blocked()):
            lane.is_returning = True
            self._workers.tasks.create_task(self.nack_lane(lane), name=f"{self.code} return")

    def take_overdue(self, now: float) -> list[Job]:
        """Take out what has waited for longer than its broker allows, and all behind it (BRK-5)."""
        taken: list[Job] = []
        for lane, first in self.lanes.overdue(now, self.parked_lanes()):
            jobs = lane.take_from(first)
            taken += with_held(lane, jobs)
            self._note_taken(lane, jobs)
        return taken

    def cancel(self, job: Job) -> None:
        """Stop a delivery that is under way; end at once what waits for one (CMD-13).

        What is in neither state comes to one, or is settled already.
        """
        if job in self._requests:
            self.runner.abort([job])
        elif job in self.runner.at_gate:
            job.line.target.admit(self.runner.at_gate[job])
        else:
            for lane in self.lanes.all_lanes(self.parked_lanes()):
                if not lane.is_returning and job in lane:
                    lane.take_out(job)
                    self._note_taken(lane, [job])
                    job.settler.cancel(job)
                    return

    def _note_taken(self, lane: Lane, jobs: Sequence[Job]) -> None:
        """Let a lane go on, or go, from which messages were taken that waited."""
        line = lane.line
        if line is not None and lane in line.parked:
            self._count_parked(line, -len(jobs))
            if not lane:
                self._unpark(lane, line)
                self._close(lane)
            elif lane.head.line is not line:
                self._unpark(lane, line)
                self._put(lane, lane.head.line.flow)
                self._pump()
        elif lane in self.blocked:
            if lane.failed in jobs:
                self._stop_waiting(lane)
                if lane:
                    self._put(lane, lane.head.line.flow)
                    self._pump()
                else:
                    self._close(lane)
        elif not lane and lane.current is None:
            self.lanes.remove(lane)
            self._end_call(lane)
            self._close(lane)

    def parked_lanes(self) -> list[Lane]:
        """Return the lanes that wait for a place at their target."""
        return [lane for line in self.lines.values() for lane in line.parked]

    async def nack_lane(self, lane: Lane) -> None:
        """Return what waits in a lane, and what is kept back or held behind it."""
        lane.is_returning = True
        jobs = lane.take_all()
        if jobs and self.draining:  # else what was kept back has the group for itself
            jobs = with_held(lane, [*jobs, *lane.take_blocked()])
        await nack_all([Return(job, ReturnReason.STOPPED) for job in jobs])
        if lane.current is None:
            self._close(lane)

    def next_after(self, lane: Lane, job: Job) -> "Work | None":
        """Put a lane back if it has more. Return what to do next, or release the permit."""
        if self.is_shared:
            return self._next_of_shared(lane, job)
        ready, permits = self.lanes.ready, self.permits
        if lane.regular or lane.high:
            lane.current = None
            if lane.failed is None:
                ready.append(lane)
            else:
                self._block(lane, lane.failed)
        else:
            self._close(lane)
        while ready and permits.may_be_kept() and not self.rate.is_limited:
            following = ready.popleft()
            head = following.take()
            target = head.line.target
            # Nearly always so. Without the call below it saves 20 instructions for each message.
            if target.open < target.limit and following.line is None:
                target.open += 1
                return self, following, head
            following.put_back(head)
            next_job = self._begin(following)
            if next_job is not None:
                return self, following, next_job
        permits.release()
        if ready:
            self._pump()
        return None

    def _next_of_shared(self, lane: Lane, job: Job) -> "Work | None":
        """Do the same where several flows share the workers (SHARE-1)."""
        lanes, permits = self.lanes, self.permits
        now, flow = self._loop.time(), job.line.flow
        flow.end(now - job.started_at, now)
        self._note_half(flow)
        if lane.failed is not None:
            self._block(lane, lane.failed)
        elif lane:
            lane.current = None
            self._put(lane, lane.head.line.flow)
        else:
            self._close(lane)
        while lanes.waiting and permits.may_be_kept() and not self.rate.is_limited:
            following = lanes.take()
            next_job = self._begin(following)
            if next_job is not None:
                return self, following, next_job
        permits.release()
        self._pump()
        return None

    def _block(self, lane: Lane, failed: Job) -> None:
        """Let a lane wait until its first message is tried again."""
        self.blocked[lane] = self._loop.call_at(failed.resume_at, self._unblock, lane)

    def _unblock(self, lane: Lane) -> None:
        del self.blocked[lane]
        self.runner.unblock(lane)
        self._put(lane, lane.head.line.flow)
        self._pump()

    def _take_blocked(self) -> list[Lane]:
        """Take out all lanes whose first message waits for its next try."""
        taken = list(self.blocked)
        for lane in taken:
            self._stop_waiting(lane)
        return taken

    def _stop_waiting(self, lane: Lane) -> None:
        self.blocked.pop(lane).cancel()
        self.runner.unblock(lane)

    def _put(self, lane: Lane, flow: Flow, *, first: bool = False) -> None:
        """Let a lane wait for a worker."""
        self.lanes.put(lane, flow, first=first)
        if self.lanes.rivals and not self.is_shared:
            self._note_flows()

    def _pump(self) -> None:
        """Let ready lanes go on while there are permits."""
        lanes = self.lanes
        while (lanes.ready or lanes.rivals) and self.permits.is_free and not self.draining:
            if not self.rate.is_limited:
                self._start_next()
                continue
            if self.waits_for_rate is None:
                waiting = self._wait_for_rate()
                name = f"{self.code} rate"
                self.waits_for_rate = self._workers.tasks.create_task(waiting, name=name)
            return

    def _start_next(self) -> None:
        """Start the first ready lane whose target has a place; those before it park."""
        self.permits.take()  # first: a lane that starts or parks may call the one behind it
        while self.lanes.ready or self.lanes.rivals:
            lane = self.lanes.take()
            job = self._begin(lane)
            if job is not None:
                self._workers.start((self, lane, job))
                return
        self.permits.release()

    def _begin(self, lane: Lane) -> Job | None:
        """Take the next job of a lane, with a place at its target; without one, park the lane."""
        job = lane.take()
        line = job.line
        target = line.target
        if target.open < target.limit:
            target.open += 1
        elif not target.enter():
            lane.put_back(job)
            self._park(lane, line)
            return None
        if self.is_shared:
            line.flow.begin()
        if lane.line is not None:
            self._end_call(lane)
        return job

    def _park(self, lane: Lane, line: Line) -> None:
        """Let a lane wait at its target, without a worker (GATE-5)."""
        was_called = lane.line is not None
        self._end_call(lane)
        lane.line = line
        line.parked[lane] = None
        if was_called:  # it has had its turn already
            line.parked.move_to_end(lane, last=False)
        self.parked += 1
        self._count_parked(line, len(lane))
        line.target.wait(line)

    def _unpark(self, lane: Lane, line: Line) -> None:
        del line.parked[lane]
        lane.line = None
        self.parked -= 1
        if not line.parked:
            line.target.waiting.pop(line, None)
        self._count_parked(line, -len(lane))

    def _count_parked(self, line: Line, messages: int) -> None:
        """Count messages that park, or go on. Report when there is room for the target again."""
        line.messages += messages
        if not line.is_crowded and line.messages >= self.most_parked:
            line.is_crowded = True
            self._crowded += 1
            self._note_crowd()
        elif line.is_crowded and line.messages <= self.most_parked * 3 // 4:
            line.is_crowded = False
            self._crowded -= 1
            self._tell_room()

    def _has_place(self, line: Line, lane: Lane | None) -> bool:
        """Return whether a message may be taken: neither its target nor its flow has too many.

        A search for messages of other targets ends after some of a crowded one (GATE-5). A flow may
        have half of the places, the others are for its rivals (SHARE-1).
        """
        flow = line.flow
        if line.is_crowded:
            self._searched += 1
            if self._searched >= SEARCH_MESSAGES:
                self._note_crowd()
            return False
        if lane is not None:
            return True
        if len(flow.ready) >= max(self.take_ahead // 2, 1):
            flow.is_crowded = True
        return not flow.is_crowded

    def _note_crowd(self) -> None:
        """Let the pool be full if all that it holds is for one target, but for a look now and then.

        Messages of other targets may be behind those that find no room. Where some were seen lately
        (`is_shared`), they are looked for all the time, else every ten seconds.
        """
        if self.is_shared:
            return
        if self._search is None:
            self._search = self._loop.call_later(SEARCH_SECONDS, self._look_for_others)
        if self.has_room:
            self._note_room()

    def _look_for_others(self) -> None:
        self._search, self._searched = None, 0
        self._tell_room()

    def _tell_room(self) -> None:
        """Report that there may be room for messages that had none."""
        if self.has_room:
            self._on_room(self)
        else:
            self._note_room()

    def _call(self, line: Line) -> None:
        """Let the first lane of a line go on, in front of all others: its target has a place."""
        lane = next(iter(line.parked))
        self._unpark(lane, line)
        lane.line, line.called = line, lane
        self._put(lane, lane.head.line.flow, first=True)
        self._pump()

    def _end_call(self, lane: Lane) -> None:
        """Let the lanes behind a called one have their turn: it started, or is gone."""
        line = lane.line
        if line is None:
            return
        lane.line = line.called = None
        if line.parked:
            line.target.wait(line)
            line.target.wake()

    def _joined_parked(self, lane: Lane, line: Line, job: Job) -> None:
        """Count what joined a parked lane. If it goes first, it may have another target."""
        if line.called is lane:
            return
        self._count_parked(line, 1)
        if lane.head is job and job.line is not line:
            self._unpark(lane, line)
            self._put(lane, job.line.flow)
            self._pump()

    def forget_unused_lines(self) -> None:
        """Drop lines that had no message lately, and their flows. Called every ten seconds."""
        for key, line in list(self.lines.items()):
            line.unused += 1
            if line.unused > MAX_UNUSED_LOOKS and line.is_idle:
                del self.lines[key]
        if self.is_shared:
            self._forget_unused_flows()

    def _forget_unused_flows(self) -> None:
        used = {line.flow for line in self.lines.values()}
        if all(flow in used or not flow.is_idle for flow in self.flows.values()):
            return
        for lane in self.lanes.values():  # those that wait behind others of their group
            used.update(job.line.flow for job in (*lane, *lane.blocked))
            if lane.current is not None:
                used.add(lane.current.line.flow)
        used.update(job.line.flow for job in self.runner.between)
        flows = self.flows.items()
        self.flows = {key: flow for key, flow in flows if flow in used or not flow.is_idle}
        self._note_flows()

    def _find_line(self, job: Job) -> Line:
        """Return the line to a target, of the job's tenant if the pool is shared by tenants."""
        place = self._place_of(job.message.target)
        key = (tenant_of(job), place) if self._by_tenant else place
        line = self.lines.get(key)
        if line is not None:
            return line
        if len(self.lines) >= MAX_LINES:  # some are idle, unless as many messages wait
            for oldest in list(islice(self.lines, 2)):
                line = self.lines.pop(oldest)
                if not line.is_idle:
                    self.lines[oldest] = line
        target = self._targets.of(place)
        line = self.lines[key] = Line(target, self._flow_of(job), self._call, OrderedDict())
        return line

    def _flow_of(self, job: Job) -> Flow:
        """Return the flow of a message. Those beyond a thousand share one (SHARE-1)."""
        key: str | None = ""
        if self.config.fair_share is FairShare.TARGET:
            key = origin_of(job.message.target)
        elif self._by_tenant:
            key = tenant_of(job)
        if key not in self.flows and len(self.flows) >= MAX_FLOWS:
            key = None
        flow = self.flows.get(key)
        if flow is None:
            flow = self.flows[key] = Flow(self.lanes)
            self._note_flows()
        return flow

    def _note_flows(self) -> None:
        """Note how many flows there are. One that has no rival may have all places."""
        was_shared, self.is_shared = self.is_shared, len(self.flows) > 1 or bool(self.lanes.rivals)
        if self.is_shared and not was_shared:
            first, *others = self.flows.values()
            # They are not counted while there is one flow. Who is admitted counts on going on.
            first.open = self.permits.out - self.permits.admitted
            for flow in others:
                flow.open = 0
        if not self.is_shared:
            for flow in self.flows.values():
                self.lanes.adopt(flow)
                self._note_half(flow)

    def _note_half(self, flow: Flow) -> None:
        """Report when a flow that had its half of the places has room again."""
        if flow.is_crowded and (not self.is_shared or len(flow.ready) <= self.take_ahead * 3 // 8):
            flow.is_crowded = False
            self._tell_room()

    def _share_anew(self) -> None:
        """Share the workers as the configuration says now."""
        waiting = self._take_waiting()
        self._by_tenant = self.config.fair_share is FairShare.TENANT
        self.lines, self.flows = {}, {}
        jobs = [job for lane in self.lanes.values() for job in (*lane, *lane.blocked)]
        jobs += [job for lane in waiting for job in lane]
        for job in (*jobs, *self._requests, *self.runner.between):
            job.line = self._find_line(job)
        for flow in self.flows.values():
            flow.open = sum(job.line.flow is flow for job in self._requests)
        for lane in waiting:
            self._put(lane, lane.head.line.flow)

    def _take_waiting(self) -> list[Lane]:
        """Take out all lanes that wait for a worker or for their target."""
        waiting = [*self.lanes.clear_ready(), *self.parked_lanes()]
        for line in self.lines.values():
            line.clear()
        self.parked = self._crowded = 0
        if self._search is not None:
            self._search.cancel()
            self._search = None
        for lane in waiting:
            lane.line = None
        return waiting

    async def _wait_for_rate(self) -> None:
        """Wait for the rate limit on behalf of the lane in front.

        A slot that finds no free worker is spent all the same: saved for later, it would let some
        minute exceed the limit.
        """
        while self.lanes.waiting and self.permits.is_free:
            if self.rate.seconds_to_wait > 0:
                self.deliveries.limit(self._loop.time())
            await self.rate.pass_one(min(self.lanes.waiting, self.permits.free))
            if self.lanes.waiting and self.permits.is_free:
                self._start_next()
        self.waits_for_rate = None

    def _note_room(self) -> None:
        """Report when there is no room left, and when there is some again.

        Some, not one place: if each place were reported, consumers would fetch one by one.
        """
        self.take_ahead = take_ahead(self.config, self.runner.mean_seconds)
        room = self.lasting_room
        enough = max(min(self.take_ahead, self.capacity) // 4, 1)
        has_room = room > 0 if self.has_room else room >= enough
        if has_room is not self.has_room:
            self.has_room = has_room
            self._on_room(self)

    def _close(self, lane: Lane) -> None:
        """Drop a lane: the pool holds nothing more of its group."""
        if lane.group is not None:
            del self.lanes[lane.group]
        if lane.blocked:
            kept = [job for job in lane.blocked if job in job.settler.held]  # else let go meanwhile
            for job in kept:
                job.pool = None
                self.release()
            self._on_group_free(kept)


def waits_in(pool: ProcessPool) -> Mapping[WaitReason, int]:
    """Count the queued messages by what they wait for. Done on demand, so it costs only the caller.

    What is neither in a lane nor between two tries is being settled, or about to be sent.
    """
    heads, permits = pool.lanes.waiting, pool.permits
    beyond = 0 if permits.is_free else sum(len(flow.ready) for flow in beyond_its_share(pool))
    waiting = {
        WaitReason.RATE: heads if permits.is_free else 0,
        WaitReason.PERMIT: len(permits.returning) + (0 if permits.is_free else heads - beyond),
        WaitReason.SHARE: beyond,
        WaitReason.TARGET: pool.parked + len(pool.runner.at_gate),
        WaitReason.GROUP: pool.lanes.behind,
        WaitReason.RETRY: pool.runner.pausing,
    }
    return {**waiting, WaitReason.SETTLE: pool.queued - sum(waiting.values())}


def beyond_its_share(pool: ProcessPool) -> list[Flow]:
    """Return the flows that wait because they have their share of the workers (SHARE-1)."""
    lanes = pool.lanes
    share = lanes.share_of(pool.permits.limit)
    return [flow for flow in lanes.rivals if flow.open >= share]


def tenant_of(job: Job) -> str:
    """Return what its group has before the first colon."""
    return (job.message.group or "").partition(":")[0]


def most_parked(config: PoolConfig) -> int:
    """Return how many messages may wait in a pool for a place at one target (GATE-5)."""
    return max(config.concurrency, pool_capacity(config) // 2)


class RoomWatcher(Protocol):
    """Somebody who waits for room in pools."""

    def note_room(self) -> None: ...


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
        self._watchers: dict[ProcessPool, dict[RoomWatcher, None]] = {}

    @property
    def have_room(self) -> bool:
        """Whether any of them can take a message. A default pool can be created."""
        return not self or len(self._full) < len(self)

    @property
    def any_full(self) -> bool:
        """Whether one may be full: a draining one counts."""
        return bool(self._full or self.draining)

    def find(self, code: str) -> ProcessPool | None:
        """Return the pool of messages that name this code; None: there is none yet.

        That is the draining one while it can take no more of its groups (CFG-6).
        """
        drained = self.draining.get(code)
        if drained is not None and not drained.has_room:
            return drained
        return self.get(code) or self.get(DEFAULT_POOL)

    def watch(self, code: str, watcher: RoomWatcher) -> None:
        """Tell somebody, once, when the pool of this code has room again or is removed."""
        pool = self.find(code)
        if pool is not None:
            self._watchers.setdefault(pool, {})[watcher] = None

    def choose(self, job: Job, code: str) -> ProcessPool:
        """Return the pool of its code; a draining one of that code if it holds its group (CFG-6).

        A message for a pool that is missing goes to the default pool (ROUTE-4). These are counted
        by queue, because producers can make up any number of pool codes.
        """
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
        """Note that a pool is full, or is no longer full."""
        if pool.has_room:
            self._full.discard(pool)
            self._tell_watchers(pool)
        elif not pool.draining:
            self._full.add(pool)

    def drain(self, code: str) -> None:
        pool = self.draining[code] = self.pop(code)
        self._full.discard(pool)
        self._tell_watchers(pool)
        pool.drain()
        log.info("pool draining", extra={"pool": code})

    def _tell_watchers(self, pool: ProcessPool) -> None:
        self._room.ring()
        # At the next turn of the loop: a message may be ending just now, or a pool going away.
        for watcher in self._watchers.pop(pool, ()):
            asyncio.get_running_loop().call_soon(watcher.note_room)


Work = tuple[ProcessPool, Lane, Job]  # the job is the lane's current one


class Workers:
    """Tasks that deliver one message after the other, for all pools.

    A worker that has finished waits for more work, unless too many do: a new task for each message
    would cost 1.3 µs more.
    """

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self.tasks = tasks  # for what is no work on a lane
        self._idle: list[asyncio.Future[Work | None]] = []
        self._most_idle = MAX_IDLE_WORKERS
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
        """Wake all who wait for work, to end; what is started still runs."""
        self._most_idle = 0
        idle, self._idle = self._idle, []
        for waiting in idle:
            if not waiting.done():
                waiting.set_result(None)

    def resume(self) -> None:
        self._most_idle = MAX_IDLE_WORKERS

    async def _work(self, work: Work | None) -> None:
        """Serve lane after lane: of one pool, then of whichever needs it."""
        task = asyncio.current_task()
        assert task is not None  # noqa: S101  for the type checker: we run in one
        while work is not None:
            pool, lane, job = work
            try:
                await pool.runner.serve(lane, job, task)
            except Exception as error:  # noqa: BLE001  the bulkhead: one message's bug ends no group
                await pool.runner.handle_crash(lane, job, error)
            if pool.draining:
                await pool.nack_lane(lane)
            work = pool.next_after(lane, job)
            if work is not None:
                continue
            if len(self._idle) < self._most_idle:
                more: asyncio.Future[Work | None] = self._loop.create_future()
                self._idle.append(more)
                work = await more
            else:
                return
