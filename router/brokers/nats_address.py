"""Which consumer of which stream on which servers a queue's URI means."""

import hashlib
import re
from collections.abc import Sequence
from typing import Final
from urllib.parse import unquote, urlsplit

from msgspec import Struct

from router.brokers.nats_settings import NatsSettings
from router.brokers.uri import read_uri, refusal
from router.core.config import QueueConfig

OPTIONS: Final = frozenset({"stream", "consumer", "subject"})
DEFAULT_PORT: Final = 4222
LONGEST_NAME: Final = 100  # of a consumer that we name ourselves

# All of them become parts of subjects, and subjects parts of protocol lines.
_NAME: Final = re.compile(r"[^\s.*>/\\\x00-\x1f\x7f]{1,255}")
_NOT_IN_A_NAME: Final = re.compile(r"[\s.*>/\\\x00-\x1f\x7f]")
_PART: Final = r"(?:\*|[^\s.*>\x00-\x1f\x7f]+)"
_SUBJECT: Final = re.compile(rf">|{_PART}(?:\.{_PART})*(?:\.>)?")


class Credentials(Struct, frozen=True):
    """A user with a password, or a token alone."""

    user: str | None = None
    password: str | None = None
    token: str | None = None

    def __repr__(self) -> str:
        return "Credentials(***)"


class NatsAddress(Struct, frozen=True):
    servers: tuple[str, ...]  # without credentials
    credentials: Credentials
    stream: str
    consumer: str  # its durable name
    subject: str | None  # which of the stream's messages; None: all


def read_address(queue: QueueConfig, settings: NatsSettings) -> NatsAddress:
    """`nats://[user:password@]host:4222[,host2:4222]/?stream=S&consumer=C&subject=x.>`.

    What is left out comes from the settings; without a host, so do the servers.
    """
    uri = read_uri(queue, OPTIONS)
    if uri.path not in {"", "/"}:
        raise refusal(queue, "has a path: stream, consumer and subject are options")
    given = [f"nats://{address}" for address in _split(uri.address)]
    stream = uri.options.get("stream") or settings.stream
    consumer = uri.options.get("consumer") or _own_name(settings.consumer, queue.name)
    subject = uri.options.get("subject") or None
    if not _NAME.fullmatch(stream):
        raise refusal(queue, "names a stream that cannot be")
    if not _NAME.fullmatch(consumer):
        raise refusal(queue, "names a consumer that cannot be")
    if subject is not None and not _SUBJECT.fullmatch(subject):
        raise refusal(queue, "names a subject that cannot be")
    servers, credentials = _servers(queue, given or settings.servers)
    return NatsAddress(
        servers=servers,
        credentials=credentials or _credentials_of_environment(queue, servers, settings),
        stream=stream,
        consumer=consumer,
        subject=subject,
    )


def _split(address: str) -> Sequence[str]:
    """The servers of an address; the credentials before the first one are those of all."""
    credentials, at, hosts = address.rpartition("@")
    return [f"{credentials}{at}{host}" for host in hosts.split(",")] if hosts else ()


def _own_name(prefix: str, queue_name: str) -> str:
    """One consumer for each queue. A name that had to be changed is told apart by its hash."""
    name = f"{prefix}-{queue_name}"
    clean = _NOT_IN_A_NAME.sub("_", name)[:LONGEST_NAME]
    if clean == name:
        return name
    return f"{clean}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _servers(queue: QueueConfig, urls: Sequence[str]) -> tuple[tuple[str, ...], Credentials | None]:
    try:
        parts = [urlsplit(url) for url in urls]
        ports = [part.port or DEFAULT_PORT for part in parts]
    except ValueError:
        raise refusal(queue, "has no host and port that can be") from None
    if not all(part.hostname for part in parts):
        raise refusal(queue, "names a server without a host")
    servers = tuple(
        f"{part.scheme}://{_host(part.netloc)}:{port}"
        for part, port in zip(parts, ports, strict=True)
    )
    found = (_credentials(part.username, part.password) for part in parts)
    return servers, next(filter(None, found), None)


def _host(netloc: str) -> str:
    """As it is written, so that an IPv6 address keeps its brackets."""
    return re.sub(r":\d*$", "", netloc.rpartition("@")[2])


def _credentials(username: str | None, password: str | None) -> Credentials | None:
    if not username:
        return None
    if password is None:
        return Credentials(token=unquote(username))
    return Credentials(unquote(username), unquote(password))


def _credentials_of_environment(
    queue: QueueConfig, servers: Sequence[str], settings: NatsSettings
) -> Credentials:
    """Those of the environment are for its own servers: a document must not send them elsewhere."""
    own, credentials = _servers(queue, settings.servers)
    if not set(servers) <= set(own):
        return Credentials()
    if settings.username is None:
        return credentials or Credentials()
    return Credentials(settings.username, settings.password or "")
