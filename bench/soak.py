"""A long run at a fixed rate: whether memory grows."""

import statistics
import threading
from collections.abc import Sequence
from typing import Final

from bench import brokers
from bench.contenders import ROUTER
from bench.load import Load
from bench.measure import Watched, percentile, spread
from bench.progress import say
from bench.report import Table
from bench.sink import new_sink
from bench.trial import trial

BROKER: Final = "SQLite"
RATE: Final = 300.0
SAMPLES_PER_MINUTE: Final = 60
NOTHING_WAITS: Final = 0


def measure(minutes: float) -> Table:
    say(f"soak: {minutes:g} minutes at {RATE:.0f} messages/s")
    messages = round(RATE * minutes * 60)
    samples: list[float] = []
    with brokers.running(BROKER) as place, new_sink() as sink:
        nothing = Load(messages=NOTHING_WAITS, groups=1, targets=[sink.url])
        with trial(ROUTER, place, sink, nothing) as run:
            load = Load(messages=messages, groups=1_000, targets=[sink.url])
            over = threading.Event()
            sampling = threading.Thread(target=_sample, args=(run.contender.process, samples, over))
            sampling.start()
            waits = run.latencies(load, RATE)
            over.set()
            sampling.join()
    return _table(samples, waits, minutes)


def _sample(process: Watched, samples: list[float], over: threading.Event) -> None:
    while not over.wait(60 / SAMPLES_PER_MINUTE):
        samples.append(process.resident_mib)


def _table(samples: Sequence[float], waits: Sequence[float], minutes: float) -> Table:
    table = Table(
        "soak",
        f"{minutes:g} minutes at {RATE:.0f} messages/s ({BROKER} queue): memory, minute by minute",
        ("minute",),
        note=f"{growth(samples):+.1f} MiB from the second minute to the last;"
        f" publish to answer p50 {percentile(waits, 0.5) * 1000:.0f} ms,"
        f" p99 {percentile(waits, 0.99) * 1000:.0f} ms.",
    )
    for number, minute in enumerate(_minutes(samples), start=1):
        table.add((str(number),), {"resident MiB": spread(minute)})
    return table


def growth(samples: Sequence[float]) -> float:
    """From the second minute, when everything that warms up is warm, to the last."""
    minutes = [statistics.median(minute) for minute in _minutes(samples)]
    return minutes[-1] - minutes[min(1, len(minutes) - 1)]


def _minutes(samples: Sequence[float]) -> list[Sequence[float]]:
    """The last one may be short."""
    starts = range(0, len(samples), SAMPLES_PER_MINUTE)
    return [samples[start : start + SAMPLES_PER_MINUTE] for start in starts]
