"""One message from queue to target to ACK, and what can come in between."""

import asyncio

import pytest

from router.core.history import Fate
from tests.support.fakes import FakeSender
from tests.support.rig import body, pool, running

pytestmark = pytest.mark.anyio


@pytest.mark.rule("P1", "ROUTE-7")
async def test_a_message_goes_from_its_queue_to_its_target_and_is_gone() -> None:
    async with running(pool("P")) as rig:
        await rig.publish(body("a", poolCode="P"))
        await asyncio.sleep(120)

        assert rig.sender.sent == [(0, "a")]
        assert rig.is_empty
        assert rig.manager.registry.ledger.ended[Fate.DELIVERED] == 1


@pytest.mark.rule("P3", "POOL-2")
async def test_a_group_is_delivered_one_by_one_in_order() -> None:
    async with running(pool("P"), sender=FakeSender(takes=2)) as rig:
        await rig.publish(*(body(i, poolCode="P", messageGroupId="g") for i in "abc"))
        await asyncio.sleep(60)

        assert rig.sender.sent == [(0, "a"), (2, "b"), (4, "c")]
