"""Judges a world from the outside, by bodies: what was published, accepted and kept (SIM-2)."""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from msgspec import Struct

from router.core.dead_letter import Reason
from router.core.message import Message, Mode
from router.core.outcome import Answer, Cause, NoReply, Reply
from router.core.raw import as_letter
from tests.simulation.attempt_check import AttemptCheck
from tests.simulation.command_check import CommandCheck
from tests.simulation.events import NEVER, Answered, Book, Sent
from tests.simulation.loop import Process
from tests.simulation.order_check import OrderCheck
from tests.simulation.plan import (
    DEDUP_WINDOW,
    POOLS,
    SETTLED_WITHIN,
    WORK_QUEUES,
    Act,
    Body,
    Kind,
    WorldPlan,
)
from tests.simulation.strict_check import StrictCheck
from tests.simulation.traffic_check import TrafficCheck

ACCEPTS: Final = Reply(200)
BREAKER_FORGOTTEN: Final = 3600.0
EPSILON: Final = 0.001
_STANDS_STILL: Final = frozenset({Act.PAUSE, Act.STALL})
_HARMLESS: Final = frozenset({Act.CLOCK, Act.STORE, Act.REPLAY, Act.SLOW})  # no lease is lost
_COMES_AGAIN: Final = frozenset({Act.REPLAY, Act.RECREATE})
_BLAMES: Final = frozenset({Cause.NETWORK, Cause.BROKEN, Cause.TIMEOUT})


class SimPost(Struct, eq=False):
    process: Process
    message: Message
    started: float
    epoch: int = 0
    marks: tuple[tuple[str, ...], ...] = ()


class _Circuit:
    """What the breaker of one target must be, as one process sees it (MED-4)."""

    def __init__(self) -> None:
        self.epoch = 0
        self._recent: deque[bool] = deque(maxlen=10)
        self._open_until: float | None = None
        self._is_half_open = False
        self._pause = 5.0
        self._probes = 3
        self._probing = 0
        self._successes = 0
        self._errors: list[tuple[float, str]] = []  # when and to which message, 5xx in a row
        self._last = 0.0

    def start(self, now: float) -> str | None:
        """What is wrong with a request now."""
        if now - self._last > BREAKER_FORGOTTEN:
            self.__init__()  # type: ignore[misc]
        self._last = now
        if self._open_until is not None:
            if now < self._open_until - EPSILON:
                return "a request went through an open circuit"
            self._move(None, half_open=True)
        if self._is_half_open:
            if self._probing >= self._probes:
                return f"more than {self._probes} probes at once through a half-open circuit"
            self._probing += 1
        return None

    def end(self, epoch: int, now: float, *, ok: bool | None, error_of: str | None) -> None:
        """`error_of`: the message, if it failed by a 5xx."""
        if epoch != self.epoch:
            return
        if self._is_half_open:
            self._probing -= 1
            if ok is False:
                self._pause, self._probes = min(2 * self._pause, 300.0), 1
                self._move(now + self._pause)
            elif ok:
                self._successes += 1
                if self._successes == self._probes:
                    self._pause, self._probes = 5.0, 3
                    self._move(None)
        elif ok is not None:
            self._recent.append(ok or error_of is not None)
            if error_of is not None:
                self._errors.append((now, error_of))
            elif ok:
                self._errors.clear()
            if self._has_failed(now):
                self._move(now + self._pause)

    def _has_failed(self, now: float) -> bool:
        if len(self._recent) == 10 and self._recent.count(False) >= 5:
            return True
        messages = {message for _, message in self._errors}
        return len(self._errors) >= 20 and len(messages) >= 5 and now - self._errors[0][0] >= 10

    def _move(self, open_until: float | None, *, half_open: bool = False) -> None:
        self.epoch += 1
        self._open_until, self._is_half_open = open_until, half_open
        self._probing = self._successes = 0
        self._recent.clear()
        self._errors.clear()


class Oracle(Book):
    def __init__(
        self, plan: WorldPlan, now: Callable[[], float], wall: Callable[[], float]
    ) -> None:
        super().__init__(plan, now, wall)
        self.commands = CommandCheck(self)
        self.traffic = TrafficCheck(self)
        self.attempts = AttemptCheck(self)
        self.order = OrderCheck(self)
        self.strict = StrictCheck(self)
        self._by_content = {body.content: body for body in plan.bodies}
        self._open: Counter[tuple[str, ...]] = Counter()
        self._circuits: defaultdict[tuple[str, int], _Circuit] = defaultdict(_Circuit)
        self._starts: defaultdict[str, list[float]] = defaultdict(list)  # of deliveries by pool R
        self._sent_before: set[tuple[str, int]] = set()
        self._holders: dict[int, Process] = {}
        self._posted: defaultdict[int, list[float]] = defaultdict(list)
        self._handed_at: dict[int, float] = {}
        self._count = Counter(
            number for step in plan.steps if step.act is not Act.CANCEL for number in step.bodies
        )
        self._places = _places(plan)

    # What targets see.

    def post_started(self, post: SimPost) -> None:
        body = self._body_of(post)
        name = post.process.name
        self.note(name, "posts", body.number)
        self._posted[body.number].append(post.started)
        handed_at = self._handed_at.get(body.number, -NEVER)
        self._judge_cancels(body.number, "is sent by who got it later", since=handed_at)
        post.marks = tuple(mark for mark, _ in self._marks(post, body))
        for mark, rule in self._marks(post, body):
            self._open[mark] += 1
            # Each queue delivers its own copy.
            most = len(self._places[body.number]) if rule == "P2" else 1
            if rule == "P2" and self._may_be_stored_alone(body):
                most += 1
            if self._open[mark] > max(most, 1):
                self.violate(rule, f"{mark[1:]} is being sent twice at once by {name}")
        pool = post.message.pool or ""
        self._open[name, "pool", pool] += 1
        limit = POOLS.get(pool)
        is_touched = pool in self.changed_pools
        if limit and self._open[name, "pool", pool] > limit and not is_touched:
            self.violate("POOL-6", f"{self._open[name, 'pool', pool]} requests at once in {pool}")
        circuit = self._circuits[name, body.host]
        if problem := circuit.start(post.started):
            self.violate("MED-4", f"{problem} to t{body.host}")
        post.epoch = circuit.epoch
        self.traffic.posted(name, body, circuit.epoch)
        self.attempts.posted(name, body)
        self.order.posted(post.process, body)
        self.strict.posted(body.number)
        self._note_rate(post, body)
        self.commands.posted(body, post.message)
        holder = self._holders.get(body.number, post.process)
        if self._may_come_from_elsewhere(holder):
            holder = post.process
        if holder is not post.process:
            self.violate("BRK-5", f"{name} sends body {body.number} although another has it")

    def _may_come_from_elsewhere(self, holder: Process) -> bool:
        """Return whether what a process has had from an order store may be in its queue again."""
        plan = self.plan
        is_shared = plan.routers > 1 and plan.kind not in WORK_QUEUES
        return plan.strict is not None and (is_shared or not holder.is_alive)

    def post_ended(self, post: SimPost, answer: Answer | None) -> None:
        """None: it was cancelled."""
        body = self._body_of(post)
        self.note(post.process.name, "got", _words(answer), "for", body.number)
        for mark in post.marks:
            self._open[mark] -= 1
        self._open[post.process.name, "pool", post.message.pool or ""] -= 1
        if answer is not None and self._is_calm:  # leases are extended when a half is used up
            latest = self.now() - self.plan.lease / 2
            self._judge_cancels(body.number, "is not stopped", since=latest)
        ok = None if answer is None else not isinstance(answer, NoReply)
        if isinstance(answer, NoReply) and answer.cause not in _BLAMES:
            ok = None
        error_of: str | None = None
        if isinstance(answer, Reply) and answer.status // 100 == 5:
            ok, error_of = False, post.message.id
        circuit = self._circuits[post.process.name, body.host]
        circuit.end(post.epoch, self.now(), ok=ok, error_of=error_of)
        self.traffic.answered(post.process.name, body, circuit.epoch, answer, post.started)
        self.attempts.answered(post.process.name, body, answer)
        self.order.answered(body)
        if answer != ACCEPTS:
            self.strict.failed(body.number)

    def accepted(self, post: SimPost) -> None:
        body = self._body_of(post)
        self.note("target accepts", body.number)
        self.acceptances[body.number].append(self.now())
        self.commands.accepted(body)

    def returned(self, process: Process, number: int) -> None:
        """A router gives it back to its queue."""
        self.attempts.settled(process.name, number)
        self.order.returned(number)

    def stored(self, name: str, queue: str, contents: Sequence[bytes]) -> None:
        """A router has moved these to its order store."""
        found = [self.find(content) for content in contents]
        numbers = [body.number for body in found if body is not None]
        self.note(name, "has stored", ", ".join(map(str, numbers)), "in", queue)
        for number in numbers:
            if not self.kept[number]:  # else its letter has moved, and it is not tried again
                self.attempts.stored(name, number)

    def handed_over(self, content: bytes, process: Process) -> None:
        """By a work queue: whoever had it before may not begin to send it any more."""
        body = self.find(content)  # a replay may have changed it
        if body is not None and self._count[body.number] == 1:  # else there may be several copies
            self._holders[body.number] = process
            self._handed_at[body.number] = self.now()
            if not self.kept[body.number]:  # else it is its letter, replayed
                self.attempts.handed_over(process.name, body.number)

    def claimed(self, contents: Sequence[bytes]) -> None:
        """By one call, in this order."""
        found = [body for content in contents if (body := self.find(content))]
        levels = [body.level for body in found if body.is_alone]
        if levels != sorted(levels, reverse=True):
            self.violate("CMD-6", f"a work queue hands out priorities in the order {levels}")

    def _body_of(self, post: SimPost) -> Body:
        body = self.commands.body_of(post.message.id, post.message.token or "")
        assert body is not None
        return body

    def _marks(self, post: SimPost, body: Body) -> Iterable[tuple[tuple[str, ...], str]]:
        name, message = post.process.name, post.message
        # Brokers without a place for a time get it in the body: each publication is another one.
        if body.wish.delay is None or self.plan.kind in WORK_QUEUES:
            yield (name, "message", str(body.number)), "P2"
        if message.mode is not Mode.IMMEDIATE and message.pool not in self.pools_back:
            yield (name, "group", message.pool or "", message.group or ""), "P3"

    def _may_be_stored_alone(self, body: Body) -> bool:
        """Return whether its queue and its order store may both have it, after a crash."""
        is_direct = self.plan.strict is not None and self.plan.kind not in WORK_QUEUES
        return is_direct and body.dispatch is not None

    def _note_rate(self, post: SimPost, body: Body) -> None:
        rate, name = self.plan.rate, post.process.name
        if post.message.pool != "R" or rate is None or "R" in self.changed_pools:
            return
        if (name, body.number) in self._sent_before:
            return  # maybe a further try of one delivery, which needs no new permit
        self._sent_before.add((name, body.number))
        starts = self._starts[name]
        starts.append(post.started)
        for count, since in enumerate(reversed(starts), 1):
            if count > rate + rate * (post.started - since) / 60 + 1 + EPSILON:
                took = post.started - since
                self.violate("POOL-4", f"{count} deliveries in {took:g} s by pool R")
                return

    # What is published and kept.

    def published(self, sent: Sent) -> None:
        super().published(sent)
        self.traffic.published(sent)

    def cancelled(self, number: int) -> None:
        """It was confirmed: unless its lease may have been lost, nobody is sending it."""
        self.note("cancelled:", number)
        is_open = any(
            count and mark[1:] == ("message", str(number)) for mark, count in self._open.items()
        )
        if is_open and self._is_calm and self._count[number] == 1:
            self.violate("CMD-2", f"body {number} was cancelled while it was being sent")

    def _judge_cancels(self, number: int, what: str, *, since: float) -> None:
        """Whoever holds it hears that it is to end, and who gets it next knows (CMD-13)."""
        asked_at = min((each.asked_at for each in self.cancels[number]), default=NEVER)
        comes_again = any(step.act in _COMES_AGAIN for step in self.plan.steps)
        slack = 0.1 if self.plan.kind is Kind.SQLITE else 3.0  # of the network
        if since > asked_at + slack and self._count[number] == 1 and not comes_again:
            self.violate("CMD-13", f"body {number} {what}, to be cancelled since {asked_at:g}")

    @property
    def _is_calm(self) -> bool:
        return all(step.is_of_a_producer or step.act in _HARMLESS for step in self.plan.steps)

    def find(self, content: bytes) -> Body | None:
        content = as_letter(content)  # an order store keeps facts in front of it
        return self._by_content.get(content) or self.commands.find(content)

    def letter_kept(self, content: bytes, reason: Reason) -> None:
        body = self.find(content)
        if body is None:
            self.violate("DLQ-1", f"a letter holds what nobody published: {content!r}")
            return
        self.note("kept as a dead letter:", body.number, f"({reason.value})")
        self.kept[body.number].append(self.now())
        self.attempts.letter_kept(body, reason)

    # What must hold in the end.

    def judge(self, stored: Iterable[bytes], still_held: Sequence[str]) -> None:
        in_store = {body.number for content in stored if (body := self.find(content))}
        in_store |= self.strict.discarded
        for text in still_held:
            self.violate("P1", f"not at its end after hours of peace: {text}")
        for number, times in self.kept.items():
            if not times or number in in_store:
                continue
            self.violate("DLQ-1", f"the dead letter of body {number} is gone from the store")
        for sent in self.sent:
            self._judge_publication(sent, in_store)
        self._judge_places()
        self.order.judge()
        if self.plan.strict is not None:
            self.strict.judge()

    def _judge_publication(self, sent: Sent, in_store: set[int]) -> None:
        number = sent.body.number
        if sent.answer is Answered.DUPLICATE and not self._has_living_twin(sent):
            self.violate("WQ-1", f"body {number} was called a duplicate of nothing")
        if sent.answer is not Answered.ACCEPTED:
            return
        since = sent.at - SETTLED_WITHIN
        kept_since = sent.at if sent.act is Act.REPLAY else since
        if any(at >= since for at in self.acceptances[number]):
            return
        if any(at >= kept_since for at in self.kept[number]) and number in in_store:
            return
        if any(each.began >= since for each in self.cancels[number]):
            return
        self.violate(
            "P1", f"body {number} ({sent.act} at {sent.at:g}) was neither accepted nor kept"
        )

    def _judge_places(self) -> None:
        """No queue's copy stands for that of another."""
        places: defaultdict[int, set[int]] = defaultdict(set)
        for sent in self.sent:
            if sent.answer is Answered.ACCEPTED and sent.act in {Act.SEND, Act.PUBLISH}:
                places[sent.body.number].add(sent.queue)
        for number, queues in places.items():
            ends = len(self.acceptances[number]) + len(self.kept[number])
            if ends + len(self.cancels[number]) < len(queues):
                text = f"body {number} is in {len(queues)} queues and has not as many ends"
                self.violate("ROUTE-3", text)

    def _has_living_twin(self, sent: Sent) -> bool:
        """Whether the same body was published within the window and is not dead.

        A router that ends between a dead letter and its ACK leaves the message in its queue, where
        the next delivery may be accepted after all.
        """
        earlier: defaultdict[int, list[float]] = defaultdict(list)
        for each in self.sent:
            if (
                each is not sent
                and each.body.sort == sent.body.sort
                and each.answer in {Answered.ACCEPTED, Answered.UNKNOWN}
                and each.at <= sent.answered_at
            ):
                earlier[each.body.number].append(each.at)
        return any(self._lives(number, times, sent) for number, times in earlier.items())

    def _lives(self, number: int, published: list[float], sent: Sent) -> bool:
        if self.plan.routers > 1 and any(
            sent.at - DEDUP_WINDOW - SETTLED_WITHIN < at <= sent.answered_at
            for at in self.acceptances[number]
        ):
            return True  # and one that had lost its lease may have stored it as dead after that
        # A message is dead once its ACK has arrived. Routers that stand still send that late.
        still = sum(step.seconds for step in self.plan.steps if step.act in _STANDS_STILL)
        settled = sent.at - SETTLED_WITHIN - still
        died = max((at for at in self.kept[number] if at < settled), default=-1e9)
        seen = [at for at in self._posted[number] if at <= sent.answered_at]
        seen += [at for at in self.acceptances[number] if at <= sent.answered_at]
        return any(at > died for at in published + seen)


def _places(plan: WorldPlan) -> defaultdict[int, set[int]]:
    """Return the queues of each body. What follows a message goes to the queue of that."""
    places: defaultdict[int, set[int]] = defaultdict(set)
    for step in plan.steps:
        if step.act is not Act.CANCEL:
            for number in step.bodies:
                _add_place(plan.bodies[number], step.queue, places)
    return places


def _add_place(body: Body, queue: int, places: defaultdict[int, set[int]]) -> None:
    places[body.number].add(queue)
    for step in body.then:
        _add_place(step, queue, places)


def _words(answer: Answer | None) -> str:
    if answer is None:
        return "cancelled"
    return str(answer.status) if isinstance(answer, Reply) else answer.detail
