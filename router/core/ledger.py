"""How what came in has ended, and what the router remembers of it (BRK-3, OPS-6, WQ-5)."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Final

from msgspec import Struct

from router.core.history import Fate
from router.core.identity import MessageKey
from router.core.message import UNTRIED, Tally

REMEMBERED_SECONDS: Final = 12 * 3600.0
MAX_REMEMBERED_MESSAGES: Final = 100_000
NEVER: Final = float("inf")


class Ledger:
    """Counts hand-overs in, and how each of them ended: what came in went somewhere, or is here."""

    def __init__(self) -> None:
        self.received = 0
        self.ended: dict[Fate, int] = dict.fromkeys(Fate, 0)

    def end(self, fate: Fate, hand_overs: int = 1) -> None:
        self.ended[fate] += hand_overs

    def unaccounted(self, held: int) -> int:
        """Return 0, always: `held` is counted where they are held, not here."""
        return self.received - sum(self.ended.values()) - held


class RememberedAcks(OrderedDict[Hashable, tuple[float, str]]):
    """ACKs that may not have reached the broker: the next hand-over is acknowledged (BRK-3).

    The key proves that a hand-over is that very copy. The value is the time until which the ACK is
    remembered, and the error: why the message became a dead letter, or "" if it was accepted.
    """

    def add(
        self, proof: Hashable, now: float, *, lifetime: float = REMEMBERED_SECONDS, error: str = ""
    ) -> None:
        self[proof] = now + lifetime, error
        self.move_to_end(proof)
        if len(self) > MAX_REMEMBERED_MESSAGES:
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


class FailingSince(Struct, frozen=True, gc=False):
    """When a message began to fail. Loop times."""

    first: float
    unsent: float  # the first time in which nothing was sent; NEVER: there was none


class Failing(OrderedDict[MessageKey, FailingSince]):
    """Since when messages fail, as far as this router has seen it (WQ-15).

    Forgotten by a restart, and the oldest when there are too many: none is given up too early.
    """

    def note(self, key: MessageKey, now: float, *, is_unsent: bool) -> FailingSince:
        """Note a failure. Return since when it fails."""
        before = self.get(key)
        first, unsent = (now, NEVER) if before is None else (before.first, before.unsent)
        self[key] = since = FailingSince(first, min(unsent, now) if is_unsent else unsent)
        if len(self) > MAX_REMEMBERED_MESSAGES:
            self.popitem(last=False)
        return since

    def forget(self, key: MessageKey) -> None:
        self.pop(key, None)


class Tallies(OrderedDict[MessageKey, Tally]):
    """The attempts at messages whose broker cannot record them (WQ-5).

    Forgotten by a restart, and the oldest when there are too many: never counted too high.
    """

    def keep(self, key: MessageKey, tally: Tally) -> None:
        self[key] = tally
        self.move_to_end(key)
        if len(self) > MAX_REMEMBERED_MESSAGES:
            self.popitem(last=False)

    def of(self, key: MessageKey) -> Tally:
        return self.get(key, UNTRIED)

    def forget(self, key: MessageKey) -> None:
        self.pop(key, None)
