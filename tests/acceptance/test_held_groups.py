"""`onDeadLetter: "hold"` with the real process: a held group stays held through `kill -9`."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.acceptance.load import firsts_in_order, load, publish_all
from tests.acceptance.process import RouterProcess, eventually
from tests.acceptance.site import Site
from tests.acceptance.targets import id_of
from tests.outbound.servers import Connection, listening
from tests.support.servers import nats
from tests.support.servers.nats import NatsServer, add_stream

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

GROUPS = 10
PER_GROUP = 30
STREAM = "ORDERS"
HELD = {"0:003": 0, "7:010": 7}  # what the target refuses, and its group


@dataclass
class Strict:
    """A target that does not take some messages until it is mended."""

    is_mended: bool = False
    accepted: list[str] = field(default_factory=list)

    async def script(self, connection: Connection) -> None:
        while True:
            message_id = id_of(await connection.read())
            await asyncio.sleep(0.005)
            if message_id in HELD and not self.is_mended:
                await connection.reply(422)
            else:
                self.accepted.append(message_id)
                await connection.reply()

    def count(self, group: int) -> int:
        return len({each for each in self.accepted if each.startswith(f"{group}:")})


@pytest.fixture(params=["nats", "sqlite"])
def queue_uri(request: pytest.FixtureRequest, site: Site, tmp_path: Path) -> Iterator[str]:
    """One whose broker holds no groups, and one that is a work queue."""
    if request.param == "sqlite":
        yield f"sqlite:///{site.queue_file}?queue=orders"
        return
    with NatsServer(nats.current(), tmp_path).running() as server:
        asyncio.run(add_stream(server.port, STREAM))
        site.settings["NATS_SERVERS"] = f"nats://{server.address}"
        yield f"nats:///?stream={STREAM}"


async def letters(router: RouterProcess) -> dict[str, int]:
    """The ids of the dead letters, by their messages."""
    page = (await router.get("/dead-letters?limit=100")).json()
    return {each["messageId"]: each["id"] for each in page["items"]}


@pytest.mark.rule("ORD-11", "ORD-4", "DLQ-2")
async def test_a_held_group_stays_held_when_the_router_is_killed(
    site: Site, queue_uri: str
) -> None:
    site.configure_queue(
        queue_uri,
        {"code": "LOAD", "concurrency": 10},
        ordering="strict",
        onDeadLetter="hold",
        visibilityTimeout=3,
        retry={"backoff": [1]},
    )
    strict = Strict()
    async with listening(strict.script) as target:
        messages = load(target.url, GROUPS, PER_GROUP)
        half = len(messages) // 2
        async with site.router() as router:
            await publish_all(router, messages[:half])
            await router.logs("dead letter")  # from now on at any instant
            await asyncio.sleep(0)
            await router.kill()
        async with site.router() as router:
            await publish_all(router, messages[half:])
            free = [group for group in range(GROUPS) if group not in HELD.values()]
            await eventually(
                lambda: all(strict.count(group) == PER_GROUP for group in free), within=60
            )
            await router.kill()
        async with site.router() as router:
            found = await letters(router)
            assert found.keys() == HELD.keys()
            assert [strict.count(group) for group in HELD.values()] == [3, 10]
            strict.is_mended = True
            for message_id in HELD:
                await router.post(f"/dead-letters/{found[message_id]}/replay")
            await eventually(lambda: strict.count(0) == strict.count(7) == PER_GROUP, within=60)
            assert await router.stop() == 0

    assert firsts_in_order(strict.accepted, GROUPS, PER_GROUP)
