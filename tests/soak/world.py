"""A router for hours, while everything around it comes and goes."""

import asyncio
import json
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx

from tests.acceptance.process import RouterProcess, eventually
from tests.acceptance.site import Site
from tests.outbound.servers import Connection, LoopbackTarget, listening
from tests.soak.verdict import SoakSample

RATE: Final = 20  # messages a second
BATCH: Final = 10  # messages
STEP_SECONDS: Final = 10.0  # between two changes of the routing document
QUEUES: Final = 3  # at a time, and one that stays
POOLS: Final = 8
ORIGINS: Final = 10
GROUP_MESSAGES: Final = 5  # then the group is never used again
LEAVING: Final = 2  # of each kind: they get no more messages before they go
DEAD_SHARE: Final = 0.08  # of the messages: their target answers 404
FAILING_SHARE: Final = 0.02  # likewise, and it answers 503 every time
DEAD_BYTES: Final = 4000  # that make a dead letter larger
LETTERS_LIMIT: Final = "2MiB"
FULL_SECONDS: Final = 30.0  # that the store stays full before somebody empties it
DRAIN_SECONDS: Final = 120.0
STAYS: Final = "stays"
MIB: Final = 1024 * 1024
AUDIT_SECONDS: Final = 60  # so that the audit rows are as many as they get soon
RETRY: Final = {"maxAttempts": 2, "backoff": [1]}
SETTINGS: Final[Mapping[str, str]] = {
    "MESSAGE_ROUTER_DEAD_LETTER_MAX_BYTES": LETTERS_LIMIT,
    "MESSAGE_ROUTER_DEDUP_WINDOW": "60s",
}


@dataclass
class SoakTally:
    """What became of the messages."""

    published: int = 0
    accepted: int = 0
    again: int = 0  # requests for messages that had an answer before
    emptied: int = 0  # times that the full dead-letter store was
    discarded: int = 0  # dead letters
    open: set[str] = field(default_factory=set)  # that no target has answered and no letter has


@dataclass
class SoakWorld:
    site: Site
    router: RouterProcess
    client: httpx.AsyncClient
    tally: SoakTally
    dice: random.Random
    targets: deque[tuple[LoopbackTarget, AsyncExitStack]] = field(default_factory=deque)
    step: int = 0

    async def change(self) -> None:
        """Let one pool and one origin go and another come; every sixth time a queue, too.

        Until the router knows the new ones, messages go to the old ones.
        """
        if len(self.targets) == ORIGINS:
            _, stack = self.targets.popleft()
            await stack.aclose()
        stack = AsyncExitStack()
        self.targets.append((await stack.enter_async_context(listening(self._answer)), stack))
        self._write_document(self.step + 1, _queues(self.step + 1))
        if self.step > 0:
            await self._reload()
        self.step += 1

    async def bring_queues_back(self) -> None:
        """All that there ever were: a queue may have left before its last message ended."""
        newest = int(_queues(self.step)[-1].rpartition("-")[2])
        self._write_document(self.step, [f"queue-{number}" for number in range(newest + 1)])
        await self._reload()

    async def _reload(self) -> None:
        answer = await self.client.post(f"{self.router.url}/config/reload")
        assert answer.status_code == 200, answer.text

    def _write_document(self, step: int, names: Sequence[str]) -> None:
        pools = [{"code": code, "concurrency": 4} for code in _pools(step)]
        queues = [
            {**self.site.queue(name), "queueUri": f"{uri}&audit={AUDIT_SECONDS}", "retry": RETRY}
            for name in (STAYS, *names)
            for uri in [self.site.queue(name)["queueUri"]]
        ]
        self.site.configure_queues(queues, pools)

    async def publish(self) -> None:
        queue = self.dice.choice([STAYS, *_queues(self.step)[LEAVING:]])
        bodies = [self._make() for _ in range(BATCH)]
        self.tally.open |= {str(body["id"]) for body in bodies}
        answer = await self.client.post(f"{self.router.url}/messages?queue={queue}", json=bodies)
        assert answer.status_code == 202, answer.text
        self.tally.published += BATCH

    def _make(self) -> Mapping[str, object]:
        number = self.tally.published + self.dice.randrange(BATCH)
        chance = self.dice.random()
        kind = "dead" if chance < DEAD_SHARE else "fail" if chance > 1 - FAILING_SHARE else "live"
        target, _ = self.dice.choice(list(self.targets)[LEAVING:] or list(self.targets))
        body: dict[str, object] = {
            "id": f"{kind}-{self.tally.published}-{self.dice.randrange(10**12)}",
            "poolCode": self.dice.choice(_pools(self.step)[LEAVING:]),
            "mediationTarget": f"{target.url}/{kind}",
            "messageGroupId": f"g-{number // GROUP_MESSAGES}",
        }
        if kind == "dead":
            body["payload"] = "x" * DEAD_BYTES
        return body

    async def _answer(self, connection: Connection) -> None:
        while True:
            request = await connection.read()
            connection.target.requests.clear()
            message_id = json.loads(request.body)["messageId"]
            await asyncio.sleep(self.dice.uniform(0.001, 0.05))
            self.tally.again += message_id not in self.tally.open
            if not message_id.startswith("live"):
                await connection.reply(404 if message_id.startswith("dead") else 503)
            else:
                await connection.reply()
                self.tally.accepted += message_id in self.tally.open
                self.tally.open.discard(message_id)

    async def empty_letters(self) -> None:
        """Discard every dead letter, as an operator does who has read them."""
        while items := (await self._get("/dead-letters?limit=1000"))["items"]:
            for item in items:
                answer = await self.client.delete(f"{self.router.url}/dead-letters/{item['id']}")
                assert answer.status_code == 200, answer.text
                self.tally.discarded += 1
                self.tally.open.discard(item["messageId"])

    async def is_full(self) -> bool:
        found = await self._get("/warnings?code=DEAD_LETTER_STORE")
        await self.client.delete(f"{self.router.url}/warnings")
        return bool(found)

    async def look(self) -> None:
        """Read what dashboards and monitoring read, with a connection for events."""
        for path in ("/metrics", "/monitoring/health", "/monitoring/pool-stats", "/config"):
            await self.client.get(f"{self.router.url}{path}")
        with suppress(httpx.ReadTimeout):
            async with self.client.stream("GET", f"{self.router.url}/events", timeout=1) as events:
                await anext(events.aiter_bytes())

    def sample(self, minute: float) -> SoakSample:
        proc = Path(f"/proc/{self.router.process.pid}")
        status = dict(
            line.split(":", 1) for line in (proc / "status").read_text().splitlines() if ":" in line
        )
        letters = self.site.folder / "state" / "dead-letters.db"
        return SoakSample(
            minute,
            {
                "resident MiB": int(status["VmRSS"].split()[0]) / 1024,
                "descriptors": float(len(list((proc / "fd").iterdir()))),
                "threads": float(status["Threads"]),
                "queue log MiB": _mib(self.site.queue_file, "-wal"),
                "queue file MiB": _mib(self.site.queue_file),
                "letters log MiB": _mib(letters, "-wal"),
                "letters file MiB": _mib(letters),
            },
        )

    async def _get(self, path: str) -> Any:
        return (await self.client.get(f"{self.router.url}{path}")).json()


def _pools(step: int) -> list[str]:
    return [f"POOL-{step + number}" for number in range(POOLS)]


def _queues(step: int) -> list[str]:
    return [f"queue-{step // 6 + number}" for number in range(QUEUES)]


async def soak(
    minutes: float, folder: Path, seed: int, tell: Callable[[SoakSample, SoakTally], None]
) -> tuple[list[SoakSample], SoakTally, list[str]]:
    """Return the samples, one a minute, what became of the messages, and what is wrong."""
    async with _world(folder, seed) as world:
        samples: list[SoakSample] = []
        began = time.monotonic()
        every = min(60.0, minutes * 60 / 30)  # a short run has 30 samples

        async def sample() -> None:
            samples.append(world.sample((time.monotonic() - began) / 60))
            tell(samples[-1], world.tally)

        chores = (
            (BATCH / RATE, world.publish),
            (STEP_SECONDS, world.change),
            (FULL_SECONDS, lambda: _empty_if_full(world)),
            (min(20.0, every), world.look),
            (every, sample),
        )
        over = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            for pause, chore in chores:
                tasks.create_task(_repeat(pause, chore, over))
            await asyncio.sleep(minutes * 60)
            over.set()
        wrong = await _end(world)
    return samples, world.tally, wrong


@asynccontextmanager
async def _world(folder: Path, seed: int) -> AsyncIterator[SoakWorld]:
    site = Site(folder)
    site.settings |= SETTINGS
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(httpx.AsyncClient(trust_env=False, timeout=60))
        dice = random.Random(seed)  # noqa: S311  repeatable
        world = SoakWorld(site, None, client, SoakTally(), dice)  # type: ignore[arg-type]
        stack.push_async_callback(_close_targets, world)
        await world.change()
        world.router = await stack.enter_async_context(site.router())
        yield world


async def _close_targets(world: SoakWorld) -> None:
    for _, stack in world.targets:
        await stack.aclose()


async def _repeat(pause: float, chore: Callable[[], Awaitable[None]], over: asyncio.Event) -> None:
    while True:
        with suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), pause)
        if over.is_set():
            return
        await chore()


async def _empty_if_full(world: SoakWorld) -> None:
    if await world.is_full():
        world.tally.emptied += 1
        await world.empty_letters()


async def _end(world: SoakWorld) -> list[str]:
    """Let everything come to its end. Return what is wrong."""
    await world.bring_queues_back()
    await world.empty_letters()
    with suppress(TimeoutError):
        await eventually(lambda: not world.site.unsettled(), within=DRAIN_SECONDS)
    await world.empty_letters()
    wrong = [f"{each} was neither accepted nor kept" for each in sorted(world.tally.open)]
    wrong += [f"{each} is still in the queue" for each in sorted(world.site.unsettled())]
    code = await world.router.stop()
    return wrong if code == 0 else [*wrong, f"the router ended with exit code {code}"]


def _mib(file: Path, suffix: str = "") -> float:
    file = file.with_name(f"{file.name}{suffix}")
    return file.stat().st_size / MIB if file.exists() else 0.0
