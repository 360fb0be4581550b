"""The wiring: which part goes where.

brokers ─► consumers ─► dispatcher ─► pools ─► mediator ─► sender ─► targets
   ▲                                    │
   └───────────── settlers ◄────────────┘     configuration sync, chores and the API stand beside
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
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

import uvloop

from router import __version__, runtime
from router.api.app import create_app
from router.api.server import CannotListen, listen
from router.api.server import serve as serve_api
from router.brokers import BrokerRegistry
from router.core.config import QueueConfig, RoutingConfig
from router.core.config_plan import Plan
from router.core.leadership import Leadership
from router.core.state import RouterState
from router.core.target import PROCESS, Target
from router.core.target_safety import TargetPolicy
from router.core.trace import UNRECORDED
from router.core.tsid import Tsids
from router.core.warnings import Code, Severity, WarningBook
from router.curl.loop import CurlOptions
from router.engine.alerts import Alerts
from router.engine.batches import Batches
from router.engine.beat import Beat, ScheduleState
from router.engine.breaker import Breaker, Breakers
from router.engine.chores import Chores
from router.engine.config_sync import ConfigSync, SyncFailed, SyncRules, SyncStatus
from router.engine.controls import Controls
from router.engine.delivery import Mediator, longest_delivery
from router.engine.journal import Journal
from router.engine.loop_lag import LoopLag
from router.engine.message_states import MessageStates
from router.engine.notifier import Notifier
from router.engine.periodic import every
from router.engine.publishing import QueuePublisher
from router.engine.queue_manager import QueueManager
from router.engine.replay import DeadLetterReplay
from router.engine.shutdown import shut_down
from router.engine.standby import Alone, Candidate, Election, Standby
from router.engine.state import MessageLookup, StateReader
from router.engine.stores import QueueStores
from router.engine.tasks import TaskMediator
from router.logs import configure_logging, dropped_lines
from router.outbound.config_source import config_sources
from router.outbound.http_sender import HttpSender
from router.outbound.process.executors import Executor
from router.outbound.process.runner import open_processes
from router.outbound.process.tasks import ProcessTasks, refusal
from router.parts import (
    access_of,
    executors_of,
    notifier_of,
    open_leader_lock,
    open_tracer,
    target_policy,
)
from router.ports import DeadLetterStore, Lock, StoreError, Tracer
from router.runtime import Shares
from router.setting_values import BreakerScope, LogFormat
from router.settings import BadSetting, Settings, setting_notes
from router.storage.ticks import FileTicks
from router.wiring import new_leadership, open_brokers, open_engine, open_letters

log = logging.getLogger(__name__)

EXIT_OK: Final = 0
EXIT_NO_CONFIGURATION: Final = 1
EXIT_BAD_SETTING: Final = 2
EXIT_ENDED: Final = 130

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class Router:
    """A running router, as the API and the demo use it."""

    manager: QueueManager
    chores: Chores
    breakers: Breakers
    alerts: Alerts
    warnings: WarningBook
    letters: DeadLetterStore
    publishing: QueuePublisher
    messages: MessageStates
    batches: Batches
    beat: Beat
    replays: DeadLetterReplay
    sync: ConfigSync
    reader: StateReader
    lookup: MessageLookup
    notifier: Notifier
    controls: Controls
    lag: LoopLag
    election: Election
    tasks: asyncio.TaskGroup
    port: int = 0  # of the API

    def now(self) -> float:
        return time.time()

    def state(self) -> RouterState:
        return self.reader.read(self.sync.counts, self.election.status())

    def schedules(self) -> Sequence[ScheduleState]:
        return self.beat.states()

    def config_status(self) -> SyncStatus:
        return self.sync.status()

    async def reload(self) -> Plan:
        return await self.sync.reload()

    async def notify(self) -> None:
        """Send now what has gathered."""
        await self.notifier.tell(self.manager.consumers)

    def reload_soon(self) -> None:
        """Reload on SIGHUP. Nobody waits for the result, so it is logged."""
        self.tasks.create_task(self._reload_and_log(), name="reload")

    def start_schedule(self, settings: Settings) -> Sequence[asyncio.Task[None]]:
        scheduled = list(self.chores.start(self.tasks))
        scheduled.append(self.tasks.create_task(self.lag.watch(), name="loop lag"))
        if settings.enabled:
            syncing = self.sync.run(settings.sync_interval, random.uniform)
            scheduled.append(self.tasks.create_task(syncing, name="sync"))
            self.election.start(self.tasks)
            beating = self.beat.run(lambda: self.election.status().primary)
            scheduled.append(self.tasks.create_task(beating, name="beat"))
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
    """Run the service. Return the exit code. Raises BadSetting."""
    settings = Settings.from_env(env)
    as_json = settings.log_format is LogFormat.JSON or (
        settings.log_format is LogFormat.AUTO and not sys.stdout.isatty()
    )
    with closing(configure_logging(settings.log_level.name, as_json=as_json)):
        for note in setting_notes(env):
            log.warning("%s", note)
        runtime.raise_limit()
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
    """Sync, route until told to stop, shut down. Return the exit code."""
    if settings.enabled:
        first = await _unless_stopped(router.sync.sync(first=True), stop)
        if first is not None and not first.ok:
            log.critical("no configuration, so nothing to do: %s", first.reason)
            return EXIT_NO_CONFIGURATION
    if not stop.is_set():
        router.reader.initialized = True
        runtime.tune_for_service()
        log.info("ready", extra={"port": router.port, "version": __version__})
        on_ready()
        scheduled = router.start_schedule(settings)
        await stop.wait()
        for task in scheduled:
            task.cancel()
    log.info("shutting down")
    router.reader.shutting_down = True
    router.election.stop()
    await shut_down(router.manager, router.alerts, settings.shutdown_timeout)
    await router.election.close()
    return EXIT_OK


@asynccontextmanager
async def open_router(settings: Settings) -> AsyncIterator[Router]:
    """Open everything that a router is made of, in order; close it in reverse."""
    new_id = Tsids(time.time, secrets.randbits).new
    warnings = WarningBook()
    instance = settings.standby_instance_id or socket.gethostname()
    notifier = notifier_of(settings, instance)
    alerts = Alerts(warnings, time.time, notifier.warned)
    access = access_of(settings)
    is_global = settings.breaker_scope is BreakerScope.GLOBAL
    breakers = Breakers(partial(_breaker_changed, notifier), one_for_all=is_global)
    async with AsyncExitStack() as stack:
        # What can fail comes before the first task group, which would wrap its error.
        ports = await _open_ports(stack, settings, alerts, instance)
        manager = await stack.enter_async_context(
            _open_engine(settings, ports, alerts, breakers, new_id)
        )
        tasks, publishing = manager.deps.tasks, manager.deps.publishing
        lag, store, letters = LoopLag(), ports.store, manager.deps.letters
        reader = StateReader(
            manager,
            breakers,
            letters,
            warnings,
            lag=lag,
            wall=time.time,
            tracer=ports.tracer,
            dropped_logs=dropped_lines,
        )
        beat = Beat(
            lambda: manager.applied,
            publishing,
            ports.brokers,
            FileTicks(settings.state_dir / "schedules.json"),
            alerts,
            wall=time.time,
            is_alone=ports.lock is None,
        )
        stores = QueueStores(ports.brokers, lambda: manager.applied)
        lookup = MessageLookup(manager, breakers, store, time.time)
        election: Election = Alone(manager, instance)
        if ports.lock is not None:
            reader.primary = False
            candidate = Candidate(instance, settings.standby_lock_ttl)
            on_change = partial(_role_changed, notifier, reader)
            election = Standby(
                ports.lock, candidate, manager, alerts, wall=time.time, on_change=on_change
            )
        router = Router(
            manager=manager,
            chores=Chores(manager, breakers, alerts),
            breakers=breakers,
            alerts=alerts,
            warnings=warnings,
            letters=store,
            publishing=publishing,
            messages=MessageStates(stores, lookup, publishing),
            batches=Batches(stores, publishing, new_id),
            beat=beat,
            replays=DeadLetterReplay(store, publishing, wall=time.time, new_id=new_id),
            sync=_config_sync(settings, election, reader, alerts),
            reader=reader,
            lookup=lookup,
            notifier=notifier,
            controls=Controls(manager, breakers),
            lag=lag,
            election=election,
            tasks=tasks,
        )
        stack.push_async_callback(router.notify)  # what a shutdown warns of is sent, too
        app = create_app(router, access)
        serving = serve_api(app, ports.listener, ports.shares.api)
        router.port = await stack.enter_async_context(serving)
        yield router


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """What connects the router to the outside world."""

    listener: socket.socket
    policy: TargetPolicy
    store: DeadLetterStore
    lock: Lock | None
    leadership: Leadership
    brokers: BrokerRegistry
    shares: Shares
    tracer: Tracer | None
    sender: HttpSender
    executors: Mapping[str, Executor]
    tasks: ProcessTasks | None  # None: there are no executors

    def refuse(self, target: Target, queue: QueueConfig) -> str | None:
        """Return why messages of this queue may not go there, as far as can be seen."""
        if self.executors and target.scheme == PROCESS:
            return refusal(self.executors, target.host, queue.name)
        return self.policy.refuse_url(target)


async def _open_ports(
    stack: AsyncExitStack, settings: Settings, alerts: Alerts, instance: str
) -> Ports:
    # The helper that starts processes comes before anything that may start a thread.
    executors, tasks = executors_of(settings), None
    if executors:
        try:
            processes = await stack.enter_async_context(open_processes(executors))
        except OSError as error:
            text = f"MEDIATOR_EXECUTORS_FILE: processes cannot be started: {error}"
            raise BadSetting(text) from None
        tasks = ProcessTasks(executors, processes)
    listener = stack.enter_context(listen(settings.host, settings.port))
    policy = target_policy(settings, listener)
    store = await stack.enter_async_context(open_letters(settings))
    lock = await open_leader_lock(stack, settings, instance)
    brokers = await stack.enter_async_context(open_brokers(settings, alerts))
    leadership = new_leadership()
    shares = runtime.shares(runtime.current_limit(), settings.api_max_connections)
    if shares.api < settings.api_max_connections:
        _warn_of_few_descriptors(alerts, shares, settings.api_max_connections)
    options = CurlOptions(
        http_version=settings.mediator_http_version.name,
        proxy=settings.proxy,
        max_connections=shares.idle,
    )
    tracer = await stack.enter_async_context(open_tracer(settings, instance))
    sender = await stack.enter_async_context(
        HttpSender(policy, options, leadership=leadership if lock else None)
    )
    return Ports(
        listener=listener,
        policy=policy,
        store=store,
        lock=lock,
        leadership=leadership,
        brokers=brokers,
        shares=shares,
        tracer=tracer,
        sender=sender,
        executors=executors,
        tasks=tasks,
    )


def _open_engine(
    settings: Settings,
    ports: Ports,
    alerts: Alerts,
    breakers: Breakers,
    new_id: Callable[[], str],
) -> AbstractAsyncContextManager[QueueManager]:
    mediator = Mediator(
        ports.sender,
        breakers,
        alerts,
        timeout=settings.mediator_timeout,
        jitter=random.uniform,
        wall=time.time,
        sampling=UNRECORDED if ports.tracer is None else settings.sampling,
        tasks=None if ports.tasks is None else TaskMediator(ports.tasks, alerts, time.time).attempt,
    )
    longest_task = max((each.longest_run for each in ports.executors.values()), default=0.0)
    return open_engine(
        settings,
        mediator,
        alerts,
        brokers=ports.brokers,
        store=ports.store,
        new_id=new_id,
        refuse_url=ports.refuse,
        leadership=ports.leadership,
        longest_delivery=max(longest_delivery(settings.mediator_timeout), longest_task),
        journal=Journal(ports.tracer),
    )


def _config_sync(
    settings: Settings, election: Election, reader: StateReader, alerts: Alerts
) -> ConfigSync:
    async def apply(config: RoutingConfig) -> Plan:
        """Apply it, unless nobody would stop what it starts: a reload may come at any time."""
        if not settings.enabled:
            raise SyncFailed("MESSAGE_ROUTER_ENABLED is false")
        if reader.shutting_down:
            raise SyncFailed("the router is shutting down")
        return await election.apply(config)

    rules = SyncRules(
        naming=settings.naming,
        attempts=settings.config_attempts,
        retry_delay=settings.config_retry_delay,
        allow_empty=settings.allow_empty_config,
        max_connections=settings.max_connections,
    )
    sources = config_sources(settings.config_urls, settings.config_token, settings.naming)
    return ConfigSync(sources, apply, alerts.raise_warning, rules, time.time)


def _warn_of_few_descriptors(alerts: Alerts, shares: Shares, wanted: int) -> None:
    text = (
        f"the system allows {shares.limit} open files: the API takes {shares.api} connections, "
        f"not {wanted}; raise the limit (ulimit -n) or lower MESSAGE_ROUTER_API_MAX_CONNECTIONS"
    )
    alerts.raise_warning(Code.CONFIGURATION, Severity.WARN, "Process", text)


def _breaker_changed(notifier: Notifier, breaker: Breaker) -> None:
    notifier.breaker_changed(breaker)
    log.warning("circuit breaker is %s", breaker.state.value, extra={"origin": breaker.name})


def _role_changed(notifier: Notifier, reader: StateReader, primary: bool) -> None:
    reader.primary = primary
    notifier.role_changed(primary=primary)


def _stop_or_end(stop: asyncio.Event) -> None:
    if stop.is_set():
        os._exit(EXIT_ENDED)  # a second signal ends it at once (OPS-4)
    stop.set()


async def _unless_stopped(work: Coroutine[Any, Any, T], stop: asyncio.Event) -> T | None:
    """Return None if the router was told to stop before the work was done."""
    async with asyncio.TaskGroup() as tasks:
        working = tasks.create_task(work, name="first sync")
        stopping = tasks.create_task(stop.wait(), name="stop")
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if working.done():
            return working.result()
        working.cancel()
        return None
