"""What a target that takes 30 seconds per call does to the others: nothing, if all is well."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final

from bench import brokers
from bench.brokers import BenchPlace, Unavailable
from bench.contenders import ROUTER
from bench.load import Load
from bench.measure import percentile
from bench.report import ReportTable, say
from bench.sink import Sink, new_sink
from bench.trial import Trial, trial

Figures = Mapping[str, float]

BROKER: Final = "NATS"
CONCURRENCY: Final = 20
RATE: Final = 300.0
IN_OWN_POOL: Final = 400  # ten minutes of work, and all of it fits into its pool
IN_SAME_POOL: Final = 100  # far more than ten minutes, one after the other; the others fit as well
AT_ONCE: Final = {"MESSAGE_ROUTER_SHUTDOWN_TIMEOUT": "1s"}  # the slow ones need not end


@dataclass(frozen=True, slots=True)
class FairnessCase:
    name: str
    slow_messages: int
    slow_groups: int
    slow_pool: int


CASES: Final = (
    FairnessCase("no slow target", 0, 1, 1),
    FairnessCase("slow target, in its own pool", IN_OWN_POOL, IN_OWN_POOL, 1),
    FairnessCase("slow target, a group of the same pool", IN_SAME_POOL, 1, 0),
)


def measure(messages: int, rounds: int) -> ReportTable:
    table = ReportTable(
        "fairness",
        f"Fast messages ({RATE:.0f}/s, many groups) beside a target that takes 30 s per call",
        ("beside",),
        note="Three routers run side by side and get fast messages in turn, a second each. Change "
        "of p99: against the one without a slow target in the same round; wanted: at most 20 %.",
    )
    try:
        found = _rounds(messages, rounds)
    except Unavailable as reason:
        say(f"fairness: left out, {reason}")
        return table
    for name, figures in found.items():
        table.add_rounds((name,), figures)
    return table


def _rounds(messages: int, rounds: int) -> Mapping[str, Sequence[Figures]]:
    found: defaultdict[str, list[Figures]] = defaultdict(list)
    with brokers.running(BROKER) as place, ExitStack() as opened:
        runs = {case.name: opened.enter_context(_running(case, place)) for case in CASES}
        for number in range(rounds):
            say(f"fairness, round {number + 1} of {rounds}")
            waits = _in_turn(runs, messages)
            alone = percentile(waits[CASES[0].name], 0.99)
            for name, seen in waits.items():
                found[name].append(_figures(seen, alone))
    return found


def _in_turn(runs: Mapping[str, Trial], messages: int) -> Mapping[str, Sequence[float]]:
    """Milliseconds of the fast messages. In turn: a machine's bad minute is bad for all."""
    waits: defaultdict[str, list[float]] = defaultdict(list)
    for _ in range(round(messages / RATE)):
        for name, run in runs.items():
            fast = Load(messages=round(RATE), groups=round(RATE) // 3, targets=[run.sink.url])
            waits[name] += [seconds * 1000 for seconds in run.latencies(fast, RATE)]
    return waits


def _figures(waits: Sequence[float], alone: float) -> Figures:
    p99 = percentile(waits, 0.99)
    change = (p99 / alone - 1) * 100
    return {"ms p50": percentile(waits, 0.5), "ms p99": p99, "change of p99, %": change}


@contextmanager
def _running(case: FairnessCase, place: BenchPlace) -> Iterator[Trial]:
    with (
        new_sink(own=True) as sink,
        trial(
            ROUTER,
            place,
            sink,
            _slow(case, sink),
            concurrency=CONCURRENCY,
            pools=2,
            env=AT_ONCE,
            complete=False,
        ) as run,
    ):
        yield run


def _slow(case: FairnessCase, sink: Sink) -> Load:
    return Load(
        messages=case.slow_messages,
        groups=case.slow_groups,
        targets=[sink.slow_url],
        first_pool=case.slow_pool,
    )
