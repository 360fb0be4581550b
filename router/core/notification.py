"""Notifications for people who do not watch: new warnings, and states that began or ended.

A warning is reported once, however often it is raised; a state once when it begins and once when it
ends. What begins and ends between two notifications is reported in one line.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from router.core.warnings import MAX_WARNINGS, Notice, Severity

Value = TypeVar("Value")

MAX_ITEMS: Final = 500  # between two notifications, and kept for a channel that fails
MAX_TROUBLES: Final = 10_000  # as many as there are circuit breakers


class Subject(Struct, frozen=True):
    """Something that can be in trouble, and how to say so."""

    name: str  # "circuit breaker of http://svc:80"
    begins: str  # "opened"
    ends: str  # "closed again"
    severity: Severity


class StateChange(Struct, frozen=True):
    """The news of one subject since the last notification. Times are Unix seconds."""

    subject: Subject
    at: float  # of the latest thing that happened
    began: int = 0  # how often
    is_over: bool = False

    @property
    def text(self) -> str:
        began = self.subject.begins if self.began else ""
        ended = self.subject.ends if self.is_over else ""
        words = " and ".join(filter(None, (began, ended)))
        times = f", {self.began} times" if self.began > 1 else ""
        return f"{self.subject.name} {words}{times}"


Item = Notice | StateChange


class Digest(Struct, frozen=True, kw_only=True):
    """One notification."""

    instance: str  # the router that reports
    at: float
    notices: Sequence[Notice] = ()
    changes: Sequence[StateChange] = ()
    dropped: int = 0  # items that could not be kept

    @property
    def worst(self) -> Severity:
        found = [notice.severity for notice in self.notices]
        found += [change.subject.severity for change in self.changes if not change.is_over]
        return max(found, default=Severity.INFO)


class PendingDigest:
    """The contents of the next notification. Bounded, and cheap to call: routing does."""

    def __init__(self, least: Severity) -> None:
        self.dropped = 0
        self._least = least
        self._items: dict[str, Item] = {}  # by the warning's id or the subject's name
        self._reported: OrderedDict[str, Severity] = OrderedDict()  # warnings, by id
        self._troubled: OrderedDict[str, None] = OrderedDict()  # subjects, by name

    def warned(self, notice: Notice) -> None:
        """Note a warning that was raised, or raised again."""
        if notice.id in self._items:
            self._items[notice.id] = notice
        elif notice.severity >= max(self._least, self._reported.get(notice.id, 0) + 1):
            _remember(self._reported, notice.id, notice.severity, MAX_WARNINGS)
            self._put(notice.id, notice)

    def began(self, subject: Subject, at: float) -> None:
        if subject.severity < self._least or subject.name in self._troubled:
            return
        _remember(self._troubled, subject.name, None, MAX_TROUBLES)
        change = self._change(subject, at)
        self._put(subject.name, replace(change, at=at, began=change.began + 1, is_over=False))

    def ended(self, subject: Subject, at: float) -> None:
        if subject.name not in self._troubled:
            return
        del self._troubled[subject.name]
        change = self._change(subject, at)
        self._put(subject.name, replace(change, subject=subject, at=at, is_over=True))

    def take(self) -> Sequence[Item]:
        """Return and forget all items."""
        items = list(self._items.values())
        self._items.clear()
        return items

    def _change(self, subject: Subject, at: float) -> StateChange:
        item = self._items.get(subject.name)
        return item if isinstance(item, StateChange) else StateChange(subject, at)

    def _put(self, key: str, item: Item) -> None:
        if key not in self._items and len(self._items) >= MAX_ITEMS:
            self.dropped += 1
            if _severity(item) <= self._least:
                return  # without a look at the others, which are no milder
            mildest = min(self._items, key=lambda each: _severity(self._items[each]))
            if _severity(item) <= _severity(self._items[mildest]):
                return
            del self._items[mildest]
        self._items[key] = item


def digest(items: Sequence[Item], *, instance: str, at: float, dropped: int) -> Digest:
    """Put the worst warnings first, and state changes in the order in which they came."""
    notices = [item for item in items if isinstance(item, Notice)]
    notices.sort(key=lambda notice: notice.severity, reverse=True)
    changes = [item for item in items if isinstance(item, StateChange)]
    return Digest(instance=instance, at=at, notices=notices, changes=changes, dropped=dropped)


def _severity(item: Item) -> Severity:
    return item.severity if isinstance(item, Notice) else item.subject.severity


def _remember(known: OrderedDict[str, Value], key: str, value: Value, most: int) -> None:
    known[key] = value
    if len(known) > most:
        known.popitem(last=False)
