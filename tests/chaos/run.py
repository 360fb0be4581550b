"""One run: load, faults, a quiet end, and the checker's verdict."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import httpx

from tests.acceptance.process import eventually
from tests.acceptance.site import Site
from tests.chaos.brokers import BROKERS, Queue, dead_letters
from tests.chaos.history import History, Violation, check
from tests.chaos.load import Api, Producer, Recorder
from tests.chaos.nemesis import Kill, Killer
from tests.outbound.servers import listening

DRAIN_SECONDS: Final = 120.0
OTHER_SECONDS: Final = DRAIN_SECONDS + 60.0  # all but the kills
SECONDS_PER_KILL: Final = 30.0  # far more than one takes, even on a busy machine


@dataclass(frozen=True)
class Wanted:
    broker: str
    kills: int
    seed: int
    lease: int = 30  # seconds


@dataclass
class Result:
    """What a run has shown."""

    wanted: Wanted
    kills: list[Kill] = field(default_factory=list)
    startup_kills: int = 0
    published: int = 0
    posts: int = 0
    dead_letters: int = 0
    seconds: float = 0.0
    violations: Sequence[Violation] = ()

    @property
    def is_good(self) -> bool:
        return not self.violations and not self.late and len(self.kills) == self.wanted.kills

    @property
    def late(self) -> list[Kill]:
        return [kill for kill in self.kills if kill.is_late]

    @property
    def duplicates(self) -> int:
        return sum(kill.duplicates for kill in self.kills)

    def broken(self) -> Counter[str]:
        """Count the violations by rule."""
        return Counter(violation.rule for violation in self.violations)

    @property
    def since_ready(self) -> list[float]:
        return [kill.since_ready for kill in self.kills if kill.since_ready is not None]

    @property
    def since_spawn(self) -> list[float]:
        return [kill.since_spawn for kill in self.kills if kill.since_spawn is not None]

    def as_json(self) -> dict[str, object]:
        return {
            "good": self.is_good,
            **asdict(self),
            "duplicates": self.duplicates,
            "late": len(self.late),
            "broken": self.broken(),
            "firstRedelivery": {
                "sinceReady": spread(self.since_ready),
                "sinceSpawn": spread(self.since_spawn),
            },
        }


def spread(seconds: Sequence[float]) -> Mapping[str, float]:
    """Return the median, the 99th percentile and the longest."""
    if not seconds:
        return {}
    ordered = sorted(seconds)
    last = len(ordered) - 1
    places = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {name: ordered[round(last * place)] for name, place in places.items()}


async def run(wanted: Wanted, folder: Path, tell: Callable[[Kill], None]) -> Result:
    """Run in a folder, which keeps the queue, the dead letters and the logs."""
    began = time.monotonic()
    result = Result(wanted)
    site, history = Site(folder), History()
    queue = BROKERS[wanted.broker](site)
    queue.configure(wanted.lease)

    def note(kill: Kill) -> None:
        result.kills.append(kill)
        tell(kill)

    async with asyncio.timeout(OTHER_SECONDS + wanted.kills * SECONDS_PER_KILL):
        result.startup_kills = await _bring_chaos(wanted, site, queue, history, note)
    history.kept, history.left = dead_letters(site), queue.left()
    result.published = len(history.published)
    result.posts = len(history.posts)
    result.dead_letters = len(history.kept)
    result.violations = check(history)
    result.seconds = time.monotonic() - began
    return result


async def _bring_chaos(
    wanted: Wanted, site: Site, queue: Queue, history: History, tell: Callable[[Kill], None]
) -> int:
    """Return the number of kills during start-up."""

    def dice(use: str) -> random.Random:
        return random.Random(f"{wanted.seed} {use}")  # noqa: S311  repeatable

    recorder = Recorder(history, dice("target"))
    async with httpx.AsyncClient(trust_env=False) as client, listening(recorder.script) as target:
        api = Api(client)
        producers = (
            Producer("file", history, target.url, dice("file"), queue.put),
            Producer("api", history, target.url, dice("api"), api.put, reuse_ids=True),
        )
        killer = Killer(site, queue, history, recorder, api, dice("kills"))
        stop = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as tasks:
                for producer in producers:
                    tasks.create_task(producer.run(stop), name=producer.name)
                await killer.run(wanted.kills, tell)
                stop.set()
            with suppress(TimeoutError):
                await eventually(lambda: not queue.left(), within=DRAIN_SECONDS)
            await killer.stop()
        except BaseException as error:
            error.add_note(killer.output())
            raise
        finally:
            await killer.abandon()
    return killer.startup_kills
