"""Noticing that the event loop was kept from its work."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from router.engine.periodic import PAUSE_SECONDS, PROBES, STALL_SECONDS, LoopLag
from tests.support.virtual_time import VirtualTimeLoop

pytestmark = pytest.mark.anyio

PERIOD = PAUSE_SECONDS * PROBES


@asynccontextmanager
async def watched() -> AsyncIterator[LoopLag]:
    lag = LoopLag()
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(lag.watch())
        await asyncio.sleep(0)
        yield lag
        watching.cancel()


def block(seconds: float) -> None:
    """As a long computation does: nothing else runs, and time goes by."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    loop._jumping.now += seconds


@pytest.mark.rule("OPS-3")
async def test_a_loop_that_keeps_up_has_no_lag() -> None:
    async with watched() as lag:
        await asyncio.sleep(2 * PERIOD)

        assert lag.seconds == pytest.approx(0.0)


@pytest.mark.rule("OPS-3")
async def test_the_worst_delay_is_remembered_for_half_a_minute_at_least() -> None:
    async with watched() as lag:
        await asyncio.sleep(PERIOD / 2 + PAUSE_SECONDS / 2)
        block(3.0)
        await asyncio.sleep(PERIOD - 3)
        remembered = lag.seconds
        await asyncio.sleep(PERIOD)

        assert remembered == pytest.approx(3.0 - PAUSE_SECONDS / 2)
        assert lag.seconds == pytest.approx(0.0)


@pytest.mark.rule("OPS-3")
async def test_reading_forgets_nothing() -> None:
    lag = LoopLag()
    lag.note(0.5)

    assert [lag.seconds for _ in range(3)] == [0.5, 0.5, 0.5]


@pytest.mark.rule("OPS-7")
async def test_a_turn_that_is_too_long_is_counted_whenever_it_begins() -> None:
    async with watched() as lag:
        for begins in (0.001, 0.5 * PAUSE_SECONDS, 0.999 * PAUSE_SECONDS):
            await asyncio.sleep(begins)
            block(STALL_SECONDS)
            await asyncio.sleep(1 - begins)
        block(STALL_SECONDS / 2)
        await asyncio.sleep(1)

        assert lag.stalls == 3
        assert 3 * (STALL_SECONDS - PAUSE_SECONDS) <= lag.stalled_seconds <= 3 * STALL_SECONDS
