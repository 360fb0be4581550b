"""An event loop on virtual time: when nothing can run, the clock jumps to the next timer.

An hour's wait costs nothing and is exact; a test that would hang for ever fails at once. Work that
is really under way outside of the loop (a thread of the SQLite queue) is waited for in real time.
"""

import asyncio
import selectors
import threading
from typing import Any


def now() -> float:
    """Of the running event loop."""
    return asyncio.get_running_loop().time()


class Deadlock(BaseException):
    """Every task waits and no timer is set: nothing will ever happen again."""


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[Any, int]]:
        if timeout == 0:
            return super().select(0)
        threads = threading.active_count()  # first: one may call back and end while we look
        ready = super().select(0)
        if ready:
            return ready
        if timeout is None:
            if threads > 1:  # a worker thread may still call back
                return super().select(0.05)
            raise Deadlock
        self.now += max(timeout, 0.0)
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:  # noqa: ARG002
        """Wait for its threads, which take real time: a limit would be over at once."""
        await super().shutdown_default_executor()

    def stand_still(self, seconds: float) -> None:
        """Stop the process for so long: all that comes due meanwhile runs together afterwards."""
        self._jumping.now += seconds
