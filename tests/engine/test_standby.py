"""Several routers, one of them works at a time: who, from when, and until when (CFG-9)."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from router.brokers import BrokerRegistry
from router.core.config import OnFailure, Ordering, PoolConfig, QueueConfig, RoutingConfig
from router.core.history import Fate
from router.core.leadership import Leadership
from router.engine.queue_manager import shut_down
from router.engine.settle import ACK_LINGER_SECONDS
from router.engine.standby import Alone, Standby
from router.ports import Brokers
from tests.support.fakes import FakeSender
from tests.support.faults import Scripted, ScriptedQueue, handed, not_now
from tests.support.locks import FakeLock, LockServer
from tests.support.rig import FREE_QUEUE, QUEUE, Rig, body, grouped, pool, running
from tests.support.virtual_time import now

pytestmark = pytest.mark.anyio

TTL = 30.0
WALL = 1000.0  # what the wall clock shows when the loop's shows 0


@dataclass
class SharedClock:
    """The loop's, unless the process is stopped: then the loop does not know it yet."""

    stopped_for: float = 0.0

    def now(self) -> float:
        return now() + self.stopped_for


@dataclass
class StandbyRouter:
    rig: Rig
    standby: Standby
    server: LockServer
    clock: SharedClock
    roles: list[tuple[float, bool]] = field(default_factory=list)

    @property
    def is_primary(self) -> bool:
        return self.standby.status().primary

    def take_lock_away(self) -> None:
        self.server.owner, self.server.refreshed_at = "other", now()

    @property
    def ended(self) -> dict[Fate, int]:
        return {fate: n for fate, n in self.rig.manager.registry.ledger.ended.items() if n}


@asynccontextmanager
async def router(
    server: LockServer,
    name: str = "one",
    *pools: PoolConfig,
    sender: FakeSender | None = None,
    brokers: Brokers | None = None,
    queue: QueueConfig = QUEUE,
) -> AsyncIterator[StandbyRouter]:
    clock = SharedClock()
    leadership = Leadership(clock.now)
    async with running(sender=sender, brokers=brokers, queues=(), leadership=leadership) as rig:
        roles: list[tuple[float, bool]] = []
        standby = Standby(
            FakeLock(server, name),
            rig.manager,
            rig.alerts,
            instance=name,
            ttl=server.ttl,
            wall=lambda: WALL + now(),
            on_change=lambda primary: roles.append((now(), primary)),
        )
        await standby.apply(RoutingConfig((queue,), pools or (pool("P"),)))
        standby.start(rig.tasks)
        yield StandbyRouter(rig, standby, server, clock, roles)
        await standby.close()


def held_by_another(ttl: float = TTL) -> LockServer:
    return LockServer(ttl, owner="other", fence=7)


# Who works.


@pytest.mark.rule("CFG-9", "ORD-4")
async def test_a_strict_queue_whose_order_store_no_standby_reaches_is_warned_of() -> None:
    strict = replace(FREE_QUEUE, ordering=Ordering.STRICT)
    async with router(LockServer(TTL), queue=strict) as one:
        (text,) = [each.message for each in one.rig.warnings if each.code == "QUEUE_VALIDATION"]
        assert "Set MESSAGE_ROUTER_ORDER_STORE" in text
    async with router(LockServer(TTL), queue=replace(strict, on_failure=OnFailure.BLOCK)) as one:
        assert "QUEUE_VALIDATION" not in one.rig.codes


@pytest.mark.rule("CFG-9", "ORD-4", "LIM-2")
@pytest.mark.parametrize(("has_replicas", "codes"), [(False, set()), (True, {"QUEUE_VALIDATION"})])
async def test_replicas_are_warned_of_a_strict_queue_with_a_store_of_its_own(
    has_replicas: bool, codes: set[str]
) -> None:
    strict = replace(FREE_QUEUE, ordering=Ordering.STRICT)
    async with running(queues=()) as rig:
        await Alone(rig.manager, "one", has_replicas=has_replicas).apply(RoutingConfig((strict,)))

        assert rig.codes == codes


@pytest.mark.rule("CFG-9")
async def test_the_first_one_works_at_once() -> None:
    async with router(LockServer(TTL)) as one:
        await one.rig.publish(*grouped("a"))
        await asyncio.sleep(2)

        assert one.roles == [(0, True)]
        assert one.rig.sender.ids == ["a"]
        assert one.standby.may_publish("q")


@pytest.mark.rule("CFG-9")
async def test_a_standby_consumes_nothing_and_knows_who_works() -> None:
    async with router(held_by_another()) as one:
        await one.rig.publish(*grouped("a"))
        await asyncio.sleep(10.5)
        status = one.standby.status()

        assert (status.enabled, status.instance, status.primary) == (True, "one", False)
        assert (status.lock_holder, status.last_refresh) == ("other", WALL)
        assert one.rig.sender.ids == []
        assert one.rig.manager.consumers == {}
        assert not one.standby.may_publish("q")
        assert one.rig.manager.deps.leadership.is_over
        assert one.rig.manager.applied.queues == (QUEUE,)  # publishing goes by it


@pytest.mark.rule("CFG-9")
async def test_a_router_that_just_starts_has_asked_no_lock_server() -> None:
    server = LockServer(TTL)
    server.fail()
    async with router(server) as one:
        await asyncio.sleep(1)

        assert (one.standby.status().lock_holder, one.standby.status().last_refresh) == (None, None)


@pytest.mark.rule("CFG-9")
async def test_a_server_that_just_started_grants_no_lock_until_it_is_safe() -> None:
    async with router(LockServer(TTL, is_new=True)) as one:
        await asyncio.sleep(5.5)
        before = one.standby.status()
        one.server.is_new = False
        await asyncio.sleep(1)

        assert (before.primary, before.lock_holder, before.last_refresh) == (False, None, None)
        assert one.roles == [(6, True)]


@pytest.mark.rule("CFG-9")
async def test_a_standby_takes_over_within_a_second_after_the_lock_has_run_out() -> None:
    async with router(held_by_another()) as one:
        await one.rig.publish(*grouped("a"))
        await asyncio.sleep(TTL + 1)

        assert one.roles == [(TTL, True)]
        assert one.rig.sender.sent == [(TTL, "a")]
        assert one.standby.status().lock_holder == "one"


@pytest.mark.rule("CFG-9")
async def test_the_lock_is_refreshed_at_a_third_of_its_ttl() -> None:
    async with router(LockServer(TTL)) as one:
        await asyncio.sleep(35)

        assert one.server.refreshes == [0, 10, 20, 30]
        assert one.standby.status().last_refresh == WALL + 30


@pytest.mark.rule("CFG-9")
async def test_it_counts_from_before_the_server_was_asked() -> None:
    server = LockServer(TTL, takes=4)
    async with router(server) as one:
        await asyncio.sleep(15)

        assert one.server.refreshes == [0, 10]
        assert one.rig.manager.deps.leadership.until == 10 + TTL


@pytest.mark.rule("CFG-9")
async def test_a_lock_whose_grant_arrives_too_late_is_not_used() -> None:
    server = LockServer(TTL, takes=4)
    async with router(server) as one:
        await asyncio.sleep(1)
        one.clock.stopped_for = 25  # the process, while it waits for the answer
        await asyncio.sleep(3.5)

        assert one.roles == []
        await asyncio.sleep(5)
        assert one.roles == [(9, True)]


# When it cannot be refreshed.


@pytest.mark.rule("CFG-9")
async def test_at_two_thirds_of_the_ttl_it_returns_what_is_queued_and_settles_what_ends() -> None:
    sender = FakeSender(takes=8)
    async with router(LockServer(TTL), "one", pool("P", 2), sender=sender) as one:
        await asyncio.sleep(9)
        one.server.fail()
        await asyncio.sleep(7)
        await one.rig.publish(*grouped("a1", "a2", group="a"), *grouped("b", group="b"))
        await one.rig.publish(*grouped("c", group="c"))
        await asyncio.sleep(20)

        assert one.roles == [(0, True), (20, False)]
        assert sender.sent == [(16, "a1"), (16, "b")]
        assert sorted(one.rig.witness.acks) == [
            (24 + ACK_LINGER_SECONDS, "a1"),
            (24 + ACK_LINGER_SECONDS, "b"),
        ]
        # Group mates of an open POST after it, the others at once.
        assert one.rig.witness.nacks == [(20, "c", 0), (24, "a2", 0)]
        assert one.ended == {Fate.DELIVERED: 2, Fate.RETURNED: 2}


@pytest.mark.rule("CFG-9")
async def test_what_is_open_when_the_lock_ends_is_cut_off_and_not_settled() -> None:
    sender = FakeSender(takes=100)
    async with router(LockServer(TTL), sender=sender) as one:
        await asyncio.sleep(1)
        await one.rig.publish(*grouped("a1", "a2"), *grouped("b", group="b"))
        one.server.fail()
        await asyncio.sleep(TTL - 1.5)
        still_open = sender.open
        await asyncio.sleep(1)

        assert still_open == 2
        assert sender.open == 0
        assert (one.rig.witness.acks, one.rig.witness.nacks) == ([], [])
        assert one.ended == {Fate.FORFEITED: 3}


@pytest.mark.rule("CFG-9")
async def test_a_server_that_answers_again_in_time_changes_nothing() -> None:
    async with router(LockServer(TTL)) as one:
        await asyncio.sleep(1)
        one.server.fail()
        await asyncio.sleep(18)
        one.server.recover()
        await asyncio.sleep(1)

        assert one.roles == [(0, True)]
        assert one.server.refreshes == [0, 19]
        assert one.rig.codes == {"STANDBY_LOCK"}


@pytest.mark.rule("CFG-9")
async def test_a_server_that_never_answers_is_not_waited_for() -> None:
    async with router(LockServer(TTL)) as one:
        await asyncio.sleep(1)
        one.server.takes = 10_000
        await asyncio.sleep(30)

        assert one.roles == [(0, True), (TTL * 2 / 3, False)]
        (warning,) = one.rig.warnings
        assert "no answer in time" in warning.message


@pytest.mark.rule("CFG-9")
async def test_a_silent_server_is_asked_again_after_a_third_of_a_short_ttl() -> None:
    server = LockServer(3.0, takes=10_000)
    async with router(server) as one:
        await asyncio.sleep(0.5)
        server.takes = 0
        await asyncio.sleep(2)

        assert one.roles == [(2, True)]


@pytest.mark.rule("CFG-9")
async def test_what_a_last_receive_brings_after_the_work_has_ended_is_left_to_its_broker() -> None:
    queue = ScriptedQueue(lease_seconds=30, is_deaf=True)
    async with router(LockServer(TTL), brokers=Scripted(q=queue)) as one:
        await asyncio.sleep(1)
        one.server.fail()
        await asyncio.sleep(21)
        queue.is_deaf = False
        queue.hand_over(handed(body("a"), "h", "1", lease=30))
        await asyncio.sleep(1)

        assert one.roles == [(0, True), (20, False)]
        assert queue.nacked == []
        assert one.ended == {Fate.FORFEITED: 1}


@pytest.mark.rule("CFG-9")
async def test_when_the_server_is_back_it_works_again() -> None:
    sender = FakeSender(takes=100)
    sender.takes_for["b"] = 1
    async with router(LockServer(TTL), sender=sender) as one:
        await one.rig.publish(*grouped("a"))
        await asyncio.sleep(1)
        one.server.fail()
        await asyncio.sleep(40)
        one.server.recover()
        await one.rig.publish(*grouped("b", group="b"))
        await asyncio.sleep(30)

        assert one.roles == [(0, True), (20, False), (41, True)]
        assert sender.ids == ["a", "b", "a"]  # the lease of the one that was cut off ran out


@pytest.mark.rule("CFG-9")
async def test_a_pool_that_was_cut_off_can_be_cut_off_again() -> None:
    sender = FakeSender(takes=10_000)
    async with router(LockServer(TTL), sender=sender) as one:
        for _ in range(2):
            await one.rig.publish(*grouped("a"))
            await asyncio.sleep(1)
            one.server.fail()
            await asyncio.sleep(TTL)
            one.server.recover()
            await asyncio.sleep(5)

        assert [primary for _, primary in one.roles] == [True, False, True, False, True]
        assert one.ended[Fate.FORFEITED] >= 2
        assert one.rig.pool().runner._aborted == set()


@pytest.mark.rule("CFG-9")
async def test_a_bug_in_the_lock_is_survived() -> None:
    async with router(LockServer(TTL)) as one:
        await asyncio.sleep(1)
        one.server.trouble = KeyError("a bug")
        await asyncio.sleep(30)
        one.server.recover()
        await asyncio.sleep(2)

        assert [primary for _, primary in one.roles] == [True, False, True]


# When it is lost.


@pytest.mark.rule("CFG-9")
async def test_a_lost_lock_ends_everything_at_once() -> None:
    sender = FakeSender(takes=15)
    async with router(LockServer(TTL), sender=sender) as one:
        await one.rig.publish(*grouped("a1", "a2"))
        await asyncio.sleep(1)
        one.take_lock_away()
        await asyncio.sleep(10)

        assert one.roles == [(0, True), (10, False)]
        assert sender.open == 0
        assert (one.rig.witness.acks, one.rig.witness.nacks) == ([], [])
        assert one.rig.codes == {"STANDBY_LOCK"}
        assert one.standby.status().lock_holder == "other"


@pytest.mark.rule("CFG-9")
async def test_an_ack_that_waits_for_its_broker_is_given_up_with_the_lock() -> None:
    queue = ScriptedQueue(lease_seconds=3600, unsettled={"h": not_now("h")})
    async with router(LockServer(TTL), brokers=Scripted(q=queue)) as one:
        queue.hand_over(handed(body("a", poolCode="P"), "h", "1", lease=3600))
        await asyncio.sleep(5)
        one.take_lock_away()
        await asyncio.sleep(5.1)
        ended = one.ended
        queue.unsettled.clear()
        await asyncio.sleep(10)

        assert queue.acked == []
        assert ended == {Fate.FORFEITED: 1}


@pytest.mark.rule("CFG-9")
async def test_a_call_to_a_silent_broker_is_given_up_with_the_lock() -> None:
    queue = ScriptedQueue(lease_seconds=3600, takes={"ack": 10_000})
    async with router(LockServer(TTL), brokers=Scripted(q=queue)) as one:
        queue.hand_over(handed(body("a", poolCode="P"), "h", "1", lease=3600))
        await asyncio.sleep(5)
        one.take_lock_away()
        await asyncio.sleep(10)

        assert one.ended == {Fate.FORFEITED: 1}


# When the process was stopped.


@pytest.mark.rule("CFG-9")
async def test_a_process_that_was_stopped_for_too_long_sends_and_settles_nothing() -> None:
    sender = FakeSender(takes=5)
    async with router(LockServer(TTL), "one", pool("P", 2), sender=sender) as one:
        await one.rig.publish(*grouped("a1", "a2", "a3"), *grouped("b1", "b2", group="b"))
        await asyncio.sleep(4)
        one.clock.stopped_for = TTL + 1  # nothing has told it yet when the POSTs end
        await asyncio.sleep(10)

        assert sender.ids == ["a1", "b1"]
        assert (one.rig.witness.acks, one.rig.witness.nacks) == ([], [])
        assert one.ended[Fate.FORFEITED] == 5


@pytest.mark.rule("CFG-9")
async def test_a_process_that_was_stopped_for_too_long_receives_nothing() -> None:
    queue = ScriptedQueue(lease_seconds=30)
    async with router(LockServer(TTL), brokers=Scripted(q=queue)) as one:
        await asyncio.sleep(1)
        one.clock.stopped_for = TTL + 1
        queue.hand_over(handed(body("a"), "h", "1", lease=30))
        await asyncio.sleep(5)

        assert one.rig.sender.ids == []
        assert (queue.acked, queue.nacked) == ([], [])
        assert len([each for each in queue.calls if each[1] == "receive"]) == 1
        assert one.ended == {Fate.FORFEITED: 1}


@pytest.mark.rule("CFG-9")
async def test_what_waits_for_room_when_the_process_is_stopped_is_let_go() -> None:
    sender = FakeSender(takes=3)
    tiny = pool("P", 1)
    async with router(LockServer(TTL), "one", tiny, sender=sender, queue=FREE_QUEUE) as one:
        many = [grouped(f"m{n}", group=f"g{n}")[0] for n in range(120)]
        await one.rig.publish(*many, queue=FREE_QUEUE)
        await asyncio.sleep(4)
        one.clock.stopped_for = TTL + 1
        one.take_lock_away()
        await asyncio.sleep(10)

        assert len(one.rig.sender.ids) == 2
        assert one.rig.is_empty


# The end of the process.


@pytest.mark.rule("CFG-9")
async def test_a_router_that_ends_lets_the_next_one_work_within_a_second() -> None:
    server = LockServer(TTL)
    async with (
        BrokerRegistry(worker_id="shared", dedup_window=300) as brokers,
        router(server, "one", sender=FakeSender(takes=5), brokers=brokers) as one,
        router(server, "two", brokers=brokers) as two,
    ):
        await one.rig.publish(*grouped("a", "b"))
        await asyncio.sleep(1)
        one.standby.stop()
        await shut_down(one.rig.manager, 30)
        await one.standby.close()
        left_at = now()
        await asyncio.sleep(3)

        assert one.rig.sender.ids == ["a"]
        assert two.rig.sender.ids == ["b"]
        assert left_at <= two.roles[0][0] <= left_at + 1


@pytest.mark.rule("CFG-9")
async def test_the_lock_is_kept_while_open_posts_finish() -> None:
    sender = FakeSender(takes=100)
    server = LockServer(TTL)
    async with router(server, sender=sender) as one:
        await one.rig.publish(*grouped("a"))
        await asyncio.sleep(1)
        one.standby.stop()
        await shut_down(one.rig.manager, 200)

        assert one.ended == {Fate.DELIVERED: 1}
        assert server.refreshes[-1] == 100


@pytest.mark.rule("CFG-9")
async def test_a_router_that_ends_does_not_take_the_lock_again() -> None:
    sender = FakeSender(takes=100)
    async with router(LockServer(TTL), sender=sender) as one:
        await one.rig.publish(*grouped("a"))
        await asyncio.sleep(1)
        one.standby.stop()
        one.server.owner = "other"
        await shut_down(one.rig.manager, 200)
        one.server.owner = None
        await asyncio.sleep(100)

        assert one.roles == [(0, True), (10, False)]
        assert sender.ids == ["a"]


@pytest.mark.rule("CFG-9")
async def test_a_router_ends_although_the_locks_client_swallows_the_cancellation() -> None:
    """As `asyncio.wait_for` does before Python 3.12, if its result comes at the same instant."""
    async with router(LockServer(TTL, takes=0.5, swallows=True)) as one:
        await asyncio.sleep(10.2)  # it is being refreshed
        one.standby.stop()
        async with asyncio.timeout(5):
            await one.standby.close()

        assert one.server.refreshes[1:] == [10]
        assert one.server.owner is None


@pytest.mark.rule("CFG-9")
async def test_a_standby_that_ends_asks_no_more() -> None:
    async with router(held_by_another(ttl=10.0)) as one:
        await asyncio.sleep(1)
        one.standby.stop()
        await asyncio.sleep(20)
        await one.standby.close()

        assert one.roles == []
        assert one.server.owner == "other"


@pytest.mark.rule("CFG-9")
async def test_a_router_that_ends_before_it_began_has_nothing_to_leave() -> None:
    server = LockServer(TTL)
    server.fail()
    async with running(queues=(), leadership=Leadership(now)) as rig:
        standby = Standby(
            FakeLock(server, "one"),
            rig.manager,
            rig.alerts,
            instance="one",
            ttl=TTL,
            wall=now,
            on_change=lambda _: None,
        )
        standby.stop()
        await standby.close()

        assert rig.warnings == []


# Configuration.


@pytest.mark.rule("CFG-9")
async def test_a_sync_reaches_the_primary_at_once_and_a_standby_when_it_takes_over() -> None:
    async with router(held_by_another()) as one:
        await one.standby.apply(RoutingConfig((QUEUE,), (pool("P"), pool("Q"))))
        await asyncio.sleep(1)
        before = set(one.rig.manager.pools)
        await asyncio.sleep(TTL)
        then = set(one.rig.manager.pools)
        await one.standby.apply(RoutingConfig((QUEUE,), (pool("R"),)))

        assert (before, then) == (set(), {"P", "Q"})
        assert set(one.rig.manager.pools) == {"R"}


@pytest.mark.rule("CFG-9")
async def test_a_router_without_others_is_the_primary_for_as_long_as_it_runs() -> None:
    async with running(queues=()) as rig:
        alone = Alone(rig.manager, "one")
        alone.start(rig.tasks)
        await alone.apply(RoutingConfig((QUEUE,), (pool("P"),)))
        await rig.publish(*grouped("a"))
        await asyncio.sleep(1000)
        alone.stop()
        await alone.close()
        status = alone.status()
        may_publish = alone.may_publish("q")

        assert (status.enabled, status.instance, status.primary) == (False, "one", True)
        assert may_publish
        assert rig.sender.ids == ["a"]
