"""The circuit breaker of one target origin (MED-4).

pybreaker makes the transitions and counts the probes. The rolling window, the run of 5xx, the limit
of concurrent probes and the clock are ours: it has none of them, and its way of wrapping a call
costs more than the call.
"""

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from typing import Final

import pybreaker

from router.core.outcome import Fault
from router.core.returning import MIN_SPREAD, circuit_delay

WINDOW_CALLS: Final = 10
FAILURES_TO_OPEN: Final = 5
ERRORS_TO_OPEN: Final = 20  # answers 5xx in a row …
ERROR_MESSAGES: Final = 5  # … to at least as many messages …
ERROR_SECONDS: Final = 10.0  # … over at least this time
OPEN_SECONDS: Final = 5.0  # doubled by each failed probe …
MAX_OPEN_SECONDS: Final = 300.0  # … up to this
PROBES: Final = 3  # at a time; one, once a probe has failed
GLOBAL: Final = "http-mediator"


class BreakerState(Enum):
    CLOSED = pybreaker.STATE_CLOSED
    OPEN = pybreaker.STATE_OPEN
    HALF_OPEN = pybreaker.STATE_HALF_OPEN


class _ProbeFailed(Exception):
    """Reports to pybreaker that a probe failed."""


class Breaker:
    """Call `enter` before each request, and `report` after it on every path.

    `enter` returns a ticket, or None while no request may go through. The ticket names the state
    in which the request began: its result is ignored if the breaker has moved on since.
    """

    def __init__(self, name: str, on_change: Callable[["Breaker"], None]) -> None:
        self.name = name
        self.state = BreakerState.CLOSED
        self.last_used = 0.0
        self.successes = self.failures = self.rejections = 0  # since the start, for operators
        self.retry_at = 0.0  # when an open breaker lets a probe through
        self.open_since: float | None = None  # the outage began then; None: it is closed
        self.last_outage = 0.0  # seconds, of the one that has ended
        self.behind = 0  # messages that were seen to wait for it during this outage, at least
        self.fault: Fault | None = None  # of the latest failure
        self._on_change = on_change
        self._recent: deque[bool] = deque(maxlen=WINDOW_CALLS)
        self._recent_failures = 0
        self._errors = 0  # answers 5xx in a row
        self._errors_since = 0.0
        self._error_messages: set[str] = set()  # at most as many as it takes
        self._is_clean = True  # closed, no failure in the window, no run of 5xx
        self._epoch = 0
        self._probes = PROBES
        self._probing = 0
        self._open_seconds = OPEN_SECONDS
        self._round = 0  # messages, within a time in which none comes back
        self._round_ends = 0.0
        # Its own reset time-out would ask the wall clock; `call` is used while half open only, so
        # that it never does.
        self._machine = pybreaker.CircuitBreaker(
            fail_max=1, success_threshold=PROBES, name=name, throw_new_error_on_trip=False
        )

    def enter(self, now: float) -> int | None:
        self.last_used = now
        if self.state is BreakerState.CLOSED:
            return self._epoch
        if self.state is BreakerState.OPEN and now >= self.retry_at:
            self._machine.success_threshold = self._probes
            self._machine.half_open()
            self._moved(BreakerState.HALF_OPEN)
        if self.state is BreakerState.HALF_OPEN and self._probing < self._probes:
            self._probing += 1
            return self._epoch
        self.rejections += 1
        return None

    def report(self, ticket: int, now: float, ok: bool | None, error_of: str | None = None) -> None:
        """Report a request.

        `ok` is None if it says nothing about the target (cancelled, never sent). `error_of` names
        the message if it failed by an answer, a 5xx, and not for want of one.
        """
        # Nearly every call ends here. It saves 50 of 1,660 instructions for each message.
        if ok and self._is_clean and ticket == self._epoch:
            self.successes += 1
            self._recent.append(True)
            return
        if ok is not None:
            self.successes += ok
            self.failures += not ok
        if ticket != self._epoch:
            return
        if self.state is BreakerState.HALF_OPEN:
            self._probing -= 1
        if ok is None:
            return
        if self.state is BreakerState.CLOSED:
            self._note_call(ok=ok, error_of=error_of, now=now)
            return
        with suppress(_ProbeFailed):
            self._machine.call(_probe, ok)
        if self._machine.current_state == pybreaker.STATE_OPEN:
            self._probes = 1
            self._open_seconds = min(2 * self._open_seconds, MAX_OPEN_SECONDS)
            self._opened(now)
        elif self._machine.current_state == pybreaker.STATE_CLOSED:
            self._closed(now)

    def reset(self, now: float) -> None:
        """Close it, whatever has failed."""
        self._machine.close()
        self._closed(now)

    def count_waiting(self, now: float) -> None:
        """Count a message that goes back for as long as an open circuit asks for."""
        if now >= self._round_ends:
            self._round = 0
            self._round_ends = now + MIN_SPREAD * circuit_delay(self.outage(now))
        self._round += 1
        self.behind = max(self.behind, self._round)

    def outage(self, now: float) -> float:
        """Return for how many seconds it has not been closed."""
        return 0.0 if self.open_since is None else max(0.0, now - self.open_since)

    @property
    def is_suspect(self) -> bool:
        """Whether a run of 5xx is long enough to open it, and only has to last for longer."""
        return self._errors >= ERRORS_TO_OPEN and len(self._error_messages) == ERROR_MESSAGES

    @property
    def buffered(self) -> tuple[int, int]:
        """Calls in the window, and how many of them failed."""
        return len(self._recent), self._recent_failures

    def _note_call(self, *, ok: bool, error_of: str | None, now: float) -> None:
        recent, was_answered = self._recent, ok or error_of is not None
        if len(recent) == WINDOW_CALLS:
            self._recent_failures -= not recent[0]
        recent.append(was_answered)
        self._recent_failures += not was_answered
        if error_of is not None:
            self._note_error(error_of, now)
        elif ok:
            self._forget_errors()
        self._is_clean = not self._recent_failures and not self._errors
        is_unreachable = len(recent) == WINDOW_CALLS and self._recent_failures >= FAILURES_TO_OPEN
        if is_unreachable or self._has_only_errors(now):
            self._machine.open()
            self._opened(now)

    def _note_error(self, message_id: str, now: float) -> None:
        if not self._errors:
            self._errors_since = now
        self._errors += 1
        if len(self._error_messages) < ERROR_MESSAGES:
            self._error_messages.add(message_id)

    def _has_only_errors(self, now: float) -> bool:
        return self.is_suspect and now - self._errors_since >= ERROR_SECONDS

    def _forget_errors(self) -> None:
        self._errors = 0
        self._error_messages.clear()

    def _opened(self, now: float) -> None:
        if self.open_since is None:
            self.open_since = now
        self.retry_at = now + self._open_seconds
        self._moved(BreakerState.OPEN)

    def _closed(self, now: float) -> None:
        self.last_outage = self.outage(now)
        self.open_since = None
        self.behind = self._round = 0
        self._round_ends = 0.0
        self._probes = PROBES
        self._open_seconds = OPEN_SECONDS
        self._moved(BreakerState.CLOSED)

    def _moved(self, state: BreakerState) -> None:
        self.state = state
        self._epoch += 1
        self._probing = 0
        self._recent.clear()
        self._recent_failures = 0
        self._forget_errors()
        self._is_clean = state is BreakerState.CLOSED
        self._on_change(self)


def _probe(ok: bool) -> None:
    if not ok:
        raise _ProbeFailed


class Breakers:
    """One breaker per origin, or one for all. They live as long as their targets."""

    def __init__(self, on_change: Callable[[Breaker], None], *, one_for_all: bool = False) -> None:
        self.are_one = one_for_all
        self._watchers = [on_change]
        self._by_name: dict[str, Breaker] = {}

    def watch(self, on_change: Callable[[Breaker], None]) -> None:
        """Call this, too, when one has changed its state."""
        self._watchers.append(on_change)

    def of(self, origin: str) -> Breaker:
        name = GLOBAL if self.are_one else origin
        breaker = self._by_name.get(name)
        if breaker is None:
            breaker = self._by_name[name] = Breaker(name, self._changed)
        return breaker

    def find(self, origin: str) -> Breaker | None:
        """Return the breaker of an origin, if it was used lately."""
        return self._by_name.get(GLOBAL if self.are_one else origin)

    def drop(self, origin: str) -> None:
        """Forget the breaker of an origin, unless others have it, too."""
        self._by_name.pop(origin, None)

    def all(self) -> list[Breaker]:
        return list(self._by_name.values())

    def _changed(self, breaker: Breaker) -> None:
        for told in self._watchers:
            told(breaker)
