"""Who may call what: credentials, and what a browser may be tricked into."""

import hmac
from base64 import b64decode
from binascii import Error as NotBase64
from collections.abc import Mapping
from enum import Enum, auto
from http import HTTPStatus
from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

from msgspec import Struct
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from router.api.problems import Problem

OPEN_PATHS: Final = frozenset(
    {"/health", "/health/live", "/health/ready", "/health/startup", "/metrics"}
)
_READING: Final = frozenset({"GET", "HEAD", "OPTIONS"})


class AuthMode(Enum):
    NONE = auto()
    BASIC = auto()
    TOKEN = auto()


_CHALLENGES: Final[Mapping[AuthMode, str]] = {
    AuthMode.BASIC: 'Basic realm="message-router", charset="UTF-8"',
    AuthMode.TOKEN: 'Bearer realm="message-router"',
}


class Access(Struct, frozen=True, kw_only=True):
    """Where the API listens, and what it asks for."""

    mode: AuthMode = AuthMode.NONE
    host: str = "127.0.0.1"
    username: str = ""
    password: str = ""
    token: str = ""

    def __post_init__(self) -> None:
        """A mode without its credentials would let in whoever sends none."""
        if self.mode is AuthMode.BASIC and not (self.username and self.password):
            raise ValueError("auth mode BASIC needs a user name and a password")
        if self.mode is AuthMode.TOKEN and not self.token:
            raise ValueError("auth mode TOKEN needs a token")

    def __repr__(self) -> str:
        return f"Access(mode={self.mode.name}, host={self.host!r})"

    @property
    def is_local(self) -> bool:
        return is_loopback(self.host)

    def admits(self, authorization: str) -> bool:
        scheme, _, credentials = authorization.partition(" ")
        match self.mode:
            case AuthMode.NONE:
                return True
            case AuthMode.BASIC:
                expected = f"{self.username}:{self.password}".encode()
                return scheme.lower() == "basic" and hmac.compare_digest(
                    _decoded(credentials), expected
                )
            case AuthMode.TOKEN:
                return scheme.lower() == "bearer" and hmac.compare_digest(
                    credentials.strip().encode("latin-1"), self.token.encode()
                )


class Guard:
    """Turns away, before anything is read, who may not call."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._app
        if scope["type"] == "http":
            refusal = refuse(scope["method"], scope["path"], Headers(scope=scope), self._access)
            if refusal is not None:
                answer = refusal.response()
        await answer(scope, receive, send)


def refuse(method: str, path: str, headers: Mapping[str, str], access: Access) -> Problem | None:
    """Why this call is refused; None: it is not."""
    changes = method not in _READING
    if path in OPEN_PATHS and not changes:
        return None
    if not access.admits(headers.get("authorization", "")):
        challenge = {"WWW-Authenticate": _CHALLENGES[access.mode]}
        return Problem(HTTPStatus.UNAUTHORIZED, "credentials are needed", headers=challenge)
    if changes and access.mode is AuthMode.NONE and not access.is_local:
        return _forbidden("set MESSAGE_ROUTER_AUTH_MODE: without it nothing can be changed")
    # A page of another site whose name was made to point at this machine (DNS rebinding).
    if access.is_local and not is_loopback(_host_name(headers.get("host", ""))):
        return _forbidden("the `Host` of a call over loopback must be a loopback name")
    if changes and not _is_same_origin(headers):
        return _forbidden("a page of another origin may not change anything")
    return None


def is_loopback(host: str) -> bool:
    host = host.lower().removesuffix(".")
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _forbidden(detail: str) -> Problem:
    return Problem(HTTPStatus.FORBIDDEN, detail)


def _decoded(credentials: str) -> bytes:
    try:
        return b64decode(credentials, validate=True)
    except (NotBase64, ValueError):
        return b""


def _host_name(netloc: str) -> str:
    try:
        return urlsplit(f"//{netloc}").hostname or ""
    except ValueError:
        return ""


def _is_same_origin(headers: Mapping[str, str]) -> bool:
    """Browsers send these by themselves; other clients send neither."""
    if headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
        return False
    origin = headers.get("origin")
    return origin is None or origin.partition("://")[2].lower() == headers.get("host", "").lower()
