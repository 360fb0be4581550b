"""Three routers, each at work on the queues whose leases it has; one of them is killed."""

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.fleet import Fleet
from tests.acceptance.load import group_of
from tests.acceptance.process import RouterProcess, eventually
from tests.acceptance.site import Site
from tests.acceptance.targets import id_of
from tests.outbound.servers import Connection, listening
from tests.support.servers.redis import RedisServer

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(240)]

QUEUES = 6
GROUPS = 30
PER_GROUP = 40
TTL = 3


@dataclass
class Recorder:
    """A target that notes what it accepts."""

    accepted: list[str] = field(default_factory=list)

    async def script(self, connection: Connection) -> None:
        while True:
            message_id = id_of(await connection.read())
            await asyncio.sleep(0.005)
            self.accepted.append(message_id)
            await connection.reply()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path, durable=True).running() as server:
        yield server


async def held_by(router: RouterProcess) -> list[str]:
    leases: list[dict[str, Any]] = (await router.get("/monitoring/leases")).json()
    return [each["queue"] for each in leases if each["phase"] == "HELD"]


async def all_held(fleet: Fleet, *numbers: int) -> list[list[str]]:
    """Return what each router holds, once every queue has its router."""
    async with asyncio.timeout(60):
        while True:
            held = [await held_by(fleet.routers[number]) for number in numbers]
            if sorted(name for names in held for name in names) == queue_names():
                return held
            await asyncio.sleep(0.2)


def queue_names() -> list[str]:
    return [f"orders-{n}" for n in range(QUEUES)]


def configure(site: Site, server: RedisServer) -> None:
    queues: list[dict[str, object]] = [
        {
            "queueName": name,
            "queueUri": f"redis:///?stream={name}",
            "visibilityTimeout": 4,
            "retry": {"backoff": [1]},
        }
        for name in queue_names()
    ]
    site.configure_queues(queues, [{"code": "LOAD", "concurrency": 20}])
    site.settings |= {
        "REDIS_URL": server.url,
        "STANDBY_ENABLED": "true",
        "STANDBY_SCOPE": "queue",
        "STANDBY_LOCK_URL": server.url,
        "STANDBY_LOCK_TTL": f"{TTL}s",
    }


@pytest.mark.rule("CFG-10", "P1")
async def test_queues_are_shared_taken_over_and_given_away(site: Site, server: RedisServer) -> None:
    configure(site, server)
    recorder = Recorder()
    async with listening(recorder.script) as target, AsyncExitStack() as stack:
        fleet = Fleet(site, stack)
        await fleet.start(0, 1, 2)
        at_first = await all_held(fleet, 0, 1, 2)
        role = (await fleet.routers[0].get("/health")).json()["role"]
        messages: list[dict[str, object]] = [
            {
                "id": f"{group}:{number:03}",
                "mediationTarget": target.url,
                "poolCode": "LOAD",
                "messageGroupId": f"g{group}",
            }
            for number in range(PER_GROUP)
            for group in range(GROUPS)
        ]
        await publish_to_all(fleet.routers[0], messages)
        await eventually(lambda: len(recorder.accepted) > 200)
        await fleet.routers[2].kill()
        taken_over = await all_held(fleet, 0, 1)
        await fleet.start(2)
        (given, *_) = taken_over[0]
        answer = await fleet.routers[0].post(f"/queues/{given}/release")
        given_away = await all_held(fleet, 0, 1, 2)
        everything = {str(each["id"]) for each in messages}
        await eventually(lambda: set(recorder.accepted) == everything, within=90)
        codes = await fleet.stop()

    assert role == "ACTIVE"
    assert min(len(names) for names in at_first) >= 1
    assert min(len(names) for names in taken_over) >= 2
    assert answer.status_code == 202
    assert given not in given_away[0]
    assert codes == [0, 0, 0]


async def publish_to_all(router: RouterProcess, messages: list[dict[str, object]]) -> None:
    """Each group has its queue."""
    for n, name in enumerate(queue_names()):
        mine = [each for each in messages if int(group_of(str(each["id"]))) % QUEUES == n]
        await router.publish(mine, queue=name)
