"""A full pool holds up no other pool of its queue, whatever its broker can do (ROUTE-5)."""

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from types import FrameType

import pytest
from msgspec.structs import replace

from router.core.config import OnFailure, Ordering, QueueConfig
from router.core.flow import SEARCH_PAUSES_SECONDS
from router.core.history import Fate, State
from router.core.outcome import Cause, NoReply, Reply
from router.core.returning import (
    DEFAULT_DELAY_SECONDS,
    MAX_DEFERRAL_SECONDS,
    MAX_IDLE_DEFERRAL_SECONDS,
    MIN_DEFERRAL_SECONDS,
    RETURNS,
    ReturnReason,
)
from router.core.state import assess
from router.core.warnings import Code
from router.engine.breaker import OPEN_SECONDS
from router.engine.chores import Chores
from router.engine.deferred import DEFERRED_STEP_SECONDS, OVERDUE_SECONDS
from router.engine.flow import (
    BUDGET_LOOK_SECONDS,
    MAX_POOLS_REMEMBERED,
    REMEMBERED_SECONDS,
)
from router.engine.settle import ACK_LINGER_SECONDS
from router.ports import Depth, Disconnected, PoolFilter, Traits
from tests.engine.test_gates import OTHER, limit_to_one
from tests.support.fakes import BusySender, FakeSender
from tests.support.faults import Scripted, ScriptedQueue, handed
from tests.support.rig import QUEUE, Rig, body, ended, pool, running
from tests.support.states import RigReader
from tests.support.virtual_time import now

pytestmark = pytest.mark.anyio

DEFER = Traits(defers=True)
HOLD = Traits(ordered_here=True)
NATS_LIKE = Traits(ordered_here=True, defers=True)


@dataclass
class Selector:
    """Notes what it was asked for, and when."""

    asked: list[tuple[float, frozenset[str] | None]] = field(default_factory=list)

    def select(self, pools: PoolFilter | None) -> None:
        assert pools is None or pools.excludes
        wanted = None if pools is None else pools.codes
        if not self.asked or self.asked[-1][1] != wanted:
            self.asked.append((now(), wanted))


@dataclass
class Window:
    widened: list[int] = field(default_factory=list)

    def widen(self, messages: int) -> None:
        self.widened.append(messages)


def scripted(traits: Traits, *, redelivers: bool = False) -> ScriptedQueue:
    return ScriptedQueue(holds_groups=False, traits=traits, redelivers=redelivers)


def hand_over(queue: ScriptedQueue, code: str, ids: list[str], group: str | None = None) -> None:
    """Each in a group of its own, unless there is one for all."""
    for each in ids:
        content = body(each, poolCode=code, messageGroupId=group or each)
        queue.hand_over(handed(content, each, each))


def numbered(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{n}" for n in range(count)]


def calls_of(what: Callable[[], object]) -> int:
    """Count the calls that something makes: for what it costs, whatever else the machine does."""
    calls = 0

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in {"call", "c_call"}

    sys.setprofile(count)
    try:
        what()
    finally:
        sys.setprofile(None)
    return calls


SLOW = numbered("slow", 600)
FAST = numbered("fast", 20)


def slow_sender(takes: float = 2.0) -> FakeSender:
    return FakeSender(takes=0.01, takes_for=dict.fromkeys(SLOW, takes))


def times_of(sender: FakeSender, ids: list[str]) -> list[float]:
    wanted = set(ids)
    return [at for at, each in sender.sent if each in wanted]


@pytest.mark.rule("ROUTE-5", "P5")
@pytest.mark.parametrize("traits", [DEFER, NATS_LIKE, HOLD])
async def test_messages_of_a_fast_pool_are_found_behind_those_of_a_full_one(traits: Traits) -> None:
    queue, sender = scripted(traits, redelivers=True), slow_sender()
    pools = (pool("SLOW", 1), pool("FAST"))
    async with running(*pools, sender=sender, brokers=Scripted(q=queue)) as rig:
        hand_over(queue, "SLOW", SLOW)
        hand_over(queue, "FAST", FAST)
        await asyncio.sleep(2)
        found = times_of(sender, FAST)
        sender.takes_for = {}
        await rig.apply(pool("SLOW", 50), pool("FAST"))
        await asyncio.sleep(90)

        assert len(found) == 20
        assert max(found) <= 1
        assert sorted(times_of(sender, SLOW)) == times_of(sender, SLOW)
        assert len(times_of(sender, SLOW)) == 600
        assert rig.is_empty


@pytest.mark.rule("ROUTE-5", "FIFO-1", "P3")
@pytest.mark.parametrize("traits", [NATS_LIKE, HOLD])
async def test_a_group_keeps_its_order_while_its_pool_is_full(traits: Traits) -> None:
    queue, sender = scripted(traits, redelivers=True), slow_sender(0.1)
    pools = (pool("SLOW", 1), pool("FAST"))
    async with running(*pools, sender=sender, brokers=Scripted(q=queue)):
        hand_over(queue, "SLOW", SLOW[:300], group="g")
        hand_over(queue, "FAST", FAST)
        await asyncio.sleep(5)
        hand_over(queue, "SLOW", SLOW[300:], group="g")
        await asyncio.sleep(80)  # a minute is the least

        assert [each for each in sender.ids if each in set(SLOW)] == SLOW
        assert max(times_of(sender, FAST)) <= 1


@pytest.mark.rule("ROUTE-5")
async def test_a_queue_with_one_pool_is_not_read_ahead_of_it() -> None:
    queue = scripted(HOLD)
    async with running(
        pool("P", 1), sender=FakeSender(takes=1e6), brokers=Scripted(q=queue)
    ) as rig:
        hand_over(queue, "P", numbered("m", 500))
        await asyncio.sleep(600)

        assert len(rig.manager.registry.tracker) <= 50 + 1 + 50
        assert "LOOK_AHEAD" not in rig.codes


@pytest.mark.rule("ROUTE-5")
async def test_a_full_queue_is_searched_for_other_pools_now_and_then() -> None:
    queue = scripted(Traits(defers=True))
    pools = (pool("P", 1), pool("Q"))
    async with running(*pools, sender=FakeSender(takes=1e6), brokers=Scripted(q=queue)):
        hand_over(queue, "P", numbered("m", 60))
        await asyncio.sleep(2000)

        empty = [at for at, verb, _ in queue.calls if verb == "receive"]
        searches = [0.0]
        for pause in SEARCH_PAUSES_SECONDS:  # each search ends with an empty long poll of 20 s
            searches.append(searches[-1] + 20 + pause)
        assert [at for at in empty if at > 0][: len(SEARCH_PAUSES_SECONDS)] == searches[1:]


@pytest.mark.rule("ROUTE-5")
async def test_a_search_that_uses_up_the_look_ahead_has_ended_and_is_no_reason_to_warn() -> None:
    queue, sender = scripted(HOLD), FakeSender(takes=1e6)
    entry = replace(QUEUE, look_ahead=100)
    pools = (pool("P", 1), pool("Q"))
    async with running(*pools, sender=sender, brokers=Scripted(q=queue), queues=[entry]) as rig:
        hand_over(queue, "P", numbered("m", 300))
        await asyncio.sleep(500)

        assert rig.manager.consumers["q"].flow.waiting == 100
        assert "LOOK_AHEAD" not in rig.codes


@pytest.mark.rule("ROUTE-5")
async def test_a_search_that_finds_another_pool_is_repeated_at_once_when_that_is_full_too() -> None:
    queue = scripted(HOLD)
    sender = FakeSender(takes=1e6)
    pools = (pool("P", 1), pool("Q", 1), pool("R"))
    async with running(*pools, sender=sender, brokers=Scripted(q=queue)):
        for code in "PQ":
            hand_over(queue, code, numbered(code, 60))
        hand_over(queue, "R", ["r"])
        await asyncio.sleep(1)

        assert "r" in sender.ids


@pytest.mark.rule("ROUTE-5", "OPS-2")
@pytest.mark.parametrize(("traits", "used"), [(HOLD, "held"), (DEFER, "deferred")])
async def test_a_look_ahead_that_is_used_up_is_reported_until_it_is_not(
    traits: Traits, used: str
) -> None:
    queue = scripted(traits)
    entry = replace(QUEUE, look_ahead=100)
    sender = FakeSender(takes=1e6, takes_for={"first": 0.01, "last": 0.01})
    pools = (pool("P", 1), pool("Q"))
    async with running(*pools, sender=sender, brokers=Scripted(q=queue), queues=[entry]) as rig:
        hand_over(queue, "Q", ["first"])
        hand_over(queue, "P", numbered("m", 300))
        hand_over(queue, "Q", ["last"])
        await asyncio.sleep(5)
        reader, flow = RigReader(rig), rig.manager.consumers["q"].flow
        before = flow.is_used_up, sender.ids.count("last")
        (seen,) = reader.state().queues
        queue.ready = [each for each in queue.ready if each.handle == "last"]
        await rig.apply(pool("P", 1000), pool("Q"), queues=[entry])
        await asyncio.sleep(30)

        assert before == (True, 0), used
        assert seen.look_ahead_used_up
        assert (seen.held, seen.deferred) == {"held": (100, 0), "deferred": (50, 50)}[used]
        assert "LOOK_AHEAD" in rig.codes
        assert "messages of pool P fill the look-ahead of q" in str(rig.warnings)
        assert (flow.is_used_up, sender.ids.count("last")) == (False, 1)


@pytest.mark.rule("ROUTE-5")
async def test_a_pool_with_room_gets_messages_although_the_look_ahead_was_used_up_for_it() -> None:
    queue = scripted(DEFER, redelivers=True)
    sender, entry = FakeSender(takes=20.0, takes_for={"q": 0.01}), replace(QUEUE, look_ahead=100)
    pools, brokers = (pool("P", 5, take_ahead=0), pool("Q")), Scripted(q=queue)
    async with running(*pools, sender=sender, brokers=brokers, queues=[entry]) as rig:
        hand_over(queue, "Q", ["q"])
        hand_over(queue, "P", numbered("m", 2_000))
        await asyncio.sleep(999)

        assert Code.LOOK_AHEAD in rig.codes
        assert len(sender.ids) == 1 + 5 * 1000 / 20


@pytest.mark.rule("ROUTE-5", "P5")
async def test_a_look_for_more_costs_the_same_whatever_is_held_for_a_full_pool() -> None:
    queue = scripted(HOLD)
    pools = (pool("P", 1), pool("Q"))
    sender, brokers = FakeSender(takes=1e6, takes_for={"first": 0.01}), Scripted(q=queue)
    async with running(*pools, sender=sender, brokers=brokers) as rig:
        hand_over(queue, "Q", ["first"])
        flow, counts = rig.manager.consumers["q"].flow, []
        for wave in range(2):
            hand_over(queue, "P", numbered(f"{wave}-", 500))
            await asyncio.sleep(1)
            flow.place_waiting()  # one has found a place since
            counts.append((flow.waiting, calls_of(flow.place_waiting)))

        (fewer, calls), (more, calls_later) = counts
        assert fewer * 2 < more
        assert calls == calls_later < 50


@pytest.mark.rule("ROUTE-5", "P5")
async def test_what_waits_for_room_at_one_target_is_tried_again_now_and_then() -> None:
    queue, sender = scripted(HOLD), BusySender(takes=1e6, host_takes={"other.test": 0.01})
    async with running(pool("P", 2), pool("Q"), sender=sender, brokers=Scripted(q=queue)) as rig:
        limit_to_one(rig)
        hand_over(queue, "P", numbered("m", 500))
        queue.hand_over(handed(body("x", poolCode="P", mediationTarget=OTHER), "x", "x"))
        await asyncio.sleep(1)
        flow = rig.manager.consumers["q"].flow
        calls = [calls_of(partial(flow.ask, HOLD)) for _ in range(2)]

        assert rig.pool("P").has_room
        assert flow.waiting > 400
        assert "x" in sender.ids
        assert calls[1] < 50 < calls[0]


@pytest.mark.rule("ROUTE-5", "P4")
async def test_all_queues_together_hold_no_more_bytes_than_allowed() -> None:
    queue = scripted(HOLD)
    pools = (pool("P", 1), pool("Q"))
    async with running(
        *pools,
        sender=FakeSender(takes=1e6, takes_for={"first": 0.01}),
        brokers=Scripted(q=queue),
        look_ahead_bytes=1,
    ) as rig:
        hand_over(queue, "Q", ["first"])
        hand_over(queue, "P", numbered("m", 300))
        await asyncio.sleep(5)
        budget = rig.manager.deps.look_ahead_bytes
        held = budget.used

        assert rig.manager.consumers["q"].flow.waiting <= 100
        assert held > 1
        await rig.apply(*pools, queues=())
        await asyncio.sleep(5)
        assert budget.used == 0


@pytest.mark.rule("ROUTE-5", "P5", "OPS-2")
async def test_a_queue_that_may_not_look_ahead_for_what_others_hold_says_so_and_goes_on() -> None:
    queue = scripted(HOLD)
    sender = FakeSender(takes=1e6, takes_for=dict.fromkeys(["first", "last"], 0.01))
    pools, brokers = (pool("P", 1), pool("Q")), Scripted(q=queue)
    async with running(*pools, sender=sender, brokers=brokers, look_ahead_bytes=1) as rig:
        hand_over(queue, "Q", ["first"])
        hand_over(queue, "P", numbered("m", 49))
        await asyncio.sleep(1)
        flow, budget = rig.manager.consumers["q"].flow, rig.manager.deps.look_ahead_bytes
        budget.used += 1  # by another queue
        hand_over(queue, "P", ["m49", "m50"])
        await asyncio.sleep(1)
        hand_over(queue, "Q", ["last"])
        await asyncio.sleep(1)
        before = flow.waiting, flow.is_used_up, "last" in sender.ids
        budget.used -= 1
        await asyncio.sleep(BUDGET_LOOK_SECONDS)

        assert before == (0, True, False)
        assert "MESSAGE_ROUTER_LOOK_AHEAD_BYTES" in str(rig.warnings)
        assert Code.LOOK_AHEAD in rig.codes
        assert "last" in sender.ids
        assert (len(brokers.opened), flow.is_used_up) == (1, False)


@pytest.mark.rule("ROUTE-5", "P5")
async def test_a_queue_that_defers_looks_ahead_whatever_others_hold() -> None:
    queue, sender = scripted(DEFER, redelivers=True), slow_sender()
    pools = (pool("SLOW", 1), pool("FAST"))
    async with running(*pools, sender=sender, brokers=Scripted(q=queue), look_ahead_bytes=1) as rig:
        rig.manager.deps.look_ahead_bytes.used += 1  # by another queue
        hand_over(queue, "SLOW", SLOW)
        hand_over(queue, "FAST", FAST)
        await asyncio.sleep(2)

        assert max(times_of(sender, FAST)) <= 1
        assert rig.manager.consumers["q"].flow.waiting == 0
        assert Code.LOOK_AHEAD not in rig.codes


@pytest.mark.rule("ROUTE-5")
async def test_a_broker_that_pushes_is_told_how_much_is_held_at_most_once_a_pool_is_full() -> None:
    window = Window()
    queue = scripted(Traits(ordered_here=True, window=window))
    entry = replace(QUEUE, look_ahead=170)
    pools = (pool("P", 1), pool("Q"))
    sender, brokers = FakeSender(takes=1e6), Scripted(q=queue)
    async with running(*pools, sender=sender, brokers=brokers, queues=[entry]):
        hand_over(queue, "P", numbered("m", 40))
        await asyncio.sleep(1)
        before = list(window.widened)
        hand_over(queue, "P", numbered("n", 18))
        await asyncio.sleep(1)

        assert before == []
        assert set(window.widened) == {170}


@pytest.mark.rule("ROUTE-5", "BRK-4")
async def test_a_deferred_message_comes_back_when_it_is_its_turn() -> None:
    queue, sender = scripted(DEFER), FakeSender(takes=0.5)
    pools = (pool("P", 10), pool("Q"))
    async with running(*pools, sender=sender, brokers=Scripted(q=queue)):
        for _ in range(7):  # 20 in a second
            hand_over(queue, "P", numbered(f"{now():g}-", 200))
            await asyncio.sleep(10)
        first = len(queue.nacked)
        hand_over(queue, "P", numbered("m", 1200))
        await asyncio.sleep(0.1)
        delays = [delay for _, _, delay in queue.nacked[first:]]

        assert delays == sorted(delays)
        assert delays[0] == MIN_DEFERRAL_SECONDS
        assert 45 < delays[-1] <= MAX_DEFERRAL_SECONDS


@pytest.mark.rule("ROUTE-5", "BRK-4")
async def test_what_a_pool_takes_soon_is_held_instead_of_deferred() -> None:
    queue, sender = scripted(DEFER), FakeSender(takes=0.5)
    pools = (pool("P", 10), pool("Q"))
    async with running(*pools, sender=sender, brokers=Scripted(q=queue)) as rig:
        for _ in range(7):
            hand_over(queue, "P", numbered(f"{now():g}-", 200))
            await asyncio.sleep(10)
        hand_over(queue, "P", numbered("m", 250))
        await asyncio.sleep(0.1)
        held = rig.manager.consumers["q"].flow.waiting
        await asyncio.sleep(30)

        assert 30 <= held <= 40  # 20 in a second, for 2 seconds
        assert rig.manager.consumers["q"].flow.waiting == 0


@pytest.mark.rule("ROUTE-5", "P5")
@pytest.mark.parametrize("traits", [DEFER, NATS_LIKE])
async def test_a_slow_pool_that_has_just_begun_leaves_others_what_may_be_held(
    traits: Traits,
) -> None:
    """Deferred, messages of the fast pool would wait for ten seconds, although it is idle then."""
    queue, sender = scripted(traits, redelivers=True), slow_sender(30.0)
    pools = (pool("SLOW", 1), pool("FAST", 1, take_ahead=2))
    async with running(*pools, sender=sender, brokers=Scripted(q=queue)):
        hand_over(queue, "SLOW", SLOW[:200])
        hand_over(queue, "FAST", FAST)
        await asyncio.sleep(MIN_DEFERRAL_SECONDS)

        assert len(times_of(sender, FAST)) == len(FAST)
        assert max(times_of(sender, FAST)) <= 1


@pytest.mark.rule("ROUTE-5", "BRK-4")
async def test_messages_of_a_pool_that_delivers_nothing_stay_away_for_minutes() -> None:
    queue = scripted(DEFER)
    pools = (pool("P", 1), pool("Q"))
    async with running(*pools, sender=FakeSender(takes=1e6), brokers=Scripted(q=queue)):
        hand_over(queue, "P", numbered("m", 110))
        await asyncio.sleep(90)  # a search is under way
        hand_over(queue, "P", ["fits", "late"])
        await asyncio.sleep(10)

        assert queue.nacked[0][2] == MIN_DEFERRAL_SECONDS
        assert queue.nacked[-1][1:] == ("late", MAX_IDLE_DEFERRAL_SECONDS)


@pytest.mark.rule("ROUTE-5", "FIFO-1")
async def test_a_later_message_of_a_deferred_group_is_due_no_earlier() -> None:
    queue, sender = scripted(NATS_LIKE), FakeSender(takes=100)
    pools = (pool("P", 1), pool("Q"))
    async with running(*pools, sender=sender, brokers=Scripted(q=queue)) as rig:
        hand_over(queue, "P", numbered("m", 100))
        hand_over(queue, "P", ["a", "b"], group="g")
        await asyncio.sleep(1)
        await rig.apply(pool("P", 100), pool("Q"))
        hand_over(queue, "P", ["b"], group="g")  # before `a`
        hand_over(queue, "P", ["c"], group="g")
        await asyncio.sleep(1)
        early = sender.ids.count("b"), sender.ids.count("c")
        again = [(each, delay) for _, each, delay in queue.nacked]
        for each in "abc":
            hand_over(queue, "P", [each], group="g")
        await asyncio.sleep(400)

        step = DEFERRED_STEP_SECONDS
        assert early == (0, 0)
        assert again == [
            ("a", MIN_DEFERRAL_SECONDS),
            ("b", pytest.approx(MIN_DEFERRAL_SECONDS + step)),
            # There is room after a second, so these wait for the first one only.
            ("b", pytest.approx(MIN_DEFERRAL_SECONDS + step - 1)),
            ("c", pytest.approx(MIN_DEFERRAL_SECONDS + 2 * step - 1)),
        ]
        assert [each for each in sender.ids if each in {"a", "b", "c"}] == ["a", "b", "c"]


@pytest.mark.rule("ROUTE-5", "FIFO-1")
async def test_a_deferred_message_that_went_elsewhere_is_not_waited_for() -> None:
    queue, sender = scripted(NATS_LIKE), FakeSender(takes=1000)
    pools = (pool("P", 1), pool("Q"))
    async with running(*pools, sender=sender, brokers=Scripted(q=queue)) as rig:
        hand_over(queue, "P", numbered("m", 100))
        hand_over(queue, "P", ["a"], group="g")
        await asyncio.sleep(1)
        await rig.apply(pool("P", 200), pool("Q"))
        await asyncio.sleep(MIN_DEFERRAL_SECONDS + OVERDUE_SECONDS)
        hand_over(queue, "P", ["b"], group="g")
        await asyncio.sleep(1)

        assert "b" in sender.ids


@pytest.mark.rule("ROUTE-5", "P4")
async def test_deferred_messages_that_went_elsewhere_are_forgotten() -> None:
    queue, sender = scripted(NATS_LIKE), FakeSender(takes=1e6, takes_for={"q": 0.01})
    pools = (pool("P", 1), pool("Q"))
    async with running(*pools, sender=sender, brokers=Scripted(q=queue)) as rig:
        hand_over(queue, "Q", ["q"])
        hand_over(queue, "P", numbered("m", 100))
        await asyncio.sleep(1)
        hand_over(queue, "P", ["a", "b"])
        await asyncio.sleep(MIN_DEFERRAL_SECONDS + 1)
        hand_over(queue, "P", ["b"])  # and is deferred again
        await asyncio.sleep(OVERDUE_SECONDS)
        hand_over(queue, "P", ["c"])
        await asyncio.sleep(1)

        assert len(rig.manager.consumers["q"].flow.deferred) == 2  # b and c


@pytest.mark.rule("ROUTE-5", "P4")
async def test_deferred_messages_use_no_more_of_a_brokers_limit_than_it_allows() -> None:
    queue = scripted(Traits(defers=True, defer_limit=70))
    pools = (pool("P", 1), pool("Q"))
    sender = FakeSender(takes=1e6, takes_for={"q": 0.01})
    async with running(*pools, sender=sender, brokers=Scripted(q=queue)) as rig:
        hand_over(queue, "Q", ["q"])
        hand_over(queue, "P", numbered("m", 400))
        await asyncio.sleep(5)

        assert len(queue.nacked) == 70 - 50  # as many wait here
        assert "LOOK_AHEAD" in rig.codes


@pytest.mark.rule("FIFO-1", "ROUTE-5")
async def test_what_is_held_of_a_group_goes_back_behind_a_message_of_it_that_fails() -> None:
    queue = scripted(HOLD)
    sender = FakeSender(takes=1000, takes_for={"a": 2})
    sender.script("a", Reply(302))
    pools = (pool("P", 2), pool("Q"))
    async with running(*pools, sender=sender, brokers=Scripted(q=queue)):
        hand_over(queue, "P", ["a"], group="g")
        hand_over(queue, "P", numbered("m", 51))
        hand_over(queue, "P", ["b", "c"], group="g")
        await asyncio.sleep(5)

        assert queue.nacked == [(2, each, DEFAULT_DELAY_SECONDS) for each in "abc"]


@pytest.mark.rule("BRK-5", "ROUTE-5", "OPS-1")
async def test_what_is_held_for_too_long_goes_back_with_all_of_its_group_behind_it() -> None:
    traits = Traits(ordered_here=True, hold_seconds=300)
    queue = scripted(traits)
    pools = (pool("P", 1), pool("Q"))
    async with running(*pools, sender=FakeSender(takes=1e6), brokers=Scripted(q=queue)) as rig:
        hand_over(queue, "P", numbered("m", 51))
        hand_over(queue, "P", ["a"], group="g")
        await asyncio.sleep(200)
        hand_over(queue, "P", ["b"], group="g")
        hand_over(queue, "P", ["c"], group="h")
        await asyncio.sleep(110)
        flow = rig.manager.consumers["q"].flow
        overdue = flow.take_overdue(now())
        left = flow.waiting

        assert [job.message.id for job in overdue] == ["a", "b"]
        assert left == 1
        for job in overdue:
            job.settler.forfeit(job)
        await asyncio.sleep(1)


@pytest.mark.rule("BRK-5", "ROUTE-5", "P3")
async def test_what_is_held_of_a_group_goes_back_behind_what_was_too_long_in_its_pool() -> None:
    queue = scripted(Traits(ordered_here=True, hold_seconds=300), redelivers=True)
    pools = (pool("P", 1), pool("Q"))
    sender = FakeSender(takes=1, takes_for={"long": 315})
    async with running(*pools, sender=sender, brokers=Scripted(q=queue)) as rig:
        hand_over(queue, "P", ["long"])
        hand_over(queue, "P", ["a"], group="g")
        hand_over(queue, "P", numbered("m", 50), group="h")  # they fill the pool
        await asyncio.sleep(200)
        hand_over(queue, "P", ["b"], group="g")
        await asyncio.sleep(110)
        await Chores(rig.manager, rig.breakers, rig.alerts).nack_overdue()
        back = [handle for _, handle, _ in queue.nacked]
        await asyncio.sleep(200)

        assert back.index("a") < back.index("b")
        assert [each for each in sender.ids if each in "ab"] == ["a", "b"]
        assert [each for each in sender.ids if each[0] == "m"] == numbered("m", 50)


@pytest.mark.rule("BRK-5", "ROUTE-5", "P3")
async def test_what_is_held_of_a_group_goes_back_behind_one_that_lost_its_lease() -> None:
    queue = scripted(HOLD)
    pools = (pool("P", 1), pool("Q"))
    sender = FakeSender(takes=1, takes_for={"long": 100})
    async with running(*pools, sender=sender, brokers=Scripted(q=queue)) as rig:
        hand_over(queue, "P", ["long"])
        queue.hand_over(handed(body("a", poolCode="P", messageGroupId="g"), "a", "a", lease=50))
        hand_over(queue, "P", numbered("m", 55), group="h")  # they fill the pool
        hand_over(queue, "P", ["b"], group="g")
        await asyncio.sleep(1)
        (state,) = [job.state for job in rig.manager.registry.tracker if job.message.id == "b"]
        await asyncio.sleep(200)

        assert state is State.WAITING
        assert queue.nacked == [(100, "b", 0.0)]
        assert sender.ids == ["long", *numbered("m", 55)]


@pytest.mark.rule("CFG-6", "ROUTE-5", "P3")
async def test_what_is_held_of_a_group_goes_back_behind_what_its_removed_pool_returns() -> None:
    queue = scripted(HOLD, redelivers=True)
    sender = FakeSender(takes=1, takes_for={"long": 100})
    async with running(pool("P", 1), pool("Q"), sender=sender, brokers=Scripted(q=queue)) as rig:
        hand_over(queue, "P", ["long"])
        hand_over(queue, "P", ["a"], group="g")
        hand_over(queue, "P", numbered("m", 55), group="h")  # they fill the pool
        hand_over(queue, "P", ["b"], group="g")
        await asyncio.sleep(1)
        (state,) = [job.state for job in rig.manager.registry.tracker if job.message.id == "b"]
        await rig.apply(pool("Q"))
        await asyncio.sleep(100)

        assert state is State.WAITING
        assert [each for each in sender.ids if each in "ab"] == ["a", "b"]
        assert [each for each in sender.ids if each[0] == "m"] == numbered("m", 55)


STRICT = replace(QUEUE, ordering=Ordering.STRICT, on_failure=OnFailure.BLOCK)


@pytest.mark.rule("CFG-6", "P3", "ORD-1")
@pytest.mark.parametrize("entry", [QUEUE, STRICT])
@pytest.mark.parametrize("is_held", [False, True])
async def test_what_comes_late_goes_back_behind_what_a_removed_pool_returns_after_a_request(
    entry: QueueConfig, is_held: bool
) -> None:
    queue = scripted(HOLD, redelivers=True)
    sender, brokers = FakeSender(takes=1, takes_for={"a": 30}), Scripted(q=queue)
    async with running(pool("P", 1), sender=sender, brokers=brokers, queues=[entry]) as rig:
        hand_over(queue, "P", ["a", "b"], group="g")
        if is_held:
            hand_over(queue, "P", numbered("m", 60), group="h")  # they fill the pool
            hand_over(queue, "P", ["c"], group="g")
        await asyncio.sleep(1)
        await rig.apply(queues=[entry])
        if not is_held:
            hand_over(queue, "P", ["c"], group="g")
        await asyncio.sleep(150)

        assert [each for each in sender.ids if each in "abc"] == ["a", "b", "c"]
        assert rig.is_empty


@pytest.mark.rule("CFG-6", "FIFO-1", "ORD-1", "P3")
@pytest.mark.parametrize(("entry", "again_at"), [(QUEUE, 40), (STRICT, 10)])
async def test_what_comes_late_goes_back_behind_what_failed_in_a_removed_pool(
    entry: QueueConfig, again_at: float
) -> None:
    queue, sender = scripted(HOLD, redelivers=True), FakeSender(takes=10)
    sender.script("a", Reply(500))
    brokers = Scripted(q=queue)
    async with running(pool("P", 1), sender=sender, brokers=brokers, queues=[entry]) as rig:
        hand_over(queue, "P", ["a"], group="g")
        await asyncio.sleep(1)
        await rig.apply(queues=[entry])
        hand_over(queue, "P", ["b"], group="g")
        await asyncio.sleep(100)

        assert sender.sent == [(0, "a"), (again_at, "a"), (again_at + 10, "b")]
        assert rig.is_empty


@pytest.mark.rule("ROUTE-5", "OPS-4", "CFG-7")
async def test_what_is_held_goes_back_in_order_when_its_queue_stops() -> None:
    queue = scripted(HOLD)
    pools = (pool("P", 1), pool("Q"))
    async with running(*pools, sender=FakeSender(takes=1000), brokers=Scripted(q=queue)) as rig:
        hand_over(queue, "P", numbered("m", 80))
        await asyncio.sleep(1)
        await rig.apply(*pools, queues=())
        await asyncio.sleep(1)

        assert [each for _, each, _ in queue.nacked] == numbered("m", 80)[50:]


@pytest.mark.rule("BRK-6", "ROUTE-5")
async def test_what_is_held_is_lost_with_its_connection_and_counted() -> None:
    queue = scripted(HOLD)
    pools = (pool("P", 1), pool("Q"))
    async with running(*pools, sender=FakeSender(takes=1e6), brokers=Scripted(q=queue)) as rig:
        hand_over(queue, "P", numbered("m", 80))
        await asyncio.sleep(1)
        waiting = rig.manager.consumers["q"].flow.waiting
        queue.failing["receive"] = Disconnected("gone")
        await asyncio.sleep(100)  # it is searched again

        assert waiting == 30
        assert rig.manager.consumers["q"].flow.waiting == 0
        assert ended(rig)[Fate.FORFEITED] == 29  # one has found its place meanwhile


def exclusion(rig: Rig) -> Selector:
    selector = rig.manager.consumers["q"].connections[0].settler.traits.selector
    assert isinstance(selector, Selector)
    return selector


@pytest.mark.rule("ROUTE-5")
async def test_messages_of_full_pools_are_not_asked_for_until_there_is_room() -> None:
    queue = scripted(Traits(selector=Selector()))
    pools = (pool("P", 1), pool("Q"))
    async with running(*pools, sender=FakeSender(takes=10), brokers=Scripted(q=queue)) as rig:
        hand_over(queue, "P", numbered("m", 60))
        await asyncio.sleep(200)

        # Ten of them did not fit, and wait in their queue. Each of the others takes ten seconds,
        # and a quarter of the pool is free after the twelfth.
        assert queue.nacked == [(0, f"m{n}", 0) for n in range(50, 60)]
        assert exclusion(rig).asked == [
            (0, None),
            (0, frozenset({"P"})),
            (120 + ACK_LINGER_SECONDS, None),
        ]


@pytest.mark.rule("ROUTE-5", "ROUTE-4")
async def test_unknown_pools_are_not_asked_for_while_the_default_pool_is_full() -> None:
    queue = scripted(Traits(selector=Selector()))
    pools = (pool("DEFAULT-POOL", 1), pool("Q"))
    async with running(*pools, sender=FakeSender(takes=1e6), brokers=Scripted(q=queue)) as rig:
        hand_over(queue, "UNKNOWN", numbered("m", 60))
        await asyncio.sleep(5)

        assert exclusion(rig).asked[-1][1] == frozenset({"UNKNOWN"})


@pytest.mark.rule("ROUTE-5")
async def test_a_pool_that_brought_nothing_for_ten_minutes_is_forgotten() -> None:
    queue = scripted(Traits(selector=Selector()))
    pools = (pool("P", 1), pool("Q"))
    async with running(*pools, sender=FakeSender(takes=1e6), brokers=Scripted(q=queue)) as rig:
        hand_over(queue, "P", numbered("m", 60))
        await asyncio.sleep(REMEMBERED_SECONDS + 30)

        assert [codes for _, codes in exclusion(rig).asked] == [None, frozenset({"P"}), None]


@pytest.mark.rule("ROUTE-5", "ROUTE-4", "P4")
async def test_producers_that_make_up_pools_do_not_fill_the_memory() -> None:
    queue = scripted(Traits(selector=Selector()))
    pools = (pool("DEFAULT-POOL", 1), pool("Q"))
    async with running(*pools, sender=FakeSender(takes=1e6), brokers=Scripted(q=queue)) as rig:
        for n in range(MAX_POOLS_REMEMBERED + 10):
            hand_over(queue, f"made up {n}", [str(n)])
        await asyncio.sleep(5)

        assert len(exclusion(rig).asked[-1][1] or ()) == MAX_POOLS_REMEMBERED
        # What cannot be excluded stays away for a while instead.
        assert {delay for _, _, delay in queue.nacked} == {0.0, RETURNS[ReturnReason.NO_ROOM].delay}


@pytest.mark.rule("ROUTE-5")
async def test_no_message_waits_for_a_pool_that_does_not_exist() -> None:
    async with running() as rig:
        rig.manager.pools.watch("P", rig.manager.consumers["q"].flow)

        assert rig.manager.pools.find("P") is None


@pytest.mark.rule("OPS-3", "ROUTE-5")
@pytest.mark.parametrize("traits", [Traits(selector=Selector()), HOLD, DEFER])
async def test_a_consumer_that_waits_for_full_pools_is_not_silent(traits: Traits) -> None:
    queue = scripted(traits)
    queue.depth = Depth(waiting=100, in_flight=51, due=100)
    pools = (pool("P", 1), pool("Q"))
    async with running(*pools, sender=FakeSender(takes=1e6), brokers=Scripted(q=queue)) as rig:
        hand_over(queue, "P", numbered("m", 60))
        healthy = []
        for _ in range(20):
            await asyncio.sleep(30)
            consumer = rig.manager.consumers["q"]
            await consumer.depth()
            healthy.append(consumer.is_healthy(now()))

        assert all(healthy)


@pytest.mark.rule("OPS-3", "ROUTE-5", "MED-4")
@pytest.mark.parametrize(
    ("traits", "state"),
    [
        (Traits(selector=Selector()), "selective"),
        (HOLD, "used up"),
        (DEFER, "used up"),
        (DEFER, "probing"),
    ],
)
async def test_a_consumer_that_does_not_receive_on_purpose_is_healthy_for_ten_minutes(
    traits: Traits, state: str
) -> None:
    queue = scripted(traits, redelivers=traits.selector is None)
    entry = replace(QUEUE, look_ahead=100)
    queue.depth = Depth(waiting=1000, in_flight=51, due=1000)
    pools = (pool("P", 1, timeout=7200.0), pool("Q"))
    sender = FakeSender(takes=1e6, takes_for={"first": 0.01})
    ids = numbered("m", 300)
    if state == "probing":
        sender.takes = 0.01
        for each in ids:
            sender.script(each, *[NoReply(Cause.NETWORK, "refused")] * 100)
    async with running(*pools, sender=sender, brokers=Scripted(q=queue), queues=[entry]) as rig:
        reader, chores = RigReader(rig), Chores(rig.manager, rig.breakers, rig.alerts)
        if state != "probing":
            hand_over(queue, "Q", ["first"])
        hand_over(queue, "P", ids)
        for _ in range(20):
            await asyncio.sleep(30)
            await chores.restart_silent_consumers()
            await chores.measure_queues()
            assert assess(reader.state()).healthy
        flow = rig.manager.consumers["q"].flow

        assert Code.CONSUMER_RESTART not in rig.codes
        assert flow.is_used_up is (state == "used up")
        assert state != "probing" or 1 in queue.limits[-20:]


@pytest.mark.rule("MED-4", "ROUTE-5")
async def test_a_queue_whose_targets_are_all_down_is_probed_with_one_message() -> None:
    queue = scripted(DEFER)
    sender = FakeSender()
    waves = [numbered(f"{n}-", 10) for n in range(30)]
    more = numbered("more", 30)
    for each in (*(each for wave in waves for each in wave), *more):
        sender.script(each, *[NoReply(Cause.NETWORK, "refused")] * 10)
    async with running(pool("P"), sender=sender, brokers=Scripted(q=queue)):
        for wave in waves:
            hand_over(queue, "P", wave)
            await asyncio.sleep(1)
        asked = len(queue.limits)
        hand_over(queue, "P", more)  # for the receive that is open
        await asyncio.sleep(60)

        assert set(queue.limits[asked + 1 :]) == {1}
        gaps = [at for at, verb, count in queue.calls if verb == "receive" and count == 1]
        assert all(later - earlier >= OPEN_SECONDS for earlier, later in pairwise(gaps))


@pytest.mark.rule("FIFO-1", "POOL-7")
async def test_a_broker_is_told_which_messages_have_no_order() -> None:
    sender = FakeSender(takes=0.1)
    for each in ("a", "b", "c", "d"):
        sender.script(each, Reply(200, b'{"ack":false,"delaySeconds":5}'))
    parallel = pool(parallel_ungrouped=True)
    async with running(parallel, pool("Q"), sender=sender) as rig:
        await rig.publish(
            body("a", poolCode="P"),
            body("b", poolCode="P", messageGroupId="g"),
            body("c", poolCode="Q"),
            body("d", poolCode="Q", dispatchMode="IMMEDIATE"),
        )
        await asyncio.sleep(1)

        assert rig.witness.in_order == {"a": False, "b": True, "c": True, "d": False}
