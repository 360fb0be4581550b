"""`./dev soak`: a router for hours while its surroundings change, and whether it stays flat."""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from tests.soak.verdict import RULE, SLACK, Judged, SoakSample, judge
from tests.soak.world import RATE, SoakTally, soak

SHOWN: Final = 10  # faults
EPILOG: Final = f"""\
{RATE} messages a second go through one router on the embedded queue. Queues, pools, groups, origins
and the routing document change every few seconds, dead letters grow to their limit until somebody
discards them, and dashboards come and go. Memory, descriptors, threads and files are sampled every
minute.

{RULE}.

exit code: 0 flat and nothing lost, 1 not so, 2 wrong usage

example: ./dev soak --hours 1 --json build/soak.json
"""


def main(words: Sequence[str] | None = None) -> int:
    given = _read(words)
    console = Console(soft_wrap=True)
    console.print(f"seed {given.seed}, {given.minutes:g} minutes")
    began = time.monotonic()

    def tell(sample: SoakSample, tally: SoakTally) -> None:
        shown = ", ".join(f"{name} {value:.1f}" for name, value in sample.figures.items())
        console.print(f"minute {sample.minute:5.1f}  {tally.published} published  {shown}")

    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        samples, tally, wrong = asyncio.run(soak(given.minutes, Path(folder), given.seed, tell))
    judged = judge(samples)
    is_good = not wrong and all(each.is_flat for each in judged)
    if given.json:
        result = {
            "good": is_good,
            "minutes": given.minutes,
            "seed": given.seed,
            "seconds": time.monotonic() - began,
            "tally": {**asdict(tally), "open": len(tally.open)},
            "judged": [{**asdict(each), "flat": each.is_flat} for each in judged],
            "samples": [asdict(each) for each in samples],
            "wrong": wrong,
        }
        given.json.write_text(json.dumps(result, indent=2) + "\n")
    _sum_up(console, judged, tally, wrong)
    console.print("passed" if is_good else "FAILED", style="bold")
    return 0 if is_good else 1


def _sum_up(console: Console, judged: Sequence[Judged], tally: SoakTally, wrong: list[str]) -> None:
    table = Table(title=RULE)
    for name in ("figure", "second third", "last third", "highest", "slack", ""):
        table.add_column(name, justify="left" if name == "figure" else "right")
    for each in judged:
        figures = (each.before, each.after, each.highest, SLACK[each.figure])
        verdict = "flat" if each.is_flat else "GROWS"
        table.add_row(each.figure, *(f"{value:.1f}" for value in figures), verdict)
    console.print(table)
    console.print(
        f"{tally.published} published, {tally.accepted} accepted, {tally.discarded} dead letters,"
        f" full and emptied {tally.emptied} times, {tally.again} requests again"
    )
    for fault in wrong[:SHOWN]:
        console.print(fault, style="red", markup=False)


def _read(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="./dev soak",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    duration = parser.add_mutually_exclusive_group()
    duration.add_argument("--hours", type=_positive, help="how long (1)")
    duration.add_argument("--minutes", type=_positive, help="how long, instead of --hours")
    parser.add_argument(
        "--seed",
        type=int,
        default=random.SystemRandom().randrange(1_000_000),
        help="decides what is published; the timing of the machine stays (random)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    given = parser.parse_args(words)
    given.minutes = given.minutes or (given.hours or 1.0) * 60
    return given


def _positive(text: str) -> float:
    if not (number := float(text)) > 0:
        raise ValueError(text)
    return number


if __name__ == "__main__":
    sys.exit(main())
