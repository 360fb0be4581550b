"""What counting, timing and remembering costs: the engine with its instruments and without.

Both run in turn in one process, so that what else the machine does meets both alike. Without means
that objects of the same interface, which do nothing, are put in their places as the engine is made.
What a message carries along for its story and its trace cannot be taken out: it is timed by itself.
"""

import time
import timeit
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType

import uvloop

from bench.engine import AcceptingSender, MadeUpQueue, OneQueue, engine
from bench.measure import spread
from bench.report import ReportTable, say
from router.core.history import Fate, Try
from router.core.ledger import Ledger
from router.core.outcome import Metric
from router.core.stats import Counts, Deliveries
from router.core.trace import UNRECORDED, request_span
from router.engine import delivery, queue_manager, registry
from router.engine.job import Job
from router.engine.registry import Journal

BOUND = 10.0  # microseconds per message
GROUPS = 1_000
POOLS = 10
PAIRS = 3  # in each round
TIMINGS = 100_000


class NoCounts(Counts):
    def receive(self, hand_overs: int, now: float) -> None:
        pass

    def record(self, metric: Metric | None, now: float, hand_overs: int = 1) -> None:
        pass

    def call(self, verb: str, result: str) -> None:
        pass


class NoDeliveries(Deliveries):
    def record(self, metric: Metric | None, now: float, hand_overs: int = 1) -> None:
        pass

    def time(self, seconds: float, now: float) -> None:
        pass


class NoLedger(Ledger):
    def end(self, fate: Fate, hand_overs: int = 1) -> None:
        pass

    def unaccounted(self, held: int) -> int:
        return 0  # nothing is counted, so nothing can be missed


class NoJournal(Journal):
    def note(self, jobs: Iterable[Job], fate: Fate, now: float) -> None:
        pass


PLACES = (  # where the engine takes them from
    (queue_manager, "Counts", NoCounts),
    (delivery, "Deliveries", NoDeliveries),
    (registry, "Ledger", NoLedger),
)


@contextmanager
def replaced(module: ModuleType, name: str, by: type) -> Iterator[None]:
    """For what is made within."""
    original = getattr(module, name)
    setattr(module, name, by)
    try:
        yield
    finally:
        setattr(module, name, original)


async def cost(messages: int, *, instruments: bool) -> float:
    """CPU microseconds per message."""
    queue = MadeUpQueue(messages, GROUPS, POOLS)
    journal = Journal() if instruments else NoJournal()
    with ExitStack() as places:
        for place in () if instruments else PLACES:
            places.enter_context(replaced(*place))
        async with engine(OneQueue(queue), AcceptingSender(), POOLS, journal):
            places.close()
            before = time.process_time()
            await queue.done.wait()
            spent = time.process_time() - before
    return spent / messages * 1e6


def measure(messages: int, rounds: int) -> ReportTable:
    say("instrumentation")
    pairs = [_pair(messages) for _ in range(PAIRS * rounds + 1)][1:]  # the first one warms up
    rows = {
        "the engine with instruments": [whole for whole, _ in pairs],
        "the engine without": [bare for _, bare in pairs],
        "counting and remembering": [whole - bare for whole, bare in pairs],
        "its tries": [_each(lambda: (*(), Try(1.5, 2.5 - 1.5, 200, None)))],
        "its span": [_each(_new_span)],
    }
    table = ReportTable(
        "instrumentation",
        "Counting, timing and remembering, metrics on, traces off",
        ("what",),
        note=f"Wanted: the last three together at most {BOUND:g} µs.",
    )
    for name, costs in rows.items():
        table.add((name,), {"CPU µs": spread(costs)})
    return table


def _new_span() -> str:
    return request_span("0HZXEQ5Y00000001", 1.5, None, UNRECORDED).traceparent


def _pair(messages: int) -> tuple[float, float]:
    """With instruments, and without."""
    whole, bare = cost(messages, instruments=True), cost(messages, instruments=False)
    return uvloop.run(whole), uvloop.run(bare)


def _each(work: Callable[[], object]) -> float:
    spent = timeit.repeat(work, timer=time.process_time, number=TIMINGS, repeat=5)
    return min(spent) / TIMINGS * 1e6
