"""Which groups of a pool make no progress because their first message keeps failing (WQ-5)."""

from collections import OrderedDict
from typing import Final

from msgspec import Struct

from router.core.job import Job

BLOCKED_SECONDS: Final = 15 * 60.0
BLOCKED_FAILURES: Final = 20
MOST_NAMED: Final = 20  # groups of a pool; a dead target can block thousands, and warnings are few
CAPACITY: Final = 10_000  # groups
FORGOTTEN_SECONDS: Final = 24 * 3600.0


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
            if len(self) < CAPACITY and old.due + FORGOTTEN_SECONDS > now:
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
