"""Scheduled work, run by hand, and its schedule (OPS-1, TRK-1)."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from msgspec.structs import replace

from router.core.warnings import Severity
from router.engine.chores import Chores
from router.ports import Depth, Disconnected
from tests.support.fakes import FakeSender
from tests.support.faults import Scripted, ScriptedQueue, handed
from tests.support.rig import QUEUE, Rig, body, pool, running

pytestmark = pytest.mark.anyio


def chores_of(rig: Rig) -> Chores:
    return Chores(rig.manager, rig.breakers, rig.alerts)


@asynccontextmanager
async def on_schedule(rig: Rig) -> AsyncIterator[None]:
    """Run the chores at their intervals for as long as the block does."""
    scheduled = chores_of(rig).start(rig.tasks)
    yield
    for task in scheduled:
        task.cancel()


def codes(rig: Rig) -> list[tuple[str, Severity]]:
    return [(w.code, w.severity) for w in reversed(rig.warnings)]


@pytest.mark.rule("OPS-1")
async def test_a_silent_consumer_is_replaced_and_messages_flow_again() -> None:
    queue = ScriptedQueue(is_deaf=True, lease_seconds=30)
    async with running(pool("P"), brokers=Scripted(q=queue)) as rig:
        async with on_schedule(rig):
            await asyncio.sleep(100)
            queue.is_deaf = False
            await asyncio.sleep(25)
            queue.hand_over(handed(body("a"), "h", "1", lease=30))
            await asyncio.sleep(30)

        assert codes(rig) == [("CONSUMER_RESTART", Severity.WARN)]
        assert rig.manager.consumers["q"].restarts == 1
        assert rig.sender.ids == ["a"]


@pytest.mark.rule("OPS-1")
async def test_a_restart_that_did_not_help_is_critical() -> None:
    queue = ScriptedQueue(is_deaf=True)
    async with running(pool("P"), brokers=Scripted(q=queue)) as rig:
        async with on_schedule(rig):
            await asyncio.sleep(250)
        queue.is_deaf = False
        queue.changed.set()

        assert codes(rig) == [
            ("CONSUMER_RESTART", Severity.WARN),
            ("CONSUMER_RESTART_FAILED", Severity.CRITICAL),
        ]


@pytest.mark.rule("OPS-1", "P4")
async def test_receives_that_never_return_do_not_pile_up() -> None:
    queue = ScriptedQueue(is_deaf=True)
    async with running(pool("P"), brokers=Scripted(q=queue)) as rig:
        async with on_schedule(rig):
            await asyncio.sleep(3600)
        stopping = len(rig.manager.stopping_consumers)
        queue.is_deaf = False
        queue.changed.set()

        assert stopping <= 1


@pytest.mark.rule("OPS-1")
async def test_a_deaf_consumer_is_kept_as_long_as_it_has_something_to_settle() -> None:
    queue = ScriptedQueue(lease_seconds=30)
    async with running(pool("P"), sender=FakeSender(takes=200), brokers=Scripted(q=queue)) as rig:
        queue.hand_over(handed(body("a"), "h", "1", lease=30))
        await asyncio.sleep(1)
        queue.is_deaf = True
        async with on_schedule(rig):
            await asyncio.sleep(250)
        queue.is_deaf = False
        queue.changed.set()

        assert [handle for _, handle in queue.acked] == ["h"]
        assert rig.sender.ids == ["a"]


@pytest.mark.rule("OPS-1")
async def test_a_consumer_in_reconnect_backoff_is_not_restarted() -> None:
    queue = ScriptedQueue(failing={"receive": Disconnected("gone")})
    async with running(pool("P"), brokers=Scripted(q=queue)) as rig:
        async with on_schedule(rig):
            await asyncio.sleep(1000)

        assert rig.manager.consumers["q"].restarts == 0


@pytest.mark.rule("OPS-1")
async def test_drained_pools_stopped_consumers_and_idle_breakers_are_let_go_every_ten_seconds() -> (
    None
):
    async with running(pool("P"), pool("Q")) as rig:
        async with on_schedule(rig):
            await rig.publish(body("a", poolCode="P"))
            await asyncio.sleep(5)
            await rig.apply(pool("Q"), queues=())
            await asyncio.sleep(1)
            before = (len(rig.manager.draining_pools), len(rig.manager.stopping_consumers))
            await asyncio.sleep(5)
            after = (len(rig.manager.draining_pools), len(rig.manager.stopping_consumers))
            await asyncio.sleep(3700)

        assert (before, after) == ((1, 1), (0, 0))
        assert list(rig.breakers.all()) == []


@pytest.mark.rule("TRK-1")
async def test_more_messages_than_the_pools_can_hold_are_reported_as_a_leak() -> None:
    async with running(pool("P", 1), sender=FakeSender(takes=10_000)) as rig:
        await rig.publish(*(body(str(n), poolCode="P") for n in range(200)))
        await asyncio.sleep(60)
        await chores_of(rig).look_for_leaks()
        with_full_pools = list(rig.warnings)
        await rig.apply(queues=())
        rig.manager.draining_pools.clear()  # as if they were forgotten, and their messages not
        await chores_of(rig).look_for_leaks()
        within_a_batch = list(rig.warnings)
        rig.manager.stopping_consumers.clear()
        await chores_of(rig).look_for_leaks()

        assert (with_full_pools, within_a_batch) == ([], [])
        assert codes(rig) == [("PIPELINE_MAP_LEAK", Severity.WARN)]


@pytest.mark.rule("TRK-1")
async def test_draining_pools_count_in_the_search_for_leaks() -> None:
    async with running(pool("P", 10), sender=FakeSender(takes=100)) as rig:
        await rig.publish(*(body(str(n), poolCode="P", messageGroupId=str(n)) for n in range(10)))
        await asyncio.sleep(1)
        await rig.apply(queues=())
        rig.manager.stopping_consumers.clear()
        await chores_of(rig).look_for_leaks()

        assert len(rig.manager.registry.tracker) == 10
        assert rig.warnings == []


@pytest.mark.rule("OPS-1")
@pytest.mark.parametrize(
    ("waiting", "told"), [(1000, []), (1001, [("QUEUE_BACKLOG", Severity.WARN)])]
)
async def test_more_than_a_thousand_waiting_messages_are_a_backlog(
    waiting: int, told: list[tuple[str, Severity]]
) -> None:
    queue = ScriptedQueue(depth=Depth(waiting=waiting, in_flight=0))
    async with running(pool("P"), brokers=Scripted(q=queue)) as rig:
        chores = chores_of(rig)
        await asyncio.sleep(1)
        await chores.measure_queues()

        assert codes(rig) == told
        assert rig.manager.consumers["q"].last_depth == queue.depth


@pytest.mark.rule("OPS-1")
@pytest.mark.parametrize(
    ("depths", "grows"),
    [
        ([0, 100, 200, 300], True),
        ([0, 100, 200, 299], False),
        ([0, 100, 200], False),
        ([0, 500, 400, 500, 600], False),
        ([0, 0, 100, 200, 300], True),
    ],
)
async def test_a_queue_that_grew_by_a_hundred_three_times_running_is_reported(
    depths: list[int], grows: bool
) -> None:
    queue = ScriptedQueue()
    async with running(pool("P"), brokers=Scripted(q=queue)) as rig:
        chores = chores_of(rig)
        await asyncio.sleep(1)
        for depth in depths:
            queue.depth = Depth(waiting=depth, in_flight=0)
            await chores.measure_queues()

        assert ("QUEUE_GROWING" in rig.codes) is grows


@pytest.mark.rule("OPS-1")
async def test_the_depths_of_a_removed_queue_do_not_count_when_it_comes_back() -> None:
    queue = ScriptedQueue()
    async with running(pool("P"), brokers=Scripted(q=queue)) as rig:
        chores = chores_of(rig)
        await asyncio.sleep(1)
        for depth in (0, 100, 200):
            queue.depth = Depth(waiting=depth, in_flight=0)
            await chores.measure_queues()
        await rig.apply(pool("P"), queues=())
        await chores.measure_queues()
        await rig.apply(pool("P"))
        await asyncio.sleep(1)
        queue.depth = Depth(waiting=300, in_flight=0)
        await chores.measure_queues()

        assert rig.manager.consumers["q"].last_depth == queue.depth
        assert "QUEUE_GROWING" not in rig.codes


@pytest.mark.rule("OPS-1", "P5")
async def test_a_queue_that_cannot_be_measured_does_not_keep_the_others_from_it() -> None:
    queues = {
        "q": ScriptedQueue(failing={"depth": Disconnected("gone")}),
        "r": ScriptedQueue(failing={"open": Disconnected("gone")}),
        "s": ScriptedQueue(depth=Depth(waiting=7, in_flight=0)),
        "t": ScriptedQueue(),
    }
    configs = tuple(replace(QUEUE, name=name) for name in queues)
    async with running(pool("P"), brokers=Scripted(**queues), queues=configs) as rig:
        chores = chores_of(rig)
        await asyncio.sleep(1)
        await chores.measure_queues()
        seen = {name: each.last_depth for name, each in rig.manager.consumers.items()}
        await rig.apply(pool("P"))
        await chores.measure_queues()

        assert seen == {"q": None, "r": None, "s": queues["s"].depth, "t": None}


CHORES = {
    "restart_silent_consumers": 60,
    "forget_finished": 10,
    "look_for_leaks": 30,
    "measure_queues": 30,
    "nack_overdue": 60,
}


@pytest.mark.rule("OPS-1", "P5")
@pytest.mark.parametrize("name", CHORES)
async def test_a_bug_in_a_chore_ends_neither_it_nor_the_router(name: str) -> None:
    failed_at: list[float] = []

    async def broken() -> None:
        failed_at.append(asyncio.get_running_loop().time())
        raise RuntimeError("a bug")

    broken.__name__ = name
    async with running(pool("P")) as rig:
        start = asyncio.get_running_loop().time()
        chores = chores_of(rig)
        setattr(chores, name, broken)
        scheduled = chores.start(rig.tasks)
        await asyncio.sleep(125)

        assert not any(task.done() for task in scheduled)
        for task in scheduled:
            task.cancel()
    interval = CHORES[name]
    assert failed_at == [start + at for at in range(interval, 126, interval)]
