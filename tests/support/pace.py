"""How fast this machine is at the moment, for tests that assert on time."""

import asyncio
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import add
from typing import Any, Final

_WORK: Final = bytes(range(256)) * 400
_USUAL: Final = 0.0046  # seconds of CPU for it on the machine that the bounds were set on


def slowdown() -> float:
    """Return how much slower than usual this machine computes now; at least 1.

    Other guests of a shared machine take from every processor. A bound is multiplied by this, so
    that a test fails because the code is slow and not because the machine is.
    """
    return max(min(_seconds() for _ in range(20)) / _USUAL, 1.0)


async def longest_turn(
    calls: Sequence[asyncio.Task[Any]], used: Callable[[], float] = time.process_time
) -> float:
    """Return the processor time of the longest turn of the loop until all have ended.

    That of all threads: the loop waits while another one keeps Python's lock. `used` is for tests
    in which a thread is not the router's.
    """
    longest = 0.0
    while not all(call.done() for call in calls):
        begun = used()
        await asyncio.sleep(0)
        longest = max(longest, used() - begun)
    return longest


def _seconds() -> float:
    begun = time.thread_time()
    max(map(add, accumulate(_WORK), _WORK))
    return time.thread_time() - begun
