"""Queue to target with the real process: rate, CPU, latency and memory, per broker."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from bench import brokers, references
from bench.brokers import BenchPlace, Unavailable
from bench.contenders import ROUTER, Contender
from bench.load import Load
from bench.measure import percentile
from bench.report import ReportTable, say
from bench.sink import new_sink
from bench.trial import Trial, trial

RATE: Final = 200.0  # per second, where latency is measured at a fixed rate
STEADY_MESSAGES: Final = 600
BURST_MESSAGES: Final = 500
LATENCY_GROUPS: Final = 100
CPU: Final = "CPU µs"
TIMES: Final = "CPU, times the router's"
WRK: Final = "limit: wrk, HTTP alone"

Figures = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class TrialOrder:
    messages: int
    groups: int
    rounds: int
    brokers: Sequence[str]
    contenders: Sequence[Contender]  # beside the router
    ids_in_url: bool = False


def measure(wanted: TrialOrder) -> ReportTable:
    table = ReportTable(
        "throughput",
        f"Queue to target: {wanted.messages:,} messages waiting, {wanted.groups:,} groups",
        ("broker", "by"),
        note="Every trial is checked: each id once, in the order of its group, the queue empty.",
    )
    for broker in wanted.brokers:
        try:
            with brokers.running(broker) as place:
                _measure_broker(table, wanted, broker, place)
        except Unavailable as reason:
            say(f"{broker}: left out, {reason}")
    return table


def _measure_broker(table: ReportTable, wanted: TrialOrder, broker: str, place: BenchPlace) -> None:
    found: defaultdict[str, list[Figures]] = defaultdict(list)
    contenders = [each for each in (ROUTER, *wanted.contenders) if _runs_on(each, broker)]
    for number in range(wanted.rounds):
        say(f"{broker}, round {number + 1} of {wanted.rounds}: {len(contenders)} contenders")
        figures = _limit() | {each.name: _trial(wanted, each, place) for each in contenders}
        for name, seen in _compared(figures).items():
            found[name].append(seen)
    for name, rounds in found.items():
        table.add_rounds((broker, name), rounds)


def _compared(figures: Mapping[str, Figures]) -> Mapping[str, Figures]:
    """With the CPU of each as a multiple of the router's, in the same round."""
    ours = figures[ROUTER.name][CPU]
    return {name: {**seen, TIMES: seen[CPU] / ours} for name, seen in figures.items()}


def _runs_on(contender: Contender, broker: str) -> bool:
    return contender.brokers is None or broker in contender.brokers


def _limit() -> dict[str, Figures]:
    with new_sink() as target:
        limit = references.wrk(target)
    return {} if limit is None else {WRK: {"messages/s": limit.rate, CPU: limit.cpu_us}}


def _trial(wanted: TrialOrder, contender: Contender, place: BenchPlace) -> Figures:
    limits = (wanted.messages, contender.messages, place.most)
    messages = min(limit for limit in limits if limit is not None)
    with new_sink() as target:
        load = Load(
            messages=messages,
            groups=wanted.groups,
            targets=[target.url],
            ids_in_url=wanted.ids_in_url,
        )
        with trial(contender, place, target, load) as run:
            pace = run.watch(load)
            steady = _latency(run, wanted, STEADY_MESSAGES, RATE)
            burst = _latency(run, wanted, BURST_MESSAGES, None)
            peak = run.contender.process.peak_mib
    return {
        "messages/s": pace.rate,
        CPU: pace.cpu_us,
        f"ms p50 at {RATE:.0f}/s": percentile(steady, 0.5),
        f"ms p99 at {RATE:.0f}/s": percentile(steady, 0.99),
        "ms p50 full speed": percentile(burst, 0.5),
        "ms p99 full speed": percentile(burst, 0.99),
        "peak MiB": peak,
    }


def _latency(run: Trial, wanted: TrialOrder, messages: int, rate: float | None) -> list[float]:
    """In milliseconds."""
    load = Load(
        messages=messages,
        groups=LATENCY_GROUPS,
        targets=[run.sink.url],
        ids_in_url=wanted.ids_in_url,
    )
    return [seconds * 1000 for seconds in run.latencies(load, rate)]
