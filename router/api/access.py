"""Access control: credentials, and protection against calls that a browser is tricked into.

A caller without credentials, where none are needed, may only read if the API listens beyond
loopback. What those who may only read are not told is decided here: whole answers by their path
(`PRIVATE_FOLDERS`), single fields of other answers by `may_see_private` (see `kit.Private`).
"""

import hmac
from base64 import b64decode
from collections.abc import Mapping
from contextvars import ContextVar
from enum import Enum, auto
from functools import lru_cache
from http import HTTPStatus
from ipaddress import ip_address
from typing import Final, Protocol
from urllib.parse import urlsplit

from fastapi import HTTPException
from msgspec import Struct
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from router.api.problems import refusal_response
from router.setting_values import AuthMode

OPEN_PATHS: Final = frozenset(
    {"/health", "/health/live", "/health/ready", "/health/startup", "/metrics"}
)
OPEN_FOLDER: Final = "/static/"  # of the dashboard: a browser sends no token for it
# Payloads, results and errors (CMD-2), which those who may only read do not see.
PRIVATE_FOLDERS: Final = ("/messages", "/batches", "/schedules", "/dead-letters")
_READ_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})


class CannotTell(Exception):
    """The credentials cannot be checked now: the call ends with 503."""


class Role(Enum):
    """The rights of a caller."""

    READER = auto()  # read what is not private
    ADMIN = auto()


# Of the call that is being answered. An open path asks for no credentials: it shows the least.
_caller: Final = ContextVar("caller", default=Role.READER)


def may_see_private() -> bool:
    """Return whether the caller may see what targets and payloads say."""
    return _caller.get() is Role.ADMIN


class TokenJudge(Protocol):
    """Checks bearer tokens."""

    async def role(self, token: str) -> Role | None:
        """Return None for a token that is not good here. Raises CannotTell."""


_CHALLENGES: Final[Mapping[AuthMode, str]] = {
    AuthMode.BASIC: 'Basic realm="message-router", charset="UTF-8"',
    AuthMode.TOKEN: 'Bearer realm="message-router"',
    AuthMode.OIDC: 'Bearer realm="message-router", scope="openid"',
}


class Access(Struct, frozen=True, kw_only=True):
    """Where the API listens, and which credentials it requires."""

    mode: AuthMode = AuthMode.NONE
    host: str = "127.0.0.1"
    username: str = ""
    password: str = ""
    token: str = ""
    judge: TokenJudge | None = None

    def __post_init__(self) -> None:
        """Refuse a mode without its credentials: it would admit callers that send none."""
        if self.mode is AuthMode.BASIC and not (self.username and self.password):
            raise ValueError("auth mode BASIC needs a user name and a password")
        if self.mode is AuthMode.TOKEN and not self.token:
            raise ValueError("auth mode TOKEN needs a token")
        if self.mode is AuthMode.OIDC and self.judge is None:
            raise ValueError("auth mode OIDC needs something that checks tokens")

    def __repr__(self) -> str:
        return f"Access(mode={self.mode.name}, host={self.host!r})"

    @property
    def is_local(self) -> bool:
        return is_loopback(self.host)

    async def role_of(self, authorization: str) -> Role | None:
        """Return None for wrong or missing credentials. Raises CannotTell."""
        scheme, _, credentials = authorization.partition(" ")
        kind = scheme.lower()
        match self.mode:
            case AuthMode.NONE:
                return Role.ADMIN if self.is_local else Role.READER
            case AuthMode.BASIC:
                try:
                    given = b64decode(credentials, validate=True)
                except ValueError:
                    return None
                expected = f"{self.username}:{self.password}".encode()
                is_good = kind == "basic" and hmac.compare_digest(given, expected)
            case AuthMode.TOKEN:
                is_good = kind == "bearer" and hmac.compare_digest(
                    credentials.strip().encode("latin-1"), self.token.encode()
                )
            case AuthMode.OIDC:
                assert self.judge is not None  # noqa: S101  for the type checker: checked above
                return await self.judge.role(credentials.strip()) if kind == "bearer" else None
        return Role.ADMIN if is_good else None


class Guard:
    """Refuses calls that are not allowed, before their body is read.

    A browser that asks for the dashboard without credentials gets `login` instead: the same page,
    empty, which asks for them.
    """

    def __init__(self, app: ASGIApp, access: Access, login: ASGIApp) -> None:
        self._app = app
        self._access = access
        self._login = login

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, headers = scope["path"], Headers(scope=scope)
        verdict = await judge_call(scope["method"], path, headers, self._access)
        if isinstance(verdict, HTTPException):
            is_unknown = verdict.status_code == HTTPStatus.UNAUTHORIZED
            wants_page = path == "/" and "text/html" in headers.get("accept", "")
            answer = self._login if is_unknown and wants_page else refusal_response(verdict)
            await answer(scope, receive, send)
            return
        before = _caller.set(verdict)
        try:
            await self._app(scope, receive, send)
        finally:
            _caller.reset(before)


async def judge_call(  # noqa: PLR0911  a list of checks, in their order
    method: str, path: str, headers: Mapping[str, str], access: Access
) -> Role | HTTPException:
    """Return as whom the caller is answered, or why the call is refused."""
    changes = method not in _READ_METHODS
    if (path in OPEN_PATHS or path.startswith(OPEN_FOLDER)) and not changes:
        return Role.READER
    try:
        role = await access.role_of(headers.get("authorization", ""))
    except CannotTell as error:
        return HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
    if role is None:
        challenge = {"WWW-Authenticate": _CHALLENGES[access.mode]}
        return HTTPException(HTTPStatus.UNAUTHORIZED, "credentials are needed", headers=challenge)
    is_private = any(path == each or path.startswith(f"{each}/") for each in PRIVATE_FOLDERS)
    if role is Role.READER and (changes or is_private):
        return _forbidden(_why_only_reading(access, changes=changes))
    # A page of another site whose name was made to point at this machine (DNS rebinding).
    if access.is_local and not is_loopback(_host_name(headers.get("host", ""))):
        return _forbidden("the `Host` of a call over loopback must be a loopback name")
    if changes and not _is_same_origin(headers):
        return _forbidden("a page of another origin may not change anything")
    # There is a limited number of streams: such a page must not take them from the operators.
    if path == "/events" and not _is_same_origin(headers):
        return _forbidden("a page of another origin may not watch")
    return role


@lru_cache(maxsize=100)  # every call asks, mostly for the same names
def is_loopback(host: str) -> bool:
    host = host.lower().removesuffix(".")
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _why_only_reading(access: Access, *, changes: bool) -> str:
    if access.mode is AuthMode.NONE:
        what = "nothing can be changed" if changes else "this is not shown"
        return f"{what} unless MESSAGE_ROUTER_AUTH_MODE is set"
    return "the token does not have the claim of OIDC_ADMIN_CLAIM: it may only read"


def _forbidden(detail: str) -> HTTPException:
    return HTTPException(HTTPStatus.FORBIDDEN, detail)


def _host_name(netloc: str) -> str:
    try:
        return urlsplit(f"//{netloc}").hostname or ""
    except ValueError:
        return ""


def _is_same_origin(headers: Mapping[str, str]) -> bool:
    """Return whether a page of this router made the call: only browsers send these headers."""
    if headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
        return False
    origin = headers.get("origin")
    return origin is None or origin.partition("://")[2].lower() == headers.get("host", "").lower()
