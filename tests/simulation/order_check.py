"""Judges order: within a group, between priorities, and between routers on one group (SIM-2)."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Final
from weakref import WeakValueDictionary

from router.core.config import OnFailure
from router.engine.pool import ProcessPool
from router.engine.queue_manager import QueueManager
from tests.simulation.events import NEVER, Answered, Book, Sent
from tests.simulation.loop import Process
from tests.simulation.plan import HIGH, POOLS, Act, Body, Kind, Mood

HOLDS_GROUPS: Final = frozenset({Kind.SQLITE, Kind.POSTGRES, Kind.SQS_FIFO})
# One router with one connection keeps the order, until a message comes back.
IN_ORDER: Final = frozenset({Kind.RABBITMQ, Kind.NATS, Kind.ACTIVEMQ})
_RETURNS_NOTHING: Final = frozenset({Mood.OK, Mood.SLOW})
Line = tuple[int, str | None, str | None]  # queue, pool and group


class OrderCheck:
    def __init__(self, book: Book) -> None:
        plan = book.plan
        self._book = book
        self._count = Counter(
            number for step in plan.steps if step.act is not Act.CANCEL for number in step.bodies
        )
        self._places: defaultdict[int, set[int]] = defaultdict(set)
        for step in plan.steps:
            for number in step.bodies:
                self._places[number].add(step.queue)
        self._returned: dict[int, float] = {}  # bodies: when first
        self._in_groups: defaultdict[tuple[int, str], dict[int, Process]] = defaultdict(dict)
        # Bodies of high priority that waited for another of their group at the last look.
        self._waiting: dict[tuple[str, str | None, str | None], set[int]] = {}
        self._pools: WeakValueDictionary[tuple[str, str | None], ProcessPool]
        self._pools = WeakValueDictionary()  # of those that live, by process and code
        self._seen: set[int] = set()

    # What targets see.

    def posted(self, process: Process, body: Body) -> None:
        self._judge_processes(process, body)
        waiting = self._waiting.get((process.name, body.pool, body.group), set())
        waiting.discard(body.number)
        # They may not pass one that was tried, nor what is in front of it. It may have come since.
        pool = self._pools.get((process.name, body.pool))
        lane = None if pool is None else pool.lanes.get(body.group)
        may_pass = lane is None or not lane.tried
        is_judged = may_pass and self._book.now() < self._book.disturbed_at
        if waiting and body.number not in self._seen and body.level != HIGH and is_judged:
            text = f"body {body.number} is sent while {sorted(waiting)} of its group wait"
            self._book.violate("POOL-3", f"{text} with high priority")
        self._seen.add(body.number)

    def answered(self, body: Body) -> None:
        for others in self._in_groups.values():
            others.pop(body.number, None)

    def returned(self, number: int) -> None:
        self._returned.setdefault(number, self._book.now())
        for waiting in self._waiting.values():
            waiting.discard(number)

    def _judge_processes(self, process: Process, body: Body) -> None:
        """Where the broker holds groups, two routers never serve one group at once (P3)."""
        book, number = self._book, body.number
        is_judged = book.plan.kind in HOLDS_GROUPS and self._count[number] == 1
        if not is_judged or book.now() >= book.disturbed_at or len(self._places[number]) != 1:
            return
        # What has no order is in nobody's way, but it is never with two routers either (P2).
        group = f"only {number}" if body.is_alone else f"{body.pool} {body.group}"
        (queue,) = self._places[number]
        others = self._in_groups[queue, group]
        for other, holder in others.items():
            if holder is not process and holder.is_alive:
                rule = "P2" if other == number else "P3"
                text = f"body {number} while {holder.name} sends body {other} of its group"
                book.violate(rule, f"{process.name} sends {text}")
        others[number] = process

    # What a router holds.

    def look(self, name: str, manager: QueueManager) -> None:
        """Note who waits with high priority: it goes before all that wait with it (POOL-3)."""
        for code in POOLS:
            pool = manager.pools.get(code)
            if pool is None or code in self._book.changed_pools:
                continue
            self._pools[name, code] = pool
            for group, lane in pool.lanes.items():
                waiting = {
                    number
                    for job in lane
                    # None may pass a regular one that was tried before.
                    if lane.current is not None
                    and not lane.tried
                    and (number := _number_of(job.message.token)) is not None
                    and self._book.plan.bodies[number].level == HIGH
                }
                self._waiting[name, code, group] = waiting

    # What must hold in the end.

    def judge(self) -> None:
        plan = self._book.plan
        if plan.strict is not None and plan.strict.on_failure is OnFailure.SKIP:
            return  # no message waits for another
        is_alone = plan.routers == plan.connections == 1
        if plan.kind in HOLDS_GROUPS or (plan.kind in IN_ORDER and is_alone):
            for line, sent in self._lines().items():
                self._judge_line(line, sent)

    def _lines(self) -> dict[Line, list[Sent]]:
        count = Counter(sent.body.number for sent in self._book.sent)
        lines: defaultdict[Line, list[Sent]] = defaultdict(list)
        for sent in self._book.sent:
            body = sent.body
            if (
                body.group is not None
                and body.dispatch is None
                and not body.malformed
                and sent.answer is Answered.ACCEPTED
                and count[body.number] == 1
            ):
                lines[sent.queue, body.pool, body.group].append(sent)
        return lines

    def _judge_line(self, line: Line, published: list[Sent]) -> None:
        until = self._in_order_until(line, published)
        for first, second in itertools.combinations(published, 2):
            is_before = first.answered_at <= second.at or first.call == second.call >= 0
            if is_before and _may_not_pass(first.body, second.body):
                is_alike = (first.body.level == HIGH) is (second.body.level == HIGH)
                latest = until if is_alike else min(until, self._in_precedence_until(line, first))
                self._judge_pair(first.body.number, second.body.number, latest)

    def _in_order_until(self, line: Line, published: Sequence[Sent]) -> float:
        """Return how long the order of a group is promised."""
        book, pool = self._book, line[1]
        changed = book.changed_pools.get(pool or "", NEVER)
        if book.plan.kind in HOLDS_GROUPS:
            return changed
        # The steps of chains have no place of their own in the plan.
        mates = [*self._mates(line), *(sent.body for sent in published)]
        until = min(changed, book.disturbed_at)
        if any(body.wish.delay is not None or body.wish.due is not None for body in mates):
            return -NEVER
        moods = {phase.mood for body in mates for phase in book.plan.phases[body.host]}
        if moods <= _RETURNS_NOTHING:
            return until
        return min(until, self._first_return(line))

    def _in_precedence_until(self, line: Line, first: Sent) -> float:
        """Return how long one of high priority is promised to go before regular ones behind it.

        Its place is before them only while it is due, and nothing of its group has come back.
        """
        wish = first.body.wish
        if first.act is Act.FOLLOW or wish.delay is not None or wish.due is not None:
            return -NEVER
        return min(self._book.disturbed_at, self._first_return(line))

    def _first_return(self, line: Line) -> float:
        return min(
            (self._returned.get(body.number, NEVER) for body in self._mates(line)), default=NEVER
        )

    def _mates(self, line: Line) -> list[Body]:
        """Return the bodies of a group, in whichever pool."""
        queue, _, group = line
        return [
            body
            for body in self._book.plan.bodies
            if body.group == group and queue in self._places[body.number]
        ]

    def _judge_pair(self, first: int, second: int, until: float) -> None:
        book = self._book
        cancelled = [each.began for each in book.cancels[first]]
        ended = min([*book.acceptances[first], *book.kept[first], *cancelled], default=NEVER)
        passed = min(book.acceptances[second], default=NEVER)
        if passed < min(ended, until):
            book.violate("FIFO-1", f"body {second} was delivered before body {first} of its group")


def _number_of(token: str | None) -> int | None:
    """Return the body that a message is; None: it is a tick."""
    kind, _, number = (token or "").partition("-")
    return int(number) if kind == "tok" else None


def _may_not_pass(first: Body, second: Body) -> bool:
    """Return whether the second, published later, has to wait for the first."""
    return first.level == HIGH or second.level != HIGH
