"""Keeping what the router holds its own: leases are extended before they end (BRK-5)."""

import asyncio
import logging
from collections.abc import Iterable
from typing import Final

from router.core.job import EXPIRED, Job, State
from router.core.message import Handle
from router.engine.bell import Bell
from router.engine.line import Line
from router.ports import BrokerError, Unsettled

log = logging.getLogger(__name__)

LOOKS_PER_LEASE: Final = 6  # so often: then a lease is renewed between a third and half of it


async def renew(jobs: Iterable[Job], line: Line, lease: float, extended: Bell) -> None:
    """Extend what has used up a third of its lease; never what is settling."""
    now = asyncio.get_running_loop().time()
    due = {job.handle: job for job in jobs if _is_due(job, now, now + lease * 2 / 3)}
    if not due:
        return
    for job in due.values():
        job.extending = True
    try:
        refused = await line.extend(list(due), lease)
    except BrokerError as error:
        log.warning("leases not extended: %s", error)
    else:
        _note(due, refused, now + lease)
    finally:
        for job in due.values():
            job.extending = False
        extended.ring()


def _is_due(job: Job, now: float, soon: float) -> bool:
    settling = job.state is State.SETTLING or job.extending
    return not settling and now < job.lease_until <= soon


def _note(due: dict[Handle, Job], refused: Iterable[Unsettled], until: float) -> None:
    problems = {each.handle: each for each in refused}
    for handle, job in due.items():
        if job.handle != handle:
            continue  # a newer hand-over was adopted meanwhile
        problem = problems.get(handle)
        if problem is None:
            job.lease_until = until
        elif problem.stale:
            job.lease_until = EXPIRED
