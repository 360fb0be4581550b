"""Waiting for something to change, at most so long."""

import asyncio

import pytest

from router.engine.bell import Bell

pytestmark = [pytest.mark.anyio, pytest.mark.rule("P5")]


async def ring_in(seconds: float, bell: Bell) -> None:
    await asyncio.sleep(seconds)
    bell.ring()


async def wait(bell: Bell, at_most: float | None = None) -> float:
    """When the wait was over."""
    await bell.wait(at_most)
    return asyncio.get_running_loop().time()


async def test_a_ring_wakes_everyone_who_waits() -> None:
    bell = Bell()

    async with asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(wait(bell, at_most)) for at_most in (None, 10)]
        tasks.create_task(ring_in(3, bell))

    assert [each.result() for each in waiting] == [3, 3]


async def test_patience_ends_when_nobody_rings() -> None:
    assert await wait(Bell(), at_most=10) == 10


async def test_a_ring_at_the_very_end_of_patience_wakes_once() -> None:
    bell = Bell()
    loop = asyncio.get_running_loop()

    for _ in range(2):  # before the wait's own timer, and after it
        loop.call_later(10, bell.ring)
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(wait(bell, at_most=10))
        tasks.create_task(ring_in(10, bell))

    assert waiting.result() == 10


async def test_an_earlier_ring_wakes_nobody() -> None:
    bell = Bell()
    bell.ring()

    assert await wait(bell, at_most=10) == 10


async def test_who_gives_up_leaves_nothing_behind() -> None:
    bell = Bell()
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(wait(bell, at_most=10))
        await asyncio.sleep(1)
        waiting.cancel()

    bell.ring()

    assert bell._waiting == set()
