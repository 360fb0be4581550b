"""ACKs that the broker may not have heard: the next delivery is acknowledged instead (BRK-3)."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Final

LIFETIME: Final = 12 * 3600.0
CAPACITY: Final = 100_000


class RememberedAcks(OrderedDict[Hashable, tuple[float, str]]):
    """What proves that a delivery is that very copy, until when that is known, and its error.

    The error is why the message became a dead letter; "" if it was accepted.
    """

    def add(
        self, proof: Hashable, now: float, *, lifetime: float = LIFETIME, error: str = ""
    ) -> None:
        self[proof] = now + lifetime, error
        self.move_to_end(proof)
        if len(self) > CAPACITY:
            self.popitem(last=False)

    def knows(self, proof: Hashable, now: float) -> bool:
        return self.error_of(proof, now) is not None

    def error_of(self, proof: Hashable, now: float) -> str | None:
        """Return the error with which it has to be acknowledged, or None if it is not known."""
        until, error = self.get(proof, (now, ""))
        return error if now < until else None

    def forget(self, proof: Hashable) -> None:
        """The broker has removed it. Until then it is known, however often it comes."""
        self.pop(proof, None)
