"""A pool holds what it can deliver soon, and no more (POOL-1)."""

import asyncio

import pytest

from router.brokers import BrokerRegistry
from tests.support.fakes import FakeSender
from tests.support.faults import Scripted, ScriptedQueue, handed
from tests.support.rig import body, grouped, pool, running
from tests.support.virtual_time import now

pytestmark = pytest.mark.anyio


def bodies(count: int, prefix: str = "m", **fields: object) -> list[bytes]:
    return [
        body(f"{prefix}{n}", poolCode="P", messageGroupId=f"{prefix}{n}", **fields)
        for n in range(count)
    ]


@pytest.mark.rule("POOL-1")
async def test_two_routers_share_thirty_tasks_of_a_second() -> None:
    config, sender = pool("P", 1, take_ahead=None), FakeSender(takes=1)
    async with (
        BrokerRegistry(worker_id="test", dedup_window=300) as shared,
        running(config, sender=sender, brokers=shared) as one,
        running(config, sender=sender, brokers=shared),
    ):
        await one.publish(*bodies(30))
        await asyncio.sleep(40)

    assert len(sender.sent) == 30
    assert max(at for at, _ in sender.sent) + 1 <= 17


@pytest.mark.rule("POOL-1", "WQ-1")
async def test_a_message_of_the_highest_priority_waits_for_one_take_ahead_at_most() -> None:
    sender = FakeSender(takes=1)
    async with running(pool("P", 1, take_ahead=None), sender=sender) as rig:
        await rig.publish(*bodies(100))
        await asyncio.sleep(20)
        published = now()
        await rig.publish(*bodies(1, "urgent", highPriority=True))
        await asyncio.sleep(20)

        (started,) = [at for at, each in sender.sent if each == "urgent0"]
        assert started - published <= 1 + 10  # one in delivery, ten that were taken ahead


@pytest.mark.rule("POOL-1", "P5")
async def test_one_hot_group_idles_no_other_worker() -> None:
    sender = FakeSender(takes=30)
    async with running(pool("P", 10, take_ahead=None), sender=sender) as rig:
        await rig.publish(*grouped(*(f"hot{n}" for n in range(1000))))
        await rig.publish(*bodies(9))
        await asyncio.sleep(2)

        assert sender.open == 10


@pytest.mark.rule("POOL-1")
@pytest.mark.parametrize(
    ("take_ahead", "held"),
    [(0, 3), (1, 3 + 3), (4, 3 + 12), (None, 3 + 6)],
)
async def test_a_pool_takes_no_more_than_it_is_told_to(take_ahead: int | None, held: int) -> None:
    queue, sender = ScriptedQueue(lease_seconds=1000), FakeSender(takes=500)
    config = pool("P", 3, take_ahead=take_ahead)
    async with running(config, sender=sender, brokers=Scripted(q=queue)) as rig:
        for n, each in enumerate(bodies(40)):
            queue.hand_over(handed(each, n, str(n), lease=1000))
        await asyncio.sleep(5)

        assert rig.pool().held == held
        assert rig.pool().has_room is False


@pytest.mark.rule("POOL-1")
@pytest.mark.parametrize(("take_ahead", "brought"), [(0, 3), (2, 9), (None, 40)])
async def test_a_first_receive_leaves_the_rest_to_others_if_all_pools_say_how_much_they_take(
    take_ahead: int | None, brought: int
) -> None:
    queue, sender = ScriptedQueue(lease_seconds=1000), FakeSender(takes=500)
    config = pool("P", 3, take_ahead=take_ahead)
    async with running(config, sender=sender, brokers=Scripted(q=queue)) as rig:
        for n, each in enumerate(bodies(40)):
            queue.hand_over(handed(each, n, str(n), lease=1000))
        await asyncio.sleep(100)

        assert 40 - len(queue.ready) == brought
        assert rig.manager.registry.held == brought
        assert ("QUEUE_FULL" in rig.codes) is (take_ahead is None)


@pytest.mark.rule("POOL-1")
async def test_a_pool_without_take_ahead_never_leaves_a_worker_idle() -> None:
    sender = FakeSender(takes=1)
    async with running(pool("P", 4, take_ahead=0), sender=sender) as rig:
        await rig.publish(*bodies(40))
        await asyncio.sleep(9.5)

        assert len(sender.sent) == 40


@pytest.mark.rule("POOL-1")
async def test_a_rate_limit_bounds_what_a_pool_takes() -> None:
    sender = FakeSender(takes=0.1)
    config = pool("P", 10, take_ahead=None, rate_per_minute=120, burst=1)
    async with running(config, sender=sender) as rig:
        await rig.publish(*bodies(300))
        await asyncio.sleep(60)

        assert rig.pool().held <= 120 / 6 + 10
        assert len(sender.sent) == pytest.approx(120, abs=2)


@pytest.mark.rule("POOL-1", "BRK-1")
async def test_the_first_receive_asks_for_no_more_than_the_largest_room() -> None:
    async with running(pool(concurrency=10, take_ahead=0)) as rig:
        await rig.publish(*(body(f"m{n}", messageGroupId=f"g{n}", poolCode="P") for n in range(50)))
        await asyncio.sleep(10)

        assert len(rig.witness.acks) == 50
        assert rig.witness.nacks == []
        assert rig.codes == set()
