"""What a target that takes 30 seconds per call does to the others: nothing, if all is well."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Final

from bench import brokers
from bench.brokers import Unavailable
from bench.contenders import ROUTER
from bench.load import Load
from bench.measure import percentile, spread
from bench.progress import say
from bench.report import Table
from bench.sink import Sink, new_sink
from bench.trial import trial

BROKER: Final = "NATS"
CONCURRENCY: Final = 20
RATE: Final = 300.0
SLOW_MESSAGES: Final = 100
AT_ONCE: Final = {"MESSAGE_ROUTER_SHUTDOWN_TIMEOUT": "1s"}  # the slow ones need not end


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    slow_messages: int
    slow_groups: int
    slow_pool: int


CASES: Final = (
    Case("no slow target", 0, 1, 1),
    Case("slow target, in its own pool", SLOW_MESSAGES, SLOW_MESSAGES, 1),
    Case("slow target, a group of the same pool", SLOW_MESSAGES, 1, 0),
)


def measure(messages: int, rounds: int) -> Table:
    table = Table(
        "fairness",
        f"Fast messages ({RATE:.0f}/s, many groups) beside a target that takes 30 s per call",
        ("beside",),
        note="Change of p99: against the same round without a slow target; wanted: at most 20 %.",
    )
    try:
        found = _rounds(messages, rounds)
    except Unavailable as reason:
        say(f"fairness: left out, {reason}")
        return table
    for name, figures in found.items():
        columns = {key: spread([each[key] for each in figures]) for key in figures[0]}
        table.add((name,), columns)
    return table


def _rounds(messages: int, rounds: int) -> dict[str, list[dict[str, float]]]:
    found: defaultdict[str, list[dict[str, float]]] = defaultdict(list)
    for number in range(rounds):
        alone = None
        for case in CASES:
            say(f"fairness, round {number + 1} of {rounds}: {case.name}")
            waits = _latencies(case, messages)
            p99 = percentile(waits, 0.99)
            alone = alone or p99
            change = (p99 / alone - 1) * 100
            figures = {"ms p50": percentile(waits, 0.5), "ms p99": p99, "change of p99, %": change}
            found[case.name].append(figures)
    return found


def _latencies(case: Case, messages: int) -> list[float]:
    """Of the fast ones, in milliseconds."""
    with (
        brokers.running(BROKER) as place,
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
        fast = Load(messages=messages, groups=messages // 3, targets=[sink.url])
        return [seconds * 1000 for seconds in run.latencies(fast, RATE)]


def _slow(case: Case, sink: Sink) -> Load:
    return Load(
        messages=case.slow_messages,
        groups=case.slow_groups,
        targets=[sink.slow_url],
        first_pool=case.slow_pool,
    )
