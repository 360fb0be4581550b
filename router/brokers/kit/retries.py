"""Retries: the copies of brokers that cannot delay a message, and waiting for group mates.

For the former, the adapter publishes a copy that comes back later, waits until the broker has
confirmed it, and then acknowledges the original. A crash in between duplicates a message and never
loses it. The headers make the copy the same message to us. Anyone can publish such headers, so they
prove nothing (ID-1) and whatever they hold must do no harm.
"""

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from typing import Final, TypeVar

import msgspec
from msgspec import Struct, field

from router.brokers.kit import loop_time, whole_number
from router.core.message import DEFAULT_POOL, MAX_MESSAGE_BYTES, Mode, ReceivedMessage, Tally
from router.core.returning import MAX_DELAY_SECONDS
from router.ports import Disconnected

T = TypeVar("T")

PREFIX: Final = "x-message-router-"
ROUNDING_SECONDS: Final = 0.5  # a copy may come back that much later than asked for
SOON_SECONDS: Final = 1.0  # at most, between two messages that were returned one after the other
LATE_SECONDS: Final = 1.0  # a message this much overdue has gone to another router
MAX_GATHERING_SECONDS: Final = 2.0
GATHER_SHARE: Final = 1 / 3  # of the lease, at most
MAX_PENDING_MESSAGES: Final = 100_000  # about 30 MB

_ID: Final = f"{PREFIX}id"
_FAILURES: Final = f"{PREFIX}attempts"
_REQUESTS: Final = f"{PREFIX}posts"
_RECEIVE_COUNT: Final = f"{PREFIX}deliveries"
_DUE_AT: Final = f"{PREFIX}not-before"  # Unix time in milliseconds
_PUBLISHED_AT: Final = f"{PREFIX}published"  # Unix time in milliseconds, too
_TOKEN: Final = f"{PREFIX}token"


class RetryHistory(Struct, frozen=True):
    """The history of a message before this copy of it."""

    first_id: str | None = None  # of the message that was copied first
    tally: Tally = Tally()
    receive_count: int = 0
    due_at: float = 0.0  # Unix time
    published_at: float | None = None  # Unix time of the first one, if copies lose it otherwise
    token: str | None = None  # of a message that nobody has named: what its copies have in common

    def wait(self, now: float, *, tolerance: float = 0.0) -> float:
        """Return the seconds until it may be delivered. Ignore a time that we never set."""
        left = self.due_at - now
        return left if tolerance < left <= MAX_DELAY_SECONDS + ROUNDING_SECONDS else 0.0


def read_history(headers: Mapping[str, object]) -> RetryHistory | None:
    """Return the history of a retry copy, or None if the message is no copy of ours."""
    if _DUE_AT not in headers:
        return None
    return RetryHistory(
        _text(headers.get(_ID)),
        Tally(_count(headers.get(_FAILURES)), _count(headers.get(_REQUESTS))),
        _count(headers.get(_RECEIVE_COUNT)),
        _count(headers.get(_DUE_AT)) / 1000,
        _count(headers.get(_PUBLISHED_AT)) / 1000 or None,
        _text(headers.get(_TOKEN)),
    )


def history_headers(history: RetryHistory) -> dict[str, str | int]:
    headers: dict[str, str | int] = {} if history.first_id is None else {_ID: history.first_id}
    if history.published_at is not None:
        headers[_PUBLISHED_AT] = round(history.published_at * 1000)
    if history.token is not None:
        headers[_TOKEN] = history.token
    return headers | {
        _FAILURES: history.tally.failures,
        _REQUESTS: history.tally.requests,
        _RECEIVE_COUNT: history.receive_count,
        _DUE_AT: round(history.due_at * 1000),
    }


def publishers_headers(
    headers: Mapping[str, T], brokers: AbstractSet[str], prefixes: tuple[str, ...]
) -> dict[str, T]:
    """Return the headers to copy: all but ours and those that the broker wrote or acts upon."""
    not_copied = (*prefixes, PREFIX)
    return {
        name: value
        for name, value in headers.items()
        if name not in brokers and not name.startswith(not_copied)
    }


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _count(value: object) -> int:
    """Read a number, from a broker whose headers have types or from one that has only text."""
    if isinstance(value, str):
        return whole_number(value) or 0
    return value if isinstance(value, int) and value > 0 else 0


class _Grouped(Struct):
    pool: str | None = field(default=None, name="poolCode")
    group: str | None = field(default=None, name="messageGroupId")
    dispatch: str | None = field(default=None, name="dispatchMode")

    @property
    def order(self) -> Hashable:
        """What its group is known by: each pool has groups of its own."""
        return self.pool or DEFAULT_POOL, self.group


def group_of(body: bytes) -> str | None:
    """Return the group as the publisher wrote it, for brokers that know no groups."""
    return _read(body).group


def _read(body: bytes) -> _Grouped:
    """Return no group for what is no message: anyone can publish such a body."""
    if len(body) > MAX_MESSAGE_BYTES:
        return _Grouped()
    try:
        return msgspec.json.decode(body, type=_Grouped)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _Grouped()


class _Expected(Struct, frozen=True, order=True):
    due: float
    number: int  # unique: what follows is never compared
    key: Hashable
    order: Hashable


class PendingRetries:
    """The messages of one queue that went back with a delay and have not returned yet.

    A failure takes along all that the router holds of its group (FIFO-1). A group that was given
    back message by message must therefore return together: if its first message were handed over
    alone and failed again, those behind it would overtake it. Times are the event loop's.
    """

    def __init__(self) -> None:
        self.reads_bodies = True  # False: the queue is raw, and any of it may be a group mate
        self._numbers = itertools.count()
        self._missing: dict[Hashable, _Expected] = {}
        self._later: list[_Expected] = []  # a heap
        self._soon: deque[_Expected] = deque()  # due soon, or overdue; by time

    def __len__(self) -> int:
        return len(self._missing)

    def expect(self, key: Hashable, body: bytes, *, now: float, delay: float) -> None:
        self._advance(now)
        message = _read(body) if self.reads_bodies else _Grouped()
        if message.dispatch == Mode.IMMEDIATE.value or len(self._later) >= MAX_PENDING_MESSAGES:
            return
        expected = _Expected(now + delay, next(self._numbers), key, message.order)
        self._missing[key] = expected
        heapq.heappush(self._later, expected)

    def returned(self, key: Hashable) -> None:
        self._missing.pop(key, None)

    def awaits_mates_of(self, bodies: Iterable[bytes], now: float) -> bool:
        """Return whether a message of the same group is missing and due about now."""
        self._advance(now)
        groups = {each.order for each in self._soon if self._is_missing(each)}
        if not self.reads_bodies:
            return bool(groups) and any(True for _ in bodies)
        return bool(groups) and any(_read(body).order in groups for body in bodies)

    async def gather(
        self,
        returned: Callable[[], Iterable[bytes]],
        step: Callable[[], Awaitable[None]],
        at_most: float = MAX_GATHERING_SECONDS,
    ) -> None:
        """Repeat `step` until no group mate of what has returned is missing.

        `returned` gives the bodies of the retries in the batch so far, and none once nobody should
        wait any longer: the batch is full, or the receive was stopped.
        """
        give_up = loop_time() + at_most
        while self and loop_time() < give_up and self.awaits_mates_of(returned(), loop_time()):
            await step()

    async def fill(
        self,
        batch: list[ReceivedMessage],
        limit: int,
        fetch: Callable[[int], Awaitable[Sequence[ReceivedMessage]]],
        *,
        step_seconds: float,
        lease: float,
        is_stopped: Callable[[], bool],
    ) -> None:
        """Add the group mates of the retries in a batch, by fetching again and again.

        Each message that went back has its own time. What is gathered is not extended yet, so
        this takes a part of the lease at most.
        """

        def returned() -> list[bytes]:
            if is_stopped() or len(batch) >= limit:
                return []
            return [
                each.body
                for each in batch
                if each.receive_count is not None and each.receive_count > 1
            ]

        async def step() -> None:
            await asyncio.sleep(step_seconds)
            batch.extend(await fetch(limit - len(batch)))

        with suppress(Disconnected):  # the next receive finds out; what is here is ours
            await self.gather(returned, step, min(MAX_GATHERING_SECONDS, lease * GATHER_SHARE))

    def _advance(self, now: float) -> None:
        """Forget what will no longer come. All other methods call it, so nothing piles up (P4)."""
        while self._later and self._later[0].due <= now + SOON_SECONDS:
            self._soon.append(heapq.heappop(self._later))
        while self._soon and self._soon[0].due < now - LATE_SECONDS:
            overdue = self._soon.popleft()
            if self._is_missing(overdue):
                del self._missing[overdue.key]

    def _is_missing(self, expected: _Expected) -> bool:
        return self._missing.get(expected.key) is expected
