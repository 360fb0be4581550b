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
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

import uvloop

from router import __version__, descriptors, interpreter
from router.api.app import create_app
from router.api.server import CannotListen, listen
from router.api.server import serve as serve_api
from router.broker_settings import broker_settings
from router.brokers import BrokerDoor
from router.core.config import RoutingConfig
from router.core.config_plan import Plan
from router.core.figures import StandbyStatus
from router.core.health import Vitals
from router.core.mandate import Mandate
from router.core.trace import UNRECORDED
from router.core.tsid import Tsids
from router.core.warnings import Code, Severity, WarningBook
from router.curl_loop import CurlOptions
from router.descriptors import Shares
from router.engine.alerts import Alerts
from router.engine.breaker import Breaker, Breakers
from router.engine.chores import Chores
from router.engine.config_sync import ConfigSync, SyncCounts, SyncFailed, SyncRules, SyncStatus
from router.engine.controls import Controls
from router.engine.courier import longest_delivery
from router.engine.dead_letters import Replays
from router.engine.explaining import Explaining
from router.engine.in_flight import InFlight
from router.engine.journal import Journal
from router.engine.letters import Letters
from router.engine.loop_lag import LoopLag
from router.engine.mediator import Mediator
from router.engine.notifier import Notifier
from router.engine.periodic import every
from router.engine.publishing import Publishing, open_publishing
from router.engine.queue_manager import QueueManager, Surroundings
from router.engine.shutdown import shut_down
from router.engine.snapshot import Snapshot, Snapshots
from router.engine.standby import Alone, Candidate, Leadership, Standby
from router.engine.statistics import Statistics
from router.engine.view import View
from router.logs import configure_logging
from router.outbound.config_source import config_sources
from router.outbound.http_sender import HttpSender
from router.parts import (
    access_of,
    boot_clock,
    notifier_of,
    open_leader_lock,
    open_letters,
    open_tracer,
    target_policy,
    worker_id,
)
from router.ports import DeadLetterStore, StoreError
from router.setting_values import BreakerScope, LogFormat
from router.settings import Settings, setting_notes

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
    in_flight: InFlight
    explaining: Explaining
    notifier: Notifier
    snapshots: Snapshots
    statistics: Statistics
    controls: Controls
    lag: LoopLag
    leadership: Leadership
    tasks: asyncio.TaskGroup
    port: int = 0  # of the API

    def now(self) -> float:
        return time.time()

    def vitals(self) -> Vitals:
        return self.view.vitals()

    def snapshot(self) -> Snapshot:
        return self.snapshots.take(self.vitals(), self.sync.counts.last_success)

    def config_status(self) -> SyncStatus:
        return self.sync.status()

    def sync_counts(self) -> SyncCounts:
        return self.sync.counts

    def standby_status(self) -> StandbyStatus:
        return self.leadership.status()

    async def reload(self) -> Plan:
        return await self.sync.reload()

    async def notify(self) -> None:
        """Tell now what has gathered."""
        await self.notifier.tell(self.manager.intakes)

    def reload_soon(self) -> None:
        """On SIGHUP: nobody waits for the answer, so it is logged."""
        self.tasks.create_task(self._reload_and_log(), name="reload")

    def start_schedule(self, settings: Settings) -> Sequence[asyncio.Task[None]]:
        scheduled = list(self.chores.start(self.tasks))
        scheduled.append(self.tasks.create_task(self.lag.watch(), name="loop lag"))
        if settings.enabled:
            syncing = self.sync.run(settings.sync_interval, random.uniform)
            scheduled.append(self.tasks.create_task(syncing, name="sync"))
            self.leadership.start(self.tasks)
        if self.notifier.mailboxes:
            telling = every(settings.notify_batch_interval, self.notify)
            scheduled.append(self.tasks.create_task(telling, name="notify"))
        return scheduled

    async def _reload_and_log(self) -> None:
        try:
            plan = await self.reload()
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
    descriptors.raise_limit()
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
    if not stop.is_set():
        await _route(router, settings, stop, on_ready)
    log.info("shutting down")
    router.view.shutting_down = True
    router.leadership.retire()
    await shut_down(router.manager, router.alerts, settings.shutdown_timeout)
    await router.leadership.leave()
    return EXIT_OK


async def _route(
    router: Router, settings: Settings, stop: asyncio.Event, on_ready: Callable[[], None]
) -> None:
    router.view.initialized = True
    interpreter.set_for_service()
    log.info("ready", extra={"port": router.port, "version": __version__})
    on_ready()
    scheduled = router.start_schedule(settings)
    await stop.wait()
    for task in scheduled:
        task.cancel()


@asynccontextmanager
async def open_router(settings: Settings) -> AsyncIterator[Router]:
    """Everything that a router is made of, opened in order and closed in reverse."""
    new_id = Tsids(time.time, secrets.randbits).new
    warnings = WarningBook()
    instance = settings.standby_instance_id or socket.gethostname()
    notifier = notifier_of(settings, instance)
    alerts = Alerts(warnings, time.time, notifier.warned)
    access = access_of(settings)
    breakers = Breakers(
        partial(_breaker_changed, notifier),
        one_for_all=settings.breaker_scope is BreakerScope.GLOBAL,
    )
    async with AsyncExitStack() as stack:
        # What can fail comes before the first task group, which would wrap its error.
        listener = stack.enter_context(listen(settings.host, settings.port))
        policy = target_policy(settings, listener)
        store = await stack.enter_async_context(open_letters(settings))
        lock = await open_leader_lock(stack, settings, instance)
        brokers = await stack.enter_async_context(
            BrokerDoor(
                worker_id=worker_id(),
                dedup_window=settings.dedup_window,
                state_dir=settings.state_dir,
                settings=broker_settings(settings),
                warn=partial(_warn_of_queue, alerts),
            )
        )
        mandate = Mandate(boot_clock)
        shares = descriptors.shares(descriptors.current_limit(), settings.api_max_connections)
        if shares.api < settings.api_max_connections:
            _warn_of_few_descriptors(alerts, shares, settings.api_max_connections)
        options = CurlOptions(
            http_version=settings.mediator_http_version.name,
            proxy=settings.proxy,
            max_connections=shares.idle,
        )
        tracer = await stack.enter_async_context(open_tracer(settings, instance))
        sender = await stack.enter_async_context(
            HttpSender(policy, options, mandate=mandate if lock else None)
        )
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        mediator = Mediator(
            sender,
            breakers,
            alerts,
            timeout=settings.mediator_timeout,
            jitter=random.uniform,
            wall=time.time,
            sampling=UNRECORDED if tracer is None else settings.sampling,
        )
        letters = Letters(store, alerts, time.time)
        manager = QueueManager(
            Surroundings(
                brokers=brokers,
                mediator=mediator,
                letters=letters,
                alerts=alerts,
                tasks=tasks,
                jitter=random.uniform,
                journal=Journal(tracer),
                mandate=mandate,
                longest_delivery=longest_delivery(settings.mediator_timeout),
                default_retry=settings.default_retry,
                max_pools=settings.max_pools,
                pool_warning_threshold=settings.pool_warning_threshold,
            )
        )
        publishing = await stack.enter_async_context(
            open_publishing(
                brokers, lambda: manager.applied, refuse_url=policy.refuse_url, new_id=new_id
            )
        )
        view, lag = View(manager, breakers), LoopLag()
        leadership: Leadership = Alone(manager, instance)
        if lock is not None:
            view.primary = False
            leadership = Standby(
                lock,
                Candidate(instance, settings.standby_lock_ttl),
                manager,
                alerts,
                wall=time.time,
                on_change=partial(_role_changed, notifier, view),
            )
        chores = Chores(manager, breakers, alerts)
        router = Router(
            manager=manager,
            chores=chores,
            breakers=breakers,
            alerts=alerts,
            warnings=warnings,
            letters=store,
            publishing=publishing,
            replays=Replays(store, publishing, wall=time.time, new_id=new_id),
            sync=_config_sync(settings, leadership, view, alerts),
            view=view,
            in_flight=InFlight(manager.routing.tracker, time.time),
            explaining=Explaining(manager, breakers, store, time.time),
            notifier=notifier,
            snapshots=Snapshots(manager, breakers, chores, warnings, time.time),
            statistics=Statistics(manager, breakers, letters, lag, tracer),
            controls=Controls(manager, breakers),
            lag=lag,
            leadership=leadership,
            tasks=tasks,
        )
        stack.push_async_callback(router.notify)  # what a shutdown warns of is told, too
        app = create_app(router, access)
        router.port = await stack.enter_async_context(serve_api(app, listener, shares.api))
        yield router


def _config_sync(
    settings: Settings, leadership: Leadership, view: View, alerts: Alerts
) -> ConfigSync:
    async def apply(config: RoutingConfig) -> None:
        """A reload can be asked for at any time, and must not start what nobody stops."""
        if not settings.enabled:
            raise SyncFailed("MESSAGE_ROUTER_ENABLED is false")
        if view.shutting_down:
            raise SyncFailed("the router is shutting down")
        await leadership.apply(config)

    rules = SyncRules(
        naming=settings.naming,
        attempts=settings.config_attempts,
        retry_delay=settings.config_retry_delay,
        allow_empty=settings.allow_empty_config,
    )
    sources = config_sources(settings.config_urls, settings.config_token, settings.naming)
    return ConfigSync(sources, apply, alerts, rules, time.time)


def _warn_of_queue(alerts: Alerts, queue: str, text: str) -> None:
    """What an adapter finds out about its broker."""
    alerts.raise_warning(Code.QUEUE_VALIDATION, Severity.CRITICAL, f"Consumer:{queue}", text)


def _warn_of_few_descriptors(alerts: Alerts, shares: Shares, wanted: int) -> None:
    text = (
        f"the system allows {shares.limit} open files: the API takes {shares.api} connections, "
        f"not {wanted}; raise the limit (ulimit -n) or lower MESSAGE_ROUTER_API_MAX_CONNECTIONS"
    )
    alerts.raise_warning(Code.CONFIGURATION, Severity.WARN, "Process", text)


def _breaker_changed(notifier: Notifier, breaker: Breaker) -> None:
    notifier.breaker_changed(breaker)
    log.warning("circuit breaker is %s", breaker.state.value, extra={"origin": breaker.name})


def _role_changed(notifier: Notifier, view: View, primary: bool) -> None:
    view.primary = primary
    notifier.role_changed(primary=primary)


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
