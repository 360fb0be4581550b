"""`kill -9` under load, again and again: nothing is lost, and order holds."""

import asyncio
import time
from dataclasses import dataclass, field

import pytest

from tests.acceptance.load import firsts_in_order, load, repeated
from tests.acceptance.process import eventually
from tests.acceptance.site import Site
from tests.acceptance.targets import id_of, message
from tests.outbound.servers import Connection, listening

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

GROUPS = 50
PER_GROUP = 42
KILLS = 5
BETWEEN_KILLS = 300  # deliveries


@dataclass
class SlowTarget:
    """A target that now and then fails, or asks for a little time."""

    accepted: list[str] = field(default_factory=list)
    asked: int = 0

    async def script(self, connection: Connection) -> None:
        while True:
            request = await connection.read()
            await asyncio.sleep(0.01)
            self.asked += 1
            if self.asked % 61 == 0:
                await connection.reply(503)
            elif self.asked % 97 == 0:
                await connection.reply(200, b'{"ack": false, "delaySeconds": 1}')
            else:
                self.accepted.append(id_of(request))
                await connection.reply()


@pytest.mark.rule("P1", "P3", "WQ-4")
async def test_killed_five_times_under_load_it_loses_nothing_and_keeps_every_group_in_order(
    site: Site,
) -> None:
    moody = SlowTarget()
    in_flight: set[str] = set()
    site.configure({"code": "LOAD", "concurrency": 10})
    async with listening(moody.script) as target:
        messages = load(target.url, GROUPS, PER_GROUP)
        await site.fill("orders", messages)
        for kill in range(KILLS):
            enough = len(moody.accepted) + BETWEEN_KILLS
            async with site.router() as router:
                await eventually(lambda: len(moody.accepted) >= enough)  # noqa: B023  at once
                await router.kill()
            in_flight |= site.in_flight()
            assert site.unsettled(), f"nothing was left to be lost at kill {kill}"
        async with site.router():
            await eventually(lambda: not site.unsettled(), within=90)

    firsts = list(dict.fromkeys(moody.accepted))
    twice = repeated(moody.accepted)
    assert sorted(firsts) == sorted(str(each["id"]) for each in messages)
    assert firsts_in_order(moody.accepted, GROUPS, PER_GROUP)
    assert twice <= in_flight
    assert len(in_flight) > 0


LONG_LEASE = 30  # seconds: nobody has to wait for it


@pytest.mark.rule("WQ-10")
async def test_after_a_kill_and_a_restart_what_was_under_way_is_delivered_again_at_once(
    site: Site,
) -> None:
    uri = f"sqlite:///{site.queue_file}?queue=orders"
    site.configure_queue(uri, {"code": "LOAD", "concurrency": 10}, visibilityTimeout=LONG_LEASE)

    waited = await redelivered_after(site)

    assert waited < 1


async def redelivered_after(site: Site) -> float:
    """Kill a router in the middle of a group. Seconds from the next one's start to its requests."""
    requests: list[str] = []
    killed = asyncio.Event()

    async def script(connection: Connection) -> None:
        while True:
            requests.append(id_of(await connection.read()))
            await killed.wait()
            await connection.reply()

    async with listening(script) as target:
        async with site.router() as router:
            await router.publish(
                [message(f"g:{number}", target, pool="LOAD", group="g") for number in range(3)]
            )
            await eventually(lambda: requests == ["g:0"])
            await router.kill()
            killed.set()
        async with site.router() as router:
            ready = time.monotonic()
            await eventually(lambda: len(requests) > 1)
            waited = time.monotonic() - ready
            await eventually(lambda: len(requests) == 4)
            assert (await router.get("/dead-letters")).json()["items"] == []
    assert requests == ["g:0", "g:0", "g:1", "g:2"]
    return waited
