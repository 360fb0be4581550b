"""So many at once, lent back between two tries."""

import asyncio

import pytest

from router.engine.limits import Permits

pytestmark = pytest.mark.anyio


class Pool:
    """Counts how often it was told that a permit may be free."""

    def __init__(self, limit: int) -> None:
        self.told = 0
        self.permits = Permits(limit, self._note)

    def _note(self) -> None:
        self.told += 1


def taken(limit: int, out: int) -> Pool:
    pool = Pool(limit)
    for _ in range(out):
        pool.permits.take()
    return pool


@pytest.mark.rule("POOL-6")
async def test_there_are_as_many_as_the_limit() -> None:
    free = [taken(2, out).permits.is_free for out in range(4)]

    assert free == [True, True, False, False]


@pytest.mark.rule("POOL-6")
async def test_a_permit_that_is_lent_is_announced() -> None:
    pool = taken(1, 1)

    pool.permits.release_for_pause()

    assert (pool.told, pool.permits.is_free, pool.permits.out) == (1, True, 0)


@pytest.mark.rule("POOL-6")
async def test_a_raised_limit_is_announced_at_once() -> None:
    pool = taken(1, 1)

    pool.permits.resize(2)

    assert (pool.told, pool.permits.is_free) == (1, True)


@pytest.mark.rule("POOL-6")
async def test_below_a_lowered_limit_nothing_new_starts_until_enough_came_back() -> None:
    permits = taken(3, 3).permits

    permits.resize(1)
    kept, free = [], []
    for _ in range(3):
        kept.append(permits.may_be_kept())
        free.append(permits.is_free)
        permits.release()

    assert kept == [False, False, True]
    assert free == [False, False, False]
    assert permits.is_free


@pytest.mark.rule("MED-2")
async def test_who_comes_back_for_a_free_permit_gets_it_at_once() -> None:
    permits = taken(1, 0).permits

    await permits.take_again()

    assert permits.out == 1


@pytest.mark.rule("MED-2")
async def test_who_comes_back_goes_before_all_who_never_had_one() -> None:
    permits = taken(1, 1).permits
    async with asyncio.TaskGroup() as tasks:
        back = tasks.create_task(permits.take_again())
        await asyncio.sleep(0)

        free_while_one_waits, kept = permits.is_free, permits.may_be_kept()
        permits.release()
        free_after = permits.is_free

    assert (free_while_one_waits, kept, free_after) == (False, False, False)
    assert back.done()
    assert permits.out == 1


@pytest.mark.rule("MED-2")
async def test_those_who_come_back_are_served_in_turn_as_far_as_the_limit_goes() -> None:
    permits = taken(2, 2).permits
    order: list[str] = []

    async def come_back(name: str) -> None:
        await permits.take_again()
        order.append(name)

    async with asyncio.TaskGroup() as tasks:
        for name in "abc":
            tasks.create_task(come_back(name))
        await asyncio.sleep(1)
        permits.resize(4)
        await asyncio.sleep(1)
        after_the_raise = list(order)
        permits.release()

    assert after_the_raise == ["a", "b"]
    assert order == ["a", "b", "c"]
    assert permits.out == 4


@pytest.mark.rule("POOL-6")
async def test_when_nothing_more_is_sent_all_are_let_in() -> None:
    permits = taken(1, 1).permits
    async with asyncio.TaskGroup() as tasks:
        for _ in range(2):
            tasks.create_task(permits.take_again())
        await asyncio.sleep(0)

        permits.admit_all()

    assert permits.out == 3


@pytest.mark.rule("POOL-6")
async def test_who_gave_up_waiting_takes_no_permit() -> None:
    permits = taken(1, 1).permits
    async with asyncio.TaskGroup() as tasks:
        gone = tasks.create_task(permits.take_again())
        await asyncio.sleep(0)
        gone.cancel()

    permits.release()

    assert (permits.out, permits.is_free) == (0, True)
