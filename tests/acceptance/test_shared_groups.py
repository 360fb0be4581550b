"""Three routers deliver from one strict queue that one of them receives; they are killed (ORD-13).

By hand: SHARED_MESSAGES=20000 SHARED_KILLS=12 pytest -s tests/acceptance/test_shared_groups.py
Another broker than NATS: SHARED_BROKER=rabbitmq-quorum, or activemq.

It shows the messages, kills, requests and repeats, and what each router has delivered in relation
to its even share.
"""

import asyncio
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import pytest

from router.brokers import BrokerRegistry
from router.core.config import Ordering, QueueConfig
from router.core.message import parse
from router.ports import Publication
from tests.acceptance.load import are_all_there, firsts_in_order, group_of, load, repeated
from tests.acceptance.process import RouterProcess, eventually
from tests.acceptance.site import Site
from tests.acceptance.targets import id_of
from tests.chaos.brokers import ChaosQueue, prepare, running
from tests.outbound.servers import Connection, listening
from tests.support.servers.postgres import PostgresServer, postgres_server

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(1200)]

TOTAL: Final = int(os.environ.get("SHARED_MESSAGES", "1500"))
KILLS: Final = int(os.environ.get("SHARED_KILLS", "2"))
BROKER: Final = os.environ.get("SHARED_BROKER", "nats")
GROUPS: Final = 100
PER_GROUP: Final = TOTAL // GROUPS
ROUTERS: Final = 3
SECONDS_PER_REQUEST: Final = 0.02
POOL: Final[dict[str, object]] = {"code": "LOAD", "concurrency": 4, "takeAhead": 4}
TARGET: Final = "http://target.test/hook"
TAKEN: Final = "this router receives the queue"
LEFT: Final = "SELECT count(*) FROM message_router.queue_messages WHERE finished_at IS NULL"


@dataclass
class Judge:
    """A target behind a proxy for each router, which tells who sends."""

    accepted: list[str] = field(default_factory=list)
    open_groups: Counter[str] = field(default_factory=Counter)
    overlaps: list[str] = field(default_factory=list)
    by_router: Counter[int] = field(default_factory=Counter)
    even_shares: Counter[int] = field(
        default_factory=Counter
    )  # of what was accepted while it lived
    alive: set[int] = field(default_factory=set)

    async def script(self, router: int, connection: Connection) -> None:
        while True:
            message_id = id_of(await connection.read())
            connection.target.requests.clear()
            group = group_of(message_id)
            if self.open_groups[group]:
                self.overlaps.append(message_id)
            self.open_groups[group] += 1
            await asyncio.sleep(SECONDS_PER_REQUEST)
            self.open_groups[group] -= 1
            self.accepted.append(message_id)
            self._count(router)
            await connection.reply()

    def _count(self, router: int) -> None:
        if router in self.alive:  # else it is still starting
            self.by_router[router] += 1
            for each in self.alive:
                self.even_shares[each] += 1 / len(self.alive)  # type: ignore[assignment]

    @property
    def shares(self) -> dict[int, float]:
        """What each router has delivered, as a part of its even share."""
        return {each: self.by_router[each] / even for each, even in self.even_shares.items()}


async def publish(uri: str, messages: Sequence[dict[str, object]]) -> None:
    bodies = [json.dumps(each).encode() for each in messages]
    queue = QueueConfig(name="orders", uri=uri, ordering=Ordering.STRICT)
    async with (
        BrokerRegistry(worker_id="test", dedup_window=300.0) as brokers,
        brokers.open_publisher(queue) as publisher,
    ):
        parsed = [(parse(body), body) for body in bodies]
        await publisher.publish([Publication(each, body, each.id) for each, body in parsed])


class Crew:
    """The routers, each with a folder and a proxy of its own."""

    def __init__(self, site: Site, judge: Judge, stack: AsyncExitStack) -> None:
        self._site = site
        self._judge = judge
        self._stack = stack
        self._sites: list[Site] = []
        self.routers: list[RouterProcess] = []

    async def start_all(self) -> None:
        for number in range(ROUTERS):
            folder = self._site.folder / f"router-{number}"
            folder.mkdir()
            script = partial(self._judge.script, number)
            proxy = await self._stack.enter_async_context(listening(script))
            settings = {
                **self._site.settings,
                "MEDIATOR_PROXY": f"http://127.0.0.1:{proxy.port}",
            }
            self._sites.append(Site(folder, settings=settings))
            self.routers.append(await self._start(number))
        for number in range(ROUTERS):
            await self._is_ready(number)

    async def kill(self, number: int) -> None:
        self._judge.alive.discard(number)
        await self.routers[number].kill()
        self.routers[number] = await self._start(number)
        await self._is_ready(number)

    async def victim(self, step: int) -> int:
        """Return who is killed next: the carrier, then another one. Only NATS says who it is."""
        if BROKER != "nats":
            return step % ROUTERS
        return (await self._carrier() + step % 2) % ROUTERS

    async def _carrier(self) -> int:
        def is_known() -> bool:
            return any(each.has_logged(TAKEN) for each in self.routers)

        await eventually(is_known, within=60)
        return next(n for n, each in enumerate(self.routers) if each.has_logged(TAKEN))

    async def stop(self) -> list[int]:
        return [await router.stop() for router in self.routers]

    async def _start(self, number: int) -> RouterProcess:
        return await self._stack.enter_async_context(self._sites[number].starting())

    async def _is_ready(self, number: int) -> None:
        await self.routers[number].ready()
        self._judge.alive.add(number)


@pytest.fixture
def queue() -> Iterator[ChaosQueue]:
    with running(BROKER) as queue:
        yield queue


@pytest.fixture
def postgres() -> Iterator[PostgresServer]:
    with postgres_server() as server:
        yield server


@pytest.mark.rule("ORD-13", "P1", "P3")
async def test_three_routers_deliver_what_one_of_them_receives(
    site: Site, queue: ChaosQueue, postgres: PostgresServer
) -> None:
    await prepare(queue)
    uri = queue.uri()
    site.configure_queue(
        uri,
        POOL,
        ordering="strict",
        share=True,
        visibilityTimeout=3,
        retry={"backoff": [1]},
    )
    site.settings["MESSAGE_ROUTER_ORDER_STORE"] = postgres.url
    judge, messages = Judge(), load(TARGET, GROUPS, PER_GROUP)
    steps = KILLS + 1
    async with AsyncExitStack() as stack:
        crew = Crew(site, judge, stack)
        await crew.start_all()
        for step in range(steps):
            first, last = TOTAL * step // steps, TOTAL * (step + 1) // steps
            await publish(uri, messages[first:last])
            if step < KILLS:
                enough = first + (last - first) // 2
                await eventually(lambda: len(judge.accepted) >= enough, within=300)  # noqa: B023
                await crew.kill(await crew.victim(step))
        await eventually(lambda: are_all_there(judge.accepted, messages), within=300)
        await eventually(lambda: postgres.sql(LEFT) == "0")
        codes = await crew.stop()
        left = await queue.left()

    shares = {each: round(share, 2) for each, share in judge.shares.items()}
    print(TOTAL, KILLS, len(judge.accepted), len(repeated(judge.accepted)), shares)  # noqa: T201
    assert firsts_in_order(judge.accepted, GROUPS, PER_GROUP)
    assert judge.overlaps == []
    assert left == []
    assert min(judge.shares.values()) >= 0.5
    assert codes == [0, 0, 0]
