"""Why is it not delivered now? The answer to the question that operators ask first.

The engine takes a snapshot of what it knows; here it becomes one state and one sentence. Times are
Unix seconds.
"""

from collections.abc import Iterator
from datetime import UTC, datetime
from enum import Enum
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from router.core.dead_letter import KeptLetter
from router.core.job import Fate, State, Try
from router.core.outcome import Error
from router.core.story import Visit


class Situation(Enum):
    NOT_HERE = "NOT_HERE"
    WAITING_FOR_ROOM = "WAITING_FOR_ROOM"  # in a full pool
    WAITING_FOR_DRAIN = "WAITING_FOR_DRAIN"  # of the pool that holds its group
    WAITING_FOR_GROUP = "WAITING_FOR_GROUP"
    WAITING_FOR_RATE = "WAITING_FOR_RATE"
    WAITING_FOR_PERMIT = "WAITING_FOR_PERMIT"
    WAITING_FOR_BREAKER = "WAITING_FOR_BREAKER"
    DELIVERING = "DELIVERING"
    BETWEEN_TRIES = "BETWEEN_TRIES"
    SETTLING = "SETTLING"
    RETURNED = "RETURNED"
    FORFEITED = "FORFEITED"
    DEAD_LETTER = "DEAD_LETTER"
    DELIVERED = "DELIVERED"
    IDLE = "IDLE"  # a group or a target for which nothing is held


class Standing(Struct, frozen=True, kw_only=True):
    """Where a message that waits stands in its pool."""

    in_a_pool: bool = True  # False: none had room for it
    put_off: bool = False  # its group is being given back: the pool drains, or its lease was lost
    in_front: "Held | None" = None  # the first of its group
    ahead: int = 0  # messages of its group in front of it
    lanes_ahead: int = 0  # groups that go on before its own does
    has_free_permit: bool = True
    rate_wait: float = 0.0  # seconds until the rate limit lets one more through
    rate_step: float = 0.0  # seconds between two that it lets through; 0: no limit


class Held(Struct, frozen=True, kw_only=True):
    """A message in the router's hands."""

    message_id: str
    queue: str
    pool: str
    group: str
    target: str
    state: State
    attempt: int  # requests sent so far, the open one included
    received_at: float
    started_at: float  # the latest try
    resume_at: float | None = None  # between two tries
    tries: tuple[Try, ...] = ()  # with the open one
    standing: Standing = Standing()


class Circuit(Struct, frozen=True):
    """The breaker of a target's origin."""

    name: str
    is_closed: bool
    retry_at: float | None = None  # when an open one lets a probe through; None: it is half open


class MessageSnapshot(Struct, frozen=True, kw_only=True):
    message_id: str
    now: float
    held: tuple[Held, ...] = ()  # more than one: the same id for several targets
    last_visit: Visit | None = None
    letter: KeptLetter | None = None
    circuit: Circuit | None = None  # of what is held, or was held last
    queue_notes: tuple[str, ...] = ()  # what keeps messages in their queues


class GroupSnapshot(Struct, frozen=True, kw_only=True):
    group: str
    pool: str
    now: float
    first: Held | None = None
    waiting: int = 0  # behind the first
    last_visit: Visit | None = None
    circuit: Circuit | None = None  # of the first
    queue_notes: tuple[str, ...] = ()


class TargetSnapshot(Struct, frozen=True, kw_only=True):
    origin: str
    now: float
    first: Held | None = None  # the one held longest
    held: int = 0
    delivering: int = 0
    last_visit: Visit | None = None
    circuit: Circuit | None = None


class Explanation(Struct, frozen=True, kw_only=True):
    situation: Situation
    text: str
    message_id: str | None = None  # which message it is about
    queue: str | None = None
    pool: str | None = None
    group: str | None = None
    target: str | None = None
    since: float | None = None
    until: float | None = None
    attempt: int | None = None
    behind: str | None = None  # the message that must go first
    dead_letter: int | None = None  # its id
    reason: str | None = None  # of the dead letter
    notes: tuple[str, ...] = ()


def explain_message(seen: MessageSnapshot) -> Explanation:
    if seen.held:
        found = _with_notes(_held(seen.held[0], seen.now), *_circuit_notes(seen.circuit, seen.now))
        others = (f"the same id is held for {each.target}, too" for each in seen.held[1:])
        return _with_notes(found, *others)
    if seen.last_visit is not None:
        return _visited(seen.last_visit, seen.letter, seen.circuit, seen.now)
    if seen.letter is not None:
        return _dead(seen.letter)
    text = "not here: it is not held, and not among those remembered; it may wait in its queue"
    found = Explanation(situation=Situation.NOT_HERE, text=text, message_id=seen.message_id)
    return _with_notes(found, *seen.queue_notes)


def explain_group(seen: GroupSnapshot) -> Explanation:
    if seen.first is not None:
        found = _held(seen.first, seen.now)
        text = f"{_count(seen.waiting)} of the group behind {seen.first.message_id}: {found.text}"
        notes = _circuit_notes(seen.circuit, seen.now)
        return _with_notes(replace(found, text=text), *notes)
    if seen.last_visit is not None and _still_away(seen.last_visit, seen.now):
        found = _visited(seen.last_visit, None, seen.circuit, seen.now)
        text = f"nothing of the group is held; {seen.last_visit.message_id} was the last: "
        return replace(found, text=text + found.text)
    found = Explanation(
        situation=Situation.IDLE,
        text="nothing of the group is held: if there is more of it, it waits in its queue",
        pool=seen.pool,
        group=seen.group,
    )
    return _with_notes(found, *seen.queue_notes)


def explain_target(seen: TargetSnapshot) -> Explanation:
    held = f"{_count(seen.held)} held for it, {seen.delivering} of them in delivery"
    circuit = seen.circuit
    if circuit is not None and not circuit.is_closed:
        return Explanation(
            situation=Situation.WAITING_FOR_BREAKER,
            text=f"{_circuit_in_words(circuit, seen.now)}; {held}",
            target=seen.origin,
            until=circuit.retry_at,
        )
    if seen.first is not None:
        found = _held(seen.first, seen.now)
        text = f"{held}; the one held longest, {seen.first.message_id}, is {found.text}"
        return replace(found, text=text)
    if seen.last_visit is not None and _still_away(seen.last_visit, seen.now):
        found = _visited(seen.last_visit, None, circuit, seen.now)
        text = f"nothing is held for it; {seen.last_visit.message_id} was the last: "
        return replace(found, text=text + found.text)
    text = "nothing is held for it, and its circuit is closed"
    return Explanation(situation=Situation.IDLE, text=text, target=seen.origin)


def _held(held: Held, now: float) -> Explanation:
    found = _HELD[held.state](held, now)
    return replace(
        found,
        message_id=held.message_id,
        queue=held.queue,
        pool=held.pool,
        group=held.group,
        target=held.target,
    )


def _queued(held: Held, now: float) -> Explanation:
    standing = held.standing
    if not standing.in_a_pool:
        return _waits(held, Situation.WAITING_FOR_ROOM, f"for room in {held.pool}, which is full")
    if standing.put_off:
        return _waits(held, Situation.WAITING_FOR_DRAIN, "for its pool to let go of its group")
    if standing.in_front is not None:
        return _behind(held, standing.in_front, now)
    if standing.has_free_permit and standing.rate_step:
        until = now + standing.rate_wait + standing.lanes_ahead * standing.rate_step
        text = f"for the rate limit of {held.pool} until {_at(until)}"
        return _waits(held, Situation.WAITING_FOR_RATE, text, until)
    ahead = f" ({standing.lanes_ahead} in line before it)" if standing.lanes_ahead else ""
    return _waits(held, Situation.WAITING_FOR_PERMIT, f"for a permit of {held.pool}{ahead}")


def _behind(held: Held, head: Held, now: float) -> Explanation:
    more = held.standing.ahead - 1
    others = f" and {more} more" if more else ""
    text = f"for its group behind {head.message_id}{others}: that is {_held(head, now).text}"
    return replace(
        _waits(held, Situation.WAITING_FOR_GROUP, text, head.resume_at), behind=head.message_id
    )


def _waiting(held: Held, now: float) -> Explanation:
    if held.resume_at is not None:
        return Explanation(
            situation=Situation.BETWEEN_TRIES,
            text=f"between two tries until {_at(held.resume_at)} ({held.attempt} so far)",
            since=held.started_at,
            until=held.resume_at,
            attempt=held.attempt,
        )
    if held.standing.in_a_pool and not held.standing.put_off:
        text = f"for a permit of {held.pool} to try again"
        return _waits(held, Situation.WAITING_FOR_PERMIT, text)
    return _queued(held, now)


def _delivering(held: Held, _now: float) -> Explanation:
    return Explanation(
        situation=Situation.DELIVERING,
        text=f"in delivery since {_at(held.started_at)} (attempt {held.attempt})",
        since=held.started_at,
        attempt=held.attempt,
    )


def _settling(held: Held, _now: float) -> Explanation:
    return Explanation(
        situation=Situation.SETTLING,
        text="done here: its ACK or NACK is on its way to the broker",
        since=held.started_at,
        attempt=held.attempt,
    )


_HELD: Final = {
    State.QUEUED: _queued,
    State.WAITING: _waiting,
    State.DELIVERING: _delivering,
    State.SETTLING: _settling,
}


def _waits(
    held: Held, situation: Situation, for_what: str, until: float | None = None
) -> Explanation:
    return Explanation(
        situation=situation,
        text=f"waiting {for_what}",
        since=held.received_at,
        until=until,
        attempt=held.attempt or None,
    )


def _visited(
    visit: Visit, letter: KeptLetter | None, circuit: Circuit | None, now: float
) -> Explanation:
    found = _ENDED[visit.fate](visit, letter, now)
    found = replace(
        found,
        message_id=visit.message_id,
        queue=visit.queue,
        pool=visit.pool,
        group=visit.group,
        target=visit.target,
        attempt=len(visit.tries) or None,
    )
    return _with_notes(found, *_circuit_notes(circuit, now))


def _was_delivered(visit: Visit, _letter: KeptLetter | None, _now: float) -> Explanation:
    text = f"delivered at {_at(visit.ended_at)}"
    return Explanation(situation=Situation.DELIVERED, text=text, since=visit.ended_at)


def _was_returned(visit: Visit, _letter: KeptLetter | None, now: float) -> Explanation:
    why = visit.tries[-1].error if visit.tries else None
    text = f"returned to {visit.queue}{f' after {why}' if why else ''}"
    due = visit.ended_at + (visit.returned_for or 0.0)
    if due > now:
        text = f"{text} until {_at(due)}"
    else:
        text = f"{text}, due since {_at(due)}: it waits there for its turn"
    refused = why == Error.CIRCUIT_OPEN.value
    situation = Situation.WAITING_FOR_BREAKER if refused else Situation.RETURNED
    return Explanation(situation=situation, text=text, since=visit.ended_at, until=due)


def _was_forfeited(visit: Visit, _letter: KeptLetter | None, _now: float) -> Explanation:
    lost_at = _at(visit.ended_at)
    text = f"its lease or connection was lost at {lost_at}: the broker hands it out again"
    return Explanation(situation=Situation.FORFEITED, text=text, since=visit.ended_at)


def _was_buried(visit: Visit, letter: KeptLetter | None, _now: float) -> Explanation:
    if letter is not None:
        return _dead(letter)
    text = f"given up at {_at(visit.ended_at)} ({visit.error}), and in no store any more"
    return Explanation(situation=Situation.DEAD_LETTER, text=text, since=visit.ended_at)


_ENDED: Final = {
    Fate.DELIVERED: _was_delivered,
    Fate.SUPERSEDED: _was_delivered,
    Fate.RETURNED: _was_returned,
    Fate.FORFEITED: _was_forfeited,
    Fate.DEAD_LETTERED: _was_buried,
}


def _dead(kept: KeptLetter) -> Explanation:
    letter = kept.letter
    replayed = f"; replayed at {_at(kept.replayed_at)}" if kept.replayed_at is not None else ""
    return Explanation(
        situation=Situation.DEAD_LETTER,
        text=f"dead letter {kept.id} since {_at(letter.dead_at)}: {letter.reason.value}{replayed}",
        message_id=letter.message_id,
        queue=letter.queue,
        pool=letter.pool,
        target=letter.target,
        since=letter.dead_at,
        attempt=letter.requests or None,
        dead_letter=kept.id,
        reason=letter.reason.value,
        notes=(letter.error,) if letter.error else (),
    )


def _still_away(visit: Visit, now: float) -> bool:
    """Whether it has been given back and is not due yet: it may be what the others wait for."""
    return visit.due_at is not None and visit.due_at > now


def _circuit_notes(circuit: Circuit | None, now: float) -> Iterator[str]:
    if circuit is not None and not circuit.is_closed:
        yield _circuit_in_words(circuit, now)


def _circuit_in_words(circuit: Circuit, now: float) -> str:
    if circuit.retry_at is None:
        return f"the circuit of {circuit.name} is being probed"
    if circuit.retry_at > now:
        return f"the circuit of {circuit.name} is open until {_at(circuit.retry_at)}"
    return f"the circuit of {circuit.name} is open; the next request will probe it"


def _with_notes(found: Explanation, *notes: str) -> Explanation:
    return replace(found, notes=(*found.notes, *notes))


def _count(messages: int) -> str:
    return "1 message" if messages == 1 else f"{messages} messages"


def _at(seconds: float) -> str:
    moment = datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat(timespec="seconds").replace("+00:00", "Z")
