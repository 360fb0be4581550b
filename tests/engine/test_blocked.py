"""A group whose first message keeps failing is reported, once (WQ-5, OPS-2)."""

import asyncio
from typing import Any

import pytest

from router.core.config import RetryPolicy
from router.core.outcome import Answer, Reply
from router.core.warnings import Severity
from router.engine.lanes import MAX_NAMED
from tests.support.fakes import FakeSender
from tests.support.rig import FREE_QUEUE, Rig, body, grouped, pool, running

pytestmark = pytest.mark.anyio

FAILED = Reply(302)  # one try, so that a failure takes exactly a second
SECRET_TARGET = "http://target.test/hook?token=s3cret"


def every(seconds: float, **limits: Any) -> RetryPolicy:
    return RetryPolicy(schedule=(seconds,), **limits)


def failing(*ids: str, answer: Answer = FAILED, times: int = 1000) -> FakeSender:
    sender = FakeSender(takes=1)
    for each in ids:
        sender.script(each, *[answer] * times)
    return sender


def blocked(rig: Rig) -> list[str]:
    return [notice.message for notice in rig.warnings if notice.code == "GROUP_BLOCKED"]


@pytest.mark.rule("OPS-2")
async def test_a_head_that_fails_for_fifteen_minutes_is_reported_with_its_group_and_target() -> (
    None
):
    async with running(pool(retry=every(299)), sender=failing("a")) as rig:
        await rig.publish(*grouped("a", "b", mediationTarget=SECRET_TARGET))
        await asyncio.sleep(900.9)  # it failed at 1, 301, 601
        before = blocked(rig)
        await asyncio.sleep(0.2)  # … and 901
        (notice,) = (each for each in rig.warnings if each.code == "GROUP_BLOCKED")

        assert before == []
        assert (notice.severity, notice.source) == (Severity.WARN, "ProcessPool:P")
        assert "'g'" in notice.message
        assert "http://target.test/hook" in notice.message
        assert "s3cret" not in notice.message


@pytest.mark.rule("WQ-5")
async def test_a_head_that_fails_twenty_times_is_reported() -> None:
    async with running(pool(retry=every(9)), sender=failing("a")) as rig:
        await rig.publish(*grouped("a", "b"))
        await asyncio.sleep(190.9)  # nineteen failures, at 1, 11, … 181
        before = blocked(rig)
        await asyncio.sleep(0.2)

        assert (before, len(blocked(rig))) == ([], 1)


@pytest.mark.rule("WQ-5")
async def test_the_failures_that_the_broker_has_kept_count() -> None:
    """As after a restart: the pool has seen one failure, the row of the message has twenty."""
    async with running(pool("Q", retry=every(9)), sender=failing("a")) as rig:
        await rig.publish(*grouped("a", poolCode="Q"))
        await asyncio.sleep(185)
        await rig.apply()
        await asyncio.sleep(2)
        await rig.apply(pool("Q", retry=every(9)))
        await asyncio.sleep(60)

        assert len(blocked(rig)) == 1


@pytest.mark.rule("WQ-5")
async def test_it_is_reported_once_until_the_group_makes_progress() -> None:
    sender = failing("a", times=25)
    sender.script("b", *[FAILED] * 25)
    async with running(pool(retry=every(399)), sender=sender) as rig:
        await rig.publish(*grouped("a", "b"))
        await asyncio.sleep(
            10_000
        )  # `a` fails 25 times, at 1, 401, … 9601, and is accepted at 10001
        while_a_fails = [notice.count for notice in rig.warnings]
        await asyncio.sleep(1_100)  # `b` fails at 10002, 10402, 10802
        while_b_is_new = [notice.count for notice in rig.warnings]
        await asyncio.sleep(200)  # … and 11202

        assert while_a_fails == [1]
        assert while_b_is_new == [1]
        assert sum(notice.count for notice in rig.warnings) == 2


@pytest.mark.rule("WQ-5")
async def test_a_dead_letter_is_progress() -> None:
    policy = every(499, max_attempts=3)
    async with running(pool(retry=policy), sender=failing("a", "b")) as rig:
        await rig.publish(*grouped("a", "b"))
        await asyncio.sleep(5000)  # both fail three times within 1001 s: at 1, 501, 1001

        assert [letter.message_id for letter in rig.letters.letters] == ["a", "b"]
        assert blocked(rig) == []


@pytest.mark.rule("WQ-5")
async def test_an_open_circuit_is_time_without_progress_too() -> None:
    async with running(pool()) as rig:
        breaker = rig.breakers.of("http://target.test:80")

        async def keep_open() -> None:
            """Other callers fail: ten at once, then one whenever the circuit lets it through."""
            for _ in range(10):
                breaker.report(breaker.enter(0.0) or 0, 0.0, ok=False)
            while True:
                now = asyncio.get_running_loop().time()
                await asyncio.sleep(breaker.retry_at - now - 0.1)
                ticket = breaker.enter(breaker.retry_at)
                assert ticket is not None
                breaker.report(ticket, breaker.retry_at, ok=False)

        others = rig.tasks.create_task(keep_open())
        await asyncio.sleep(0)
        await rig.publish(*grouped("a", "b"))
        await asyncio.sleep(914)  # it went back at 0, 30, 60, 90, and then with each probe
        before = blocked(rig)
        await asyncio.sleep(2)
        others.cancel()

        assert rig.sender.sent == []
        assert (before, len(blocked(rig))) == ([], 1)


@pytest.mark.rule("WQ-5")
async def test_messages_that_are_delivered_in_parallel_block_no_others() -> None:
    parallel = pool(retry=every(9), parallel_ungrouped=True)
    async with running(parallel, sender=failing("a")) as rig:
        await rig.publish(body("a", poolCode="P"))
        await asyncio.sleep(3600)

        assert blocked(rig) == []


@pytest.mark.rule("WQ-5")
@pytest.mark.parametrize(
    "answer",
    [Reply(429, retry_after="60"), Reply(200, b'{"ack": false}')],
)
async def test_a_target_that_puts_it_off_has_not_failed(answer: Reply) -> None:
    async with running(pool(), sender=failing("a", answer=answer)) as rig:
        await rig.publish(*grouped("a", "b"))
        await asyncio.sleep(3600)

        assert blocked(rig) == []


@pytest.mark.rule("WQ-5")
@pytest.mark.parametrize("mode", ["IMMEDIATE", "NEXT_ON_ERROR"])
async def test_a_message_that_holds_no_others_blocks_no_group(mode: str) -> None:
    async with running(pool(retry=every(9)), sender=failing("a")) as rig:
        await rig.publish(*grouped("a", "b", dispatchMode=mode))
        await asyncio.sleep(3600)

        assert blocked(rig) == []


@pytest.mark.rule("WQ-5")
async def test_a_message_without_a_group_is_reported_only_while_no_other_gets_through() -> None:
    sender = failing("a")
    async with running(pool(retry=every(9)), sender=sender, queues=[FREE_QUEUE]) as rig:
        await rig.publish(body("a", poolCode="P"), queue=FREE_QUEUE)
        await asyncio.sleep(5)
        for n in range(20):  # one every 100 s is accepted, while `a` waits for its next try
            await asyncio.sleep(100)
            await rig.publish(body(f"b{n}", poolCode="P"), queue=FREE_QUEUE)
        meanwhile = blocked(rig)
        await asyncio.sleep(300)

        assert meanwhile == []
        assert len(blocked(rig)) == 1


@pytest.mark.rule("WQ-5")
async def test_deliveries_longer_than_the_fifteen_minutes_are_not_mistaken_for_absence() -> None:
    sender = FakeSender(takes=5000)  # each of the three tries times out after 900 s
    async with running(pool(), sender=sender) as rig:
        await rig.publish(*grouped("a"))
        await asyncio.sleep(5435)  # it failed at 2703
        before = blocked(rig)
        await asyncio.sleep(2)  # … and at 5436

        assert (before, len(blocked(rig))) == ([], 1)


@pytest.mark.rule("WQ-5")
async def test_many_blocked_groups_do_not_fill_the_list_of_warnings() -> None:
    ids = [f"m{n}" for n in range(MAX_NAMED + 30)]
    async with running(pool(concurrency=100, retry=every(9)), sender=failing(*ids)) as rig:
        for each in ids:
            await rig.publish(*grouped(each, group=f"g-{each}"))
        await asyncio.sleep(300)

        assert len(blocked(rig)) == MAX_NAMED + 1
        assert sum("more groups than" in message for message in blocked(rig)) == 1
