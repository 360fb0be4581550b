"""The router's own credentials for targets: read from files, renewed, never shown (TGT-3 to TGT-6).

Secrets are files that the platform replaces. They are looked at every ten seconds and after a 401,
in a thread. What is ready to be sent is an Auth; a new one replaces it, so that nothing that begins
later uses the old secret.
"""

import asyncio
import base64
import logging
import os
import ssl
import stat
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import quote_plus, urlencode

from msgspec import Struct
from msgspec.structs import replace

from router.core.certificate import BadCertificate, expiry_of
from router.core.credentials import (
    MAX_FILE_BYTES,
    MAX_SECRET_BYTES,
    BadCredentials,
    BadToken,
    Credential,
    Kind,
    SecretPlace,
    Token,
    read_credentials,
    read_token,
    refusal,
    token_refusal,
)
from router.core.headers import is_header_value
from router.core.outcome import Answer, NoReply
from router.core.redact import spellings
from router.core.state import CredentialState
from router.core.target import Target
from router.core.warnings import Code, Severity
from router.core.webhooks import BadKey, Key, ed25519_seed, webhook_key
from router.curl.loop import Tls
from router.curl.sigv4 import AwsCredentials, AwsUnavailable, NoAwsCredentials

if TYPE_CHECKING:
    from router.curl.aws import Account  # an extra

log = logging.getLogger(__name__)

LOOK_SECONDS: Final = 10.0  # between two looks at the files
MIN_LOOK_SECONDS: Final = 1.0  # the same, after a 401
SECOND_LOOK_SECONDS: Final = 2.0  # at a pair of files that do not fit: one may be on its way
FORCED_SECONDS: Final = 10.0  # between two renewals because of a 401
TOKEN_SECONDS: Final = 10.0  # for the token endpoint to answer
MAX_TOKEN_BYTES: Final = 64 * 1024
MIN_BACKOFF_SECONDS: Final = 1.0
MAX_BACKOFF_SECONDS: Final = 60.0
DAY_SECONDS: Final = 24 * 3600.0
# How long before the end of a certificate, and how severe that is (TGT-7).
EXPIRY_WARNINGS: Final = (
    (1, Severity.CRITICAL),
    (7, Severity.ERROR),
    (30, Severity.WARN),
)
SOURCE: Final = "Credentials"

Post = Callable[[str, Sequence[str | bytes], bytes, float, Tls | None], Awaitable[Answer]]


class Warnings(Struct, frozen=True):
    """How warnings about credentials are raised and taken back, each by its source."""

    raise_: Callable[[str, str, str, Severity], None]  # source, code, text
    withdraw: Callable[[str, str], None]  # source, code


class Unusable(Exception):
    """There is nothing to send. The text says why, without a secret or changing numbers."""


class Auth(Struct, frozen=True, eq=False):
    """The secrets that a request carries. Each change makes a new value."""

    lines: tuple[bytes, ...] = ()  # headers
    keys: tuple[tuple[Key, float], ...] = ()  # of signatures, and until when they are valid
    aws: AwsCredentials | None = None  # to sign with
    tls: Tls | None = None
    secrets: tuple[bytes, ...] = ()  # what the target reads of it, and no one else may (TGT-6)

    def __repr__(self) -> str:
        return "Auth(***)"


class Contents(Struct, frozen=True):
    """The contents of the files of an entry."""

    values: Mapping[SecretPlace, bytes]
    problem: str = ""  # a file that cannot be read
    flaw: str = ""  # they are read, and cannot be used
    note: str = ""  # what does not stop it
    tls: Tls | None = None
    certificate_until: float | None = None  # Unix seconds

    def __repr__(self) -> str:
        return f"Contents({list(map(str, self.values))}, {self.problem or self.flaw!r})"


def read_private(path: Path, most: int) -> tuple[bytes, str | None]:
    """Return what a file holds, and what to warn of. Raises BadCredentials."""
    try:
        # Not blocking: a pipe would be waited for.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise BadCredentials(f"{path} is not a regular file")
            if mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise BadCredentials(f"{path} can be written by others: chmod go-w")
            content = file.read(most + 1)
    except OSError as error:
        raise BadCredentials(f"{path} cannot be read: {error.strerror}") from None
    if len(content) > most:
        raise BadCredentials(f"{path} is larger than {most} bytes")
    return content, f"{path} can be read by others: chmod o-r" if mode & stat.S_IROTH else None


def read_contents(
    credential: Credential, env: Mapping[str, str], before: Contents | None = None
) -> Contents:
    """Read and check the secrets of an entry, in a thread. What is as before is not checked."""
    values: dict[SecretPlace, bytes] = {}
    note = ""
    try:
        for place in credential.places:
            content, warning = _read_place(place, env)
            values[place] = content
            if warning is not None and place is not credential.authorities:
                note = note or f"{place.field}: {warning}"
    except BadCredentials as error:
        return Contents(values, problem=str(error))
    if before is not None and values == before.values:
        return replace(before, note=note)
    try:
        tls, until = _check(credential, values)
    except BadCredentials as error:
        return Contents(values, flaw=str(error))
    return Contents(values, note=note, tls=tls, certificate_until=until)


def _read_place(place: SecretPlace, env: Mapping[str, str]) -> tuple[bytes, str | None]:
    """Return a secret without the newline at its end, and what to warn of."""
    warning = None
    if place.file is None:
        value = env.get(place.variable or "")
        if value is None:
            raise BadCredentials(f"{place} is not set")
        content = value.encode()
    else:
        try:
            content, warning = read_private(Path(place.file), MAX_SECRET_BYTES)
        except BadCredentials as error:
            raise BadCredentials(f"{place.field}: {error}") from None
    content = content.rstrip(b"\r\n")
    if not content:
        raise BadCredentials(f"{place} is empty")
    return content, warning


def _check(
    config: Credential, values: Mapping[SecretPlace, bytes]
) -> tuple[Tls | None, float | None]:
    """Return its certificates and when they expire. Raises BadCredentials."""
    for place in (config.secret, config.key_password, *(key.place for key in config.keys)):
        if place is not None and not is_header_value(values[place].decode("latin-1")):
            raise BadCredentials(f"{place} is not one line of printable ASCII")
    for each in config.keys:
        try:
            signing_key(values[each.place].decode())
        except BadKey as error:
            raise BadCredentials(f"{each.place} {error}") from None
    if config.certificate is None and config.authorities is None:
        return None, None
    certificate, key, password, authorities = (
        None if place is None else values[place]
        for place in (
            config.certificate,
            config.private_key,
            config.key_password,
            config.authorities,
        )
    )
    tls = Tls(certificate, key, None if password is None else password.decode(), authorities)
    return tls, check_tls(config, tls)


class LiveCredential:
    """One entry of the file, with its secrets."""

    def __init__(self, config: Credential, wall: Callable[[], float] = time.time) -> None:
        self.config = config
        self.auth: Auth | None = None  # None: nothing can be sent now
        self.contents: Contents | None = None  # the latest that can be used
        self.uses = 0
        self.expires_at: float | None = None  # of its token, Unix seconds
        self.is_refused = False  # the target's last word was 401
        self.is_unsettled = False  # its files did not fit together at the last look
        self.file_error = "its files have not been read yet"  # "": there is none
        self._wall = wall

    def __repr__(self) -> str:
        return f"LiveCredential({self.config.name!r}, {self.config.kind.value})"

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def sets_authorization(self) -> bool:
        """Whether the `authToken` of a message is left out."""
        return self.config.kind not in {Kind.MTLS, Kind.SIGNATURE}

    @property
    def sets_signature(self) -> bool:
        """Whether the `signingSecret` of a message is left out."""
        return self.config.kind is Kind.SIGNATURE

    @property
    def problem(self) -> str:
        """The problem with it, if there is one."""
        return self.file_error or ("the target answers HTTP 401" if self.is_refused else "")

    def has_expired(self, now: float) -> bool:
        """Return whether its certificate has."""
        until = None if self.contents is None else self.contents.certificate_until
        return until is not None and until <= now

    @property
    def tls(self) -> Tls | None:
        return None if self.contents is None else self.contents.tls

    @property
    def state(self) -> CredentialState:
        until = None if self.contents is None else self.contents.certificate_until
        return CredentialState(
            name=self.name,
            type=self.config.kind.value,
            hosts=tuple(map(str, self.config.hosts)),
            ok=not self.problem,
            error=self.problem,
            uses=self.uses,
            expires_at=self.expires_at,
            certificate_expires_at=until,
        )

    def update(self, contents: Contents) -> bool:
        """Use what the files hold now. Return whether that is something new.

        What cannot be read keeps its last value, and so does a pair that does not fit.
        """
        if contents.problem:
            self.file_error = contents.problem
            return False
        if contents.flaw:
            # Two files are not replaced at the same instant: it counts from the second look on.
            if self.is_unsettled or self.contents is None:
                self.file_error = contents.flaw
            self.is_unsettled = True
            return False
        self.is_unsettled, self.file_error = False, ""
        if self.contents is not None and contents.values == self.contents.values:
            return False
        self.contents = contents
        self._renewed(contents)
        return True

    async def prepare(self) -> Auth:
        """Return what to send, after waiting for it if need be. Raises Unusable."""
        if self.auth is not None:
            return self.auth
        raise Unusable(f"credentials {self.name}: {self.problem}")

    async def renew(self, _used: Auth) -> Auth | None:
        """Return something newer after a 401; None: there is nothing newer."""
        return None

    def stop(self) -> None:
        """Stop renewing."""

    def _renewed(self, contents: Contents) -> None:
        """Make the Auth of what the files hold."""
        config = self.config
        secret = b"" if config.secret is None else contents.values[config.secret]
        lines: tuple[bytes, ...] = ()
        secrets = spellings(secret)
        match config.kind:
            case Kind.HEADER:
                lines = (config.header.encode() + b": " + secret,)
            case Kind.BEARER:
                lines = (b"Authorization: Bearer " + secret,)
            case Kind.BASIC:
                pair = base64.b64encode(config.username.encode() + b":" + secret)
                lines = (b"Authorization: Basic " + pair,)
                secrets += spellings(pair)
        keys = tuple(
            (signing_key(contents.values[key.place].decode()), key.until or float("inf"))
            for key in config.keys
        )
        self.auth = Auth(lines, keys, tls=contents.tls, secrets=secrets)


def signing_key(secret: str) -> Key:
    """Return what signs with a secret of the file (TGT-9). Raises BadKey."""
    seed = ed25519_seed(secret)
    if seed is None:
        return webhook_key(secret)
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519  # noqa: PLC0415  an extra
    except ImportError:
        raise BadKey("is an Ed25519 key: install 'message-router[oidc]' to sign with it") from None
    return ed25519.Ed25519PrivateKey.from_private_bytes(seed)


def check_tls(config: Credential, tls: Tls) -> float | None:
    """Return when the certificate expires. Raises BadCredentials if the pair does not fit."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if tls.authorities is not None:
            context.load_verify_locations(cadata=tls.authorities.decode("ascii"))
        if tls.certificate is None or config.certificate is None or config.private_key is None:
            return None
        # OpenSSL reads files only, so those are looked at twice: they must be what was read.
        context.load_cert_chain(
            config.certificate.file or "", config.private_key.file, tls.key_password or ""
        )
        for place, read in (
            (config.certificate, tls.certificate),
            (config.private_key, tls.private_key),
        ):
            if Path(place.file or "").read_bytes().rstrip(b"\r\n") != read:
                raise BadCredentials(f"{place} changes right now")
        return expiry_of(tls.certificate)
    except (ssl.SSLError, UnicodeDecodeError):
        what = "certFile and keyFile do not fit" if tls.certificate else "caFile cannot be read"
        raise BadCredentials(f"{what}, or are not PEM") from None
    except (BadCertificate, OSError) as error:
        raise BadCredentials(f"certFile: {error}") from None


class OAuthCredential(LiveCredential):
    """OAuth 2 client credentials: one token, fetched by the first request that needs it (TGT-5)."""

    def __init__(
        self, config: Credential, post: Post, wall: Callable[[], float] = time.time
    ) -> None:
        super().__init__(config, wall)
        self._post = post
        self._loop = asyncio.get_running_loop()
        self._fetch: asyncio.Task[None] | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._try_again_at = 0.0  # loop time, after a failure
        self._backoff = MIN_BACKOFF_SECONDS
        self._forced_at = -FORCED_SECONDS
        self._token_error = ""

    @property
    def problem(self) -> str:
        return self.file_error or self._token_error or super().problem

    async def prepare(self) -> Auth:
        while self.auth is None and self.contents is not None:
            before = self.contents
            await self._fetched(before)
            if self.contents is before:
                break
        return await super().prepare()

    async def renew(self, used: Auth) -> Auth | None:
        if self.auth is used:
            now = self._loop.time()
            if now - self._forced_at < FORCED_SECONDS:
                return None
            self._forced_at = now
            self._drop()
        if self.auth is None and self.contents is not None:
            await self._fetched(self.contents)
        return self.auth

    def stop(self) -> None:
        self._drop()
        if self._fetch is not None:
            self._fetch.cancel()
            self._fetch = None

    def _renewed(self, _contents: Contents) -> None:
        """Forget the token: it was given for another secret."""
        self.stop()
        self._try_again_at, self._backoff, self._token_error = 0.0, MIN_BACKOFF_SECONDS, ""

    def _drop(self) -> None:
        self.auth = self.expires_at = None
        self._cancel_timers()

    def _cancel_timers(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()

    async def _fetched(self, contents: Contents) -> None:
        """Wait for a fetch: the one that is under way, or a new one, unless the last one failed."""
        if self._fetch is None and self._loop.time() < self._try_again_at:
            return
        await asyncio.wait((self._start_fetch(contents),))

    def _start_fetch(self, contents: Contents) -> asyncio.Task[None]:
        if self._fetch is None:
            self._fetch = self._loop.create_task(self._get(contents), name=f"token {self.name}")
            self._fetch.add_done_callback(self._fetch_ended)
        return self._fetch

    def _fetch_ended(self, task: asyncio.Task[None]) -> None:
        if self._fetch is task:
            self._fetch = None
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("fetching a token failed unexpectedly: %s", type(error).__name__)

    async def _get(self, contents: Contents) -> None:
        """Get a token. A failure keeps the old one, until it expires."""
        try:
            token = await self._ask(contents)
        except ValueError as error:  # BadToken, or a request that cannot be built
            self._token_error = str(error)
            self._try_again_at = self._loop.time() + self._backoff
            if self.auth is not None:
                timer = self._loop.call_later(self._backoff, self._start_fetch, contents)
                self._timers.append(timer)
            self._backoff = min(self._backoff * 2, MAX_BACKOFF_SECONDS)
            return
        self._token_error, self._backoff, self._try_again_at = "", MIN_BACKOFF_SECONDS, 0.0
        self._cancel_timers()
        line = f"Authorization: Bearer {token.value}".encode()
        self.auth = auth = Auth((line,), tls=contents.tls, secrets=spellings(token.value.encode()))
        self.expires_at = self._wall() + token.life
        self._timers = [
            self._loop.call_later(token.renew_after, self._start_fetch, contents),
            self._loop.call_later(token.life, self._expire, auth),
        ]

    def _expire(self, auth: Auth) -> None:
        if self.auth is auth:
            self._drop()

    async def _ask(self, contents: Contents) -> Token:
        config = self.config
        assert config.secret is not None  # noqa: S101  for the type checker: this type has one
        secret = contents.values[config.secret].decode()
        form = {"grant_type": "client_credentials"}
        form |= {"scope": config.scope} if config.scope else {}
        form |= {"audience": config.audience} if config.audience else {}
        headers = ["Accept: application/json", "Content-Type: application/x-www-form-urlencoded"]
        if config.client_auth == "post":
            form |= {"client_id": config.client_id, "client_secret": secret}
        else:  # RFC 6749, 2.3.1: both are form-encoded first
            pair = f"{quote_plus(config.client_id)}:{quote_plus(secret)}".encode()
            headers.append(f"Authorization: Basic {base64.b64encode(pair).decode()}")
        answer = await self._post(
            config.token_url, headers, urlencode(form).encode(), TOKEN_SECONDS, contents.tls
        )
        if isinstance(answer, NoReply):
            raise BadToken(f"the token endpoint cannot be reached: {answer.detail}")
        if answer.status != HTTPStatus.OK:
            code = token_refusal(answer.body)
            why = "" if code is None else f" ({code})"
            raise BadToken(f"the token endpoint answered HTTP {answer.status}{why}")
        if answer.too_long or len(answer.body) > MAX_TOKEN_BYTES:
            raise BadToken(f"the token endpoint answered more than {MAX_TOKEN_BYTES} bytes")
        return read_token(answer.body)


class AwsCredential(LiveCredential):
    """Signs with the credentials of the AWS chain, which is asked again every second (TGT-9)."""

    def __init__(self, config: Credential, wall: Callable[[], float] = time.time) -> None:
        super().__init__(config, wall)
        self._account: Account | None = None
        self._latest: Auth | None = None
        self._chain_error = ""

    @property
    def problem(self) -> str:
        return self.file_error or self._chain_error or super().problem

    async def prepare(self) -> Auth:
        tls = self.tls
        try:
            if self._account is None:
                self._account = await find_aws_account()
            aws = await self._account.credentials()
        except (AwsUnavailable, NoAwsCredentials, ImportError) as error:
            self._chain_error = str(error)
            raise Unusable(f"credentials {self.name}: {error}") from None
        self._chain_error = ""
        latest = self._latest
        if latest is None or latest.aws is not aws or latest.tls is not tls:
            secrets = spellings((aws.token or "").encode())
            latest = self._latest = Auth(aws=aws, tls=tls, secrets=secrets)
        return latest

    def _renewed(self, _contents: Contents) -> None:
        """Nothing is kept: what to send depends on each request."""


async def find_aws_account() -> "Account":
    from router.curl.aws import Account  # noqa: PLC0415  on use: an extra

    return await Account.find()


class CredentialStore:
    """All credentials of this router. `open` begins to look at the files."""

    def __init__(
        self,
        path: Path,
        warnings: Warnings,
        *,
        wall: Callable[[], float] = time.time,
        env: Mapping[str, str] = os.environ,
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        """Read the file. Raises BadCredentials."""
        self._path = path
        self._warnings = warnings
        self._wall = wall
        self._env = env
        self._look_seconds = look_seconds
        self._content, _ = read_private(path, MAX_FILE_BYTES)
        self._configs = read_credentials(self._content)
        self._live: dict[str, LiveCredential] = {}
        self._post: Post | None = None
        self._looking: asyncio.Task[None] | None = None
        self._look_now = asyncio.Lock()
        self._looked_at = 0.0  # loop time
        self._warned: dict[str, str] = {}  # warnings that are in force: source → text
        self.on_change: Callable[[], None] = lambda: None

    def __repr__(self) -> str:
        return f"CredentialStore({self._path}, {len(self._configs)} entries)"

    async def open(self, post: Post) -> None:
        self._post = post
        self._make(self._configs)
        await self.look()
        self._looking = asyncio.create_task(self._keep_looking(), name="credentials")

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait((self._looking,))
        for live in self._live.values():
            live.stop()

    def find(self, name: str) -> LiveCredential | None:
        return self._live.get(name)

    def refuse(self, name: str, target: Target) -> str | None:
        """Return why requests to this target cannot carry these credentials, or None."""
        return refusal(self._configs, name, target)

    @property
    def certificates(self) -> set[Tls]:
        """Those that are in use."""
        return {each.tls for each in self._live.values() if each.tls is not None}

    @property
    def states(self) -> Sequence[CredentialState]:
        return [each.state for each in self._live.values()]

    async def look(self) -> bool:
        """Look at the files. Return whether anything has changed."""
        async with self._look_now:
            has_changed, self._looked_at = False, asyncio.get_running_loop().time()
            try:
                content, note = await asyncio.to_thread(read_private, self._path, MAX_FILE_BYTES)
                if content != self._content:
                    self._configs = read_credentials(content)
                    self._content = content
                    self._make(self._configs)
                    has_changed = True
                if note is None:
                    self._withdraw("file")
                else:
                    self._raise("file", f"the credentials file: {note}", Severity.WARN)
            except BadCredentials as error:  # the last good one is kept
                self._raise("file", f"the credentials file: {error}", Severity.CRITICAL)
            found = await asyncio.to_thread(self._read_all)
            for live, contents in found:
                has_changed = live.update(contents) or has_changed
                self._report(live, contents)
        if has_changed:
            self.on_change()
        return has_changed

    async def renew(self, live: LiveCredential, used: Auth) -> Auth | None:
        """Return something newer than what a target has answered 401 to, or None."""
        loop = asyncio.get_running_loop()
        if live.auth is used and loop.time() - self._looked_at >= MIN_LOOK_SECONDS:
            await self.look()
        if live.auth is not None and live.auth is not used:
            return live.auth
        return await live.renew(used)

    def _read_all(self) -> list[tuple[LiveCredential, Contents]]:
        return [
            (each, read_contents(each.config, self._env, each.contents))
            for each in list(self._live.values())
        ]

    def _make(self, configs: Mapping[str, Credential]) -> None:
        """Make what is new or has changed; the rest keeps its tokens."""
        for name, live in list(self._live.items()):
            if configs.get(name) != live.config:
                live.stop()
                del self._live[name]
                self._withdraw(name)
        for name, config in configs.items():
            if name not in self._live:
                self._live[name] = self._new(config)

    def _new(self, config: Credential) -> LiveCredential:
        if config.kind is Kind.OAUTH2:
            assert self._post is not None  # noqa: S101  `open` has set it
            return OAuthCredential(config, self._post, self._wall)
        if config.kind is Kind.SIGV4:
            return AwsCredential(config, self._wall)
        return LiveCredential(config, self._wall)

    async def _keep_looking(self) -> None:
        while True:
            unsettled = any(each.is_unsettled for each in self._live.values())
            await asyncio.sleep(SECOND_LOOK_SECONDS if unsettled else self._look_seconds)
            try:
                await self.look()
            except Exception:  # the bulkhead: a bug here must not freeze old secrets
                log.exception("looking at the credentials failed")

    def _report(self, live: LiveCredential, contents: Contents) -> None:
        name = live.name
        found = _expiry_warning(live, self._wall())
        if live.file_error:
            self._raise(name, f"credentials {name}: {live.file_error}", Severity.CRITICAL)
        elif found is not None:
            self._raise(name, *found)
        elif contents.note:
            self._raise(name, f"credentials {name}: {contents.note}", Severity.WARN)
        else:
            self._withdraw(name)

    def _raise(self, name: str, text: str, severity: Severity) -> None:
        if self._warned.get(name, text) != text:
            self._withdraw(name)  # what was said before is over
        self._warned[name] = text
        self._warnings.raise_(f"{SOURCE}:{name}", Code.CREDENTIALS, text, severity)

    def _withdraw(self, name: str) -> None:
        if name in self._warned:
            del self._warned[name]
            self._warnings.withdraw(f"{SOURCE}:{name}", Code.CREDENTIALS)


def _expiry_warning(live: LiveCredential, now: float) -> tuple[str, Severity] | None:
    """Return the warning about a certificate that expires soon (TGT-7)."""
    until = None if live.contents is None else live.contents.certificate_until
    if until is None:
        return None
    if live.has_expired(now):
        return f"credentials {live.name}: the certificate has expired", Severity.CRITICAL
    for days, severity in EXPIRY_WARNINGS:
        if until - now <= days * DAY_SECONDS:
            unit = "day" if days == 1 else "days"
            text = f"credentials {live.name}: the certificate expires within {days} {unit}"
            return text, severity
    return None
