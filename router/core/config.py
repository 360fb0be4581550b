"""The routing configuration: the values that the engine runs by, and how queues are named.

Documents are read in `config_document`; what a new configuration changes is in `config_plan`.
"""

from enum import Enum, auto
from typing import Final
from urllib.parse import quote, unquote, urlsplit

from msgspec import Struct

from router.core.message import DEFAULT_POOL
from router.core.redact import public_uri

MAX_BATCH: Final = 50  # BRK-1: a batch always fits the smallest pool
MAX_CONCURRENCY: Final = 10_000  # a pool's memory grows with it (POOL-1)
EMBEDDED_QUEUE: Final = "default"
EMBEDDED_FILE: Final = "queue.db"


class RetryPolicy(Struct, frozen=True):
    """WQ-5."""

    max_attempts: int | None = None  # None: for ever
    schedule: tuple[float, ...] | None = None  # None: exponential with full jitter
    statuses: frozenset[int] = frozenset()  # 4xx that are retried instead of dead-lettered


class QueueConfig(Struct, frozen=True, kw_only=True):
    name: str  # the identity shown everywhere
    uri: str  # always with a scheme; may hold credentials
    connections: int = 1
    visibility_timeout: float | None = None  # None: the broker queue's own, else 30 s
    max_messages: int | None = None
    retry: RetryPolicy | None = None

    def __repr__(self) -> str:
        """Without credentials: it may end up in a log or a traceback."""
        return f"QueueConfig(name={self.name!r}, uri={public_uri(self.uri)!r})"


class PoolConfig(Struct, frozen=True, kw_only=True):
    code: str
    concurrency: int  # effective: POOL-6 is applied already
    rate_per_minute: int | None = None  # None: no limit
    burst: int | None = None  # None: a minute's worth
    parallel_ungrouped: bool = False
    retry: RetryPolicy | None = None
    timeout: float | None = None  # seconds; None: the mediator's own


class RoutingConfig(Struct, frozen=True):
    queues: tuple[QueueConfig, ...] = ()
    pools: tuple[PoolConfig, ...] = ()


DEFAULT_POOL_CONFIG: Final = PoolConfig(code=DEFAULT_POOL, concurrency=20)  # unless named
NOTHING: Final = RoutingConfig()  # what runs before the first sync


class QueueType(Enum):
    """The broker of a `queueUri` without a scheme."""

    SQS = auto()
    ACTIVEMQ = auto()
    NATS = auto()
    RABBITMQ = auto()
    POSTGRES = auto()
    EMBEDDED = auto()


_SCHEMES: Final = {
    QueueType.SQS: "sqs",
    QueueType.ACTIVEMQ: "activemq",
    QueueType.NATS: "nats",
    QueueType.RABBITMQ: "amqp",
}


class QueueNaming(Struct, frozen=True):
    """What a bare queue name stands for."""

    queue_type: QueueType
    state_dir: str  # absolute

    def uri(self, name: str) -> str:
        if self.queue_type is QueueType.EMBEDDED:
            return self.embedded_uri(name)
        if self.queue_type is QueueType.NATS:  # what follows two slashes would be a host
            return f"nats:///?subject={quote(name, safe='')}"
        if self.queue_type is QueueType.POSTGRES:  # likewise
            return f"postgresql:///?queue={quote(name, safe='')}"
        return f"{_SCHEMES[self.queue_type]}://{quote(name, safe='')}"

    def embedded_uri(self, name: str) -> str:
        """All embedded queues share one file. Four slashes: the path is absolute."""
        return f"sqlite:///{quote(self.state_dir)}/{EMBEDDED_FILE}?queue={quote(name, safe='')}"


def effective_concurrency(concurrency: int | None, rate_per_minute: int | None) -> int:
    """POOL-6. Zero and less mean: not given."""
    if concurrency is not None and concurrency > 0:
        return concurrency
    return min(max((rate_per_minute or 0) // 60, 1), MAX_CONCURRENCY)


def sqlite_path(uri: str) -> str:
    """The file that a `sqlite:` URI names: always absolute, after three slashes as after four."""
    return "/" + unquote(urlsplit(uri).path).lstrip("/")
