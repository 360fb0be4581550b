"""`./dev chaos --strict`: routers are killed, paused and stopped beside a judge of strict order.

A request for number n of a group is legal only if all numbers before it were accepted; with
`onFailure: "skip"`, also if they were made to fail. A second open request of a group is an overlap.
"""

import asyncio
import random
import signal
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Final

from router.core.config import Ordering
from tests.acceptance.process import RouterProcess, eventually, start
from tests.acceptance.site import Site
from tests.chaos.brokers import BROKERS, FIFO, ChaosQueue, prepare, publishing_to, running
from tests.chaos.history import Body
from tests.outbound.servers import Connection, listening
from tests.support.servers.postgres import postgres_server

GROUPS: Final = 50
FAILS_EVERY: Final = 37  # messages, once
ANSWER_SECONDS: Final = (0.002, 0.03)
BATCH: Final = 10
BATCH_SECONDS: Final = 0.05
MAX_BACKLOG: Final = 600  # messages
MIN_MESSAGES: Final = 400
LEASE: Final = 5  # seconds
BEFORE_KILL_SECONDS: Final = (0.1, 2.0)
# Three heartbeats of the brokers, and longer than the lock of a queue is kept.
PAUSE_SECONDS: Final = 14.0
WORKING_SECONDS: Final = 180.0  # a router that was started delivers within it:
WORKING_MESSAGES: Final = 50
DRAIN_SECONDS: Final = 180.0
QUIET_SECONDS: Final = 2.0
POOL: Final[dict[str, object]] = {"code": "GROUPED", "concurrency": 16}
HEARTBEATS: Final = {
    "rabbitmq": "&heartbeat=2",
    "rabbitmq-quorum": "&heartbeat=2",
    "activemq": "?heartbeat=2",
}
HOLDS_GROUPS: Final = frozenset({"sqlite", "postgres", "pgmq-fifo", "sqs"})
STRICT_BROKERS: Final = sorted({*BROKERS, *FIFO, "rabbitmq-quorum"})
ON_FAILURE: Final = ("park", "block", "skip")


@dataclass(frozen=True)
class StrictOrder:
    broker: str
    kills: int
    seed: int
    pauses: int = 0
    routers: int = 1
    on_failure: str = "park"
    share: bool = False
    stops: int = 0

    @property
    def needs_store(self) -> bool:
        """Whether the routers need an order store that they share."""
        return self.share or (self.routers > 1 and self.broker not in HOLDS_GROUPS)


@dataclass
class StrictResult:
    """What a run has shown."""

    wanted: StrictOrder
    published: int = 0
    requests: int = 0
    failed: int = 0  # by the target, on purpose
    repeats: int = 0  # requests for what was accepted before
    overtakes: list[str] = field(default_factory=list)
    overlaps: int = 0  # of a request that was open when its router was killed or paused
    strange_overlaps: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    tracebacks: list[str] = field(default_factory=list)
    kills: int = 0
    pauses: int = 0
    stops: int = 0
    seconds: float = 0.0

    @property
    def is_good(self) -> bool:
        wanted = self.wanted
        done = self.kills == wanted.kills and self.pauses == wanted.pauses
        done = done and self.stops == wanted.stops
        broken = [*self.overtakes, *self.strange_overlaps, *self.lost, *self.tracebacks]
        return done and not broken

    def as_json(self) -> dict[str, object]:
        return {"good": self.is_good, **asdict(self)}


@dataclass
class Group:
    accepted: set[int] = field(default_factory=set)
    passed: set[int] = field(default_factory=set)  # accepted, or skipped
    first_missing: int = 1
    open: dict[int, float] = field(default_factory=dict)  # requests: since when

    def go_on_after(self, number: int) -> None:
        self.passed.add(number)
        while self.first_missing in self.passed:
            self.first_missing += 1


class StrictTarget:
    """Judges every request, and fails every 37th message once."""

    def __init__(self, result: StrictResult, dice: random.Random) -> None:
        self.groups: defaultdict[str, Group] = defaultdict(Group)
        self.accepted = 0
        self.disturbed: list[float] = []  # when a router was killed, paused or went on
        self._result = result
        self._dice = dice
        self._requests = count(1)
        self._failed: set[tuple[str, int]] = set()

    async def script(self, connection: Connection) -> None:
        while True:
            request = await connection.read()
            connection.target.requests.clear()
            *_, name, number = request.line.split()[1].split("/")
            await self._serve(connection, name, int(number))

    async def _serve(self, connection: Connection, name: str, number: int) -> None:
        group, result, now = self.groups[name], self._result, time.monotonic()
        result.requests += 1
        if number > group.first_missing:
            result.overtakes.append(f"{name}/{number} before {name}/{group.first_missing}")
        if group.open:
            since = min(group.open.values())
            if any(each >= since for each in self.disturbed):
                result.overlaps += 1
            else:
                result.strange_overlaps.append(f"{name}/{number}")
        result.repeats += number in group.accepted
        request = next(self._requests)
        group.open[request] = now
        try:
            await asyncio.sleep(self._dice.uniform(*ANSWER_SECONDS))
        finally:
            del group.open[request]
        if connection.reader.at_eof():
            raise ConnectionError
        message = name, number
        if (int(name) + GROUPS * number) % FAILS_EVERY == 0 and message not in self._failed:
            self._failed.add(message)
            result.failed += 1
            if result.wanted.on_failure == "skip":
                group.go_on_after(number)
            await connection.reply(429, b"", "Retry-After: 1")
            return
        if number not in group.accepted:
            group.accepted.add(number)
            group.go_on_after(number)
            self.accepted += 1
        await connection.reply()


class StrictRun:
    def __init__(
        self, result: StrictResult, folder: Path, queue: ChaosQueue, tell: Callable[[str], None]
    ) -> None:
        self._result = result
        self._folder = folder
        self._queue = queue
        self._tell = tell
        self._dice = random.Random(f"{result.wanted.seed} strict")  # noqa: S311  repeatable
        self.target = StrictTarget(result, self._dice)
        self._sites: list[Site] = []
        self._routers: list[RouterProcess] = []

    async def run(self, store: str | None) -> None:
        result, wanted = self._result, self._result.wanted
        for number in range(wanted.routers):
            site = Site(self._folder / f"router-{number + 1}")
            site.folder.mkdir()
            uri = self._queue.uri() + HEARTBEATS.get(wanted.broker, "")
            retry = {"backoff": [1]}
            options = {
                "visibilityTimeout": LEASE,
                "ordering": "strict",
                "onFailure": wanted.on_failure,
                "share": wanted.share,
                "retry": retry,
            }
            site.configure_queue(uri, POOL, **options)
            self._queue.configure(site)
            if store is not None:
                site.settings["MESSAGE_ROUTER_ORDER_STORE"] = store
            self._sites.append(site)
        async with AsyncExitStack() as stack:
            target = await stack.enter_async_context(listening(self.target.script))
            publishing = publishing_to(self._queue, Ordering.STRICT)
            direct = await stack.enter_async_context(publishing)
            stop = asyncio.Event()
            try:
                for number in range(wanted.routers):
                    self._routers.append(self._start(number))
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._publish(target.url, direct.put, stop))
                    await self._do_harm()
                    await eventually(lambda: result.published >= MIN_MESSAGES, within=DRAIN_SECONDS)
                    stop.set()
                with suppress(TimeoutError):
                    await eventually(
                        lambda: self.target.accepted >= result.published, within=DRAIN_SECONDS
                    )
                await asyncio.sleep(QUIET_SECONDS)
            finally:
                for router in self._routers:
                    await router.kill()
                    result.tracebacks += router.tracebacks()

    def _start(self, number: int) -> RouterProcess:
        site = self._sites[number]
        return start(site.env, site.port, site.folder)

    async def _publish(
        self,
        url: str,
        put: Callable[[Sequence[Body]], Awaitable[None]],
        stop: asyncio.Event,
    ) -> None:
        numbers = [0] * GROUPS
        while not stop.is_set():
            if self._result.published - self.target.accepted < MAX_BACKLOG:
                batch: list[Body] = []
                for _ in range(BATCH):
                    group = self._dice.randrange(GROUPS)
                    numbers[group] += 1
                    batch.append(
                        {
                            "id": f"{group}-{numbers[group]}",
                            "messageGroupId": str(group),
                            "poolCode": POOL["code"],
                            "mediationTarget": f"{url}/{group}/{numbers[group]}",
                        }
                    )
                await put(batch)
                self._result.published += len(batch)
            await asyncio.sleep(BATCH_SECONDS)
        self._result.lost = [
            f"{group}/{number}"
            for group in range(GROUPS)
            for number in range(1, numbers[group] + 1)
        ]

    async def _do_harm(self) -> None:
        wanted, result, dice = self._result.wanted, self._result, self._dice
        harm = ["kill"] * wanted.kills + ["pause"] * wanted.pauses + ["stop"] * wanted.stops
        dice.shuffle(harm)
        for done, kind in enumerate(harm, 1):
            await self._until_it_works()
            await asyncio.sleep(dice.uniform(*BEFORE_KILL_SECONDS))
            number = dice.randrange(wanted.routers)
            if kind == "kill":
                await self._kill(number)
                result.kills += 1
            elif kind == "stop":
                await self._stop(number)
                result.stops += 1
            else:
                await self._pause(number)
                result.pauses += 1
            self._tell(
                f"{kind} {done}/{len(harm)}  router {number + 1}  accepted"
                f" {self.target.accepted}  repeats {result.repeats}  overlaps {result.overlaps}"
                f"  overtakes {len(result.overtakes)}"
            )
        await self._until_it_works()

    async def _kill(self, number: int) -> None:
        router = self._routers[number]
        self.target.disturbed.append(time.monotonic())
        await router.kill()
        self._result.tracebacks += router.tracebacks()
        self._routers[number] = self._start(number)

    async def _stop(self, number: int) -> None:
        """Stop a router in peace: open requests end, and all else goes back."""
        router = self._routers[number]
        await router.stop()
        self._result.tracebacks += router.tracebacks()
        self._routers[number] = self._start(number)

    async def _pause(self, number: int) -> None:
        router = self._routers[number]
        self.target.disturbed.append(time.monotonic())
        router.send(signal.SIGSTOP)
        await asyncio.sleep(PAUSE_SECONDS)
        self.target.disturbed.append(time.monotonic())
        router.send(signal.SIGCONT)

    async def _until_it_works(self) -> None:
        """More than what was in the store or on its way."""
        wanted = self.target.accepted + WORKING_MESSAGES
        await eventually(lambda: self.target.accepted >= wanted, within=WORKING_SECONDS)


async def run_strict(
    wanted: StrictOrder, folder: Path, tell: Callable[[str], None]
) -> StrictResult:
    """Run in a folder, which keeps the order stores and the logs."""
    began, result = time.monotonic(), StrictResult(wanted)
    async with AsyncExitStack() as stack:
        queue = stack.enter_context(running(wanted.broker))
        store = stack.enter_context(postgres_server()).url if wanted.needs_store else None
        await prepare(queue)
        strict = StrictRun(result, folder, queue, tell)
        await strict.run(store)
    groups = strict.target.groups
    result.lost = [
        each
        for each in result.lost
        if int(each.partition("/")[2]) not in groups[each.partition("/")[0]].accepted
    ]
    result.seconds = time.monotonic() - began
    return result
