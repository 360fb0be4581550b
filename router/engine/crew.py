"""Tasks that do one piece of work after another: a new one for each message costs too much."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Final

Work = Coroutine[Any, Any, None]

MOST_IDLE: Final = 1_000  # a worker that waits for work takes a kilobyte


class Crew:
    """Starts work at once; a worker that has finished waits for more, if not too many do."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self.tasks = tasks  # for work that has to be cancelled by itself
        self._idle: list[asyncio.Future[Work | None]] = []
        self._most_idle = MOST_IDLE
        self._new_future = asyncio.get_running_loop().create_future

    def start(self, work: Work) -> None:
        """It runs as a task, at the next turn of the loop."""
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
        while work is not None:
            await work
            if len(self._idle) >= self._most_idle:
                return
            more: asyncio.Future[Work | None] = self._new_future()
            self._idle.append(more)
            work = await more
