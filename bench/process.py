"""Bounds of the whole process: how soon it is ready, and what it costs when nothing happens."""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from bench import brokers
from bench.contenders import ROUTER, ContenderJob, RunningContender, running
from bench.measure import spread
from bench.report import ReportTable, say

IDLE_SECONDS: Final = 10.0
SETTLE_SECONDS: Final = 2.0  # what starting still has to do


def measure(rounds: int) -> ReportTable:
    say("process: start and idle")
    starts = []
    for _ in range(rounds):
        with _router() as router:
            starts.append(router.seconds_to_ready)
    with _router() as router:
        time.sleep(SETTLE_SECONDS)
        before = router.process.cpu_seconds
        time.sleep(IDLE_SECONDS)
        share = (router.process.cpu_seconds - before) / IDLE_SECONDS * 100
        resident = router.process.resident_mib
    table = ReportTable("process", "The process (SQLite queue)", ("what",))
    table.add(("start to ready",), {"seconds": spread(starts)})
    table.add(("idle",), {"% of a core": spread([share]), "MiB": spread([resident])})
    return table


@contextmanager
def _router() -> Iterator[RunningContender]:
    with brokers.running("SQLite") as place, tempfile.TemporaryDirectory() as folder:
        job = ContenderJob(folder=Path(folder), queue=place.new_queue())
        with running(ROUTER, job) as router:
            yield router
