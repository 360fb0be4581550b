"""One open connection, as everything but its receiver uses it: bounded calls, foreseen errors."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final

from router.core.mandate import Mandate
from router.core.message import Handle, Tally
from router.core.stats import Counts
from router.ports import Broker, BrokerError, Depth, Disconnected, Unsettled

log = logging.getLogger(__name__)

CALL_TIMEOUT: Final = 25.0  # seconds for one call; an adapter that hangs must not hang its callers


class Line:
    """Whatever goes wrong on it is a BrokerError; a Disconnected also says: open it anew."""

    def __init__(
        self, broker: Broker, on_break: Callable[[], None], counts: Counts, mandate: Mandate
    ) -> None:
        self.is_broken = False
        self.traits = broker.traits
        self._broker = broker
        self._on_break = on_break
        self._counts = counts
        self._mandate = mandate
        self._calls: set[asyncio.Timeout] = set()  # those under way

    @property
    def holds_groups(self) -> bool:
        return self._broker.holds_groups

    @property
    def lease_seconds(self) -> float | None:
        return self._broker.lease_seconds

    async def ack(self, handles: Sequence[Handle], *, error: str = "") -> Sequence[Unsettled]:
        with self._counts.calling("ack"):
            async with self._call():
                return await self._broker.ack(handles, error=error)

    async def nack(self, handle: Handle, delay: float, tally: Tally, *, error: str = "") -> None:
        with self._counts.calling("nack"):
            async with self._call():
                await self._broker.nack(handle, delay, tally, error=error)

    async def extend(self, handles: Sequence[Handle], seconds: float) -> Sequence[Unsettled]:
        with self._counts.calling("extend"):
            async with self._call():
                return await self._broker.extend(handles, seconds)

    async def depth(self) -> Depth | None:
        with self._counts.calling("depth"):
            async with self._call():
                return await self._broker.depth()

    def interrupt(self) -> None:
        """Let a receive under way return. Never fails: the others must be told to stop too."""
        try:
            self._broker.interrupt()
        except Exception:  # the bulkhead, as in _call
            log.exception("a receive could not be interrupted")

    def hang_up(self) -> None:
        """End the calls under way: nobody can wait for them any longer."""
        now = asyncio.get_running_loop().time()
        for call in self._calls:
            call.reschedule(now)

    @asynccontextmanager
    async def _call(self) -> AsyncIterator[None]:
        if self._mandate.is_over:
            raise BrokerError("this router is not the primary any more")
        try:
            async with asyncio.timeout(CALL_TIMEOUT) as call:
                self._calls.add(call)
                try:
                    yield
                finally:
                    self._calls.discard(call)
        except Disconnected:
            self._break()
            raise
        except BrokerError:
            raise
        except TimeoutError:
            self._break()
            raise Disconnected("the broker does not answer") from None
        except Exception as error:
            # The bulkhead: a bug in an adapter costs a connection, never the router.
            log.exception("a broker failed unexpectedly")
            self._break()
            raise Disconnected(f"unexpected {type(error).__name__}") from error

    def _break(self) -> None:
        if not self.is_broken:
            self.is_broken = True
            self._on_break()
