"""RabbitMQ: classic and quorum queues, consumed with a prefetch window and retry queues."""

import itertools
import logging
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final
from urllib.parse import quote, unquote, urlsplit

from msgspec import Struct

from router.brokers.comebacks import Comebacks
from router.brokers.rabbitmq_consumer import RabbitBroker
from router.brokers.rabbitmq_link import Link, open_link
from router.brokers.rabbitmq_publisher import RabbitPublisher
from router.brokers.rabbitmq_retry import RetryQueues
from router.brokers.uri import QueueUri, read_uri, refusal
from router.brokers.worker import Worker
from router.core.config import QueueConfig
from router.core.remembered import RememberedAcks
from router.ports import QueueRefused

log = logging.getLogger(__name__)

KINDS: Final = ("classic", "quorum")
TLS_OPTIONS: Final = frozenset({"cafile", "certfile", "keyfile"})
OPTIONS: Final = frozenset({"queue", "type", "prefetch", "heartbeat"}) | TLS_OPTIONS
MAX_PREFETCH: Final = 65_535
DEFAULT_PREFETCH: Final = 500
MAX_HEARTBEAT: Final = 60
DEFAULT_HEARTBEAT: Final = 10  # seconds; a silent broker is noticed after 33


class Place(Struct, frozen=True):
    """Where a queue is, read from its URI."""

    url: str  # of the broker, with its password
    queue: str
    kind: str | None  # None: as the broker says; else the queue is made if it is missing
    prefetch: int

    def __repr__(self) -> str:
        return f"Place(queue={self.queue!r})"


class RabbitQueues:
    """`amqp://user:password@host/vhost?queue=name`; `amqp://name` is at the broker of the settings.

    Also `type=classic|quorum` (and the queue is made if it is missing), `prefetch=500`,
    `heartbeat=10`; with amqps `cafile`, `certfile`, `keyfile`.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._lines = itertools.count(1)
        self._copied: defaultdict[str, RememberedAcks] = defaultdict(RememberedAcks)
        self._comebacks: defaultdict[str, Comebacks] = defaultdict(Comebacks)  # both by queue URI

    async def close(self) -> None:
        """Nothing is shared between connections that has to be closed."""

    @asynccontextmanager
    async def open_queue(self, queue: QueueConfig) -> AsyncIterator[RabbitBroker]:
        place = read_place(queue, self._worker.settings.rabbitmq.url)
        # Copies go over a connection of their own: a broker short of memory stops reading from
        # those that publish, and acknowledgements must still get through.
        async with (
            open_link(place.url, f"message-router {self._worker.id}") as link,
            open_link(place.url, f"message-router {self._worker.id} retries") as outlet,
        ):
            retries = RetryQueues(outlet, place.queue, await _find(link, place))
            await retries.prepare()
            broker = RabbitBroker(
                link,
                retries,
                place.queue,
                prefetch=place.prefetch,
                line=next(self._lines),
                copied=self._copied[queue.uri],
                comebacks=self._comebacks[queue.uri],
                clock=self._worker.clock,
            )
            async with broker.minded():
                yield broker

    @asynccontextmanager
    async def open_publisher(self, queue: QueueConfig) -> AsyncIterator[RabbitPublisher]:
        place = read_place(queue, self._worker.settings.rabbitmq.url)
        async with open_link(place.url, f"message-router {self._worker.id} publisher") as link:
            await _find(link, place)
            yield RabbitPublisher(link, place.queue)


def read_place(queue: QueueConfig, default_url: str) -> Place:
    uri = read_uri(queue, OPTIONS)
    kind = uri.options.get("type")
    if kind is not None and kind not in KINDS:
        raise refusal(queue, "has an option type that is neither classic nor quorum")
    heartbeat = _number(queue, uri, "heartbeat", DEFAULT_HEARTBEAT, MAX_HEARTBEAT)
    name, url = _name_and_url(queue, uri, default_url)
    tls = [f"&{key}={quote(uri.options[key])}" for key in sorted(TLS_OPTIONS & uri.options.keys())]
    return Place(
        f"{url}?heartbeat={heartbeat}{''.join(tls)}",
        name,
        kind,
        _number(queue, uri, "prefetch", DEFAULT_PREFETCH, MAX_PREFETCH),
    )


def _name_and_url(queue: QueueConfig, uri: QueueUri, default_url: str) -> tuple[str, str]:
    scheme = queue.uri.partition(":")[0].lower()
    if "queue" in uri.options:
        name, url = uri.options["queue"], f"{scheme}://{uri.address}/{_vhost(uri.path)}"
    elif uri.path in {"", "/"} and not {"@", ":"} & set(uri.address):
        default = urlsplit(default_url)
        name, url = unquote(uri.address), f"{default.scheme}://{default.netloc}{default.path}"
    else:
        raise refusal(queue, "names no queue (?queue=name)")
    if not name:
        raise refusal(queue, "names no queue (?queue=name)")
    try:
        has_host = bool(urlsplit(url).hostname) and urlsplit(url).port != 0
    except ValueError:
        has_host = False
    if not has_host:
        raise refusal(queue, "names no host, or a wrong port")
    return name, url


def _vhost(path: str) -> str:
    return quote(path.removeprefix("/"), safe="")


def _number(queue: QueueConfig, uri: QueueUri, option: str, default: int, most: int) -> int:
    said = uri.options.get(option, str(default))
    if not said.isascii() or not said.isdigit() or not 1 <= int(said) <= most:
        raise refusal(queue, f"has an option {option} that is not a number from 1 to {most}")
    return int(said)


async def _find(link: Link, place: Place) -> str:
    """What kind of queue it is. One whose kind was said is made if it is not there."""
    if place.kind is not None:
        if not await link.exists(place.queue):
            await link.declare(place.queue, {"x-queue-type": place.kind})
        return place.kind
    if not await link.exists(place.queue):
        raise QueueRefused(f"there is no queue {place.queue!r}: make it, or say its type")
    kind = await link.kind_of(place.queue)
    if kind is None:
        log.info("queue type unknown: its retry queues are classic", extra={"queue": place.queue})
    if kind == "stream":
        raise QueueRefused(f"{place.queue!r} is a stream: its messages cannot be removed")
    return kind or "classic"
