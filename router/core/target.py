"""Where a message goes, and where it may go (MED-5). Nothing is looked up here.

A target is the URL of a request, or names what runs on this machine: `process:<name>` (CMD-8) or
`handler:<type>` (CMD-9).
"""

import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final
from urllib.parse import urlsplit

from msgspec import Struct

MAX_CHARACTERS: Final = 4096
PROCESS: Final = "process"
HANDLER: Final = "handler"
# Targets on this machine, and why the service does not run them by itself.
_LOCAL: Final = {
    PROCESS: "processes are run only if MEDIATOR_EXECUTORS_FILE is set",
    HANDLER: "handlers are run by router.worker, not by the service",
}
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,128}")
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_LONG_HOST: Final = re.compile(r"^[^/]*//[^/?#]{256}")
_UNPRINTABLE: Final = re.compile(r"[\x00-\x20\x7f-\x9f]")
_HOST_NAME: Final = re.compile(r"[a-z0-9._~-]+")
# What resolvers read as an IPv4 address, such as 0xa9fea9fe or 169.16689662.
_ENDS_IN_A_NUMBER: Final = re.compile(r"(?:^|\.)(?:0x[0-9a-f]*|[0-9]+)\.?$")
# What the last 32 bits of an IPv6 address are an IPv4 address in: NAT64, mapped, translated (SIIT)
# and compatible, which is no longer in use but still routed by some systems.
_LAST_32_BITS: Final = (
    IPv6Network("64:ff9b::/96"),
    IPv6Network("::ffff:0:0/96"),
    IPv6Network("::ffff:0:0:0/96"),
    IPv6Network("::/96"),
)
_LOOPBACK: Final = IPv6Address("::1")  # not a compatible address

_NEVER: Final[Mapping[IPv4Network | IPv6Network, str]] = {
    ip_network("0.0.0.0/8"): "no address of a host",
    ip_network("::/128"): "no address of a host",
    ip_network("169.254.0.0/16"): "link-local, where clouds keep their metadata",
    ip_network("fe80::/10"): "link-local",
    ip_network("64:ff9b:1::/48"): "behind a local NAT64, which may lead anywhere",
    ip_network("fd00:ec2::/32"): "cloud metadata (AWS)",
    ip_network("fd20:ce::254/128"): "cloud metadata (Google)",
    ip_network("100.100.100.200/32"): "cloud metadata (Alibaba)",
    ip_network("168.63.129.16/32"): "cloud metadata (Azure)",
    ip_network("192.0.0.192/32"): "cloud metadata (Oracle)",
}


class BadTarget(ValueError):
    """The text is no target."""


class Target(Struct, frozen=True):
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
        """The name of the circuit breaker of a URL, shared by its messages."""
        if self.is_local:
            return f"{self.scheme}:{self.host}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


@lru_cache(maxsize=10_000)
def read_target(url: str) -> Target:
    """Take a target apart, or raise BadTarget. Cached: targets repeat."""
    if len(url) > MAX_CHARACTERS:
        raise BadTarget(f"is longer than {MAX_CHARACTERS} characters")
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
        # Its own text would quote the URL, which may contain credentials.
        raise BadTarget("has a port, IPv6 address or host name that cannot be read") from None
    if not parts.scheme or not parts.hostname:
        raise BadTarget("is not an absolute URL such as https://host/path")
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
    """Return the origin of a target that was read before."""
    return read_target(url).origin


class TargetPolicy(Struct, frozen=True):
    """The targets that operators allow; some are refused all the same."""

    allowed_hosts: tuple[str, ...] = ()  # patterns such as *.example.com; none: any host
    block_private: bool = False  # loopback and private networks too
    own_addresses: frozenset[tuple[str, int]] = frozenset()  # IP and port of the router's own API
    # Whether an IP is one of this host's. Asked for the port of an API that listens on all of them.
    is_this_host: Callable[[str], bool] = lambda _ip: False

    def __post_init__(self) -> None:
        for ip, _ in self.own_addresses:
            ip_address(ip)  # a name would never match: better an error at the start

    def refuse_url(self, target: Target) -> str | None:
        """Return why this URL is refused, as far as can be seen without a look-up, or None."""
        if target.scheme not in _DEFAULT_PORTS:
            if target.is_local:
                return _LOCAL[target.scheme]
            return f"the target's scheme is {target.scheme}, not http or https"
        if target.has_credentials:
            return "the target has credentials in its URL"
        name = target.host.rstrip(".")
        allowed = (fnmatchcase(name, pattern.lower()) for pattern in self.allowed_hosts)
        if self.allowed_hosts and not any(allowed):
            return f"the target's host {target.host} is not an allowed one"
        return self._refuse_host(target)

    def refuse_address(self, ip: str, port: int) -> str | None:
        """Return why no connection may be made to this resolved address, or None."""
        address = _plain(ip_address(ip))
        for network, what in _NEVER.items():
            if address in network:
                return f"the target's address {ip} is {what}"
        if self._is_own(address, port):
            return f"the target's address {ip} port {port} is the router's own"
        if self.block_private and address.is_multicast:
            return f"the target's address {ip} is multicast"
        is_site_local = isinstance(address, IPv6Address) and address.is_site_local
        if self.block_private and (is_site_local or not address.is_global):
            return f"the target's address {ip} is private"
        return None

    def _refuse_host(self, target: Target) -> str | None:
        if ":" in target.host or _ENDS_IN_A_NUMBER.search(target.host):
            try:
                return self.refuse_address(target.host, target.port)
            except ValueError:
                return f"the target's host {target.host} is an IP address in an unusual spelling"
        if not _HOST_NAME.fullmatch(target.host):
            return "the target's host has characters that a host name cannot have"
        return None

    def _is_own(self, address: IPv4Address | IPv6Address, port: int) -> bool:
        return any(
            port == own_port and self._covers(_plain(ip_address(own)), address)
            for own, own_port in self.own_addresses
        )

    def _covers(self, own: IPv4Address | IPv6Address, address: IPv4Address | IPv6Address) -> bool:
        """Whether a listener bound to `own` answers at `address`."""
        if not own.is_unspecified:
            return address == own
        return address.is_loopback or self.is_this_host(str(address))


def _plain(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    """Return the IPv4 address that an IPv6 one leads to in the end, else it without its zone.

    By its number alone: what a mapped address is (`is_loopback`) depends on the Python version.
    """
    if isinstance(address, IPv4Address):
        return address
    plain = IPv6Address(int(address))
    if plain == _LOOPBACK:
        return plain
    if any(plain in network for network in _LAST_32_BITS):
        return IPv4Address(int(plain) & 0xFFFF_FFFF)
    return plain.sixtofour or (plain.teredo or (None, plain))[1]
