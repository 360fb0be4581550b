"""`kill -9` under load, again and again: nothing is lost, and order holds."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field

import pytest

from tests.acceptance.process import eventually
from tests.acceptance.site import Site
from tests.acceptance.targets import id_of, message
from tests.outbound.servers import Connection, Target, listening

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

GROUPS = 50
PER_GROUP = 42
KILLS = 5
BETWEEN_KILLS = 300  # deliveries


@dataclass
class Moody:
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


def load(target: Target) -> list[dict[str, object]]:
    return [
        message(f"{group}:{number:03}", target, pool="LOAD", group=f"g{group}")
        for number in range(PER_GROUP)
        for group in range(GROUPS)
    ]


@pytest.mark.rule("P1", "P3", "WQ-4")
async def test_killed_five_times_under_load_it_loses_nothing_and_keeps_every_group_in_order(
    site: Site,
) -> None:
    moody = Moody()
    in_flight: set[str] = set()
    site.configure({"code": "LOAD", "concurrency": 10})
    async with listening(moody.script) as target:
        messages = load(target)
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
    twice = {each for each, times in Counter(moody.accepted).items() if times > 1}
    assert sorted(firsts) == sorted(str(each["id"]) for each in messages)
    assert all(numbers(firsts, group) == list(range(PER_GROUP)) for group in range(GROUPS))
    assert twice <= in_flight
    assert len(in_flight) > 0


def numbers(delivered: list[str], group: int) -> list[int]:
    return [int(each.partition(":")[2]) for each in delivered if each.startswith(f"{group}:")]
