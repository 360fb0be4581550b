"""Parts of a router as its settings want them. What they ask for and cannot have is refused here.

Which part goes where is `main`'s to say.
"""

import logging
import os
import secrets
import socket
import time
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from pathlib import Path
from typing import Final
from urllib.parse import quote

from router.api.access import Access, AuthMode, TokenJudge, is_loopback
from router.broker_settings import broker_settings
from router.core.config import QueueType
from router.core.target_safety import TargetPolicy
from router.engine.notifier import Notifier
from router.locks import open_lock
from router.locks.claim import Claim
from router.outbound.notifications import Addresses, open_channels
from router.ports import DeadLetterStore, Lock, QueueRefused, StoreError, Tracer
from router.settings import BadSetting, Settings
from router.storage.dead_letters import NO_STORE, open_store

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
    )


def open_letters(settings: Settings) -> AbstractAsyncContextManager[DeadLetterStore]:
    """The dead-letter store, and the folders of what is kept in files: without them, no start."""
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


async def open_leader_lock(stack: AsyncExitStack, settings: Settings, instance: str) -> Lock | None:
    """None: this router shares its work with no other."""
    if not settings.standby_enabled:
        return None
    claim = Claim(
        key=settings.standby_lock_key,
        instance=instance,
        process=secrets.token_hex(8),
        ttl=settings.standby_lock_ttl,
    )
    nats = broker_settings(settings).nats
    try:
        opening = open_lock(settings.standby_lock_url or "", claim, nats)
        return await stack.enter_async_context(opening)
    except ModuleNotFoundError as error:
        needs = f"needs the package {error.name}: pip install 'message-router[all]'"
        raise BadSetting(f"STANDBY_LOCK_URL: this lock {needs}") from None
    except (ValueError, QueueRefused):  # without their texts: the URL may hold a password
        raise BadSetting("STANDBY_LOCK_URL cannot be used to connect") from None


def boot_clock() -> float:
    """Monotonic, and it goes on while the machine sleeps, as the clocks of lock servers do."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def worker_id() -> str:
    """Who holds a lease, for people who look into a work queue."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"


def open_tracer(settings: Settings, instance: str) -> AbstractAsyncContextManager[Tracer | None]:
    """None: nobody asked for traces, or for more than is installed.

    That is no reason not to start: platforms set these variables for everything that they run.
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
    addresses = Addresses(
        webhook=settings.notify_webhook_url,
        slack=settings.notify_slack_url,
        teams=settings.notify_teams_url,
        smtp=settings.notify_smtp_url,
        recipients=settings.notify_email_to,
    )
    channels = open_channels(addresses, socket.gethostname())
    return Notifier(channels, settings.notify_min_severity, instance=instance, wall=time.time)


def access_of(settings: Settings) -> Access:
    mode = AuthMode[settings.auth_mode.name]
    return Access(
        mode=mode,
        host=settings.host,
        username=settings.basic_username or "",
        password=settings.basic_password or "",
        token=settings.api_token or "",
        judge=_token_judge(settings) if mode is AuthMode.OIDC else None,
    )


def _token_judge(settings: Settings) -> TokenJudge:
    try:
        from router.api.oidc import Provider  # noqa: PLC0415  on use: an extra
    except ModuleNotFoundError as error:
        needs = f"needs the package {error.name}: pip install 'message-router[oidc]'"
        raise BadSetting(f"MESSAGE_ROUTER_AUTH_MODE: OIDC {needs}") from None
    return Provider(settings.oidc_issuer or "", settings.oidc_audience or "", time.monotonic)
