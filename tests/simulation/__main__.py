"""`./dev simulate`: run worlds, as many or for as long as one likes, and show what breaks."""

import argparse
import itertools
import multiprocessing
import os
import random
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import Final

from msgspec import Struct

from tests.simulation.bugs import BUGS
from tests.simulation.draw import draw
from tests.simulation.mutants import FOUND, MAX_WORLDS, find_all
from tests.simulation.plan import Act, Kind, WorldPlan
from tests.simulation.shrink import shrink
from tests.simulation.world import WorldResult, run

FAILED: Final = 1
AT_ONCE: Final = 8  # worlds that a worker is given
PROGRESS_EVERY: Final = 10.0


class Summary(Struct, frozen=True):
    """What of a world is told across processes."""

    seed: int
    problems: tuple[str, ...]
    seconds: float
    faults: int
    steps: int


class Choice(Struct, frozen=True):
    """Which worlds."""

    kind: Kind | None = None
    without: frozenset[Act] = frozenset()
    is_strict: bool = False

    def __str__(self) -> str:
        """As options of the command."""
        broker = "" if self.kind is None else f" --broker {self.kind.value}"
        without = "".join(f" --without '{act.value}'" for act in sorted(self.without))
        return broker + without + (" --strict" if self.is_strict else "")

    def plan(self, seed: int) -> WorldPlan:
        plan = draw(seed, self.kind, is_strict=self.is_strict)
        if not self.without:
            return plan
        kept = tuple(step for step in plan.steps if step.act not in self.without)
        return WorldPlan(
            **{name: getattr(plan, name) for name in WorldPlan.__struct_fields__} | {"steps": kept}
        )


def simulate(seed: int, choice: Choice) -> Summary:
    try:
        result = run(choice.plan(seed))
    except Exception as error:  # noqa: BLE001  a world that cannot be run is a failure of that seed
        return Summary(seed, (f"the world broke: {type(error).__name__}: {error}",), 0.0, 0, 0)
    problems = tuple(str(violation) for violation in result.violations)
    return Summary(seed, problems, result.seconds, result.faults, len(result.plan.steps))


def worlds(seeds: Iterator[int], choice: Choice, jobs: int) -> Iterator[Summary]:
    """Run them side by side; in whatever order they end."""
    if jobs == 1:
        yield from (simulate(seed, choice) for seed in seeds)
        return
    context = multiprocessing.get_context("fork")
    with context.Pool(jobs) as pool:
        work = ((seed, choice) for seed in seeds)
        yield from pool.imap_unordered(_simulate, work, chunksize=AT_ONCE)


def _simulate(work: tuple[int, Choice]) -> Summary:
    return simulate(*work)


def explain(seed: int, choice: Choice) -> str:
    """What goes wrong in the world of this seed, made as small as possible."""
    replay = f"Replay it: ./dev simulate --seed {seed}{choice}"
    try:
        found = run(choice.plan(seed))
        if not found.violations:
            return f"seed {seed}: nothing is wrong"
        story = story_of(shrink(found))
    except Exception:  # noqa: BLE001  a world that cannot be run is a failure of that seed
        story = f"BROKEN: the world of seed {seed} cannot be run\n{traceback.format_exc()}"
    return f"{story}\n\n{replay}"


def story_of(result: WorldResult) -> str:
    plan = result.plan
    used = sorted({number for step in plan.steps for number in step.bodies})
    lines = [
        f"BROKEN {result.violations[0]}",
        (
            f"seed {plan.seed}: {plan.kind.value}, {plan.routers} router(s), "
            f"{plan.queues} queue(s), {plan.connections} connection(s), lease {plan.lease:g} s, "
            f"attempts {plan.attempts}, rate {plan.rate}"
        ),
        *(f"  body {number}: {plan.bodies[number].content.decode()}" for number in used),
        *(
            f"  target t{host} from {phase.at:g} s on: {phase.mood.value} ({phase.share:.0%})"
            for host, phases in enumerate(plan.phases)
            for phase in phases
        ),
        *(f"  {line}" for line in result.history),
        *(f"BROKEN {violation}" for violation in result.violations[1:]),
    ]
    return "\n".join(lines)


class Progress:
    def __init__(self) -> None:
        self.worlds = self.faults = self.steps = 0
        self.seconds = 0.0
        self.began = time.monotonic()
        self._told = self.began

    def add(self, summary: Summary) -> None:
        self.worlds += 1
        self.faults += summary.faults
        self.steps += summary.steps
        self.seconds += summary.seconds
        if time.monotonic() - self._told >= PROGRESS_EVERY:
            self._told = time.monotonic()
            print(self, flush=True)

    def __str__(self) -> str:
        elapsed = time.monotonic() - self.began
        return (
            f"{self.worlds} worlds, {self.seconds / 86_400:.1f} simulated days, "
            f"{self.faults} faults injected, {self.worlds / max(elapsed, 0.001):.1f} worlds/s, "
            f"{elapsed:.0f} s"
        )


def read_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="./dev simulate",
        description="Runs routers in worlds full of faults and checks that nothing is lost.",
        epilog="Exit code 0: nothing broke; 1: a world broke a rule, or a mutant was not found.",
    )
    parser.add_argument("--seeds", type=int, metavar="N", help="so many worlds (default: 1000)")
    parser.add_argument("--seed", type=int, metavar="S", help="only this world, told in full")
    parser.add_argument("--minutes", type=float, metavar="M", help="for so long instead")
    parser.add_argument(
        "--first", type=int, metavar="S", help="the first seed (default: by chance)"
    )
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 2), help="processes")
    parser.add_argument("--broker", type=Kind, choices=list(Kind), help="only this one")
    parser.add_argument(
        "--without",
        type=Act,
        choices=list(Act),
        action="append",
        default=[],
        help="a fault to leave out; may be given again",
    )
    parser.add_argument("--strict", action="store_true", help="strict order wherever there can be")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at a failure")
    parser.add_argument(
        "--mutants",
        nargs="*",
        metavar="NAME",
        help="show that deliberate bugs are found; all, or these",
    )
    parser.add_argument("--bug", metavar="NAME", help="with this one of the deliberate bugs")
    parser.add_argument("--until-found", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = read_arguments(arguments)
    choice = Choice(options.broker, frozenset(options.without), options.strict)
    if options.bug is not None:
        BUGS[options.bug]()
    if options.mutants is not None:
        most = options.seeds or MAX_WORLDS
        return 0 if find_all(options.mutants, options.jobs, most) else FAILED
    if options.seed is not None:
        text = explain(options.seed, choice)
        print(text)
        return FAILED if "BROKEN" in text else 0
    first = random.SystemRandom().randrange(2**32) if options.first is None else options.first
    seeds: Iterator[int] = itertools.count(first)
    if options.minutes is None:
        seeds = itertools.islice(seeds, options.seeds or 1000)
    else:
        seeds = _until(time.monotonic() + options.minutes * 60, seeds)
    print(f"seeds from {first} on, {options.jobs} at a time{choice}", flush=True)
    progress, failures = Progress(), 0
    for summary in worlds(seeds, choice, options.jobs):
        progress.add(summary)
        if summary.problems:
            failures += 1
            if options.until_found:
                print(FOUND, progress.worlds, summary.seed, summary.problems[0], flush=True)
                return FAILED
            if not options.keep_going:
                print(explain(summary.seed, choice))
                break
            print(f"seed {summary.seed}: {summary.problems[0]}", flush=True)
    print(f"{progress}, {failures} worlds broke a rule")
    return FAILED if failures else 0


def _until(deadline: float, seeds: Iterator[int]) -> Iterator[int]:
    while time.monotonic() < deadline:
        yield next(seeds)


if __name__ == "__main__":
    sys.exit(main())
