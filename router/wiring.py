"""Makes an engine from settings, for the service (`main`) and for the library (`worker`)."""

import asyncio
import logging
import os
import random
import secrets
import socket
import time
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from urllib.parse import quote

from router.brokers import BrokerRegistry
from router.brokers.machine import THIS_MACHINE
from router.core.config import QueueType
from router.core.leadership import Leadership
from router.core.warnings import Code, Severity
from router.engine.alerts import Alerts
from router.engine.dead_letter_writer import DeadLetterWriter
from router.engine.delivery import Deliverer
from router.engine.deps import EngineDeps
from router.engine.journal import Journal
from router.engine.publishing import QueuePublisher
from router.engine.queue_manager import QueueManager
from router.engine.registry import InFlightRegistry
from router.ports import Brokers, DeadLetterStore, StoreError, Tracer
from router.settings import Settings
from router.storage.dead_letters import NO_STORE, open_store

log = logging.getLogger(__name__)


def open_brokers(settings: Settings, alerts: Alerts) -> BrokerRegistry:
    return BrokerRegistry(
        worker_id=f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}",
        dedup_window=settings.dedup_window,
        result_retention=settings.result_retention,
        state_dir=settings.state_dir,
        settings=settings.brokers,
        warn=partial(_warn_of_queue, alerts),
    )


def open_letters(settings: Settings) -> AbstractAsyncContextManager[DeadLetterStore]:
    """Open the dead-letter store, and make the folders of what is stored in files."""
    if settings.naming.queue_type is QueueType.EMBEDDED:
        _make_folder("MESSAGE_ROUTER_STATE_DIR", settings.state_dir)
    path = settings.dead_letter_path
    if path is None:
        log.warning("MESSAGE_ROUTER_DEAD_LETTER_URL=none: what no target accepts will be lost")
        return open_store(NO_STORE)
    given_by = "STATE_DIR" if settings.dead_letter_url is None else "DEAD_LETTER_URL"
    _make_folder(f"MESSAGE_ROUTER_{given_by}", path.parent)
    return open_store(
        f"sqlite:///{quote(str(path))}",
        max_bytes=settings.dead_letter_max_bytes,
        retention=settings.dead_letter_retention,
    )


def _make_folder(variable: str, path: Path) -> None:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"{variable}: cannot make {path}: {error.strerror}") from None


def new_leadership() -> Leadership:
    """It goes on while the machine sleeps, as the clocks of lock servers do."""
    return Leadership(THIS_MACHINE.uptime)


def new_manager(
    settings: Settings,
    mediator: Deliverer,
    alerts: Alerts,
    *,
    brokers: Brokers,
    store: DeadLetterStore,
    publishing: QueuePublisher,
    leadership: Leadership,
    longest_delivery: float,
    tasks: asyncio.TaskGroup,
    tracer: Tracer | None = None,
) -> QueueManager:
    deps = EngineDeps(
        brokers=brokers,
        mediator=mediator,
        letters=DeadLetterWriter(store, alerts, time.time),
        alerts=alerts,
        publishing=publishing,
        tasks=tasks,
        jitter=random.uniform,
        registry=InFlightRegistry(Journal(tracer)),
        leadership=leadership,
        longest_delivery=longest_delivery,
        default_retry=settings.default_retry,
        max_pools=settings.max_pools,
        pool_warning_threshold=settings.pool_warning_threshold,
    )
    return QueueManager(deps)


def _warn_of_queue(alerts: Alerts, queue: str, text: str) -> None:
    """Report what an adapter finds out about its broker."""
    alerts.raise_warning(Code.QUEUE_VALIDATION, Severity.CRITICAL, f"Consumer:{queue}", text)
