"""Entries of `targets` in the engine: ceilings for all pools together, timeouts, changes."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from router.core.config import RetryPolicy, TargetConfig
from router.core.history import Fate
from router.core.outcome import Cause, NoReply, Reply
from router.core.returning import DEFAULT_DELAY_SECONDS
from router.core.warnings import Code, Severity
from router.engine.breaker import BreakerState
from router.engine.controls import Controls
from router.engine.targets import IDLE_SECONDS, TargetOrigin
from tests.support.fakes import OK, REFUSED, TIMED_OUT, FakeSender
from tests.support.rig import Rig, body, ended, pool, running
from tests.support.virtual_time import now

pytestmark = pytest.mark.anyio

HOST = "http://target.test"
ORIGIN = "http://target.test:80"
PLACE = f"{ORIGIN}/v2"


def entry(match: str = ORIGIN, name: str = "partner", **fields: Any) -> TargetConfig:
    return TargetConfig(name=name, match=match, **fields)


def alone(*ids: str, pool_: str = "P", path: str = "/hook") -> list[bytes]:
    """Messages of as many groups."""
    target = f"{HOST}{path}"
    return [body(each, poolCode=pool_, messageGroupId=each, mediationTarget=target) for each in ids]


def numbered(count: int, prefix: str = "m") -> list[str]:
    return [f"{prefix}{n}" for n in range(count)]


def place(rig: Rig, name: str = ORIGIN) -> TargetOrigin:
    return rig.manager.deps.targets.of(name)


async def delivered(rig: Rig, messages: int) -> float:
    while ended(rig)[Fate.DELIVERED] < messages:
        await asyncio.sleep(0.5)
        assert now() < 3000
    return now()


def starts(sender: FakeSender) -> Sequence[float]:
    return [round(at, 3) for at, _ in sender.sent]


@pytest.mark.rule("TGT-2")
async def test_a_ceiling_holds_for_all_pools_together() -> None:
    sender = FakeSender(takes=1.0)
    async with running(pool(), pool("Q"), sender=sender, targets=[entry(concurrency=3)]) as rig:
        await rig.publish(*alone(*numbered(6)), *alone(*numbered(6, "n"), pool_="Q"))
        await delivered(rig, 12)

    assert sender.most_open == 3


@pytest.mark.rule("TGT-2")
async def test_a_rate_starts_requests_evenly_from_all_pools() -> None:
    sender = FakeSender(takes=0.1)
    rated = entry(rate_per_minute=120)  # a second's worth is 2
    async with running(pool(), pool("Q"), sender=sender, targets=[rated]) as rig:
        await rig.publish(*alone(*numbered(3)), *alone(*numbered(3, "n"), pool_="Q"))
        await delivered(rig, 6)

    assert starts(sender) == pytest.approx([0, 0, 0.5, 1.0, 1.5, 2.0], abs=0.05)


@pytest.mark.rule("TGT-2")
async def test_a_rate_and_a_ceiling_hold_together() -> None:
    sender = FakeSender(takes=10.0)
    both = entry(rate_per_minute=60, concurrency=2)
    async with running(pool(), sender=sender, targets=[both]) as rig:
        await rig.publish(*alone(*numbered(4)))
        await delivered(rig, 4)

    assert starts(sender) == pytest.approx([0, 1, 10, 11], abs=0.05)


@pytest.mark.rule("TGT-2")
async def test_second_tries_count_against_the_rate() -> None:
    sender = FakeSender(takes=0.1)
    sender.script("m0", TIMED_OUT)
    async with running(pool(), sender=sender, targets=[entry(rate_per_minute=6)]) as rig:
        await rig.publish(*alone("m0", "m1"))
        await delivered(rig, 2)

    assert sender.ids == ["m0", "m0", "m1"]
    assert starts(sender) == pytest.approx([0, 10, 20], abs=0.05)


@pytest.mark.rule("TGT-2")
async def test_an_entry_with_a_path_has_its_own_ceiling_and_the_breaker_of_its_origin() -> None:
    sender = FakeSender(takes=1.0)
    entries = [entry(PLACE, concurrency=1)]
    async with running(pool(), sender=sender, targets=entries) as rig:
        await rig.publish(*alone("a", "b", path="/v2/x"), *alone(*numbered(5)))
        await asyncio.sleep(0.5)
        assert place(rig, PLACE).open == 1
        assert place(rig).open == 5
        assert place(rig, PLACE).breaker is place(rig).breaker
        await delivered(rig, 7)

    assert sender.most_open == 6


@pytest.mark.rule("TGT-2", "MED-4")
async def test_an_open_circuit_of_the_origin_returns_what_waits_for_a_ceiling() -> None:
    sender = FakeSender(takes=0.1)
    for each in numbered(20):
        sender.script(each, *[REFUSED] * 50)
    entries = [entry(PLACE, concurrency=1, rate_per_minute=600)]
    async with running(pool(concurrency=20), sender=sender, targets=entries) as rig:
        await rig.publish(*alone(*numbered(20), path="/v2"))
        await asyncio.sleep(60)
        assert place(rig, PLACE).breaker.state is not BreakerState.CLOSED
        assert place(rig, PLACE).has_place  # to be sent back
        Controls(rig.manager, rig.breakers).reset_target(PLACE)
        assert place(rig, PLACE).breaker.state is BreakerState.CLOSED


@pytest.mark.rule("TGT-2", "GATE-1")
async def test_a_silence_holds_in_addition_to_a_rate() -> None:
    sender = FakeSender(takes=0.1)
    sender.script("m0", Reply(503, retry_after="5"), OK)
    async with running(pool(), sender=sender, targets=[entry(rate_per_minute=60)]) as rig:
        await rig.publish(*alone("m0", "m1"))
        await asyncio.sleep(1.05)
        assert sender.ids == ["m0"]
        await delivered(rig, 2)

    assert starts(sender)[1] >= 5.1


@pytest.mark.rule("TGT-1")
async def test_a_timeout_of_a_target_beats_that_of_the_pool() -> None:
    sender = FakeSender(takes=50.0)
    async with running(pool(timeout=30.0), sender=sender, targets=[entry(timeout=10.0)]) as rig:
        await rig.publish(*alone("m0"))
        await asyncio.sleep(9.9)
        assert sender.open == 1
        await asyncio.sleep(0.2)
        assert sender.open == 0


@pytest.mark.rule("TGT-1", "TGT-2")
async def test_a_change_of_ceilings_applies_at_once() -> None:
    sender = FakeSender(takes=10.0)
    async with running(pool(), sender=sender, targets=[entry(concurrency=1)]) as rig:
        await rig.publish(*alone(*numbered(6)))
        await asyncio.sleep(1)
        assert sender.open == 1
        await rig.apply(pool(), targets=[entry(concurrency=3)])
        await asyncio.sleep(0.1)
        assert sender.open == 3
        await rig.apply(pool(), targets=[entry(rate_per_minute=60)])
        await asyncio.sleep(0.5)
        assert sender.open == 4
        await rig.apply(pool(), targets=[entry(rate_per_minute=6)])
        await asyncio.sleep(1)
        assert sender.open == 4
        await rig.apply(pool())
        await asyncio.sleep(0.1)
        assert sender.open == 6
        await delivered(rig, 6)


@pytest.mark.rule("TGT-2")
async def test_what_waits_at_a_removed_place_is_delivered() -> None:
    sender = FakeSender(takes=1.0)
    async with running(pool(), sender=sender, targets=[entry(PLACE, concurrency=1)]) as rig:
        await rig.publish(*alone("a", "b", path="/v2"))
        await asyncio.sleep(0.5)
        await rig.apply(pool())
        await rig.publish(*alone("c", path="/v2"))
        assert await delivered(rig, 3) < 3
        targets = rig.manager.deps.targets
        await asyncio.sleep(IDLE_SECONDS)
        targets.drop_idle(now())
        assert len(targets) == 0
        assert not rig.breakers.all()


@pytest.mark.rule("TGT-2")
async def test_a_draining_pool_gives_back_what_waits_for_a_rate() -> None:
    sender = FakeSender(takes=1.0)
    async with running(pool(), sender=sender, targets=[entry(rate_per_minute=1)]) as rig:
        await rig.publish(*alone(*numbered(3)))
        await asyncio.sleep(0.5)
        await rig.apply(pool("Q"), targets=[entry(rate_per_minute=1)])
        await asyncio.sleep(5)
        assert len(sender.sent) == 1


@pytest.mark.rule("TGT-5")
async def test_credentials_that_do_not_work_return_a_message_for_30_s_and_count_nothing() -> None:
    sender = FakeSender(takes=1.0)
    locked_out = NoReply(Cause.NO_CREDENTIALS, "credentials crm: not taken")
    sender.script("m0", *[locked_out] * 3)
    strict = RetryPolicy(max_attempts=1, schedule=(1.0,))
    async with running(pool(retry=strict), sender=sender) as rig:
        await rig.publish(*alone("m0"))
        assert await delivered(rig, 1) >= 3 * (DEFAULT_DELAY_SECONDS + 1)
        [notice] = rig.warnings

    assert starts(sender) == pytest.approx([0, 31, 62, 93], abs=0.5)
    assert rig.letters.letters == []
    assert {attempt for _, attempt in sender.requests} == {1}
    assert (notice.code, notice.severity) == (Code.CREDENTIALS, Severity.CRITICAL)
    assert notice.message == "credentials crm: not taken"
