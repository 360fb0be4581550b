"""The groups of a pool: what waits in each, and which of them make no progress."""

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Final

from msgspec import Struct

from router.core.config import PoolConfig
from router.core.job import Batch, Job, State
from router.core.message import HIGHEST_PRIORITY, Mode

# Shared: an empty deque takes 760 bytes, and most lanes need none of the three.
_UNUSED: Final[deque[Job]] = deque(maxlen=0)
BLOCKED_SECONDS: Final = 15 * 60.0
BLOCKED_FAILURES: Final = 20
MOST_NAMED: Final = 20  # groups of a pool; a dead target can block thousands, and warnings are few
MOST_FAILING: Final = 10_000  # groups
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
    def has_head(self) -> bool:
        """Whether the next one to serve waits for nobody in its group."""
        return self.current is None and bool(self)

    def hold_back(self, job: Job) -> None:
        """Keep apart what arrives while the group is returned, or may be soon."""
        job.state = State.WAITING
        if self.blocked is _UNUSED:
            self.blocked = deque()
        self.blocked.append(job)

    def release_blocked(self) -> None:
        """Queue what was held back behind those that came before: the group stays after all."""
        for job in self.blocked:
            job.state = State.QUEUED
            self.put(job)
        self.blocked = _UNUSED

    def take_scope(self, scope: Batch | str) -> list[Job]:
        """Take out what goes back together with one that failed, in group order."""
        taken = [job for job in self if job.failure_scope == scope]
        if taken:
            self._keep([job for job in self if job.failure_scope != scope])
        return taken

    def take_from(self, first: Job) -> list[Job]:
        """Take out a job and all behind it."""
        jobs = list(self)
        place = jobs.index(first)
        self._keep(jobs[:place])
        return jobs[place:]

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


class Lanes(dict[str | None, Lane]):
    """The lanes of one pool by group, and those that can go on, in order.

    A message without order has its own lane, which is not found by a group.
    """

    __slots__ = ("ready",)

    def __init__(self) -> None:
        super().__init__()
        self.ready: deque[Lane] = deque()

    @property
    def behind(self) -> int:
        """How many messages wait for others of their group."""
        return sum(len(lane) + len(lane.blocked) - lane.has_head for lane in self.values())

    def ahead_of(self, lane: Lane | None, job: Job) -> int:
        """Return how many lanes go on before the one in which the job is first."""
        for place, ready in enumerate(self.ready):
            if ready is lane or (ready.group is None and job in ready):
                return place
        return 0

    def overdue(self, now: float) -> list[tuple[Lane, Job]]:
        """Return the first job of each lane that has waited for longer than its broker allows."""
        overdue: list[tuple[Lane, Job]] = []
        for lane in (*self.values(), *(lane for lane in self.ready if lane.group is None)):
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
            if len(self) < MOST_FAILING and old.due + FORGOTTEN_SECONDS > now:
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
