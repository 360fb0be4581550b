"""The groups of a pool: what waits in each, and which of them make no progress.

Only a `Lane` orders the messages of a group, and only by the methods that put or take them: `put`
(high priority first, but never before one that has been tried), `put_back` and `put_failed` (in
front), `hold_back` and `release_blocked` (apart, then behind) and `take_…`. The pool and its
`DeliveryRunner` call them. What has not reached a lane keeps its order in `FlowControl`, in
`Dispatcher._hold_back` (behind one that came early) or in the order store.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Final

from msgspec import Struct, field

from router.core.config import PoolConfig
from router.core.history import State
from router.core.message import HIGHEST_PRIORITY, Mode
from router.engine.job import Batch, Job

if TYPE_CHECKING:  # a target knows the lanes that wait for it
    from router.engine.targets import Line

# Shared: an empty deque takes 760 bytes, and most lanes need none of the three.
_UNUSED: Final[deque[Job]] = deque(maxlen=0)
HALF_LIFE_SECONDS: Final = 60.0  # of what the workers of a flow were busy with (SHARE-1)
MIN_STALE: Final = 64  # entries of a heap that may be stale
BLOCKED_SECONDS: Final = 15 * 60.0
BLOCKED_FAILURES: Final = 20
MAX_NAMED: Final = 20  # groups of a pool; a dead target can block thousands, and warnings are few
MAX_FAILING: Final = 10_000  # groups
FORGOTTEN_SECONDS: Final = 24 * 3600.0


def ordering_group(job: Job, pool: PoolConfig) -> str | None:
    """Return the group in whose order a job is served; None: it has no order (POOL-7)."""
    message = job.message
    if message.group is None and pool.parallel_ungrouped:
        return None
    if message.dispatch is not None and message.mode is Mode.IMMEDIATE:
        return None
    return job.group


class Lane(Struct, eq=False):
    """One group's queue (POOL-3). A lane exists as long as it holds a job or serves one."""

    group: str | None  # None: a single message, without order
    current: Job | None = None  # being served; not in the tiers
    high: deque[Job] = _UNUSED
    regular: deque[Job] = _UNUSED
    tried: int = 0  # of the regular ones, those with requests: no high-priority one may pass them
    is_returning: bool = False  # its messages are being returned to their broker
    blocked: deque[Job] = _UNUSED  # arrived meanwhile; they wait until the group is free
    line: "Line | None" = None  # at which it is parked, or which has called it (GATE-5)
    failed: Job | None = None  # it waits in front for its next try, at its `resume_at` (ORD-1)

    def put(self, job: Job) -> None:
        message = job.message
        if message.high_priority or message.priority == HIGHEST_PRIORITY:
            if self.high is _UNUSED:
                self.high = deque()
            self.high.append(job)
            return
        if self.regular is _UNUSED:
            self.regular = deque()
        self.regular.append(job)
        if job.requests:
            self.tried += 1

    def take(self) -> Job:
        """Take out the next one to serve; it is the current one then."""
        if self.high and not self.tried:
            job = self.high.popleft()
        else:
            job = self.regular.popleft()
            if job.requests:
                self.tried -= 1
        self.current = job
        return job

    @property
    def head(self) -> Job:
        """The next one to serve, of a lane that has one."""
        return self.high[0] if self.high and not self.tried else self.regular[0]

    def put_back(self, job: Job) -> None:
        """Undo a `take`: it cannot be served yet."""
        self.current = None
        if _is_high(job):
            self.high.appendleft(job)
        else:
            self.regular.appendleft(job)
            self.tried += job.requests > 0

    def put_failed(self, job: Job) -> None:
        """Put the current one back in front: it is tried again, here (ORD-1)."""
        if self.regular is _UNUSED:
            self.regular = deque()
        if self.high is _UNUSED:
            self.high = deque()
        self.put_back(job)
        self.failed = job

    @property
    def has_head(self) -> bool:
        """Whether the next one to serve waits for no other of its group."""
        return self.current is None and bool(self)

    def hold_back(self, job: Job) -> None:
        """Keep apart what arrives while the group is returned, or may be soon."""
        job.state = State.WAITING
        if self.blocked is _UNUSED:
            self.blocked = deque()
        self.blocked.append(job)

    def release_blocked(self) -> None:
        """Queue what was held back behind those that came before: the group stays after all."""
        for job in self.take_blocked():
            job.state = State.QUEUED
            self.put(job)

    def take_blocked(self) -> list[Job]:
        """Take out what was held back."""
        taken, self.blocked = list(self.blocked), _UNUSED
        return taken

    def take_scope(self, scope: Batch | str) -> list[Job]:
        """Take out what goes back together with one that failed, in group order."""
        taken = [job for job in (*self, *self.blocked) if job.failure_scope == scope]
        if taken:
            self._keep([job for job in self if job.failure_scope != scope])
            for job in self.take_blocked():
                if job.failure_scope != scope:
                    self.hold_back(job)
        return taken

    def take_from(self, first: Job) -> list[Job]:
        """Take out a job and all behind it."""
        jobs = list(self)
        place = jobs.index(first)
        self._keep(jobs[:place])
        return jobs[place:]

    def take_out(self, job: Job) -> None:
        self._keep([each for each in self if each is not job])

    def take_all(self) -> list[Job]:
        taken = list(self)
        self._keep([])
        return taken

    def _keep(self, jobs: list[Job]) -> None:
        self.high = self.regular = _UNUSED
        self.tried = 0
        for job in jobs:
            self.put(job)

    def __iter__(self) -> Iterator[Job]:
        """Yield the jobs in the order of service."""
        regular, tried = iter(self.regular), self.tried
        while tried:
            job = next(regular)
            tried -= job.requests > 0
            yield job
        yield from self.high
        yield from regular

    def __len__(self) -> int:
        return len(self.high) + len(self.regular)

    def __bool__(self) -> bool:
        return bool(self.high or self.regular)


def _is_high(job: Job) -> bool:
    return job.message.high_priority or job.message.priority == HIGHEST_PRIORITY


class Flow(Struct, eq=False):
    """Lanes that share the workers of a pool as one: of a target, or of a tenant (SHARE-1)."""

    lanes: "Lanes"
    ready: deque[Lane] = field(default_factory=deque)
    open: int = 0  # workers that it has, while its pool has several flows
    # What its workers were busy with, as log2(seconds) + minutes of the clock: seconds that count
    # half after a minute keep their order in it, so nothing has to be aged.
    used: float = -math.inf
    turn: int = 0  # its latest place among the rivals; earlier ones are stale
    is_crowded: bool = False  # its pool has no room for more of them

    @property
    def is_idle(self) -> bool:
        return not self.open and not self.ready

    def begin(self) -> None:
        """Count a worker that it gets."""
        self.open += 1
        self.lanes.reorder(self)

    def end(self, seconds: float = 0.0, now: float = 0.0) -> None:
        """Count a worker that it gives back, and how long it was busy."""
        self.open -= 1
        if seconds > 0:
            spent = math.log2(seconds) + now / HALF_LIFE_SECONDS
            more, less = max(self.used, spent), min(self.used, spent)
            self.used = more + math.log2(1.0 + 2.0 ** (less - more))
        self.lanes.reorder(self)


class Lanes(dict[str | None, Lane]):
    """The lanes of one pool by group, and those that can go on, in order.

    A message without order has its own lane, which is not found by a group. While lanes of several
    flows wait, these are rivals: the one with the fewest workers goes first, then the one whose
    workers were busy for the shortest time.
    """

    __slots__ = ("_heap", "_rival_lanes", "_turn", "flow", "ready", "rivals")

    def __init__(self) -> None:
        super().__init__()
        self.ready: deque[Lane] = deque()  # of the only flow that waits
        self.flow: Flow | None = None  # that flow
        self.rivals: dict[Flow, None] = {}  # the flows that wait, while there are several
        self._rival_lanes = 0
        self._heap: list[tuple[int, float, int, Flow]] = []  # workers, use, turn
        self._turn = 0

    def adopt(self, flow: Flow) -> None:
        """Let what will wait belong to this flow: there is no other."""
        if not self.ready and not self.rivals:
            self.flow, self.ready = flow, flow.ready

    def put(self, lane: Lane, flow: Flow, *, first: bool = False) -> None:
        """Let a lane wait for a worker, behind the others of its flow or before them."""
        if not self.rivals and self.ready and flow is not self.flow:
            self._begin_contest()
        if self.rivals:
            self._rival_lanes += 1
            if not flow.ready:
                self.rivals[flow] = None
                self._line_up(flow)
        else:
            self.flow, self.ready = flow, flow.ready
        if first:
            flow.ready.appendleft(lane)
        else:
            flow.ready.append(lane)

    def take(self) -> Lane:
        """Take out the lane that goes on next; there must be one."""
        if not self.rivals or self.ready:
            return self.ready.popleft()
        _, _, turn, flow = heappop(self._heap)
        while turn != flow.turn:
            _, _, turn, flow = heappop(self._heap)
        lane = flow.ready.popleft()
        self._rival_lanes -= 1
        if flow.ready:
            self._line_up(flow)
        else:
            self._leave(flow)
        return lane

    def remove(self, lane: Lane) -> None:
        """Take out a lane that waits."""
        if lane in self.ready:
            self.ready.remove(lane)
            return
        flow = next(each for each in self.rivals if lane in each.ready)
        flow.ready.remove(lane)
        self._rival_lanes -= 1
        if not flow.ready:
            self._leave(flow)

    def clear_ready(self) -> list[Lane]:
        """Take out all lanes that wait."""
        taken = []
        while self.ready or self.rivals:
            taken.append(self.take())
        return taken

    def all_ready(self) -> Iterator[Lane]:
        """Yield the lanes that wait for a worker."""
        for flow in self.rivals:
            yield from flow.ready
        yield from self.ready

    @property
    def waiting(self) -> int:
        """How many lanes wait for a worker."""
        return len(self.ready) + (self._rival_lanes if self.rivals else 0)

    def reorder(self, flow: Flow) -> None:
        """Note that a flow has more or fewer workers."""
        if flow in self.rivals:
            self._line_up(flow)

    def share_of(self, workers: int) -> int:
        """Return how many workers each of the rivals may have."""
        return -(-workers // max(len(self.rivals), 1))

    def _begin_contest(self) -> None:
        """Let the flow that waits have rivals from now on."""
        assert self.flow is not None  # noqa: S101  for the type checker: what waits has a flow
        self.rivals = {self.flow: None}
        self._rival_lanes = len(self.ready)
        self._line_up(self.flow)
        self.flow, self.ready = None, deque()

    def _line_up(self, flow: Flow) -> None:
        self._turn += 1
        flow.turn = self._turn
        heappush(self._heap, (flow.open, flow.used, flow.turn, flow))
        if len(self._heap) > 4 * len(self.rivals) + MIN_STALE:  # most of it is stale
            self._heap = [entry for entry in self._heap if entry[2] == entry[3].turn]
            heapify(self._heap)

    def _leave(self, flow: Flow) -> None:
        """Take out a flow that no longer waits. The last of the rivals has none."""
        del self.rivals[flow]
        flow.turn = 0
        if len(self.rivals) == 1:
            (self.flow,) = self.rivals
            self.flow.turn = 0
            self.flow.ready.extend(self.ready)
            self.ready = self.flow.ready
            self.rivals = {}
            self._heap.clear()

    @property
    def behind(self) -> int:
        """How many messages wait for others of their group."""
        return sum(len(lane) + len(lane.blocked) - lane.has_head for lane in self.values())

    def ahead_of(self, lane: Lane | None, job: Job) -> int:
        """Return how many lanes of its flow go on before the one in which the job is first."""
        for ready in (self.ready, *(flow.ready for flow in self.rivals)):
            for place, each in enumerate(ready):
                if each is lane or (each.group is None and job in each):
                    return place
        return 0

    def all_lanes(self, parked: Sequence[Lane]) -> list[Lane]:
        """Return the lanes of groups, and those of single messages that wait."""
        waiting = (*self.all_ready(), *parked)
        return [*self.values(), *(lane for lane in waiting if lane.group is None)]

    def overdue(self, now: float, parked: Sequence[Lane] = ()) -> list[tuple[Lane, Job]]:
        """Return the first job of each lane that has waited for longer than its broker allows."""
        overdue: list[tuple[Lane, Job]] = []
        for lane in self.all_lanes(parked):
            first = next((job for job in lane if job.hold_until <= now), None)
            if first is not None:
                overdue.append((lane, first))
        return overdue


class _Note(Struct):
    since: float  # the first failure after the last progress
    due: float = 0.0  # when the message that failed comes back
    failures: int = 0


class FailingGroups(OrderedDict[str, _Note]):
    """By group, least recently failed first. Empty, and free of cost, while nothing fails."""

    def __init__(self) -> None:
        super().__init__()
        self.reported: set[str] = set()

    def fail(self, job: Job, *, counted: bool, now: float, delay: float) -> bool:
        """Note that the first message of a group goes back. Return True to report the group now.

        The failures that its broker has counted outlive this process. A message without a group
        blocks others only as long as none gets through, so there our own count decides.
        """
        group = job.group
        while self:
            oldest, old = next(iter(self.items()))
            if len(self) < MAX_FAILING and old.due + FORGOTTEN_SECONDS > now:
                break
            self.progress(oldest)
        note = self.get(group)
        # A message that came back much later than it was due was held by another consumer.
        if note is None or job.tracked_at > note.due + BLOCKED_SECONDS:
            self.progress(group)
            note = self[group] = _Note(now)
        self.move_to_end(group)
        note.due = now + delay
        note.failures += counted
        failures = note.failures if job.message.group is None else job.failures
        if failures < BLOCKED_FAILURES and now - note.since < BLOCKED_SECONDS:
            return False
        is_news = group not in self.reported
        self.reported.add(group)
        return is_news

    def progress(self, group: str) -> None:
        """Forget the failures of a group: one of it was accepted, or given up."""
        self.pop(group, None)
        self.reported.discard(group)
