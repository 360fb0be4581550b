"""The heartbeat of leases: they are extended before they end (BRK-5)."""

import asyncio
import logging
from collections.abc import Iterable
from typing import Final

from router.core.job import EXPIRED, Job, State
from router.engine.broker_guard import GuardedBroker
from router.ports import BrokerError
from router.signal import Signal

log = logging.getLogger(__name__)

LOOKS_PER_LEASE: Final = 6  # so a lease is extended when between a third and half of it is used up


async def extend_leases(
    jobs: Iterable[Job], guarded: GuardedBroker, lease: float, extended: Signal, used: float = 1 / 3
) -> None:
    """Extend what has used up so much of its lease; never what is settling."""
    now = asyncio.get_running_loop().time()
    soon = now + lease * (1 - used)
    due = {
        job.handle: job
        for job in jobs
        if now < job.lease_until <= soon and job.state is not State.SETTLING and not job.extending
    }
    if not due:
        return
    for job in due.values():
        job.extending = True
    try:
        refused = await guarded.extend(list(due), lease)
    except BrokerError as error:
        log.warning("leases not extended: %s", error)
    else:
        problems = {each.handle: each for each in refused}
        for handle, job in due.items():
            if job.handle != handle:
                continue  # a newer hand-over was adopted meanwhile
            problem = problems.get(handle)
            if problem is None:
                job.lease_until = now + lease
            elif problem.stale:
                job.lease_until = EXPIRED
    finally:
        for job in due.values():
            job.extending = False
        extended.ring()
