"""Where an ActiveMQ queue is, read from its URI."""

from typing import Final
from urllib.parse import unquote, urlsplit

from msgspec import Struct

from router.brokers.activemq_settings import ActiveMqSettings
from router.brokers.uri import QueueUri, read_uri, refusal
from router.core.config import QueueConfig

OPTIONS: Final = frozenset({"prefetch", "heartbeat", "tls", "cafile"})
SERVER_OPTIONS: Final = frozenset({"tls", "cafile"})
DEFAULT_PORT: Final = 61613
MAX_PORT: Final = 65_535
DEFAULT_PREFETCH: Final = 1000
MAX_PREFETCH: Final = 65_535
DEFAULT_HEARTBEAT: Final = 5  # seconds; a silent broker is noticed after three
MAX_HEARTBEAT: Final = 20  # a minute of silence is too long (BRK-1)
TLS: Final = {"true": True, "false": False}

# A name with one of these would stand for several queues, or for options of the subscription.
_NOT_IN_A_NAME: Final = frozenset("*>,?")
_PARTS_OF_A_HOST: Final = frozenset("@:,")
_ENDS_A_HEADER: Final = frozenset("\r\n\0")  # when logging in, nothing is escaped


class Server(Struct, frozen=True):
    host: str
    port: int
    tls: bool = False
    cafile: str | None = None  # None: whom the system trusts


class Login(Struct, frozen=True):
    user: str
    password: str

    def __repr__(self) -> str:
        return "Login(***)"


class Place(Struct, frozen=True):
    servers: tuple[Server, ...]  # tried in this order
    login: Login | None
    queue: str
    prefetch: int
    heartbeat: int  # seconds

    @property
    def destination(self) -> str:
        return f"/queue/{self.queue}"


def read_place(queue: QueueConfig, settings: ActiveMqSettings) -> Place:
    """`activemq://[user:password@]host:61613[,host2:61613]/queue`, or `activemq://queue`.

    The latter is at the broker of the settings. Only that one is told the settings' password.
    """
    uri = read_uri(queue, OPTIONS)
    own = _own_servers(queue, settings)
    name, servers, login = uri.path.removeprefix("/"), own, None
    if name:
        credentials, _, hosts = uri.address.rpartition("@")
        servers = _servers(queue, hosts, uri)
        login = _login(credentials)
    elif not _PARTS_OF_A_HOST & set(uri.address):
        name = unquote(uri.address)
    if not name:
        raise refusal(queue, "names no queue")
    if _NOT_IN_A_NAME & set(name):
        raise refusal(queue, "names more than one queue (*, >, a comma or a question mark)")
    if login is None and servers == own:
        login = Login(settings.username, settings.password)
    if login is not None and _ENDS_A_HEADER & set(login.user + login.password):
        raise refusal(queue, "has a user or password with a line break")
    return Place(
        servers,
        login,
        name,
        _number(queue, uri, "prefetch", DEFAULT_PREFETCH, MAX_PREFETCH),
        _number(queue, uri, "heartbeat", DEFAULT_HEARTBEAT, MAX_HEARTBEAT),
    )


def _own_servers(queue: QueueConfig, settings: ActiveMqSettings) -> tuple[Server, ...]:
    uri = read_uri(QueueConfig(name=queue.name, uri=settings.url), SERVER_OPTIONS)
    return _servers(queue, uri.address.rpartition("@")[2], uri)


def _servers(queue: QueueConfig, hosts: str, uri: QueueUri) -> tuple[Server, ...]:
    tls = uri.options.get("tls", "false")
    if tls not in TLS:
        raise refusal(queue, "has an option tls that is neither true nor false")
    return tuple(
        Server(*_host_and_port(queue, each), TLS[tls], uri.options.get("cafile"))
        for each in hosts.split(",")
    )


def _host_and_port(queue: QueueConfig, text: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or port == 0:
        raise refusal(queue, "names no host, or a wrong port")
    return host, port or DEFAULT_PORT


def _login(credentials: str) -> Login | None:
    if not credentials:
        return None
    user, _, password = credentials.partition(":")
    return Login(unquote(user), unquote(password))


def _number(queue: QueueConfig, uri: QueueUri, option: str, default: int, most: int) -> int:
    said = uri.options.get(option, str(default))
    if not said.isascii() or not said.isdigit() or not 1 <= int(said) <= most:
        raise refusal(queue, f"has an option {option} that is not a number from 1 to {most}")
    return int(said)
