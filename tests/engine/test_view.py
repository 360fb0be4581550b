"""What health is judged from."""

import asyncio

import pytest

from router.core.outcome import Reply
from router.engine.view import View
from tests.support.fakes import FakeSender
from tests.support.rig import body, pool, running

pytestmark = [pytest.mark.anyio, pytest.mark.rule("OPS-3")]


async def test_of_many_pools_only_those_are_told_of_that_have_work_or_fail() -> None:
    sender = FakeSender(takes=60.0, takes_for={"bad": 1.0, "fine": 1.0})
    sender.script("bad", Reply(404))
    idle = [pool(f"IDLE-{number}") for number in range(20)]

    async with running(pool("BUSY"), pool("BAD"), pool("FINE"), *idle, sender=sender) as rig:
        view = View(rig.manager, rig.breakers)
        sent = {"slow": "BUSY", "bad": "BAD", "fine": "FINE"}
        await rig.publish(*(body(each, poolCode=code) for each, code in sent.items()))
        await asyncio.sleep(10)
        vitals = view.vitals()
        await asyncio.sleep(31 * 60)
        later = view.vitals()

    assert {each.code: each.success_rate_30min for each in vitals.pools} == {"BUSY": 1, "BAD": 0}
    assert (vitals.idle_pools, vitals.total_pools) == (21, 23)
    assert (later.pools, later.idle_pools) == ((), 23)


async def test_a_busy_pool_tells_what_it_does_and_since_when() -> None:
    async with running(pool("P", concurrency=1), sender=FakeSender(takes=30.0)) as rig:
        view = View(rig.manager, rig.breakers)
        await rig.publish(*(body(each, poolCode="P") for each in "ab"))
        await asyncio.sleep(10)

        (busy,) = view.vitals().pools

    assert (busy.queued, busy.delivering, busy.waiting_elsewhere) == (1, 1, 0)
    assert busy.idle_seconds == pytest.approx(10)
