"""What the router holds at this moment, message by message."""

import asyncio
from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct

from router.core.identity import shown_id
from router.core.job import Job
from router.core.tracker import Tracker
from router.engine.journal import pool_code


class InFlightMessage(Struct, frozen=True, kw_only=True):
    message_id: str
    broker_id: str | None
    queue: str
    pool: str
    group: str
    state: str
    attempt: int
    since: float  # Unix seconds
    seconds: float


class InFlightFilter(Struct, frozen=True, kw_only=True):
    """None: any."""

    message_id: str | None = None
    pool: str | None = None
    queue: str | None = None

    def lets_through(self, job: Job) -> bool:
        return (
            self.message_id in (None, job.message.id)
            and self.pool in (None, pool_code(job))
            and self.queue in (None, job.home.queue_name)
        )


class InFlight:
    def __init__(self, tracker: Tracker, wall: Callable[[], float]) -> None:
        self._tracker = tracker
        self._wall = wall

    def list(self, wanted: InFlightFilter, limit: int) -> Sequence[InFlightMessage]:
        """Those that fit, the ones held longest first."""
        fitting = [job for job in self._tracker if wanted.lets_through(job)]
        fitting.sort(key=lambda job: job.tracked_at)
        now, wall = asyncio.get_running_loop().time(), self._wall()
        return [_message(job, now - job.tracked_at, wall) for job in fitting[:limit]]

    def check(self, message_ids: Iterable[str]) -> dict[str, bool]:
        """Which of them are held."""
        held = {job.message.id for job in self._tracker}
        return {message_id: message_id in held for message_id in message_ids}


def _message(job: Job, seconds: float, wall: float) -> InFlightMessage:
    return InFlightMessage(
        message_id=job.message.id,
        broker_id=shown_id(job.key, job.message.id),
        queue=job.home.queue_name,
        pool=pool_code(job),
        group=job.group,
        state=job.state.name,
        attempt=job.posts,
        since=wall - seconds,
        seconds=seconds,
    )
