"""Tries deliberate bugs: proof that the simulator would find such a bug (`--mutants`).

A bug is a function of `tests.simulation.bugs` or a patch.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from msgspec import Struct

from tests.simulation.bugs import BUGS, OF_STRICT_ORDER
from tests.simulation.draw import draw
from tests.simulation.world import run

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDER: Final = Path(__file__).parent / "mutants"
MAX_WORLDS: Final = 6000
FIRST_SEED: Final = 1
FOUND: Final = "found after"


class FoundMutant(Struct, frozen=True):
    name: str
    worlds: int | None  # None: not found
    seconds: float
    problem: str  # what was broken, or why it could not be tried


def find_all(names: Sequence[str], jobs: int, most: int = MAX_WORLDS) -> bool:
    """Try each mutant and print a table. Answers whether all were found."""
    known = all_mutants()
    unknown = sorted(set(names) - set(known))
    if unknown:
        print(f"there is no mutant {', '.join(unknown)}")
        return False
    chosen = [name for name in known if not names or name in names]
    print(f"{len(chosen)} mutants, at most {most} worlds each", flush=True)
    found = [_told(find(name, jobs, most)) for name in chosen]
    missed = [each.name for each in found if each.worlds is None]
    print(
        f"{len(found) - len(missed)} of {len(found)} found"
        + "".join(f"\n  not: {name}" for name in missed)
    )
    return not missed


def all_mutants() -> list[str]:
    return sorted([*BUGS, *(path.stem for path in FOLDER.glob("*.patch"))])


def find(name: str, jobs: int, most: int) -> FoundMutant:
    """Run worlds with this bug until one breaks a rule that it does not break without."""
    if name in BUGS:
        strict = ["--strict"] if name in OF_STRICT_ORDER else []
        return _find(name, ROOT, ["--bug", name, "--jobs", str(jobs), *strict], most)
    with _copy() as tree:
        problem = refusal(FOLDER / f"{name}.patch", tree, is_dry=False)
        if problem is not None:
            return FoundMutant(name, None, 0.0, problem)
        return _find(name, tree, ["--jobs", str(jobs)], most)


def _find(name: str, tree: Path, options: Sequence[str], most: int) -> FoundMutant:
    began, tried = time.monotonic(), 0
    while tried < most:
        worlds, seed, problem = _search(tree, FIRST_SEED + tried, most - tried, options)
        if seed is None:
            return FoundMutant(name, None, time.monotonic() - began, problem)
        if not run(draw(seed, is_strict="--strict" in options)).violations:
            return FoundMutant(name, tried + worlds, time.monotonic() - began, problem)
        tried = seed + 1 - FIRST_SEED
    return FoundMutant(name, None, time.monotonic() - began, "only what breaks without it, too")


def refusal(patch: Path, tree: Path = ROOT, *, is_dry: bool = True) -> str | None:
    """Return why the code cannot be changed so. Not dry: change it."""
    applied = subprocess.run(
        [  # noqa: S607
            "patch",
            *("--strip=1", "--forward", "--fuzz=2", "--input", str(patch)),
            *(["--dry-run"] if is_dry else []),
        ],
        cwd=tree,
        capture_output=True,
        text=True,
        check=False,
    )
    if not applied.returncode:
        return None
    return f"the patch does not apply any more: {applied.stdout.strip()}"


def _search(
    tree: Path, first: int, most: int, options: Sequence[str]
) -> tuple[int, int | None, str]:
    """The number of worlds, the seed of the one that broke a rule (None: none did), and what."""
    command = [sys.executable, "-m", "tests.simulation", "--until-found"]
    ran = subprocess.run(
        [*command, "--first", str(first), "--seeds", str(most), *options],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        check=False,
    )
    for line in ran.stdout.splitlines():
        if line.startswith(FOUND):
            worlds, seed, problem = line.removeprefix(FOUND).strip().split(" ", 2)
            return int(worlds), int(seed), problem
    return most, None, (ran.stderr.splitlines() or ["nothing was broken"])[-1]


def _told(found: FoundMutant) -> FoundMutant:
    worlds = "NOT FOUND" if found.worlds is None else f"{found.worlds:5d} worlds"
    print(f"{found.name:45} {worlds:>12} {found.seconds:5.0f} s  {found.problem[:90]}", flush=True)
    return found


@contextmanager
def _copy() -> Iterator[Path]:
    """The code and the simulator, to be changed."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        tree = Path(folder)
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "router", tree / "router", ignore=ignored)
        (tree / "tests").mkdir()
        (tree / "tests" / "__init__.py").touch()
        for part in ("simulation", "support"):
            shutil.copytree(ROOT / "tests" / part, tree / "tests" / part, ignore=ignored)
        yield tree
