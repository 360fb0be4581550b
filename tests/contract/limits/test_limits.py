"""What a limits server promises, wherever it is."""

import asyncio
import time

import pytest

from router.core.sharing import RateTerms
from router.ports import LimitsServer, LimitsUnavailable, Reserved
from tests.contract.limits.conftest import LimitsPlace

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

SLOW = RateTerms(interval=60.0, burst=1, portion=1)  # nothing gets free while a test runs
SOON = 1.0  # seconds, for some calls


def about(reserved: Reserved) -> tuple[int, float]:
    return reserved.count, round(reserved.delay / 60)


@pytest.mark.rule("LIM-1")
async def test_each_slot_is_given_to_one_router(one: LimitsServer, two: LimitsServer) -> None:
    given = [await limits.reserve("P", SLOW, 1) for limits in (one, two, one, two)]

    assert [about(each) for each in given] == [(1, 0), (1, 1), (1, 2), (1, 3)]
    assert 0 >= given[0].delay > -SOON
    assert all(-SOON < each.delay - 60 * n <= 0 for n, each in enumerate(given))


@pytest.mark.rule("LIM-1")
async def test_many_ask_at_once_and_none_gets_the_slot_of_another(place: LimitsPlace) -> None:
    async with (
        place.router("a") as a,
        place.router("b") as b,
        place.router("c") as c,
        asyncio.TaskGroup() as tasks,
    ):
        terms = RateTerms(interval=60.0, burst=1, portion=2)
        asked = [tasks.create_task(each.reserve("P", terms, 1)) for each in (a, b, c) * 7]

    starts = sorted(round(each.result().delay / 60) for each in asked)
    assert starts == [*range(0, 42, 2)]


@pytest.mark.rule("LIM-1")
async def test_a_burst_is_given_once_and_only_as_much_of_it_as_is_wanted(
    one: LimitsServer, two: LimitsServer
) -> None:
    terms = RateTerms(interval=60.0, burst=10, portion=1)
    first = await one.reserve("P", terms, 4)
    second = await two.reserve("P", terms, 100)
    third = await one.reserve("P", terms, 100)

    assert about(first) == (4, -9)
    assert about(second) == (6, -5)
    assert about(third) == (1, 1)


@pytest.mark.rule("LIM-1")
async def test_who_wants_no_burst_gets_none_and_neither_do_others(
    one: LimitsServer, two: LimitsServer
) -> None:
    """As after an outage."""
    await one.reserve("P", SLOW, 10)
    after = await two.reserve("P", RateTerms(interval=60.0, burst=10, portion=1), 10)

    assert about(after) == (1, 1)


@pytest.mark.rule("LIM-1")
async def test_pools_and_installations_have_their_own_slots(
    place: LimitsPlace, one: LimitsServer
) -> None:
    await one.reserve("P", SLOW, 1)
    elsewhere = LimitsPlace(place.url, place.server)
    async with elsewhere.router("one") as other:
        given = [await one.reserve("Q", SLOW, 1), await other.reserve("P", SLOW, 1)]

    assert [about(each) for each in given] == [(1, 0), (1, 0)]


@pytest.mark.rule("LIM-1")
async def test_what_was_used_stays_used_when_the_rate_changes(one: LimitsServer) -> None:
    for _ in range(4):
        await one.reserve("P", SLOW, 1)
    faster = await one.reserve("P", RateTerms(interval=6.0, burst=1, portion=1), 1)

    assert 24 - SOON < faster.delay <= 24


@pytest.mark.rule("LIM-1")
async def test_slots_come_at_the_pace_of_the_rate(one: LimitsServer) -> None:
    terms = RateTerms(interval=0.05, burst=1, portion=1)
    began = time.monotonic()
    for _ in range(11):
        reserved = await one.reserve("P", terms, 1)
        await asyncio.sleep(max(reserved.delay, 0.0))

    assert 0.45 <= time.monotonic() - began < 0.5 + SOON


@pytest.mark.rule("LIM-1")
async def test_routers_are_counted(one: LimitsServer, two: LimitsServer) -> None:
    counts = [await limits.count_routers() for limits in (one, one, two, one)]

    assert counts == [1, 1, 2, 2]


@pytest.mark.rule("LIM-1")
async def test_a_server_that_is_gone_is_told_without_its_address_and_is_found_again(
    place: LimitsPlace, one: LimitsServer
) -> None:
    if place.server is None:
        pytest.skip("it has no address")
    await one.reserve("P", SLOW, 1)
    await asyncio.to_thread(place.server.kill)
    try:
        with pytest.raises(LimitsUnavailable) as down:
            await one.reserve("P", SLOW, 1)
    finally:
        await asyncio.to_thread(place.server.start)

    assert str(place.url.rpartition("@")[2]) not in str(down.value)
    assert (await _found_again(one)).count == 1


async def _found_again(limits: LimitsServer) -> Reserved:
    deadline = time.monotonic() + 20
    while True:
        try:
            return await limits.reserve("P", SLOW, 1)
        except LimitsUnavailable:  # the server, or its pooler, still starts
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.05)
