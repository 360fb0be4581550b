"""Several routers work, each on the queues whose leases it holds (CFG-10)."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from router.brokers import BrokerRegistry
from router.brokers.memory import BROKER
from router.core.broker import BrokerFacts, always
from router.core.config import OnFailure, Ordering, QueueConfig, RoutingConfig, TargetConfig
from router.core.history import Fate
from router.core.outcome import Reply
from router.engine.leases import QueueLeases
from router.engine.transfer import OrderStore
from router.ports import Brokers, Conflict, Disconnected, Unknown
from tests.support.fakes import FakeSender
from tests.support.faults import Scripted, ScriptedQueue, handed
from tests.support.locks import FakeLock, LockServer
from tests.support.rig import Rig, grouped, middle, pool, running
from tests.support.virtual_time import now

pytestmark = pytest.mark.anyio

TTL = 30.0
ONE_AT_ONCE = TargetConfig(name="t", match="http://target.test:80", concurrency=1)
WALL = 1000.0


def free(name: str, **fields: object) -> QueueConfig:
    """Return a queue whose broker does not hold groups back."""
    uri = f"memory://{name}?groups=free"
    return QueueConfig(name=name, uri=uri, broker=BROKER, **fields)  # type: ignore[arg-type]


def free_queues(count: int) -> list[QueueConfig]:
    return [free(f"q{n}") for n in range(count)]


@dataclass
class LeaseServer:
    """A lock for each queue."""

    ttl: float = TTL
    locks: dict[str, LockServer] = field(default_factory=dict)

    def of(self, queue: str) -> LockServer:
        return self.locks.setdefault(queue, LockServer(self.ttl))

    def holders(self) -> list[str | None]:
        return [None if each.is_free else each.owner for _, each in sorted(self.locks.items())]


@dataclass
class RouterLocks:
    server: LeaseServer
    name: str

    def lock(self, name: str) -> FakeLock:
        return FakeLock(self.server.of(name), self.name)


@dataclass
class LeasingRouter:
    name: str
    rig: Rig
    leases: QueueLeases

    @property
    def held(self) -> list[str]:
        return sorted(self.rig.manager.consumers)

    async def apply(self, *queues: QueueConfig) -> None:
        await self.leases.apply(RoutingConfig(queues, (pool("P"),)))

    def phase_of(self, queue: str) -> str:
        states = self.leases.status().leases or ()
        return next(each.phase for each in states if each.queue == queue)


@asynccontextmanager
async def router(
    server: LeaseServer,
    name: str,
    queues: Sequence[QueueConfig],
    *,
    brokers: Brokers | None = None,
    sender: FakeSender | None = None,
    order: OrderStore | None = None,
) -> AsyncIterator[LeasingRouter]:
    async with running(queues=(), brokers=brokers, sender=sender, order=order) as rig:
        leases = QueueLeases(
            RouterLocks(server, name),
            rig.manager,
            rig.alerts,
            instance=name,
            ttl=server.ttl,
            wall=lambda: WALL + now(),
            now=now,
            jitter=middle,
        )
        one = LeasingRouter(name, rig, leases)
        await one.apply(*queues)
        leases.start(rig.tasks)
        try:
            yield one
        finally:
            leases.stop()
            rig.manager.stop()
            await leases.close()


@asynccontextmanager
async def routers(
    server: LeaseServer, count: int, queues: Sequence[QueueConfig]
) -> AsyncIterator[list[LeasingRouter]]:
    async with AsyncExitStack() as stack:
        brokers = await stack.enter_async_context(BrokerRegistry(worker_id="t", dedup_window=300))
        yield [
            await stack.enter_async_context(router(server, f"r{n}", queues, brokers=brokers))
            for n in range(count)
        ]


# Taking.


@pytest.mark.rule("CFG-10")
async def test_routers_that_start_together_share_the_queues_evenly() -> None:
    async with routers(LeaseServer(), 3, free_queues(12)) as several:
        await asyncio.sleep(30)
        held = [each.held for each in several]

    assert [len(each) for each in held] == [4, 4, 4]
    assert sorted(name for names in held for name in names) == sorted(
        each.name for each in free_queues(12)
    )


@pytest.mark.rule("CFG-10")
async def test_one_router_alone_takes_all_of_them_the_more_slowly_the_more_it_has() -> None:
    async with router(LeaseServer(), "one", free_queues(4)) as one:
        taken = []
        for seconds in (0.4, 0.2, 1.3, 0.2, 2.3, 0.2, 3.3, 0.2):
            await asyncio.sleep(seconds)
            taken.append(len(one.held))

    # After 0.5, 1.5, 2.5 and 3.5 s more.
    assert taken == [0, 1, 1, 2, 2, 3, 3, 4]


@pytest.mark.rule("CFG-10")
async def test_the_queues_of_a_router_that_died_go_to_the_others_after_the_ttl() -> None:
    server = LeaseServer()
    queues = free_queues(6)
    for queue in queues[:3]:
        dead = server.of(queue.name)
        dead.owner, dead.fence = "dead", 7
    async with routers(server, 2, queues) as several:
        await asyncio.sleep(29.9)
        before = sum(len(each.held) for each in several)
        await asyncio.sleep(25)
        after = [len(each.held) for each in several]

    assert before == 3
    assert after == [3, 3]


@pytest.mark.rule("CFG-10", "P3")
async def test_a_queue_whose_broker_holds_groups_is_received_by_all() -> None:
    shared = QueueConfig(name="shared", uri="memory://shared", broker=BROKER)
    async with routers(LeaseServer(), 2, [shared, free("q")]) as several:
        await asyncio.sleep(5)
        held = [each.held for each in several]

    assert sorted(held) == [["q", "shared"], ["shared"]]


@pytest.mark.rule("CFG-10")
async def test_no_router_consumes_a_queue_without_its_lease() -> None:
    server = LeaseServer()
    server.of("q").fail()
    async with router(server, "one", [free("q")]) as one:
        await asyncio.sleep(20)
        away = (one.held, one.rig.codes)
        server.of("q").recover()
        await asyncio.sleep(11)

        assert away == ([], {"STANDBY_LOCK"})
        assert one.held == ["q"]


# Keeping and losing.


@pytest.mark.rule("CFG-10")
async def test_a_lease_is_refreshed_every_third_of_its_ttl() -> None:
    server = LeaseServer()
    async with router(server, "one", [free("q")]) as one:
        await asyncio.sleep(65)

        assert one.held == ["q"]
        assert server.of("q").refreshes == [0.5 + 10 * n for n in range(7)]


@pytest.mark.rule("CFG-10", "P2")
async def test_a_router_that_loses_a_lease_sends_and_settles_nothing_more_of_that_queue() -> None:
    server = LeaseServer()
    sender = FakeSender(takes=15)
    shared = QueueConfig(name="shared", uri="memory://shared", broker=BROKER)
    async with router(server, "one", [free("q"), shared], sender=sender) as one:
        await asyncio.sleep(1)
        await one.rig.publish(*grouped("a", "b"), queue=free("q"))
        await one.rig.publish(*grouped("x", group="h"), queue=shared)
        await asyncio.sleep(1)
        server.of("q").owner = "other"
        server.of("q").refresh()
        await asyncio.sleep(20)
        ended = dict(one.rig.manager.registry.ledger.ended)

        assert sorted(sender.ids) == ["a", "x"]
        assert ended[Fate.DELIVERED] == 1  # x; a was cut, b not sent
        assert ended[Fate.FORFEITED] == 2
        assert one.held == ["shared"]
        assert one.phase_of("q") == "WAITING"
        assert "STANDBY_LOCK" in one.rig.codes


@pytest.mark.rule("CFG-10", "GATE-5")
@pytest.mark.parametrize(
    ("how", "after", "fate"),
    [
        pytest.param("lost", 10.0, Fate.FORFEITED, id="lost"),
        pytest.param("released", 10.0, Fate.RETURNED, id="released"),
        pytest.param("released", 1.0, Fate.RETURNED, id="released-before-it-waits"),
    ],
)
async def test_what_waits_for_a_place_at_its_target_goes_back_when_a_lease_ends(
    how: str, after: float, fate: Fate
) -> None:
    server = LeaseServer()
    sender = FakeSender(takes_for={"x": 1000.0})
    sender.script("a", Reply(500))
    shared = QueueConfig(name="shared", uri="memory://shared", broker=BROKER)
    async with router(server, "one", [free("q"), shared], sender=sender) as one:
        config = RoutingConfig((free("q"), shared), (pool("P"),), targets=(ONE_AT_ONCE,))
        await one.leases.apply(config)
        await asyncio.sleep(1)
        await one.rig.publish(*grouped("a"), queue=free("q"))
        await asyncio.sleep(0.5)
        await one.rig.publish(*grouped("x", group="h"), queue=shared)  # takes the only place
        await asyncio.sleep(after)
        at_gate = one.rig.pool().runner.at_gate
        assert [job.message.id for job in at_gate] == (["a"] if after == 10 else [])
        stopping = one.rig.manager.consumers["q"]
        if how == "lost":
            server.of("q").owner = "other"
            server.of("q").refresh()
        else:
            one.leases.release("q")
        await asyncio.sleep(10)

        assert stopping.is_stopped
        assert sender.ids == ["a", "x"]
        assert one.rig.manager.registry.ledger.ended[fate] == 1


@pytest.mark.rule("CFG-10")
async def test_a_connection_is_closed_when_its_lease_has_ended_whatever_still_waits() -> None:
    server = LeaseServer()
    sender = FakeSender(takes_for={"x": 1000.0})
    sender.script("a", Reply(500))
    shared = QueueConfig(name="shared", uri="memory://shared", broker=BROKER)
    async with router(server, "one", [free("q"), shared], sender=sender) as one:
        await one.leases.apply(RoutingConfig((free("q"), shared), (pool("P", 1),)))
        await asyncio.sleep(1)
        await one.rig.publish(*grouped("a"), queue=free("q"))
        await asyncio.sleep(1.5)
        await one.rig.publish(*grouped("x", group="h"), queue=shared)  # takes the only worker
        await asyncio.sleep(5)
        stopping = one.rig.manager.consumers["q"]
        server.of("q").owner = "other"
        server.of("q").refresh()
        await asyncio.sleep(TTL + 10)

        assert stopping.is_stopped
        assert one.rig.manager.registry.ledger.ended[Fate.FORFEITED] == 1
        assert sender.ids == ["a", "x"]


@pytest.mark.rule("CFG-10", "ROUTE-5", "P4")
async def test_what_waits_for_room_takes_none_when_a_lease_is_lost_with_its_broker() -> None:
    server, sender = LeaseServer(), FakeSender(takes=100)
    queue, others = (ScriptedQueue(lease_seconds=100, holds_groups=False) for _ in range(2))
    brokers = Scripted(q=queue, other=others)
    other = QueueConfig(name="other", uri="memory://other", broker=BROKER)
    pools = pool("P", 1, take_ahead=1), pool("Q")  # Q has room, so there is a receive
    async with router(server, "one", [], brokers=brokers, sender=sender) as one:
        await one.leases.apply(RoutingConfig((free("q"), other), pools))
        await asyncio.sleep(2)
        for each in "abcdef":
            queue.hand_over(handed(grouped(each, group=each)[0], each, each, lease=1000))
        await asyncio.sleep(1)
        assert one.rig.manager.consumers["q"].flow.waiting == 4
        server.of("q").fail()
        for verb in ("open", "receive", "ack", "nack"):
            queue.failing[verb] = Disconnected("away")
        queue.hand_over(handed(grouped("last", poolCode="Q")[0], "last", "last", lease=1000))
        await asyncio.sleep(TTL + 10)
        for each in "xyz":  # the pool is full, and has room again
            others.hand_over(handed(grouped(each, group=each)[0], each, each, lease=1000))
        await asyncio.sleep(1000)

        assert sender.ids == ["a", "last", "x", "y", "z"]
        assert one.rig.pool().held == 0
        assert one.rig.manager.deps.look_ahead_bytes.used == 0


@pytest.mark.rule("CFG-10")
async def test_a_lease_that_cannot_be_refreshed_ends_the_work_in_time() -> None:
    server = LeaseServer()
    sender = FakeSender(takes=4)
    async with router(server, "one", [free("q")], sender=sender) as one:
        await asyncio.sleep(1)
        server.of("q").fail()
        await asyncio.sleep(16)
        await one.rig.publish(*grouped("a", "b"), queue=free("q"))
        await asyncio.sleep(20)
        ended = dict(one.rig.manager.registry.ledger.ended)

        # Refreshed at 0.5: no request starts after 20.5; the one of 17 ends at 21, and is settled.
        assert sender.sent == [(17, "a")]
        assert ended[Fate.DELIVERED] == 1
        assert one.held == []


@pytest.mark.rule("CFG-10")
async def test_a_configuration_that_comes_while_a_lease_ends_starts_nothing() -> None:
    server = LeaseServer()
    sender = FakeSender(takes=60)
    async with router(server, "one", [free("q")], sender=sender) as one:
        await asyncio.sleep(1)
        await one.rig.publish(*grouped("a"), queue=free("q"))
        await asyncio.sleep(4)
        server.of("q").fail()
        await asyncio.sleep(17)  # the lease ends at 30.5, and nothing is received from 20.5 on
        await one.apply(free("q", connections=2))
        await asyncio.sleep(1)

        assert one.held == []


# Giving back.


@pytest.mark.rule("CFG-10")
async def test_a_released_queue_is_drained_and_taken_by_another_router() -> None:
    server = LeaseServer()
    queue = free("q")
    async with AsyncExitStack() as stack:
        brokers = await stack.enter_async_context(BrokerRegistry(worker_id="t", dedup_window=300))
        slow = FakeSender(takes=5)
        one = await stack.enter_async_context(
            router(server, "one", [queue], brokers=brokers, sender=slow)
        )
        await asyncio.sleep(1)
        two = await stack.enter_async_context(router(server, "two", [queue], brokers=brokers))
        await one.rig.publish(*grouped("a", "b"), queue=queue)
        await asyncio.sleep(1)
        one.leases.release("q")
        one.leases.release("q")  # twice is once
        await asyncio.sleep(2)
        during = (one.phase_of("q"), one.held, two.held)
        await asyncio.sleep(15)

        assert during == ("DRAINING", [], [])
        assert (one.held, two.held) == ([], ["q"])
        assert slow.ids == ["a"]
        assert two.rig.sender.ids == ["b"]
        assert server.of("q").fence == 2
        with pytest.raises(Conflict):
            one.leases.release("q")
        with pytest.raises(Unknown):
            one.leases.release("unknown")


@pytest.mark.rule("CFG-10")
async def test_a_released_queue_that_no_other_takes_comes_back_after_the_ttl() -> None:
    async with router(LeaseServer(), "one", [free("q")]) as one:
        await asyncio.sleep(1)
        one.leases.release("q")
        await asyncio.sleep(29)
        before = one.held
        await asyncio.sleep(12)

        assert (before, one.held) == ([], ["q"])


@pytest.mark.rule("CFG-10")
async def test_a_lease_that_is_lost_while_its_queue_drains_is_over() -> None:
    server = LeaseServer()
    sender = FakeSender(takes=100)
    async with router(server, "one", [free("q")], sender=sender) as one:
        await asyncio.sleep(1)
        await one.rig.publish(*grouped("a"), queue=free("q"))
        await asyncio.sleep(1)
        one.leases.release("q")
        server.of("q").owner = "other"
        await asyncio.sleep(15)

        assert one.phase_of("q") == "WAITING"
        assert server.of("q").owner == "other"
        assert dict(one.rig.manager.registry.ledger.ended)[Fate.FORFEITED] == 1


@pytest.mark.rule("CFG-10", "CFG-6")
async def test_a_pool_that_drains_while_a_lease_is_lost_counts_no_message_twice() -> None:
    server = LeaseServer()
    sender = FakeSender(takes=100)
    async with router(server, "one", [free("q")], sender=sender) as one:
        await asyncio.sleep(1)
        await one.rig.publish(*grouped("a"), queue=free("q"))
        await asyncio.sleep(1)
        await one.leases.apply(RoutingConfig((free("q"),), (pool("Q"),)))
        (draining,) = one.rig.manager.draining_pools.values()
        await one.rig.publish(*grouped("b"), queue=free("q"))  # waits until its group is free
        await asyncio.sleep(1)
        assert draining.held == 2
        server.of("q").owner = "other"
        await asyncio.sleep(15)

        assert draining.held == 0


@pytest.mark.rule("CFG-10")
async def test_at_its_end_a_router_gives_all_its_leases_back() -> None:
    server = LeaseServer()
    async with router(server, "one", free_queues(2)):
        await asyncio.sleep(5)
        during = server.holders()

    assert during == ["one", "one"]
    assert server.holders() == [None, None]


# The configuration, schedules, what is shown.


@pytest.mark.rule("CFG-10", "CFG-7")
async def test_queues_come_and_go_with_the_configuration() -> None:
    server = LeaseServer()
    async with router(server, "one", free_queues(2)) as one:
        await asyncio.sleep(5)
        await one.apply(free("q0", connections=2), free("q9"))
        at_once = one.held
        await asyncio.sleep(15)

        assert at_once == ["q0"]
        assert one.held == ["q0", "q9"]
        assert [each.queue for each in one.leases.status().leases or ()] == ["q0", "q9"]
        assert server.of("q1").owner is None
        await one.apply(free("q0"))
        assert one.held == ["q0"]


@pytest.mark.rule("CFG-10")
async def test_a_queue_that_another_router_has_goes_with_the_configuration_too() -> None:
    server = LeaseServer()
    server.of("q").owner = "other"
    async with router(server, "one", [free("q")]) as one:
        await asyncio.sleep(1)
        await one.apply()

        assert one.leases.status().leases == ()


@pytest.mark.rule("CFG-10", "CMD-10")
async def test_the_holder_of_a_queue_publishes_its_schedules() -> None:
    server = LeaseServer()
    server.of("q1").owner = "other"
    shared = QueueConfig(name="shared", uri="memory://shared", broker=BROKER)
    async with router(server, "one", [*free_queues(2), shared]) as one:
        early = one.leases.may_publish("q0")
        await asyncio.sleep(5)

        assert not early
        assert [one.leases.may_publish(each) for each in ("q0", "q1", "shared")] == [
            True,
            False,
            True,
        ]


@pytest.mark.rule("CFG-10")
async def test_the_state_of_each_lease_is_known() -> None:
    server = LeaseServer()
    other = server.of("q1")
    other.owner, other.fence = "other", 7
    async with router(server, "one", free_queues(3)) as one:
        server.of("q2").fail()
        await asyncio.sleep(11)
        status = one.leases.status()

    found = {each.queue: each for each in status.leases or ()}
    assert (status.role, status.instance, status.primary) == ("ACTIVE", "one", True)
    assert (found["q0"].phase, found["q0"].holder, found["q0"].fence) == ("HELD", "one", 1)
    assert found["q0"].last_refresh == WALL + 10.5
    assert (found["q1"].phase, found["q1"].holder) == ("WAITING", "other")
    assert (found["q2"].phase, found["q2"].holder, found["q2"].last_refresh) == (
        "WAITING",
        None,
        None,
    )


@pytest.mark.rule("CFG-10", "ORD-4")
async def test_a_strict_queue_with_a_store_of_its_own_is_not_consumed() -> None:
    strict = free("q", ordering=Ordering.STRICT)
    blocking = free("b", ordering=Ordering.STRICT, on_failure=OnFailure.BLOCK)
    # Received by all: each would hold other groups back than the others do.
    fifo = BrokerFacts(name="F", schemes=("f",), holds_groups=always)
    holding = QueueConfig(
        name="f", uri="memory://f", broker=fifo, ordering=Ordering.STRICT, holds_letters=True
    )
    kept = replace(holding, name="k", uri="memory://k", broker=BROKER)  # a work queue keeps them
    async with router(LeaseServer(), "one", [strict, blocking, holding, kept]) as one:
        await asyncio.sleep(5)
        notice = next(each for each in one.rig.warnings if each.code == "QUEUE_VALIDATION")

        assert one.held == ["b", "k"]
        assert not one.leases.may_publish("q")
        assert not one.leases.may_publish("f")
        assert "Set MESSAGE_ROUTER_ORDER_STORE" in notice.message


@pytest.mark.rule("CFG-10")
async def test_a_lease_that_ends_between_two_slices_of_a_document_starts_nothing() -> None:
    async with router(LeaseServer(), "one", [free("q")]) as one:
        await asyncio.sleep(1)
        one.rig.manager.leadership_of = lambda _: None
        one.rig.manager.restart(one.rig.manager.consumers["q"])

        assert one.held == []
        one.rig.manager.take_queue("unknown")
        assert one.held == []


@pytest.mark.rule("CFG-10")
async def test_a_queue_that_leaves_the_configuration_while_it_drains_is_forgotten() -> None:
    sender = FakeSender(takes=5)
    async with router(LeaseServer(), "one", [free("q")], sender=sender) as one:
        await asyncio.sleep(1)
        await one.rig.publish(*grouped("a"), queue=free("q"))
        await asyncio.sleep(1)
        one.leases.release("q")
        await one.apply()
        during = one.phase_of("q")
        await asyncio.sleep(10)

        assert during == "DRAINING"
        assert one.leases.status().leases == ()
        assert one.rig.codes == set()


@pytest.mark.rule("CFG-10")
async def test_a_queue_that_leaves_the_configuration_while_it_is_asked_for_is_not_taken() -> None:
    server = LeaseServer()
    server.of("q").takes = 2
    async with router(server, "one", [free("q")]) as one:
        await asyncio.sleep(1)
        await one.apply()
        await asyncio.sleep(5)

        assert one.leases.status().leases == ()
        assert one.held == []


@pytest.mark.rule("CFG-10")
async def test_a_router_that_never_started_ends_without_a_lease() -> None:
    server = LeaseServer()
    async with running(queues=()) as rig:
        leases = QueueLeases(
            RouterLocks(server, "one"),
            rig.manager,
            rig.alerts,
            instance="one",
            ttl=TTL,
            wall=now,
            now=now,
            jitter=middle,
        )
        leases.stop()
        await leases.close()

    assert server.locks == {}
