"""Makes a failing world as small as it can be: what is left is what matters."""

from collections.abc import Callable, Iterator

from msgspec.structs import replace

from tests.simulation.plan import Mood, Phase, Plan
from tests.simulation.world import Result, run

MOST_RUNS = 400


def shrink(result: Result, *, most_runs: int = MOST_RUNS) -> Result:
    """Answer the smallest world found that breaks one of the same rules."""
    rules = {violation.rule for violation in result.violations}
    return _shrink(result, lambda found: any(each.rule in rules for each in found.violations), most_runs)


def _shrink(result: Result, fails: Callable[[Result], bool], runs: int) -> Result:
    smallest = result
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for plan in _simpler(smallest.plan):
            if runs <= 0:
                return smallest
            runs -= 1
            found = run(plan)
            if fails(found):
                smallest, is_smaller = found, True
                break
    return smallest


def _simpler(plan: Plan) -> Iterator[Plan]:
    """Variants with less in them, the boldest first."""
    steps = plan.steps
    size = len(steps) // 2
    while size >= 1:
        for start in range(0, len(steps), size):
            yield replace(plan, steps=steps[:start] + steps[start + size :])
        size //= 2
    if plan.routers > 1:
        yield replace(plan, routers=1, steps=tuple(replace(each, router=0) for each in steps))
    if plan.queues > 1:
        yield replace(plan, queues=1, steps=tuple(replace(each, queue=0) for each in steps))
    if plan.connections > 1:
        yield replace(plan, connections=1)
    if plan.rate is not None:
        yield replace(plan, rate=None)
    if plan.attempts is not None:
        yield replace(plan, attempts=None)
    for host, phases in enumerate(plan.phases):
        for fewer in _fewer(phases):
            others = plan.phases[:host], plan.phases[host + 1 :]
            yield replace(plan, phases=(*others[0], fewer, *others[1]))
    for position, step in enumerate(steps):
        for number in step.bodies if len(step.bodies) > 1 else ():
            alone = replace(step, bodies=(number,))
            yield replace(plan, steps=(*steps[:position], alone, *steps[position + 1 :]))


def _fewer(phases: tuple[Phase, ...]) -> Iterator[tuple[Phase, ...]]:
    fine = (Phase(0.0, Mood.OK),)
    if phases != fine:
        yield fine
    for position in range(1, len(phases)):
        yield phases[:position] + phases[position + 1 :]
