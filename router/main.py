"""The wiring: which part goes where.

brokers ─► consumers ─► dispatcher ─► pools ─► mediator ─► sender ─► targets
   ▲                                    │
   └───────────── settlers ◄────────────┘     with configuration sync, chores and the API around it

`Router` is the engine with everything around it, `open_router` opens it, `serve` runs it until it
is stopped, and `run` is the program.
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
from contextlib import AsyncExitStack, asynccontextmanager, closing
from functools import partial
from typing import Any, Final, TypeVar

import uvloop
from msgspec import Raw

from router import __version__, runtime
from router.api.app import create_app
from router.api.server import CannotListen
from router.api.server import serve as serve_api
from router.core.config import RoutingConfig
from router.core.config_plan import Plan
from router.core.message import Message
from router.core.sharing import divided
from router.core.state import RouterState
from router.core.target import read_target
from router.core.timestamps import Tsids
from router.core.trace import UNRECORDED
from router.core.trial import TEST_PREFIX, Trial
from router.core.warnings import Code, Severity, WarningBook
from router.engine.alerts import Alerts
from router.engine.beat import Beat, ScheduleState, SharedTicks
from router.engine.breaker import Breaker, Breakers
from router.engine.chores import Chores
from router.engine.config_sync import (
    SYNC_SOURCE,
    ConfigSync,
    SyncFailed,
    SyncRules,
    SyncStatus,
)
from router.engine.controls import Controls
from router.engine.dead_letters import DeadLetterReplay
from router.engine.delivery import Mediator
from router.engine.groups import GroupDesk
from router.engine.leases import QueueLeases
from router.engine.notifier import Notifier
from router.engine.periodic import Chore, LoopLag, every, keep_running
from router.engine.queue_manager import QueueManager, shut_down
from router.engine.registry import Journal
from router.engine.shared_limits import SharedLimits
from router.engine.standby import Alone, Election, Standby
from router.engine.state import MessageLookup, StateReader
from router.engine.stores import Batches, MessageStates, QueueStores
from router.logs import configure_logging, dropped_lines
from router.outbound.config_source import config_sources
from router.parts import Ports, access_of, notifier_of, open_ports
from router.ports import Conflict, StoreError
from router.setting_values import BreakerScope, LogFormat
from router.settings import Settings, setting_notes
from router.storage import FileNumbers, FileTicks
from router.wiring import open_engine, order_store

log = logging.getLogger(__name__)

TEST_SECONDS: Final = 30.0  # for one request to a target that is tested
EXIT_OK: Final = 0
EXIT_NO_CONFIGURATION: Final = 1
EXIT_BAD_SETTING: Final = 2
EXIT_ABORTED: Final = 130

T = TypeVar("T")


class Router:
    """A running router, as the API and the demo use it: the engine with everything around it."""

    def __init__(
        self,
        settings: Settings,
        ports: Ports,
        manager: QueueManager,
        *,
        breakers: Breakers,
        warnings: WarningBook,
        notifier: Notifier,
        new_id: Callable[[], str],
    ) -> None:
        self._settings, self._notifier, self._lag = settings, notifier, LoopLag()
        self._sender, self._new_id = ports.sender, new_id
        self._testing = False  # a target, right now
        self._flaws: frozenset[str] = frozenset()  # of `targets`, that were warned of
        self._sender.on_change = self._warn_of_flaws
        alerts, publishing, store = manager.deps.alerts, manager.deps.publishing, ports.store
        self.port = 0  # of the API
        self.manager = manager
        self.warnings = warnings
        self.publishing = publishing
        self.letters = store
        self.controls = Controls(manager, breakers)
        self.lookup = MessageLookup(manager, breakers, store, time.time)
        stores = QueueStores(ports.brokers, lambda: manager.applied)
        self.groups = GroupDesk(manager, store)
        self.messages = MessageStates(stores, self.lookup, publishing, self.groups)
        self.chores = Chores(manager, breakers, alerts, self.groups)
        self.batches = Batches(stores, publishing, new_id)
        self.replays = DeadLetterReplay(
            store, publishing, wall=time.time, new_id=new_id, groups=self.groups
        )
        self.reader = StateReader(
            manager,
            breakers,
            manager.deps.letters,
            warnings,
            lag=self._lag,
            wall=time.time,
            tracer=ports.tracer,
            credentials=ports.credential_states,
            dropped_logs=dropped_lines,
        )
        self.limits = manager.deps.limits
        self.beat = Beat(
            lambda: manager.applied,
            publishing,
            ports.brokers,
            FileTicks(settings.state_dir / "schedules.json")
            if ports.locks is None
            else SharedTicks(ports.locks),
            alerts,
            wall=time.time,
            is_alone=ports.locks is None,
        )
        self.election = _election(settings, ports, manager, notifier)
        sources = config_sources(settings.config_urls, settings.config_token, settings.naming)
        rules = SyncRules(
            naming=settings.naming,
            attempts=settings.config_attempts,
            retry_delay=settings.config_retry_delay,
            allow_empty=settings.allow_empty_config,
            max_connections=settings.max_connections,
        )
        partitions = FileNumbers(
            settings.state_dir / "partitions.json", "the numbers of partitions"
        )
        self.sync = ConfigSync(
            sources, self._apply, alerts, rules, time.time, partitions=partitions
        )

    def now(self) -> float:
        return time.time()

    def state(self) -> RouterState:
        return self.reader.read(self.sync.counts, self.election.status())

    async def schedules(self) -> Sequence[ScheduleState]:
        return await self.beat.states()

    def config_status(self) -> SyncStatus:
        return self.sync.status()

    async def reload(self) -> Plan:
        return await self.sync.reload()

    def release_queue(self, name: str) -> None:
        """Give the lease of a queue to another router. Raises Unknown, Conflict."""
        if not isinstance(self.election, QueueLeases):
            raise Conflict("queues have leases only with STANDBY_ENABLED and STANDBY_SCOPE=queue")
        self.election.release(name)

    async def test_target(self, url: str, payload: bytes | None) -> Trial:
        """Send one request to a target, as for a message (TGT-10). Raises Conflict, BadTarget."""
        if self._testing:
            raise Conflict("another target is being tested: try again when that has ended")
        read_target(url)
        id_ = f"{TEST_PREFIX}{self._new_id()}"
        message = Message(id=id_, target=url, payload=Raw(payload or b""))
        self._testing = True
        try:
            return await self._sender.trial(message, TEST_SECONDS)
        finally:
            self._testing = False

    def reload_soon(self) -> None:
        """Reload on SIGHUP. No caller waits for the result, so it is logged."""

        async def reload_and_log() -> None:
            try:
                plan = await self.reload()
            except SyncFailed as failure:
                log.warning("not reloaded: %s", failure)
            except Exception:  # the bulkhead: a bug in a reload must not end the router
                log.exception("not reloaded")
            else:
                lines = await asyncio.to_thread(plan.lines)  # of thousands of changes, perhaps
                log.info("configuration reloaded", extra={"changes": lines})

        self.manager.deps.tasks.create_task(reload_and_log(), name="reload")

    async def notify(self) -> None:
        """Send the notifications that have been collected."""
        await self._notifier.tell(self.manager.consumers)

    def count_beats(self) -> int:
        """Return a number that grows as long as the event loop goes on."""
        return self._lag.beats

    def start_tasks(self) -> Sequence[asyncio.Task[None]]:
        """Start what runs by the clock. The caller cancels it."""
        settings, tasks = self._settings, self.manager.deps.tasks
        started = list(self.chores.start(tasks))
        work: dict[str, Chore] = {"loop lag": self._lag.watch}
        if settings.enabled:
            work["sync"] = partial(self.sync.run, settings.sync_interval, random.uniform)
            work["beat"] = partial(self.beat.run, self.election.may_publish)
            self.election.start(tasks)
            if self.limits is not None:
                work["limits"] = partial(self.limits.run, lambda: self.election.status().primary)
        if self._notifier.mailboxes:
            work["notify"] = partial(every, settings.notify_batch_interval, self.notify)
        warn = self.manager.deps.alerts.of("Chores")
        started += [
            tasks.create_task(keep_running(name, each, warn), name=name)
            for name, each in work.items()
        ]
        return started

    async def _apply(self, config: RoutingConfig) -> Plan:
        """Apply it, unless the router is disabled or shutting down: a reload can come any time."""
        if not self._settings.enabled:
            raise SyncFailed("MESSAGE_ROUTER_ENABLED is false")
        if self.reader.shutting_down:
            raise SyncFailed("the router is shutting down")
        self._sender.use(config.targets)
        self._warn_of_flaws()
        settings = self._settings
        share = divided(config, settings.limit_sharers, rates=self.limits is None)
        return await self.election.apply(share)

    def _warn_of_flaws(self) -> None:
        """Warn of entries of `targets` that send nothing, and take back what is over (TGT-4)."""
        alerts, flaws = self.manager.deps.alerts, self._sender.flaws()
        if not self._flaws <= set(flaws):
            alerts.withdraw(Code.CREDENTIALS, SYNC_SOURCE)
        self._flaws = frozenset(flaws)
        for flaw in flaws:
            alerts.of(SYNC_SOURCE)(Code.CREDENTIALS, flaw, Severity.CRITICAL)


def _election(
    settings: Settings, ports: Ports, manager: QueueManager, notifier: Notifier
) -> Election:
    """Return what decides on what this router works: the leader lock, or leases of queues."""
    if ports.locks is not None and ports.leases_queues:
        return QueueLeases(
            ports.locks,
            manager,
            manager.deps.alerts,
            instance=ports.instance,
            ttl=settings.standby_lock_ttl,
            wall=time.time,
            now=ports.leadership.now,
            jitter=random.uniform,
        )
    if ports.lock is None:
        return Alone(manager, ports.instance, has_replicas=settings.replicas > 1)
    return Standby(
        ports.lock,
        manager,
        manager.deps.alerts,
        instance=ports.instance,
        ttl=settings.standby_lock_ttl,
        wall=time.time,
        on_change=notifier.role_changed,
    )


@asynccontextmanager
async def open_router(settings: Settings) -> AsyncIterator[Router]:
    """Open everything that a router is made of, in order; close it in reverse."""
    new_id = Tsids(time.time, secrets.randbits).new
    instance = settings.standby_instance_id or socket.gethostname()
    notifier, warnings = notifier_of(settings, instance), WarningBook()
    alerts = Alerts(warnings, time.time, notifier.warned)
    limits: SharedLimits | None = None
    access = access_of(settings)

    def breaker_changed(breaker: Breaker) -> None:
        notifier.breaker_changed(breaker)
        log.warning("circuit breaker is %s", breaker.state.value, extra={"origin": breaker.name})

    one_for_all = settings.breaker_scope is BreakerScope.GLOBAL
    breakers = Breakers(breaker_changed, one_for_all=one_for_all)
    async with AsyncExitStack() as stack:
        # What can fail comes before the first task group, which would wrap its error.
        ports = await open_ports(stack, settings, alerts, instance)
        if ports.limits is not None:
            limits = SharedLimits(ports.limits, alerts, routers=settings.limit_sharers)
        mediator = Mediator(
            ports.sender,
            alerts,
            timeout=settings.mediator_timeout,
            jitter=random.uniform,
            wall=time.time,
            sampling=UNRECORDED if ports.tracer is None else settings.sampling,
            tasks=ports.tasks,
        )
        manager = await stack.enter_async_context(
            open_engine(
                settings,
                mediator,
                alerts,
                brokers=ports.brokers,
                store=ports.store,
                new_id=new_id,
                refuse_url=ports.refuse,
                breakers=breakers,
                leadership=ports.leadership,
                longest_request=max(settings.mediator_timeout, ports.longest_task),
                journal=Journal(ports.tracer),
                order=order_store(settings, ports.brokers),
                limits=limits,
            )
        )
        router = Router(
            settings,
            ports,
            manager,
            breakers=breakers,
            warnings=warnings,
            notifier=notifier,
            new_id=new_id,
        )
        stack.push_async_callback(router.notify)  # what a shutdown warns of is sent, too
        serving = serve_api(create_app(router, access), ports.listener, ports.shares.api)
        router.port = await stack.enter_async_context(serving)
        yield router


async def serve(
    router: Router,
    settings: Settings,
    stop: asyncio.Event,
    on_ready: Callable[[], None] = lambda: None,
) -> int:
    """Sync the configuration, route until `stop` is set, shut down. Return the exit code."""
    if settings.enabled:
        first = await _unless_stopped(router.sync.sync(first=True), stop)
        if first is not None and not first.ok:
            log.critical("no configuration, so there is nothing to do: %s", first.reason)
            return EXIT_NO_CONFIGURATION
    if not stop.is_set():
        router.reader.initialized = True
        runtime.tune_for_service()
        log.info("ready", extra={"port": router.port, "version": __version__})
        on_ready()
        started = router.start_tasks()
        with runtime.stalls_reported(router.count_beats):
            await stop.wait()
        for task in started:
            task.cancel()
    log.info("shutting down")
    router.reader.shutting_down = True
    router.election.stop()
    await shut_down(router.manager, settings.shutdown_timeout)
    await router.election.close()
    return EXIT_OK


async def _unless_stopped(work: Coroutine[Any, Any, T], stop: asyncio.Event) -> T | None:
    """Return the result, or None if `stop` was set before the work was done."""
    async with asyncio.TaskGroup() as tasks:
        working = tasks.create_task(work, name="first sync")
        stopping = tasks.create_task(stop.wait(), name="stop")
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if working.done():
            return working.result()
        working.cancel()
        return None


def run(env: Mapping[str, str]) -> int:
    """Run the service. Return the exit code. Raises BadSetting."""
    settings = Settings.from_env(env)
    as_json = settings.log_format is LogFormat.JSON or (
        settings.log_format is LogFormat.AUTO and not sys.stdout.isatty()
    )
    with closing(configure_logging(settings.log_level.name, as_json=as_json)):
        for note in (*setting_notes(env), *settings.notes()):
            log.warning("%s", note)
        runtime.raise_limit()
        return uvloop.run(_run_until_signalled(settings))


async def _run_until_signalled(settings: Settings) -> int:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def stop_or_abort() -> None:
        if stop.is_set():
            os._exit(EXIT_ABORTED)  # a second signal ends it at once (OPS-4)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop_or_abort)
    try:
        async with open_router(settings) as router:
            loop.add_signal_handler(signal.SIGHUP, router.reload_soon)
            return await serve(router, settings, stop)
    except (StoreError, CannotListen) as error:
        print(f"message-router: {error}", file=sys.stderr)  # noqa: T201  as for a wrong setting
        return EXIT_BAD_SETTING
