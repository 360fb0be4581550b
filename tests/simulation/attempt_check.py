"""Judges attempts: failures are counted, retries come in time, and no message is given up early.

Only of bodies that were published once, and until the first fault that may break off a delivery:
after that, what a broker and a router remember of a message may differ.
"""

from collections import Counter
from typing import Final

from msgspec import Struct

from router.core.dead_letter import Reason
from router.core.outcome import Answer, Cause, NoReply, Reply
from tests.simulation.events import NEVER, Book, Sent
from tests.simulation.plan import RETRY_SCHEDULE, WORK_QUEUES, Act, Body

EPSILON: Final = 0.01
DEFAULT_DELAY: Final = 30.0
DEFERRED: Final = 4.0  # what a target that answers ack:false asks for
_COUNTED: Final = frozenset({Cause.NETWORK, Cause.BROKEN, Cause.TIMEOUT})


class _Delivery(Struct):
    """Requests of one process for one body, until it returns that."""

    answer: Answer | None = None  # the latest
    ended: float = 0.0  # when it came


class AttemptCheck:
    def __init__(self, book: Book) -> None:
        plan = book.plan
        self._book = book
        published = Counter(number for step in plan.steps for number in step.bodies)
        plainly = {
            number
            for step in plan.steps
            if step.act in {Act.SEND, Act.PUBLISH}
            for number in step.bodies
        }
        self._once = {number for number in plainly if published[number] == 1}
        # Each router counts for itself what its broker cannot keep.
        self._is_one_count = plan.routers == 1 or plan.kind in WORK_QUEUES
        self._may_be_kept = all(step.act is not Act.STORE for step in plan.steps)
        self._deliveries: dict[tuple[str, int], _Delivery] = {}
        self._failures: Counter[int] = Counter()
        self._due: dict[int, float] = {}

    def posted(self, name: str, body: Body) -> None:
        number, now = body.number, self._book.now()
        if (name, number) in self._deliveries:
            return  # its second or third try
        self._deliveries[name, number] = _Delivery()
        if not self._is_judged(body, now):
            return
        if now < self._due.get(number, now) - EPSILON:
            text = f"body {number} is tried again {self._due[number] - now:g} s too early"
            self._book.violate("BRK-4", text)
        most = self._book.plan.attempts
        if most is not None and self._failures[number] >= most and self._may_be_kept:
            text = f"body {number} is sent after {self._failures[number]} failures of {most}"
            self._book.violate("WQ-5", text)

    def answered(self, name: str, body: Body, answer: Answer | None) -> None:
        delivery = self._deliveries.get((name, body.number))
        if delivery is not None and answer is not None:
            delivery.answer, delivery.ended = answer, self._book.now()

    def settled(self, name: str, number: int) -> None:
        """A process returns it."""
        delivery = self._deliveries.pop((name, number), None)
        if delivery is None or delivery.answer is None:
            return
        self._failures[number] += _counts(delivery.answer)
        self._due[number] = delivery.ended + self._delay(number, delivery.answer)

    def letter_kept(self, body: Body, reason: Reason) -> None:
        """A router gives it up."""
        number, most = body.number, self._book.plan.attempts
        if reason is not Reason.RETRIES_EXHAUSTED or not self._is_judged(body, self._book.now()):
            return
        latest = [each for (_, of), each in self._deliveries.items() if of == number]
        failures = self._failures[number] + any(
            each.answer is not None and _counts(each.answer) for each in latest
        )
        if most is None or failures < most:
            self._book.violate("WQ-5", f"body {number} is given up after {failures} of {most}")

    def published(self, sent: Sent) -> None:
        if sent.act is Act.REPLAY:  # it begins anew
            self._once.discard(sent.body.number)

    def _is_judged(self, body: Body, now: float) -> bool:
        book = self._book
        is_counted = self._is_one_count and body.number in self._once
        if not is_counted or now >= book.disturbed_at:
            return False
        return now < book.changed_pools.get(body.pool or "", NEVER)

    def _delay(self, number: int, answer: Answer) -> float:
        asked = _asked(answer)
        if self._book.plan.attempts is None:
            return DEFAULT_DELAY if asked is None else asked
        failures = min(max(self._failures[number], 1), len(RETRY_SCHEDULE))
        return max(RETRY_SCHEDULE[failures - 1], asked or 0.0)


def _counts(answer: Answer) -> bool:
    if isinstance(answer, NoReply):
        return answer.cause in _COUNTED
    return answer.status // 100 == 5


def _asked(answer: Answer) -> float | None:
    """Return for how long the target itself asked to wait."""
    if not isinstance(answer, Reply):
        return None
    if answer.retry_after is not None:
        return float(answer.retry_after)
    return DEFERRED if answer.status == 200 else None
