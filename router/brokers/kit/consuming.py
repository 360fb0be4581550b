"""Shared by consumers: the long poll, the prefetch window, and handles of one connection."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final, Generic, TypeVar, cast

from msgspec import Struct

from router.core.message import Handle, ReceivedMessage
from router.ports import Unsettled
from router.signal import Signal, wait_for_signal

T = TypeVar("T")

LONG_POLL_SECONDS: Final = 20.0
NEVER: Final = float("inf")
WINDOW_BYTES: Final = 64 * 1024 * 1024  # of one connection, of messages not asked for yet
LARGE_BYTES: Final = 64 * 1024  # smaller messages never fill a window of the usual count
# Two clocks never agree to the last bit: wait at least this long instead of looking again at once.
MIN_WAIT_SECONDS: Final = 0.001

STALE: Final = "it was settled already, or came over another connection"


class ClaimedBatch(Struct, frozen=True):
    messages: Sequence[ReceivedMessage]  # in claim order
    wait: float = NEVER  # if there are none: seconds until there may be some without any news


class ProofOfLife:
    """Until when a broker certainly keeps what it has handed to a connection (ORD-9).

    By the monotonic clock, not by the event loop's: that stands still while a callback runs, also
    if the whole process stood still in the middle of it. A silence that was too long is never
    forgotten: what arrives behind it may have been sent before the broker gave us up.
    """

    def __init__(self, seconds: float) -> None:
        """`seconds`: between two proofs, at most."""
        self._seconds = seconds
        self._proved_at = time.monotonic()
        self._is_over = False

    @staticmethod
    def now() -> float:
        return time.monotonic()

    def renew(self, at: float | None = None) -> None:
        """Note a proof: what happened then, by `now`. None: just now."""
        if not self.is_over():
            self._proved_at = max(self._proved_at, self.now() if at is None else at)

    def end(self) -> None:
        self._is_over = True

    @property
    def seconds_left(self) -> float:
        return 0.0 if self.is_over() else self._proved_at + self._seconds - self.now()

    def is_over(self) -> bool:
        self._is_over = self._is_over or self.now() - self._proved_at >= self._seconds
        return self._is_over


class LongPoll:
    """`receive` of a broker that has to be looked at: look, wait for news and look again."""

    def __init__(self, news: Signal | None = None) -> None:
        self.news = news or Signal()  # rung when a message came, and when the connection is lost
        self.stopped = asyncio.Event()

    def stop(self) -> None:
        self.stopped.set()
        self.news.ring()

    async def receive(
        self,
        look: Callable[[], Awaitable[ClaimedBatch]],
        wait: Callable[[asyncio.Event, float], Awaitable[None]] = wait_for_signal,
    ) -> Sequence[ReceivedMessage]:
        """Return what `look` finds, or nothing after 20 seconds or after `stop`."""
        now = asyncio.get_running_loop().time
        give_up = now() + LONG_POLL_SECONDS
        while not self.stopped.is_set():
            rung = self.news.listen()
            found = await look()
            if found.messages or now() >= give_up:
                return found.messages
            await wait(rung, min(give_up - now(), max(found.wait, MIN_WAIT_SECONDS)))
        return ()


class PrefetchLimit:
    """How many messages the windows of one queue may hold: brokers do not count bytes (P4).

    Lowered for good when they are large. What a broker has begun to push cannot be refused, so the
    connection is given up: the broker has all of it back, and the next window is smaller.
    """

    def __init__(self) -> None:
        self._most: int | None = None
        self._more = 0
        self._small = LARGE_BYTES  # messages of this size fit into the latest window
        # Bytes for which there was room when last counted, less what came since: counting takes
        # 27 ns for each message in the window, and that may be wide.
        self._left = 0

    def of(self, configured: int) -> int:
        wanted = configured + self._more
        window = wanted if self._most is None else min(wanted, self._most)
        self._small = min(LARGE_BYTES, WINDOW_BYTES // window)
        return window

    def widen(self, messages: int) -> None:
        """Let later windows hold this many more messages than configured."""
        self._more = max(self._more, messages)

    def overflow(self, newest: int, sizes: Iterable[int]) -> str | None:
        """Return why the connection has to be given up, or None if all of it fits.

        `sizes`: of all messages in the window; `newest`: of the one that came just now.
        """
        self._left -= newest
        if newest <= self._small or (newest <= LARGE_BYTES and self._left >= 0):
            return None
        held = list(sizes)
        self._left = WINDOW_BYTES - sum(held)
        if len(held) == 1 or self._left >= 0:
            return None
        self._most = max(len(held) // 2, 1)
        return f"large messages: the prefetch window is lowered to {self._most}"


class Ticket(Struct, frozen=True):
    """A handle that is good on its own connection only: numbers start again on the next one."""

    connection: int
    number: int


class OpenTickets(Generic[T]):
    """Messages that one connection has handed over and that are not settled, by ticket number.

    For brokers that take back what a connection holds when it ends. Each ticket can be claimed
    once: brokers close a connection on which a message is settled twice.
    """

    def __init__(self, connection: int) -> None:
        self._connection = connection
        self._open: dict[int, T] = {}

    def __len__(self) -> int:
        return len(self._open)

    def issue(self, number: int, item: T) -> Ticket:
        self._open[number] = item
        return Ticket(self._connection, number)

    def claim(self, handle: Handle) -> T | None:
        """Take what the handle stands for, to settle it; None: it can no longer be settled."""
        return self._open.pop(cast("Ticket", handle).number) if self._is_open(handle) else None

    def claim_all(self, handles: Sequence[Handle]) -> tuple[list[T], list[Unsettled]]:
        """Take what can still be settled; return the rest as stale."""
        claimed: list[T] = []
        stale: list[Unsettled] = []
        for handle in handles:
            if self._is_open(handle):
                claimed.append(self._open.pop(cast("Ticket", handle).number))
            else:
                stale.append(Unsettled(handle, STALE, stale=True))
        return claimed, stale

    def stale(self, handles: Sequence[Handle]) -> list[Unsettled]:
        return [
            Unsettled(handle, STALE, stale=True) for handle in handles if not self._is_open(handle)
        ]

    def _is_open(self, handle: Handle) -> bool:
        ticket = cast("Ticket", handle)
        return ticket.connection == self._connection and ticket.number in self._open
