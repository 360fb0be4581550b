"""The end of a run: receive no more, finish what is open, give the rest back (OPS-4)."""

import asyncio
import logging
from typing import Final

from router.core.job import Fate
from router.core.warnings import Code, Severity
from router.engine.alerts import Alerts
from router.engine.intake import RECEIVE_GRACE, Connection
from router.engine.queue_manager import SOURCE, QueueManager

log = logging.getLogger(__name__)

LAST_WORDS: Final = 5.0  # for the NACKs of what was aborted


async def shut_down(manager: QueueManager, alerts: Alerts, grace: float) -> None:
    """Open POSTs have `grace` seconds; everything else goes back at once.

    When it returns, no task of an intake or a pool waits for anything outside any more.
    """
    loop = asyncio.get_running_loop()
    started = loop.time()
    lost_before = manager.routing.ledger.ended[Fate.FORFEITED]
    manager.stop()
    if not await settled(manager, grace):
        manager.abort()
        await settled(manager, LAST_WORDS)
    connections = [each for intake in manager.stopping_intakes for each in intake.connections]
    await _end_receives(connections, started + RECEIVE_GRACE - loop.time())
    for connection in connections:
        connection.settler.abandon()
    lost = manager.routing.ledger.ended[Fate.FORFEITED] - lost_before
    if lost:
        text = f"{lost} messages could not be given back; they return when their leases end"
        alerts.raise_warning(Code.SHUTDOWN_CLEANUP_ERRORS, Severity.WARN, SOURCE, text)
    log.info("all consumers stopped", extra={"unaccounted": manager.routing.unaccounted})


async def settled(manager: QueueManager, seconds: float) -> bool:
    """Whether, once it is stopped, nothing is held any more within so many seconds."""
    async with asyncio.TaskGroup() as tasks:
        settling = tasks.create_task(manager.until_settled(), name="settling")
        await asyncio.wait((settling,), timeout=seconds)
        settling.cancel()
    return not settling.cancelled()


async def _end_receives(connections: list[Connection], seconds: float) -> None:
    """A receive that does not end by itself is ended."""
    tasks = [connection.task for connection in connections if connection.task is not None]
    if not tasks:
        return
    _, running = await asyncio.wait(tasks, timeout=max(seconds, 0.0))
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running, timeout=LAST_WORDS)
