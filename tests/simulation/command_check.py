"""Judges commands from the outside: replies, batches, chains, times and schedules (SIM-2)."""

import json
from collections import Counter, defaultdict
from typing import Any, Final

from router.core.config import MAX_LEAD_SECONDS, MIN_LEAD_SECONDS
from router.core.message import Message
from tests.simulation.events import NEVER, Answered, Book, Sent
from tests.simulation.plan import (
    DEDUP_WINDOW,
    REPLIES,
    SETTLED_WITHIN,
    START,
    WORK_QUEUES,
    Act,
    Beats,
    Body,
    PlannedBatch,
)

FIRST_TICK: Final = 100_000  # the numbers of their bodies
EPSILON: Final = 0.002
_CLOCKS: Final = frozenset({Act.CLOCK, Act.REBOOT, Act.RECREATE})


class CommandCheck:
    """What a message asks for beside its delivery happens after its end, and at least once."""

    def __init__(self, book: Book) -> None:
        plan = book.plan
        self.replies: defaultdict[int, list[float]] = defaultdict(list)
        self.clock_steps = 0.0  # seconds, in either direction
        self._book = book
        self._by_token = {body.token: body for body in plan.bodies}
        self._parents = {step.number: body for body in plan.bodies for step in body.then}
        self._batches = {batch.callback: batch for batch in plan.batches}
        self._beats = {beats.token: beats for beats in plan.beats}
        self._due = {  # the wall clock, when it may be delivered first
            body.number: START + body.wish.due for body in plan.bodies if body.wish.due is not None
        }
        self._published = Counter(
            number for step in plan.steps if step.act is not Act.CANCEL for number in step.bodies
        )
        self._comes_again = any(step.act in {Act.REPLAY, Act.RECREATE} for step in plan.steps)
        self._ticks: dict[str, Body] = {}  # by their ids
        self._last_ticks: dict[str, int] = {}
        self._all_ticks: defaultdict[str, set[int]] = defaultdict(set)  # until the first trouble
        self._punctual_until = min(
            book.disturbed_at,
            *(step.at for step in plan.steps if step.act in {Act.CLOCK, Act.SLOW}),
            NEVER,
        )
        self._replayed: set[str] = set()  # ids
        self._void: set[str] = set()  # batches of which nobody knows what they should be
        self._confirmed: defaultdict[str, set[int]] = defaultdict(set)

    def body_of(self, message_id: str, token: str) -> Body | None:
        beats = self._beats.get(token)
        if beats is None:
            return self._by_token.get(token)
        return self._ticks.get(message_id)

    def find(self, content: bytes) -> Body | None:
        """Whose body it is, also if the router has changed it: a time, a result, a batch's end."""
        try:
            fields = json.loads(content)
            return self.body_of(fields["id"], fields["authToken"])
        except (ValueError, KeyError):
            return None

    # What queues take.

    def put(self, queue: str, content: bytes, *, is_reply: bool) -> None:
        if is_reply:
            self._reply(json.loads(content))
            return
        try:
            fields = json.loads(content)
        except ValueError:
            return
        beats = self._beats.get(fields.get("authToken", ""))
        if beats is not None:
            self._tick(beats, fields["id"])
            return
        body = self._by_token.get(fields.get("authToken", ""))
        if body is None:
            return
        if body.number in self._parents:
            self._step(body, queue)
        elif body.number in self._batches:
            self._callback(self._batches[body.number], body, fields["payload"])

    def _reply(self, reply: dict[str, Any]) -> None:
        book = self._book
        number = int((reply["correlationId"] or "c-1")[1:])
        book.note("reply", reply["outcome"], "of", number)
        if not 0 <= number < len(book.plan.bodies):
            book.violate("CMD-3", f"a reply to nothing: {reply}")
            return
        body = book.plan.bodies[number]
        self.replies[number].append(book.now())
        if reply["messageId"] != body.id or not body.wish.reply:
            book.violate("CMD-3", f"a reply to body {number} that nobody asked for")
        if reply["outcome"] == "SUCCESS":
            if not book.acceptances[number]:
                book.violate("CMD-3", f"body {number} has a reply before it was accepted")
            if reply["result"] != {"of": number}:
                book.violate("CMD-2", f"body {number} has the result {reply['result']}")
        elif reply["errorCode"] == "CANCELLED":
            if not book.cancels[number]:
                book.violate("CMD-3", f"body {number} was never cancelled, and says so")
        elif not book.kept[number]:
            book.violate("CMD-3", f"body {number} has a reply before it was given up")

    def _step(self, body: Body, queue: str) -> None:
        book, parent = self._book, self._parents[body.number]
        if not book.acceptances[parent.number]:
            text = f"body {body.number} follows body {parent.number}, which was not accepted"
            book.violate("CMD-11", text)
        self._follow(body, queue)

    def _callback(self, batch: PlannedBatch, body: Body, totals: dict[str, Any]) -> None:
        book, members = self._book, batch.members
        book.note("callback of", batch.id, totals)
        missing = [number for number in members if not book.may_have_ended(number)]
        if missing:
            book.violate("CMD-4", f"the callback of {batch.id} comes before the end of {missing}")
        most = {
            "succeeded": sum(bool(book.acceptances[number]) for number in members),
            "failed": sum(bool(book.kept[number]) for number in members),
            "cancelled": sum(bool(book.cancels[number]) for number in members),
        }
        counted = sum(totals[name] for name in most)
        is_right = totals["batchId"] == batch.id and totals["total"] == len(members) == counted
        if not is_right or any(totals[name] > most[name] for name in most):
            book.violate("CMD-4", f"{batch.id} has {len(members)} members, not {totals}")
        self._follow(body, f"q{batch.queue}")

    def _follow(self, body: Body, queue: str) -> None:
        now = self._book.now()
        number = queue.removesuffix(".fifo")[-1:]
        place = int(number) if number.isdigit() else 0
        self._book.published(Sent(body, Act.FOLLOW, place, now, now, Answered.ACCEPTED))

    def _tick(self, beats: Beats, message_id: str) -> None:
        book, tick = self._book, int(message_id.removeprefix(f"{beats.name}-"))
        if tick % beats.every or tick > book.wall() + self.clock_steps:
            book.violate("CMD-10", f"{beats.name} has no tick {tick}")
        last = self._last_ticks.get(beats.name, -1)
        # A clock that was set back far enough makes the router forget its last tick. It did so
        # within one interval before this tick.
        lead = min(max(beats.every, MIN_LEAD_SECONDS), MAX_LEAD_SECONDS)
        is_forgotten = self.clock_steps > lead and last - tick > lead - beats.every
        if tick <= last and not is_forgotten and message_id not in self._replayed:
            book.violate("CMD-10", f"tick {tick} of {beats.name} is published after tick {last}")
        self._last_ticks[beats.name] = tick if is_forgotten else max(tick, last)
        if book.now() < self._punctual_until:
            self._all_ticks[beats.name].add(tick)
        number = FIRST_TICK + len(self._ticks)
        body = Body(number, message_id, beats.host, beats.pool)
        self._ticks.setdefault(message_id, body)
        self._follow(self._ticks[message_id], f"q{beats.queue}")

    # What producers do.

    def sent(self, body: Body, act: Act, wall: float) -> None:
        """Published by a producer, from this time of the wall clock on."""
        wish = body.wish
        if act is Act.REPLAY:
            self._replayed.add(body.id)
        if act in {Act.PUBLISH, Act.REPLAY}:  # a delay is for whoever publishes it
            wall = -1e12
        if wish.delay is not None:
            self._set_due(body.number, wall + wish.delay)

    def members_added(self, batch: PlannedBatch, numbers: tuple[int, ...]) -> None:
        self._confirmed[batch.id].update(numbers)

    def batch_is_void(self, batch: PlannedBatch) -> None:
        self._void.add(batch.id)

    def queue_is_new(self) -> None:
        """What the queue kept beside its messages is gone: batches that are open, and ticks."""
        self._last_ticks.clear()
        called = {sent.body.number for sent in self._book.sent if sent.act is Act.FOLLOW}
        for batch in self._book.plan.batches:
            if batch.callback not in called:
                self._void.add(batch.id)

    def _set_due(self, number: int, due: float) -> None:
        self._due[number] = min(due, self._due.get(number, due))

    # What targets see.

    def accepted(self, body: Body) -> None:
        for step in body.then:
            if step.wish.delay is not None:
                self._set_due(step.number, self._book.wall() + step.wish.delay)

    def posted(self, body: Body, message: Message) -> None:
        book, wish, number = self._book, body.wish, body.number
        due = self._due.get(number)
        if due is not None and book.wall() + self.clock_steps < due - EPSILON:
            book.violate("CMD-5", f"body {number} is sent {due - book.wall():g} s too early")
        confirmed = [each for each in book.cancels[number] if each.is_sure]
        if confirmed and self._published[number] == 1 and not self._comes_again:
            book.violate("CMD-2", f"body {number} is sent although it was cancelled")
        if number >= FIRST_TICK or number in self._batches:
            return
        wanted: dict[str, object] | None = None if wish.payload is None else {"n": wish.payload}
        if wish.pass_result:
            wanted = (wanted or {}) | {"previous": {"of": self._parents[number].number}}
        payload = json.loads(bytes(message.payload)) if message.has_payload else None
        if payload != wanted:
            book.violate("CMD-1", f"body {number} is sent with the payload {payload}")

    # What must hold in the end.

    def judge(self, replies: list[bytes] | None) -> None:
        """`replies`: what the reply queue holds, if it can be read."""
        book, plan = self._book, self._book.plan
        if replies is not None:
            found = [json.loads(content)["correlationId"] for content in replies]
            for number, times in self.replies.items():
                if found.count(f"c{number}") < min(len(times), 1):
                    book.violate("CMD-3", f"the reply to body {number} is gone")
        for sent in book.sent:
            if sent.answer is Answered.ACCEPTED:
                self._judge_sent(sent)
        for batch in plan.batches:
            is_whole = self._confirmed[batch.id] == set(batch.members)
            if is_whole and batch.id not in self._void:
                called = [each for each in book.sent if each.body.number == batch.callback]
                if not called:
                    book.violate("CMD-4", f"{batch.id} has ended, and its callback never came")
        if plan.kind in WORK_QUEUES and not any(step.act in _CLOCKS for step in plan.steps):
            self._judge_content()

    def judge_beats(self, beats: Beats, last: int | None) -> None:
        """`last`: the tick that the queue remembers. The first one comes after the start."""
        ticks = self._all_ticks[beats.name]
        for tick in range(min(ticks, default=0), max(ticks, default=0), beats.every):
            if tick not in ticks:
                self._book.violate("CMD-10", f"{beats.name} has left out tick {tick}")
        if (START if last is None else last) < self._book.wall() - beats.every - 10:
            self._book.violate("CMD-10", f"{beats.name} stands still since {last}")

    def _judge_sent(self, sent: Sent) -> None:
        book, body, number = self._book, sent.body, sent.body.number
        since = sent.at - SETTLED_WITHIN
        if body.wish.reply and not any(at >= since for at in self.replies[number]):
            book.violate("CMD-3", f"body {number} ({sent.act} at {sent.at:g}) has no reply")
        if book.kept[number] or book.cancels[number]:
            return  # it may have ended without a success
        for step in body.then:
            if not any(each.body is step and each.at >= since for each in book.sent):
                book.violate("CMD-11", f"body {step.number} never follows body {number}")

    def _judge_content(self) -> None:
        """What has the same content is accepted once, unless it is dead or long gone."""
        known: dict[object, Sent] = {}
        for sent in self._book.sent:
            if not sent.body.wish.by_content or sent.answer is not Answered.ACCEPTED:
                continue
            key = sent.queue, sent.body.sort
            first = known.setdefault(key, sent)
            number = first.body.number
            if (
                first is not sent
                and sent.act is Act.SEND
                and first.answered_at <= sent.at < first.at + DEDUP_WINDOW - EPSILON
                and not self._book.kept[number]
                and not self._book.cancels[number]
            ):
                self._book.violate(
                    "CMD-6", f"body {sent.body.number} was accepted beside its like, {number}"
                )


def is_reply(queue: str) -> bool:
    """By what its queue is called, on whichever broker."""
    return queue.rpartition("/")[2].removesuffix(".fifo") == REPLIES
