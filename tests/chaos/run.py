"""One run: load, faults, a quiet end, and the checker's verdict."""

import asyncio
import random
import time
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import httpx

from tests.acceptance.process import eventually
from tests.acceptance.site import Site
from tests.chaos.brokers import (
    NARROW_POOLS,
    POOLS,
    SLOW_POOLS,
    ChaosQueue,
    dead_letters,
    prepare,
    publishing_to,
    running,
)
from tests.chaos.history import (
    FINAL,
    SLOW_POOL,
    ChaosReply,
    ChaosViolation,
    Duplicates,
    History,
    check,
)
from tests.chaos.load import (
    FAILING_REPLIES,
    FAST_BACKLOG,
    SLOW_BACKLOG,
    ApiProducer,
    ChaosRecorder,
    Producer,
)
from tests.chaos.nemesis import AFTER_CONSUMING, AFTER_LOOKING_AHEAD, Kill, Killer
from tests.chaos.slot import Slot
from tests.chaos.storm import Fault, Storm, preloading, shims
from tests.outbound.servers import listening
from tests.support.cable import cable_to

DRAIN_SECONDS: Final = 180.0
QUIET_SECONDS: Final = 3.0  # after the last reply: what comes again has time to
OTHER_SECONDS: Final = DRAIN_SECONDS + 180.0  # all but the kills and the storm
SECONDS_PER_KILL: Final = 60.0  # far more than one takes, even on a busy machine

Tell = Callable[[Kill | Fault], None]


@dataclass(frozen=True)
class ChaosOrder:
    """Either kills of one router, or a storm of many kinds of faults for so many seconds."""

    broker: str
    kills: int
    seed: int
    lease: int | None = None  # seconds; None: as suits the broker
    seconds: float = 0.0
    has_slow_pool: bool = False  # whose messages wait in front of all others

    def dice(self, use: str) -> random.Random:
        return random.Random(f"{self.seed} {use}")  # noqa: S311  repeatable


@dataclass
class ChaosResult:
    """What a run has shown."""

    wanted: ChaosOrder
    kills: list[Kill] = field(default_factory=list)
    startup_kills: int = 0
    faults: list[Fault] = field(default_factory=list)
    duplicates: int = 0
    explained: Mapping[str, int] = field(default_factory=dict)  # duplicates, by the fault before
    events: Mapping[str, int] = field(default_factory=dict)  # of the routers' logs
    overtaken: int = 0  # POSTs out of order, where the broker keeps none
    published: int = 0
    posts: int = 0
    dead_letters: int = 0
    waits: Sequence[float] = ()  # for the first POST, beside a slow pool
    seconds: float = 0.0
    violations: Sequence[ChaosViolation] = ()

    @property
    def is_good(self) -> bool:
        return not self.violations and not self.late and len(self.kills) == self.wanted.kills

    @property
    def late(self) -> list[Kill]:
        return [kill for kill in self.kills if kill.is_late]

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
            "late": len(self.late),
            "broken": self.broken(),
            "waits": spread(self.waits),
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


async def run(wanted: ChaosOrder, folder: Path, tell: Tell) -> ChaosResult:
    """Run in a folder, which keeps the dead letters and the logs."""
    began = time.monotonic()
    result = ChaosResult(wanted)
    history = History()
    with running(wanted.broker) as queue:
        await prepare(queue)
        limit = OTHER_SECONDS + wanted.kills * SECONDS_PER_KILL + wanted.seconds
        async with asyncio.timeout(limit):
            slots = await _bring_chaos(result, folder, queue, history, tell)
        history.kept = [body for slot in slots for body in dead_letters(slot.site)]
        history.left = await queue.left()
        promises = queue.promises
    result.published = len(history.published)
    result.posts = len(history.posts)
    result.events = dict(history.events)
    result.dead_letters = len(history.kept)
    result.duplicates = history.duplicates.total()
    result.explained = explain(history, result.faults)
    if wanted.has_slow_pool:
        result.waits = [seconds for _, seconds in history.waits()]
    if promises.knows_publications:
        history.in_doubt.clear()
    may_repeat = wanted.seconds or promises.is_returned_often
    rule = Duplicates.AFTER_A_FAULT if may_repeat else Duplicates.AFTER_A_CRASH
    found = check(history, duplicates=rule)
    keeps_order = promises.order_after_a_crash
    result.overtaken = sum(each.rule == "order" for each in found)
    result.violations = [each for each in found if keeps_order or each.rule != "order"]
    result.seconds = time.monotonic() - began
    return result


async def _bring_chaos(
    result: ChaosResult, folder: Path, queue: ChaosQueue, history: History, tell: Tell
) -> Sequence[Slot]:
    """Return the places of the routers, which have ended."""
    dice = result.wanted.dice
    recorder = ChaosRecorder(history, dice("target"))
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(httpx.AsyncClient(trust_env=False))
        target = await stack.enter_async_context(listening(recorder.script))
        api = ApiProducer(client, dice("routers"))
        producers = await _producers(result.wanted, queue, recorder, stack, url=target.url, api=api)
        slots = []
        for number in range(1, (queue.promises.routers if result.wanted.seconds else 1) + 1):
            site = Site(folder / f"router-{number}")
            site.folder.mkdir()
            slots.append(Slot(number, site, history, recorder, api))
            await _lay_out(slots[-1], result.wanted, queue, stack)
        stop = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as tasks:
                for producer in producers:
                    tasks.create_task(producer.run(stop), name=producer.name)
                await _do_harm(result, slots, queue, history, tell)
                stop.set()
            recorder.crawls = False
            with suppress(TimeoutError):
                await eventually(lambda: not history.waiting, within=DRAIN_SECONDS)
            await asyncio.sleep(QUIET_SECONDS)
            for slot in slots:
                await slot.stop()
        except BaseException as error:
            for slot in slots:
                error.add_note(slot.output())
            raise
        finally:
            for slot in slots:
                await slot.abort()
    return slots


async def _producers(
    wanted: ChaosOrder,
    queue: ChaosQueue,
    recorder: ChaosRecorder,
    stack: AsyncExitStack,
    *,
    url: str,
    api: ApiProducer,
) -> Sequence[Producer]:
    history, dice = recorder.history, wanted.dice
    direct = await stack.enter_async_context(publishing_to(queue))
    can_fail = queue.promises.order_after_a_failure
    producers = [
        Producer("direct", history, url, dice("direct"), direct.put, False, can_fail),
        Producer("api", history, url, dice("api"), api.put, True, can_fail),
    ]
    for producer in producers:
        if queue.promises.is_returned_often:
            producer.replies = FAILING_REPLIES
        if wanted.has_slow_pool:
            producer.max_backlog = FAST_BACKLOG
    if wanted.has_slow_pool:
        producers.append(await _slow_producer(wanted, queue, recorder, stack))
    return producers


async def _slow_producer(
    wanted: ChaosOrder,
    queue: ChaosQueue,
    recorder: ChaosRecorder,
    stack: AsyncExitStack,
) -> Producer:
    """Return one that has filled the slow pool, whose target is slow. It has that for itself."""
    target = await stack.enter_async_context(listening(recorder.script))
    line = await stack.enter_async_context(publishing_to(queue))
    producer = Producer("slow", recorder.history, target.url, wanted.dice("slow"), line.put)
    producer.pool, producer.max_backlog = SLOW_POOL, SLOW_BACKLOG
    producer.replies = {ChaosReply.OK: 100}
    await producer.fill()
    return producer


async def _lay_out(
    slot: Slot, wanted: ChaosOrder, queue: ChaosQueue, stack: AsyncExitStack
) -> None:
    """Prepare the place of a router. In a storm it has a wire, a clock and names of its own."""
    port = None
    if wanted.seconds:
        slot.more_env = preloading(shims(slot.site.folder), slot)
        if queue.server is not None:
            slot.cable = await stack.enter_async_context(cable_to(queue.server.port))
            port = slot.cable.port
    pools = NARROW_POOLS if queue.promises.is_returned_often else POOLS
    if wanted.has_slow_pool:
        pools = SLOW_POOLS
    lease = wanted.lease or queue.promises.lease
    slot.site.configure_queue(
        queue.uri(port), *pools, visibilityTimeout=lease, retry={"backoff": [1]}
    )
    queue.configure(slot.site)


async def _do_harm(
    result: ChaosResult, slots: Sequence[Slot], queue: ChaosQueue, history: History, tell: Tell
) -> None:
    """Leave routers behind that are alive and work."""
    wanted = result.wanted

    def note(kill: Kill) -> None:
        result.kills.append(kill)
        tell(kill)

    if wanted.seconds:
        for slot in slots:
            slot.spawn()
            await slot.ready()
        await Storm(slots, queue, wanted.dice("storm"), tell, result.faults).run(wanted.seconds)
    else:
        pause = AFTER_LOOKING_AHEAD if wanted.has_slow_pool else AFTER_CONSUMING
        killer = Killer(slots[0], queue, history, wanted.dice("kills"), pause)
        await killer.run(wanted.kills, note)
        result.startup_kills = killer.startup_kills


def explain(history: History, faults: Sequence[Fault]) -> Mapping[str, int]:
    """Count the duplicates by the last fault that began before them."""
    began = sorted((fault.began, fault.kind) for fault in faults)
    found: Counter[str] = Counter()
    done: set[str] = set()
    for post in sorted(history.posts, key=lambda each: each.began):
        if post.marker in done:
            place = bisect(began, (post.began, ""))
            found[began[place - 1][1] if place else "none"] += 1
        if post.outcome in FINAL:
            done.add(post.marker)
    return dict(found.most_common())
