"""Whether a message costs the same when there are many of everything."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from bench import brokers
from bench.contenders import ROUTER
from bench.load import Load
from bench.report import ReportTable, say
from bench.sink import new_sink
from bench.trial import trial

BROKER: Final = "SQLite"  # holds a million without a server
MEASURED: Final = 10_000  # messages, of however many wait
CPU: Final = "CPU µs"
TIMES: Final = "CPU, times the plain one"


@dataclass(frozen=True, slots=True)
class Point:
    """A place on a curve; the plain one is where all curves meet."""

    backlog: int = MEASURED
    groups: int = 1_000
    pools: int = 1
    concurrency: int = 100
    targets: int = 1
    padding: int = 0


PLAIN: Final = Point()
CURVES: Final[Mapping[str, Mapping[int, Point]]] = {
    "messages waiting": {n: replace(PLAIN, backlog=n) for n in (1_000, 10_000, 100_000, 1_000_000)},
    "groups": {
        n: replace(PLAIN, groups=n, backlog=max(n, MEASURED)) for n in (1, 100, 10_000, 100_000)
    },
    "pools": {n: replace(PLAIN, pools=n) for n in (1, 100, 1_000, 10_000)},
    "concurrency": {n: replace(PLAIN, concurrency=n) for n in (1, 10, 100, 1_000)},
    "targets": {n: replace(PLAIN, targets=n) for n in (1, 10, 100, 1_000)},
    "bytes more per message": {n: replace(PLAIN, padding=n) for n in (0, 1_000, 10_000, 100_000)},
}


def measure(rounds: int, largest_backlog: int) -> ReportTable:
    table = ReportTable(
        "curves",
        f"CPU per message when there are many of everything ({BROKER} queue, one thing varied)",
        ("of", "number"),
        note=f"Plain: {PLAIN.backlog:,} small messages waiting in {PLAIN.groups:,} groups for"
        f" {PLAIN.targets} target, {PLAIN.pools} pool with {PLAIN.concurrency} at once.",
    )
    found: defaultdict[tuple[str, int], list[dict[str, float]]] = defaultdict(list)
    for number in range(rounds):
        say(f"curves, round {number + 1} of {rounds}: plain")
        plain = _cost(PLAIN)[CPU]
        for what, size, point in _points(largest_backlog):
            say(f"curves, round {number + 1} of {rounds}: {size:,} {what}")
            seen = _cost(point)
            found[what, size].append({**seen, TIMES: seen[CPU] / plain})
    for (what, size), figures in found.items():
        table.add_rounds((what, f"{size:,}"), figures)
    return table


def _points(largest_backlog: int) -> Iterator[tuple[str, int, Point]]:
    for what, curve in CURVES.items():
        for size, point in curve.items():
            if point.backlog <= largest_backlog:
                yield what, size, point


def _cost(point: Point) -> dict[str, float]:
    with brokers.running(BROKER) as place, new_sink(origins=point.targets) as sink:
        load = Load(
            messages=point.backlog,
            groups=point.groups,
            pools=point.pools,
            padding=point.padding,
            targets=sink.urls,
        )
        complete = point.backlog <= MEASURED
        with trial(
            ROUTER, place, sink, load, concurrency=point.concurrency, complete=complete
        ) as run:
            pace = run.watch(load, min(point.backlog, MEASURED))
            peak = run.contender.process.peak_mib
    return {CPU: pace.cpu_us, "messages/s": pace.rate, "peak MiB": peak}
