"""Deletes that the broker has not heard of yet: their next delivery is acknowledged (BRK-3)."""

from collections import OrderedDict
from typing import Final

LIFETIME: Final = 12 * 3600.0
CAPACITY: Final = 100_000

Deleted = tuple[str, str, int]  # queue, broker id, our attempt number


class RememberedDeletes(OrderedDict[Deleted, float]):
    """Each with the time until which it is known."""

    def add(self, deleted: Deleted, now: float, *, lifetime: float = LIFETIME) -> None:
        self[deleted] = now + lifetime
        self.move_to_end(deleted)
        if len(self) > CAPACITY:
            self.popitem(last=False)

    def knows(self, deleted: Deleted, now: float) -> bool:
        return now < self.get(deleted, now)

    def forget(self, deleted: Deleted) -> None:
        """The broker has heard of it. Till then it is known, however often it comes."""
        self.pop(deleted, None)
