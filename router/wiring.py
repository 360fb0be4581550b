"""Makes an engine from settings, for the service (`main`) and for the library (`worker`)."""

import asyncio
import logging
import os
import random
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Final
from urllib.parse import quote

from router.brokers import BrokerRegistry
from router.core.config import QueueConfig
from router.core.leadership import Leadership, unlimited
from router.core.returning import Jitter
from router.core.target import Target
from router.core.warnings import Code, Severity
from router.engine.alerts import Alerts
from router.engine.breaker import Breakers
from router.engine.dead_letters import DeadLetterWriter
from router.engine.delivery import Deliverer
from router.engine.deps import EngineDeps
from router.engine.flow import ByteBudget
from router.engine.publishing import open_publishing
from router.engine.queue_manager import QueueManager
from router.engine.registry import InFlightRegistry, Journal
from router.engine.shared_limits import SharedLimits
from router.engine.targets import Targets
from router.engine.transfer import OrderStore
from router.ports import Brokers, DeadLetterStore, StoreError
from router.settings import Settings
from router.storage.dead_letters import NO_STORE, open_store

log = logging.getLogger(__name__)

ORDER_FILE: Final = "order.db"  # in the state directory


def open_brokers(settings: Settings, alerts: Alerts) -> BrokerRegistry:
    def warn(queue: str, text: str) -> None:
        alerts.of(f"Consumer:{queue}")(Code.QUEUE_VALIDATION, text, Severity.CRITICAL)

    def advise(queue: str, text: str) -> None:
        alerts.of(f"Consumer:{queue}")(Code.QUEUE_VALIDATION, text)

    def on_storage(queue: str, refusal: str | None) -> None:
        source = f"Consumer:{queue}"
        if refusal is None:
            alerts.withdraw(Code.STORAGE, source)
        else:
            text = f"the storage of queue {queue} refuses writes: {refusal}"
            alerts.of(source)(Code.STORAGE, text, Severity.CRITICAL)

    def on_results(queue: str, is_nearly_full: bool) -> None:
        source = f"Consumer:{queue}"
        if is_nearly_full:
            text = (
                f"the results kept in the database of queue {queue} take more than 80 % of"
                " MESSAGE_ROUTER_RESULT_MAX_BYTES: at the limit, the oldest are dropped"
            )
            alerts.of(source)(Code.RESULT_STORE, text)
        else:
            alerts.withdraw(Code.RESULT_STORE, source)

    return BrokerRegistry(
        # Its own for each process, whatever it is called: it owns leases (WQ-2).
        worker_id=f"{settings.worker_id or socket.gethostname()}-{os.getpid()}-"
        f"{secrets.token_hex(4)}",
        poll_interval=settings.poll_interval,
        dedup_window=settings.dedup_window,
        result_retention=settings.result_retention,
        result_max_bytes=settings.result_max_bytes,
        state_dir=settings.state_dir,
        settings=settings.brokers,
        warn=warn,
        advise=advise,
        on_storage=on_storage,
        on_results=on_results,
    )


def open_letters(settings: Settings) -> AbstractAsyncContextManager[DeadLetterStore]:
    """Open the dead-letter store, and make the folders of what is stored in files."""
    if settings.naming.broker is settings.naming.embedded:
        _make_folder("MESSAGE_ROUTER_STATE_DIR", settings.state_dir)
    url, path = settings.dead_letter_url, settings.dead_letter_path
    if url == NO_STORE:
        log.warning(
            "MESSAGE_ROUTER_DEAD_LETTER_URL=none: messages that no target accepts will be lost"
        )
    if path is not None:
        given_by = "STATE_DIR" if url is None else "DEAD_LETTER_URL"
        _make_folder(f"MESSAGE_ROUTER_{given_by}", path.parent)
        url = f"sqlite:///{quote(str(path))}"
    return open_store(
        url or NO_STORE,
        max_bytes=settings.dead_letter_max_bytes,
        retention=settings.dead_letter_retention,
    )


def order_store(settings: Settings, brokers: BrokerRegistry) -> OrderStore:
    """Return where strict queues store groups."""
    url = settings.order_store

    def uri_of(name: str) -> str:
        if url is None:
            path = quote(str(settings.state_dir.absolute() / ORDER_FILE))
            return f"sqlite:///{path}?queue={quote(name, safe='')}&audit=0"
        joint = "&" if "?" in url else "?"
        return f"{url}{joint}queue={quote(name, safe='')}&audit=0"

    return OrderStore(
        logs=brokers,
        uri_of=uri_of,
        new_key=secrets.token_hex,
        is_shared=url is not None,
        max_bytes=settings.order_store_max_bytes,
        exists=lambda: url is not None or (settings.state_dir / ORDER_FILE).exists(),
    )


def _make_folder(variable: str, path: Path) -> None:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"{variable}: cannot create {path}: {error.strerror}") from None


@asynccontextmanager
async def open_engine(
    settings: Settings,
    mediator: Deliverer,
    alerts: Alerts,
    *,
    brokers: Brokers,
    store: DeadLetterStore,
    new_id: Callable[[], str],
    refuse_url: Callable[[Target, QueueConfig], str | None] = lambda *_: None,
    breakers: Breakers | None = None,
    leadership: Leadership | None = None,
    longest_request: float = 0.0,
    journal: Journal | None = None,
    wall: Callable[[], float] = time.time,
    jitter: Jitter = random.uniform,
    order: OrderStore | None = None,
    limits: SharedLimits | None = None,
) -> AsyncIterator[QueueManager]:
    """Open an engine without queues and pools; `QueueManager.apply` adds them.

    The caller stops it: the context ends when all tasks have ended.
    """
    async with (
        asyncio.TaskGroup() as tasks,
        open_publishing(
            brokers, lambda: manager.applied, refuse_url=refuse_url, new_id=new_id, wall=wall
        ) as publishing,
    ):
        manager = QueueManager(
            EngineDeps(
                brokers=brokers,
                mediator=mediator,
                letters=DeadLetterWriter(store, alerts, wall),
                alerts=alerts,
                publishing=publishing,
                tasks=tasks,
                jitter=jitter,
                registry=InFlightRegistry(journal),
                targets=Targets(Breakers(lambda _: None) if breakers is None else breakers),
                leadership=unlimited() if leadership is None else leadership,
                longest_request=longest_request,
                default_retry=settings.default_retry,
                look_ahead_bytes=ByteBudget(settings.look_ahead_bytes),
                max_pools=settings.max_pools,
                pool_warning_threshold=settings.pool_warning_threshold,
                order=order,
                limits=limits,
            )
        )
        yield manager
