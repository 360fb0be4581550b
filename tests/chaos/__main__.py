"""`./dev chaos`: faults under load on the real process, and whether its promises held."""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from tests.chaos.brokers import BROKERS, VARIANTS
from tests.chaos.history import MAX_WAIT_SECONDS
from tests.chaos.nemesis import REDELIVERY_BOUND, Kill
from tests.chaos.run import ChaosOrder, ChaosResult, run, spread
from tests.chaos.storm import Fault
from tests.chaos.strict import (
    HOLDS_GROUPS,
    ON_FAILURE,
    STRICT_BROKERS,
    StrictOrder,
    StrictResult,
    run_strict,
)

EXIT_GOOD, EXIT_BROKEN = 0, 1
SHOWN: Final = 20  # violations
DESCRIPTION: Final = """\
Bring faults to real routers on a real broker under load, and check from outside that no message is
lost, that every group stays in order and that each group has one open request at a time.

--kills: one router is killed by SIGKILL, again and again.
--slow-pool: besides, hundreds of messages of a slow pool wait in front of all others.
--strict: the queue is strict, and the target judges each request. Besides the kills, --pauses
and --stops.
--minutes: routers (two where the broker keeps order across them, else one) are killed, stopped,
paused, cut off and frozen out, their broker restarts, their clocks jump and names resolve slowly,
several at a time.
"""
EPILOG: Final = f"""\
checks, by the bodies that were published, received and kept:
  lost        a message that was answered as accepted, and was neither accepted by the target nor
              kept as a dead letter with the same body
  order       a message that was sent before an earlier one of its group had its final reply
  at once     two open requests of one group, or of one message, by one process
  repeated    a message that was sent again, by the process whose request was accepted
              (--kills only: a lost connection or lease allows it, too)
  left        a message that is in the queue when everything should be done
  redelivery  the first request, after a restart, for a message that was in flight at the kill:
              at most {REDELIVERY_BOUND:g} s after the new process logs "ready" (sqlite, postgres)
  held up     a message that waited for longer than {MAX_WAIT_SECONDS:g} s for its first request
              while a router was up, behind those of a slow pool (--slow-pool only)
Redis keeps no order after a crash: what was overtaken is counted there, no failure. RabbitMQ,
ActiveMQ and NATS keep no order after a failed delivery: there, no grouped message is made to fail.
rabbitmq-quorum is a quorum queue that the router makes; those of rabbitmq-default and -limit
are made by somebody else, without a delivery limit of their own or with one of 20. All three are at
RABBITMQ_URL if it is set. Their pools are full, every seventh kill comes while the target's circuit
is open, and every fifth is followed by a stop in peace. A return is a copy and an ACK there: a kill
in between leaves two messages, so nothing is judged as repeated.
Duplicates are allowed and counted: requests for messages that had a final reply before.

exit code: 0 all checks passed, 1 a check failed, 2 wrong usage

examples: ./dev chaos sqlite --kills 200 --json build/chaos.json
          ./dev chaos rabbitmq --kills 50 --slow-pool
          ./dev chaos postgres --minutes 5
          ./dev chaos nats --strict --kills 10 --pauses 3 --routers 2
          ./dev chaos rabbitmq --strict --kills 10 --stops 10 --routers 2
          ./dev chaos rabbitmq --strict --kills 10 --routers 3 --share
"""


def main(words: Sequence[str] | None = None) -> int:
    given = _read(words)
    console = Console(soft_wrap=True)
    seconds = (given.minutes or 0) * 60
    wanted = ChaosOrder(
        given.broker,
        0 if seconds else given.kills,
        given.seed,
        given.lease,
        seconds,
        given.slow_pool,
    )
    result: ChaosResult | StrictResult
    with ExitStack() as stack:
        if given.keep_files:
            folder = tempfile.mkdtemp(prefix="chaos-")
        else:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-"))
        console.print(f"seed {given.seed}, files in {folder}")
        if given.strict:
            strictly = StrictOrder(
                given.broker,
                given.kills,
                given.seed,
                given.pauses,
                given.routers,
                given.on_failure,
                given.share,
                given.stops,
            )
            result = asyncio.run(run_strict(strictly, Path(folder), console.print))
            _sum_up_strict(console, result)
        else:
            result = asyncio.run(run(wanted, Path(folder), _Progress(console, wanted).tell))
            _sum_up(console, result)
    if given.json:
        given.json.write_text(json.dumps(result.as_json(), indent=2, default=str) + "\n")
    return EXIT_GOOD if result.is_good else EXIT_BROKEN


class _Progress:
    def __init__(self, console: Console, wanted: ChaosOrder) -> None:
        self._console = console
        self._kills = wanted.kills
        self._duplicates = 0
        self._began = time.monotonic()

    def tell(self, what: Kill | Fault) -> None:
        if isinstance(what, Kill):
            self._tell_kill(what)
        else:
            whose = "" if what.slot is None else f" router {what.slot}"
            self._console.print(
                f"{what.began - self._began:7.1f} s  {what.kind}{whose},"
                f" {what.ended - what.began:.1f} s"
            )

    def _tell_kill(self, kill: Kill) -> None:
        self._duplicates += kill.duplicates
        width = len(str(self._kills))
        self._console.print(
            f"kill {kill.number:{width}}/{self._kills}  delivered {kill.delivered:6}  "
            f"in flight {kill.in_flight:3}  duplicates {self._duplicates:4}  "
            f"first redelivery {_ms(kill.since_ready)} ms"
            f" ({_ms(kill.since_spawn)} ms after the start)" + ("  LATE" if kill.is_late else "")
        )


def _sum_up(console: Console, result: ChaosResult) -> None:
    broken = result.broken()
    nothing = sum(kill.in_flight == 0 for kill in result.kills)
    faults = Counter(fault.kind for fault in result.faults)
    rows = {
        "kills": f"{len(result.kills)}, and {result.startup_kills} during start-up",
        "kills with nothing in flight": str(nothing),
    }
    if faults:
        rows = {
            "faults": _counts(dict(faults.most_common())),
            "duplicates by the last fault": _counts(result.explained),
        }
    rows |= {
        "messages": f"{result.published} published, {result.dead_letters} dead letters",
        "requests": f"{result.posts}",
        "in the logs": _counts({name: n for name, n in result.events.items() if n}),
        "duplicates": str(result.duplicates),
        "first redelivery after ready": _spread(result.since_ready),
        "first redelivery after start": _spread(result.since_spawn),
        f"later than {REDELIVERY_BOUND:g} s": str(len(result.late)),
        "lost": str(broken["lost"]),
        "out of order": str(broken["order"]),
        "overtaken where that may be": str(result.overtaken - broken["order"]),
        "two at once": str(broken["at once"]),
        "repeated without a kill": str(broken["repeated"]),
        "left in the queue": str(broken["left"]),
        "other faults": str(broken["strange"]),
        "time": f"{result.seconds:.0f} s",
    }
    if result.wanted.has_slow_pool:
        rows["wait behind the slow pool"] = _spread(result.waits)
        rows[f"longer than {MAX_WAIT_SECONDS:g} s"] = str(broken["held up"])
    table = Table(title=f"chaos {result.wanted.broker}, seed {result.wanted.seed}")
    table.add_column("")
    table.add_column("result", justify="right")
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)
    for violation in result.violations[:SHOWN]:
        console.print(str(violation), style="red", markup=False)
    if len(result.violations) > SHOWN:
        console.print(f"and {len(result.violations) - SHOWN} more")
    console.print("passed" if result.is_good else "FAILED", style="bold")


def _sum_up_strict(console: Console, result: StrictResult) -> None:
    rows = {
        "kills, pauses, stops": f"{result.kills}, {result.pauses}, {result.stops}",
        "messages": str(result.published),
        "requests": f"{result.requests}, {result.failed} failed on purpose",
        "repeats": str(result.repeats),
        "overtakes": str(len(result.overtakes)),
        "overlaps after a kill or pause": str(result.overlaps),
        "other overlaps": str(len(result.strange_overlaps)),
        "lost": str(len(result.lost)),
        "errors in the logs": str(len(result.tracebacks)),
        "time": f"{result.seconds:.0f} s",
    }
    wanted = result.wanted
    how = f"{wanted.broker}, {wanted.on_failure}"
    table = Table(title=f"strict order on {how}, seed {wanted.seed}")
    table.add_column("")
    table.add_column("result", justify="right")
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)
    for broken in (result.overtakes, result.strange_overlaps, result.lost, result.tracebacks):
        for line in broken[:SHOWN]:
            console.print(line, style="red", markup=False)
    console.print("passed" if result.is_good else "FAILED", style="bold")


def _counts(counted: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in counted.items()) or "0"


def _spread(seconds: Sequence[float]) -> str:
    shown = (f"{name} {_ms(value)}" for name, value in spread(seconds).items())
    return f"{', '.join(shown)} ms" if seconds else "-"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.0f}"


def _read(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="./dev chaos",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "broker", choices=sorted({*BROKERS, *VARIANTS, *STRICT_BROKERS}), help="where the queue is"
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--kills", type=_positive, default=20, help="how many (20)")
    how.add_argument("--minutes", type=_minutes, help="of a storm of all kinds of faults")
    parser.add_argument(
        "--slow-pool",
        action="store_true",
        help="a pool of one worker and tasks of a second shares the queue (with --kills)",
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help=f"judge strict order ({', '.join(STRICT_BROKERS)})",
    )
    parser.add_argument(
        "--pauses", type=_positive, default=0, help="of 14 s, of one router (with --strict)"
    )
    parser.add_argument(
        "--stops", type=_positive, default=0, help="in peace, of one router (with --strict)"
    )
    parser.add_argument(
        "--routers",
        type=_positive,
        default=1,
        help="that take turns, or share the queue; with a store that they share (with --strict)",
    )
    parser.add_argument(
        "--on-failure",
        choices=ON_FAILURE,
        default=ON_FAILURE[0],
        help="the queue's onFailure (with --strict; park)",
    )
    parser.add_argument(
        "--share",
        action="store_true",
        help="all routers deliver what one of them receives (with --strict)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=random.SystemRandom().randrange(1_000_000),
        help="decides load, replies and instants; the timing of the machine stays (random)",
    )
    parser.add_argument(
        "--lease",
        type=_positive,
        help="the queue's visibilityTimeout in seconds (30 on sqlite and postgres, else 5)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument(
        "--keep-files", action="store_true", help="keep the queue, the dead letters and the logs"
    )
    given = parser.parse_args(words)
    choices = STRICT_BROKERS if given.strict else sorted({*BROKERS, *VARIANTS})
    if given.broker not in choices:
        parser.error(f"choose a broker from {', '.join(choices)}")
    if given.strict and (given.slow_pool or given.minutes):
        parser.error("--strict goes with --kills only")
    only_strict = given.pauses or given.stops or given.routers > 1 or given.share
    if not given.strict and (only_strict or given.on_failure != ON_FAILURE[0]):
        parser.error("--pauses, --stops, --routers, --on-failure and --share need --strict")
    if given.share and (given.broker in HOLDS_GROUPS or given.on_failure != ON_FAILURE[0]):
        parser.error("--share is for brokers that do not hold groups back, with park only")
    if given.slow_pool and given.minutes:
        parser.error("--slow-pool goes with --kills only")
    return given


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError(text)
    return number


def _minutes(text: str) -> float:
    if not (number := float(text)) > 0:
        raise ValueError(text)
    return number


if __name__ == "__main__":
    sys.exit(main())
