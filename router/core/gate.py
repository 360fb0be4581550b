"""How much a target takes (GATE-1 to GATE-4): silence, a limit, slow start, a retry budget.

A Gate is what the router has learned about one target origin from its refusals. Every function
returns the gate as it is afterwards; the clock is an argument. A healthy target's gate is UNLIMITED
and stays so.
"""

import math
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

CUT: Final = 0.7  # what is left of the limit after a refusal
MIN_LIMIT: Final = 1.0
FIRST_HOLD_SECONDS: Final = 10.0  # how long the limit stays below what was refused
MAX_HOLD_SECONDS: Final = 60.0  # longer ones make routers that share a target unequal
MIN_SILENCE_SECONDS: Final = 1.0
MAX_SILENCE_SECONDS: Final = 15 * 60.0  # of a target; a message may wait for longer
SILENCE_JITTER: Final = 0.1  # of the silence
MAX_JITTER_SECONDS: Final = 5.0
FORGET_SECONDS: Final = 10 * 60.0  # without a refusal: then the limit is forgotten
SLOW_START: Final = 3.0  # requests at once after a circuit has closed
BUDGET_SECONDS: Final = 10.0
BUDGET_SHARE: Final = 0.2  # second and third requests for each request
BUDGET_FREE: Final = 3  # that are always allowed


class Gate(Struct, frozen=True):
    """The gate of one target origin. Times are those of the caller's clock."""

    limit: float = math.inf  # requests at once
    climb_to: float = math.inf  # up to here +1 for each answer, beyond +1 for each round of answers
    refused_at: float = math.inf  # this many at once were too many
    cut_from: float = math.inf  # this many were open when the limit was cut
    cut_at: float = -math.inf
    probe_at: float = -math.inf  # from then on the limit may reach `refused_at` again
    hold: float = FIRST_HOLD_SECONDS
    closed_until: float = -math.inf  # the target asked for silence


UNLIMITED: Final = Gate()


def may_send(gate: Gate, now: float, open_: int) -> bool:
    """Return whether one more request may start beside those that are open."""
    return now >= gate.closed_until and open_ < gate.limit


def silenced(gate: Gate, now: float, seconds: float, jitter: float) -> Gate:
    """Close the gate for the time that a target asked for. Silence only ever grows.

    `jitter`, from 0 to 1, spreads the routers that a target has silenced together.
    """
    seconds = min(max(seconds, MIN_SILENCE_SECONDS), MAX_SILENCE_SECONDS)
    spread = min(seconds * SILENCE_JITTER, MAX_JITTER_SECONDS) * jitter
    return replace(gate, closed_until=max(gate.closed_until, now + seconds + spread))


def refused(gate: Gate, now: float, began: float, open_: int) -> Gate:
    """Return the gate after a refusal. `open_` counts the refused request, which `began` then.

    The limit is cut once for each round: by requests that began after the last cut. A late refusal
    of the same round shows that the target is full with what else is open, so the limit falls to
    that. If nothing else is open, the whole round was refused, which says nothing about how many
    the target takes.
    """
    if began > gate.cut_at:
        at = min(gate.limit, float(open_))
        is_same = gate.refused_at < math.inf and at <= gate.refused_at + 1
        hold = min(2 * gate.hold, MAX_HOLD_SECONDS) if is_same else FIRST_HOLD_SECONDS
        return _limited(gate, at, max(at * CUT, MIN_LIMIT), now, hold)
    others = open_ - 1
    if others == 0:
        at = gate.cut_from
        return _limited(gate, at, max(at * CUT, MIN_LIMIT), gate.cut_at, gate.hold)
    if others < gate.limit:
        return replace(
            gate, limit=float(others), climb_to=float(others), refused_at=float(others + 1)
        )
    return gate


def answered(gate: Gate, now: float, began: float, open_: int) -> Gate:
    """Return the gate after an answer that is no refusal."""
    if now - gate.cut_at >= FORGET_SECONDS:
        return Gate(closed_until=gate.closed_until)
    # Answers from before the cut, or while the limit did not matter, say nothing about it.
    if began <= gate.cut_at or 2 * open_ < gate.limit:
        return gate
    top = math.inf if now >= gate.probe_at else max(gate.refused_at - 1, MIN_LIMIT)
    step = 1.0 if gate.limit < gate.climb_to else 1.0 / gate.limit
    limit = min(gate.limit + step, max(top, gate.limit))
    if limit > gate.refused_at + 1:  # the target takes more than it did
        return replace(gate, limit=limit, refused_at=math.inf, hold=FIRST_HOLD_SECONDS)
    return replace(gate, limit=limit)


def recovered(gate: Gate, now: float, open_before: int) -> Gate:
    """Return the gate of a target whose circuit has closed: a slow start, not a stampede.

    `open_before` is how many requests were open when the circuit opened.
    """
    climb_to = max(SLOW_START, open_before / 2)
    return Gate(SLOW_START, climb_to, cut_at=now, closed_until=gate.closed_until)


def _limited(gate: Gate, at: float, limit: float, cut_at: float, hold: float) -> Gate:
    return Gate(limit, limit, at, at, cut_at, cut_at + hold, hold, gate.closed_until)


class Budget(Struct):
    """How many second and third requests a target gets: a fifth of all, and three (GATE-4).

    `sent` is the number of requests so far, counted by the caller.
    """

    since: float = 0.0
    sent_before: int = 0  # `sent` at that time
    recent: float = 0.0  # requests in ten seconds before that, on average
    retries: float = 0.0

    def allows(self, now: float, sent: int) -> bool:
        self._age(now, sent)
        return self.retries < BUDGET_FREE + BUDGET_SHARE * (self.recent + sent - self.sent_before)

    def spend(self) -> None:
        self.retries += 1

    def _age(self, now: float, sent: int) -> None:
        seconds = now - self.since
        if seconds < BUDGET_SECONDS:
            return
        self.recent = (sent - self.sent_before) * BUDGET_SECONDS / seconds
        self.retries /= 2 ** min(seconds // BUDGET_SECONDS, 64)
        self.since, self.sent_before = now, sent
