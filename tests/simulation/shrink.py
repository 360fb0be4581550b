"""Makes a failing world as small as it can be: what is left is what matters."""

import re
import time
from collections.abc import Callable, Iterator
from typing import Final

from msgspec.structs import replace

from tests.simulation.events import Violation
from tests.simulation.plan import Mood, Phase, WorldPlan
from tests.simulation.world import WorldResult, run

MAX_RUNS: Final = 400
MAX_SECONDS: Final = 120.0
_PARTICULARS: Final = re.compile(r"b'.*'|\(.*\)|[rt]?[0-9.]+")


def shrink(result: WorldResult, *, most_runs: int = MAX_RUNS) -> WorldResult:
    """Answer the smallest world found in which the same goes wrong."""
    wanted = _kind_of(result.violations[0])

    def fails(found: WorldResult) -> bool:
        return any(_kind_of(violation) == wanted for violation in found.violations)

    return _shrink(result, fails, most_runs)


def _kind_of(violation: Violation) -> str:
    """Without what differs from world to world."""
    return f"{violation.rule} {_PARTICULARS.sub('', violation.text)}"


def _shrink(result: WorldResult, fails: Callable[[WorldResult], bool], runs: int) -> WorldResult:
    smallest = result
    give_up = time.monotonic() + MAX_SECONDS
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for plan in _simpler(smallest.plan):
            if runs <= 0 or time.monotonic() > give_up:
                return smallest
            runs -= 1
            found = run(plan)
            if fails(found):
                smallest, is_smaller = found, True
                break
    return smallest


def _simpler(plan: WorldPlan) -> Iterator[WorldPlan]:
    """Variants with less in them, the boldest first."""
    yield from _with_fewer_steps(plan)
    steps = plan.steps
    if plan.routers > 1:
        yield replace(plan, routers=1, steps=tuple(replace(each, router=0) for each in steps))
    if plan.beats:
        yield replace(plan, beats=())
    if plan.queues > 1:
        yield replace(
            plan,
            queues=1,
            steps=tuple(replace(each, queue=0) for each in steps),
            batches=tuple(replace(each, queue=0) for each in plan.batches),
            beats=tuple(replace(each, queue=0) for each in plan.beats),
        )
    simplest = replace(plan, connections=1, rate=None, attempts=None)
    if simplest != plan:
        yield simplest
        yield replace(plan, connections=1)
    yield from _with_kinder_targets(plan)


def _with_fewer_steps(plan: WorldPlan) -> Iterator[WorldPlan]:
    steps = plan.steps
    size = len(steps) // 2
    while size >= 1:
        for start in range(0, len(steps), size):
            yield replace(plan, steps=steps[:start] + steps[start + size :])
        size //= 2
    for position, step in enumerate(steps):
        for number in step.bodies if len(step.bodies) > 1 else ():
            alone = replace(step, bodies=(number,))
            yield replace(plan, steps=(*steps[:position], alone, *steps[position + 1 :]))


def _with_kinder_targets(plan: WorldPlan) -> Iterator[WorldPlan]:
    for host, phases in enumerate(plan.phases):
        before, after = plan.phases[:host], plan.phases[host + 1 :]
        for fewer in _fewer(phases):
            yield replace(plan, phases=(*before, fewer, *after))


def _fewer(phases: tuple[Phase, ...]) -> Iterator[tuple[Phase, ...]]:
    fine = (Phase(0.0, Mood.OK),)
    if phases != fine:
        yield fine
    for position in range(1, len(phases)):
        yield phases[:position] + phases[position + 1 :]
