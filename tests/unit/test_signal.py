"""Waiting for something to change, at most so long."""

import asyncio

import pytest

from router.signal import Signal, wait_for_signal

pytestmark = pytest.mark.anyio


async def ring_in(seconds: float, signal: Signal) -> None:
    await asyncio.sleep(seconds)
    signal.ring()


async def wait(signal: Signal, at_most: float | None = None) -> float:
    """When the wait was over."""
    await signal.wait(at_most)
    return asyncio.get_running_loop().time()


async def test_a_ring_wakes_everyone_who_waits() -> None:
    signal = Signal()

    async with asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(wait(signal, at_most)) for at_most in (None, 10)]
        tasks.create_task(ring_in(3, signal))

    assert [each.result() for each in waiting] == [3, 3]


async def test_a_wait_ends_at_its_limit_without_a_ring() -> None:
    assert await wait(Signal(), at_most=10) == 10


async def test_a_ring_at_the_very_end_of_patience_wakes_once() -> None:
    signal = Signal()
    loop = asyncio.get_running_loop()

    for _ in range(2):  # before the wait's own timer, and after it
        loop.call_later(10, signal.ring)
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(wait(signal, at_most=10))
        tasks.create_task(ring_in(10, signal))

    assert waiting.result() == 10


async def test_an_earlier_ring_wakes_no_waiter() -> None:
    signal = Signal()
    signal.ring()

    assert await wait(signal, at_most=10) == 10


async def test_a_ring_between_listening_and_waiting_is_not_missed() -> None:
    signal = Signal()
    rung = signal.listen()
    signal.ring()

    await wait_for_signal(rung, 10)

    assert asyncio.get_running_loop().time() == 0


async def test_who_gives_up_leaves_nothing_behind() -> None:
    signal = Signal()
    rung = signal.listen()
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(wait(signal, at_most=10))
        await asyncio.sleep(1)
        waiting.cancel()

    assert not rung._waiters
