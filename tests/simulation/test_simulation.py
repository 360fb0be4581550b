"""Worlds with new seeds at every run, within a fixed budget of time (SIM-1, SIM-2).

`SIMULATION_SECONDS` changes the budget, `SIMULATION_SEED` the first seed. A failure names its seed.
"""

import itertools
import os
import random
import time
from pathlib import Path

import pytest

from tests.simulation.__main__ import Choice, explain, worlds
from tests.simulation.bugs import BUGS, planted
from tests.simulation.draw import draw
from tests.simulation.mutants import FOLDER, refusal
from tests.simulation.plan import Kind
from tests.simulation.world import run

BUDGET = float(os.environ.get("SIMULATION_SECONDS", "110"))
FIRST = int(os.environ.get("SIMULATION_SEED", random.SystemRandom().randrange(2**32)))
BUSY = 382323192  # a flood of messages on a network that loses calls


@pytest.mark.rule("SIM-1")
@pytest.mark.parametrize("kind", list(Kind))
def test_a_seed_decides_the_whole_history(kind: Kind) -> None:
    for seed in range(4):
        first, second = (run(draw(seed, kind)) for _ in range(2))

        assert first.history == second.history
        assert first.seconds == second.seconds


@pytest.mark.rule("SIM-1")
def test_a_seed_decides_the_whole_history_where_many_wait_for_one_connection() -> None:
    assert len({run(draw(BUSY)).digest for _ in range(3)}) == 1


@pytest.mark.rule("SIM-1")
def test_other_seeds_make_other_worlds() -> None:
    assert len({run(draw(seed)).digest for seed in range(5)}) == 5


@pytest.mark.rule("SIM-2")
@pytest.mark.parametrize("patch", sorted(FOLDER.glob("*.patch")), ids=lambda patch: patch.stem)
def test_each_mutant_is_a_patch_of_the_code_as_it_is(patch: Path) -> None:
    assert refusal(patch) is None


@pytest.mark.rule("SIM-2")
@pytest.mark.parametrize("name", sorted(BUGS))
def test_each_bug_is_one_of_the_code_as_it_is(name: str) -> None:
    with planted(name):
        assert BUGS[name].__doc__


@pytest.mark.slow
@pytest.mark.timeout(BUDGET + 300)
@pytest.mark.rule("SIM-2", "P1", "P2", "P3", "P4", "P5", "FIFO-1", "OPS-6", "MED-4", "POOL-1")
@pytest.mark.rule("WQ-3", "CMD-1", "CMD-2", "CMD-3", "CMD-4", "CMD-5", "CMD-6", "CMD-10", "CMD-11")
def test_whatever_happens_nothing_is_lost() -> None:
    began = time.monotonic()
    seeds = itertools.takewhile(lambda _: time.monotonic() - began < BUDGET, itertools.count(FIRST))
    for summary in worlds(seeds, Choice(), jobs=1):
        if summary.problems:
            pytest.fail(explain(summary.seed, Choice()))
