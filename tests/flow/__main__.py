"""`./dev flow`: many messages of a slow pool in front of a few of a fast one, on real brokers."""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from tests.flow.trial import EXPECTED, FAST_MESSAGES, SLOW_SECONDS, FlowOrder, FlowResult, try_flow

MESSAGES: Final = 5000


def _bounds() -> str:
    """Return how long the fast pool may wait, by broker."""
    brokers: dict[float, list[str]] = {}
    for broker, expected in EXPECTED.items():
        brokers.setdefault(expected.seconds, []).append(broker)
    return "; ".join(f"{each:g} s ({', '.join(brokers[each])})" for each in sorted(brokers))


EPILOG: Final = f"""\
A queue has messages of a slow pool (one worker, {SLOW_SECONDS:g} s each), and behind them
{FAST_MESSAGES} of a fast pool. The router starts, and {FAST_MESSAGES} more of the fast pool follow
a little later. Then the slow pool gets more workers, and its target answers at once.

checks (ROUTE-5):
  fast   the messages of the fast pool come within
         {_bounds()}
  slow   all messages of the slow pool come, in the order of their groups (not on sqs-standard)

Where messages of full pools are held in the router, more than 2,000 of them need a larger lookAhead
of the queue; without it, the fast pool waits and the warning LOOK_AHEAD says why.

exit code: 0 all checks passed, 1 a check failed, 2 wrong usage

examples: ./dev flow --broker nats
          ./dev flow --broker rabbitmq --look-ahead 6000
"""


def main(words: Sequence[str] | None = None) -> int:
    given = _read(words)
    console = Console(soft_wrap=True)
    results = []
    for broker in given.broker or sorted(EXPECTED):
        began = time.monotonic()

        def tell(text: str, broker: str = broker, began: float = began) -> None:
            console.print(f"{broker:12} {time.monotonic() - began:6.1f} s  {text}")

        order = FlowOrder(
            broker=broker,
            messages=given.messages,
            look_ahead=given.look_ahead,
            drain=given.drain,
        )
        with tempfile.TemporaryDirectory(prefix="flow-") as folder:
            results.append(asyncio.run(try_flow(order, Path(folder), tell)))
    if given.json:
        content = [{**asdict(each), "problems": each.problems()} for each in results]
        given.json.write_text(json.dumps(content, indent=2) + "\n")
    _sum_up(console, results)
    is_good = not any(each.problems() for each in results)
    console.print("passed" if is_good else "FAILED", style="bold")
    return 0 if is_good else 1


def _sum_up(console: Console, results: Sequence[FlowResult]) -> None:
    table = Table(title=f"{results[0].order.messages} messages of a slow pool in front")
    names = ("broker", "fast", "fast, later", "slow", "lost", "again", "health", "warnings")
    for name in names:
        table.add_column(name, justify="left" if name in {"broker", "warnings"} else "right")
    for each in results:
        waits = ["never" if wait is None else f"{wait:.1f} s" for wait in each.waits]
        table.add_row(
            each.order.broker,
            *waits,
            f"{each.drain_seconds:.1f} s",
            str(each.lost),
            str(each.repeated),
            each.health,
            ", ".join(each.warnings),
        )
    console.print(table)
    for each in results:
        for problem in each.problems():
            console.print(f"{each.order.broker}: {problem}", style="red")


def _read(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="./dev flow",
        description="Show that a full pool holds up no other pool of its queue, on real brokers.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--broker",
        choices=sorted(EXPECTED),
        action="append",
        help="where the queue is; may be given several times (all)",
    )
    parser.add_argument(
        "--messages", type=_positive, default=MESSAGES, help=f"of the slow pool ({MESSAGES})"
    )
    parser.add_argument("--look-ahead", type=_positive, help="lookAhead of the queue")
    parser.add_argument(
        "--drain", type=_positive, default=300, help="seconds for the slow pool's messages (300)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    return parser.parse_args(words)


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError(text)
    return number


if __name__ == "__main__":
    sys.exit(main())
