"""What operators turn takes effect at once, and lasts until the next sync."""

import asyncio

import pytest

from router.engine.breaker import BreakerState
from router.engine.controls import Controls, PoolSetting
from router.ports import Unknown
from tests.support.fakes import REFUSED, FakeSender
from tests.support.rig import body, pool, running

pytestmark = pytest.mark.anyio


@pytest.mark.rule("POOL-6")
async def test_more_concurrency_lets_waiting_messages_go_at_once() -> None:
    async with running(pool("P", concurrency=1), sender=FakeSender(takes=60.0)) as rig:
        controls = Controls(rig.manager, rig.breakers)
        await rig.publish(*(body(str(n), poolCode="P", dispatchMode="IMMEDIATE") for n in range(3)))
        await asyncio.sleep(1)

        state = controls.change_pool("P", PoolSetting(concurrency=3))
        await asyncio.sleep(1)

        assert (state.code, state.concurrency) == ("P", 3)
        assert [at for at, _ in rig.sender.sent] == [0.0, 1.0, 1.0]


@pytest.mark.rule("POOL-6")
async def test_what_is_left_out_stays_as_it_is() -> None:
    async with running(pool("P", concurrency=4, rate_per_minute=60, timeout=5.0)) as rig:
        controls = Controls(rig.manager, rig.breakers)

        controls.change_pool("P", PoolSetting(concurrency=2))
        concurrency_changed = rig.pool().config
        controls.change_pool("P", PoolSetting(rate_per_minute=None))

        assert concurrency_changed == pool("P", concurrency=2, rate_per_minute=60, timeout=5.0)
        assert rig.pool().config == pool("P", concurrency=2, timeout=5.0)


@pytest.mark.rule("CFG-6")
async def test_the_next_sync_takes_it_back() -> None:
    async with running(pool("P", concurrency=4)) as rig:
        Controls(rig.manager, rig.breakers).change_pool("P", PoolSetting(concurrency=9))

        await rig.manager.apply(rig.config)

        assert rig.pool().config.concurrency == 4


@pytest.mark.rule("CFG-6")
async def test_a_pool_that_is_not_there_cannot_be_changed() -> None:
    async with running(pool("P")) as rig:
        controls = Controls(rig.manager, rig.breakers)

        with pytest.raises(Unknown, match="no such pool"):
            controls.change_pool("Q", PoolSetting(concurrency=9))


@pytest.mark.rule("MED-4")
async def test_a_circuit_is_closed_by_its_name_and_by_no_other() -> None:
    sender = FakeSender(takes=0.1)
    for n in range(10):
        sender.script(str(n), REFUSED, REFUSED, REFUSED)
    async with running(pool("P"), sender=sender) as rig:
        controls = Controls(rig.manager, rig.breakers)
        await rig.publish(
            *(body(str(n), poolCode="P", dispatchMode="IMMEDIATE") for n in range(10))
        )
        await asyncio.sleep(1)
        (breaker,) = rig.breakers.all()
        opened = breaker.state

        with pytest.raises(Unknown, match="no such circuit"):
            controls.reset_breaker("http://other:80")
        still = breaker.state
        controls.reset_breaker(breaker.name)

        assert (opened, still) == (BreakerState.OPEN, BreakerState.OPEN)
        assert breaker.state is BreakerState.CLOSED


@pytest.mark.rule("MED-4")
async def test_all_circuits_are_closed_at_once() -> None:
    async with running() as rig:
        for name in ("a", "b"):
            breaker = rig.breakers.of(name)
            breaker._machine.open()
            breaker._opened(0.0)

        closed = Controls(rig.manager, rig.breakers).reset_breakers()

        assert closed == 2
        assert {each.state for each in rig.breakers.all()} == {BreakerState.CLOSED}
