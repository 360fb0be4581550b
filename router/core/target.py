"""Where a message goes: reading a target, without looking anything up.

A target is the URL of a request, or names what runs on this machine: `process:<name>` (CMD-8) or
`handler:<type>` (CMD-9).
"""

import re
from functools import lru_cache
from typing import Final
from urllib.parse import urlsplit

import msgspec

MAX_LENGTH: Final = 4096
PROCESS: Final = "process"
HANDLER: Final = "handler"
_LOCAL: Final = frozenset({PROCESS, HANDLER})
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,128}")
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_LONG_HOST: Final = re.compile(r"^[^/]*//[^/?#]{256}")
_UNPRINTABLE: Final = re.compile(r"[\x00-\x20\x7f-\x9f]")


class BadTarget(ValueError):
    """The text is no target."""


class Target(msgspec.Struct, frozen=True):
    """A target, taken apart."""

    scheme: str  # lower case
    host: str  # lower case, no brackets; of a local target its name, as written
    port: int  # 0 where the scheme has no default
    has_credentials: bool

    @property
    def is_local(self) -> bool:
        """Whether it runs on this machine, without a request and a circuit breaker."""
        return self.scheme in _LOCAL

    @property
    def origin(self) -> str:
        """What its messages have in common: the name of the circuit breaker of a URL."""
        if self.is_local:
            return f"{self.scheme}:{self.host}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


@lru_cache(maxsize=10_000)
def read_target(url: str) -> Target:
    """Take a target apart, or raise BadTarget. Cached: targets repeat."""
    if len(url) > MAX_LENGTH:
        raise BadTarget(f"longer than {MAX_LENGTH} characters")
    if _UNPRINTABLE.search(url):
        raise BadTarget("contains white space or a control character")
    before, _, name = url.partition(":")
    if (scheme := before.lower()) in _LOCAL:
        if not is_local_name(name):
            raise BadTarget(f"must be {scheme}: and a name of letters, digits, `.`, `_` and `-`")
        return Target(scheme, name, 0, has_credentials=False)
    if not url.isascii() and _LONG_HOST.search(url):  # reading such a one takes quadratic time
        raise BadTarget("has a host name that is too long")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        # Its own words would quote the URL, where credentials may be.
        raise BadTarget("Port, IPv6 address or host name cannot be read") from None
    if not parts.scheme or not parts.hostname:
        raise BadTarget("not an absolute URL such as https://host/path")
    return Target(
        scheme=parts.scheme,
        host=parts.hostname,
        port=port if port is not None else _DEFAULT_PORTS.get(parts.scheme, 0),
        has_credentials="@" in parts.netloc,
    )


def is_local_name(name: str) -> bool:
    """Return whether it can be the name of an executor, or the type of a handler."""
    return _NAME.fullmatch(name) is not None


@lru_cache(maxsize=10_000)
def origin_of(url: str) -> str:
    """The origin of a target that was read before."""
    return read_target(url).origin
