"""Why is it not delivered now? The answer to the question that operators ask first.

The engine looks up what it knows; here it becomes one situation and one sentence. Times are Unix
seconds.
"""

import math
from enum import Enum
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from router.core.dead_letter import KeptLetter
from router.core.history import (
    Fate,
    HandOver,
    Held,
    MessageHistory,
    State,
    WaitReason,
    why_waiting,
)
from router.core.outcome import RULES, Cause
from router.core.returning import ReturnReason
from router.core.state import Circuit
from router.core.timestamps import iso


class Situation(Enum):
    NOT_HERE = "NOT_HERE"
    QUEUED = "QUEUED"  # its queue has it, and has not handed it to this router
    WAITING_FOR_ROOM = "WAITING_FOR_ROOM"  # in a full pool
    WAITING_FOR_DRAIN = "WAITING_FOR_DRAIN"  # of the pool that holds its group
    WAITING_FOR_GROUP = "WAITING_FOR_GROUP"
    WAITING_FOR_RATE = "WAITING_FOR_RATE"
    WAITING_FOR_PERMIT = "WAITING_FOR_PERMIT"
    WAITING_FOR_SHARE = "WAITING_FOR_SHARE"  # of the workers, between targets or tenants
    WAITING_FOR_TARGET = "WAITING_FOR_TARGET"  # it asked for silence, or takes no more at once
    WAITING_FOR_BREAKER = "WAITING_FOR_BREAKER"
    DELIVERING = "DELIVERING"
    BETWEEN_TRIES = "BETWEEN_TRIES"
    SETTLING = "SETTLING"
    DEFERRED = "DEFERRED"  # to its queue: its pool is full
    RETURNED = "RETURNED"
    STORED = "STORED"  # in the order store: it is to be tried again, or waits for its group
    HELD = "HELD"  # its group, by a dead letter (ORD-11)
    FORFEITED = "FORFEITED"
    DEAD_LETTER = "DEAD_LETTER"
    CANCELLED = "CANCELLED"
    DELIVERED = "DELIVERED"
    IDLE = "IDLE"  # the router holds nothing of this group or for this target


_SITUATIONS: Final = {
    None: Situation.DELIVERING,
    WaitReason.ROOM: Situation.WAITING_FOR_ROOM,
    WaitReason.DRAINING: Situation.WAITING_FOR_DRAIN,
    WaitReason.GROUP: Situation.WAITING_FOR_GROUP,
    WaitReason.RATE: Situation.WAITING_FOR_RATE,
    WaitReason.PERMIT: Situation.WAITING_FOR_PERMIT,
    WaitReason.SHARE: Situation.WAITING_FOR_SHARE,
    WaitReason.TARGET: Situation.WAITING_FOR_TARGET,
    WaitReason.RETRY: Situation.BETWEEN_TRIES,
    WaitReason.SETTLE: Situation.SETTLING,
}


# Of a message that was returned without a request, by the word of its outcome.
_REFUSED: Final = {
    RULES[Cause.CIRCUIT_OPEN].word: Situation.WAITING_FOR_BREAKER,
    RULES[Cause.TARGET_PAUSED].word: Situation.WAITING_FOR_TARGET,
}


class Explanation(Struct, frozen=True, kw_only=True):
    situation: Situation
    text: str
    message_id: str | None = None  # the message that it is about
    queue: str | None = None
    pool: str | None = None
    group: str | None = None
    target: str | None = None
    since: float | None = None
    until: float | None = None
    attempt: int | None = None  # of its latest delivery, or of the next one
    behind: str | None = None  # the message that must go first
    dead_letter: int | None = None  # its id
    reason: str | None = None  # of the dead letter
    error: str | None = None  # of the dead letter; may quote the target, as nothing else here does
    notes: tuple[str, ...] = ()


class QueuedMessage(Struct, frozen=True, kw_only=True):
    """A message that its queue has not handed to this router, as the queue reports it."""

    message_id: str
    queue: str
    pool: str | None
    group: str | None
    published_at: float
    not_before: float | None = None  # it is delayed until then
    worker_id: str | None = None  # of the router that holds it


def explain_message(
    history: MessageHistory,
    *,
    now: float,
    circuit: Circuit | None = None,
    ahead: HandOver | None = None,
    notes: tuple[str, ...] = (),
) -> Explanation:
    """Explain a message by what the router knows of it.

    `circuit` is that of its target, `ahead` the message of its group that the broker hands out
    last, and `notes` say what keeps messages in their queues.
    """
    if history.held:
        first, *others = history.held
        found = _with_notes(_explain_held(first, now), *_circuit_notes(circuit, now))
        same = (f"the same id is held for {each.target}, too" for each in others)
        return _with_notes(found, *same)
    if history.ended:
        last = history.ended[-1]
        found = _explain_ended(last, history.letter, circuit, now)
        if ahead is None or last.tries or ahead.message_id == last.message_id:
            return found
        why = _explain_ended(ahead, None, None, now).text
        return _with_notes(found, f"{ahead.message_id} of its group was {why}")
    if history.letter is not None:
        return _explain_letter(history.letter)
    text = "not here: it is not held, and not among those remembered; it may wait in its queue"
    return Explanation(
        situation=Situation.NOT_HERE, text=text, message_id=history.message_id, notes=notes
    )


def explain_queued(
    queued: QueuedMessage, *, of_group: Explanation | None = None, notes: tuple[str, ...] = ()
) -> Explanation:
    """Explain a message that waits in its queue.

    `of_group` explains its group, and `notes` say what keeps messages in their queues.
    """
    situation, behind, until = Situation.QUEUED, None, None
    if queued.worker_id is not None:
        why = f"held by the router {queued.worker_id}: ask that one"
    elif queued.not_before is not None:
        until = queued.not_before
        why = f"not due before {_at(until)}"
    elif of_group is not None and of_group.situation is not Situation.IDLE:
        situation, behind, until = Situation.WAITING_FOR_GROUP, of_group.message_id, of_group.until
        why = f"waiting for its group: {of_group.text}"
    else:
        why = "due, and not handed to this router yet"
    return Explanation(
        situation=situation,
        text=f"in queue {queued.queue} since {_at(queued.published_at)}; {why}",
        message_id=queued.message_id,
        queue=queued.queue,
        pool=queued.pool,
        group=queued.group,
        since=queued.published_at,
        until=until,
        behind=behind,
        notes=notes,
    )


def explain_group(
    group: str,
    pool: str,
    *,
    now: float,
    first: Held | None = None,
    behind: int = 0,
    last: HandOver | None = None,
    circuit: Circuit | None = None,
    notes: tuple[str, ...] = (),
) -> Explanation:
    """Explain a group by its first message, those behind it, and the last one handed out."""
    if first is not None:
        found = _explain_held(first, now)
        text = f"{_count(behind)} of the group behind {first.message_id}: {found.text}"
        return _with_notes(replace(found, text=text), *_circuit_notes(circuit, now))
    if last is not None and _is_away(last, now):
        found = _explain_ended(last, None, circuit, now)
        text = f"nothing of the group is held; {last.message_id} was {found.text}"
        return replace(found, text=text)
    return Explanation(
        situation=Situation.IDLE,
        text=f"{pool} holds nothing of the group: if there is more of it, it waits in its queue",
        pool=pool,
        group=group,
        notes=notes,
    )


def explain_target(
    origin: str,
    *,
    now: float,
    first: Held | None = None,
    held: int = 0,
    delivering: int = 0,
    last: HandOver | None = None,
    circuit: Circuit | None = None,
    silent_until: float | None = None,
) -> Explanation:
    """Explain a target by the message held longest, and the latest one that has ended."""
    load = f"{_count(held)} held for it, {delivering} of them in delivery"
    if circuit is not None and not circuit.is_closed:
        return Explanation(
            situation=Situation.WAITING_FOR_BREAKER,
            text=f"{_circuit_notes(circuit, now)[0]}; {load}",
            target=origin,
            until=circuit.retry_at,
        )
    if silent_until is not None:
        return Explanation(
            situation=Situation.WAITING_FOR_TARGET,
            text=f"it asked for silence until {_at(silent_until)}; {load}",
            target=origin,
            until=silent_until,
        )
    if first is not None:
        found = _explain_held(first, now)
        text = f"{load}; the one held longest, {first.message_id}, is {found.text}"
        return replace(found, text=text)
    if last is not None and _is_away(last, now):
        found = _explain_ended(last, None, circuit, now)
        text = f"nothing is held for it; {last.message_id} was the last: {found.text}"
        return replace(found, text=text)
    has_circuit = "://" in origin  # what runs on this machine has none
    text = "nothing is held for it" + (", and its circuit is closed" if has_circuit else "")
    return Explanation(situation=Situation.IDLE, text=text, target=origin)


def _explain_held(held: Held, now: float) -> Explanation:
    reason = why_waiting(held)
    started = reason in (None, WaitReason.RETRY, WaitReason.SETTLE)
    text, until = _held_in_words(held, reason, now)
    return Explanation(
        situation=_SITUATIONS[reason],
        text=text,
        message_id=held.message_id,
        queue=held.queue,
        pool=held.pool,
        group=held.group,
        target=held.target,
        since=held.started_at if started else held.received_at,
        until=until,
        attempt=held.attempt,
        behind=held.position.in_front.message_id if held.position.in_front else None,
    )


def _held_in_words(held: Held, reason: WaitReason | None, now: float) -> tuple[str, float | None]:
    """Return the sentence, and until when it is so, if that is known."""
    position, until = held.position, None
    match reason:
        case None:
            text = f"in delivery since {_at(held.started_at)} (attempt {held.attempt})"
        case WaitReason.RETRY:
            until = held.resume_at
            text = f"between two requests of attempt {held.attempt} until {_at(until or now)}"
        case WaitReason.SETTLE:
            text = "done here: its ACK or NACK is on its way to the broker"
        case WaitReason.ROOM:
            text = f"waiting for room in {held.pool}, which is full"
        case WaitReason.DRAINING:
            text = "waiting until its pool has returned its group"
        case WaitReason.RATE:
            until = now + position.rate_wait + position.lanes_ahead * position.rate_step
            text = f"waiting for the rate limit of {held.pool} until {_at(until)}"
        case WaitReason.TARGET | WaitReason.SHARE:
            until = position.silent_until
            text = _busy_in_words(held)
        case WaitReason.GROUP if position.in_front is not None:
            head, more = position.in_front, position.ahead - 1
            others = f" and {more} more" if more else ""
            text = f"waiting for its group behind {head.message_id}{others}: that is "
            text, until = text + _explain_held(head, now).text, head.resume_at
        case _ if held.state is State.WAITING:
            text = f"waiting for a permit of {held.pool} to try again"
        case _:
            ahead = f" ({position.lanes_ahead} in line before it)" if position.lanes_ahead else ""
            text = f"waiting for a permit of {held.pool}{ahead}"
    return text, until


def _busy_in_words(held: Held) -> str:
    """Say what a message waits for whose target is busy, here or there."""
    position = held.position
    lanes = "1 lane is" if position.lanes_ahead == 1 else f"{position.lanes_ahead} lanes are"
    if position.silent_until is not None:
        until = _at(position.silent_until)
        return f"waiting for its target: it asked for silence until {until}"
    if position.share is not None:
        has = f"its target or tenant has {position.share} workers, and others wait"
        return f"waiting for its share of {held.pool}: {has}; {lanes} before this one"
    takes = f"it takes {math.ceil(position.target_limit)} at once"
    return f"waiting for its target: {takes}: {lanes} before this one"


def _explain_stored(ended: HandOver, now: float) -> Explanation:
    """Explain a message of a strict queue that is in the order store (ORD-6)."""
    until = ended.ended_at + (ended.returned_for or 0.0)
    if ended.return_reason is ReturnReason.BEHIND:
        text, until_known = f"waits in the order store {ended.error}", None
    else:
        why = f" ({ended.error})" if ended.error else ""
        when = f"next try {_at(until)}" if until > now else f"due since {_at(until)}"
        text, until_known = f"waits in the order store{why}; {when}", until
    return Explanation(
        situation=Situation.STORED, text=text, since=ended.ended_at, until=until_known
    )


def explain_stored(
    message_id: str,
    queue: str,
    group: tuple[str, str],
    *,
    front: str,
    since: float,
    due_at: float | None,
    error: str | None,
    letter: int | None,
    is_held: bool,
) -> Explanation:
    """Explain a message that waits in a work queue of its strict queue, as that reports it."""
    pool, name = group
    is_behind = front != message_id
    if is_held:
        which = "a dead letter" if letter is None else f"dead letter {letter}"
        what = f"its group is held by {which}, message {front}," if is_behind else f"{which}"
        verb = "" if is_behind else " holds its group"
        text = f"{what}{verb} since {_at(since)}: replay it, discard it or release the group"
    else:
        where = f"waits in the order store{f' behind {front}' if is_behind else ''}"
        text = f"{where}; {'it is its turn' if due_at is None else f'next try {_at(due_at)}'}"
    return Explanation(
        situation=Situation.HELD if is_held else Situation.STORED,
        text=text,
        message_id=message_id,
        queue=queue,
        pool=pool,
        group=name,
        since=since,
        until=due_at,
        behind=front if is_behind else None,
        dead_letter=letter,
        error=error,
    )


def _explain_ended(
    ended: HandOver, letter: KeptLetter | None, circuit: Circuit | None, now: float
) -> Explanation:
    at, until = _at(ended.ended_at), None
    match ended.fate:
        case Fate.DEAD_LETTERED if letter is not None:
            found = _explain_letter(letter)
        case Fate.DEAD_LETTERED:
            found = Explanation(
                situation=Situation.DEAD_LETTER,
                text=f"given up at {at}, and is no longer in the store",
                since=ended.ended_at,
                error=ended.error or None,
            )
        case Fate.FORFEITED:
            text = f"its lease or connection was lost at {at}: the broker hands it out again"
            found = Explanation(situation=Situation.FORFEITED, text=text, since=ended.ended_at)
        case Fate.CANCELLED:
            asked = " while it was in delivery: its target may have acted" if ended.tries else ""
            text = f"cancelled at {at}{asked}"
            found = Explanation(situation=Situation.CANCELLED, text=text, since=ended.ended_at)
        case Fate.STORED:
            found = _explain_stored(ended, now)
        case Fate.RETURNED if ended.return_reason is ReturnReason.NO_ROOM:
            until = ended.ended_at + (ended.returned_for or 0.0)
            later = f"deferred until {_at(until)}" if until > now else "waiting in its queue"
            found = Explanation(
                situation=Situation.DEFERRED,
                text=f"{later}, because pool {ended.pool} was full at {at}",
                since=ended.ended_at,
                until=until,
            )
        case Fate.RETURNED:
            word = ended.tries[-1].error if ended.tries else None
            why = f" ({ended.error or word})" if ended.error or word else ""
            until = ended.ended_at + (ended.returned_for or 0.0)
            text = f"returned to {ended.queue} until {_at(until)}{why}"
            due = f"returned to {ended.queue}{why}, due since {_at(until)}"
            found = Explanation(
                situation=_REFUSED.get(word, Situation.RETURNED),
                text=text if until > now else f"{due}: it waits there for its turn",
                since=ended.ended_at,
                until=until,
            )
        case _:
            text = f"delivered at {at}"
            found = Explanation(situation=Situation.DELIVERED, text=text, since=ended.ended_at)
    found = replace(
        found,
        message_id=ended.message_id,
        queue=ended.queue,
        pool=ended.pool,
        group=ended.group,
        target=ended.target,
        attempt=ended.attempt,
    )
    return _with_notes(found, *_circuit_notes(circuit, now))


def _explain_letter(kept: KeptLetter) -> Explanation:
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
        attempt=letter.failures or None,
        dead_letter=kept.id,
        reason=letter.reason.value,
        error=letter.error or None,
    )


def _is_away(ended: HandOver, now: float) -> bool:
    """Return whether it was returned and is not due yet: the others may wait for it."""
    return ended.due_at is not None and ended.due_at > now


def _circuit_notes(circuit: Circuit | None, now: float) -> tuple[str, ...]:
    if circuit is None or circuit.is_closed:
        return ()
    whose = "" if circuit.fault is None else f", fault: {circuit.fault}"
    since = "" if circuit.since is None else f" (since {_at(circuit.since)}{whose})"
    if circuit.retry_at is None:
        return (f"the circuit of {circuit.name} is being probed{since}",)
    if circuit.retry_at > now:
        return (f"the circuit of {circuit.name} is open until {_at(circuit.retry_at)}{since}",)
    return (f"the circuit of {circuit.name} is open; the next request will probe it{since}",)


def _with_notes(found: Explanation, *notes: str) -> Explanation:
    return replace(found, notes=(*found.notes, *notes))


def _count(messages: int) -> str:
    return "1 message" if messages == 1 else f"{messages} messages"


def _at(seconds: float) -> str:
    return iso(seconds, "seconds")
