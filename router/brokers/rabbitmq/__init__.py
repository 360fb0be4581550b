"""RabbitMQ: classic and quorum queues, consumed with a prefetch window and retry queues.

Here is where a queue is: the settings and the URI.
"""

from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, unquote, urlsplit

from msgspec import Struct

from router.brokers.kit import QueueUri, number_option, read_uri, refusal
from router.brokers.package import Adapter, BrokerPackage
from router.brokers.workers import ConsumerIdentity
from router.core.broker import Exclusivity
from router.core.config import QueueConfig
from router.setting_values import env, url

KINDS: Final = ("classic", "quorum")
TLS_OPTIONS: Final = frozenset({"cafile", "certfile", "keyfile"})
OPTIONS: Final = frozenset({"queue", "type", "prefetch", "heartbeat"}) | TLS_OPTIONS
PREFETCH_MESSAGES: Final = (500, 65_535)  # default and maximum
HEARTBEAT_SECONDS: Final = (10, 60)  # by default, a silent broker is noticed after 33 seconds


@dataclass(frozen=True, slots=True)
class RabbitSettings:
    # fmt: off
    url: str = env("RABBITMQ_URL", url("amqp", "amqps"), "amqp://guest:guest@localhost/",
        "RabbitMQ broker", secret=True)  # of queues that are given by name only
    # fmt: on


class RabbitAddress(Struct, frozen=True):
    url: str  # of the broker, with the password
    queue: str
    kind: str | None  # the queue is made as this if it is missing; None: as the broker says
    prefetch: int
    heartbeat: int  # seconds

    def __repr__(self) -> str:
        return f"RabbitAddress(queue={self.queue!r})"


def read_address(queue: QueueConfig, default_url: str) -> RabbitAddress:
    """Read `amqp://user:password@host/vhost?queue=name`, or `amqp://name`.

    The latter is at the broker of the settings. Options: `type=classic|quorum` (the queue is made
    if it is missing), `prefetch=500`, `heartbeat=10`; with amqps `cafile`, `certfile`, `keyfile`.
    """
    uri = read_uri(queue, OPTIONS)
    options = uri.options
    kind = options.get("type")
    if kind is not None and kind not in KINDS:
        raise refusal(queue, "has an option type that is neither classic nor quorum")
    heartbeat = number_option(queue, uri, "heartbeat", HEARTBEAT_SECONDS)
    prefetch = number_option(queue, uri, "prefetch", PREFETCH_MESSAGES)
    name, broker = _name_and_broker(queue, uri, default_url)
    tls = [f"&{key}={quote(options[key])}" for key in sorted(TLS_OPTIONS & options.keys())]
    broker_url = f"{broker}?heartbeat={heartbeat}{''.join(tls)}"
    return RabbitAddress(broker_url, name, kind, prefetch, heartbeat)


def _name_and_broker(queue: QueueConfig, uri: QueueUri, default_url: str) -> tuple[str, str]:
    if "queue" in uri.options:
        scheme = queue.uri.partition(":")[0].lower()
        vhost = quote(uri.path.removeprefix("/"), safe="")
        name, broker = uri.options["queue"], f"{scheme}://{uri.address}/{vhost}"
    elif uri.path in {"", "/"} and not {"@", ":"} & set(uri.address):
        default = urlsplit(default_url)
        name, broker = unquote(uri.address), f"{default.scheme}://{default.netloc}{default.path}"
    else:
        name, broker = "", ""
    if not name:
        raise refusal(queue, "names no queue (?queue=name)")
    try:
        has_host = bool(urlsplit(broker).hostname) and urlsplit(broker).port != 0
    except ValueError:
        has_host = False
    if not has_host:
        raise refusal(queue, "names no host, or a wrong port")
    return name, broker


def _make(identity: ConsumerIdentity) -> Adapter:
    from router.brokers.rabbitmq.broker import RabbitQueues  # noqa: PLC0415  on use

    return RabbitQueues(identity)


BROKER: Final = BrokerPackage(
    name="RabbitMQ",
    schemes=("amqp", "amqps"),
    options=OPTIONS,
    naming_options=frozenset({"queue"}),
    queue_type="RABBITMQ",
    exclusivity=Exclusivity.BROKER,
    settles_first=True,
    settings=RabbitSettings,
    takes_raw=True,
    make=_make,
)
