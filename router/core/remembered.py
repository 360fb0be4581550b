"""Deletes that the broker has not heard of yet: their next delivery is acknowledged (BRK-3)."""

from collections import OrderedDict
from typing import Final

LIFETIME: Final = 12 * 3600.0
CAPACITY: Final = 100_000

Deleted = tuple[str, str, int]  # queue, broker id, our attempt number


class RememberedDeletes:
    def __init__(self) -> None:
        self._until: OrderedDict[Deleted, float] = OrderedDict()

    def add(self, deleted: Deleted, now: float) -> None:
        self._until.pop(deleted, None)
        self._until[deleted] = now + LIFETIME
        if len(self._until) > CAPACITY:
            self._until.popitem(last=False)

    def take(self, deleted: Deleted, now: float) -> bool:
        """Whether this is to be deleted. Answered once: the delete is on its way then."""
        until = self._until.pop(deleted, None)
        return until is not None and now < until

    def __bool__(self) -> bool:
        return bool(self._until)

    def __len__(self) -> int:
        return len(self._until)
