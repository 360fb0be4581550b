"""ActiveMQ Classic over STOMP 1.2.

Here is where a queue is: the settings and the URI.
"""

from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote, urlsplit

from msgspec import Struct

from router.brokers.kit import QueueUri, number_option, read_uri, refusal, switch_option
from router.brokers.package import Adapter, BrokerPackage
from router.brokers.workers import ConsumerIdentity
from router.core.broker import Exclusivity
from router.core.config import QueueConfig
from router.setting_values import env, text, url

OPTIONS: Final = frozenset({"prefetch", "heartbeat", "tls", "cafile"})
SERVER_OPTIONS: Final = frozenset({"tls", "cafile"})
DEFAULT_PORT: Final = 61613
PREFETCH_MESSAGES: Final = (1000, 65_535)  # default and maximum
# A silent broker is noticed after three heartbeats, and a minute of silence is too long (BRK-1).
HEARTBEAT_SECONDS: Final = (5, 20)

# A name with one of these would stand for several queues, or for options of the subscription.
_NOT_IN_A_NAME: Final = frozenset("*>,?")
_PARTS_OF_A_HOST: Final = frozenset("@:,")
_ENDS_A_HEADER: Final = frozenset("\r\n\0")  # CONNECT frames are not escaped


@dataclass(frozen=True, slots=True)
class ActiveMqSettings:
    # fmt: off
    url: str = env(
        "ACTIVEMQ_BROKER_URL", url("stomp", "activemq"), "stomp://localhost:61613",
        "ActiveMQ broker", secret=True)  # of queues that are given by name only
    username: str = env("ACTIVEMQ_USERNAME", text, "admin",
        "ActiveMQ user")
    password: str = env("ACTIVEMQ_PASSWORD", text, "admin",
        "ActiveMQ password", secret=True)
    # fmt: on


class Server(Struct, frozen=True):
    host: str
    port: int
    tls: bool = False
    cafile: str | None = None  # None: the authorities that the system trusts


class Login(Struct, frozen=True):
    user: str
    password: str

    def __repr__(self) -> str:
        return "Login(***)"


class ActiveMqAddress(Struct, frozen=True):
    servers: tuple[Server, ...]  # tried in this order
    login: Login | None
    queue: str
    prefetch: int
    heartbeat: int  # seconds

    @property
    def destination(self) -> str:
        return f"/queue/{self.queue}"


def read_address(queue: QueueConfig, settings: ActiveMqSettings) -> ActiveMqAddress:
    """Read `activemq://[user:password@]host:61613[,host2:61613]/queue`, or `activemq://queue`.

    The latter is at the broker of the settings. Only that broker is sent the settings' password.
    Options: `prefetch=1000`, `heartbeat=5`, `tls=true`, `cafile=…`. The scheme may be `stomp`.
    """
    uri = read_uri(queue, OPTIONS)
    default = read_uri(QueueConfig(name=queue.name, uri=settings.url), SERVER_OPTIONS)
    default_servers = _servers(queue, default.address.rpartition("@")[2], default)
    name, servers, login = uri.path.removeprefix("/"), default_servers, None
    if name:
        credentials, _, hosts = uri.address.rpartition("@")
        servers = _servers(queue, hosts, uri)
        user, _, password = credentials.partition(":")
        login = Login(unquote(user), unquote(password)) if credentials else None
    elif not _PARTS_OF_A_HOST & set(uri.address):
        name = unquote(uri.address)
    if not name:
        raise refusal(queue, "names no queue")
    if _NOT_IN_A_NAME & set(name):
        raise refusal(queue, "names more than one queue (*, >, a comma or a question mark)")
    if login is None and servers == default_servers:
        login = Login(settings.username, settings.password)
    if login is not None and _ENDS_A_HEADER & set(login.user + login.password):
        raise refusal(queue, "has a user or password with a line break")
    return ActiveMqAddress(
        servers,
        login,
        name,
        number_option(queue, uri, "prefetch", PREFETCH_MESSAGES),
        number_option(queue, uri, "heartbeat", HEARTBEAT_SECONDS),
    )


def _servers(queue: QueueConfig, hosts: str, uri: QueueUri) -> tuple[Server, ...]:
    tls = switch_option(queue, uri, "tls", default=False)
    servers: list[Server] = []
    for each in hosts.split(","):
        try:
            parts = urlsplit(f"//{each}")
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port = None, None
        if not host or port == 0:
            raise refusal(queue, "names no host, or a wrong port")
        servers.append(Server(host, port or DEFAULT_PORT, tls, uri.options.get("cafile")))
    return tuple(servers)


def _make(identity: ConsumerIdentity) -> Adapter:
    from router.brokers.activemq.broker import ActiveMqQueues  # noqa: PLC0415  on use

    return ActiveMqQueues(identity)


BROKER: Final = BrokerPackage(
    name="ActiveMQ",
    schemes=("activemq", "stomp"),
    options=OPTIONS,
    queue_type="ACTIVEMQ",
    exclusivity=Exclusivity.BROKER,
    settles_first=True,
    settings=ActiveMqSettings,
    takes_raw=True,
    make=_make,
)
