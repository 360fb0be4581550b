"""One trial: a queue is filled, a contender empties it into the sink, and nothing may go wrong."""

import asyncio
import itertools
import json
import tempfile
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from bench.brokers import NOTHING, BenchPlace, left_in, publisher
from bench.contenders import CONCURRENCY, Contender, ContenderJob, RunningContender, running
from bench.load import Load
from bench.sink import Sink
from router.core.config import QueueConfig
from router.ports import Publication

CHUNK: Final = 500  # messages of one publish
PATIENCE: Final = 60.0  # seconds without any arrival: something is stuck
LOOK_EVERY: Final = 0.01
WARM_UP: Final = 0.1  # of the messages: starting is measured elsewhere


class Spoilt(Exception):
    """A trial went wrong: its figures mean nothing, and the benchmark fails."""


class TrialLine(Protocol):
    """A way into the queue."""

    async def publish(self, items: Sequence[Publication]) -> object: ...


@dataclass(frozen=True, slots=True)
class Pace:
    """What delivering cost, and how fast it was."""

    rate: float  # messages per second
    cpu_us: float  # of the contender's process and its children, per message


@dataclass(slots=True)
class Trial:
    sink: Sink
    place: BenchPlace
    queue: QueueConfig
    contender: RunningContender
    sent: list[Load]
    _seen_before: int

    def watch(self, load: Load, first: int | None = None) -> Pace:
        """From the end of the warm-up until all (or the first so many) of the load have arrived."""
        wanted = first or load.messages
        if self.place.lives_in_router:
            threading.Thread(target=asyncio.run, args=(self._fill(load),), daemon=True).start()
        self._until(round(wanted * WARM_UP))
        count, cpu, at = self._arrived(), self.contender.process.cpu_seconds, time.monotonic()
        self._until(wanted)
        delivered = self._arrived() - count
        spent, took = self.contender.process.cpu_seconds - cpu, time.monotonic() - at
        return Pace(delivered / took, spent / delivered * 1e6)

    def latencies(self, load: Load, per_second: float | None) -> list[float]:
        """Seconds from publish to the target's answer. None: published as fast as it goes."""
        self.sent.append(load)
        before = self.sink.count()
        published = asyncio.run(self._at_rate(load, per_second))
        self._until(load.messages, before)
        arrivals = self.sink.arrivals()
        _refuse(load.faults([each.id for each in arrivals]))
        at = {each.id: each.at for each in arrivals}
        return [at[load.id(number)] - then for number, then in enumerate(published)]

    def _arrived(self) -> int:
        return self.sink.count() - self._seen_before

    def _until(self, wanted: int, before: int | None = None) -> None:
        before = self._seen_before if before is None else before
        last, changed = -1, time.monotonic()
        while (count := self.sink.count() - before) < wanted:
            if count != last:
                last, changed = count, time.monotonic()
            if self.contender.has_ended() or time.monotonic() - changed > PATIENCE:
                raise Spoilt(f"{count} of {wanted} messages arrived, and then no more")
            time.sleep(LOOK_EVERY)

    async def _fill(self, load: Load) -> None:
        async with self._line() as line:
            await _publish(line, load)

    async def _at_rate(self, load: Load, per_second: float | None) -> list[float]:
        """When each was published."""
        step = max(round((per_second or 1e5) / 100), 1)
        published: list[float] = []
        async with self._line() as line:
            started = time.time()
            for first in range(0, load.messages, step):
                items = load.publications(first, first + step)
                if per_second is not None:
                    await asyncio.sleep(max(started + first / per_second - time.time(), 0.0))
                published += itertools.repeat(time.time(), len(items))
                await line.publish(items)
        return published

    @asynccontextmanager
    async def _line(self) -> AsyncIterator[TrialLine]:
        if self.place.lives_in_router:
            yield ApiLine(f"{self.contender.url}/messages?queue={self.queue.name}")
            return
        async with publisher(self.queue) as line:
            yield line


@dataclass(frozen=True, slots=True)
class ApiLine:
    """The router's own way of publishing."""

    url: str

    async def publish(self, items: Sequence[Publication]) -> object:
        return await asyncio.to_thread(self._post, items)

    def _post(self, items: Sequence[Publication]) -> None:
        content = json.dumps([json.loads(each.body) for each in items]).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url, content, headers)  # noqa: S310  ours, by http
        with urllib.request.urlopen(request, timeout=PATIENCE):  # noqa: S310  ours, by http
            return


@contextmanager
def trial(
    contender: Contender,
    place: BenchPlace,
    sink: Sink,
    backlog: Load,
    *,
    concurrency: int = CONCURRENCY,
    pools: int | None = None,
    env: Mapping[str, str] = NOTHING,
    complete: bool = True,
) -> Iterator[Trial]:
    """A contender that runs, with the backlog in front of it; checked at the end.

    `complete`: all of the backlog is delivered in the block. Else it is stopped in the middle.
    """
    queue = place.new_queue()
    before = sink.count()
    if not place.lives_in_router:
        asyncio.run(fill(queue, backlog))
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        job = ContenderJob(
            folder=Path(folder),
            queue=queue,
            env={**place.env, **env},
            pools=pools or backlog.pools,
            concurrency=concurrency,
        )
        with running(contender, job) as process:
            opened = Trial(sink, place, queue, process, [backlog], before)
            yield opened
    _check(opened, complete=complete)


async def fill(queue: QueueConfig, load: Load) -> None:
    async with publisher(queue) as line:
        await _publish(line, load)


async def _publish(line: TrialLine, load: Load) -> None:
    for first in range(0, load.messages, CHUNK):
        await line.publish(load.publications(first, first + CHUNK))


def _check(done: Trial, *, complete: bool) -> None:
    arrived = [each.id for each in done.sink.arrivals()]
    backlog, *later = done.sent
    faults = backlog.faults(arrived, complete=complete)
    faults += [fault for load in later for fault in load.faults(arrived)]
    if complete and not done.place.lives_in_router and (left := asyncio.run(left_in(done.queue))):
        faults.append(f"{left} delivered and not acknowledged")
    _refuse(faults)


def _refuse(faults: Sequence[str]) -> None:
    if faults:
        raise Spoilt("; ".join(faults))
