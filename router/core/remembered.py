"""What the router remembers of messages that it does not hold: in memory, bounded."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Final

from router.core.identity import MessageKey
from router.core.message import UNTRIED, Tally

LIFETIME_SECONDS: Final = 12 * 3600.0
CAPACITY: Final = 100_000


class RememberedAcks(OrderedDict[Hashable, tuple[float, str]]):
    """ACKs that the broker may not have heard: the next delivery is acknowledged instead (BRK-3).

    By what proves that a delivery is that very copy: until when that is known, and the error. The
    error is why the message became a dead letter; "" if it was accepted.
    """

    def add(
        self, proof: Hashable, now: float, *, lifetime: float = LIFETIME_SECONDS, error: str = ""
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
        """Forget an ACK: the broker has removed the message."""
        self.pop(proof, None)


class Tallies(OrderedDict[MessageKey, Tally]):
    """What was tried of messages whose broker cannot keep it (WQ-5).

    Forgotten by a restart, and the oldest when there are too many: never counted too high.
    """

    def keep(self, key: MessageKey, tally: Tally) -> None:
        self[key] = tally
        self.move_to_end(key)
        if len(self) > CAPACITY:
            self.popitem(last=False)

    def of(self, key: MessageKey) -> Tally:
        return self.get(key, UNTRIED)

    def forget(self, key: MessageKey) -> None:
        self.pop(key, None)
