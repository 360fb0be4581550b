"""Work that is done at intervals."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from router.core.retry import Jitter

log = logging.getLogger(__name__)

Job = Callable[[], Awaitable[object]]
Pause = Callable[[float], float]  # from the interval to the pause that is really made


def steady(seconds: float) -> float:
    return seconds


def give_or_take(share: float, jitter: Jitter) -> Pause:
    """Spread the pauses, so that many routers do not ask the same service at the same instant."""
    return lambda seconds: jitter(seconds * (1 - share), seconds * (1 + share))


async def every(seconds: float, job: Job, *, jitter: Pause = steady) -> None:
    """Run `job` after each pause of `seconds`, one run at a time, until cancelled."""
    while True:
        await asyncio.sleep(jitter(seconds))
        try:
            await job()
        except Exception:
            # The bulkhead: a bug in one chore must end neither the chore nor the router.
            log.exception("%s failed", _name_of(job))


def _name_of(job: Job) -> str:
    return getattr(job, "__qualname__", type(job).__name__)
