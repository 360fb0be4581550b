"""One rate limit for several routers (LIM-1)."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from router.core.config import PoolConfig
from router.core.sharing import RateTerms
from router.core.warnings import WarningBook
from router.engine.alerts import Alerts
from router.engine.shared_limits import SharedLimits, SharedRate
from router.ports import LimitsServer, Reserved
from tests.support.fakes import FakeSender
from tests.support.limits import MemoryLimits
from tests.support.rig import Rig, body, pool, running

pytestmark = pytest.mark.anyio


def limits_of(server: LimitsServer, *, routers: int = 1) -> tuple[SharedLimits, WarningBook]:
    book = WarningBook()
    return SharedLimits(server, Alerts(book, lambda: 0.0), routers=routers), book


async def publish(rig: Rig, count: int) -> None:
    """Messages of as many groups: nothing but the rate limit holds them."""
    await rig.publish(*(body(f"{n}", poolCode="P", messageGroupId=f"{n}") for n in range(count)))


def starts(*rigs: Rig) -> list[float]:
    return sorted(round(at, 3) for rig in rigs for at, _ in rig.sender.sent)


def codes(book: WarningBook) -> list[str]:
    return [notice.code for notice in book.list(now=0.0)]


@asynccontextmanager
async def routers(
    server: MemoryLimits, count: int, config: PoolConfig
) -> AsyncIterator[Sequence[Rig]]:
    """Routers with queues of their own and the same pool, which report to one server."""
    async with AsyncExitStack() as stack:
        rigs = []
        for n in range(count):
            limits, _ = limits_of(server.of(f"router {n}"))
            sender = FakeSender(takes=0.001)
            rig = await stack.enter_async_context(running(config, sender=sender, shared=limits))
            reporting = rig.tasks.create_task(limits.run(lambda: True))
            stack.callback(reporting.cancel)
            rigs.append(rig)
        await asyncio.sleep(0)
        yield rigs


@pytest.mark.rule("LIM-1")
async def test_three_routers_send_at_the_rate_of_one() -> None:
    server = MemoryLimits()
    async with routers(server, 3, pool(rate_per_minute=60, burst=1)) as rigs:
        for rig in rigs:
            await publish(rig, 20)
        await asyncio.sleep(59.5)

        assert starts(*rigs) == [float(n) for n in range(60)]
        assert [len(rig.sender.sent) for rig in rigs] == [20, 20, 20]


@pytest.mark.rule("LIM-1")
async def test_a_burst_is_that_of_all_routers_together() -> None:
    server = MemoryLimits()
    async with routers(server, 2, pool(concurrency=50, rate_per_minute=60, burst=10)) as rigs:
        for rig in rigs:
            await publish(rig, 10)
        await asyncio.sleep(5.5)

        assert starts(*rigs) == [*[0.0] * 10, 1.0, 2.0, 3.0, 4.0, 5.0]


@pytest.mark.rule("LIM-1")
async def test_a_router_with_nothing_to_send_asks_for_nothing() -> None:
    server = MemoryLimits()
    async with routers(server, 2, pool(rate_per_minute=60, burst=1)) as (busy, _idle):
        await publish(busy, 5)
        await asyncio.sleep(60)

        assert server.calls == 5


@pytest.mark.rule("LIM-1")
async def test_a_high_rate_is_asked_for_ten_times_a_second() -> None:
    server = MemoryLimits(takes=0.001)
    config = pool(concurrency=50, rate_per_minute=60_000, burst=1)
    async with routers(server, 1, config) as (rig,):
        await publish(rig, 950)
        await asyncio.sleep(1.2)

        assert len(rig.sender.sent) == 950
        assert server.calls <= 11


@pytest.mark.rule("LIM-1")
async def test_slots_that_are_not_used_in_time_are_lost() -> None:
    server = MemoryLimits()
    async with routers(server, 1, pool(rate_per_minute=6_000, burst=1)) as (rig,):
        await publish(rig, 1)  # reserves ten, for a tenth of a second
        await asyncio.sleep(0.155)
        await publish(rig, 8)  # the first of them is known already
        await asyncio.sleep(1)

        # Of the portion, the last four are left; then the next portion.
        assert starts(rig) == [0, *[0.155] * 5, 0.165, 0.175]


@pytest.mark.rule("LIM-1")
async def test_each_router_takes_its_part_while_the_server_is_away() -> None:
    server = MemoryLimits()
    async with routers(server, 3, pool(rate_per_minute=60, burst=1)) as rigs:
        await asyncio.sleep(6)  # all have seen each other
        server.is_away = True
        await asyncio.sleep(6)  # all have seen that it is away
        for rig in rigs:
            await publish(rig, 4)
        await asyncio.sleep(10)

        assert [starts(rig) for rig in rigs] == [[15.0, 18.0, 21.0]] * 3


@pytest.mark.rule("LIM-1")
async def test_the_server_is_back_and_grants_no_burst_for_the_time_that_it_was_away() -> None:
    server = MemoryLimits()
    async with routers(server, 2, pool(rate_per_minute=60, burst=10)) as rigs:
        await asyncio.sleep(6)
        server.is_away = True
        await asyncio.sleep(60)
        server.is_away = False
        await asyncio.sleep(1)
        for rig in rigs:
            await publish(rig, 3)
        await asyncio.sleep(10)

        assert starts(*rigs) == [67.0, 68.0, 69.0, 70.0, 71.0, 72.0]


@pytest.mark.rule("LIM-1")
async def test_a_message_that_waits_goes_on_by_itself_when_the_server_goes_and_comes() -> None:
    server = MemoryLimits()
    async with routers(server, 1, pool(rate_per_minute=6, burst=1)) as (rig,):
        await publish(rig, 4)
        await asyncio.sleep(1)
        server.is_away = True
        await asyncio.sleep(12)
        server.is_away = False
        await asyncio.sleep(40)

        # What it has reserved before is good. On its own it would begin without a burst, at 20.
        assert starts(rig) == [0, 10, 20, 30]


@pytest.mark.rule("LIM-1", "OPS-2")
async def test_a_warning_lasts_as_long_as_the_server_is_away() -> None:
    server = MemoryLimits(is_away=True)
    limits, book = limits_of(server.of("one"), routers=4)
    await limits.look()
    await limits.look()
    away = (codes(book), limits.routers, limits.outages)
    server.is_away = False
    await limits.look()

    assert away == (["LIMITS"], 4, 1)
    assert (codes(book), limits.routers, limits.is_away) == ([], 1, False)


@pytest.mark.rule("LIM-1")
@pytest.mark.parametrize(
    ("routers", "was_there", "text"),
    [
        (1, False, "the whole of each rate: if there are others, set MESSAGE_ROUTER_REPLICAS"),
        (3, False, "its part of each rate"),
        (1, True, "its part of each rate"),
    ],
)
async def test_a_router_that_knows_of_no_others_says_so_while_the_server_is_away(
    routers: int, was_there: bool, text: str
) -> None:
    server = MemoryLimits()
    limits, book = limits_of(server.of("one"), routers=routers)
    if was_there:
        await limits.look()
    server.is_away = True
    await limits.look()

    (notice,) = book.list(now=0.0)
    assert notice.message.endswith(f"until it is back, this router takes {text}")


@pytest.mark.rule("LIM-1")
async def test_a_server_that_does_not_answer_counts_as_away() -> None:
    server = MemoryLimits(takes=60)
    limits, book = limits_of(server.of("one"))
    await limits.look()

    assert asyncio.get_running_loop().time() == 1
    assert limits.is_away
    assert "no answer in time" in book.list(now=0.0)[0].message


class Broken:
    """A server whose adapter has a bug."""

    async def reserve(self, name: str, terms: RateTerms, wanted: int) -> Reserved:
        raise NotImplementedError(name, terms, wanted)

    async def count_routers(self) -> int:
        raise NotImplementedError


@pytest.mark.rule("LIM-1")
async def test_a_bug_in_the_adapter_counts_as_away_and_messages_go_on() -> None:
    limits, book = limits_of(Broken())
    config = pool(rate_per_minute=60, burst=1)
    sender = FakeSender(takes=0.001)
    async with running(config, sender=sender, shared=limits) as rig:
        await publish(rig, 2)
        await asyncio.sleep(5)

        assert starts(rig) == [1.0, 2.0]
    assert codes(book) == ["LIMITS"]
    assert "NotImplementedError" in book.list(now=0.0)[0].message


@pytest.mark.rule("LIM-1")
async def test_a_router_that_does_not_work_does_not_count() -> None:
    server = MemoryLimits()
    working, _ = limits_of(server.of("one"))
    waiting, _ = limits_of(server.of("two"))
    tasks = [
        asyncio.ensure_future(working.run(lambda: True)),
        asyncio.ensure_future(waiting.run(lambda: False)),
    ]
    await asyncio.sleep(11)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)

    assert working.routers == 1
    assert list(server.seen) == ["one"]


@pytest.mark.rule("LIM-1", "CFG-6")
async def test_a_change_of_the_rate_reaches_what_waits() -> None:
    server = MemoryLimits()
    async with routers(server, 1, pool(rate_per_minute=1)) as (rig,):
        await publish(rig, 6)
        await asyncio.sleep(10)
        await rig.apply(pool(rate_per_minute=60, burst=1))
        await asyncio.sleep(2)
        changed = starts(rig)
        await rig.apply(pool(rate_per_minute=60, burst=1, concurrency=3))
        await asyncio.sleep(1)
        await rig.apply(pool())
        await asyncio.sleep(0.1)

        # The server had given two slots: of these two minutes, 110 s were left, now 1.83 s.
        assert changed == pytest.approx([0, 11.833], abs=0.01)
        assert len(rig.sender.sent) == 6


@pytest.mark.rule("LIM-1", "CFG-6")
async def test_a_change_reaches_what_waits_while_the_server_is_away() -> None:
    server = MemoryLimits(is_away=True)
    async with routers(server, 1, pool(rate_per_minute=1, burst=1)) as (rig,):
        await publish(rig, 3)
        await asyncio.sleep(10)
        await rig.apply(pool(rate_per_minute=60, burst=1))
        await asyncio.sleep(0.05)
        changed = starts(rig)
        await rig.apply(pool())
        await asyncio.sleep(0.1)

        assert changed == []
        assert len(rig.sender.sent) == 3


@pytest.mark.rule("LIM-1")
async def test_an_answer_that_comes_after_a_change_is_not_used() -> None:
    server = MemoryLimits(takes=0.5)
    limits, _ = limits_of(server.of("one"))
    rate = SharedRate(pool(rate_per_minute=1), limits)
    passing = asyncio.ensure_future(rate.pass_one())
    await asyncio.sleep(0.1)
    rate.change(pool(rate_per_minute=600, burst=1))
    await passing

    assert server.calls == 2
    assert asyncio.get_running_loop().time() == pytest.approx(1, abs=0.11)


@pytest.mark.rule("LIM-1")
async def test_how_long_a_message_will_wait_is_known() -> None:
    server = MemoryLimits()
    limits, _ = limits_of(server.of("one"))
    rate = SharedRate(pool(rate_per_minute=60, burst=1), limits)
    before = rate.seconds_to_wait
    await rate.pass_one()
    after = rate.seconds_to_wait
    waiting = asyncio.ensure_future(rate.pass_one())
    await asyncio.sleep(0.25)
    reserved = rate.seconds_to_wait
    await waiting
    server.is_away = True
    await limits.look()
    away = rate.seconds_to_wait
    rate.change(pool())

    assert (before, after, reserved) == pytest.approx((0, 1, 0.75))
    assert away == pytest.approx(1)
    assert rate.seconds_to_wait == 0
