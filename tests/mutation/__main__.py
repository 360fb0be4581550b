"""`./dev mutate`: put small bugs into a module and see whether the tests notice.

A mutant that survives is a missing test, or a change that changes nothing. `docs/reliability.md`
explains those of the second kind.
"""

import argparse
import contextlib
import io
import os
from collections.abc import Mapping, Sequence
from typing import Final

import pytest

from tests.mutation.runner import SQL, MutantRun

CHEAP: Final = ("-m", "not slow and not timing", "-k", "not postgres")
UNIT: Final = "tests/unit/test_"
ENGINE: Final = "tests/engine"
SUBJECTS: Final[Mapping[str, Sequence[str]]] = {  # and the tests that may notice
    "router.core.identity": (
        f"{UNIT}identity.py",
        f"{UNIT}remembered.py",
        f"{UNIT}tracker.py",
        ENGINE,
    ),
    "router.engine.lanes": (f"{UNIT}lanes.py", f"{UNIT}blocked.py", ENGINE),
    "router.engine.registry": (
        f"{UNIT}ledger.py",
        f"{UNIT}tracker.py",
        f"{UNIT}registry.py",
        ENGINE,
    ),
    "router.engine.settle": (ENGINE,),
    SQL: (
        f"{UNIT}queue_table.py",
        f"{UNIT}queue_clock.py",
        f"{UNIT}sqlite_queue.py",
        "tests/contract/test_message_store.py",
    ),
}


def main() -> None:
    options = argparse.ArgumentParser(
        prog="./dev mutate", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    options.add_argument("subject", nargs="*", metavar="MODULE", help=", ".join(SUBJECTS))
    options.add_argument("--minutes", type=float, default=5.0, help="for each module (5)")
    options.add_argument("--only", default="", metavar="REGEX", help="of the mutants' names")
    given = options.parse_args()
    wanted = [_subject(options, each) for each in given.subject] or list(SUBJECTS)
    for name in wanted:
        _run(name, given.only, given.minutes * 60)


def _subject(options: argparse.ArgumentParser, wanted: str) -> str:
    found = [name for name in SUBJECTS if wanted in {name, name.rpartition(".")[2]}]
    if not found:
        options.error(f"no such module: {wanted}")
    return found[0]


def _run(name: str, only: str, seconds: float) -> None:
    terminal = os.fdopen(os.dup(1), "w", buffering=1)  # pytest and the tests write elsewhere
    print(f"{name} …", file=terminal)
    mutating = MutantRun(name, only, seconds, lambda text: print(f"  {text}", file=terminal))
    quiet = ("-q", "-p", "no:cacheprovider", "--hypothesis-seed=0")
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        code = pytest.main([*SUBJECTS[name], *quiet, *CHEAP], plugins=[mutating])
    if code != pytest.ExitCode.OK:
        raise SystemExit(f"the tests of {name} cannot be run: pytest ended with {code}")
    result = mutating.result
    print(
        f"  {result.killed} noticed, {len(result.survived)} survived, {result.left} not tried: "
        f"{result.score:.1f} % in {result.seconds:.0f} s",
        file=terminal,
    )
    terminal.close()


if __name__ == "__main__":
    main()
