"""The state of each target origin: open requests, gate, budget and breaker.

An entry of `targets` with a path is a place of its own: it has its own gate and ceilings, and the
breaker of its origin (TGT-2).

Pools take a place at a target before they start a request, and give it back with the answer. A lane
that finds no place parks in the Line of its pool to that target, without a worker (GATE-5); the
target calls lanes back, one for each free place.
"""

import asyncio
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from http import HTTPStatus
from typing import Final

from msgspec import Struct, field

from router.core.config import TargetConfig
from router.core.gate import MIN_LIMIT, UNLIMITED, Budget, answered, recovered, refused, silenced
from router.core.outcome import Answer, Cause, Fault, NoReply, read_retry_after
from router.core.returning import Jitter
from router.core.stats import OriginCounts
from router.core.target import origin_of, read_target
from router.core.target_table import TargetTable
from router.engine.breaker import OPEN_SECONDS, Breaker, Breakers, BreakerState
from router.engine.lanes import Flow, Lane
from router.engine.limits import MIN_WAIT_SECONDS, RateLimiter

# A longer silence sends messages back to their queue; a shorter one is waited for here (GATE-5).
MAX_WAIT_SECONDS: Final = 10.0
MAX_TARGETS: Final = 10_000
MAX_LOOKS: Final = 100  # for one that can be dropped
IDLE_SECONDS: Final = 3600.0
PACE_SECONDS: Final = 1.0  # between two requests to a target that refuses them all (GATE-2)
_BUSY: Final = {
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.BAD_GATEWAY,
    HTTPStatus.SERVICE_UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT,
}
_SILENCING: Final = {HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE}


class Line(Struct, eq=False):
    """Where the lanes of one pool wait for one target."""

    target: "TargetOrigin"
    flow: Flow  # with which it shares the workers of the pool (SHARE-1)
    on_room: Callable[["Line"], None]  # to start the lane in front
    parked: OrderedDict[Lane, None]
    messages: int = 0  # in the parked lanes
    is_crowded: bool = False  # its pool has no room for more of them (GATE-5)
    called: Lane | None = None  # it left the line, and has not started yet
    unused: int = 0  # looks at it since its latest message

    @property
    def is_idle(self) -> bool:
        return not self.parked and self.called is None

    def clear(self) -> None:
        """Let all lanes go: its pool returns them."""
        self.parked.clear()
        self.messages, self.is_crowded, self.called = 0, False, None
        self.target.waiting.pop(self, None)


class TargetCounts(Struct, eq=False):
    """Counts over all origins, for metrics."""

    faults: OriginCounts = field(default_factory=OriginCounts)
    refusals: OriginCounts = field(default_factory=OriginCounts)

    def drop_idle(self, now: float) -> None:
        self.faults.drop_idle(now)
        self.refusals.drop_idle(now)


class TargetOrigin:
    """One origin. `limit` is what pools look at: how many requests may be open now.

    A target with a rate has a limit of 0 there, so that pools ask `enter` for each request.
    """

    __slots__ = (
        "_at_change",
        "_at_rate",
        "_ceiling",
        "_is_waking",
        "_loop",
        "_next_at",
        "_open_before",
        "_pace",
        "_rate",
        "_room",
        "breaker",
        "budget",
        "counts",
        "gate",
        "is_gated",
        "is_local",
        "is_silent",
        "limit",
        "open",
        "origin",
        "refusals",
        "returning",
        "sent",
        "timeout",
        "waiting",
    )

    def __init__(
        self, origin: str, breaker: Breaker, counts: TargetCounts, *, is_local: bool = False
    ) -> None:
        self.origin = origin
        self.breaker = breaker
        self.counts = counts  # of all origins
        self.is_local = is_local  # it runs on this machine: no gate, no budget
        self.gate = UNLIMITED
        self.budget = Budget()
        self.open = 0
        self.limit = self._room = math.inf
        self.timeout: float | None = None  # seconds; None: the pool's
        self._ceiling = math.inf  # requests at once, by the configuration (TGT-2)
        self._rate: RateLimiter | None = None  # likewise
        self._pace: RateLimiter | None = None  # the rate, unless its messages are sent back
        self._at_rate: asyncio.TimerHandle | None = None  # until the rate allows one more
        self.sent = self.refusals = 0  # since the start
        self.is_gated = False  # whether anything below has to be looked at
        self.is_silent = False
        self.waiting: OrderedDict[Line, None] = OrderedDict()  # those with parked lanes
        self.returning: deque[asyncio.Future[None]] = deque()  # second and third requests
        self._next_at = -math.inf  # when the next request may start, while it refuses them all
        self._open_before = 0  # when its circuit opened
        self._is_waking = False
        self._at_change: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    @property
    def is_idle(self) -> bool:
        return not self.open and not self.waiting and not self.returning and not self.is_silent

    @property
    def has_place(self) -> bool:
        """Whether one more request may start now."""
        pace = self._pace
        return self.open < self._room and (pace is None or pace.seconds_to_wait <= 0)

    def enter(self) -> bool:
        """Take a place, if there is one."""
        if not self.has_place:
            return False
        self._take()
        return True

    def configure(self, entry: TargetConfig | None) -> None:
        """Use the ceilings and the timeout of an entry; None: there is none."""
        self.timeout = None if entry is None else entry.timeout
        concurrency = None if entry is None else entry.concurrency
        self._ceiling = math.inf if concurrency is None else float(concurrency)
        if entry is None or entry.rate_per_minute is None:
            self._rate = None
        elif self._rate is None:
            self._rate = RateLimiter(entry)
        else:
            self._rate.change(entry)  # what was used stays used
        self._apply(self._loop.time())
        self.wake()

    def _take(self) -> None:
        self.open += 1
        if self._pace is not None:
            self._pace.spend()

    def blame(self, fault: Fault | None) -> None:
        """Note whose fault it is that there was no good answer, if it is anyone's (MED-4)."""
        if fault is not None:
            self.breaker.fault = fault
            self.counts.faults.count(self._loop.time(), self.origin, fault)

    def may_retry(self, now: float) -> bool:
        """Return whether the budget has one more second or third request (GATE-4)."""
        if self.is_local:
            return True
        is_allowed = self.budget.allows(now, self.sent)
        if is_allowed:
            self.budget.spend()
        return is_allowed

    def wait(self, line: Line) -> None:
        """Call the first lane of a line when there is a place for it."""
        self.waiting[line] = None
        self.is_gated = True
        self._wake_by_rate()

    def leave(self) -> None:
        """Give a place back."""
        self.open -= 1
        self.wake()

    def line_up(self) -> "asyncio.Future[None]":
        """Return when a second or third request gets a place, ahead of all parked lanes."""
        turn: asyncio.Future[None] = self._loop.create_future()
        self.returning.append(turn)
        self.is_gated = True
        self._wake_by_rate()
        return turn

    def admit(self, turn: "asyncio.Future[None]") -> None:
        if not turn.done():  # else it was admitted, or cancelled
            self._take()
            turn.set_result(None)

    def wake(self) -> None:
        """Let those in that wait, while there are places."""
        if self._is_waking:  # a lane was started by the loop below, which goes on
            return
        self._is_waking = True
        try:
            while self.returning and self.has_place:
                self.admit(self.returning.popleft())
            while self.waiting and self.has_place:
                line, _ = self.waiting.popitem(last=False)
                if line.parked:  # else its last lane has left it for another target
                    line.on_room(line)
        finally:
            self._is_waking = False
        self._wake_by_rate()

    def _wake_by_rate(self) -> None:
        """Wake again when the rate allows one more, if anything waits for that."""
        if self._pace is None or self._at_rate is not None or not (self.waiting or self.returning):
            return
        seconds = self._pace.seconds_to_wait
        if seconds > 0:  # else it waits for a place, and is woken when one is free
            delay = max(seconds, MIN_WAIT_SECONDS)
            self._at_rate = self._loop.call_later(delay, self._rate_allows)

    def _rate_allows(self) -> None:
        self._at_rate = None
        self.wake()

    def learn(
        self, answer: Answer, began: float, wall: Callable[[], float], jitter: Jitter
    ) -> None:
        """Learn from the answer to a request that began then, before its place is given back."""
        now = self._loop.time()
        status = None if isinstance(answer, NoReply) else answer.status
        if status in _BUSY or (isinstance(answer, NoReply) and answer.cause is Cause.TIMEOUT):
            self.refusals += 1
            self.counts.refusals.count(now, self.origin)
            self.gate = refused(self.gate, now, began, self.open)
            if self.breaker.is_suspect:
                self._next_at = now + PACE_SECONDS
        elif status is not None and status < HTTPStatus.INTERNAL_SERVER_ERROR:
            self.gate = answered(self.gate, now, began, self.open)
        if status in _SILENCING and not isinstance(answer, NoReply):
            seconds = read_retry_after(answer.retry_after, wall)
            if seconds is not None:
                self.gate = silenced(self.gate, now, seconds, jitter(0.0, 1.0))
        self._apply(now)

    def circuit_changed(self, state: BreakerState) -> None:
        """Start slowly when the circuit closes after an outage (GATE-3)."""
        now = self._loop.time()
        if state is BreakerState.OPEN:
            self._open_before = max(self._open_before, self.open)
            self._loop.call_soon(self.wake)  # what is parked goes back to its queue
        elif state is BreakerState.CLOSED and self._open_before:
            self.gate = recovered(self.gate, now, self._open_before)
            self._open_before = 0
        self._apply(now)

    def reset(self) -> None:
        """Forget what was learned: an operator knows better."""
        self.gate, self._open_before = UNLIMITED, 0
        self._apply(self._loop.time())
        self.wake()

    def _apply(self, now: float) -> None:
        """Let the gate take effect, and look again when its silence changes."""
        if self._at_change is not None:
            self._at_change.cancel()
            self._at_change = None
        if not self.breaker.is_suspect:
            self._next_at = -math.inf
        gate = self.gate
        left = gate.closed_until - now
        self.is_silent = left > 0
        self._pace = self._rate
        if left > MAX_WAIT_SECONDS:
            room, change = math.inf, gate.closed_until - MAX_WAIT_SECONDS  # to be sent back
            self._pace = None
        elif left > 0:
            room, change = 0.0, gate.closed_until
        elif self.breaker.open_since is not None:
            room, change = math.inf, math.inf  # to be sent back, but for the probes
            self._pace = None
        elif now < self._next_at:
            room, change = 0.0, self._next_at
        else:
            is_paced = self._next_at > -math.inf
            room = min(MIN_LIMIT if is_paced else gate.limit, self._ceiling)
            change = math.inf
        self._room = room
        self.limit = room if self._pace is None else 0.0
        if change < math.inf:
            self._at_change = self._loop.call_at(change, self._look_again)
        waits = bool(self.waiting or self.returning)
        self.is_gated = waits or self.is_silent or gate.limit < math.inf

    def _look_again(self) -> None:
        self._at_change = None
        self._apply(self._loop.time())
        self.wake()


class Targets:
    """The latest 10,000 origins. Idle ones are dropped with their breaker."""

    def __init__(self, breakers: Breakers) -> None:
        self.breakers = breakers
        self.counts = TargetCounts()
        self._by_origin: OrderedDict[str, TargetOrigin] = OrderedDict()
        self._of_breaker: dict[str, dict[TargetOrigin, None]] = {}  # by its name
        self._table = TargetTable()
        # The place of a URL: its origin, or the entry of `targets` that it belongs to.
        self.place_of = lru_cache(maxsize=10_000)(self._find_place)
        breakers.watch(self._circuit_changed)

    def configure(self, entries: Iterable[TargetConfig]) -> None:
        """Use these entries from now on. What waits already keeps its place."""
        self._table = TargetTable(entries)
        self.place_of.cache_clear()
        for target in self:
            target.configure(self._table.at(target.origin))

    def _find_place(self, url: str) -> str:
        entry = self._table.find(url) if self._table else None
        return origin_of(url) if entry is None else entry.match

    def away_until(self, url: str, now: float) -> float | None:
        """Return when to try again if the target lets no request through now; None: it does."""
        target = self._by_origin.get(self.place_of(url))
        if target is None:
            return None
        if target.is_silent:
            return target.gate.closed_until
        # While probes are under way, it may soon let more through.
        breaker = target.breaker
        return None if breaker.open_since is None else max(breaker.retry_at, now + OPEN_SECONDS)

    def of(self, origin: str) -> TargetOrigin:
        target = self._by_origin.get(origin)
        if target is not None:
            self._by_origin.move_to_end(origin)
            return target
        if len(self._by_origin) >= MAX_TARGETS:
            self._drop_one()
        where = read_target(origin)
        # A local target that is refused has a breaker, too, which need not be shown.
        breaker = Breaker(origin, _ignore) if where.is_local else self.breakers.of(where.origin)
        target = self._by_origin[origin] = TargetOrigin(
            origin, breaker, self.counts, is_local=where.is_local
        )
        if self._table:
            target.configure(self._table.at(origin))
        self._of_breaker.setdefault(breaker.name, {})[target] = None
        return target

    def find(self, origin: str) -> TargetOrigin | None:
        """Return what is known of an origin, if it was used lately. This is no use of it."""
        return self._by_origin.get(origin)

    def drop_idle(self, now: float) -> None:
        """Drop those that were not used for an hour."""
        self.counts.drop_idle(now)
        for target in self:
            if target.is_idle and now - target.breaker.last_used >= IDLE_SECONDS:
                self._drop(target)

    def reset(self, origin: str | None = None) -> None:
        """Forget what was learned of one origin, or of all."""
        for target in self if origin is None else tuple(self._of_breaker.get(origin, ())):
            target.reset()

    def __iter__(self) -> Iterator[TargetOrigin]:
        return iter(list(self._by_origin.values()))

    def __len__(self) -> int:
        return len(self._by_origin)

    def _drop_one(self) -> None:
        """Drop the one not used for longest. Those in use are bounded by what the pools hold."""
        for _ in range(MAX_LOOKS):
            target = next(iter(self._by_origin.values()))
            if target.is_idle:
                self._drop(target)
                return
            self._by_origin.move_to_end(target.origin)

    def _drop(self, target: TargetOrigin) -> None:
        del self._by_origin[target.origin]
        name = target.breaker.name
        del self._of_breaker[name][target]
        if not self._of_breaker[name]:
            del self._of_breaker[name]
            self.breakers.drop(read_target(target.origin).origin)

    def _circuit_changed(self, breaker: Breaker) -> None:
        for target in self._of_breaker.get(breaker.name, ()):
            target.circuit_changed(breaker.state)


def _ignore(_: Breaker) -> None:
    """The circuit of a local target is not reported."""
