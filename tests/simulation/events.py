"""What happens in a world, as it is judged: publications, ends, and rules that are broken."""

from collections import defaultdict
from collections.abc import Callable
from enum import StrEnum
from typing import Final

from msgspec import Struct

from tests.simulation.plan import Act, Body, Kind, WorldPlan

# What breaks no connection, ends no lease and stops no router.
CALM: Final = frozenset({Act.CLOCK, Act.STORE, Act.REPLAY, Act.SLOW, Act.POOLS})
NEVER: Final = float("inf")


class Answered(StrEnum):
    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    REJECTED = "rejected"
    UNKNOWN = "unknown"  # no answer, or an error: it may be in, or not


class Sent(Struct):
    """One publication of one body."""

    body: Body
    act: Act
    queue: int
    at: float
    answered_at: float
    answer: Answered
    call: int = -1  # what was published together has the same number, in its order


class Cancel(Struct):
    """One attempt to cancel a body."""

    began: float
    is_sure: bool = False  # it was confirmed
    asked_at: float = NEVER  # it is to end, as soon as who holds it has heard of it (CMD-13)


class Violation(Struct, frozen=True):
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.text}"


class Book:
    """What is known of a world so far."""

    def __init__(
        self, plan: WorldPlan, now: Callable[[], float], wall: Callable[[], float]
    ) -> None:
        self.plan = plan
        self.now = now
        self.wall = wall
        self.history: list[str] = []
        self.violations: list[Violation] = []
        self.sent: list[Sent] = []
        self.acceptances: defaultdict[int, list[float]] = defaultdict(list)
        self.kept: defaultdict[int, list[float]] = defaultdict(list)
        self.cancels: defaultdict[int, list[Cancel]] = defaultdict(list)  # but those refused
        self.changed_pools: dict[str, float] = {}  # since when: some of it may be elsewhere
        self.pools_back: set[str] = set()  # those of them that are there again
        # On a slow network, the lock of a strict queue in NATS is lost, and with it what is held.
        has_lock = plan.strict is not None and plan.kind is Kind.NATS
        calm = CALM - {Act.SLOW} if has_lock else CALM
        self.disturbed_at = min(
            (s.at for s in plan.steps if not s.is_of_a_producer and s.act not in calm),
            default=NEVER,
        )

    def note(self, *words: object) -> None:
        self.history.append(f"{self.now():12.4f}  " + " ".join(str(word) for word in words))

    def violate(self, rule: str, text: str) -> None:
        self.note("VIOLATION", rule, text)
        self.violations.append(Violation(rule, text))

    def published(self, sent: Sent) -> None:
        self.note(sent.act, sent.body.number, "to", sent.queue, "is", sent.answer)
        self.sent.append(sent)

    def may_have_ended(self, number: int) -> bool:
        return bool(self.acceptances[number] or self.kept[number] or self.cancels[number])
