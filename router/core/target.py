"""Where a message goes: reading a target URL, without looking anything up."""

import re
from functools import lru_cache
from typing import Final
from urllib.parse import urlsplit

import msgspec

MAX_LENGTH: Final = 4096
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_LONG_HOST: Final = re.compile(r"^[^/]*//[^/?#]{256}")
_UNPRINTABLE: Final = re.compile(r"[\x00-\x20\x7f-\x9f]")


class BadTarget(ValueError):
    """The text is not an absolute URL."""


class Target(msgspec.Struct, frozen=True):
    """An absolute URL, taken apart."""

    scheme: str  # lower case
    host: str  # lower case, no brackets
    port: int  # 0 where the scheme has no default
    has_credentials: bool

    @property
    def origin(self) -> str:
        """The name of the target's circuit breaker."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


@lru_cache(maxsize=10_000)
def read_target(url: str) -> Target:
    """Take a target URL apart, or raise BadTarget. Cached: targets repeat."""
    if len(url) > MAX_LENGTH:
        raise BadTarget(f"longer than {MAX_LENGTH} characters")
    if _UNPRINTABLE.search(url):
        raise BadTarget("contains white space or a control character")
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


@lru_cache(maxsize=10_000)
def origin_of(url: str) -> str:
    """The origin of a target that was read before."""
    return read_target(url).origin
