"""Who consumes: the same for all queues of one process."""

from collections.abc import Callable

from msgspec import Struct


class Worker(Struct, frozen=True):
    id: str  # whose leases they are
    dedup_window: float  # seconds, WQ-1
    clock: Callable[[], float]  # of the machine, which all who share a file go by
