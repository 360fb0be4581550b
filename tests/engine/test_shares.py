"""The workers of a pool, shared between targets or tenants (SHARE-1)."""

import asyncio
from collections import Counter
from typing import Any

import pytest
from msgspec.structs import replace

from router.core.config import MAX_BATCH_MESSAGES, FairShare
from router.core.explain import Situation
from router.core.history import Fate, WaitReason
from router.core.outcome import Cause, NoReply, Reply
from router.core.state import assess
from router.core.warnings import Code
from router.engine.chores import Chores
from router.engine.lanes import Flow
from router.engine.pool import MAX_FLOWS, MAX_UNUSED_LOOKS, ProcessPool, waits_in
from router.engine.state import MessageLookup
from router.ports import Traits
from tests.engine.test_gates import limit_to_one
from tests.support.fakes import BusySender, FakeSender
from tests.support.faults import Scripted, ScriptedQueue, handed
from tests.support.rig import QUEUE, Rig, body, ended, grouped, pool, running
from tests.support.states import RigReader
from tests.support.virtual_time import now

pytestmark = pytest.mark.anyio

SLOW, FAST = "http://slow.test/", "http://fast.test/"


def to(target: str, *ids: str, **fields: Any) -> list[bytes]:
    """Messages of as many groups for the pool P."""
    own = {"poolCode": "P", "mediationTarget": target}
    return [body(each, **{**own, "messageGroupId": each, **fields}) for each in ids]


def numbered(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{n}" for n in range(count)]


def waiting(pool_: ProcessPool) -> dict[WaitReason, int]:
    return {reason: number for reason, number in waits_in(pool_).items() if number}


def sent_at(rig: Rig, ids: list[str]) -> list[float]:
    return [at for at, each in rig.sender.sent if each in set(ids)]


def hosts(pool_: ProcessPool) -> Counter[str]:
    """The open requests by target."""
    return Counter(job.message.target for job in pool_.runner.requests)


def nothing_is_left(rig: Rig) -> bool:
    p = rig.pool()
    flows = [flow.open for flow in p.flows.values()]
    return (p.held, p.lanes.waiting, p.permits.out) == (0, 0, 0) and (
        not p.is_shared or set(flows) <= {0}
    )


@pytest.mark.rule("SHARE-1", "P5")
async def test_a_slow_target_does_not_starve_a_fast_one() -> None:
    sender = BusySender(takes=0.1, host_takes={"slow.test": 30.0})
    async with running(pool(concurrency=20), sender=sender) as rig:
        for n in range(0, 2_000, 50):  # as they come from a broker: in batches
            await rig.publish(*to(SLOW, *(f"a{k}" for k in range(n, n + 50))))
            await rig.publish(*to(FAST, *(f"b{k}" for k in range(n, n + 50))))
        await asyncio.sleep(60)
        fast = [at for at, id_ in sender.sent if id_[0] == "b"]
        slow = [at for at, id_ in sender.sent if id_[0] == "a"]

        assert len(fast) == 2_000
        assert len(slow) >= 20  # the slow one keeps its share


@pytest.mark.rule("SHARE-1")
async def test_while_others_wait_a_target_has_its_share_and_alone_it_has_all() -> None:
    sender = BusySender(takes=10)
    async with running(pool(concurrency=10), sender=sender) as rig:
        await rig.publish(*to(SLOW, *numbered("a", 30)), *to(FAST, *numbered("b", 8)))
        await asyncio.sleep(1)
        assert hosts(rig.pool()) == {SLOW: 10}  # they came first, and nothing is taken away
        await asyncio.sleep(10)
        assert hosts(rig.pool()) == {SLOW: 5, FAST: 5}
        await asyncio.sleep(10)
        assert hosts(rig.pool()) == {SLOW: 7, FAST: 3}  # the last ones of the other target
        await asyncio.sleep(10)
        assert hosts(rig.pool()) == {SLOW: 8}  # all that are left
        await asyncio.sleep(20)
        assert ended(rig)[Fate.DELIVERED] == 38
        assert nothing_is_left(rig)


@pytest.mark.rule("SHARE-1")
async def test_who_used_the_workers_for_less_goes_first() -> None:
    sender = BusySender(host_takes={"slow.test": 10.0, "fast.test": 1.0, "new.test": 1.0})
    async with running(pool(concurrency=1), sender=sender) as rig:
        await rig.publish(*to(SLOW, "a0", "a1"), *to(FAST, "b0", "b1"))
        await rig.publish(*to("http://new.test/", "c0"))
        await asyncio.sleep(30)

        # All have no worker when one is free: what counts is for how long they were busy.
        assert sender.ids == ["a0", "b0", "c0", "b1", "a1"]


@pytest.mark.rule("SHARE-1", "POOL-3", "P3")
async def test_groups_keep_their_order_and_high_priority_goes_first() -> None:
    sender = BusySender(takes=1)
    async with running(pool(concurrency=2), sender=sender) as rig:
        await rig.publish(*to(SLOW, *numbered("a", 4)))
        await rig.publish(*grouped("g1", "g2", "g3", mediationTarget=FAST))
        await rig.publish(*grouped("high", mediationTarget=SLOW, highPriority=True))
        await asyncio.sleep(20)

        order = [id_ for id_ in sender.ids if not id_.startswith("a")]
        assert order == ["high", "g1", "g2", "g3"]
        assert sender.most_in_group == 1
        assert nothing_is_left(rig)


@pytest.mark.rule("SHARE-1")
@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (FairShare.TENANT, {"red": 2, "blue": 2}),
        (FairShare.TARGET, {"red": 4}),
        (FairShare.NONE, {"red": 4}),
    ],
)
async def test_tenants_share_a_pool_if_it_says_so(
    share: FairShare, expected: dict[str, int]
) -> None:
    sender = BusySender(takes=10)
    async with running(pool(concurrency=4, fair_share=share), sender=sender) as rig:
        for tenant, number in (("red", 12), ("blue", 4)):
            for n in range(number):
                group = f"{tenant}:{n}"
                await rig.publish(*to(FAST, f"{tenant}{n}", messageGroupId=group))
        await asyncio.sleep(15)

        open_ = Counter(job.group.partition(":")[0] for job in rig.pool().runner.requests)
        assert open_ == expected
        assert len(rig.pool().flows) == (2 if share is FairShare.TENANT else 1)


@pytest.mark.rule("SHARE-1")
async def test_messages_without_a_group_are_one_tenant() -> None:
    async with running(pool(fair_share=FairShare.TENANT)) as rig:
        await rig.publish(*[body(str(n), poolCode="P") for n in range(3)], *grouped("a"))
        await asyncio.sleep(10)

        assert set(rig.pool().flows) == {"", "g"}


@pytest.mark.rule("SHARE-1", "CFG-6")
async def test_a_change_takes_effect_at_once_and_loses_nothing() -> None:
    sender = BusySender(takes=10)
    async with running(pool(concurrency=4, fair_share=FairShare.NONE), sender=sender) as rig:
        await rig.publish(*to(SLOW, *numbered("a", 12)), *to(FAST, *numbered("b", 6)))
        await rig.publish(*grouped("g1", "g2", mediationTarget=FAST))
        await asyncio.sleep(5)
        await rig.apply(pool(concurrency=4))
        await asyncio.sleep(10)
        shared = hosts(rig.pool())
        await rig.apply(pool(concurrency=4, fair_share=FairShare.TENANT))
        await asyncio.sleep(200)

        assert shared == {SLOW: 2, FAST: 2}
        assert ended(rig)[Fate.DELIVERED] == 20
        assert nothing_is_left(rig)


@pytest.mark.rule("SHARE-1", "GATE-5", "CFG-6")
async def test_a_change_finds_parked_lanes() -> None:
    sender = BusySender(takes=10, most={"slow.test": 1})
    async with running(pool(concurrency=4), sender=sender) as rig:
        await rig.publish(*to(SLOW, *numbered("a", 4)))
        await asyncio.sleep(2)
        await rig.publish(*to(SLOW, *numbered("c", 4)))
        await asyncio.sleep(0.1)
        parked = rig.pool().parked
        await rig.apply(pool(concurrency=4, fair_share=FairShare.TENANT))
        await asyncio.sleep(600)

        assert parked > 0
        assert ended(rig)[Fate.DELIVERED] == 8
        assert nothing_is_left(rig)


@pytest.mark.rule("SHARE-1", "MED-2")
async def test_a_message_between_two_tries_has_no_worker() -> None:
    sender = BusySender(takes=1)
    sender.script("a0", Reply(500))
    async with running(pool(concurrency=2), sender=sender) as rig:
        await rig.publish(*to(SLOW, *numbered("a", 3)), *to(FAST, *numbered("b", 3)))
        await asyncio.sleep(30)

        assert ended(rig)[Fate.DELIVERED] == 6
        assert nothing_is_left(rig)


@pytest.mark.rule("SHARE-1")
async def test_who_is_about_to_go_on_is_counted_once_when_another_target_comes() -> None:
    queue, sender = ScriptedQueue(), FakeSender(takes=2)
    sender.script("a", NoReply(Cause.NETWORK, "cut off"))
    async with running(pool(concurrency=1), sender=sender, brokers=Scripted(q=queue)) as rig:
        queue.hand_over(*(handed(each, each, each.decode()) for each in to(SLOW, "a", "b")))
        await asyncio.sleep(3)
        await asyncio.sleep(1)  # behind b, which gives its worker back to a right now
        (other,) = to(FAST, "c")
        (connection,) = rig.manager.consumers["q"].connections
        rig.witness.ids["c"] = "c"
        admitted = rig.pool().permits.admitted
        rig.manager.registry.receive(1, connection.settler.counts, now())
        connection.settler.dispatch([handed(other, "c", "c")])
        await asyncio.sleep(1)
        workers = rig.pool().permits.out, sum(each.open for each in rig.pool().flows.values())
        await asyncio.sleep(10)

        assert (admitted, workers) == (1, (1, 1))
        assert [each for _, each in sender.sent] == ["a", "b", "a", "c"]
        assert nothing_is_left(rig)


@pytest.mark.rule("SHARE-1", "ROUTE-5")
async def test_while_others_are_there_a_flow_fills_half_of_the_places() -> None:
    sender = BusySender(takes=0.1, host_takes={"slow.test": 1000.0})
    async with running(pool(concurrency=2, take_ahead=10), sender=sender) as rig:
        await rig.publish(*to(FAST, "b"), *to(SLOW, *numbered("a", 60)))
        await asyncio.sleep(3)
        flow = rig.pool().flows["http://slow.test:80"]
        assert (len(flow.ready), flow.is_crowded) == (9, True)
        await rig.publish(*to(FAST, *numbered("b", 5)))
        await asyncio.sleep(3)
        assert rig.pool().lanes.waiting == 14
        assert Code.QUEUE_FULL in rig.codes
        for _ in range(MAX_UNUSED_LOOKS + 1):
            rig.pool().lines["http://slow.test:80"].unused = 0
            for lane in list(rig.pool().lanes.all_ready()):
                if lane.head.message.target == FAST:
                    rig.pool().lanes.remove(lane)
                    rig.pool().lanes.pop(lane.group)
                    lane.head.settler.forfeit(lane.head)
            rig.manager.forget_finished(now())

        # Alone again, it may have more than its half.
        assert not rig.pool().is_shared
        assert not flow.is_crowded
        await asyncio.sleep(400)
        assert rig.pool().lanes.waiting > 10


@pytest.mark.rule("SHARE-1", "ROUTE-5")
async def test_a_flow_that_had_its_half_is_fetched_again_as_it_goes_on() -> None:
    sender = BusySender(takes=1, host_takes={"fast.test": 5.0})
    async with running(pool(concurrency=2, take_ahead=10), sender=sender) as rig:
        await rig.publish(*to(FAST, *numbered("b", 8)), *to(SLOW, *numbered("a", 40)))
        await asyncio.sleep(200)

        assert ended(rig)[Fate.DELIVERED] == 48
        assert nothing_is_left(rig)


@pytest.mark.rule("SHARE-1", "ROUTE-5", "P4", "P5")
async def test_what_goes_back_for_want_of_a_share_is_bounded_and_holds_up_no_other_pool() -> None:
    sender = BusySender(takes=0.1, host_takes={"slow.test": 30.0})
    queue = replace(QUEUE, look_ahead=100)
    pools = pool(concurrency=20, take_ahead=None), pool("Q")
    async with running(*pools, sender=sender, queues=[queue]) as rig:
        await rig.publish(*to(FAST, "b0"), *to(SLOW, *numbered("a", 500)))
        flow, seen = rig.manager.consumers["q"].flow, []
        for n in range(1, 30):
            await asyncio.sleep(1)
            await rig.publish(*to(FAST, f"q{n}", poolCode="Q"))
            seen.append(len(flow.deferred))
        used_up, codes = flow.is_used_up, rig.codes
        waits = [at - n for n, at in enumerate(sent_at(rig, numbered("q", 30)[1:]), 1)]
        sender.host_takes = {}
        await asyncio.sleep(200)

        assert max(seen) <= 100 + 2 * MAX_BATCH_MESSAGES
        assert used_up
        assert Code.LOOK_AHEAD in codes
        assert "Give the slow target a pool of its own" in str(rig.warnings)
        assert max(waits) <= 0.1
        assert ended(rig)[Fate.DELIVERED] == 530
        assert not flow.is_used_up
        assert nothing_is_left(rig)


@pytest.mark.rule("SHARE-1", "ROUTE-5", "P4")
async def test_what_goes_back_for_want_of_a_share_is_bounded_while_others_go_on() -> None:
    sender = BusySender(takes=0.05, host_takes={"slow.test": 300.0})
    pools = pool(concurrency=20, take_ahead=None), pool("Q")
    async with running(*pools, sender=sender, queues=[replace(QUEUE, look_ahead=100)]) as rig:
        await rig.publish(*to(FAST, "b0"), *to(SLOW, *numbered("a", 2_000)))
        flow, seen = rig.manager.consumers["q"].flow, []
        for n in range(100):
            await asyncio.sleep(0.1)
            await rig.publish(*to(FAST, f"q{n}", poolCode="Q"))
            seen.append(len(flow.deferred))

        assert 100 <= max(seen) <= 100 + MAX_BATCH_MESSAGES
        assert len(sent_at(rig, numbered("q", 99))) == 99


@pytest.mark.rule("SHARE-1", "ROUTE-5")
@pytest.mark.parametrize("defers", [False, True])
async def test_a_flow_whose_share_is_free_again_goes_on_although_the_look_ahead_is_used_up(
    defers: bool,
) -> None:
    sender = BusySender(takes=0.1, host_takes={"slow.test": 5.0})
    queue = ScriptedQueue(holds_groups=False, traits=Traits(defers=True), redelivers=True)
    brokers = Scripted(q=queue) if defers else None
    shared, entry = pool(concurrency=20, take_ahead=None), replace(QUEUE, look_ahead=100)
    async with running(shared, sender=sender, brokers=brokers, queues=[entry]) as rig:
        messages = [*to(FAST, "b0"), *to(SLOW, *numbered("a", 2_000))]
        if defers:
            queue.hand_over(*(handed(each, each, each.decode()) for each in messages))
        else:
            await rig.publish(*messages)
        await asyncio.sleep(2)
        is_used_up = rig.manager.consumers["q"].flow.is_used_up
        await asyncio.sleep(197.9)

        assert is_used_up
        assert len(rig.sender.ids) >= 20 * 200 / 5


@pytest.mark.rule("SHARE-1", "ROUTE-5", "P4")
async def test_what_a_broker_defers_for_want_of_a_share_is_bounded_too() -> None:
    sender = BusySender(takes=0.1, host_takes={"slow.test": 30.0})
    queue = ScriptedQueue(holds_groups=False, traits=Traits(defers=True), redelivers=True)
    entry = replace(QUEUE, look_ahead=100)
    shared = pool(concurrency=20, take_ahead=None)
    async with running(shared, sender=sender, brokers=Scripted(q=queue), queues=[entry]) as rig:
        for each in (*to(FAST, "b0"), *to(SLOW, *numbered("a", 500)), *to(FAST, "b1")):
            queue.hand_over(handed(each, each, each.decode()))
        await asyncio.sleep(20)
        flow = rig.manager.consumers["q"].flow
        before = len(flow.deferred), flow.is_used_up
        sender.host_takes = {}
        await asyncio.sleep(200)

        assert before == (100, True)
        assert ended(rig)[Fate.DELIVERED] == 502
        assert (len(flow.deferred), flow.is_used_up) == (0, False)
        assert nothing_is_left(rig)


@pytest.mark.rule("SHARE-1", "P4")
async def test_a_thousand_targets_have_their_flows_and_the_others_share_one() -> None:
    sender = FakeSender(takes=0.0)
    async with running(pool(concurrency=5), sender=sender) as rig:
        p = rig.pool()
        for n in range(MAX_FLOWS + 20):
            await rig.publish(*to(f"http://host{n}/", str(n)))
            await asyncio.sleep(0.01)

        assert len(p.flows) == MAX_FLOWS + 1
        assert None in p.flows
        for _ in range(MAX_UNUSED_LOOKS + 1):
            rig.manager.forget_finished(now())
        assert len(p.flows) == 0
        assert not p.is_shared


@pytest.mark.rule("SHARE-1", "P4")
async def test_a_flow_is_kept_while_a_message_waits_behind_its_group() -> None:
    sender = BusySender(takes=1, host_takes={"slow.test": 100.0})
    async with running(pool(concurrency=5), sender=sender) as rig:
        first, second = grouped("a", mediationTarget=SLOW), grouped("b", mediationTarget=FAST)
        await rig.publish(*first, *second)
        await rig.publish(*to("http://gone.test/", "c"))
        await asyncio.sleep(10)
        for _ in range(MAX_UNUSED_LOOKS + 2):
            rig.manager.forget_finished(now())
        flows = set(rig.pool().flows)
        await asyncio.sleep(200)

        assert flows == {"http://slow.test:80", "http://fast.test:80"}
        assert ended(rig)[Fate.DELIVERED] == 3


@pytest.mark.rule("SHARE-1", "P4")
async def test_a_flow_is_kept_while_a_message_waits_between_two_tries() -> None:
    sender = BusySender(takes=1, host_takes={"slow.test": 200.0})
    sender.script("a", NoReply(Cause.NETWORK, "cut off"))
    alone = pool(concurrency=1, parallel_ungrouped=True)
    async with running(alone, sender=sender) as rig:
        await rig.publish(*to(FAST, "a", messageGroupId=None))
        await rig.publish(*to(SLOW, "b"))
        await asyncio.sleep(10)  # a waits for the worker, which b has
        for _ in range(MAX_UNUSED_LOOKS + 2):
            rig.manager.forget_finished(now())
        flows = set(rig.pool().flows)
        await rig.publish(*to(FAST, "c"), *to("http://other.test/", "d"))
        await asyncio.sleep(191.2)  # b has ended; a has its second try
        workers = rig.pool().permits.out, sum(each.open for each in rig.pool().flows.values())
        await asyncio.sleep(10)

        assert flows == {"http://slow.test:80", "http://fast.test:80"}
        assert workers == (1, 1)
        assert ended(rig)[Fate.DELIVERED] == 4


@pytest.mark.rule("SHARE-1", "CFG-6")
async def test_a_change_finds_messages_between_two_tries() -> None:
    sender = BusySender(takes=1, host_takes={"slow.test": 100.0})
    sender.script("a", NoReply(Cause.NETWORK, "cut off"))
    alone = pool(concurrency=1, parallel_ungrouped=True)
    async with running(alone, sender=sender) as rig:
        await rig.publish(*to(FAST, "a", messageGroupId=None))
        await rig.publish(*to(SLOW, "b"))
        await asyncio.sleep(10)
        (between,) = rig.pool().runner.between
        changed = pool(concurrency=1, parallel_ungrouped=True, fair_share=FairShare.TENANT)
        await rig.apply(changed)

        assert between.line.flow in rig.pool().flows.values()


@pytest.mark.rule("SHARE-1", "OPS-4", "CFG-6")
async def test_what_waits_for_its_share_goes_back_at_a_stop() -> None:
    sender = BusySender(takes=10)
    async with running(pool(concurrency=2), sender=sender) as rig:
        await rig.publish(*to(SLOW, *numbered("a", 4)), *to(FAST, *numbered("b", 4)))
        await asyncio.sleep(1)
        rig.manager.stop()
        await asyncio.sleep(0.1)

        assert len(rig.witness.nacks) == 6


@pytest.mark.rule("SHARE-1", "BRK-5")
async def test_what_waits_for_its_share_for_too_long_goes_back() -> None:
    queue = ScriptedQueue(traits=Traits(hold_seconds=20.0))
    sender = BusySender(takes=100)
    async with running(pool(concurrency=1), sender=sender, brokers=Scripted(q=queue)) as rig:
        for n, each in enumerate([*to(SLOW, "a", "b"), *to(FAST, "c", "d")]):
            queue.hand_over(handed(each, n, str(n)))
        await asyncio.sleep(30)
        back = rig.pool().take_overdue(now())

        assert sorted(job.message.id for job in back) == ["b", "c", "d"]
        assert rig.pool().lanes.waiting == 0
        for job in back:
            job.settler.forfeit(job)


@pytest.mark.rule("SHARE-1", "OPS-3")
async def test_a_pool_whose_messages_wait_for_their_share_is_not_stuck() -> None:
    sender = BusySender(takes=10_000)
    async with running(pool(concurrency=2), sender=sender) as rig:
        reader, chores = RigReader(rig), Chores(rig.manager, rig.breakers, rig.alerts)
        await rig.publish(*to(SLOW, *numbered("a", 4)), *to(FAST, *numbered("b", 4)))
        for _ in range(20):
            await asyncio.sleep(30)
            await chores.restart_silent_consumers()
            await chores.measure_queues()
            await chores.look_for_leaks()
            assert assess(reader.state()).healthy

        assert Code.CONSUMER_RESTART not in rig.codes
        assert Code.PIPELINE_MAP_LEAK not in rig.codes


@pytest.mark.rule("SHARE-1")
async def test_who_waits_for_a_share_is_told() -> None:
    sender = BusySender(takes=100)
    async with running(pool(concurrency=2), sender=sender) as rig:
        await rig.publish(*to(SLOW, *numbered("a", 4)), *to(FAST, "b"))
        await asyncio.sleep(1)
        lookup = MessageLookup(rig.manager, rig.breakers, rig.letters, wall=now)
        of_slow = await lookup.explain_message("a3")
        of_fast = await lookup.explain_message("b")

        # The slow target has both workers, and a share of one.
        assert waiting(rig.pool()) == {WaitReason.SHARE: 2, WaitReason.PERMIT: 1}
        assert of_slow.situation is Situation.WAITING_FOR_SHARE
        assert of_slow.text == (
            "waiting for its share of P: its target or tenant has 2 workers, and others wait; "
            "1 lane is before this one"
        )
        assert of_fast.situation is Situation.WAITING_FOR_PERMIT


@pytest.mark.rule("SHARE-1", "POOL-4")
async def test_a_rate_limit_is_shared_too() -> None:
    sender = BusySender(takes=0.5)
    config = pool(concurrency=4, rate_per_minute=60, burst=1)
    async with running(config, sender=sender) as rig:
        await rig.publish(*to(SLOW, *numbered("a", 6)), *to(FAST, *numbered("b", 3)))
        await asyncio.sleep(30)

        assert [at for at, _ in sender.sent] == pytest.approx(list(range(9)))
        assert {id_[0] for id_ in sender.ids[1:3]} == {"a", "b"}
        assert nothing_is_left(rig)


@pytest.mark.rule("SHARE-1", "GATE-5", "P5")
async def test_a_busy_target_that_fills_its_half_leaves_room_for_those_seen_lately() -> None:
    sender = BusySender(takes=0.1, host_takes={"slow.test": 1000.0})
    async with running(pool(concurrency=2), sender=sender) as rig:
        limit_to_one(rig, "http://slow.test:80")
        await rig.publish(*to(FAST, "b"), *to(SLOW, *numbered("a", 60)))
        await asyncio.sleep(5)
        assert rig.pool().lines["http://slow.test:80"].is_crowded
        assert rig.pool().has_room
        await rig.publish(*to(FAST, *numbered("b", 5)))
        await asyncio.sleep(2)

        assert set(numbered("b", 5)) <= set(sender.ids)


@pytest.mark.rule("SHARE-1")
async def test_a_flow_that_its_pool_has_forgotten_is_a_rival_like_others() -> None:
    sender = BusySender(takes=1)
    async with running(pool(concurrency=1), sender=sender) as rig:
        await rig.publish(*to(FAST, *numbered("b", 3)))
        await asyncio.sleep(0.5)
        p = rig.pool()
        lane = p.lanes.take()
        p._put(lane, Flow(p.lanes))
        assert p.is_shared
        await asyncio.sleep(10)

        assert ended(rig)[Fate.DELIVERED] == 3
        assert p.lanes.waiting == p.permits.out == 0
