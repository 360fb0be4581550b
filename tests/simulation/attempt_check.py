"""Judges attempts: failures are counted, retries come in time, and no message is given up early.

Only of bodies that were published once, and until the first fault that may break off a delivery:
after that, what a broker and a router remember of a message may differ.
"""

from collections import Counter
from typing import Final

from msgspec import Struct

from router.core.config import OnFailure
from router.core.dead_letter import Reason
from router.core.outcome import Answer, Cause, NoReply, Reply
from router.core.returning import MAX_FAILING_SECONDS, MAX_FAILURES
from tests.simulation.events import NEVER, Book
from tests.simulation.plan import RETRY_SCHEDULE, START, WORK_QUEUES, Act, Body

EPSILON: Final = 0.01
DEFAULT_DELAY: Final = 30.0
DEFERRED: Final = 4.0  # what a target that answers ack:false asks for
_COUNTED: Final = frozenset({Cause.NETWORK, Cause.BROKEN, Cause.TIMEOUT})
# What holds for commands where no policy is set (WQ-15).
_COMMAND_ATTEMPTS: Final = 4
_COMMAND_SCHEDULE: Final = (10.0, 60.0, 300.0)
_FREE_SECONDS: Final = 900.0  # in which a failure without a connection uses no attempt


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
        # What blocks its group does so in the router: nobody sees where a delivery ends.
        strict = plan.strict
        self._is_seen = strict is None or strict.on_failure is not OnFailure.BLOCK
        self._may_be_kept = all(step.act is not Act.STORE for step in plan.steps)
        self._deliveries: dict[tuple[str, int], _Delivery] = {}
        self._failures: Counter[int] = Counter()
        self._due: dict[int, float] = {}
        self._unsent: dict[int, float] = {}  # when a body first met no connection
        self._came_first: set[tuple[str, int]] = set()  # from a store that has not answered yet

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
        most = self._limit(body)
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
        body = self._book.plan.bodies[number]
        self._failures[number] += self._counts(body, delivery)
        self._due[number] = delivery.ended + self._delay(body, delivery.answer)

    def handed_over(self, name: str, number: int) -> None:
        """A process gets it: if it has been answered, it is in the order store by now."""
        delivery = self._deliveries.get((name, number))
        if delivery is not None and delivery.answer is not None:
            self.settled(name, number)
            self._came_first.add((name, number))

    def stored(self, name: str, number: int) -> None:
        """The order store has told a process that it has it."""
        if (name, number) in self._came_first:
            self._came_first.discard((name, number))
        else:
            self.settled(name, number)

    def letter_kept(self, body: Body, reason: Reason) -> None:
        """A router gives it up."""
        number, most = body.number, self._limit(body)
        if reason is not Reason.RETRIES_EXHAUSTED or not self._is_judged(body, self._book.now()):
            return
        latest = [each for (_, of), each in self._deliveries.items() if of == number]
        failures = self._failures[number] + any(
            each.answer is not None and self._counts(body, each) for each in latest
        )
        if most is None and failures >= MAX_FAILURES:
            is_early = self._book.wall() - START < MAX_FAILING_SECONDS  # clocks may be set (WQ-15)
        else:
            is_early = most is None or failures < most
        if is_early:
            self._book.violate("WQ-5", f"body {number} is given up after {failures} of {most}")

    def replaying(self, body: Body) -> None:
        """It begins anew, perhaps before the operator hears that it was replayed."""
        self._once.discard(body.number)

    def _is_judged(self, body: Body, now: float) -> bool:
        book = self._book
        is_counted = self._is_one_count and self._is_seen and body.number in self._once
        if not is_counted or now >= book.disturbed_at:
            return False
        if self._has_standard(body) and book.plan.routers > 1:
            return False  # each router remembers for itself since when a message fails
        return now < book.changed_pools.get(body.pool or "", NEVER)

    def _has_standard(self, body: Body) -> bool:
        """Return whether it has the limits of a command where no policy is set."""
        is_command = body.wish.reply and body.wish.payload is not None
        return self._book.plan.attempts is None and is_command

    def _limit(self, body: Body) -> int | None:
        return _COMMAND_ATTEMPTS if self._has_standard(body) else self._book.plan.attempts

    def _counts(self, body: Body, delivery: _Delivery) -> bool:
        answer = delivery.answer
        if not isinstance(answer, NoReply):
            return answer is not None and answer.status // 100 == 5
        if self._has_standard(body) and answer.cause is Cause.NETWORK:
            first = self._unsent.setdefault(body.number, delivery.ended)
            return delivery.ended - first >= _FREE_SECONDS
        return answer.cause in _COUNTED

    def _delay(self, body: Body, answer: Answer) -> float:
        asked, schedule = _asked(answer), RETRY_SCHEDULE
        if self._has_standard(body):
            schedule = _COMMAND_SCHEDULE
        elif self._book.plan.attempts is None:
            return DEFAULT_DELAY if asked is None else asked
        failures = min(max(self._failures[body.number], 1), len(schedule))
        return max(schedule[failures - 1], asked or 0.0)


def _asked(answer: Answer) -> float | None:
    """Return for how long the target itself asked to wait."""
    if not isinstance(answer, Reply):
        return None
    if answer.retry_after is not None:
        return float(answer.retry_after)
    return DEFERRED if answer.status == 200 else None
