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
        self._until[deleted] = now + LIFETIME
        self._until.move_to_end(deleted)
        if len(self._until) > CAPACITY:
            self._until.popitem(last=False)

    def knows(self, deleted: Deleted, now: float) -> bool:
        return now < self._until.get(deleted, now)

    def forget(self, deleted: Deleted) -> None:
        """The broker has heard of it. Till then it is known, however often it comes."""
        self._until.pop(deleted, None)

    def __bool__(self) -> bool:
        return bool(self._until)

    def __len__(self) -> int:
        return len(self._until)
