"""How Python itself is set for a router: out of the box it is set for scripts."""

import gc
import sys
from typing import Final

SWITCH_INTERVAL: Final = 0.0005  # a busy loop must not starve the threads of the SQLite files
COLLECTED_AT: Final = 10_000  # more objects than before, of those that can be in a cycle


def set_for_start() -> None:
    """Nothing of a start is garbage: no collection until it is ready."""
    gc.disable()
    sys.setswitchinterval(SWITCH_INTERVAL)


def set_for_service() -> None:
    """What a start has made is here to stay: no collection has to look at it again.

    What a message leaves behind is no cycle and goes by itself. By default, each batch of them
    would start a collection just by being held for a while.
    """
    gc.freeze()
    gc.set_threshold(COLLECTED_AT)
    gc.enable()
