"""What was tried of messages whose broker cannot keep it: in memory, bounded (WQ-5)."""

from collections import OrderedDict
from typing import Final

from router.core.job import Key
from router.core.message import UNTRIED, Tally

CAPACITY: Final = 100_000


class Tallies:
    """Forgotten by a restart, and the oldest when there are too many: never counted too high."""

    def __init__(self) -> None:
        self._by_key: OrderedDict[Key, Tally] = OrderedDict()

    def keep(self, key: Key, tally: Tally) -> None:
        self._by_key[key] = tally
        self._by_key.move_to_end(key)
        if len(self._by_key) > CAPACITY:
            self._by_key.popitem(last=False)

    def of(self, key: Key) -> Tally:
        return self._by_key.get(key, UNTRIED)

    def forget(self, key: Key) -> None:
        self._by_key.pop(key, None)

    def __bool__(self) -> bool:
        return bool(self._by_key)
