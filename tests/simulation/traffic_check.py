"""Judges traffic: silences are kept, limits follow the target, no pool waits without need (SIM-2).

What targets are asked and what they answer is seen from outside. Every 0.7 s the gates, shares and
pools of each router are compared with that.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

from msgspec import Struct

from router.core.message import DEFAULT_POOL
from router.core.outcome import Answer, Cause, NoReply, Reply
from router.engine.pool import ProcessPool
from router.engine.queue_manager import QueueManager
from router.engine.targets import TargetOrigin
from tests.simulation.events import Answered, Book, Sent
from tests.simulation.plan import PLAIN, POOLS, Act, Body, Kind, Mood

EPSILON: Final = 0.001
SILENCING: Final = frozenset({429, 503})
BUSY: Final = frozenset({429, 502, 503, 504})
MIN_SILENCE: Final = 1.0
MAX_SILENCE: Final = 900.0
CUT: Final = 0.7
SLOW_START: Final = 3
MAX_HOLD: Final = 60.0  # so long the limit may stay below what was refused
# A message that its router could deliver at once is found within this time, whatever is in front.
FOUND_WITHIN: Final = 20.0
_UNHURRIED: Final = frozenset({Mood.OK, Mood.SLOW})


class _Gate(Struct):
    """What one process must know of one target at least (GATE-1, GATE-2)."""

    silent_until: float = -math.inf
    open: int = 0
    floor: float = math.inf  # the limit must not be lower
    cut_at: float = -math.inf
    hungry_since: float | None = None  # lanes wait for it, and it refuses nothing
    most_open: int = 0  # in the first minute of that
    answers: int = 0  # after that minute
    was_idle: bool = False  # at the last look, lanes were parked although there was a place

    def ask(self, now: float) -> bool:
        """Note a request. Return whether it may start."""
        self.open += 1
        return now >= self.silent_until - EPSILON

    def hear(self, answer: Answer | None, now: float, began: float) -> None:
        is_busy = _is_busy(answer)
        if is_busy:
            self._refused(now, began)
        elif isinstance(answer, Reply) and self.hungry_since is not None:
            self.answers += now >= self.hungry_since + MAX_HOLD
        self.open -= 1
        if isinstance(answer, Reply) and answer.status in SILENCING and answer.retry_after:
            seconds = min(max(float(answer.retry_after), MIN_SILENCE), MAX_SILENCE)
            self.silent_until = max(self.silent_until, now + seconds)
            self.hungry_since = None

    def _refused(self, now: float, began: float) -> None:
        self.hungry_since = None
        if began > self.cut_at:
            self.floor = max(min(self.floor, self.open) * CUT, 1.0)
            self.cut_at = now
        elif self.open > 1:
            self.floor = min(self.floor, self.open - 1)

    def restart(self, now: float) -> None:
        """Its circuit has changed."""
        self.floor, self.cut_at, self.hungry_since = 1.0, now, None

    def look(self, target: TargetOrigin, now: float) -> str | None:
        """Return what is wrong with the gate of a target for which lanes wait."""
        # A place may be taken for a request that has not started: one more than we see is open.
        if target.gate.limit < self.floor - 1 - EPSILON:
            return f"GATE-2 the limit is {target.gate.limit:g}, not {self.floor:g} or more"
        is_idle = target.open < target.limit
        if is_idle and self.was_idle:
            return f"GATE-5 lanes wait, and {target.open} of {target.limit:g} places are taken"
        self.was_idle = is_idle
        if self.hungry_since is None:
            self.hungry_since, self.most_open, self.answers = now, 0, 0
        if now < self.hungry_since + MAX_HOLD:
            self.most_open = max(self.most_open, self.open)
        elif self.open > self.most_open:
            self.hungry_since = None
        elif self.answers > 3 * self.most_open + 3:
            return f"GATE-2 {self.answers} good answers, and still {self.most_open} at once"
        return None


def _is_busy(answer: Answer | None) -> bool:
    if isinstance(answer, NoReply):
        return answer.cause is Cause.TIMEOUT
    return answer is not None and answer.status in BUSY


class TrafficCheck:
    def __init__(self, book: Book) -> None:
        self._book = book
        self._gates: defaultdict[tuple[str, int], _Gate] = defaultdict(_Gate)
        self._epochs: dict[tuple[str, int], int] = {}
        self._count = Counter(
            number
            for step in book.plan.steps
            if step.act is not Act.CANCEL
            for number in step.bodies
        )
        self._seen: set[int] = set()  # bodies of which a target has heard
        # A router waits for the lock of a strict queue in NATS before it receives anything.
        self._is_prompt = book.plan.strict is None or book.plan.kind is not Kind.NATS
        self._unseen: dict[int, Sent] = {}  # published, and not seen
        self._reachable: dict[int, float] = {}  # of these, since when their pool could take them
        self._uneven: Counter[tuple[str, str]] = Counter()  # looks at shares that do not add up

    # What targets see.

    def posted(self, name: str, body: Body, epoch: int) -> None:
        self._seen.add(body.number)
        self._unseen.pop(body.number, None)
        gate, now = self._gate(name, body.host, epoch), self._book.now()
        if not gate.ask(now):
            left = gate.silent_until - now
            self._book.violate(
                "GATE-1", f"body {body.number} is sent to t{body.host} in a silence of {left:g} s"
            )

    def answered(
        self, name: str, body: Body, epoch: int, answer: Answer | None, began: float
    ) -> None:
        """`epoch`: of the circuit, after this answer."""
        self._gates[name, body.host].hear(answer, self._book.now(), began)
        self._gate(name, body.host, epoch)

    def _gate(self, name: str, host: int, epoch: int) -> _Gate:
        gate = self._gates[name, host]
        if self._epochs.setdefault((name, host), epoch) != epoch:
            self._epochs[name, host] = epoch
            gate.restart(self._book.now())
        return gate

    # What is published and kept.

    def published(self, sent: Sent) -> None:
        body = sent.body
        if (
            sent.answer is Answered.ACCEPTED
            and sent.act in {Act.PUBLISH, Act.SEND}
            and self._count[body.number] == 1
            and body.number not in self._seen
            and body.dispatch == "IMMEDIATE"
            and not body.malformed
            and body.wish == PLAIN
            and self._is_prompt
        ):
            self._unseen[body.number] = sent

    def look(self, name: str, manager: QueueManager) -> None:
        """Look at the books of one router."""
        for target in manager.deps.targets:
            self._look_at_target(name, target)
        for pool in manager.pools.values():
            self._look_at_shares(name, pool)

    def _look_at_target(self, name: str, target: TargetOrigin) -> None:
        host = int(target.origin.removeprefix("http://t").partition(".")[0])
        gate = self._gates[name, host]
        is_plain = not target.is_silent and target.breaker.open_since is None
        if not target.waiting or not is_plain or target.breaker.is_suspect:
            gate.hungry_since, gate.was_idle = None, False
            return
        if problem := gate.look(target, self._book.now()):
            rule, _, text = problem.partition(" ")
            self._book.violate(rule, f"t{host} in {name}: {text}")

    def _look_at_shares(self, name: str, pool: ProcessPool) -> None:
        """Every worker is counted in one flow of its own pool."""
        key = (name, pool.code)
        opened = sum(flow.open for flow in pool.flows.values())
        if not pool.is_shared or pool.draining or opened == pool.permits.out:
            del self._uneven[key]
            return
        self._uneven[key] += 1
        if self._uneven[key] > 1:  # else a try may just be on its way
            text = f"{pool.permits.out} workers of pool {pool.code}, and {opened} in its flows"
            self._book.violate("SHARE-1", text)

    def reach(self, managers: Sequence[QueueManager]) -> None:
        """No message waits while its pool has room everywhere (ROUTE-5)."""
        book, now = self._book, self._book.now()
        if now >= book.disturbed_at:
            self._unseen.clear()
        for number, sent in list(self._unseen.items()):
            if book.may_have_ended(number):
                del self._unseen[number]
            elif self._is_reachable(sent, managers):
                since = self._reachable.setdefault(number, now)
                if now - since > FOUND_WITHIN:
                    del self._unseen[number]
                    text = f"body {number} waits, and pool {sent.body.pool} has had room since"
                    book.violate("ROUTE-5", f"{text} {since:g}")
            else:
                self._reachable.pop(number, None)

    def _is_reachable(self, sent: Sent, managers: Iterable[QueueManager]) -> bool:
        book, body = self._book, sent.body
        code = body.pool if body.pool in POOLS else DEFAULT_POOL
        phases = book.plan.phases[body.host]
        if code in book.changed_pools or any(phase.mood not in _UNHURRIED for phase in phases):
            return False
        return all(
            _has_free_worker(manager, code) and not _is_probing(manager, f"q{sent.queue}")
            for manager in managers
        )


def _is_probing(manager: QueueManager, queue: str) -> bool:
    """Return whether all targets of a queue were down lately, so that it is not polled (MED-4)."""
    consumer = manager.consumers.get(queue)
    return consumer is not None and consumer.flow._is_dark


def _has_free_worker(manager: QueueManager, code: str) -> bool:
    pool = manager.pools.get(code)
    if pool is None:
        return True  # it is made when it is needed
    is_free = pool.permits.is_free and pool.has_room and not pool.draining
    return is_free and not pool.lanes.waiting and not pool.parked and not pool.runner.pausing
