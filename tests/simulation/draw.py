"""Draws a world from its seed."""

import random
from collections import Counter
from typing import Final

from msgspec.structs import replace

from tests.simulation.command_drawing import draw_commands
from tests.simulation.drawing import Drawer
from tests.simulation.plan import HOSTS, WORK_QUEUES, Act, Kind, Mood, Phase, Step, WorldPlan
from tests.simulation.strict_drawing import STRICT_KINDS, draw_strict
from tests.simulation.traffic_drawing import draw_outage, draw_traffic

KINDS: Final = tuple(Kind)
FLOODS: Final = 0.03  # of all worlds
COMMANDS: Final = 0.25  # likewise
COMMANDS_IN_WORK_QUEUES: Final = 0.6  # which take more kinds of them
SHORT_LEASE: Final = 15.0
LAPSES: Final = 0.15  # of worlds with a work queue
TRAFFIC: Final = 0.08  # of all worlds
STOPPED: Final = 0.25  # of worlds with a work queue: what runs is cancelled
REFUSED: Final = 0.03  # of all worlds: commands for a target that fails for long
SECOND: Final = 0.1  # of worlds with a work queue: a fault meets a second publication
STRICT: Final = 0.12  # of worlds with a broker of which there are such
GOOD_MOODS: Final = (Mood.OK, Mood.OK, Mood.OK, Mood.SLOW, Mood.CUTS)
BAD_MOODS: Final = (
    Mood.REFUSES,
    Mood.HANGS,
    Mood.DENIES,
    Mood.DENIES,
    Mood.UNAUTHORIZED,
    Mood.FAILS,
    Mood.BUSY,
    Mood.LIMITS,
    Mood.DEFERS,
)


def draw(seed: int, kind: Kind | None = None, *, is_strict: bool = False) -> WorldPlan:
    """Draw the world of a seed. Each aspect has its own numbers, so that none changes another.

    `is_strict`: it has strict order, if its broker can.
    """
    plan = _draw_plain(seed, kind)
    rng = random.Random(seed ^ 0xC0DE)  # noqa: S311  repeatable, not secret
    if rng.random() < (COMMANDS_IN_WORK_QUEUES if plan.kind in WORK_QUEUES else COMMANDS):
        plan = draw_commands(rng, plan)
    rng = random.Random(seed ^ 0x1EA5E)  # noqa: S311  likewise
    if plan.kind in WORK_QUEUES and rng.random() < LAPSES:
        plan = _with_a_lapse(rng, plan)
    rng = random.Random(seed ^ 0xCA9CE1)  # noqa: S311  likewise
    if plan.kind in WORK_QUEUES and rng.random() < STOPPED:
        plan = _with_cancels_of_what_runs(rng, plan)
    rng = random.Random(seed ^ 0x2D0)  # noqa: S311  likewise
    if rng.random() < SECOND:
        plan = _with_trouble_for_a_second(rng, plan)
    rng = random.Random(seed ^ 0x7AFF1C)  # noqa: S311  likewise
    if rng.random() < TRAFFIC:
        plan = draw_traffic(rng, plan)
    rng = random.Random(seed ^ 0x11417)  # noqa: S311  likewise
    if rng.random() < REFUSED:
        plan = draw_outage(rng, plan)
    rng = random.Random(seed ^ 0x57121C7)  # noqa: S311  likewise
    is_strict |= rng.random() < STRICT
    if is_strict and plan.kind in STRICT_KINDS:
        plan = draw_strict(rng, plan)
    return plan


def _with_a_lapse(rng: random.Random, plan: WorldPlan) -> WorldPlan:
    """A router stands still with a decision, until another one has the message (WQ-3).

    For most of them not so long that it gives its call up when it goes on.
    """
    routers = max(plan.routers, 2)
    lease = rng.choice((SHORT_LEASE, SHORT_LEASE, plan.lease))
    published = [step for step in plan.steps if step.is_of_a_producer]
    beginning = rng.choice(published).at + rng.choice((-0.2, 0.0, 0.01, 0.5))
    stall = Step(
        round(max(beginning, 0.0), 3),
        Act.STALL,
        router=rng.randrange(routers),
        seconds=lease + rng.choice((2.0, 5.0, 8.0)),
    )
    steps = sorted((*plan.steps, stall), key=lambda step: step.at)
    return replace(plan, routers=routers, lease=lease, steps=tuple(steps))


def _with_cancels_of_what_runs(rng: random.Random, plan: WorldPlan) -> WorldPlan:
    """A target is slow, and some of what it is sent is cancelled, amid trouble or in peace."""
    routers, is_calm = max(plan.routers, 2), rng.random() < 0.4
    published = [step for step in plan.steps if step.act in {Act.PUBLISH, Act.SEND, Act.BATCH}]
    chosen = rng.choice(published)
    host = plan.bodies[chosen.bodies[0]].host if chosen.bodies else 0
    slow = Phase(max(chosen.at - 1, 0.0), Mood.SLOW)
    phases = [each for each in plan.phases[host] if each.at < slow.at]
    steps = [step for step in plan.steps if step.is_of_a_producer or not is_calm]
    ids = Counter(body.id for body in plan.bodies)
    for number in chosen.bodies:
        if ids[plan.bodies[number].id] > 1:  # it might be the other one that is cancelled
            continue
        at = chosen.at + rng.choice((0.1, 0.5, 1.0, 2.0, 5.0, 10.0))
        for router in rng.sample(range(routers), rng.choice((1, routers))):
            cancel = Step(round(at, 3), Act.CANCEL, (number,), chosen.queue, router, running=True)
            steps.append(cancel)
        if rng.random() < 0.4 and not is_calm:
            act = rng.choice((Act.KILL, Act.KILL, Act.BREAK, Act.OUTAGE, Act.LOSSES, Act.PAUSE))
            later = round(at + rng.choice((0.0, 0.005, 0.02, 0.2, 3.0)), 3)
            router, seconds = rng.randrange(routers), rng.choice((0.5, 3.0, 35.0))
            steps.append(Step(later, act, router=router, seconds=seconds, share=0.3))
    return replace(
        plan,
        routers=routers,
        lease=SHORT_LEASE,  # so that it is slow for longer
        steps=tuple(sorted(steps, key=lambda step: step.at)),
        phases=(*plan.phases[:host], (*phases, slow), *plan.phases[host + 1 :]),
    )


def _with_trouble_for_a_second(rng: random.Random, plan: WorldPlan) -> WorldPlan:
    """Something breaks when a body is published that the router may have already."""
    seen: set[int] = set()
    seconds: list[Step] = []
    for step in plan.steps:
        if step.is_of_a_producer and step.act is not Act.CANCEL:
            if seen.intersection(step.bodies):
                seconds.append(step)
            seen.update(step.bodies)
    if not seconds:
        return plan
    at = max(rng.choice(seconds).at + rng.choice((-0.1, 0.0, 0.01, 0.1, 0.5)), 0.0)
    trouble = Step(
        round(at + rng.random() / 50, 3),
        rng.choice((Act.KILL, Act.BREAK, Act.OUTAGE, Act.OUTAGE, Act.LOSSES, Act.PAUSE)),
        router=rng.randrange(plan.routers),
        seconds=rng.choice((0.5, 3.0, 35.0)),
        share=rng.choice((0.1, 0.3, 0.6)),
    )
    return replace(plan, steps=tuple(sorted((*plan.steps, trouble), key=lambda step: step.at)))


def _draw_plain(seed: int, kind: Kind | None) -> WorldPlan:
    rng = random.Random(seed)  # noqa: S311  repeatable, not secret
    drawn = kind or rng.choice(KINDS)
    routers = rng.choice((1, 1, 1, 2, 3))
    drawing = Drawer(rng, drawn, routers, rng.choice((1, 1, 2)))
    span = rng.choice((2.0, 20.0, 60.0))
    for _ in range(rng.choice((1, 2, 3, 5, 8, 12))):
        drawing.produce(round(rng.random() * span, 3))
    if rng.random() < FLOODS:
        drawing.flood(round(rng.random() * span, 3))
    published = [step.at for step in drawing.steps]
    for _ in range(rng.choice((0, 1, 1, 2, 3, 5))):
        if rng.random() < 0.5:  # while something is on its way
            at = rng.choice(published) + rng.choice((-0.2, 0.0, 0.01, 0.1, 1.0)) + rng.random() / 50
        else:
            at = rng.random() * (span + 40)
        drawing.fault(round(max(at, 0.0), 3))
    return WorldPlan(
        seed=seed,
        kind=drawn,
        routers=routers,
        connections=rng.choice((1, 1, 2)),
        queues=drawing.queues,
        attempts=rng.choice((None, 1, 2, 3)),
        lease=rng.choice((30.0, 30.0, 15.0, 60.0)),
        rate=rng.choice((None, 30, 120)),
        bodies=tuple(drawing.bodies),
        steps=tuple(sorted(drawing.steps, key=lambda step: step.at)),
        phases=tuple(_phases(rng, span) for _ in range(HOSTS)),
    )


def _phases(rng: random.Random, span: float) -> tuple[Phase, ...]:
    phases = [Phase(0.0, rng.choice((*GOOD_MOODS, *BAD_MOODS)), rng.choice((0.3, 1.0)))]
    for _ in range(rng.choice((0, 1, 2))):
        at = round(rng.random() * (span + 60), 3)
        phases.append(Phase(at, rng.choice((*GOOD_MOODS, *BAD_MOODS)), rng.choice((0.3, 1.0))))
    return tuple(sorted(phases, key=lambda phase: phase.at))
