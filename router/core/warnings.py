"""Warnings: repetitions are counted, their number is bounded, old ones expire (OPS-2)."""

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from enum import IntEnum, StrEnum
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

MAX_WARNINGS: Final = 1000
MAX_WARNINGS_OF_ONE_CODE: Final = 100  # warnings of one code from one source
MAX_TEXT_CHARACTERS: Final = 1000
LIFETIME_SECONDS: Final = 8 * 3600.0
REPEAT_SECONDS: Final = 5 * 60.0
FRESH_SECONDS: Final = 30 * 60.0  # how long a critical warning degrades the router's health


class Severity(IntEnum):
    INFO = 1
    WARN = 2
    ERROR = 3
    CRITICAL = 4


class Code(StrEnum):
    """Everything that can be wrong."""

    BROKER_LIMIT = "BROKER_LIMIT"
    CLOCK = "CLOCK"
    CONFIG_CONFLICT = "CONFIG_CONFLICT"
    CONFIG_SYNC_FAILED = "CONFIG_SYNC_FAILED"
    CONFIGURATION = "CONFIGURATION"
    CONSUMER_RESTART = "CONSUMER_RESTART"
    CONSUMER_RESTART_FAILED = "CONSUMER_RESTART_FAILED"
    CREDENTIALS = "CREDENTIALS"
    DEAD_LETTER_STORE = "DEAD_LETTER_STORE"
    GROUP_BLOCKED = "GROUP_BLOCKED"
    GROUP_HELD = "GROUP_HELD"
    GROUP_THREAD_EXIT_WITH_MESSAGES = "GROUP_THREAD_EXIT_WITH_MESSAGES"
    GROUP_THREAD_RESTART = "GROUP_THREAD_RESTART"
    HANDLER_STUCK = "HANDLER_STUCK"
    LIMITS = "LIMITS"
    LOOK_AHEAD = "LOOK_AHEAD"
    MALFORMED_MESSAGE = "MALFORMED_MESSAGE"
    MEDIATOR_NULL_RESULT = "MEDIATOR_NULL_RESULT"
    PIPELINE_MAP_LEAK = "PIPELINE_MAP_LEAK"
    ORDER_STORE = "ORDER_STORE"
    POOL_LIMIT = "POOL_LIMIT"
    PROCESSING = "PROCESSING"
    QUEUE_BACKLOG = "QUEUE_BACKLOG"
    QUEUE_FULL = "QUEUE_FULL"
    QUEUE_GROWING = "QUEUE_GROWING"
    QUEUE_UNREACHABLE = "QUEUE_UNREACHABLE"
    QUEUE_VALIDATION = "QUEUE_VALIDATION"
    REPLY_FAILED = "REPLY_FAILED"
    RESULT_STORE = "RESULT_STORE"
    ROUTING = "ROUTING"
    SHUTDOWN_CLEANUP_ERRORS = "SHUTDOWN_CLEANUP_ERRORS"
    STANDBY_LOCK = "STANDBY_LOCK"
    STORAGE = "STORAGE"
    TARGET_DOWN = "TARGET_DOWN"
    TARGET_GONE = "TARGET_GONE"
    TARGET_REJECTED = "TARGET_REJECTED"


class Notice(Struct, frozen=True, kw_only=True):
    """One warning, however often it was raised. Times are Unix seconds."""

    id: str
    code: str
    severity: Severity
    source: str
    message: str
    first_at: float
    last_at: float
    count: int = 1
    acknowledged: bool = False


class WarningSummary(Struct, frozen=True):
    """The warnings that health is judged by. Acknowledged ones do not count."""

    active: Mapping[Severity, int]
    fresh_critical: int  # raised within the last 30 minutes
    mark: str = ""  # changes whenever the list of warnings does

    @property
    def total(self) -> int:
        return sum(self.active.values())


class WarningBook:
    """The latest warnings. Readers see none that has expired; the next warning removes those.

    Messages can cause any number of warnings. So those of one code from one source push out only
    each other, and a mild warning never pushes out a severe one.
    """

    def __init__(self) -> None:
        self._notices: OrderedDict[str, Notice] = OrderedDict()  # least recently raised first
        self._alike: dict[tuple[str, str], OrderedDict[str, None]] = {}  # code, source → ids
        self._latest: dict[tuple[str, str, str], str] = {}  # code, source, message → id
        self._added = 0

    def add(self, code: str, severity: Severity, source: str, message: str, now: float) -> Notice:
        """Add a warning, or count it if it was raised within the last five minutes."""
        self.clear_older(LIFETIME_SECONDS / 3600, now)
        if len(message) > MAX_TEXT_CHARACTERS:
            message = f"{message[:MAX_TEXT_CHARACTERS]} …"
        last = self._notices.get(self._latest.get((code, source, message), ""))
        if last is not None and now - last.last_at <= REPEAT_SECONDS:
            return self._repeat(last, severity, now)
        self._added += 1
        notice = Notice(
            id=f"{int(now)}-{self._added}",  # ids of an earlier process match nothing
            code=code,
            severity=severity,
            source=source,
            message=message,
            first_at=now,
            last_at=now,
        )
        alike = self._alike.setdefault((code, source), OrderedDict())
        self._notices[notice.id] = notice
        self._latest[code, source, message] = notice.id
        alike[notice.id] = None
        if len(alike) > MAX_WARNINGS_OF_ONE_CODE:
            self._remove(min(alike, key=self._worth))
        elif len(self._notices) > MAX_WARNINGS:
            self._remove(min(self._notices, key=self._worth))
        return notice

    def list(
        self,
        *,
        now: float,
        severity: Severity | None = None,
        code: str | None = None,
        acknowledged: bool | None = None,
    ) -> Sequence[Notice]:
        """Return the matching warnings, the most recently raised first."""
        return [
            notice
            for notice in reversed(self._notices.values())
            if notice.last_at >= now - LIFETIME_SECONDS
            and severity in (None, notice.severity)
            and code in (None, notice.code)
            and acknowledged in (None, notice.acknowledged)
        ]

    def summary(self, now: float) -> WarningSummary:
        notices = self.list(now=now)
        active = [notice for notice in notices if not notice.acknowledged]
        newest = notices[0].id if notices else ""
        raised = sum(notice.count for notice in notices)
        return WarningSummary(
            active=Counter(notice.severity for notice in active),
            fresh_critical=sum(
                notice.severity is Severity.CRITICAL and now - notice.last_at < FRESH_SECONDS
                for notice in active
            ),
            mark=f"{newest} {len(notices)} {raised} {len(notices) - len(active)}",
        )

    def acknowledge(self, notice_id: str) -> bool:
        """Mark it as known to an operator. Return False if there is no such warning."""
        notice = self._notices.get(notice_id)
        if notice is None:
            return False
        self._notices[notice_id] = replace(notice, acknowledged=True)
        return True

    def acknowledge_all(self) -> int:
        """Return how many were not acknowledged before."""
        waiting = [notice.id for notice in self._notices.values() if not notice.acknowledged]
        return sum(self.acknowledge(notice_id) for notice_id in waiting)

    def has(self, code: str, source: str) -> bool:
        """Return whether there are warnings of this kind, acknowledged or not."""
        return (code, source) in self._alike

    def withdraw(self, code: str, source: str) -> int:
        """Remove the warnings of one kind: what they are about is over."""
        return self._remove_all(tuple(self._alike.get((code, source), ())))

    def clear(self) -> int:
        return self._remove_all(tuple(self._notices))

    def clear_older(self, hours: float, now: float) -> int:
        """Remove warnings that were not raised within the last `hours`."""
        oldest_kept = now - hours * 3600
        return self._remove_all(
            tuple(key for key, notice in self._notices.items() if notice.last_at < oldest_kept)
        )

    def _repeat(self, last: Notice, severity: Severity, now: float) -> Notice:
        worse = severity > last.severity
        notice = replace(
            last,
            severity=max(severity, last.severity),
            last_at=now,
            count=last.count + 1,
            acknowledged=last.acknowledged and not worse,  # that was about something milder
        )
        self._notices[last.id] = notice
        self._notices.move_to_end(last.id)
        self._alike[last.code, last.source].move_to_end(last.id)
        return notice

    def _worth(self, notice_id: str) -> int:
        """Return how long to keep it. Among equals the least recently raised one goes first."""
        notice = self._notices[notice_id]
        return 0 if notice.acknowledged else notice.severity

    def _remove_all(self, ids: Sequence[str]) -> int:
        for notice_id in ids:
            self._remove(notice_id)
        return len(ids)

    def _remove(self, notice_id: str) -> None:
        notice = self._notices.pop(notice_id)
        alike = self._alike[notice.code, notice.source]
        del alike[notice_id]
        if not alike:
            del self._alike[notice.code, notice.source]
        text = (notice.code, notice.source, notice.message)
        if self._latest[text] == notice_id:  # otherwise a newer one has replaced it
            del self._latest[text]
