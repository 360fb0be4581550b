"""Redis Streams: each queue is a consumer group of a stream.

Here is where a queue is: the settings and the URI.
"""

from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, urlsplit

from msgspec import Struct

from router.brokers.kit import read_uri, refusal, whole_number
from router.brokers.package import Adapter, BrokerPackage
from router.brokers.workers import ConsumerIdentity
from router.core.config import QueueConfig
from router.setting_values import env, url

OPTIONS: Final = frozenset({"stream", "group", "field", "cafile"})
DEFAULT_GROUP: Final = "message-router"
DEFAULT_FIELD: Final = "body"


@dataclass(frozen=True, slots=True)
class RedisSettings:
    # fmt: off
    url: str = env("REDIS_URL", url("redis", "rediss"), "redis://localhost:6379/0",
        "Redis server", secret=True)  # of queues that are given by name only
    # fmt: on


class RedisAddress(Struct, frozen=True):
    url: str  # of the database, with the password
    cafile: str | None  # None: the authorities that the system trusts
    stream: str
    group: str
    field: str  # of a stream entry: where the message is

    def __repr__(self) -> str:
        return f"RedisAddress(stream={self.stream!r})"

    def key(self, name: str) -> str:
        """Return a key beside the stream. The braces keep both on one node of a cluster."""
        return f"{{{self.stream}}}:{self.group}:{name}"


def read_address(queue: QueueConfig, settings: RedisSettings) -> RedisAddress:
    """Read `redis://[user:password@]host:6379/database?stream=name&group=name&field=body`.

    Without a host, the server is that of the settings. Only that server is sent their password.
    """
    uri = read_uri(queue, OPTIONS)
    stream = uri.options.get("stream") or queue.name
    server = settings.url
    if uri.address:
        try:
            parts = urlsplit(f"//{uri.address}")
            has_host = bool(parts.hostname) and parts.port != 0
        except ValueError:
            has_host = False
        database = uri.path.removeprefix("/") or "0"
        if not has_host:
            raise refusal(queue, "names no host, or a wrong port")
        if whole_number(database) is None:
            raise refusal(queue, "has a database that is not a number")
        scheme = queue.uri.partition(":")[0].lower()
        server = f"{scheme}://{uri.address}/{database}"
    elif uri.path not in {"", "/"}:
        raise refusal(queue, "has a database but no host")
    return RedisAddress(
        url=server,
        cafile=uri.options.get("cafile"),
        stream=stream,
        group=uri.options.get("group") or DEFAULT_GROUP,
        field=uri.options.get("field") or DEFAULT_FIELD,
    )


def _make(identity: ConsumerIdentity) -> Adapter:
    from router.brokers.redis.broker import RedisQueues  # noqa: PLC0415  on use

    return RedisQueues(identity)


def _uri_of_name(name: str, _state_dir: str) -> str:
    """Return a URI without a host: what follows two slashes would be one."""
    return f"redis:///?stream={quote(name, safe='')}"


BROKER: Final = BrokerPackage(
    name="Redis",
    schemes=("redis", "rediss"),
    options=OPTIONS,
    naming_options=frozenset({"stream"}),
    queue_type="REDIS",
    uri_of_name=_uri_of_name,
    settings=RedisSettings,
    takes_raw=True,
    make=_make,
)
