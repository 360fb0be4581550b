"""The wiring: to read this file is to read the architecture.

brokers ─► intakes ─► routing ─► pools ─► mediator ─► sender ─► targets
   ▲                                │
   └────────── settlers ◄───────────┘      configuration sync, chores and the API stand beside
"""

import asyncio
import logging
import os
import random
import secrets
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import quote

import uvloop

from router import __version__
from router.api.access import Access, AuthMode
from router.api.app import create_app
from router.api.server import CannotListen, listen
from router.api.server import serve as serve_api
from router.brokers import BrokerDoor
from router.core.config import QueueType
from router.core.config_plan import Plan
from router.core.health import Vitals
from router.core.target_safety import TargetPolicy
from router.core.tsid import Tsids
from router.core.warnings import WarningBook
from router.engine.alerts import Alerts
from router.engine.breaker import Breaker, Breakers
from router.engine.chores import Chores
from router.engine.config_sync import ConfigSync, SyncFailed, SyncRules, SyncStatus
from router.engine.dead_letters import Replays
from router.engine.letters import Letters
from router.engine.mediator import Mediator
from router.engine.publishing import Publishing, open_publishing
from router.engine.queue_manager import QueueManager, Surroundings
from router.engine.shutdown import shut_down
from router.engine.view import View
from router.logs import configure_logging
from router.outbound.config_source import config_sources
from router.outbound.curl_loop import CurlOptions
from router.outbound.http_sender import HttpSender
from router.ports import DeadLetterStore, StoreError
from router.setting_values import BreakerScope, LogFormat
from router.settings import Settings, setting_notes
from router.storage.dead_letters import NO_STORE, open_store

log = logging.getLogger(__name__)

EXIT_OK: Final = 0
EXIT_NO_CONFIGURATION: Final = 1
EXIT_BAD_SETTING: Final = 2
EXIT_ENDED: Final = 130

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class Router:
    """A router that runs: what the API and the demo ask."""

    manager: QueueManager
    chores: Chores
    breakers: Breakers
    alerts: Alerts
    warnings: WarningBook
    letters: DeadLetterStore
    publishing: Publishing
    replays: Replays
    sync: ConfigSync
    view: View
    tasks: asyncio.TaskGroup
    port: int = 0  # of the API

    def now(self) -> float:
        return time.time()

    def vitals(self) -> Vitals:
        return self.view.vitals()

    def config_status(self) -> SyncStatus:
        return self.sync.status()

    async def reload(self) -> Plan:
        return await self.sync.reload()

    def reload_soon(self) -> None:
        """On SIGHUP: nobody waits for the answer, so it is logged."""
        self.tasks.create_task(self._reload_and_log(), name="reload")

    def start_schedule(self, settings: Settings) -> Sequence[asyncio.Task[None]]:
        scheduled = list(self.chores.start(self.tasks))
        if settings.enabled:
            syncing = self.sync.run(settings.sync_interval, random.uniform)
            scheduled.append(self.tasks.create_task(syncing, name="sync"))
        return scheduled

    async def _reload_and_log(self) -> None:
        try:
            plan = await self.sync.reload()
        except SyncFailed as failure:
            log.warning("not reloaded: %s", failure)
        else:
            log.info("configuration reloaded", extra={"changes": plan.lines()})


def run(env: Mapping[str, str]) -> int:
    """The service, from settings to exit code. Raises BadSetting."""
    settings = Settings.from_env(env)
    as_json = settings.log_format is LogFormat.JSON or (
        settings.log_format is LogFormat.AUTO and not sys.stdout.isatty()
    )
    configure_logging(settings.log_level.name, as_json=as_json)
    for note in setting_notes(env):
        log.warning("%s", note)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run_until_signalled(settings))


async def _run_until_signalled(settings: Settings) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _stop_or_end, stop)
    try:
        async with open_router(settings) as router:
            loop.add_signal_handler(signal.SIGHUP, router.reload_soon)
            return await serve(router, settings, stop)
    except (StoreError, CannotListen) as error:
        print(f"message-router: {error}", file=sys.stderr)  # noqa: T201  as for a wrong setting
        return EXIT_BAD_SETTING


async def serve(
    router: Router,
    settings: Settings,
    stop: asyncio.Event,
    on_ready: Callable[[], None] = lambda: None,
) -> int:
    """Sync, route until told to stop, shut down."""
    if settings.enabled:
        first = await _unless_stopped(router.sync.sync(first=True), stop)
        if first is not None and not first.ok:
            log.critical("no configuration, so nothing to do: %s", first.reason)
            return EXIT_NO_CONFIGURATION
    router.view.initialized = True
    log.info("ready", extra={"port": router.port, "version": __version__})
    on_ready()
    scheduled = router.start_schedule(settings)
    await stop.wait()
    log.info("shutting down")
    router.view.shutting_down = True
    for task in scheduled:
        task.cancel()
    await shut_down(router.manager, router.alerts, settings.shutdown_timeout)
    return EXIT_OK


@asynccontextmanager
async def open_router(settings: Settings) -> AsyncIterator[Router]:
    """Everything that a router is made of, opened in order and closed in reverse."""
    new_id = Tsids(time.time, secrets.randbits).new
    warnings = WarningBook()
    alerts = Alerts(warnings, time.time)
    breakers = Breakers(_log_breaker, one_for_all=settings.breaker_scope is BreakerScope.GLOBAL)
    async with AsyncExitStack() as stack:
        # What can fail comes before the first task group, which would wrap its error.
        listener = stack.enter_context(listen(settings.host, settings.port))
        policy = _target_policy(settings, listener)
        store = await stack.enter_async_context(_open_store(settings))
        brokers = await stack.enter_async_context(
            BrokerDoor(worker_id=_worker_id(), dedup_window=settings.dedup_window)
        )
        options = CurlOptions(
            http_version=settings.mediator_http_version.name, proxy=settings.proxy
        )
        sender = await stack.enter_async_context(HttpSender(policy, options))
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        mediator = Mediator(
            sender,
            breakers,
            alerts,
            timeout=settings.mediator_timeout,
            jitter=random.uniform,
            wall=time.time,
        )
        manager = QueueManager(
            Surroundings(
                brokers=brokers,
                mediator=mediator,
                letters=Letters(store, alerts, time.time),
                alerts=alerts,
                tasks=tasks,
                jitter=random.uniform,
                max_pools=settings.max_pools,
                pool_warning_threshold=settings.pool_warning_threshold,
            )
        )
        publishing = await stack.enter_async_context(
            open_publishing(
                brokers, lambda: manager.applied, refuse_url=policy.refuse_url, new_id=new_id
            )
        )
        router = Router(
            manager=manager,
            chores=Chores(manager, breakers, alerts),
            breakers=breakers,
            alerts=alerts,
            warnings=warnings,
            letters=store,
            publishing=publishing,
            replays=Replays(store, publishing, wall=time.time, new_id=new_id),
            sync=_config_sync(settings, manager, alerts),
            view=View(manager, breakers),
            tasks=tasks,
        )
        app = create_app(router, _access(settings))
        router.port = await stack.enter_async_context(serve_api(app, listener))
        yield router


def _open_store(settings: Settings) -> AbstractAsyncContextManager[DeadLetterStore]:
    """And the folders of what is kept in files: whoever lacks one can do nothing here."""
    if settings.naming.queue_type is QueueType.EMBEDDED:
        _make_folder("MESSAGE_ROUTER_STATE_DIR", settings.state_dir)
    path = settings.dead_letter_path
    if path is None:
        log.warning("MESSAGE_ROUTER_DEAD_LETTER_URL=none: what no target accepts will be lost")
        return open_store(NO_STORE)
    given_by = "STATE_DIR" if settings.dead_letter_url is None else "DEAD_LETTER_URL"
    _make_folder(f"MESSAGE_ROUTER_{given_by}", path.parent)
    return open_store(f"sqlite:///{quote(str(path))}")


def _make_folder(variable: str, path: Path) -> None:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"{variable}: cannot make {path}: {error.strerror}") from None


def _config_sync(settings: Settings, manager: QueueManager, alerts: Alerts) -> ConfigSync:
    rules = SyncRules(
        naming=settings.naming,
        attempts=settings.config_attempts,
        retry_delay=settings.config_retry_delay,
        allow_empty=settings.allow_empty_config,
    )
    sources = config_sources(settings.config_urls, settings.config_token, settings.naming)
    return ConfigSync(sources, manager.apply, alerts, rules, time.time)


def _target_policy(settings: Settings, listener: socket.socket) -> TargetPolicy:
    address, port = listener.getsockname()[:2]
    return TargetPolicy(
        allowed_hosts=settings.allowed_hosts,
        block_private=settings.block_private,
        own_addresses=frozenset({(address, port)}),
    )


def _access(settings: Settings) -> Access:
    return Access(
        mode=AuthMode[settings.auth_mode.name],
        host=settings.host,
        username=settings.basic_username or "",
        password=settings.basic_password or "",
        token=settings.api_token or "",
    )


def _worker_id() -> str:
    """Who holds a lease, for people who look into a work queue."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"


def _log_breaker(breaker: Breaker) -> None:
    log.warning("circuit breaker is %s", breaker.state.value, extra={"origin": breaker.name})


def _stop_or_end(stop: asyncio.Event) -> None:
    if stop.is_set():
        os._exit(EXIT_ENDED)  # a second signal ends it at once (OPS-4)
    stop.set()


async def _unless_stopped(work: Coroutine[Any, Any, T], stop: asyncio.Event) -> T | None:
    """None: it was told to stop before the work was done."""
    async with asyncio.TaskGroup() as tasks:
        working = tasks.create_task(work, name="first sync")
        stopping = tasks.create_task(stop.wait(), name="stop")
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if working.done():
            return working.result()
        working.cancel()
        return None
