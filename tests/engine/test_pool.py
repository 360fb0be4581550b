"""A pool: capacity, permits, groups, priorities, dispatch modes, and tasks that die."""

import asyncio

import pytest

from router.core.history import Fate
from router.ports import Traits
from tests.support.fakes import REFUSED, FakeSender
from tests.support.faults import Scripted, ScriptedQueue, handed
from tests.support.rig import FREE_QUEUE, body, grouped, pool, running

pytestmark = pytest.mark.anyio


def workers() -> int:
    return sum(task.get_name() == "worker" for task in asyncio.all_tasks())


@pytest.mark.rule("POOL-1")
@pytest.mark.parametrize(("concurrency", "capacity"), [(1, 50), (2, 50), (3, 60), (100, 2000)])
async def test_the_capacity_is_twenty_per_worker_and_never_below_fifty(
    concurrency: int, capacity: int
) -> None:
    async with running(pool(concurrency=concurrency)) as rig:
        assert rig.pool().capacity == capacity


@pytest.mark.rule("POOL-1", "P4")
async def test_what_has_an_open_post_does_not_count_and_all_else_does() -> None:
    async with running(pool(concurrency=2), sender=FakeSender(takes=1000)) as rig:
        await rig.publish(*grouped("x", group="x"), *grouped("y", group="y"))
        await asyncio.sleep(1)
        await rig.publish(*(body(str(n), poolCode="P", messageGroupId=str(n)) for n in range(200)))
        await asyncio.sleep(60)

        p = rig.pool()
        assert (p.queued, len(p.runner.requests), p.held) == (48, 2, 50)
        assert (p.capacity - p.queued, p.lasting_room, p.has_room) == (2, 0, False)


@pytest.mark.rule("POOL-1")
async def test_what_waits_for_its_next_try_counts() -> None:
    sender = FakeSender(takes=0.5)
    sender.script("a", REFUSED)
    async with running(pool(), sender=sender) as rig:
        await rig.publish(*grouped("a"))
        queued = []
        for _ in range(3):
            await asyncio.sleep(0.4)
            queued.append(rig.pool().queued)

        assert queued == [0, 1, 1]
        assert rig.pool().runner.pausing == 1


@pytest.mark.rule("POOL-1")
async def test_what_is_being_settled_counts() -> None:
    async with running(pool(), sender=FakeSender(takes=1)) as rig:
        await rig.publish(*grouped("a"))
        await asyncio.sleep(1.001)
        settling = rig.pool().queued
        await asyncio.sleep(0.002)

        assert (settling, rig.pool().queued) == (1, 0)


@pytest.mark.rule("POOL-1", "POOL-6")
async def test_the_capacity_follows_the_concurrency() -> None:
    async with running(pool(concurrency=1), sender=FakeSender(takes=1000)) as rig:
        await rig.publish(*(body(str(n), poolCode="P", messageGroupId=str(n)) for n in range(300)))
        await asyncio.sleep(60)
        was_full = not rig.pool().has_room
        await rig.apply(pool(concurrency=10))
        has_room = rig.pool().has_room
        await asyncio.sleep(60)

        assert (was_full, has_room) == (True, True)
        assert (rig.pool().queued, len(rig.pool().runner.requests)) == (190, 10)


@pytest.mark.rule("POOL-1")
async def test_consumers_are_woken_only_when_there_is_room_worth_fetching_for() -> None:
    sender = FakeSender(takes=1)
    async with running(pool(concurrency=1), sender=sender) as rig:
        await rig.publish(*(body(str(n), poolCode="P", messageGroupId=str(n)) for n in range(60)))
        seen = []
        for _ in range(14):
            seen.append(rig.pool().has_room)
            await asyncio.sleep(1)

        assert seen == [True] + [False] * 12 + [True]


@pytest.mark.rule("POOL-1", "ROUTE-5")
async def test_what_was_asked_for_fits_even_if_open_posts_end_meanwhile() -> None:
    queue = ScriptedQueue(lease_seconds=900, takes={"receive": 5, "ack": 10})
    bodies = [body(str(n), poolCode="P", messageGroupId=str(n)) for n in range(200)]
    sender = FakeSender(takes=1)
    async with running(pool(concurrency=2), sender=sender, brokers=Scripted(q=queue)) as rig:
        queue.hand_over(*(handed(each, n, str(n), lease=900) for n, each in enumerate(bodies)))
        await asyncio.sleep(800)

        assert queue.nacked == []
        assert len(queue.acked) == 200
        assert rig.codes == set()


@pytest.mark.rule("POOL-2", "P3")
async def test_a_group_is_served_by_one_task_at_a_time_and_an_idle_one_costs_nothing() -> None:
    async with running(pool(), sender=FakeSender(takes=2)) as rig:
        await asyncio.sleep(1)
        await rig.publish(*grouped("a", "b", "c"))
        await asyncio.sleep(3)
        while_serving = (workers(), len(rig.pool().lanes))
        await asyncio.sleep(10)

        assert rig.sender.sent == [(1, "a"), (3, "b"), (5, "c")]
        assert while_serving == (1, 1)
        assert (workers(), len(rig.pool().lanes)) == (1, 0)  # it waits for the work of any group


@pytest.mark.rule("POOL-2")
@pytest.mark.parametrize("offset", [-0.002, -0.001, 0.0, 0.001, 0.002, 0.003])
async def test_a_message_that_comes_as_its_group_falls_idle_is_served(offset: float) -> None:
    async with running(pool(), sender=FakeSender(takes=1), queues=[FREE_QUEUE]) as rig:
        await rig.publish(*grouped("a"), queue=FREE_QUEUE)
        await asyncio.sleep(1 + offset)
        await rig.publish(*grouped("b"), queue=FREE_QUEUE)
        await asyncio.sleep(10)

        assert rig.sender.sent == [(0, "a"), (max(1, 1 + offset), "b")]
        assert rig.is_empty


@pytest.mark.rule("POOL-2", "P5")
async def test_groups_take_turns_so_that_a_long_one_does_not_keep_the_others_waiting() -> None:
    async with running(pool(concurrency=1), sender=FakeSender(takes=1)) as rig:
        await rig.publish(*grouped("a", "b", "c"), *grouped("x", group="other"))
        await asyncio.sleep(10)

        assert rig.sender.ids == ["a", "x", "b", "c"]


@pytest.mark.rule("P5", "POOL-4")
async def test_a_slow_pool_does_not_slow_another() -> None:
    sender = FakeSender(takes_for={"slow": 500})
    async with running(pool("P", 1), pool("Q", 1), sender=sender) as rig:
        await rig.publish(*grouped("slow", "waits"), *grouped("a", "b", poolCode="Q"))
        await asyncio.sleep(10)

        assert rig.sender.sent == [(0, "slow"), (0, "a"), (1, "b")]


@pytest.mark.rule("POOL-3")
async def test_a_high_priority_message_goes_next_and_wakes_an_idle_group_at_once() -> None:
    async with running(pool(), sender=FakeSender(takes=2), queues=[FREE_QUEUE]) as rig:
        await rig.publish(*grouped("a", "b"), queue=FREE_QUEUE)
        await asyncio.sleep(1)
        await rig.publish(*grouped("H", highPriority=True), queue=FREE_QUEUE)
        await asyncio.sleep(99)
        await rig.publish(*grouped("I", highPriority=True), queue=FREE_QUEUE)
        await asyncio.sleep(10)

        assert rig.sender.sent == [(0, "a"), (2, "H"), (4, "b"), (100, "I")]


@pytest.mark.rule("POOL-3", "MED-2")
async def test_a_high_priority_message_does_not_pass_one_between_its_tries() -> None:
    sender = FakeSender(takes=1)
    sender.script("a", REFUSED)
    async with running(pool(), sender=sender, queues=[FREE_QUEUE]) as rig:
        await rig.publish(*grouped("a"), queue=FREE_QUEUE)
        await asyncio.sleep(0.5)
        await rig.publish(*grouped("H", highPriority=True), queue=FREE_QUEUE)
        await asyncio.sleep(10)

        assert rig.sender.sent == [(0, "a"), (2, "a"), (3, "H")]


@pytest.mark.rule("POOL-3", "FIFO-1")
async def test_a_high_priority_message_does_not_pass_one_that_came_back() -> None:
    sender = FakeSender(takes=1, takes_for={"long": 60})
    sender.script("a", REFUSED, REFUSED, REFUSED)
    async with running(pool(), sender=sender, queues=[FREE_QUEUE]) as rig:
        await rig.publish(*grouped("a"), queue=FREE_QUEUE)
        await asyncio.sleep(10)
        await rig.publish(*grouped("long"), queue=FREE_QUEUE)
        await asyncio.sleep(30)  # a comes back at 36
        await rig.publish(*grouped("H", highPriority=True), queue=FREE_QUEUE)
        await asyncio.sleep(60)

        assert rig.sender.sent[3:] == [(10, "long"), (70, "a"), (71, "H")]


@pytest.mark.rule("POOL-4")
async def test_a_message_that_waits_for_the_rate_holds_no_permit() -> None:
    async with running(pool(concurrency=1, rate_per_minute=1)) as rig:
        await rig.publish(*grouped("a", "b"))
        await asyncio.sleep(30)

        assert rig.sender.sent == [(0, "a")]
        assert rig.pool().waits_for_rate
        assert rig.pool().permits.out == 0


@pytest.mark.rule("POOL-4", "P5")
async def test_no_more_at_once_than_the_concurrency() -> None:
    async with running(pool(concurrency=3), sender=FakeSender(takes=1)) as rig:
        await rig.publish(*(body(str(n), poolCode="P", messageGroupId=str(n)) for n in range(9)))
        await asyncio.sleep(30)

        assert [at for at, _ in rig.sender.sent] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
        assert rig.sender.most_open == 3
        assert rig.pool().permits.out == 0


@pytest.mark.rule("POOL-5", "P5", "BRK-4")
async def test_a_bug_met_by_one_message_returns_it_and_its_batch_and_the_group_goes_on() -> None:
    sender = FakeSender(takes=1)
    sender.script("a", RuntimeError("a bug"))
    queue = ScriptedQueue(holds_groups=False, lease_seconds=60, traits=Traits())
    first, second, third = grouped("a", "b", "c")
    async with running(pool(), sender=sender, brokers=Scripted(q=queue)) as rig:
        queue.hand_over(handed(first, 1, "1", lease=60), handed(second, 2, "2", lease=60))
        await asyncio.sleep(0.5)
        queue.hand_over(handed(third, 3, "3", lease=60))
        await asyncio.sleep(60)

        assert queue.nacked == [(1, 1, 30), (1, 2, 30)]
        assert rig.sender.sent == [(0, "a"), (1, "c")]
        assert rig.codes == {
            "PROCESSING",
            "GROUP_THREAD_EXIT_WITH_MESSAGES",
            "GROUP_THREAD_RESTART",
        }
        assert {notice.source for notice in rig.warnings} == {"ProcessPool:P"}
        assert rig.pool().permits.out == 0


@pytest.mark.rule("POOL-5")
async def test_a_bug_in_a_group_with_nothing_left_needs_no_restart() -> None:
    sender = FakeSender(takes=1)
    sender.script("a", RuntimeError("a bug"))
    async with running(pool(), sender=sender) as rig:
        await rig.publish(*grouped("a", "b"))
        await asyncio.sleep(60)

        assert rig.sender.sent == [(0, "a"), (31, "a"), (32, "b")]
        assert rig.codes == {"PROCESSING"}


@pytest.mark.rule("POOL-6")
async def test_more_concurrency_takes_effect_at_once() -> None:
    async with running(pool(concurrency=1), sender=FakeSender(takes=10)) as rig:
        await rig.publish(*(body(str(n), poolCode="P", messageGroupId=str(n)) for n in range(4)))
        await asyncio.sleep(3)
        await rig.apply(pool(concurrency=3))
        await asyncio.sleep(60)

        assert [at for at, _ in rig.sender.sent] == [0, 3, 3, 10]


@pytest.mark.rule("POOL-6")
async def test_less_concurrency_holds_for_new_work_and_lets_running_deliveries_finish() -> None:
    async with running(pool(concurrency=3), sender=FakeSender(takes=10)) as rig:
        await rig.publish(*(body(str(n), poolCode="P", messageGroupId=str(n)) for n in range(5)))
        await asyncio.sleep(3)
        await rig.apply(pool(concurrency=1))
        await asyncio.sleep(60)

        assert [at for at, _ in rig.sender.sent] == [0, 0, 0, 10, 20]
        assert rig.manager.registry.ledger.ended[Fate.DELIVERED] == 5


@pytest.mark.rule("POOL-7")
async def test_next_on_error_keeps_the_order_and_passes_a_failure_over() -> None:
    sender = FakeSender(takes=1)
    sender.script("a", REFUSED, REFUSED, REFUSED)
    async with running(pool(), sender=sender) as rig:
        await rig.publish(*grouped("a", "b", "c", dispatchMode="NEXT_ON_ERROR"))
        await asyncio.sleep(30)

        assert rig.sender.sent[:3] == [(0, "a"), (2, "a"), (5, "a")]
        assert rig.sender.sent[3:] == [(6, "b"), (7, "c")]
        assert rig.witness.nacks == [(6, "a", 30)]


@pytest.mark.rule("POOL-7")
async def test_immediate_messages_have_no_order_and_share_the_concurrency() -> None:
    async with running(pool(concurrency=2), sender=FakeSender(takes=1)) as rig:
        await rig.publish(*grouped("a", "b", "c", dispatchMode="IMMEDIATE"))
        await asyncio.sleep(30)

        assert rig.sender.sent == [(0, "a"), (0, "b"), (1, "c")]
        assert len(rig.pool().lanes) == 0


@pytest.mark.rule("POOL-7", "FIFO-1")
async def test_a_failed_immediate_message_holds_nothing_back() -> None:
    sender = FakeSender(takes=1)
    sender.script("a", REFUSED, REFUSED, REFUSED)
    async with running(pool(concurrency=1), sender=sender) as rig:
        await rig.publish(*grouped("a", "b", dispatchMode="IMMEDIATE"))
        await asyncio.sleep(20)

        assert rig.witness.nacks == [(6, "a", 30)]
        assert (1, "b") in rig.sender.sent


@pytest.mark.rule("POOL-7")
async def test_without_a_group_id_messages_share_one_group() -> None:
    async with running(pool(), sender=FakeSender(takes=1)) as rig:
        await rig.publish(body("a", poolCode="P"), body("b", poolCode="P", messageGroupId=" "))
        await asyncio.sleep(30)

        assert rig.sender.sent == [(0, "a"), (1, "b")]


@pytest.mark.rule("POOL-7")
async def test_a_pool_may_send_messages_without_a_group_id_side_by_side() -> None:
    async with running(pool(parallel_ungrouped=True), sender=FakeSender(takes=1)) as rig:
        await rig.publish(body("a", poolCode="P"), body("b", poolCode="P"), *grouped("c", "d"))
        await asyncio.sleep(30)

        assert rig.sender.sent == [(0, "a"), (0, "b"), (0, "c"), (1, "d")]


@pytest.mark.rule("P2", "BRK-5")
async def test_nothing_is_sent_on_a_lost_lease_and_what_is_behind_it_goes_back() -> None:
    sender = FakeSender(takes=1, takes_for={"a": 30})
    async with running(pool(), sender=sender, queues=[FREE_QUEUE]) as rig:
        await rig.publish(*grouped("a", "b", "c", "d"), queue=FREE_QUEUE)
        await asyncio.sleep(29)
        for job in rig.manager.registry.tracker:
            if job.message.id in "bc":
                job.lease_until = 29.0
        await asyncio.sleep(2)

        assert rig.sender.sent == [(0, "a"), (30, "d")]
        assert rig.witness.nacks == [(30, "d", 0)]
        assert rig.manager.registry.ledger.ended[Fate.FORFEITED] == 2
