"""The gate of a target: silence, a limit, slow start, a retry budget, and where lanes wait."""

import asyncio
import math
from collections import OrderedDict
from typing import Any

import pytest

from router.core.config import RetryPolicy
from router.core.explain import Situation
from router.core.gate import SLOW_START
from router.core.history import Fate, WaitReason
from router.core.outcome import Answer, Reply
from router.core.state import assess
from router.core.warnings import Code
from router.engine.breaker import Breakers, BreakerState
from router.engine.chores import Chores
from router.engine.controls import Controls
from router.engine.lanes import Flow, Lane, Lanes
from router.engine.pool import MAX_LINES, MAX_UNUSED_LOOKS, ProcessPool, waits_in
from router.engine.queue_manager import shut_down
from router.engine.state import MAX_SHOWN_TARGETS, MessageLookup
from router.engine.targets import MAX_TARGETS, MAX_WAIT_SECONDS, Line, TargetOrigin, Targets
from router.ports import Traits, Unknown
from tests.support.fakes import BUSY, OK, REFUSED, TIMED_OUT, BusySender, FakeSender
from tests.support.faults import Scripted, ScriptedQueue, handed
from tests.support.rig import FREE_QUEUE, Rig, body, ended, grouped, pool, running
from tests.support.states import RigReader
from tests.support.virtual_time import now

pytestmark = pytest.mark.anyio

ORIGIN = "http://target.test:80"
OTHER = "http://other.test/hook"


def silence(seconds: int, status: int = 429) -> Reply:
    return Reply(status, retry_after=str(seconds))


def alone(*ids: str, **fields: Any) -> list[bytes]:
    """Messages of as many groups for the pool P."""
    return [body(each, **({"poolCode": "P", "messageGroupId": each} | fields)) for each in ids]


def numbered(count_: int, prefix: str = "m") -> list[str]:
    return [f"{prefix}{n}" for n in range(count_)]


def target(rig: Rig, origin: str = ORIGIN) -> TargetOrigin:
    return rig.manager.deps.targets.of(origin)


def waiting(pool_: ProcessPool) -> dict[WaitReason, int]:
    return {reason: number for reason, number in waits_in(pool_).items() if number}


async def until_delivered(rig: Rig, messages: int, *, most: float = 600.0) -> float:
    """Return when so many were delivered, and nothing else is held."""
    while ended(rig)[Fate.DELIVERED] < messages or not rig.is_empty:
        await asyncio.sleep(1)
        assert now() < most
    return now()


def limit_to_one(rig: Rig, origin: str = ORIGIN) -> None:
    """The target has just refused the only request that was open."""
    limited = target(rig, origin)
    limited.open += 1
    limited.learn(BUSY, now(), lambda: 0.0, lambda low, _: low)
    limited.leave()
    assert limited.limit == 1.0


def nothing_is_left(rig: Rig) -> bool:
    pools = rig.manager.pools.values()
    counts = [(p.held, p.parked, p.permits.out, len(p.lanes.ready), len(p.lanes)) for p in pools]
    lines = [line for p in pools for line in p.lines.values()]
    return (
        set(counts) <= {(0, 0, 0, 0, 0)}
        and all(line.is_idle and not line.messages for line in lines)
        and all(each.open == 0 and not each.waiting for each in rig.manager.deps.targets)
    )


@pytest.mark.rule("GATE-2", "P1")
async def test_a_target_at_its_limit_is_hardly_asked_in_vain_and_loses_no_message() -> None:
    sender = BusySender(takes=0.1, most={"target.test": 10})
    retry = RetryPolicy(max_attempts=20)
    async with running(pool(concurrency=100, retry=retry), sender=sender) as rig:
        await rig.publish(*alone(*numbered(2_000)))
        at = await until_delivered(rig, 2_000)

        assert rig.letters.letters == []
        assert len(sender.refused) <= 0.05 * len(sender.sent)
        assert at <= 25
        assert nothing_is_left(rig)


@pytest.mark.rule("GATE-1", "P1")
async def test_a_target_that_asks_for_silence_gets_none_of_two_thousand_messages() -> None:
    sender = FakeSender(takes=1)
    for each in numbered(20):  # those that are open when the first answer comes
        sender.script(each, silence(60))
    retry = RetryPolicy(max_attempts=1)
    async with running(pool(concurrency=20, retry=retry), sender=sender) as rig:
        await rig.publish(*alone(*numbered(2_000)))
        await until_delivered(rig, 2_000)

        # The silence of 60 s ends at 63.5, half of the longest jitter later.
        starts = sorted(at for at, _ in sender.sent)
        assert starts[:20] == [0] * 20
        assert starts[20] == pytest.approx(1 + 62.5)
        assert rig.letters.letters == []  # none was tried, so none was given up


@pytest.mark.rule("GATE-1", "ORD-6")
async def test_a_target_that_asked_for_silence_is_away_until_its_end() -> None:
    sender = FakeSender(takes=1)
    sender.script("a", silence(40))
    async with running(pool(), sender=sender, queues=[FREE_QUEUE]) as rig:
        targets = rig.manager.deps.targets
        assert targets.away_until(OTHER, now()) is None
        await rig.publish(*alone("a"), queue=FREE_QUEUE)
        await asyncio.sleep(2)

        assert targets.away_until("http://target.test/hook", now()) == target(rig).gate.closed_until


@pytest.mark.rule("GATE-1", "GATE-5")
async def test_a_short_silence_is_waited_for_here_without_a_worker() -> None:
    sender = FakeSender(takes=1)
    sender.script("a", silence(8))
    async with running(pool(concurrency=1), sender=sender) as rig:
        await rig.publish(*alone("a", "b", "c"), body("x", poolCode="P", mediationTarget=OTHER))
        await asyncio.sleep(3)
        assert waiting(rig.pool()) == {WaitReason.TARGET: 2}
        assert rig.pool().permits.out == 0
        await asyncio.sleep(20)

        # A silence of 8 s ends after 8.4 s; the other target does not wait for it.
        assert sender.sent == [(0, "a"), (1, "x"), (9.4, "b"), (10.4, "c"), (11.4, "a")]
        assert [id_ for _, id_, _ in rig.witness.nacks] == ["a"]
        assert nothing_is_left(rig)


@pytest.mark.rule("GATE-1", "GATE-5", "BRK-4", "P3")
async def test_a_long_silence_sends_messages_back_for_the_rest_of_it_in_order() -> None:
    sender = FakeSender(takes=1)
    sender.script("a", silence(40))
    async with running(pool(concurrency=2), sender=sender, queues=[FREE_QUEUE]) as rig:
        await rig.publish(*alone("a"), queue=FREE_QUEUE)
        await asyncio.sleep(11)
        await rig.publish(*grouped("b", "c"), queue=FREE_QUEUE)
        await asyncio.sleep(60)

        # The silence from second 1 on ends at 43. `a` is due before, and waits here; the target
        # refused at one at once, so the others come one after the other.
        assert rig.witness.nacks == [(1, "a", 40), (11, "b", 32), (11, "c", 32)]
        assert sender.sent == [(0, "a"), (43, "a"), (44, "b"), (45, "c")]


@pytest.mark.rule("GATE-1", "WQ-5")
async def test_a_silence_uses_up_no_attempt() -> None:
    sender = FakeSender(takes=1)
    sender.script("a", silence(40), silence(40), silence(40))
    retry = RetryPolicy(max_attempts=1, schedule=(1.0,))
    async with running(pool(concurrency=1, retry=retry), sender=sender) as rig:
        await rig.publish(*alone("a", "b"))
        await until_delivered(rig, 2)

        assert rig.letters.letters == []


@pytest.mark.rule("GATE-1", "GATE-5")
async def test_lanes_that_wait_for_a_place_go_back_when_a_long_silence_begins() -> None:
    sender = FakeSender(takes=2)
    sender.script("a", silence(30))
    async with running(pool(concurrency=5), sender=sender) as rig:
        limit_to_one(rig)
        await rig.publish(*alone("a", "b", "c"))
        await asyncio.sleep(1)
        assert rig.pool().parked == 2
        await asyncio.sleep(1.5)

        assert rig.witness.nacks == [(2, "a", 30), (2, "b", 31.5), (2, "c", 31.5)]
        assert rig.pool().parked == 0
        await until_delivered(rig, 3)
        assert nothing_is_left(rig)


@pytest.mark.rule("GATE-1")
async def test_a_success_does_not_end_a_silence_and_a_shorter_one_does_not_shorten_it() -> None:
    sender = FakeSender(takes_for={"a": 1.0, "b": 2.0, "c": 3.0})
    sender.script("a", silence(60))
    sender.script("c", silence(5, status=503))
    async with running(pool(), sender=sender) as rig:
        await rig.publish(*alone("a", "b", "c"))
        await asyncio.sleep(10)

        assert target(rig).gate.closed_until == 1 + 62.5
        assert target(rig).is_silent


@pytest.mark.rule("GATE-1")
@pytest.mark.parametrize(
    ("header", "until"),
    [
        ("31536000", 1 + 900 + 2.5),  # a year: at most 15 minutes
        ("9" * 300, 1 + 900 + 2.5),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 1 + 900 + 2.5),
        ("-5", -math.inf),  # means nothing
        ("soon", -math.inf),
        ("1, 2", -math.inf),
        ("Mon, 01 Jan 1900 00:00:00 GMT", 1 + 1.05),  # in the past: the least
        ("0", 1 + 1.05),
    ],
)
@pytest.mark.parametrize("status", [429, 503])
async def test_a_retry_after_that_lies_has_a_bounded_effect(
    header: str, until: float, status: int
) -> None:
    sender = FakeSender(takes=1)
    sender.script("a", Reply(status, retry_after=header))
    async with running(pool(), sender=sender) as rig:
        await rig.publish(*alone("a"))
        await asyncio.sleep(1.5)

        assert target(rig).gate.closed_until == until
        await asyncio.sleep(max(until, 0.0))
        assert not target(rig).is_silent
        await rig.publish(*alone("b"))
        await asyncio.sleep(2)
        assert "b" in sender.ids


@pytest.mark.rule("GATE-1")
@pytest.mark.parametrize(
    "answer",
    [
        Reply(500, retry_after="60"),
        Reply(307, retry_after="60"),
        Reply(404, retry_after="60"),
        Reply(429),
        Reply(200, b'{"ack": false, "delaySeconds": 60}'),
    ],
)
async def test_what_is_about_a_message_silences_no_target(answer: Answer) -> None:
    sender = FakeSender(takes=1)
    sender.script("a", answer)
    async with running(pool(concurrency=1), sender=sender) as rig:
        await rig.publish(*alone("a", "b"))
        await asyncio.sleep(3)

        assert not target(rig).is_silent
        assert (1, "b") in sender.sent


@pytest.mark.rule("GATE-2", "GATE-5", "P5")
async def test_one_busy_target_takes_no_worker_from_another() -> None:
    sender = BusySender(takes=10, host_takes={"other.test": 0.1})
    async with running(pool(concurrency=4), sender=sender) as rig:
        limit_to_one(rig)
        await rig.publish(*alone(*numbered(6)))
        await rig.publish(*alone(*numbered(20, "x"), mediationTarget=OTHER))
        await asyncio.sleep(2)

        assert len([id_ for id_ in sender.ids if id_.startswith("x")]) == 20
        assert waiting(rig.pool()) == {WaitReason.TARGET: 5}
        assert rig.pool().permits.out == 1


@pytest.mark.rule("GATE-2", "GATE-5")
async def test_pools_that_share_a_target_take_turns_at_its_places() -> None:
    sender = FakeSender(takes=1)
    async with running(pool("P", 5), pool("Q", 5), sender=sender) as rig:
        limit_to_one(rig)
        await rig.publish(*alone("first"))
        await asyncio.sleep(0.5)
        for code in "PQ":
            await rig.publish(*alone(*numbered(4, code), poolCode=code))
        await asyncio.sleep(8)

        turns = ["first", "P0", "Q0", "P1", "Q1", "P2", "Q2", "P3"]
        assert sender.sent[:8] == list(enumerate(turns))
        await until_delivered(rig, 9)
        assert nothing_is_left(rig)


@pytest.mark.rule("GATE-5", "P5")
async def test_a_pool_without_a_free_worker_keeps_no_place_from_another() -> None:
    sender = BusySender(takes=1, host_takes={"other.test": 50.0})
    async with running(pool("P", 2), pool("Q", 2), sender=sender) as rig:
        limit_to_one(rig)
        await rig.publish(*alone("a"))
        await asyncio.sleep(0.5)
        await rig.publish(*alone("p", "p2"))
        await asyncio.sleep(0.1)
        # They take both of P's workers before `a` gives its place back.
        await rig.publish(*alone("x", mediationTarget=OTHER))
        await rig.publish(*alone("y", poolCode="P", mediationTarget=OTHER))
        await rig.publish(*alone("q", "q2", poolCode="Q"))
        await asyncio.sleep(3)
        rig.pool().change(pool("P", 1))

        assert sender.ids == ["a", "x", "y", "q", "q2"]
        await until_delivered(rig, 7)
        assert [round(at, 1) for at, id_ in sender.sent if id_[0] == "p"] == [51.0, 52.0]
        assert nothing_is_left(rig)


@pytest.mark.rule("GATE-5")
async def test_a_called_lane_that_finds_its_place_taken_keeps_its_turn() -> None:
    sender = BusySender(takes=1, host_takes={"other.test": 4.5})
    pools = pool("P", 1), pool("Q", 1)
    async with running(*pools, sender=sender, queues=[FREE_QUEUE]) as rig:
        limit_to_one(rig)
        await rig.publish(*alone("q", poolCode="Q"), queue=FREE_QUEUE)
        await asyncio.sleep(0.1)
        await rig.publish(*alone("p", "p2"), queue=FREE_QUEUE)
        await asyncio.sleep(0.1)
        await rig.publish(
            *alone("x", mediationTarget=OTHER), queue=FREE_QUEUE
        )  # P's worker, until second 4.7
        for n in range(2, 8):  # Q uses the place all the time
            await rig.publish(*alone(f"q{n}", poolCode="Q"), queue=FREE_QUEUE)
        await asyncio.sleep(3)
        assert rig.pool().parked == 1  # `p` was called, and waits for a worker
        await rig.publish(*alone("p3", messageGroupId="p"), queue=FREE_QUEUE)
        await asyncio.sleep(1.6)
        assert rig.pool().parked == 2  # a worker came, but the place was taken
        assert rig.pool().lines[ORIGIN].messages == 3
        await until_delivered(rig, 11)

        order = [id_ for id_ in sender.ids if id_.startswith("p")]
        assert order == ["p", "p2", "p3"]
        assert nothing_is_left(rig)


@pytest.mark.rule("POOL-6", "GATE-5")
async def test_a_worker_that_is_free_for_a_retry_pause_serves_one_parked_lane_not_two() -> None:
    sender = FakeSender(takes=1)
    sender.script("a", silence(8))
    sender.script("y", REFUSED)
    async with running(pool(concurrency=1), sender=sender) as rig:
        await rig.publish(*alone("a", "b", "c"), *alone("x", "y", mediationTarget=OTHER))
        await asyncio.sleep(2.5)
        assert rig.pool().parked == 2
        # `b` is called while `y` has the only worker, which `y` gives up between its two tries.
        Controls(rig.manager, rig.breakers).reset_breaker(ORIGIN)
        await asyncio.sleep(2)

        assert sender.most_open == 1
        assert sender.sent[:4] == [(0, "a"), (1, "x"), (2, "y"), (3, "b")]
        await asyncio.sleep(20)
        assert nothing_is_left(rig)


@pytest.mark.rule("GATE-5", "ROUTE-5", "ROUTE-6", "P3")
async def test_above_half_of_a_pool_one_target_finds_no_room_and_others_do() -> None:
    sender = BusySender(takes=1000, host_takes={"other.test": 0.1})
    async with running(pool(concurrency=2), sender=sender) as rig:
        limit_to_one(rig)
        await rig.publish(*alone(*numbered(60)))
        await asyncio.sleep(1)
        assert rig.pool().most_parked == 25
        assert (rig.pool().held, rig.pool().parked) == (26, 25)
        # A group with both targets: its second message must not pass the first.
        await rig.publish(*grouped("f"), *grouped("s", mediationTarget=OTHER))
        await rig.publish(*alone(*numbered(5, "x"), mediationTarget=OTHER))
        await asyncio.sleep(15)

        assert set(numbered(5, "x")) <= set(sender.ids)
        assert "s" not in sender.ids
        assert Code.QUEUE_FULL in rig.codes


@pytest.mark.rule("GATE-5", "POOL-3")
async def test_a_high_priority_message_of_a_parked_group_goes_to_its_own_target() -> None:
    sender = BusySender(takes=10, host_takes={"other.test": 1.0})
    async with running(pool(concurrency=3), sender=sender) as rig:
        limit_to_one(rig)
        await rig.publish(*alone("a"), *grouped("c", "d"))
        await asyncio.sleep(0.5)
        assert rig.pool().parked == 1
        await rig.publish(*grouped("high", mediationTarget=OTHER, highPriority=True))
        await rig.publish(*grouped("higher", highPriority=True), *grouped("e"))
        await asyncio.sleep(0.1)
        assert sender.sent == [(0, "a"), (0.5, "high")]
        await until_delivered(rig, 6)

        assert sender.ids == ["a", "high", "higher", "c", "d", "e"]
        assert nothing_is_left(rig)


class TestSecondRequests:
    @pytest.mark.rule("GATE-4", "MED-2")
    async def test_under_overload_a_fifth_of_the_deliveries_is_tried_again(self) -> None:
        sender = FakeSender(takes=0.1)
        for each in numbered(100):
            sender.script(each, *[Reply(500)] * 3)
        async with running(pool(concurrency=100), sender=sender) as rig:
            await rig.publish(*alone(*numbered(100)))
            await asyncio.sleep(8)

            assert len(sender.sent) == 100 + 3 + 20 + 0.2 * 20 + 1
            assert len(rig.witness.nacks) == 100

    @pytest.mark.rule("GATE-4", "MED-2")
    async def test_a_blip_is_tried_again_at_once(self) -> None:
        sender = FakeSender(takes=1)
        for each in ("a", "b", "c"):
            sender.script(each, REFUSED, REFUSED)
        async with running(pool(), sender=sender) as rig:
            await rig.publish(*alone("a", "b", "c"))
            await asyncio.sleep(10)

            # Three, and a fifth of the requests: all second tries, and two third ones.
            assert [at for at, _ in sender.sent] == [0, 0, 0, 2, 2, 2, 5, 5]

    @pytest.mark.rule("GATE-5", "MED-2")
    async def test_they_wait_for_a_place_ahead_of_parked_lanes(self) -> None:
        sender = FakeSender(takes=3)
        sender.script("a", BUSY)
        async with running(pool(concurrency=2), sender=sender) as rig:
            limit_to_one(rig)
            await rig.publish(*alone("a", "b", "c"))
            await asyncio.sleep(5)  # `b` has the place since second 3
            place = await lookup(rig).explain_message("a")
            waits = waiting(rig.pool())
            await until_delivered(rig, 3)

            assert place.situation is Situation.WAITING_FOR_TARGET
            assert waits == {WaitReason.TARGET: 2}
            assert sender.sent == [(0, "a"), (3, "b"), (6, "a"), (9, "c")]
            assert nothing_is_left(rig)

    @pytest.mark.rule("GATE-5", "OPS-4")
    async def test_one_that_waits_for_a_place_goes_back_when_the_router_stops(self) -> None:
        sender = FakeSender(takes=5)
        sender.script("a", BUSY)
        async with running(pool(concurrency=2), sender=sender) as rig:
            limit_to_one(rig)
            await rig.publish(*alone("a", "b", "c"))
            await asyncio.sleep(8)
            p = rig.pool()
            assert [job.message.id for job in p.runner.at_gate] == ["a"]
            rig.manager.stop()
            await asyncio.sleep(1)

            assert sorted(id_ for _, id_, _ in rig.witness.nacks) == ["a", "c"]
            assert p.runner.at_gate == {}
            assert target(rig).open == 1
            await asyncio.sleep(5)
            assert target(rig).open == 0
            assert not target(rig).returning

    @pytest.mark.rule("GATE-1", "MED-2")
    async def test_a_silence_between_two_tries_ends_the_message_by_its_last_error(self) -> None:
        sender = FakeSender(takes_for={"a": 1.0, "b": 1.5})
        sender.script("a", REFUSED)
        sender.script("b", silence(60))
        async with running(pool(), sender=sender) as rig:
            await rig.publish(*alone("a", "b"))
            await asyncio.sleep(5)

            assert [id_ for _, id_ in sender.sent] == ["a", "b"]
            assert rig.witness.nacks == [(1.5, "b", 60), (2, "a", 30)]


class TestSlowStart:
    @pytest.mark.rule("GATE-3")
    async def test_when_a_circuit_closes_requests_come_three_at_a_time_and_then_more(self) -> None:
        sender = FakeSender(takes=1)
        for each in numbered(20):
            sender.script(each, REFUSED)
        async with running(pool(concurrency=50), sender=sender) as rig:
            await rig.publish(*alone(*numbered(20)))
            await asyncio.sleep(4)
            assert target(rig).breaker.state is BreakerState.OPEN
            await asyncio.sleep(10)
            await rig.publish(*alone(*numbered(3, "probe")))  # they close it
            await asyncio.sleep(1.5)
            assert target(rig).breaker.state is BreakerState.CLOSED
            assert target(rig).limit == SLOW_START
            began = len(sender.sent)
            await rig.publish(*alone(*numbered(40, "x")))
            await asyncio.sleep(3)

            starts = [round(at, 1) for at, _ in sender.sent[began:]]
            rounds = [starts.count(at) for at in sorted(set(starts))]
            assert rounds[:3] == [3, 6, 7]  # twice as many, up to half of before; then one more

    @pytest.mark.rule("GATE-2", "MED-4")
    async def test_with_one_breaker_for_all_each_origin_has_its_own_gate(self) -> None:
        sender = BusySender(takes=10, most={"target.test": 1})
        async with running(pool(concurrency=10), sender=sender, one_breaker=True) as rig:
            await rig.publish(*alone(*numbered(4)))
            await rig.publish(*alone(*numbered(4, "x"), mediationTarget=OTHER))
            await asyncio.sleep(5)

            other = target(rig, "http://other.test:80")
            assert target(rig).breaker is other.breaker
            assert target(rig).limit < math.inf == other.limit
            assert sender.inside["other.test"] == 4
            Controls(rig.manager, rig.breakers).reset_breaker("http-mediator")
            assert target(rig).limit == math.inf


@pytest.mark.rule("GATE-3", "MED-4")
async def test_a_slow_start_of_one_breaker_for_all_is_that_of_every_origin_in_use() -> None:
    breakers = Breakers(lambda _: None, one_for_all=True)
    targets = Targets(breakers)
    used, unused = targets.of("http://a:80"), targets.of("http://b:80")
    used.open = 10
    for _ in range(10):
        used.breaker.report(used.breaker.enter(0.0) or 0, 0.0, ok=False)
    used.breaker.reset(0.0)

    assert (used.limit, unused.limit) == (SLOW_START, math.inf)


@pytest.mark.rule("GATE-2")
async def test_an_operator_who_resets_a_circuit_resets_the_gate_too() -> None:
    sender = BusySender(takes=100, most={"target.test": 2})
    async with running(pool(concurrency=10), sender=sender) as rig:
        await rig.publish(*alone(*numbered(5)))
        await asyncio.sleep(1)
        await rig.publish(*alone(*numbered(4, "x")))
        await asyncio.sleep(0.1)
        parked = rig.pool().parked
        sender.most.clear()
        Controls(rig.manager, rig.breakers).reset_breaker(ORIGIN)
        await asyncio.sleep(0)

        assert parked > 0
        assert rig.pool().parked == 0
        assert target(rig).limit == math.inf
        Controls(rig.manager, rig.breakers).reset_breakers()


@pytest.mark.rule("GATE-2")
async def test_a_limit_is_forgotten_after_ten_minutes_without_a_refusal() -> None:
    sender = BusySender(takes=1, most={"target.test": 1})
    async with running(pool(concurrency=5), sender=sender) as rig:
        await rig.publish(*alone("a", "b"))
        await asyncio.sleep(100)
        limited = target(rig).limit
        sender.most.clear()
        await asyncio.sleep(600)
        await rig.publish(*alone("c"))
        await asyncio.sleep(2)

        assert limited < 5
        assert target(rig).limit == math.inf
        assert not target(rig).is_gated


class TestEnds:
    """Whatever ends a pool or a message ends what is parked, too."""

    @pytest.mark.rule("GATE-5", "CFG-6")
    async def test_a_removed_pool_returns_its_parked_lanes_and_may_come_back(self) -> None:
        sender = FakeSender(takes=10)
        async with running(pool(concurrency=5), sender=sender) as rig:
            limit_to_one(rig)
            await rig.publish(*alone("a", "b"), *grouped("e", "f"))
            await asyncio.sleep(0.1)
            assert rig.pool().parked == 2
            p = rig.pool()
            await rig.apply()
            await asyncio.sleep(0.1)
            assert p.parked == 0
            assert p.lines[ORIGIN] not in target(rig).waiting
            await rig.apply(pool(concurrency=5))
            await until_delivered(rig, 4)

            assert [id_ for id_ in sender.ids if id_ in "ef"] == ["e", "f"]
            assert nothing_is_left(rig)

    @pytest.mark.rule("GATE-5", "OPS-4")
    async def test_a_stopped_router_returns_what_is_parked_at_once(self) -> None:
        sender = FakeSender(takes=10)
        async with running(pool(concurrency=5), sender=sender) as rig:
            limit_to_one(rig)
            await rig.publish(*alone("a"))
            await rig.publish(*alone(*numbered(5, "x")))
            await asyncio.sleep(0.1)
            began = now()
            await shut_down(rig.manager, grace=60)

            assert rig.is_empty
            assert [at for at, id_, _ in rig.witness.nacks if id_[0] == "x"] == [began] * 5

    @pytest.mark.rule("GATE-5", "OPS-4")
    async def test_an_aborted_request_gives_its_place_to_another_pool(self) -> None:
        sender = FakeSender(takes=1000)
        async with running(pool("P", 1), pool("Q", 5), sender=sender) as rig:
            limit_to_one(rig)
            await rig.publish(*alone("a"))
            await asyncio.sleep(0.1)
            await rig.publish(*alone("c", "d", poolCode="Q"))
            await asyncio.sleep(0.1)
            assert rig.pool("Q").parked == 2
            p = rig.pool()
            await rig.apply(pool("Q", 5))
            p.runner.abort()
            await asyncio.sleep(3)

            assert len(rig.pool("Q").runner.requests) == 1

    @pytest.mark.rule("GATE-5", "BRK-5")
    @pytest.mark.parametrize("mode", [None, "IMMEDIATE"])
    async def test_what_is_parked_for_longer_than_its_broker_allows_goes_back(
        self, mode: str | None
    ) -> None:
        queue = ScriptedQueue(traits=Traits(hold_seconds=20.0))
        sender = FakeSender(takes=100)
        async with running(pool(concurrency=5), sender=sender, brokers=Scripted(q=queue)) as rig:
            limit_to_one(rig)
            bodies = [*alone("a"), *grouped("c", "d", "e", dispatchMode=mode)]
            for n, each in enumerate(bodies):
                queue.hand_over(handed(each, n, str(n)))
                await asyncio.sleep(5)
            assert rig.pool().parked == (1 if mode is None else 3)
            await asyncio.sleep(6)
            back = rig.pool().take_overdue(now())  # of second 5 and of second 0, which is open

            line = rig.pool().lines[ORIGIN]
            left = (rig.pool().parked, line.messages, rig.pool().held)
            assert [job.message.id for job in back] == (["c", "d", "e"] if mode is None else ["c"])
            assert left == ((0, 0, 4) if mode is None else (2, 2, 4))
            for job in back:
                job.settler.forfeit(job)

    @pytest.mark.rule("GATE-5", "BRK-5")
    async def test_of_a_parked_lane_only_what_is_overdue_goes_back(self) -> None:
        queue = ScriptedQueue(traits=Traits(hold_seconds=20.0))
        async with running(
            pool(concurrency=5), sender=FakeSender(takes=100), brokers=Scripted(q=queue)
        ) as rig:
            limit_to_one(rig)
            for n, each in enumerate([*alone("a"), *grouped("c", "d")]):
                queue.hand_over(handed(each, n, str(n)))
            await asyncio.sleep(1)
            (_, last) = next(iter(rig.pool().parked_lanes()))
            last.hold_until = now()
            (back,) = rig.pool().take_overdue(now())

            line = rig.pool().lines[ORIGIN]
            assert back is last
            assert (rig.pool().parked, line.messages) == (1, 1)
            back.settler.forfeit(back)

    @pytest.mark.rule("GATE-5", "BRK-5")
    async def test_a_called_lane_that_goes_back_overdue_lets_the_next_one_have_its_turn(
        self,
    ) -> None:
        queue = ScriptedQueue(traits=Traits(hold_seconds=10.0))
        sender = BusySender(takes=2, host_takes={"other.test": 1000.0})
        async with running(pool(concurrency=1), sender=sender, brokers=Scripted(q=queue)) as rig:
            limit_to_one(rig)
            target(rig).open += 1  # of another pool
            for n, each in enumerate(alone("b", "c")):
                queue.hand_over(handed(each, n, str(n)))
            await asyncio.sleep(1)
            assert rig.pool().parked == 2
            queue.hand_over(handed(alone("x", mediationTarget=OTHER)[0], 2, "2"))
            await asyncio.sleep(1)
            target(rig).leave()
            assert rig.pool().parked == 1  # `b` was called, and waits for the worker of `x`
            (lane, *_) = rig.pool().lanes.ready
            lane.head.hold_until = now()
            (back,) = rig.pool().take_overdue(now())

            assert back.message.id == "b"
            assert rig.pool().parked == 0  # `c` was called in its place
            back.settler.forfeit(back)

    @pytest.mark.rule("GATE-5", "BRK-5")
    async def test_a_parked_message_that_lost_its_lease_is_not_sent(self) -> None:
        queue = ScriptedQueue(lease_seconds=30)
        sender = FakeSender(takes=60)
        async with running(pool(concurrency=5), sender=sender, brokers=Scripted(q=queue)) as rig:
            limit_to_one(rig)
            for n, each in enumerate(alone("a", "c")):
                queue.hand_over(handed(each, n, str(n), lease=30))
            await asyncio.sleep(0.1)
            (job,) = [job for lane in rig.pool().parked_lanes() for job in lane]
            job.lease_until = now()
            await asyncio.sleep(200)

            assert "c" not in sender.ids
            assert ended(rig)[Fate.FORFEITED] == 1
            assert nothing_is_left(rig)

    @pytest.mark.rule("GATE-5", "POOL-5")
    async def test_a_bug_gives_the_place_back(self) -> None:
        sender = FakeSender(takes=1)
        sender.script("a", ValueError("a bug"))
        async with running(pool(concurrency=5), sender=sender) as rig:
            limit_to_one(rig)
            await rig.publish(*alone("a", "b"))
            await until_delivered(rig, 2)

            assert sender.sent[:2] == [(0, "a"), (1, "b")]
            assert nothing_is_left(rig)


class TestOperators:
    @pytest.mark.rule("OPS-3", "GATE-5")
    async def test_a_pool_whose_messages_wait_for_their_target_is_not_stuck(self) -> None:
        sender = FakeSender(takes=10_000)
        async with running(pool("P", 5), pool("Q", 5), sender=sender) as rig:
            reader, chores = RigReader(rig), Chores(rig.manager, rig.breakers, rig.alerts)
            limit_to_one(rig)
            await rig.publish(*alone("a"))
            await asyncio.sleep(0.5)
            await rig.publish(*alone(*numbered(60, "q"), poolCode="Q"))
            await asyncio.sleep(0.5)
            assert not rig.pool("Q").runner.requests
            for _ in range(20):
                await asyncio.sleep(30)
                await chores.restart_silent_consumers()
                await chores.measure_queues()
                await chores.look_for_leaks()
                assert assess(reader.state()).healthy

            assert Code.CONSUMER_RESTART not in rig.codes
            assert Code.PIPELINE_MAP_LEAK not in rig.codes
            (of_q,) = [each for each in reader.state().pools if each.code == "Q"]
            assert of_q.waits_for_target
            assert not of_q.is_stuck(uptime=600.0)

    @pytest.mark.rule("OPS-3", "GATE-1")
    async def test_a_long_silence_stops_no_consumer(self) -> None:
        sender = FakeSender(takes=1)
        for each in numbered(10):
            sender.script(each, *[silence(900)] * 3)
        async with running(pool(concurrency=10), sender=sender) as rig:
            reader, chores = RigReader(rig), Chores(rig.manager, rig.breakers, rig.alerts)
            await rig.publish(*alone(*numbered(100)))
            for _ in range(20):
                await asyncio.sleep(30)
                await chores.restart_silent_consumers()
                await chores.measure_queues()
                assert assess(reader.state()).healthy

            assert Code.CONSUMER_RESTART not in rig.codes
            assert len(sender.sent) == 10

    @pytest.mark.rule("GATE-5")
    async def test_explain_says_what_the_target_takes_and_how_many_are_before(self) -> None:
        sender = BusySender(takes=100, most={"target.test": 2})
        async with running(pool(concurrency=5), sender=sender) as rig:
            await rig.publish(*alone(*numbered(4)))
            await asyncio.sleep(0.5)
            await rig.publish(*alone("x", "y"), *grouped("z", "behind"))
            await rig.publish(body("alone", poolCode="P", dispatchMode="IMMEDIATE"))
            await asyncio.sleep(0.1)
            texts = {
                each: await lookup(rig).explain_message(each)
                for each in ("x", "y", "z", "behind", "alone")
            }

            found = {each: (why.situation, why.text) for each, why in texts.items()}
            waits = Situation.WAITING_FOR_TARGET
            before = "waiting for its target: it takes 2 at once:"
            assert found["x"] == (waits, f"{before} 0 lanes are before this one")
            assert found["y"] == (waits, f"{before} 1 lane is before this one")
            assert found["z"] == (waits, f"{before} 2 lanes are before this one")
            assert found["alone"] == (waits, f"{before} 3 lanes are before this one")
            assert found["behind"][0] is Situation.WAITING_FOR_GROUP

    @pytest.mark.rule("GATE-1")
    async def test_explain_says_until_when_a_target_is_silent(self) -> None:
        sender = FakeSender(takes=1)
        sender.script("a", silence(60))
        async with running(pool(concurrency=1), sender=sender) as rig:
            await rig.publish(*alone("a", "b"))
            await asyncio.sleep(30)
            returned = await lookup(rig).explain_message("b")
            of_target = lookup(rig).explain_target("http://target.test/x")
            await asyncio.sleep(28)
            await rig.publish(*alone("c"))
            await asyncio.sleep(1)
            parked = await lookup(rig).explain_message("c")

            found = {each.situation for each in (returned, of_target, parked)}
            assert found == {Situation.WAITING_FOR_TARGET}
            assert {each.until for each in (returned, of_target, parked)} == {63.5}
            assert "it asked for silence until 1970-01-01T00:01:03Z" in parked.text
            assert "it asked for silence until 1970-01-01T00:01:03Z" in of_target.text


class TestMemory:
    @pytest.mark.rule("P4", "MED-4")
    async def test_the_latest_ten_thousand_are_kept_and_those_in_use(self) -> None:
        targets = Targets(Breakers(lambda _: None))
        for n in range(MAX_TARGETS):
            targets.of(f"http://{n}:80")
        targets.of("http://0:80")
        targets.of("http://1:80").open = 1
        busy = targets.find("http://1:80")
        assert busy is not None
        targets._by_origin.move_to_end("http://1:80", last=False)
        new = targets.of("http://new:80")

        assert len(targets) == MAX_TARGETS
        assert targets.find("http://2:80") is None
        assert targets.find("http://0:80") is not None
        assert targets.find("http://1:80") is busy
        assert {each.origin for each in targets} == {b.name for b in targets.breakers.all()}
        assert targets.find(new.origin) is new

    @pytest.mark.rule("P4")
    async def test_if_all_are_in_use_one_more_is_kept(self) -> None:
        targets = Targets(Breakers(lambda _: None))
        for n in range(MAX_TARGETS):
            targets.of(f"http://{n}:80").open = 1
        targets.of("http://new:80")

        assert len(targets) == MAX_TARGETS + 1

    @pytest.mark.rule("P4", "MED-4")
    async def test_those_idle_for_an_hour_are_dropped(self) -> None:
        targets = Targets(Breakers(lambda _: None))
        for name, used_at in (("http://old:80", 0.0), ("http://new:80", 10.0)):
            targets.of(name).breaker.enter(used_at)
        targets.of("http://busy:80").open = 1
        targets.drop_idle(now=3600.0)
        left = [each.origin for each in targets]
        targets.drop_idle(now=3610.0)

        assert left == ["http://new:80", "http://busy:80"]
        assert [each.origin for each in targets] == ["http://busy:80"]
        assert [each.name for each in targets.breakers.all()] == ["http://busy:80"]

    @pytest.mark.rule("P4")
    async def test_a_pool_forgets_targets_that_it_does_not_use(self) -> None:
        async with running(pool(concurrency=5), sender=FakeSender(takes=1000)) as rig:
            limit_to_one(rig)
            await rig.publish(*alone("a", "b"))
            await rig.publish(*alone("x", mediationTarget=OTHER))
            await asyncio.sleep(0.5)
            for _ in range(MAX_UNUSED_LOOKS + 1):
                rig.manager.forget_finished(now())

            assert list(rig.pool().lines) == [ORIGIN]  # where one is parked

    @pytest.mark.rule("P4")
    async def test_a_pool_remembers_a_thousand_targets_and_those_with_parked_lanes(self) -> None:
        sender = BusySender(takes=0.0, host_takes={"target.test": 1000.0})
        async with running(pool(concurrency=5), sender=sender) as rig:
            limit_to_one(rig)
            await rig.publish(*alone("a", "b"))
            await asyncio.sleep(0.5)
            for n in range(MAX_LINES + 50):
                await rig.publish(*alone(f"x{n}", mediationTarget=f"http://host{n}/"))
                await asyncio.sleep(0.01)

            assert len(rig.pool().lines) <= MAX_LINES
            assert rig.pool().lines[ORIGIN].parked

    @pytest.mark.rule("GATE-2", "CMD-8")
    async def test_what_runs_on_this_machine_has_no_gate_and_no_budget(self) -> None:
        targets = Targets(Breakers(lambda _: None))
        local = targets.of("process:x")

        assert all(local.may_retry(0.0) for _ in range(100))
        assert targets.breakers.all() == []


def lookup(rig: Rig) -> MessageLookup:
    """On the loop's clock, so that tests can name exact times."""
    return MessageLookup(rig.manager, rig.breakers, rig.letters, wall=now)


@pytest.mark.rule("GATE-2")
@pytest.mark.parametrize(
    ("answer", "is_refusal"),
    [
        (Reply(429), True),
        (Reply(502), True),
        (Reply(503), True),
        (Reply(504), True),
        (TIMED_OUT, True),
        (Reply(500), False),
        (Reply(501), False),
        (Reply(404), False),
        (REFUSED, False),
        (OK, False),
    ],
)
async def test_which_answers_are_refusals(answer: Answer, *, is_refusal: bool) -> None:
    sender = FakeSender(takes=1)
    sender.script("a", answer)
    async with running(pool(), sender=sender) as rig:
        await rig.publish(*alone("a"))
        await asyncio.sleep(1.5)

        assert target(rig).refusals == is_refusal
        assert (target(rig).limit < math.inf) is is_refusal


def test_a_silence_that_is_waited_for_here_is_short() -> None:
    assert MAX_WAIT_SECONDS == 10.0


@pytest.mark.rule("GATE-5")
async def test_an_empty_line_stops_no_other_line() -> None:
    woken: list[Line] = []
    origin = Targets(Breakers(on_change=lambda _: None)).of(ORIGIN)
    left, other = (Line(origin, Flow(Lanes()), woken.append, OrderedDict()) for _ in range(2))
    other.parked[Lane("g")] = None
    for line in (left, other):
        origin.wait(line)

    origin.wake()

    assert woken == [other]
    assert not origin.waiting


class TestWhatOperatorsSee:
    """Targets as `GET /monitoring/targets` has them, and their reset."""

    @pytest.mark.rule("GATE-2", "OPS-3")
    async def test_a_target_at_its_limit_is_told_with_what_waits_for_it(self) -> None:
        sender = BusySender(takes=100, most={"target.test": 2})
        async with running(pool(concurrency=10), sender=sender) as rig:
            reader = RigReader(rig)
            await rig.publish(*alone(*numbered(3)))
            await asyncio.sleep(1)
            await rig.publish(*alone(*numbered(4, "x")))
            await asyncio.sleep(0.1)

            (told,) = reader.state().targets
            refusals = reader.state().refusals

            assert (told.origin, told.open, told.limit) == (ORIGIN, 2, 2)
            assert told.refusals == target(rig).refusals > 0
            assert refusals == {(ORIGIN,): told.refusals}
            assert told.waiting == 4
            assert told.silent_until is None
            assert told.circuit.state == "CLOSED"

    @pytest.mark.rule("GATE-1", "OPS-3")
    async def test_a_silent_target_is_told_with_the_end_of_its_silence(self) -> None:
        sender = FakeSender()
        sender.script("m0", silence(30))
        async with running(pool(), sender=sender) as rig:
            reader = RigReader(rig, wall=lambda: 1_000.0 + now())
            await rig.publish(*alone("m0"))
            await asyncio.sleep(2)
            (silent,) = reader.state().targets
            await asyncio.sleep(40)
            (heard,) = reader.state().targets

            ends = target(rig).gate.closed_until
            assert silent.silent_until == 1_000.0 + ends
            assert silent.silent_seconds == pytest.approx(ends - 2)
            assert (heard.silent_until, heard.silent_seconds) == (None, None)

    @pytest.mark.rule("MED-4", "OPS-3")
    async def test_an_open_circuit_is_told_with_its_times(self) -> None:
        async with running() as rig:
            reader = RigReader(rig, wall=lambda: 1_000.0 + now())
            breaker = target(rig).breaker
            for at in range(10):
                breaker.report(breaker.enter(at) or 0, at, ok=False)

            (told,) = reader.state().targets

            assert told.circuit.state == "OPEN"
            assert (told.circuit.since, told.circuit.retry_at) == (1_009.0, 1_014.0)

    @pytest.mark.rule("OPS-3", "P4")
    async def test_of_many_targets_those_in_trouble_and_the_latest_are_told(self) -> None:
        async with running() as rig:
            reader = RigReader(rig)
            target(rig, "http://open:80").breaker._opened(0.0)
            target(rig, "http://silent:80").learn(silence(60), 0.0, lambda: 0.0, lambda low, _: low)
            limit_to_one(rig, "http://limited:80")
            target(rig, "process:local")
            for n in range(MAX_SHOWN_TARGETS):
                target(rig, f"http://{n}:80")

            state = reader.state()
            told = [each.origin for each in state.targets]

            assert told[:3] == ["http://open:80", "http://silent:80", "http://limited:80"]
            assert told[3:] == [f"http://{n}:80" for n in reversed(range(3, MAX_SHOWN_TARGETS))]
            assert state.target_count == MAX_SHOWN_TARGETS + 3

    @pytest.mark.rule("GATE-2", "MED-4")
    async def test_a_target_that_is_reset_gets_all_its_messages_at_once(self) -> None:
        sender = BusySender(takes=100, most={"target.test": 2})
        async with running(pool(concurrency=10), sender=sender) as rig:
            await rig.publish(*alone(*numbered(3)))
            await asyncio.sleep(1)
            await rig.publish(*alone(*numbered(4, "x")))
            await asyncio.sleep(0.1)
            target(rig, "process:local")
            sender.most.clear()
            controls = Controls(rig.manager, rig.breakers)

            for unknown in ("http://unknown.test:80", "process:local"):
                with pytest.raises(Unknown, match="no such target"):
                    controls.reset_target(unknown)
            limited = target(rig).limit
            controls.reset_target(ORIGIN)
            await asyncio.sleep(0.1)

            assert limited < target(rig).limit == math.inf
            assert target(rig).open == 6

    @pytest.mark.rule("GATE-2", "MED-4")
    async def test_all_targets_are_reset_at_once(self) -> None:
        async with running() as rig:
            limit_to_one(rig)
            limit_to_one(rig, "http://other.test:80")
            target(rig, "process:local")

            assert Controls(rig.manager, rig.breakers).reset_targets() == 2
            assert {each.limit for each in rig.manager.deps.targets} == {math.inf}
