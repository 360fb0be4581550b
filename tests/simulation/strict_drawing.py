"""Draws strict order: groups whose messages fail now and then, and routers that end meanwhile."""

import random
from typing import Final

from msgspec.structs import replace

from router.core.config import OnFailure
from tests.simulation.plan import (
    HOSTS,
    WORK_QUEUES,
    Act,
    Body,
    Kind,
    Mood,
    Phase,
    Step,
    Strict,
    WorldPlan,
)

STRICT_KINDS: Final = frozenset({Kind.SQLITE, Kind.RABBITMQ, Kind.NATS, Kind.ACTIVEMQ})
SEVERAL_ROUTERS: Final = WORK_QUEUES | {Kind.RABBITMQ}  # whose consumer is exclusive
ON_FAILURE: Final = (OnFailure.PARK, OnFailure.PARK, OnFailure.BLOCK, OnFailure.SKIP)
HOLDS: Final = 0.4  # of these worlds
WITHOUT_ORDER: Final = 0.1  # of the messages: no group holds them back
FAULTS: Final = (
    Act.KILL,
    Act.KILL,
    Act.KILL,
    Act.PAUSE,
    Act.STALL,
    Act.STALL,
    Act.OUTAGE,
    Act.BREAK,
    Act.LOSSES,
    Act.HANGS,
    Act.SLOW,
    Act.STORE,
    Act.REPLAY,
    Act.RELEASE,
)
# What refuses a message for now, and what makes a dead letter of it if it may not fail often.
FAILS: Final = (
    Mood.FAILS,
    Mood.FAILS,
    Mood.DENIES,
    Mood.LIMITS,
    Mood.DEFERS,
    Mood.BUSY,
    Mood.REFUSES,
    Mood.CUTS,
    Mood.HANGS,
)


def draw_strict(rng: random.Random, plan: WorldPlan) -> WorldPlan:
    """Replace what is published. Where no broker keeps others away, there is one router."""
    strict = Strict(rng.choice(ON_FAILURE), holds=rng.random() < HOLDS)
    drawing = _StrictDrawer(rng, plan, strict)
    for _ in range(rng.choice((1, 2, 2, 3, 4))):
        drawing.publish_a_group()
    for _ in range(rng.choice((0, 1, 2, 3, 5))):
        drawing.fault()
    return replace(
        plan,
        routers=drawing.routers,
        connections=1,
        bodies=tuple(drawing.bodies),
        steps=tuple(sorted(drawing.steps, key=lambda step: step.at)),
        phases=tuple(_phases(rng) for _ in range(HOSTS)),
        batches=(),
        beats=(),
        replies_elsewhere=False,
        strict=strict,
    )


class _StrictDrawer:
    def __init__(self, rng: random.Random, plan: WorldPlan, strict: Strict) -> None:
        self.routers = plan.routers if plan.kind in SEVERAL_ROUTERS else 1
        self.bodies: list[Body] = []
        self.steps: list[Step] = []
        self._rng = rng
        self._plan = plan
        # One transaction at the queue. A router may publish out of order when an answer is lost.
        self._act = Act.SEND if plan.kind in WORK_QUEUES else Act.PUBLISH
        self._faults = FAULTS if strict.holds else FAULTS[:-1]

    def publish_a_group(self) -> None:
        """Publish messages of a group one after the other, some of them together."""
        rng = self._rng
        queue, host = rng.randrange(self._plan.queues), rng.randrange(HOSTS)
        pool, group = rng.choice((None, "P", "Q", "R")), rng.choice(("g", "g", "h"))
        at = rng.random() * 5
        for _ in range(rng.choice((1, 2, 4, 8))):
            first = len(self.bodies)
            for number in range(first, first + rng.choice((1, 1, 2, 6))):
                is_free = rng.random() < WITHOUT_ORDER
                mode = rng.choice(("NEXT_ON_ERROR", "IMMEDIATE")) if is_free else None
                to = host if rng.random() < 0.8 else rng.randrange(HOSTS)
                self.bodies.append(Body(number, f"m{number}", to, pool, group, mode))
            numbers = tuple(range(first, len(self.bodies)))
            router = rng.randrange(self.routers)
            self.steps.append(Step(round(at, 3), self._act, numbers, queue=queue, router=router))
            at += rng.choice((0.0, 0.01, 0.3, 2.0, 10.0, 40.0)) * (0.5 + rng.random())

    def fault(self) -> None:
        """Have something go wrong: soon after a publication, or at any time."""
        rng = self._rng
        published = [step.at for step in self.steps if step.is_of_a_producer]
        at = rng.choice(published) + rng.choice((0.0, 0.01, 0.05, 0.2, 1.0, 5.0, 15.0))
        act = rng.choice(self._faults)
        seconds = rng.choice((0.5, 3.0, 12.0, 35.0))
        if act in {Act.PAUSE, Act.STALL}:
            seconds = rng.choice((2.0, 31.0, 65.0))
        elif act is Act.KILL and self._plan.kind is Kind.SQLITE and rng.random() < 0.2:
            act = Act.REBOOT
        self.steps.append(
            Step(
                round(at + rng.random() / 20, 3),
                act,
                router=rng.randrange(self.routers),
                seconds=seconds,
                share=rng.choice((0.1, 0.3, 0.6)),
            )
        )


def _phases(rng: random.Random) -> tuple[Phase, ...]:
    """Return how a target is: it often refuses some of the requests only."""
    times = [0.0, *sorted(round(rng.random() * 60, 3) for _ in range(rng.choice((0, 1, 2))))]
    moods = (*FAILS, Mood.OK, Mood.OK, Mood.SLOW)
    return tuple(Phase(at, rng.choice(moods), rng.choice((0.1, 0.3, 0.3, 1.0))) for at in times)
