"""Workers that are used again: what a message costs must not grow by a task (POOL-2)."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from router.engine import crew
from router.engine.crew import Crew

pytestmark = [pytest.mark.anyio, pytest.mark.rule("POOL-2")]


@asynccontextmanager
async def working() -> AsyncIterator[Crew]:
    async with asyncio.TaskGroup() as tasks:
        some = Crew(tasks)
        yield some
        some.dismiss()


def workers() -> set[asyncio.Task[object]]:
    return {task for task in asyncio.all_tasks() if task.get_name() == "worker"}


async def take(seconds: float, done: list[float]) -> None:
    await asyncio.sleep(seconds)
    done.append(asyncio.get_running_loop().time())


async def test_what_is_started_runs_at_once_side_by_side() -> None:
    done: list[float] = []
    async with working() as some:
        for seconds in (3.0, 1.0, 2.0):
            some.start(take(seconds, done))
        await asyncio.sleep(10)

        assert done == [1.0, 2.0, 3.0]
        assert len(workers()) == 3


async def test_a_worker_that_has_finished_takes_the_next_piece_of_work() -> None:
    done: list[float] = []
    async with working() as some:
        some.start(take(1.0, done))
        await asyncio.sleep(2)
        before = workers()
        some.start(take(1.0, done))
        await asyncio.sleep(2)

        assert workers() == before
        assert done == [1.0, 3.0]


async def test_no_more_wait_for_work_than_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "MOST_IDLE", 2)
    async with working() as some:
        for _ in range(5):
            some.start(take(1.0, []))
        await asyncio.sleep(2)

        assert len(workers()) == 2


async def test_dismissed_nobody_waits_and_what_runs_is_finished() -> None:
    done: list[float] = []
    async with working() as some:
        some.start(take(1.0, done))
        some.start(take(5.0, done))
        await asyncio.sleep(2)
        some.dismiss()
        await asyncio.sleep(0.5)
        while_one_works = len(workers())
        await asyncio.sleep(5)

        assert (while_one_works, len(workers())) == (1, 0)
        assert done == [1.0, 5.0]


async def test_recalled_workers_wait_again() -> None:
    async with working() as some:
        some.dismiss()
        some.recall()
        some.start(take(1.0, []))
        await asyncio.sleep(2)

        assert len(workers()) == 1


@pytest.mark.parametrize("and_then", ["start", "dismiss"])
async def test_a_worker_that_was_cancelled_is_not_counted_on(and_then: str) -> None:
    done: list[float] = []
    async with working() as some:
        some.start(take(1.0, done))
        await asyncio.sleep(2)
        for worker in workers():
            worker.cancel()
        await asyncio.sleep(0)
        if and_then == "start":
            some.start(take(1.0, done))
        else:
            some.dismiss()
        await asyncio.sleep(2)

        assert done == ([1.0, 3.0] if and_then == "start" else [1.0])
