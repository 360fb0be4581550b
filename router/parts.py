"""Makes parts of the service from its settings, and refuses what cannot be had.

`main` says which part goes where. What every engine needs is made in `wiring`.
"""

import logging
import secrets
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from typing import Final

from router.api.access import Access, TokenJudge, is_loopback
from router.core.target_safety import TargetPolicy
from router.engine.notifier import Notifier
from router.locks import LockRequest, open_lock
from router.outbound.notifications import ChannelAddresses, open_channels
from router.outbound.process.executors import BadExecutors, Executor, read_executors
from router.ports import Lock, QueueRefused, Tracer
from router.setting_values import AuthMode
from router.settings import BadSetting, Settings

log = logging.getLogger(__name__)

_LOOPBACKS: Final = ("127.0.0.1", "::1")


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
    """Whether an address is one of this host's: nobody can bind another one.

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


async def open_leader_lock(stack: AsyncExitStack, settings: Settings, instance: str) -> Lock | None:
    """Return None if this router has no standby."""
    if not settings.standby_enabled:
        return None
    request = LockRequest(
        key=settings.standby_lock_key,
        instance=instance,
        process=secrets.token_hex(8),
        ttl=settings.standby_lock_ttl,
    )
    nats = settings.brokers.nats
    try:
        opening = open_lock(settings.standby_lock_url or "", request, nats)
        return await stack.enter_async_context(opening)
    except ModuleNotFoundError as error:
        needs = f"needs the package {error.name}: pip install 'message-router[all]'"
        raise BadSetting(f"STANDBY_LOCK_URL: this lock {needs}") from None
    except (ValueError, QueueRefused):  # without their texts: the URL may hold a password
        raise BadSetting("STANDBY_LOCK_URL cannot be used to connect") from None


def open_tracer(settings: Settings, instance: str) -> AbstractAsyncContextManager[Tracer | None]:
    """Return None if traces are off, or if the packages are not installed.

    That does not prevent a start: platforms set these variables for everything that they run.
    """
    endpoint = settings.traces_endpoint
    if endpoint is None:
        return nullcontext()
    try:
        from router.outbound.traces import Traces  # noqa: PLC0415  on use: an extra
    except ModuleNotFoundError as error:
        needs = f"they need the package {error.name}: pip install 'message-router[otel]'"
        log.warning("OTEL_* asks for traces, and there are none: %s", needs)
        return nullcontext()
    try:
        return Traces(endpoint, settings.sampling, instance)
    except ValueError as error:
        raise BadSetting(f"OTEL_EXPORTER_OTLP_*: {error}") from None


def notifier_of(settings: Settings, instance: str) -> Notifier:
    addresses = ChannelAddresses(
        webhook=settings.notify_webhook_url,
        slack=settings.notify_slack_url,
        teams=settings.notify_teams_url,
        smtp=settings.notify_smtp_url,
        recipients=settings.notify_email_to,
    )
    channels = open_channels(addresses, socket.gethostname())
    return Notifier(channels, settings.notify_min_severity, instance=instance, wall=time.time)


def access_of(settings: Settings) -> Access:
    return Access(
        mode=settings.auth_mode,
        host=settings.host,
        username=settings.basic_username or "",
        password=settings.basic_password or "",
        token=settings.api_token or "",
        judge=_token_judge(settings) if settings.auth_mode is AuthMode.OIDC else None,
    )


def _token_judge(settings: Settings) -> TokenJudge:
    try:
        from router.api.oidc import Provider  # noqa: PLC0415  on use: an extra
    except ModuleNotFoundError as error:
        needs = f"needs the package {error.name}: pip install 'message-router[oidc]'"
        raise BadSetting(f"MESSAGE_ROUTER_AUTH_MODE: OIDC {needs}") from None
    return Provider(settings.oidc_issuer or "", settings.oidc_audience or "", time.monotonic)
