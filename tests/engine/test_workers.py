"""Workers that are used again: what a message costs must not grow by a task (POOL-2)."""

import asyncio

import pytest

from router.engine import pool as workers_module
from tests.support.rig import Rig, grouped, pool, running

pytestmark = pytest.mark.anyio


def workers() -> set[asyncio.Task[object]]:
    return {task for task in asyncio.all_tasks() if task.get_name() == "worker"}


async def deliver(rig: Rig, **seconds: float) -> None:
    """Messages that take so long, each of a group of its own."""
    rig.sender.takes_for.update(seconds)
    for each in seconds:
        await rig.publish(*grouped(each, group=each))


@pytest.mark.rule("POOL-2")
async def test_what_is_started_runs_at_once_side_by_side() -> None:
    async with running(pool("P")) as rig:
        await deliver(rig, a=3.0, b=1.0, c=2.0)
        await asyncio.sleep(10)

        assert rig.sender.most_open == 3
        assert len(workers()) == 3


@pytest.mark.rule("POOL-2")
async def test_a_worker_that_has_finished_takes_the_next_piece_of_work_of_whichever_pool() -> None:
    async with running(pool("P"), pool("Q")) as rig:
        await rig.publish(*grouped("a"))
        await asyncio.sleep(2)
        before = workers()
        await rig.publish(*grouped("b", poolCode="Q"))
        await asyncio.sleep(2)

        assert workers() == before
        assert [each for _, each in rig.sender.sent] == ["a", "b"]


@pytest.mark.rule("POOL-2")
async def test_no_more_wait_for_work_than_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "MAX_IDLE_WORKERS", 2)
    async with running(pool("P")) as rig:
        await deliver(rig, a=1.0, b=1.0, c=1.0, d=1.0, e=1.0)
        await asyncio.sleep(2)

        assert rig.sender.most_open == 5
        assert len(workers()) == 2


@pytest.mark.rule("POOL-2")
async def test_after_a_stop_no_worker_waits_and_running_work_is_finished() -> None:
    async with running(pool("P")) as rig:
        await deliver(rig, a=1.0, b=5.0)
        await asyncio.sleep(2)
        rig.manager.stop()
        await asyncio.sleep(0.5)
        while_one_works = len(workers())
        await asyncio.sleep(5)

        assert (while_one_works, len(workers())) == (1, 0)
        assert rig.is_empty


@pytest.mark.rule("POOL-2")
async def test_recalled_workers_wait_again() -> None:
    async with running(pool("P")) as rig:
        rig.manager.stop()
        await rig.apply(pool("P"))
        await deliver(rig, a=1.0)
        await asyncio.sleep(2)

        assert len(workers()) == 1


@pytest.mark.rule("POOL-2")
@pytest.mark.parametrize("and_then", ["start", "stop"])
async def test_a_worker_that_was_cancelled_is_not_counted_on(and_then: str) -> None:
    async with running(pool("P")) as rig:
        await deliver(rig, a=1.0)
        await asyncio.sleep(2)
        for worker in workers():
            worker.cancel()
        await asyncio.sleep(0)
        if and_then == "start":
            await deliver(rig, b=1.0)
        else:
            rig.manager.stop()
        await asyncio.sleep(2)

        assert len(rig.sender.sent) == (2 if and_then == "start" else 1)
