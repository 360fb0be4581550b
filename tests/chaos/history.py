"""What producers, targets and stores saw during a run, and the checker that judges it.

Everything is observed from outside the router and compared by body. The checker is a function of a
history, so that made-up histories can test it.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import takewhile
from typing import Final

Body = Mapping[str, object]

SLOW_POOL: Final = "SLOW"
MAX_WAIT_SECONDS: Final = 20.0  # of a fast pool behind a slow one, while a router is up


def producer_of(marker: str) -> str:
    return marker.rpartition("-")[0]


def marker_of(body: Body) -> str:
    return str(body["mediationTarget"]).rpartition("/")[2]


class ChaosReply(Enum):
    """What a target does with a message."""

    OK = auto()
    SLOW = auto()  # accepts it after a while
    FLAKY = auto()  # answers 503 to its first POST, then accepts it
    DEAD = auto()  # answers 404, always


class PostOutcome(Enum):
    """How one POST ended, as the target sees it."""

    OPEN = auto()
    ACCEPTED = auto()
    REFUSED = auto()  # 404
    FAILED = auto()  # 503
    CUT = auto()  # the router was gone before the reply


FINAL = frozenset({PostOutcome.ACCEPTED, PostOutcome.REFUSED})


@dataclass(frozen=True)
class Item:
    """One message to publish. The marker is in its target's path, and no other body has it."""

    marker: str
    body: Body
    reply: ChaosReply = ChaosReply.OK

    @property
    def group(self) -> str | None:
        group = self.body.get("messageGroupId")
        return None if group is None else f"{self.body.get('poolCode')}/{group}"


@dataclass
class ChaosPost:
    """One POST that a target received."""

    marker: str
    incarnation: int  # of the router: the number of its start
    began: float
    ended: float = float("inf")
    outcome: PostOutcome = PostOutcome.OPEN

    @property
    def is_open(self) -> bool:
        return self.outcome is PostOutcome.OPEN


@dataclass(frozen=True, order=True)
class ChaosViolation:
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.text}"


@dataclass
class History:
    """A run so far."""

    published: dict[str, Item] = field(default_factory=dict)  # by marker, in publication order
    answered: set[str] = field(default_factory=set)  # markers that the router or queue took over
    in_doubt: set[str] = field(default_factory=set)  # markers that were published again
    posts: list[ChaosPost] = field(default_factory=list)  # in the order of their arrival
    kept: list[Body] = field(default_factory=list)  # dead letters at the end
    left: list[Body] = field(default_factory=list)  # in the queue at the end
    strange: list[str] = field(default_factory=list)  # requests and crashes that must not be
    events: Counter[str] = field(default_factory=Counter)  # of the routers' logs
    done: set[str] = field(default_factory=set)  # markers with a final reply
    duplicates: Counter[int] = field(default_factory=Counter)  # by incarnation
    open: Counter[int] = field(default_factory=Counter)  # POSTs without a reply, by incarnation
    ended: Counter[str] = field(default_factory=Counter)  # messages with a final reply, by producer
    taken_at: dict[str, float] = field(default_factory=dict)  # when `answered` got each marker
    alive: list[tuple[float, float]] = field(default_factory=list)  # from when to when a router was

    @property
    def waiting(self) -> set[str]:
        """Return the markers that were answered and have no final reply."""
        return self.answered - self.done

    @property
    def backlog(self) -> int:
        return len(self.published) - len(self.done)

    def since(self, incarnation: int) -> Iterator[ChaosPost]:
        """Yield the POSTs of this process and later ones, newest first."""
        return takewhile(lambda post: post.incarnation >= incarnation, reversed(self.posts))

    def begin(self, marker: str, incarnation: int, at: float) -> ChaosPost:
        """Record that a POST has arrived."""
        post = ChaosPost(marker, incarnation, at)
        self.posts.append(post)
        self.open[incarnation] += 1
        self.duplicates[incarnation] += marker in self.done
        return post

    def end(self, post: ChaosPost, outcome: PostOutcome, at: float) -> None:
        """Record its reply, just before it is written."""
        post.outcome, post.ended = outcome, at
        self.open[post.incarnation] -= 1
        if outcome in FINAL and post.marker not in self.done:
            self.done.add(post.marker)
            self.ended[producer_of(post.marker)] += 1

    def note_start(self, at: float) -> None:
        self.alive.append((at, float("inf")))

    def note_end(self, at: float) -> None:
        if self.alive and self.alive[-1][1] > at:
            self.alive[-1] = (self.alive[-1][0], at)

    def waits(self) -> Iterator[tuple[str, float]]:
        """Yield how long each message waited for its first POST while a router was up.

        Not those of the slow pool, which wait for each other.
        """
        first = {post.marker: post.began for post in reversed(self.posts)}
        for marker, taken in self.taken_at.items():
            if marker in first and self.published[marker].body.get("poolCode") != SLOW_POOL:
                ends = ((max(up, taken), min(down, first[marker])) for up, down in self.alive)
                yield marker, sum(max(end - begin, 0.0) for begin, end in ends)


class Duplicates(Enum):
    """When a message may be sent again after it was accepted."""

    AFTER_A_CRASH = auto()  # by another process
    AFTER_A_FAULT = auto()  # by the same process, too: its ACK or its lease was lost


def check(
    history: History, *, duplicates: Duplicates = Duplicates.AFTER_A_CRASH
) -> Sequence[ChaosViolation]:
    """Return what a router must never do and did."""
    return [
        *_lost(history),
        *_out_of_order(history),
        *_at_once(history),
        *(_repeated(history) if duplicates is Duplicates.AFTER_A_CRASH else ()),
        *(ChaosViolation("left", f"{body} is still in the queue") for body in history.left),
        *(ChaosViolation("strange", text) for text in history.strange),
        *_held_up(history),
    ]


def _lost(history: History) -> Iterator[ChaosViolation]:
    """P1: whatever was in the queue was accepted, or is a dead letter with the same body."""
    accepted = {post.marker for post in history.posts if post.outcome is PostOutcome.ACCEPTED}
    was_in = history.answered | {post.marker for post in history.posts}
    for marker, item in history.published.items():
        there = marker in accepted or item.body in history.kept or item.body in history.left
        if marker in was_in and not there:
            yield ChaosViolation("lost", f"{item.body} was neither accepted nor kept")


def _out_of_order(history: History) -> Iterator[ChaosViolation]:
    """P3: no POST before every earlier message of the group had its final reply.

    A message that never got one is not judged here: it is lost, or left.
    """
    waiting: dict[str, dict[str, None]] = defaultdict(dict)  # by group, in publication order
    for item in history.published.values():
        if item.group is not None and item.marker in history.done:
            waiting[item.group][item.marker] = None
    for post, has_ended in _events(history.posts):
        item = history.published[post.marker]
        if item.group is None or post.marker not in history.done:
            continue
        first = next(iter(waiting[item.group]), None)
        if has_ended and post.outcome in FINAL:
            waiting[item.group].pop(post.marker, None)
        elif not has_ended and post.marker in waiting[item.group] and post.marker != first:
            yield ChaosViolation("order", f"{post.marker} was sent before {first} of {item.group}")


def _at_once(history: History) -> Iterator[ChaosViolation]:
    """P2, P3: one router never has two open POSTs of one message, or of one group."""
    busy: dict[tuple[int, str], str] = {}
    for post, has_ended in _events(history.posts):
        item = history.published[post.marker]
        key = (post.incarnation, item.group or f"message {post.marker}")
        if has_ended:
            busy.pop(key, None)
        elif key in busy:
            yield ChaosViolation("at once", f"{post.marker} was sent while {busy[key]} was open")
        else:
            busy[key] = post.marker


def _repeated(history: History) -> Iterator[ChaosViolation]:
    """P1: only what a crash left in doubt is sent again after it was accepted."""
    accepted: dict[str, set[int]] = defaultdict(set)
    for post, has_ended in _events(history.posts):
        if has_ended and post.outcome is PostOutcome.ACCEPTED:
            accepted[post.marker].add(post.incarnation)
        elif post.marker in history.in_doubt:
            continue  # it may be in the queue twice
        elif not has_ended and post.incarnation in accepted[post.marker]:
            text = f"{post.marker} was accepted, and sent again by the same process"
            yield ChaosViolation("repeated", text)


def _held_up(history: History) -> Iterator[ChaosViolation]:
    """P5: a slow pool holds up no other pool of its queue. Judged only if there is one."""
    if all(item.body.get("poolCode") != SLOW_POOL for item in history.published.values()):
        return
    for marker, seconds in history.waits():
        if seconds > MAX_WAIT_SECONDS:
            yield ChaosViolation("held up", f"{marker} waited for {seconds:.1f} s")


def _events(posts: Iterable[ChaosPost]) -> Iterator[tuple[ChaosPost, bool]]:
    """Yield the beginnings (False) and the ends (True) in order; at one instant ends go first."""
    moments = [(post.began, 1, post) for post in posts]
    moments += [(post.ended, 0, post) for post in posts]
    for _, kind, post in sorted(moments, key=lambda moment: moment[:2]):
        yield post, kind == 0
