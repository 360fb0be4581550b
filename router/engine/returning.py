"""Giving back what waits in a group."""

import asyncio
from collections.abc import Sequence

from router.core.job import Job
from router.core.outcome import FAST_FAIL_DELAY


async def give_back_all(jobs: Sequence[Job], delay: float) -> None:
    """In group order, one after the other; where the broker holds groups back, all at once.

    Such a broker keeps the order by itself, and its adapter sends in one call what it is told
    together. What is ready there before its head waits for the head (FIFO-1).
    """
    await _give_back_together([job for job in jobs if job.home.holds_groups], delay)
    for job in jobs:
        if not job.home.holds_groups:
            await job.home.give_back(job, delay)


async def _give_back_together(jobs: Sequence[Job], delay: float) -> None:
    if not jobs:
        return
    held_back = min(FAST_FAIL_DELAY, delay)
    first, *others = jobs
    async with asyncio.TaskGroup() as returns:
        for job in others:
            returns.create_task(job.home.give_back(job, held_back), name="return")
        await first.home.give_back(first, held_back)  # without a task: mostly there is just one
