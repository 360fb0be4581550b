"""What was tried of messages whose broker cannot keep it: in memory, bounded (WQ-5)."""

from collections import OrderedDict
from typing import Final

from router.core.identity import MessageKey
from router.core.message import UNTRIED, Tally

CAPACITY: Final = 100_000


class Tallies(OrderedDict[MessageKey, Tally]):
    """Forgotten by a restart, and the oldest when there are too many: never counted too high."""

    def keep(self, key: MessageKey, tally: Tally) -> None:
        self[key] = tally
        self.move_to_end(key)
        if len(self) > CAPACITY:
            self.popitem(last=False)

    def of(self, key: MessageKey) -> Tally:
        return self.get(key, UNTRIED)

    def forget(self, key: MessageKey) -> None:
        self.pop(key, None)
