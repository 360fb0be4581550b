"""The end of a run: receive no more, finish what is open, give the rest back (OPS-4)."""

import asyncio
import logging
from typing import Final

from router.core.warnings import Code, Severity
from router.engine.alerts import Alerts
from router.engine.queue_manager import SOURCE, QueueManager

log = logging.getLogger(__name__)

RECEIVE_GRACE: Final = 25.0  # a long poll ends by itself
LAST_WORDS: Final = 5.0  # for the NACKs of what was aborted


async def shut_down(manager: QueueManager, alerts: Alerts, grace: float) -> None:
    """Open POSTs have `grace` seconds; everything else goes back at once."""
    manager.stop()
    intakes = manager.stopping_intakes
    running = {each.task for intake in intakes for each in intake.connections if each.task}
    started = asyncio.get_running_loop().time()
    running = await _wait(running, grace)
    if running:
        for pool in manager.draining_pools.values():
            pool.abort()
        spent = asyncio.get_running_loop().time() - started
        running = await _wait(running, max(RECEIVE_GRACE - spent, 0.0) + LAST_WORDS)
    for task in running:
        task.cancel()
    left = len(manager.routing.tracker)
    if left or running:
        text = (
            "some messages could not be given back at shutdown; they return when their lease ends"
        )
        alerts.raise_warning(Code.SHUTDOWN_CLEANUP_ERRORS, Severity.WARN, SOURCE, text)
    log.info("all intakes stopped", extra={"left": left, "unsettled": manager.routing.held})


async def _wait(running: set[asyncio.Task[None]], seconds: float) -> set[asyncio.Task[None]]:
    if not running:
        return running
    _, pending = await asyncio.wait(running, timeout=seconds)
    return pending
