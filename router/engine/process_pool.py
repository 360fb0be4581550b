"""A pool: so many deliveries at once, so many a minute, in order within a group (SPEC §6, §7, §9).

A group that has work is a lane; a lane that can go on stands once in `_ready`. Workers of the crew,
at most `concurrency` of them at once, take the next ready lane, serve one message of it and put it
back. Order within a group, fairness between groups and the limit all follow from that.

State changes in plain functions only: no await comes between looking and leaping.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from router.core.backoff import Jitter
from router.core.config import PoolConfig
from router.core.figures import Wait
from router.core.job import Job
from router.core.lanes import Lane
from router.core.mandate import Mandate
from router.core.message import Mode
from router.engine.alerts import Alerts
from router.engine.courier import Courier, Deliverer
from router.engine.crew import Crew
from router.engine.permits import Permits
from router.engine.rate_gate import RateGate
from router.engine.returning import give_back_all

CAPACITY_PER_WORKER: Final = 20
LEAST_CAPACITY: Final = 50


class ProcessPool:
    __slots__ = (
        "_crew",
        "_gatekeeper",
        "_lanes",
        "_on_group_free",
        "_on_room",
        "_permits",
        "_posts",
        "_ready",
        "capacity",
        "code",
        "config",
        "courier",
        "draining",
        "gate",
        "has_room",
        "held",
    )

    def __init__(
        self,
        config: PoolConfig,
        mediator: Deliverer,
        crew: Crew,
        alerts: Alerts,
        *,
        jitter: Jitter,
        mandate: Mandate,
        on_room: Callable[["ProcessPool"], None],
        on_group_free: Callable[[Sequence[Job]], None],
    ) -> None:
        self.config = config
        self.code = config.code
        self.capacity = _capacity(config)
        self.draining = False
        self.has_room = True
        self.held = 0  # jobs that have not ended
        self.gate = RateGate(config)
        self._permits = Permits(config.concurrency, self._pump)
        self.courier = Courier(
            config, mediator, self._permits, alerts, jitter=jitter, mandate=mandate
        )
        self._posts = self.courier.posts
        self._crew = crew
        self._on_room = on_room
        self._on_group_free = on_group_free
        self._lanes: dict[str | None, Lane] = {}  # by group; what has none stands in no order
        self._ready: deque[Lane] = deque()
        self._gatekeeper: asyncio.Task[None] | None = None

    @property
    def queued(self) -> int:
        """What counts against the capacity: all that has no open POST (POOL-1)."""
        return self.held - len(self._posts)

    @property
    def lasting_room(self) -> int:
        """What is left of it should every open POST end now: what may be asked of a broker."""
        return self.capacity - self.held

    @property
    def groups(self) -> int:
        return len(self._lanes)

    @property
    def free_permits(self) -> int:
        return self._permits.free

    @property
    def waiting(self) -> Mapping[Wait, int]:
        """What those that are queued wait for. Counted on demand: nobody pays for it but the asker.

        What is neither in a lane nor between two tries is on its way home, or about to be sent.
        """
        lanes = self._lanes.values()
        heads = len(self._ready)
        behind = sum(len(lane) + len(lane.latecomers) - lane.has_head for lane in lanes)
        waiting = {
            Wait.RATE: heads if self._permits.is_free else 0,
            Wait.PERMIT: len(self._permits.returning) + (0 if self._permits.is_free else heads),
            Wait.GROUP: behind,
            Wait.RETRY: self.courier.pausing,
        }
        return {**waiting, Wait.SETTLE: self.queued - sum(waiting.values())}

    @property
    def waits_for_rate(self) -> bool:
        return self._gatekeeper is not None

    @property
    def is_drained(self) -> bool:
        return self.draining and self.held == 0

    def holds_group_of(self, job: Job) -> bool:
        """Whether messages that must not be passed by this one are here still."""
        return self._group_of(job) in self._lanes

    def lane_of(self, job: Job) -> Lane | None:
        """Where its group waits; None: the group is not here, or the message has no order."""
        return self._lanes.get(self._group_of(job))

    def lane_named(self, group: str) -> Lane | None:
        return self._lanes.get(group)

    def lanes_ahead(self, job: Job) -> int:
        """How many lanes go on before the one in which it is first."""
        lane = self.lane_of(job)
        for place, ready in enumerate(self._ready):
            if ready is lane or (ready.group is None and job in ready):
                return place
        return 0

    def submit(self, job: Job) -> bool:
        """Take it, or say no: the pool is full, or draining.

        A draining pool takes what belongs to a group that it holds, to pass it on later (§7).
        """
        if self.held >= self.capacity and self.queued >= self.capacity:
            return False
        group = self._group_of(job)
        lane = self._lanes.get(group)
        if self.draining and lane is None:
            return False
        job.keeper = self
        self.held += 1
        if self.held >= self.capacity:
            self._note_room()
        if lane is None:
            self._open_lane(group, job)
        elif self.draining or lane.is_returning:
            lane.put_off(job)
        else:
            lane.put(job)
        return True

    def let_go(self, _job: Job) -> None:
        """A job of ours has ended, or goes elsewhere."""
        self.held -= 1
        if not self.has_room:
            self._note_room()

    def change(self, config: PoolConfig) -> None:
        """Take effect at once; running deliveries finish (POOL-6, §9)."""
        self.config = self.courier.config = config
        self.capacity = _capacity(config)
        self.gate.change(config)
        self._permits.resize(config.concurrency)
        self._note_room()

    def revive(self, config: PoolConfig) -> None:
        """Its code came back while it was draining (CFG-6)."""
        self.draining = False
        self.courier.resume()
        for lane in self._lanes.values():
            if not lane.is_returning:
                lane.let_latecomers_in()
        self.change(config)

    def drain(self) -> None:
        """Start no new try and give back what has no open POST; open POSTs finish (§7)."""
        self.draining = True
        if self._gatekeeper is not None:
            self._gatekeeper.cancel()
            self._gatekeeper = None
        self.courier.stop()
        waiting = list(self._ready)
        self._ready.clear()
        for lane in waiting:
            lane.is_returning = True
            self._crew.tasks.create_task(self.give_back(lane), name=f"{self.code} return")

    def take_overdue(self, now: float) -> list[Job]:
        """What has waited here for longer than its broker allows, with all behind it (BRK-5)."""
        taken: list[Job] = []
        for lane in [*self._lanes.values(), *(lane for lane in self._ready if lane.group is None)]:
            first = next((job for job in lane if job.hold_until <= now), None)
            if first is not None:
                taken += lane.take_from(first)
                self._drop_if_empty(lane)
        return taken

    async def give_back(self, lane: Lane) -> None:
        """Return what waits in it."""
        lane.is_returning = True
        await give_back_all(lane.take_all(), 0.0)
        if lane.current is None:
            self._close(lane)

    def next_after(self, lane: Lane) -> Lane | None:
        """Put the lane back if it has more; take the next one, or give the permit back."""
        if lane.regular or lane.high:
            lane.current = None
            self._ready.append(lane)
        else:
            self._close(lane)
        if not self._ready:
            self._permits.give_back()
            return None
        if self._permits.may_be_kept() and not self.gate.is_limited:
            return self._ready.popleft()
        self._permits.give_back()
        self._pump()
        return None

    def abort(self) -> None:
        """End the POSTs that are still open; their messages are given back (OPS-4)."""
        self.courier.abort()

    def _group_of(self, job: Job) -> str | None:
        """In whose order it stands; None: in nobody's."""
        message = job.message
        if message.group is None and self.config.parallel_ungrouped:
            return None
        if message.dispatch is not None and message.mode is Mode.IMMEDIATE:
            return None
        return job.group

    def _open_lane(self, group: str | None, job: Job) -> None:
        """It is the first of its group, or stands in no order: it can go on."""
        permits = self._permits  # asked without a call: this is looked at for every message
        starts = permits.out < permits.limit and not self.gate.is_limited
        lane = Lane(group, job if starts else None)
        if group is not None:
            self._lanes[group] = lane
        if starts:
            permits.out += 1
            self._crew.start((self, lane, job))
        else:
            lane.put(job)
            self._ready.append(lane)
            self._pump()

    def _note_room(self) -> None:
        """Tell when there is no room left, and when there is some again.

        Some, not one place: with each single place announced, intakes would fetch one by one.
        """
        room = self.lasting_room
        has_room = room > 0 if self.has_room else room >= self.capacity // 4
        if has_room is not self.has_room:
            self.has_room = has_room
            self._on_room(self)

    def _pump(self) -> None:
        """Let ready lanes go on while there are permits."""
        while self._ready and self._permits.is_free and not self.draining:
            if self.gate.is_limited:
                self._call_gatekeeper()
                return
            self._start(self._ready.popleft())

    def _start(self, lane: Lane) -> None:
        """It has a current job from now on: whoever looks at it finds it at work."""
        self._permits.take()
        self._crew.start((self, lane, lane.take()))

    def _call_gatekeeper(self) -> None:
        if self._gatekeeper is None:
            gate = self._keep_gate()
            self._gatekeeper = self._crew.tasks.create_task(gate, name=f"{self.code} rate")

    async def _keep_gate(self) -> None:
        """Wait for the rate limit on behalf of the lane in front.

        What is let through and meets no free worker is spent all the same: used later, it would let
        more through in some minute than the limit allows.
        """
        while self._ready and self._permits.is_free:
            if self.gate.must_wait:
                self.courier.deliveries.limit(asyncio.get_running_loop().time())
            await self.gate.pass_one()
            if self._ready and self._permits.is_free:
                self._start(self._ready.popleft())
        self._gatekeeper = None

    def _drop_if_empty(self, lane: Lane) -> None:
        if not lane and lane.current is None:
            self._ready.remove(lane)
            self._close(lane)

    def _close(self, lane: Lane) -> None:
        """The pool holds nothing of this group any more."""
        if lane.group is not None:
            del self._lanes[lane.group]
        if lane.latecomers:
            for job in lane.latecomers:
                job.keeper = None
                self.let_go(job)
            self._on_group_free(lane.latecomers)


def _capacity(config: PoolConfig) -> int:
    """POOL-1."""
    return max(config.concurrency * CAPACITY_PER_WORKER, LEAST_CAPACITY)
