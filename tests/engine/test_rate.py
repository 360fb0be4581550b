"""So many a minute, also while that changes."""

import asyncio
from itertools import pairwise

import pytest

from router.engine.limits import RateLimiter
from tests.support.fakes import REFUSED, FakeSender
from tests.support.rig import Rig, body, grouped, pool, running

pytestmark = pytest.mark.anyio


async def publish(rig: Rig, count: int, start: int = 0) -> None:
    """Messages of as many groups: nothing but the rate limit holds them."""
    messages = (
        body(str(n), poolCode="P", messageGroupId=str(n)) for n in range(start, start + count)
    )
    await rig.publish(*messages)


def starts(rig: Rig) -> list[float]:
    return [at for at, _ in rig.sender.sent]


def quick() -> FakeSender:
    return FakeSender(takes=0.001)


@pytest.mark.rule("POOL-4")
async def test_a_minutes_worth_at_once_and_then_evenly() -> None:
    async with running(pool(concurrency=50, rate_per_minute=30), sender=quick()) as rig:
        await publish(rig, 33)
        await asyncio.sleep(60)

        assert starts(rig) == [0.0] * 30 + [2.0, 4.0, 6.0]
        assert rig.witness.nacks == []


@pytest.mark.rule("POOL-4")
async def test_a_smaller_burst_keeps_the_rate() -> None:
    async with running(pool(rate_per_minute=30, burst=2), sender=quick()) as rig:
        await publish(rig, 5)
        await asyncio.sleep(60)

        assert starts(rig) == [0, 0, 2, 4, 6]


@pytest.mark.rule("POOL-4")
async def test_a_rate_that_no_float_divides_is_kept_to_the_millisecond() -> None:
    async with running(pool(rate_per_minute=7, burst=1), sender=quick()) as rig:
        await publish(rig, 40)
        await asyncio.sleep(400)

        due = [n * 60 / 7 for n in range(40)]
        assert all(0 <= at - by < 0.05 for at, by in zip(starts(rig), due, strict=True))


@pytest.mark.rule("POOL-4")
async def test_the_limit_is_the_pools_own() -> None:
    async with running(pool("P", rate_per_minute=1), pool("Q"), sender=quick()) as rig:
        await rig.publish(*grouped("a", "b"), *grouped("x", "y", poolCode="Q"))
        await asyncio.sleep(30)

        assert sorted(rig.sender.ids) == ["a", "x", "y"]


@pytest.mark.rule("MED-2")
async def test_a_second_try_needs_no_second_rate_permit() -> None:
    sender = FakeSender(takes=1)
    sender.script("a", REFUSED)
    async with running(pool(rate_per_minute=1), sender=sender) as rig:
        await rig.publish(*grouped("a", "b"))
        await asyncio.sleep(100)

        assert rig.sender.sent == [(0, "a"), (2, "a"), (60, "b")]


@pytest.mark.rule("MED-2")
async def test_what_is_let_through_but_meets_no_free_permit_is_spent() -> None:
    sender = FakeSender(takes=1, takes_for={"a": 58.5})
    sender.script("a", REFUSED)
    async with running(pool(concurrency=1, rate_per_minute=1), sender=sender) as rig:
        await rig.publish(*grouped("a"), *grouped("b", group="other"))
        await asyncio.sleep(200)

        # At 60 the rate lets b through, but a is on its second try until 118. Had b kept what it
        # got at 60, two could have gone at 120.
        assert rig.sender.ids == ["a", "a", "b"]
        assert starts(rig) == pytest.approx([0, 59.5, 120], abs=0.002)
        assert rig.sender.most_open == 1


@pytest.mark.rule("POOL-4")
async def test_each_message_that_waits_is_counted_once() -> None:
    async with running(pool(rate_per_minute=1), sender=quick()) as rig:
        await publish(rig, 3)
        counted = []
        for _ in range(3):
            await asyncio.sleep(59)
            counted.append(rig.pool().runner.deliveries.total().rate_limited)

        assert counted == [1, 2, 2]


@pytest.mark.rule("POOL-4")
async def test_a_change_during_a_wait_is_not_another_wait() -> None:
    async with running(pool(rate_per_minute=1), sender=quick()) as rig:
        await publish(rig, 2)
        for rate in (2, 1, 2):
            await asyncio.sleep(1)
            await rig.apply(pool(rate_per_minute=rate))
        await asyncio.sleep(100)

        assert len(rig.sender.sent) == 2
        assert rig.pool().runner.deliveries.total().rate_limited == 1


@pytest.mark.rule("CFG-6")
async def test_a_raised_limit_reaches_those_that_wait_at_once() -> None:
    async with running(pool(rate_per_minute=1), sender=quick()) as rig:
        await publish(rig, 3)
        await asyncio.sleep(10)
        await rig.apply(pool(rate_per_minute=60, burst=1))
        await asyncio.sleep(30)

        # The bucket was 5/6 full, and drips faster now.
        assert starts(rig) == pytest.approx([0, 10 + 5 / 6, 11 + 5 / 6], abs=0.002)


@pytest.mark.rule("CFG-6")
async def test_a_lowered_limit_reaches_those_that_wait() -> None:
    async with running(pool(rate_per_minute=60, burst=1), sender=quick()) as rig:
        await publish(rig, 4)
        await asyncio.sleep(1.5)
        await rig.apply(pool(rate_per_minute=6, burst=1))
        await asyncio.sleep(60)

        assert starts(rig) == pytest.approx([0, 1, 6.5, 16.5], abs=0.002)


@pytest.mark.rule("CFG-6")
async def test_a_removed_limit_lets_all_go_at_once() -> None:
    async with running(pool(rate_per_minute=1), sender=quick()) as rig:
        await publish(rig, 4)
        await asyncio.sleep(10)
        await rig.apply(pool())
        await asyncio.sleep(10)

        assert starts(rig) == [0, 10, 10, 10]
        assert not rig.pool().waits_for_rate


@pytest.mark.rule("CFG-6")
async def test_a_limit_that_is_new_holds_from_then_on() -> None:
    async with running(pool(concurrency=1), sender=FakeSender(takes=1)) as rig:
        await publish(rig, 6)
        await asyncio.sleep(1.5)
        await rig.apply(pool(concurrency=1, rate_per_minute=2))
        await asyncio.sleep(100)

        assert starts(rig) == pytest.approx([0, 1, 2, 3, 32, 62], abs=0.002)


@pytest.mark.parametrize("between", [None, 3, 60])
@pytest.mark.rule("CFG-6")
async def test_no_change_grants_a_new_burst(between: int | None) -> None:
    async with running(pool(rate_per_minute=3), sender=quick()) as rig:
        await publish(rig, 3)
        await asyncio.sleep(1)
        await rig.apply(pool(rate_per_minute=between))
        await rig.apply(pool(rate_per_minute=3))
        await publish(rig, 2, start=3)
        await asyncio.sleep(100)

        assert starts(rig)[:3] == [0, 0, 0]
        assert starts(rig)[3] >= 20


@pytest.mark.rule("POOL-4")
async def test_what_was_used_before_a_change_drips_away_as_ever() -> None:
    async with running(pool(rate_per_minute=3), sender=quick()) as rig:
        await publish(rig, 3)
        await asyncio.sleep(1)
        await rig.apply(pool(rate_per_minute=6))
        await asyncio.sleep(99)
        await publish(rig, 6, start=3)
        await asyncio.sleep(1)

        assert starts(rig) == [0] * 3 + [100] * 6


@pytest.mark.rule("POOL-4")
async def test_a_limiter_without_a_limit_lets_everything_pass() -> None:
    limiter = RateLimiter(pool())

    for _ in range(1000):
        await limiter.pass_one()

    assert (limiter.is_limited, limiter.seconds_to_wait) == (False, 0.0)


@pytest.mark.rule("CFG-6")
async def test_a_draining_pool_waits_for_no_rate() -> None:
    async with running(pool(rate_per_minute=1), sender=quick()) as rig:
        p = rig.pool()
        await publish(rig, 2)
        await asyncio.sleep(10)
        await rig.apply()
        await asyncio.sleep(0)

        assert not p.waits_for_rate
        assert "P rate" not in {task.get_name() for task in asyncio.all_tasks()}


@pytest.mark.rule("POOL-4")
@pytest.mark.parametrize("seconds", [0, 30, 59.999, 60, 60.001])
async def test_who_stops_waiting_for_the_rate_takes_nothing_along(seconds: float) -> None:
    async with running(pool(rate_per_minute=1, concurrency=1), sender=quick()) as rig:
        await publish(rig, 3)
        await asyncio.sleep(seconds)
        await rig.apply()  # P drains
        await asyncio.sleep(0)
        await rig.apply(pool(rate_per_minute=1, concurrency=1))  # and is revived
        await asyncio.sleep(400)

        assert sorted(rig.sender.ids) == ["0", "1", "2"]
        assert rig.pool().permits.out == 0
        assert all(later - sooner >= 59.99 for sooner, later in pairwise(starts(rig)))
