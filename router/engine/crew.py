"""Workers that serve one lane after the other: a new task for each message costs too much."""

import asyncio
from typing import Final, Protocol

from router.core.job import Job
from router.core.lanes import Lane
from router.core.outcome import Result
from router.engine.courier import Courier

_SUCCESS: Final = Result.SUCCESS  # by its name it costs a look-up, for every message
MOST_IDLE: Final = 1_000  # a worker that waits for work takes a kilobyte


class Workplace(Protocol):
    """A pool, as its workers see it."""

    @property
    def courier(self) -> Courier: ...

    @property
    def draining(self) -> bool: ...

    async def give_back(self, lane: Lane) -> None:
        """Return what waits in it."""

    def next_after(self, lane: Lane) -> Lane | None:
        """One of this lane was served: the lane to go on with. None: there is no more to do."""


Work = tuple[Workplace, Lane, Job]  # the job is the lane's current one


class Crew:
    """Starts work at once; a worker that has finished waits for more, if not too many do."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self.tasks = tasks  # for what is no work on a lane
        self._idle: list[asyncio.Future[Work | None]] = []
        self._most_idle = MOST_IDLE
        self._loop = asyncio.get_running_loop()

    def start(self, work: Work) -> None:
        """It begins at the next turn of the loop."""
        while self._idle:
            waiting = self._idle.pop()
            if not waiting.done():  # else it was cancelled
                waiting.set_result(work)
                return
        self.tasks.create_task(self._work(work), name="worker")

    def dismiss(self) -> None:
        """Nobody waits for work any more; what is started still runs."""
        self._most_idle = 0
        idle, self._idle = self._idle, []
        for waiting in idle:
            if not waiting.done():
                waiting.set_result(None)

    def recall(self) -> None:
        self._most_idle = MOST_IDLE

    async def _work(self, work: Work | None) -> None:
        """Serve one message after the other: of one lane, of one pool, of whichever needs it."""
        task = asyncio.current_task()
        assert task is not None  # noqa: S101  for the type checker: we run in one
        while work is not None:
            pool, lane, job = work
            try:
                outcome = await pool.courier.deliver(job, task)
                if outcome is not None and outcome.result is _SUCCESS:
                    pool.courier.accept(job)
                else:
                    await pool.courier.settle(lane, job, outcome)
            except Exception as error:  # noqa: BLE001  the bulkhead: one message's bug ends no group
                await pool.courier.survive(lane, job, error)
            if pool.draining:
                await pool.give_back(lane)
            following = pool.next_after(lane)
            if following is not None:
                work = pool, following, following.take()
            elif len(self._idle) < self._most_idle:
                more: asyncio.Future[Work | None] = self._loop.create_future()
                self._idle.append(more)
                work = await more
            else:
                return
