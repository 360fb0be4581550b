"""One trial of ROUTE-5: many messages of a slow pool in front, a few of a fast pool behind them.

The real process on a real broker. First the messages of the fast pool have to be delivered although
the slow pool is full. Then the slow pool gets more workers and its target becomes fast: all that
waited, was held or was deferred has to come, in the order of its groups.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.acceptance.process import RouterProcess, eventually
from tests.acceptance.site import Site
from tests.acceptance.targets import id_of
from tests.chaos.brokers import prepare, publishing_to, running
from tests.chaos.history import Body
from tests.outbound.servers import Connection, listening

SLOW_SECONDS: Final = 2.0  # for one request, of one worker
FAST_MESSAGES: Final = 20
GROUPS: Final = 25
WORKERS_LATER: Final = 50
BATCH: Final = 500  # messages of one publication
FAST_POOL: Final = {"code": "FAST", "concurrency": 10}
QUIET_SECONDS: Final = 1.0  # after the last delivery: copies have time to come

Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Expected:
    """How soon the fast pool's messages are there, and what the queue's URI says in addition."""

    seconds: float
    options: str = ""
    keeps_order: bool = True


# The brokers that push have small windows here: all of them are filled by the slow pool.
EXPECTED: Final[Mapping[str, Expected]] = {
    "activemq": Expected(seconds=15.0, options="?prefetch=100"),
    "nats": Expected(seconds=15.0),
    "pgmq": Expected(seconds=15.0),
    "postgres": Expected(seconds=2.0),
    "rabbitmq": Expected(seconds=15.0, options="&prefetch=100"),
    "redis": Expected(seconds=15.0),
    "sqlite": Expected(seconds=2.0),
    "sqs": Expected(seconds=30.0),
    "sqs-standard": Expected(seconds=30.0, keeps_order=False),
}


@dataclass(frozen=True, kw_only=True)
class FlowOrder:
    broker: str
    messages: int = 500  # of the slow pool
    look_ahead: int | None = None
    pause: float = 12.0  # seconds until there are more messages for the fast pool
    give_up: float = 60.0  # seconds, for the fast pool
    drain: float = 90.0  # seconds, for the slow pool once it is fast

    @property
    def expected(self) -> Expected:
        return EXPECTED[self.broker]


@dataclass
class FlowResult:
    order: FlowOrder
    # Seconds until the last message of the fast pool came: those that were there when the router
    # started, and those that were published later. None: some did not come.
    waits: list[float | None] = field(default_factory=list)
    slow_before: int = 0  # messages of the slow pool delivered by then
    warnings: Sequence[str] = ()  # codes, by then
    health: str = ""  # by then
    drain_seconds: float = 0.0  # until all messages of the slow pool were delivered
    lost: int = 0
    repeated: int = 0
    overtaken: int = 0

    def problems(self) -> list[str]:
        """Return what does not hold."""
        bound = self.order.expected.seconds
        found = []
        for wait in self.waits:
            if wait is None:
                found.append("the fast pool waited for ever")
            elif wait > bound:
                found.append(f"the fast pool waited for {wait:.1f} s, more than {bound:g} s")
        if self.lost:
            found.append(f"{self.lost} messages did not come within {self.order.drain:g} s")
        if self.overtaken and self.order.expected.keeps_order:
            found.append(f"{self.overtaken} messages overtook others of their group")
        return found


@dataclass
class SlowTarget:
    """Takes its time, until it is told to be quick."""

    quick: asyncio.Event = field(default_factory=asyncio.Event)
    accepted: list[str] = field(default_factory=list)

    async def script(self, connection: Connection) -> None:
        while True:
            request = await connection.read()
            with suppress(TimeoutError):
                async with asyncio.timeout(SLOW_SECONDS):
                    await self.quick.wait()
            self.accepted.append(id_of(request))
            await connection.reply()


@dataclass
class FastTarget:
    accepted: list[str] = field(default_factory=list)
    at: float = 0.0  # when the last one came

    async def script(self, connection: Connection) -> None:
        while True:
            self.accepted.append(id_of(await connection.read()))
            self.at = time.monotonic()
            await connection.reply()

    async def wait_for(self, wanted: Sequence[Body], seconds: float, tell: Tell) -> float | None:
        """Return after how many seconds the last of them was here."""
        began, ids = time.monotonic(), {str(body["id"]) for body in wanted}

        def say() -> None:
            tell(f"{len(ids & set(self.accepted))} of {len(ids)} of the fast pool")

        await _until(lambda: ids <= set(self.accepted), seconds, say)
        return max(self.at - began, 0.0) if ids <= set(self.accepted) else None


async def try_flow(order: FlowOrder, folder: Path, tell: Tell = lambda _: None) -> FlowResult:
    """Make one trial in a folder, which keeps the router's log."""
    result = FlowResult(order)
    slow, fast = SlowTarget(), FastTarget()
    site = Site(folder)
    with running(order.broker) as queue:
        await prepare(queue)
        options = {} if order.look_ahead is None else {"lookAhead": order.look_ahead}

        def configure(workers: int) -> None:
            pool = {"code": "SLOW", "concurrency": workers}
            uri = queue.uri() + order.expected.options
            site.configure_queue(uri, pool, FAST_POOL, **options)

        configure(1)
        queue.configure(site)
        async with (
            listening(slow.script) as slow_target,
            listening(fast.script) as fast_target,
            publishing_to(queue) as direct,
        ):
            first = slow_messages(order.messages, slow_target.url)
            waves = [fast_messages(wave, fast_target.url) for wave in range(2)]
            for start in range(0, len(first), BATCH):
                await direct.put(first[start : start + BATCH])
            await direct.put(waves[0])
            tell(f"{order.messages} messages of the slow pool wait")
            async with site.starting() as router:
                await router.logs("ready")
                result.waits.append(await fast.wait_for(waves[0], order.give_up, tell))
                await router.ready()
                await asyncio.sleep(order.pause)
                await direct.put(waves[1])
                result.waits.append(await fast.wait_for(waves[1], order.give_up, tell))
                result.slow_before = len(slow.accepted)
                await _look(router, result)
                configure(WORKERS_LATER)
                slow.quick.set()
                began = time.monotonic()
                answer = await router.post("/config/reload")
                assert answer.status_code == 200, answer.text
                await _until(
                    lambda: len(set(slow.accepted)) == order.messages,
                    order.drain,
                    lambda: tell(f"{len(set(slow.accepted))} of {order.messages} of the slow pool"),
                )
                result.drain_seconds = time.monotonic() - began
                await asyncio.sleep(QUIET_SECONDS)
                assert await router.stop() == 0
    wanted = {str(body["id"]) for body in (*first, *waves[0], *waves[1])}
    accepted = [*slow.accepted, *fast.accepted]
    result.lost = len(wanted - set(accepted))
    result.repeated = len(accepted) - len(set(accepted))
    result.overtaken = _overtaken(slow.accepted)
    return result


async def _until(holds: Callable[[], bool], seconds: float, tell: Callable[[], None]) -> None:
    """Wait for a while, and tell every ten seconds and at the end how far it is."""
    deadline = time.monotonic() + seconds
    while not holds() and (left := deadline - time.monotonic()) > 0:
        with suppress(TimeoutError):
            await eventually(holds, within=min(left, 10.0))
        tell()


async def _look(router: RouterProcess, result: FlowResult) -> None:
    """Note what an operator sees while the slow pool is full."""
    warnings = (await router.get("/warnings")).json()
    result.warnings = sorted({str(each["code"]) for each in warnings})
    result.health = str((await router.get("/monitoring/health")).json()["status"])


def slow_messages(number: int, url: str) -> list[Body]:
    """Return messages of the slow pool. Their ids are `group:number`.

    Every other one is of a few large groups. The rest have groups of their own, because some
    brokers hand out only the first message of a group.
    """
    messages: list[Body] = []
    for each in range(number):
        is_alone, pair = each % 2 == 0, each // 2
        group = f"alone-{each}" if is_alone else f"g{pair % GROUPS}"
        messages.append(
            {
                "id": f"{group}:{0 if is_alone else pair // GROUPS}",
                "mediationTarget": url,
                "poolCode": "SLOW",
                "messageGroupId": group,
            }
        )
    return messages


def fast_messages(wave: int, url: str) -> list[Body]:
    """Return messages of the fast pool. The groups of all waves are the same."""
    return [
        {
            "id": f"fast-{wave}-{each}",
            "mediationTarget": url,
            "poolCode": "FAST",
            "messageGroupId": f"f{each}",
        }
        for each in range(FAST_MESSAGES)
    ]


def _overtaken(accepted: Sequence[str]) -> int:
    """Count the messages that came before an earlier one of their group."""
    latest: Counter[str] = Counter()
    found = 0
    for each in dict.fromkeys(accepted):
        group, _, number = each.partition(":")
        found += int(number) != latest[group]
        latest[group] = int(number) + 1
    return found
