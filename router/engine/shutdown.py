"""The end of a run: receive no more, finish what is open, give the rest back (OPS-4)."""

import asyncio
import logging
from typing import Final

from router.core.job import Fate
from router.core.warnings import Code, Severity
from router.engine.alerts import Alerts
from router.engine.consumer import RECEIVE_GRACE_SECONDS
from router.engine.dispatch import SOURCE
from router.engine.queue_manager import QueueManager

log = logging.getLogger(__name__)

ABORT_GRACE_SECONDS: Final = 5.0  # for the NACKs of what was aborted


async def shut_down(manager: QueueManager, alerts: Alerts, grace: float) -> None:
    """Give open requests `grace` seconds; return everything else at once.

    Afterwards, no task of a consumer or a pool waits for anything outside any more.
    """
    loop = asyncio.get_running_loop()
    started = loop.time()
    lost_before = manager.registry.ledger.ended[Fate.FORFEITED]
    manager.stop()
    if not await settled(manager, grace):
        manager.abort()
        await settled(manager, ABORT_GRACE_SECONDS)
    receivers = [each for consumer in manager.stopping_consumers for each in consumer.connections]
    receives = [receiver.task for receiver in receivers if receiver.task is not None]
    if receives:  # those that do not end by themselves are cancelled
        left = max(started + RECEIVE_GRACE_SECONDS - loop.time(), 0.0)
        _, running = await asyncio.wait(receives, timeout=left)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=ABORT_GRACE_SECONDS)
    for receiver in receivers:
        receiver.settler.close()
    lost = manager.registry.ledger.ended[Fate.FORFEITED] - lost_before
    if lost:
        text = f"{lost} messages could not be given back; they return when their leases end"
        alerts.raise_warning(Code.SHUTDOWN_CLEANUP_ERRORS, Severity.WARN, SOURCE, text)
    log.info("all consumers stopped", extra={"unaccounted": manager.registry.unaccounted})


async def settled(manager: QueueManager, seconds: float) -> bool:
    """Wait so many seconds for a stopped manager. Return whether it holds nothing any more."""
    async with asyncio.TaskGroup() as tasks:
        settling = tasks.create_task(manager.until_settled(), name="settling")
        await asyncio.wait((settling,), timeout=seconds)
        settling.cancel()
    return not settling.cancelled()
