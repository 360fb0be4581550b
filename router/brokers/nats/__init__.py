"""NATS JetStream: each queue is a durable pull consumer of a stream.

Here is where a queue is: the settings and the URI, which name servers, stream and consumer.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import SplitResult, quote, unquote, urlsplit

from msgspec import Struct

from router.brokers.kit import read_uri, refusal
from router.brokers.package import Adapter, BrokerPackage
from router.brokers.workers import ConsumerIdentity
from router.core.broker import HALF_A_DAY_SECONDS, Exclusivity, WhenFull, always
from router.core.config import PARTITION, QueueConfig
from router.setting_values import env, listed, optional, text, url

OPTIONS: Final = frozenset({"stream", "consumer", "subject"})
DEFAULT_PORT: Final = 4222
MAX_NAME_CHARACTERS: Final = 100  # of a consumer that we name ourselves

# All of them become parts of subjects, and subjects parts of protocol lines.
_PORT: Final = re.compile(r":\d*$")
_NAME: Final = re.compile(r"[^\s.*>/\\\x00-\x1f\x7f]{1,255}")
_NOT_IN_A_NAME: Final = re.compile(r"[\s.*>/\\\x00-\x1f\x7f]")
_PART: Final = r"(?:\*|[^\s.*>\x00-\x1f\x7f]+)"
_SUBJECT: Final = re.compile(rf">|{_PART}(?:\.{_PART})*(?:\.>)?")


@dataclass(frozen=True, slots=True)
class NatsSettings:
    # fmt: off
    servers: tuple[str, ...] = env(
        "NATS_SERVERS", listed(url("nats", "tls")), "nats://localhost:4222",
        "NATS servers, comma-separated", secret=True)
    username: str | None = optional("NATS_USERNAME", text,
        "NATS user")
    password: str | None = optional("NATS_PASSWORD", text,
        "NATS password", secret=True)
    stream: str = env("NATS_STREAM_NAME", text, "MESSAGES",
        "JetStream stream")
    consumer: str = env("NATS_CONSUMER_NAME", text, "message-router",
        "prefix of the durable consumer's name; the queue name follows")
    # fmt: on


class NatsCredentials(Struct, frozen=True):
    """A user with a password, or a token alone."""

    user: str | None = None
    password: str | None = None
    token: str | None = None

    def __repr__(self) -> str:
        return "NatsCredentials(***)"


class NatsAddress(Struct, frozen=True):
    servers: tuple[str, ...]  # without credentials
    credentials: NatsCredentials
    stream: str
    consumer: str  # its durable name
    subject: str | None  # None: all messages of the stream

    @property
    def key(self) -> tuple[tuple[str, ...], str, str]:
        """The values that distinguish consumers."""
        return self.servers, self.stream, self.consumer


def read_address(queue: QueueConfig, settings: NatsSettings) -> NatsAddress:
    """Read `nats://[user:password@]host:4222[,host2:4222]/?stream=S&consumer=C&subject=x.>`.

    What is left out comes from the settings; without a host, so do the servers.
    """
    uri = read_uri(queue, OPTIONS)
    if uri.path not in {"", "/"}:
        raise refusal(queue, "has a path: stream, consumer and subject are options")
    stream = uri.options.get("stream") or settings.stream
    consumer = uri.options.get("consumer") or _consumer_name(settings.consumer, queue.name)
    subject = uri.options.get("subject") or None
    if not _NAME.fullmatch(stream):
        raise refusal(queue, "names a stream that cannot be")
    if not _NAME.fullmatch(consumer):
        raise refusal(queue, "names a consumer that cannot be")
    if subject is not None and not _SUBJECT.fullmatch(subject):
        raise refusal(queue, "names a subject that cannot be")
    # Credentials before the first of several hosts are those of all.
    login, at, hosts = uri.address.rpartition("@")
    given = [f"nats://{login}{at}{host}" for host in hosts.split(",")] if hosts else ()
    servers, credentials = _servers(queue, given or settings.servers)
    default_servers, default_credentials = _servers(queue, settings.servers)
    # Those of the environment are for its own servers: a document must not send them elsewhere.
    if credentials is None and set(servers) <= set(default_servers):
        credentials = default_credentials
        if settings.username is not None:
            credentials = NatsCredentials(settings.username, settings.password or "")
    return NatsAddress(
        servers=servers,
        credentials=credentials or NatsCredentials(),
        stream=stream,
        consumer=consumer,
        subject=subject,
    )


def _consumer_name(prefix: str, queue_name: str) -> str:
    """Return a name for the queue's own consumer. One that had to be changed ends with a hash."""
    name = f"{prefix}-{queue_name}"
    clean = _NOT_IN_A_NAME.sub("_", name)[:MAX_NAME_CHARACTERS]
    if clean == name:
        return name
    return f"{clean}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _servers(
    queue: QueueConfig, urls: Sequence[str]
) -> tuple[tuple[str, ...], NatsCredentials | None]:
    servers: list[str] = []
    credentials: NatsCredentials | None = None
    for each in urls:
        try:
            parts = urlsplit(each)
            port = parts.port or DEFAULT_PORT
        except ValueError:
            raise refusal(queue, "has no host and port that can be") from None
        if not parts.hostname:
            raise refusal(queue, "names a server without a host")
        host = _PORT.sub("", parts.netloc.rpartition("@")[2])  # IPv6 keeps its brackets
        servers.append(f"{parts.scheme}://{host}:{port}")
        if parts.username and credentials is None:
            user, password = unquote(parts.username), parts.password
            credentials = (
                NatsCredentials(token=user)
                if password is None
                else NatsCredentials(user, unquote(password))
            )
    return tuple(servers), credentials


def _make(identity: ConsumerIdentity) -> Adapter:
    from router.brokers.nats.broker import NatsQueues  # noqa: PLC0415  on use

    return NatsQueues(identity)


def _why_malformed(parts: SplitResult) -> str | None:
    if PARTITION in parts.query and "consumer=" in parts.query:
        return (
            f"must not have `consumer` with {PARTITION}: each partition has a consumer of its own"
        )
    return None


def _uri_of_name(name: str, _state_dir: str) -> str:
    """Return a URI without a host: what follows two slashes would be one."""
    return f"nats:///?subject={quote(name, safe='')}"


BROKER: Final = BrokerPackage(
    name="NATS",
    schemes=("nats",),
    options=OPTIONS,
    why_malformed=_why_malformed,
    naming_options=frozenset({"stream", "subject"}),
    queue_type="NATS",
    uri_of_name=_uri_of_name,
    when_full=WhenFull.DEFER,
    exclusivity=Exclusivity.LEASE,
    settles_first=True,
    longest_delay=HALF_A_DAY_SECONDS,
    recognizes_keys=always,
    settings=NatsSettings,
    takes_raw=True,
    make=_make,
)
