"""A pool that goes, and one that comes back before it is gone (CFG-6)."""

import asyncio

import pytest

from router.core.history import Fate, State
from router.core.outcome import Reply
from tests.support.fakes import OK, REFUSED, FakeSender
from tests.support.jobs import make_job
from tests.support.rig import FREE_QUEUE, Rig, body, grouped, pool, running

pytestmark = pytest.mark.anyio

DEFERRED = Reply(200, b'{"ack": false, "delaySeconds": 45}')
FREE = [FREE_QUEUE]


def nacked(rig: Rig) -> list[tuple[float, str, float]]:
    return rig.witness.nacks


@pytest.mark.rule("CFG-6")
async def test_a_message_without_an_open_post_goes_back_at_once_and_is_routed_again() -> None:
    async with running(
        pool(concurrency=1), pool("DEFAULT-POOL"), sender=FakeSender(takes=10)
    ) as rig:
        await rig.publish(*grouped("a"), *grouped("x", group="other"))
        await asyncio.sleep(3)
        await rig.apply(pool("DEFAULT-POOL"))
        await asyncio.sleep(20)

        assert nacked(rig) == [(3, "x", 0)]
        assert rig.sender.sent == [(0, "a"), (3, "x")]
        assert rig.manager.registry.ledger.ended[Fate.DELIVERED] == 2


@pytest.mark.rule("P3", "ROUTE-7")
@pytest.mark.parametrize("rate", [None, 60])
async def test_the_mates_of_an_open_post_go_back_after_it_and_in_order(rate: int | None) -> None:
    config = pool(rate_per_minute=rate)
    async with running(config, sender=FakeSender(takes=10), queues=FREE) as rig:
        await rig.publish(*grouped("a", "b", "c"), queue=FREE_QUEUE)
        await asyncio.sleep(3)
        await rig.apply(queues=FREE)
        await asyncio.sleep(60)

        assert nacked(rig) == [(10, "b", 0), (10, "c", 0)]
        assert rig.sender.sent == [(0, "a"), (10, "b"), (20, "c")]


@pytest.mark.rule("FIFO-1")
async def test_the_mates_of_an_open_post_that_fails_go_back_as_after_any_failure() -> None:
    sender = FakeSender(takes=10)
    sender.script("a", DEFERRED)
    async with running(pool(), sender=sender, queues=FREE) as rig:
        await rig.publish(*grouped("a", "b"), queue=FREE_QUEUE)
        await asyncio.sleep(3)
        await rig.apply(queues=FREE)
        await asyncio.sleep(20)

        assert nacked(rig) == [(10, "a", 45), (10, "b", 45)]


@pytest.mark.rule("MED-2")
async def test_a_pause_between_two_tries_ends_at_once() -> None:
    sender = FakeSender(takes=1, takes_for={"x": 100})
    sender.script("a", REFUSED)
    async with running(pool(concurrency=1), sender=sender, queues=FREE) as rig:
        await rig.publish(*grouped("a", "b"), queue=FREE_QUEUE)
        await rig.publish(*grouped("x", group="other"), queue=FREE_QUEUE)
        await asyncio.sleep(1.5)  # x has the permit
        await rig.apply(queues=FREE)
        await asyncio.sleep(0.1)

        assert nacked(rig) == [(1.5, "a", 0), (1.5, "b", 0)]
        assert rig.witness.tallies["a"].failures == 0
        assert rig.witness.tallies["a"].requests == 1


@pytest.mark.rule("MED-2")
async def test_what_waits_for_a_permit_for_its_next_try_goes_back() -> None:
    sender = FakeSender(takes=1, takes_for={"x": 100})
    sender.script("a", REFUSED)
    async with running(pool(concurrency=1), sender=sender, queues=FREE) as rig:
        await rig.publish(*grouped("a"), *grouped("x", group="other"), queue=FREE_QUEUE)
        await asyncio.sleep(5)
        p = rig.pool()
        await rig.apply(queues=FREE)
        await asyncio.sleep(0.1)

        assert nacked(rig) == [(5, "a", 0)]
        assert p.permits.out == 1


@pytest.mark.rule("MED-2")
async def test_an_open_post_that_fails_is_not_tried_again() -> None:
    sender = FakeSender(takes=10)
    sender.script("a", REFUSED, OK)
    async with running(pool(), sender=sender) as rig:
        await rig.publish(*grouped("a"))
        await asyncio.sleep(3)
        await rig.apply()
        await asyncio.sleep(30)

        assert rig.sender.sent == [(0, "a")]
        assert nacked(rig) == [(10, "a", 30)]
        assert rig.witness.tallies["a"].failures == 1


@pytest.mark.rule("CFG-6")
async def test_no_try_starts_even_of_a_message_that_was_about_to() -> None:
    async with running(pool(), sender=FakeSender(takes=10)) as rig:
        p = rig.pool()
        await rig.publish(*grouped("a"))
        while not p.held:  # noqa: ASYNC110  step by step, not to miss the one
            await asyncio.sleep(0)
        rig.manager.stop()  # in the very step in which it was submitted
        await asyncio.sleep(1)

        assert rig.sender.sent == []
        assert nacked(rig) == [(0, "a", 0)]


@pytest.mark.rule("CFG-6")
async def test_it_is_drained_when_the_last_open_post_is_settled() -> None:
    async with running(pool(), sender=FakeSender(takes=10)) as rig:
        p = rig.pool()
        await rig.publish(*grouped("a"))
        await asyncio.sleep(3)
        await rig.apply()
        drained = []
        for seconds in (0, 7, 0.001, 0.002):
            await asyncio.sleep(seconds)
            drained.append(p.is_drained)

        assert drained == [False, False, False, True]


@pytest.mark.rule("P3", "P2")
async def test_arrivals_for_a_group_that_it_still_holds_wait_for_it() -> None:
    async with running(pool(), sender=FakeSender(takes=10), queues=FREE) as rig:
        p = rig.pool()
        await rig.publish(*grouped("a"), queue=FREE_QUEUE)
        await asyncio.sleep(3)
        await rig.apply(queues=FREE)
        await rig.publish(*grouped("b", "c"), *grouped("x", group="other"), queue=FREE_QUEUE)
        await asyncio.sleep(60)

        assert rig.sender.sent == [(0, "a"), (3, "x"), (10, "b"), (20, "c")]
        assert rig.sender.most_in_group == 1
        assert nacked(rig) == []
        assert p.is_drained


@pytest.mark.rule("POOL-7")
async def test_arrivals_without_order_do_not_wait() -> None:
    async with running(pool(), sender=FakeSender(takes=10), queues=FREE) as rig:
        await rig.publish(body("a", poolCode="P"), queue=FREE_QUEUE)
        await asyncio.sleep(3)
        await rig.apply(queues=FREE)
        await rig.publish(body("i", poolCode="P", dispatchMode="IMMEDIATE"), queue=FREE_QUEUE)
        await asyncio.sleep(60)

        assert rig.sender.sent == [(0, "a"), (3, "i")]


@pytest.mark.rule("FIFO-1")
async def test_arrivals_that_waited_are_still_one_batch() -> None:
    sender = FakeSender(takes=10)
    sender.script("b", DEFERRED)
    async with running(pool(), sender=sender, queues=FREE) as rig:
        await rig.publish(*grouped("a"), queue=FREE_QUEUE)
        await asyncio.sleep(3)
        await rig.apply(queues=FREE)
        await rig.publish(*grouped("b", "c"), queue=FREE_QUEUE)
        await asyncio.sleep(30)

        assert rig.sender.sent == [(0, "a"), (10, "b")]
        assert nacked(rig) == [(20, "b", 45), (20, "c", 45)]


@pytest.mark.rule("P4", "POOL-1")
async def test_no_more_arrivals_wait_than_the_pool_has_room_for() -> None:
    async with running(pool(concurrency=1), sender=FakeSender(takes=1000), queues=FREE) as rig:
        p = rig.pool()
        await rig.publish(*grouped("a"), queue=FREE_QUEUE)
        await asyncio.sleep(3)
        await rig.apply(queues=FREE)
        await rig.publish(*grouped(*(str(n) for n in range(300))), queue=FREE_QUEUE)
        await asyncio.sleep(500)

        assert p.queued == 49  # and one with an open request
        assert rig.sender.sent == [(0, "a")]
        assert (
            len(rig.manager.registry.tracker) <= 50 + 1 + 50
        )  # one batch may wait at its consumer


class TestRevival:
    @pytest.mark.rule("CFG-6")
    async def test_a_code_that_returns_gets_its_pool_back(self) -> None:
        async with running(pool(), sender=FakeSender(takes=10)) as rig:
            p = rig.pool()
            await rig.publish(*grouped("a", "b"))
            await asyncio.sleep(3)
            await rig.apply()
            await asyncio.sleep(3)
            await rig.apply(pool(concurrency=7))
            await asyncio.sleep(60)

            assert rig.pool() is p
            assert p.config.concurrency == 7
            assert rig.sender.sent == [(0, "a"), (10, "b")]
            assert nacked(rig) == []
            assert rig.pool().permits.out == 0

    @pytest.mark.rule("P3")
    async def test_arrivals_that_waited_keep_their_place(self) -> None:
        async with running(pool(), sender=FakeSender(takes=10), queues=FREE) as rig:
            await rig.publish(*grouped("a"), queue=FREE_QUEUE)
            await asyncio.sleep(3)
            await rig.apply(queues=FREE)
            await rig.publish(*grouped("b"), queue=FREE_QUEUE)
            await asyncio.sleep(3)
            await rig.apply(pool(), queues=FREE)
            await rig.publish(*grouped("c"), queue=FREE_QUEUE)
            await asyncio.sleep(60)

            assert rig.sender.sent == [(0, "a"), (10, "b"), (20, "c")]

    @pytest.mark.rule("P3")
    async def test_arrivals_for_a_group_on_its_way_back_wait_until_it_is_gone(self) -> None:
        async with running(pool(concurrency=1), sender=FakeSender(takes=10)) as rig:
            await rig.publish(*grouped("a"), *grouped("x", "y", group="other"))
            await asyncio.sleep(3)
            for config in ((), (pool(concurrency=1),), (), (pool(concurrency=1),)):
                await rig.apply(*config)  # gone and back again, before any NACK went out
            await asyncio.sleep(60)

            assert nacked(rig) == [(3, "x", 0), (3, "y", 0)]
            assert rig.sender.sent == [(0, "a"), (10, "x"), (20, "y")]
            assert len(rig.pool().lanes) == 0
            assert rig.pool().permits.out == 0

    @pytest.mark.rule("P3")
    async def test_an_arrival_waits_while_mates_of_a_finished_post_are_on_their_way(self) -> None:
        async with running(pool(), sender=FakeSender(takes=10), queues=FREE) as rig:
            rig.witness.nack_takes = 5
            await rig.publish(*grouped("a", "b"), queue=FREE_QUEUE)
            await asyncio.sleep(3)
            await rig.apply(queues=FREE)
            await asyncio.sleep(8)  # a was accepted at 10, b is returned from then until 15
            await rig.apply(pool(), queues=FREE)
            await rig.publish(*grouped("c"), queue=FREE_QUEUE)
            await asyncio.sleep(60)

            assert rig.sender.sent == [(0, "a"), (15, "c"), (25, "b")]

    @pytest.mark.rule("CFG-6")
    async def test_an_arrival_is_passed_on_when_the_pool_goes_again_meanwhile(self) -> None:
        config = pool(rate_per_minute=60)
        async with running(config, sender=FakeSender(takes=10), queues=FREE) as rig:
            rig.witness.nack_takes = 5
            await rig.publish(*grouped("a", "b"), queue=FREE_QUEUE)
            await asyncio.sleep(3)
            await rig.apply(queues=FREE)
            await asyncio.sleep(8)
            await rig.apply(config, queues=FREE)
            await rig.publish(*grouped("c"), queue=FREE_QUEUE)
            await asyncio.sleep(1)
            await rig.apply(queues=FREE)
            await asyncio.sleep(60)

            assert rig.sender.sent == [(0, "a"), (15, "c"), (25, "b")]
            assert rig.is_empty

    @pytest.mark.rule("P3")
    async def test_an_arrival_waits_also_before_the_first_nack_is_under_way(self) -> None:
        config = pool(concurrency=1)
        async with running(config, sender=FakeSender(takes=10)) as rig:
            p, late = rig.pool(), make_job("late")
            late.settler = rig.manager.consumers["q"].connections[0].settler
            late.settler.hold([late])
            await rig.publish(*grouped("x", group="other"), *grouped("a"))
            await asyncio.sleep(3)
            p.drain()
            p.revive(config)
            p.submit(late)
            state = late.state
            await asyncio.sleep(1)

            assert state is State.WAITING
            assert nacked(rig) == [(3, "a", 0)]
            assert late.state is State.QUEUED
            late.settler.release(late)  # its broker knows nothing of it

    @pytest.mark.rule("MED-2")
    async def test_a_message_withdrawn_between_its_tries_starts_again(self) -> None:
        sender = FakeSender(takes=1)
        sender.script("a", REFUSED)
        async with running(pool(), sender=sender) as rig:
            await rig.publish(*grouped("a"))
            await asyncio.sleep(1.5)
            await rig.apply()
            await asyncio.sleep(0)
            await rig.apply(pool())
            await asyncio.sleep(60)

            assert rig.sender.sent[0] == (0, "a")
            assert len(rig.sender.sent) == 2
            assert rig.is_empty
            assert rig.pool().permits.out == 0

    @pytest.mark.rule("CFG-6")
    async def test_a_revived_pool_works_as_before(self) -> None:
        async with running(pool(concurrency=2), sender=FakeSender(takes=1)) as rig:
            await rig.apply()
            await rig.apply(pool(concurrency=2))
            await rig.publish(
                *(body(str(n), poolCode="P", messageGroupId=str(n)) for n in range(4))
            )
            await asyncio.sleep(20)

            assert [at for at, _ in rig.sender.sent] == [0, 0, 1, 1]


@pytest.mark.rule("OPS-4")
class TestAbort:
    async def test_open_posts_are_ended_and_their_messages_returned_with_their_mates(
        self,
    ) -> None:
        async with running(pool(), sender=FakeSender(takes=1000), queues=FREE) as rig:
            await rig.publish(*grouped("a", "b"), queue=FREE_QUEUE)
            await asyncio.sleep(3)
            rig.manager.stop()
            await asyncio.sleep(3)
            for each in rig.manager.draining_pools.values():
                each.runner.abort()
            await asyncio.sleep(0.1)

            assert nacked(rig) == [(6, "a", 0), (6, "b", 0)]
            assert rig.sender.open == 0
            assert rig.is_empty

    async def test_what_is_being_settled_is_not_disturbed(self) -> None:
        async with running(pool(), sender=FakeSender(takes=10)) as rig:
            await rig.publish(*grouped("a"))
            await asyncio.sleep(10.001)
            rig.manager.stop()
            for each in rig.manager.draining_pools.values():
                each.runner.abort()
            await asyncio.sleep(1)

            assert rig.manager.registry.ledger.ended[Fate.DELIVERED] == 1


@pytest.mark.rule("P4")
async def test_ten_thousand_pools_come_and_go_cheaply() -> None:
    codes = [f"p{n}" for n in range(10_000)]
    async with running(*(pool(code) for code in codes)) as rig:
        await rig.publish(body("a", poolCode="p9999"))
        await asyncio.sleep(3)
        await rig.apply()
        rig.manager.forget_finished(3.0)

        assert len(asyncio.all_tasks()) < 10
        assert rig.sender.ids == ["a"]
        assert rig.manager.draining_pools == {}


@pytest.mark.rule("CFG-6")
async def test_a_task_that_is_cancelled_by_its_owner_is_not_swallowed() -> None:
    sender, rigs = FakeSender(takes=1000), list[Rig]()

    async def die() -> None:
        async with running(pool(), sender=sender) as rig:
            rigs.append(rig)
            await rig.publish(*grouped("a"))
            await asyncio.sleep(3)
            raise RuntimeError("the end of the router")

    with pytest.raises(ExceptionGroup, match="unhandled"):
        await die()

    assert sender.open == 0
    assert rigs[0].manager.registry.held == 1  # left to its broker
