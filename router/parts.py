"""Opens what connects the service to the outside world, as its settings say.

`main` wires it. What every engine needs is made in `wiring`.
"""

import logging
import secrets
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from dataclasses import dataclass
from typing import Final

from router import runtime
from router.api.access import Access, TokenJudge, is_loopback
from router.api.server import listen
from router.brokers import BrokerRegistry
from router.brokers.nats import NatsSettings
from router.brokers.workers import THIS_MACHINE
from router.core.config import QueueConfig
from router.core.credentials import BadCredentials
from router.core.leadership import Leadership
from router.core.state import CredentialState
from router.core.target import PROCESS, Target, TargetPolicy
from router.core.warnings import Code, Severity
from router.curl.loop import CurlOptions
from router.engine.alerts import Alerts
from router.engine.notifier import Notifier
from router.limits import LimitsScope, open_limits
from router.locks import LockRequest, open_locks
from router.outbound.credentials import CredentialStore, Warnings
from router.outbound.http_sender import HttpSender
from router.outbound.notifications import open_channels
from router.outbound.process import BadExecutors, Executor, read_executors
from router.outbound.process.tasks import ProcessTasks, open_tasks, refusal
from router.ports import DeadLetterStore, LimitsServer, Lock, LockServer, QueueRefused, Tracer
from router.setting_values import AuthMode, BadSetting
from router.settings import Settings
from router.wiring import open_brokers, open_letters

log = logging.getLogger(__name__)

_LOOPBACKS: Final = ("127.0.0.1", "::1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """The router's connections to the outside world."""

    instance: str  # the name of this router
    listener: socket.socket
    policy: TargetPolicy
    store: DeadLetterStore
    lock: Lock | None  # of a hot standby; None: there is none
    locks: LockServer | None  # None: this router works on its own
    leases_queues: bool
    limits: LimitsServer | None  # None: this router shares no limits
    leadership: Leadership
    brokers: BrokerRegistry
    shares: runtime.DescriptorBudget
    tracer: Tracer | None
    sender: HttpSender
    credentials: CredentialStore | None  # None: there is no file
    executors: Mapping[str, Executor]
    tasks: ProcessTasks | None  # None: there are no executors

    @property
    def longest_task(self) -> float:
        """Return how many seconds the run of a process may take."""
        return max((each.longest_run for each in self.executors.values()), default=0.0)

    def credential_states(self) -> Sequence[CredentialState]:
        return () if self.credentials is None else self.credentials.states

    def refuse(self, target: Target, queue: QueueConfig) -> str | None:
        """Return why messages of this queue may not go there, as far as can be seen."""
        if self.executors and target.scheme == PROCESS:
            return refusal(self.executors, target.host, queue.name)
        return self.policy.refuse_url(target)


async def open_ports(
    stack: AsyncExitStack, settings: Settings, alerts: Alerts, instance: str
) -> Ports:
    # The helper that starts processes comes before anything that may start a thread.
    executors, tasks = executors_of(settings), None
    if executors:
        try:
            tasks = await stack.enter_async_context(open_tasks(executors))
        except OSError as error:
            text = f"MEDIATOR_EXECUTORS_FILE: processes cannot be started: {error}"
            raise BadSetting(text) from None
    credentials = credentials_of(settings, alerts)
    listener = stack.enter_context(listen(settings.host, settings.port))
    policy = target_policy(settings, listener)
    store = await stack.enter_async_context(open_letters(settings))
    locks = await open_lock_server(stack, settings, instance)
    lock = locks.lock("") if locks is not None and settings.is_hot_standby else None
    limits = await open_limits_server(stack, settings)
    brokers = await stack.enter_async_context(open_brokers(settings, alerts))
    leadership = Leadership(THIS_MACHINE.uptime)  # it runs while we sleep, as on a lock server
    shares = runtime.shares(runtime.current_limit(), settings.api_max_connections)
    if shares.api < settings.api_max_connections:
        text = (
            f"the system allows {shares.limit} open files: the API accepts {shares.api} "
            f"connections, not {settings.api_max_connections}; raise the limit (ulimit -n) or "
            "lower MESSAGE_ROUTER_API_MAX_CONNECTIONS"
        )
        alerts.of("Process")(Code.CONFIGURATION, text)
    options = CurlOptions(
        http_version=settings.mediator_http_version.name,
        proxy=settings.proxy,
        max_connections=shares.idle,
    )
    return Ports(
        instance=instance,
        listener=listener,
        policy=policy,
        store=store,
        lock=lock,
        locks=locks,
        leases_queues=settings.leases_queues,
        limits=limits,
        leadership=leadership,
        brokers=brokers,
        shares=shares,
        tracer=await stack.enter_async_context(open_tracer(settings, instance)),
        sender=await stack.enter_async_context(
            HttpSender(
                policy,
                options,
                leadership=leadership if lock else None,
                credentials=credentials,
            )
        ),
        credentials=credentials,
        executors=executors,
        tasks=tasks,
    )


def target_policy(settings: Settings, listener: socket.socket) -> TargetPolicy:
    address, port = listener.getsockname()[:2]
    # `localhost` is both, and libcurl tries the one where we do not listen, too.
    own = {address, *_LOOPBACKS} if is_loopback(address) else {address}
    return TargetPolicy(
        allowed_hosts=settings.allowed_hosts,
        block_private=settings.block_private,
        own_addresses=frozenset((each, port) for each in own),
        is_this_host=is_this_host,
    )


def is_this_host(ip: str) -> bool:
    """Whether an address is one of this host's: only such an address can be bound.

    A list made at start would miss those that an interface gets later.
    """
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((ip, 0))
    except OSError:
        return False
    return True


def executors_of(settings: Settings) -> Mapping[str, Executor]:
    """Return which processes messages may run, by name. Raises BadSetting."""
    if settings.executors_file is None:
        return {}
    if sys.platform != "linux":
        raise BadSetting("MEDIATOR_EXECUTORS_FILE: processes can be run on Linux only")
    try:
        return read_executors(settings.executors_file)
    except BadExecutors as error:
        raise BadSetting(f"MEDIATOR_EXECUTORS_FILE: {error}") from None


def credentials_of(settings: Settings, alerts: Alerts) -> CredentialStore | None:
    """Return the router's own credentials for targets. Raises BadSetting."""
    if settings.credentials_file is None:
        return None

    def raise_(source: str, code: str, text: str, severity: Severity) -> None:
        alerts.of(source)(code, text, severity)

    def withdraw(source: str, code: str) -> None:
        alerts.withdraw(code, source)

    try:
        return CredentialStore(settings.credentials_file, Warnings(raise_, withdraw))
    except BadCredentials as error:
        raise BadSetting(f"MESSAGE_ROUTER_CREDENTIALS_FILE: {error}") from None


async def open_lock_server(
    stack: AsyncExitStack, settings: Settings, instance: str
) -> LockServer | None:
    """Return None if this router needs no lock."""
    if not settings.standby_enabled:
        return None
    request = LockRequest(
        key=settings.standby_lock_key,
        instance=instance,
        process=secrets.token_hex(8),
        ttl=settings.standby_lock_ttl,
    )
    nats = settings.brokers.of(NatsSettings)
    try:
        opening = open_locks(settings.standby_lock_url or "", request, nats)
        return await stack.enter_async_context(opening)
    except ModuleNotFoundError as error:
        needs = f"needs the package {error.name}: pip install 'message-router[all]'"
        raise BadSetting(f"STANDBY_LOCK_URL: this lock {needs}") from None
    except (ValueError, QueueRefused):  # without their texts: the URL may hold a password
        raise BadSetting("STANDBY_LOCK_URL cannot be used to connect") from None


async def open_limits_server(stack: AsyncExitStack, settings: Settings) -> LimitsServer | None:
    """Return None if this router shares no limits with others."""
    url = settings.limits_server
    if url is None:
        return None
    key = settings.limits_key or settings.standby_lock_key
    try:
        opening = open_limits(url, LimitsScope(key, secrets.token_hex(8)))
        return await stack.enter_async_context(opening)
    except ModuleNotFoundError as error:
        needs = f"needs the package {error.name}: pip install 'message-router[all]'"
        raise BadSetting(f"MESSAGE_ROUTER_LIMITS_URL: this server {needs}") from None
    except (ValueError, QueueRefused):  # without their texts: the URL may hold a password
        raise BadSetting("MESSAGE_ROUTER_LIMITS_URL cannot be used to connect") from None


def open_tracer(settings: Settings, instance: str) -> AbstractAsyncContextManager[Tracer | None]:
    """Return None if traces are off, or if the packages are not installed.

    That is no reason not to start: platforms set these variables for everything that they run.
    """
    endpoint = settings.traces_endpoint
    if endpoint is None:
        return nullcontext()
    try:
        from router.outbound.traces import Traces  # noqa: PLC0415  on use: an extra
    except ModuleNotFoundError as error:
        needs = f"they need the package {error.name}: pip install 'message-router[otel]'"
        log.warning("OTEL_* variables are set, but traces are off: %s", needs)
        return nullcontext()
    try:
        return Traces(endpoint, settings.sampling, instance)
    except ValueError as error:
        raise BadSetting(f"OTEL_EXPORTER_OTLP_*: {error}") from None


def notifier_of(settings: Settings, instance: str) -> Notifier:
    channels = open_channels(
        socket.gethostname(),
        webhook=settings.notify_webhook_url,
        slack=settings.notify_slack_url,
        teams=settings.notify_teams_url,
        smtp=settings.notify_smtp_url,
        recipients=settings.notify_email_to,
    )
    return Notifier(channels, settings.notify_min_severity, instance=instance, wall=time.time)


def access_of(settings: Settings) -> Access:
    judge: TokenJudge | None = None
    if settings.auth_mode is AuthMode.OIDC:
        try:
            from router.api.oidc import Provider  # noqa: PLC0415  on use: an extra
        except ModuleNotFoundError as error:
            needs = f"needs the package {error.name}: pip install 'message-router[oidc]'"
            raise BadSetting(f"MESSAGE_ROUTER_AUTH_MODE: OIDC {needs}") from None
        judge = Provider(
            settings.oidc_issuer or "",
            settings.oidc_audience or "",
            time.monotonic,
            required=settings.oidc_required_claims,
            admin=settings.oidc_admin_claim,
        )
    return Access(
        mode=settings.auth_mode,
        host=settings.host,
        username=settings.basic_username or "",
        password=settings.basic_password or "",
        token=settings.api_token or "",
        judge=judge,
    )
