"""Two routers on one queue file."""

import asyncio
from pathlib import Path

import pytest

from tests.acceptance.process import eventually
from tests.acceptance.site import Site
from tests.acceptance.targets import id_of, message
from tests.outbound.servers import Connection, listening

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

GROUPS = 20
PER_GROUP = 50


@pytest.mark.rule("P1", "P2", "P3", "WQ-2", "FIFO-1")
async def test_two_routers_share_a_queue_and_every_message_is_delivered_once_and_in_order(
    site: Site, tmp_path: Path
) -> None:
    accepted: list[str] = []
    open_groups: set[str] = set()
    overlaps: list[str] = []

    async def busy(connection: Connection) -> None:
        while True:
            message_id = id_of(await connection.read())
            group = message_id.partition(":")[0]
            if group in open_groups:
                overlaps.append(message_id)
            open_groups.add(group)
            await asyncio.sleep(0.02)
            accepted.append(message_id)
            open_groups.discard(group)
            await connection.reply()

    site.configure({"code": "LOAD", "concurrency": 10})
    other = Site(tmp_path / "other", settings=site.settings)
    other.folder.mkdir()
    async with listening(busy) as target, site.router() as one, other.router() as two:
        await one.publish(
            [
                message(f"{group}:{number:03}", target, pool="LOAD", group=f"g{group}")
                for group in range(GROUPS)
                for number in range(PER_GROUP)
            ]
        )
        await eventually(lambda: not site.unsettled(), within=60)
        codes = [await one.stop(), await two.stop()]

    by_group = {
        group: [each for each in accepted if each.startswith(f"{group}:")]
        for group in range(GROUPS)
    }
    assert codes == [0, 0]
    assert len(accepted) == len(set(accepted)) == GROUPS * PER_GROUP
    assert all(group == sorted(group) for group in by_group.values())
    assert overlaps == []
    assert len(site.workers()) == 2
