"""The messages of one group that wait in a pool: two tiers, first in, first out in each."""

from collections import deque
from collections.abc import Iterator
from typing import Final

from msgspec import Struct

from router.core.job import Batch, Job, State

_UNUSED: Final[deque[Job]] = deque(maxlen=0)  # a tier of its own is made on demand: most never are


class Lane(Struct, eq=False):
    """One group's queue (POOL-3). A lane exists as long as it holds a job or serves one."""

    group: str | None  # None: a message of its own, without order
    current: Job | None = None  # being served; not in the tiers
    high: deque[Job] = _UNUSED
    regular: deque[Job] = _UNUSED
    tried: int = 0  # of the regular ones, those with posts: no high-priority one may pass them
    is_returning: bool = False  # its messages are on their way back to their broker
    latecomers: deque[Job] = _UNUSED  # arrived meanwhile; they wait until the group is free

    def put(self, job: Job) -> None:
        if job.message.high_priority:
            if self.high is _UNUSED:
                self.high = deque()
            self.high.append(job)
            return
        if self.regular is _UNUSED:
            self.regular = deque()
        self.regular.append(job)
        if job.posts:
            self.tried += 1

    def take(self) -> Job:
        """The next one to serve."""
        if self.high and not self.tried:
            job = self.high.popleft()
        else:
            job = self.regular.popleft()
            if job.posts:
                self.tried -= 1
        self.current = job
        return job

    @property
    def has_head(self) -> bool:
        """Whether the next one to serve waits for nobody in its group."""
        return self.current is None and bool(self)

    def put_off(self, job: Job) -> None:
        """It arrived while the group is being given back, or may be soon."""
        job.state = State.WAITING
        if self.latecomers is _UNUSED:
            self.latecomers = deque()
        self.latecomers.append(job)

    def let_latecomers_in(self) -> None:
        """The group stays after all: they queue up behind those that came before them."""
        for job in self.latecomers:
            job.state = State.QUEUED
            self.put(job)
        self.latecomers = _UNUSED

    def take_run(self, run: Batch | str) -> list[Job]:
        """Take out what goes back together with one that failed, in group order."""
        taken = [job for job in self if job.run == run]
        if taken:
            self._keep([job for job in self if job.run != run])
        return taken

    def take_from(self, first: Job) -> list[Job]:
        """Take out this one and all behind it."""
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
        """In the order of service."""
        regular, tried = iter(self.regular), self.tried
        while tried:
            job = next(regular)
            tried -= job.posts > 0
            yield job
        yield from self.high
        yield from regular

    def __len__(self) -> int:
        return len(self.high) + len(self.regular)

    def __bool__(self) -> bool:
        return bool(self.high or self.regular)
