"""The conservation of messages: what came in went somewhere, or is still here (OPS-6)."""

from router.core.job import Fate


class Ledger:
    """Counts hand-overs in, and how each of them ended."""

    def __init__(self) -> None:
        self.received = 0
        self.ended: dict[Fate, int] = dict.fromkeys(Fate, 0)

    def end(self, fate: Fate, hand_overs: int = 1) -> None:
        self.ended[fate] += hand_overs

    def unaccounted(self, held: int) -> int:
        """0, always: `held` is counted where they are held, not here."""
        return self.received - sum(self.ended.values()) - held
