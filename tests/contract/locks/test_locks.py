"""What the leader lock promises, wherever it is."""

import asyncio
import time

import pytest

from router.ports import Lock, LockServer, LockState, LockUnavailable
from tests.contract.locks.conftest import TTL, LockPlace

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

PATIENCE = 20.0


async def taken(lock: Lock, within: float = PATIENCE) -> LockState:
    """Ask until it is ours: a server that is new makes everybody wait for a TTL."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        state = await lock.acquire()
        if state.is_ours:
            return state
        await asyncio.sleep(0.02)
    raise TimeoutError("the lock was not to be had")


async def until_answered(server: LockServer) -> int:
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return await server.number("tick:s")
        except LockUnavailable:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.05)


@pytest.mark.rule("CFG-9")
async def test_one_takes_it_and_the_other_is_told_who_has_it(one: Lock, two: Lock) -> None:
    mine = await taken(one)
    theirs = await two.acquire()

    assert (mine.holder, mine.is_ours) == ("one", True)
    assert (theirs.holder, theirs.is_ours, theirs.fence) == ("one", False, mine.fence)
    assert 0 <= theirs.age < TTL


@pytest.mark.rule("CFG-9")
async def test_many_ask_at_once_and_one_gets_it(place: LockPlace, one: Lock) -> None:
    await taken(one)
    await one.release()
    async with (
        place.lock("a") as a,
        place.lock("b") as b,
        place.lock("c") as c,
        asyncio.TaskGroup() as tasks,
    ):
        asked = [tasks.create_task(lock.acquire()) for lock in (a, b, c)]

    assert sorted(each.result().is_ours for each in asked) == [False, False, True]


@pytest.mark.rule("CFG-9")
async def test_what_is_not_refreshed_is_free_after_its_ttl_and_not_before(
    one: Lock, two: Lock
) -> None:
    mine = await taken(one)
    await two.acquire()
    asked_at = time.monotonic()
    assert await one.renew(mine.fence)
    theirs = await taken(two)
    took = time.monotonic() - asked_at

    assert TTL <= took < TTL + 1
    assert theirs.fence > mine.fence
    assert not await one.renew(mine.fence)
    assert (await one.acquire()).holder == "two"


@pytest.mark.rule("CFG-9")
async def test_what_is_refreshed_stays(one: Lock, two: Lock) -> None:
    mine = await taken(one)
    until = time.monotonic() + 2 * TTL
    while time.monotonic() < until:
        assert await one.renew(mine.fence)
        assert not (await two.acquire()).is_ours
        await asyncio.sleep(TTL / 3)


@pytest.mark.rule("CFG-9")
async def test_what_is_released_is_free_at_once(one: Lock, two: Lock) -> None:
    mine = await taken(one)
    await one.release()
    theirs = await two.acquire()

    assert theirs.is_ours
    assert theirs.fence > mine.fence


@pytest.mark.rule("CFG-9")
async def test_a_lock_is_released_and_renewed_only_by_its_holder(one: Lock, two: Lock) -> None:
    mine = await taken(one)
    await two.release()

    assert not await two.renew(mine.fence)
    assert await one.renew(mine.fence)


@pytest.mark.rule("CFG-9")
async def test_a_router_of_the_same_name_is_another_one(place: LockPlace, one: Lock) -> None:
    await taken(one)
    async with place.lock("one", process="another") as twin:
        state = await twin.acquire()

    assert (state.holder, state.is_ours) == ("one", False)


@pytest.mark.rule("CFG-9")
async def test_who_did_not_hear_that_it_has_it_may_ask_again(one: Lock) -> None:
    """As after an answer that was lost on its way."""
    first = await taken(one)
    second = await one.acquire()

    assert second.is_ours
    assert second.fence == first.fence


@pytest.mark.rule("CFG-9")
async def test_behind_a_pooler_and_on_an_old_server_it_is_taken_kept_lost_and_released(
    variant: LockPlace,
) -> None:
    async with variant.lock("one") as one, variant.lock("two") as two:
        mine = await taken(one)
        refused = await two.acquire()
        kept = await one.renew(mine.fence)
        theirs = await taken(two)
        lost = not await one.renew(mine.fence)
        await two.release()
        last = await one.acquire()

    assert (refused.holder, refused.is_ours, kept, lost) == ("one", False, True, True)
    assert last.is_ours
    assert mine.fence < theirs.fence < last.fence


@pytest.mark.rule("CFG-9")
async def test_a_refresh_of_an_earlier_time_does_nothing(one: Lock, two: Lock) -> None:
    first = await taken(one)
    await one.release()
    await taken(two)
    await two.release()
    second = await taken(one)

    assert not await one.renew(first.fence)
    assert await one.renew(second.fence)


@pytest.mark.rule("CFG-9")
async def test_a_server_that_does_not_answer_is_no_lock_and_is_found_again(
    place: LockPlace, one: Lock
) -> None:
    mine = await taken(one)
    place.server.freeze()
    try:
        with pytest.raises((LockUnavailable, TimeoutError)):
            await _renew_for_ever(one, mine.fence)
    finally:
        place.server.thaw()

    assert (await taken(one)).is_ours


@pytest.mark.rule("CFG-9")
async def test_a_restarted_server_grants_no_lock_that_another_may_still_hold(
    place: LockPlace, one: Lock, two: Lock
) -> None:
    """Whether or not it has kept the lock."""
    mine = await taken(one)
    await two.acquire()
    refreshed_at = time.monotonic()
    assert await one.renew(mine.fence)
    await asyncio.to_thread(place.server.kill)
    with pytest.raises(LockUnavailable) as down:
        await two.acquire()
    await asyncio.to_thread(place.server.start)
    async with place.lock("fresh") as fresh:
        await _taken_by_any(two, fresh)
    took = time.monotonic() - refreshed_at

    assert str(place.url.rpartition("@")[2]) not in str(down.value)
    assert took >= TTL


async def _renew_for_ever(lock: Lock, fence: int) -> None:
    """It takes a moment until all threads of a server have stopped."""
    async with asyncio.timeout(0.5):
        while await lock.renew(fence):
            pass


async def _taken_by_any(*locks: Lock) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        for lock in locks:
            try:
                if (await lock.acquire()).is_ours:
                    return
            except LockUnavailable:  # the server, or its pooler, still starts
                await asyncio.sleep(0.05)
        await asyncio.sleep(0.02)
    raise TimeoutError("the lock was not to be had")


@pytest.mark.rule("CMD-10")
async def test_a_number_is_seen_by_all_and_apart_from_locks(place: LockPlace, one: Lock) -> None:
    async with place.locks("one") as ours, place.locks("two") as theirs:
        first = await theirs.number("tick:s")
        await ours.keep_number("tick:s", 1_800_000_000)
        await ours.keep_number("tick:t", 7)
        await theirs.keep_number("tick:s", 1_800_000_060)
        numbers = [await ours.number("tick:s"), await theirs.number("tick:t")]
        await ours.keep_number("tick:t", 0)
        last = await theirs.number("tick:t")
        lock = await taken(one)
        queue = await theirs.lock("tick:s").acquire()

    assert (first, numbers, last) == (0, [1_800_000_060, 7], 0)
    assert lock.is_ours
    assert queue.fence <= 1


@pytest.mark.rule("CMD-10")
async def test_numbers_that_many_keep_at_once_are_kept(place: LockPlace) -> None:
    async with place.locks("one") as ours, place.locks("two") as theirs:
        await ours.keep_number("tick:s", 1)
        async with asyncio.TaskGroup() as tasks:
            for each in (ours, theirs) * 5:
                tasks.create_task(each.keep_number("tick:s", 60))

        assert await ours.number("tick:s") == 60


@pytest.mark.rule("CMD-10")
async def test_behind_a_pooler_and_on_an_old_server_numbers_are_kept(variant: LockPlace) -> None:
    async with variant.locks("one") as ours:
        await ours.keep_number("tick:s", 60)

        assert await ours.number("tick:s") == 60


@pytest.mark.rule("CMD-10", "CFG-9")
async def test_a_number_survives_its_server_or_is_refused(place: LockPlace) -> None:
    async with place.locks("one") as ours:
        await ours.keep_number("tick:s", 60)
        place.server.kill()
        try:
            with pytest.raises(LockUnavailable):
                await asyncio.wait_for(ours.number("tick:s"), PATIENCE)
            with pytest.raises(LockUnavailable):
                await asyncio.wait_for(ours.keep_number("tick:s", 61), PATIENCE)
        finally:
            place.server.start()
        kept = await until_answered(ours)

    assert kept == (0 if place.url.startswith("redis") else 60)  # it keeps nothing on disk here
