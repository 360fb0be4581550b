"""Messages that went back to their queue because their pool was full (ROUTE-5)."""

import heapq
from collections import Counter, deque
from typing import Final

from msgspec import Struct

from router.core.identity import MessageKey
from router.core.message import DEFAULT_POOL
from router.engine.job import NEVER, Job

DEFERRED_STEP_SECONDS: Final = 0.05  # between two deferred messages of a group
OVERDUE_SECONDS: Final = 60.0  # a deferred message that is later than this went elsewhere


def named_pool(job: Job) -> str:
    """Return the code of the pool that a message names."""
    return job.message.pool or DEFAULT_POOL


class Deferred(Struct, eq=False):
    """One message that went back because its pool was full."""

    key: MessageKey
    pool: str  # the code that it names
    group: str | None  # None: its broker keeps the order
    number: int  # of its pool, in the order in which they went back for the first time
    before: "Deferred | None" = None  # of its group: it has to come back first
    due: float = 0.0
    has_gone: bool = False  # it has found its place, or went elsewhere


class DeferredMessages:
    """Messages that went back because their pool was full, and have found no place since."""

    def __init__(self) -> None:
        self.by_pool: Counter[str] = Counter()  # those that are not due yet
        self._all: dict[MessageKey, Deferred] = {}
        # By pool and group, where the router keeps the order.
        self._groups: dict[tuple[str, str], dict[MessageKey, Deferred]] = {}
        self._due: list[tuple[float, int, Deferred]] = []  # a heap
        self._late: deque[tuple[float, Deferred]] = deque()  # due, and expected to come back
        self._last: Counter[str] = Counter()  # numbers, by pool
        self._gone: Counter[str] = Counter()  # how many have gone, by pool
        self._pushed = 0

    def ahead(self, job: Job) -> int:
        """Return how many deferred messages of its pool come before a job, about, and itself."""
        found, code = self._all.get(job.key), named_pool(job)
        number = self._last[code] + 1 if found is None else found.number
        return max(number - self._gone[code], 1)

    def add(self, job: Job, due: float, *, keep_order: bool) -> float:
        """Note a deferred message. Return when it is due: never before those of its group."""
        code = named_pool(job)
        found = self._all.get(job.key) or self._enter(job, code, keep_order=keep_order)
        if found.before is not None and not found.before.has_gone:
            due = max(due, found.before.due + DEFERRED_STEP_SECONDS)
        found.due = due
        self._pushed += 1
        heapq.heappush(self._due, (due, self._pushed, found))
        self.by_pool[code] += 1
        return due

    def _enter(self, job: Job, code: str, *, keep_order: bool) -> Deferred:
        self._last[code] += 1
        found = Deferred(job.key, code, job.group if keep_order else None, self._last[code])
        self._all[job.key] = found
        if found.group is not None:
            group = self._groups.setdefault((code, found.group), {})
            if group:
                found.before = group[next(reversed(group))]
            group[job.key] = found
        return found

    def count(self, now: float) -> int:
        """Return how many are not due yet."""
        while self._due and self._due[0][0] <= now:
            due, _, found = heapq.heappop(self._due)
            self._late.append((due, found))
            self.by_pool[found.pool] -= 1
            if not self.by_pool[found.pool]:
                del self.by_pool[found.pool]
        while self._late and self._late[0][0] + OVERDUE_SECONDS < now:
            due, found = self._late.popleft()
            if found.due == due and not found.has_gone:
                self._remove(found)
        return len(self._due)

    @property
    def next_due(self) -> float:
        return self._due[0][0] if self._due else NEVER

    def is_behind(self, job: Job, now: float) -> bool:
        """Return whether a deferred message of its group has to come back before this job."""
        self.count(now)
        group = self._groups.get((named_pool(job), job.group))
        return group is not None and next(iter(group)) != job.key

    def forget(self, job: Job) -> None:
        """Forget a message: it has found its place."""
        found = self._all.get(job.key)
        if found is not None:
            self._remove(found)

    def _remove(self, found: Deferred) -> None:
        found.has_gone, found.before = True, None
        del self._all[found.key]
        code = found.pool
        self._gone[code] += 1
        if self._gone[code] == self._last[code]:
            del self._gone[code], self._last[code]
        if found.group is not None:
            group = self._groups[code, found.group]
            del group[found.key]
            if not group:
                del self._groups[code, found.group]

    def __len__(self) -> int:
        return len(self._all)
