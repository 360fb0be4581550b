"""Draws traffic: pools of very different speed on one queue, and targets that ask to be spared."""

import random
from typing import Final

from msgspec.structs import replace

from tests.simulation.drawing import Drawer
from tests.simulation.plan import Act, Body, Mood, Phase, Step, Wish, WorldPlan

BUSY, CALM = 0, 1  # hosts
TOGETHER: Final = 20  # messages of one call
SILENCES: Final = (2, 6, 9, 15, 45)  # seconds; longer ones than 10 send messages back
LONG_OUTAGES: Final = (100.0, 450.0, 1200.0, 1700.0)
PEACEFUL: Final = 0.6  # of these worlds have no fault but a change of the pools


def draw_traffic(rng: random.Random, plan: WorldPlan) -> WorldPlan:
    """Put much work for a busy target in front of some for a quick one."""
    if rng.random() < PEACEFUL:
        plan = replace(plan, steps=tuple(step for step in plan.steps if step.is_of_a_producer))
    drawing = TrafficDrawer(
        rng, plan.kind, plan.routers, plan.queues, list(plan.bodies), list(plan.steps)
    )
    at = round(rng.random() * 5, 3)
    slow, fast = rng.sample(("P", "Q", "R"), 2)
    queue = rng.randrange(plan.queues)
    for _ in range(rng.choice((1, 1, 2, 3))):
        drawing.load(at, slow, BUSY, TOGETHER, queue)
    for pool in (fast, fast, slow):
        drawing.load(round(at + rng.choice((0.5, 3.0, 10.0)), 3), pool, CALM, 3, queue)
    drawing.load(round(at + rng.choice((20.0, 60.0, 150.0)), 3), fast, CALM, 1, queue)
    if rng.random() < 0.5:
        seconds, router = rng.choice((0.5, 3.0, 12.0)), rng.randrange(plan.routers)
        later = round(at + rng.choice((1.0, 3.0, 8.0, 20.0)), 3)
        drawing.steps.append(Step(later, Act.POOLS, router=router, seconds=seconds, pool=slow))
    busy = _busy_phases(rng, at)
    return replace(
        plan,
        bodies=tuple(drawing.bodies),
        steps=tuple(sorted(drawing.steps, key=lambda step: step.at)),
        phases=(busy, (Phase(0.0, Mood.OK),), *plan.phases[2:]),
    )


def draw_outage(rng: random.Random, plan: WorldPlan) -> WorldPlan:
    """Send commands to a target that fails for long, without a policy for them (WQ-15)."""
    calm = [step for step in plan.steps if step.is_of_a_producer]
    drawing = TrafficDrawer(rng, plan.kind, 1, plan.queues, list(plan.bodies), calm)
    at, queue = round(rng.random() * 5, 3), rng.randrange(plan.queues)
    first = len(drawing.bodies)
    for number in range(first, first + rng.choice((1, 2, 4))):
        wish = Wish(payload=number, reply=True)
        drawing.bodies.append(Body(number, f"m{number}", BUSY, "Q", f"g{number}", wish=wish))
    drawing.publish(at, *drawing.bodies[first:], queue=queue)
    # The world goes on until somebody publishes for the last time.
    drawing.load(round(at + rng.choice(LONG_OUTAGES), 3), "R", CALM, 1, queue)
    better = Phase(round(at + rng.choice(LONG_OUTAGES), 3), Mood.OK)
    return replace(
        plan,
        routers=1,
        attempts=None,
        bodies=tuple(drawing.bodies),
        steps=tuple(sorted(drawing.steps, key=lambda step: step.at)),
        phases=(
            (Phase(0.0, rng.choice((Mood.REFUSES, Mood.FAILS))), better),
            (Phase(0.0, Mood.OK),),
            *plan.phases[2:],
        ),
    )


class TrafficDrawer(Drawer):
    def load(self, at: float, pool: str, host: int, count: int, queue: int) -> None:
        """Have one call publish so many."""
        group = self.rng.choice((None, "g", "own"))
        first = len(self.bodies)
        for number in range(first, first + count):
            name = f"g{number}" if group == "own" else group
            mode = "IMMEDIATE" if name is None else None
            self.bodies.append(Body(number, f"m{number}", host, pool, name, mode))
        self.publish(at, *self.bodies[first:], queue=queue)


def _busy_phases(rng: random.Random, at: float) -> tuple[Phase, ...]:
    pick = rng.random()
    if pick < 0.2:
        return (Phase(0.0, Mood.SLOW),)
    phases: list[Phase] = []
    for _ in range(rng.choice((1, 2, 3))):
        if pick < 0.7:
            most, takes = rng.choice((1, 2, 4, 10, 30)), rng.choice((0.2, 2.0, 8.0))
            phases.append(Phase(0.0, Mood.CAPACITY, 1.0, most, takes))
        else:
            share = rng.choice((0.05, 0.3, 1.0))
            phases.append(Phase(0.0, Mood.SILENCE, share, rng.choice(SILENCES)))
    times = [0.0, *sorted(round(at + rng.random() * 40, 3) for _ in phases[1:])]
    return tuple(replace(each, at=time) for each, time in zip(phases, times, strict=True))
