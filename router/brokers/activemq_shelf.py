"""What has come over one connection and waits to be asked for."""

import heapq
from typing import Final

from msgspec import Struct

from router.brokers.activemq_frames import Frame
from router.brokers.activemq_retry import History

NEVER: Final = float("inf")


class Arrival(Struct, frozen=True):
    """One message, ours as long as the connection."""

    place: int  # in the order of arrival
    frame: Frame
    history: History

    @property
    def ack_id(self) -> str:
        return self.frame.headers["ack"]

    @property
    def message_id(self) -> str:
        return self.frame.headers["message-id"]


class Shelf:
    """Gives what is due in the order of arrival, also when it was put back."""

    def __init__(self) -> None:
        self._due: list[tuple[int, Arrival]] = []  # a heap, by place
        self._later: list[tuple[float, int, Arrival]] = []  # a heap, by time and place

    def put(self, arrival: Arrival) -> None:
        heapq.heappush(self._due, (arrival.place, arrival))

    def put_off(self, arrival: Arrival, until: float) -> None:
        heapq.heappush(self._later, (until, arrival.place, arrival))

    def take(self, limit: int, now: float) -> list[Arrival]:
        count = min(limit, self.count_due(now))
        return [heapq.heappop(self._due)[1] for _ in range(count)]

    def first(self, limit: int) -> list[Arrival]:
        """Those that the next take would give, at the time of the latest count."""
        return [arrival for _, arrival in heapq.nsmallest(limit, self._due)]

    def count_due(self, now: float) -> int:
        while self._later and self._later[0][0] <= now:
            self.put(heapq.heappop(self._later)[2])
        return len(self._due)

    @property
    def next_due(self) -> float:
        """When the first of those put off is due."""
        return self._later[0][0] if self._later else NEVER
