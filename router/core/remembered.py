"""ACKs that the broker may not have heard: the next delivery is acknowledged instead (BRK-3)."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Final

LIFETIME: Final = 12 * 3600.0
CAPACITY: Final = 100_000


class RememberedAcks(OrderedDict[Hashable, float]):
    """What proves that a delivery is that very copy, with the time until which it is known."""

    def add(self, proof: Hashable, now: float, *, lifetime: float = LIFETIME) -> None:
        self[proof] = now + lifetime
        self.move_to_end(proof)
        if len(self) > CAPACITY:
            self.popitem(last=False)

    def knows(self, proof: Hashable, now: float) -> bool:
        return now < self.get(proof, now)

    def forget(self, proof: Hashable) -> None:
        """The broker has removed it. Until then it is known, however often it comes."""
        self.pop(proof, None)
