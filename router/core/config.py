"""The routing configuration: queues, pools, schedules (CMD-10), targets (TGT-1).

Documents are read in `config_document`; what a new configuration changes is in `config_plan`.
"""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from enum import Enum
from itertools import islice, takewhile
from typing import Final
from zoneinfo import ZoneInfo

import msgspec
from cronsim import CronSim
from msgspec import Raw, Struct
from msgspec.structs import replace

from router.core.broker import UNKNOWN_BROKER, BrokerFacts, Exclusivity
from router.core.message import DEFAULT_POOL
from router.core.raw import RawRoute
from router.core.redact import MASK, mask_urls, public_uri

MAX_BATCH_MESSAGES: Final = 50  # a batch always fits the smallest pool (BRK-1)
MAX_CONCURRENCY: Final = 10_000  # workers; a pool's memory grows with it (POOL-1)
EMBEDDED_QUEUE: Final = "default"
MAX_SCHEDULES: Final = 1_000
MAX_TARGETS: Final = 1_000
# How far a last tick may be ahead of the clock: an interval, within these bounds. The clocks of
# replicas differ.
MIN_LEAD_SECONDS: Final = 60
MAX_LEAD_SECONDS: Final = 3600
# A clock that is set back repeats at most this much of the day.
_MAX_OVERLAP: Final = timedelta(hours=3)
# How far a tick may be away. The longest gap of a day that exists is 40 years: 29 February, on a
# given weekday, around a year such as 2100.
MAX_TICK_YEARS: Final = 100
MAX_SKIPPED_TIMES: Final = 3_000  # local times that do not exist: to look at them takes 40 ms


PARTITION: Final = "{partition}"  # stands for the number of a partition in a URI (PART-1)
COMMAND_BUS: Final = "command-bus"  # an envelope (CMD-7)
RAW: Final = "raw"  # likewise: none (RAW-1)


class RetryPolicy(Struct, frozen=True):
    """WQ-5."""

    max_attempts: int | None = None  # None: without end
    schedule: tuple[float, ...] | None = None  # None: exponential with full jitter
    statuses: frozenset[int] = frozenset()  # 4xx that are retried instead of dead-lettered
    # Within this time, a failure in which nothing was sent uses up no attempt (WQ-15).
    unsent_seconds: float = 0.0


class DefaultRetry(Struct, frozen=True):
    """The default where neither the pool nor the queue has a retry policy (WQ-15)."""

    commands: RetryPolicy | None = None  # and tasks (CMD-12)
    others: RetryPolicy | None = None
    # Others become dead letters although there is no policy, after very many failures.
    gives_up: bool = False

    @staticmethod
    def of_all(policy: RetryPolicy) -> "DefaultRetry":
        return DefaultRetry(policy, policy)


STANDARD_RETRY: Final = DefaultRetry(
    RetryPolicy(4, (10.0, 60.0, 300.0), unsent_seconds=900.0), gives_up=True
)
ENDLESS_RETRY: Final = DefaultRetry()


class Route(Struct, frozen=True, kw_only=True):
    """Where the commands of one type go (CMD-7)."""

    target: str
    pool: str | None = None
    group_field: str | None = None  # the field of the command's data that names its group
    token: str | None = None

    def __repr__(self) -> str:
        """Return it without secrets."""
        return f"Route({mask_urls(self.target)!r})"

    def without_secrets(self) -> "Route":
        token = None if self.token is None else MASK
        return replace(self, target=mask_urls(self.target), token=token)


class Ordering(Enum):
    """How far the order of a group goes (section 14)."""

    BATCH = "batch"  # FIFO-1
    STRICT = "strict"  # ORD-1


class OnFailure(Enum):
    """Where a failed message waits for its next try (ORD-1)."""

    BLOCK = "block"  # in front of its group, in the router
    PARK = "park"  # in the order store, with its group
    SKIP = "skip"  # in its queue, and its group goes on


class QueueConfig(Struct, frozen=True, kw_only=True):
    name: str  # the identity shown everywhere
    uri: str  # always with a scheme; may hold credentials
    connections: int = 1
    visibility_timeout: float | None = None  # None: the broker queue's own, else 30 s
    max_messages: int | None = None
    look_ahead: int | None = None  # messages for full pools; None: it depends on the broker
    retry: RetryPolicy | None = None
    ordering: Ordering | None = None  # None: not given, so that of the pools (ORD-1)
    on_failure: OnFailure | None = None  # None: not given, see `failing`
    holds_letters: bool = False  # a dead letter holds back its group (ORD-11)
    is_shared: bool = False  # all of it goes through the order store, for all routers (ORD-13)
    max_age: float | None = None  # seconds after its publication: a message is not sent later
    envelope: str | None = None  # how bodies are wrapped; None: they are messages (CMD-7)
    routes: tuple[tuple[str, Route], ...] = ()  # where wrapped commands go, by their type
    route: RawRoute | None = None  # where all of a raw queue goes; None: it is not raw (RAW-1)
    # Reply queues of the same database, by their name there in lower case: how wrapped commands
    # name them, and what they are called here. None: they are named as they are called here.
    reply_names: tuple[tuple[str, str], ...] | None = None
    # Commands without a route go to the handler of their type, and replies to whichever queue of
    # the same database they name: the library (CMD-9).
    has_handlers: bool = False
    broker: BrokerFacts = UNKNOWN_BROKER
    partitions: int | None = None  # it is an entry for so many queues (PART-1); None: a queue
    entry: "QueueConfig | None" = None  # of which this queue is a partition

    @property
    def public_uri(self) -> str:
        """The URI without credentials."""
        return public_uri(self.uri, self.broker.shown_options)

    @property
    def is_strict(self) -> bool:
        return self.ordering is Ordering.STRICT

    @property
    def failing(self) -> OnFailure | None:
        """Where a failed message waits; None: as the broker can (FIFO-1)."""
        return OnFailure.PARK if self.is_strict and self.on_failure is None else self.on_failure

    @property
    def may_be_anothers(self) -> bool:
        """Whether its broker hands all of it to one consumer, perhaps another router's (ORD-2)."""
        return self.is_strict and self.broker.exclusivity is Exclusivity.BROKER

    @property
    def may_be_stored(self) -> bool:
        """Whether groups of it may have to wait in the order store (ORD-4)."""
        return self.failing is OnFailure.PARK or self.holds_letters

    def is_called(self, name: str) -> bool:
        """Return whether this is its name, or that of the entry of which it is a partition."""
        return name == self.name or (self.entry is not None and name == self.entry.name)

    @property
    def is_stored(self) -> bool:
        """Whether its groups leave its broker for the order store, all but those that it holds."""
        if self.broker.holds_groups(self.uri):
            return self.holds_letters and not self.broker.holds_letters
        return self.may_be_stored

    def __repr__(self) -> str:
        """Return it without credentials: it may end up in a log or a traceback."""
        return f"QueueConfig(name={self.name!r}, uri={self.public_uri!r})"


class FairShare(Enum):
    """Between whom the workers of a pool are shared (SHARE-1)."""

    TARGET = "target"  # target origins
    TENANT = "tenant"  # what message groups have before their first colon
    NONE = "none"


class PoolConfig(Struct, frozen=True, kw_only=True):
    code: str
    concurrency: int  # effective: POOL-6 is applied already
    rate_per_minute: int | None = None  # None: no limit
    burst: int | None = None  # None: a minute's worth
    parallel_ungrouped: bool = False
    retry: RetryPolicy | None = None
    timeout: float | None = None  # seconds; None: the mediator's own
    take_ahead: int | None = None  # waiting messages for each worker; None: as many as fit 10 s
    fair_share: FairShare = FairShare.TARGET
    is_strict: bool = False  # and so are the queues that do not say how they are ordered (ORD-1)


class Schedule(Struct, frozen=True, kw_only=True):
    """A message that is published again and again. It has either `every_seconds` or `cron`."""

    name: str
    queue: str
    message: bytes  # a message document without an id
    every_seconds: int | None = None
    cron: str | None = None
    timezone: str = "UTC"

    def body_of(self, tick: int) -> bytes:
        """Return the message of a tick."""
        fields = msgspec.json.decode(self.message, type=dict[str, Raw])
        return msgspec.json.encode({"id": f"{self.name}-{tick}", **fields})

    def next_tick(self, after: float) -> int | None:
        """Return the first tick later than `after`, or None if there is none for 100 years."""
        if self.every_seconds is not None:
            return (int(after // self.every_seconds) + 1) * self.every_seconds
        start = datetime.fromtimestamp(after, self._zone).replace(tzinfo=None)
        return next((tick for tick in self._ticks(start) if tick > after), None)

    def latest_tick(self, now: float) -> int | None:
        """Return the last tick at or before `now`, or None if there was none for 100 years."""
        if self.every_seconds is not None:
            return int(now // self.every_seconds) * self.every_seconds
        start = datetime.fromtimestamp(now, self._zone).replace(tzinfo=None) + _MAX_OVERLAP
        return next((tick for tick in self._ticks(start, reverse=True) if tick <= now), None)

    def is_beyond_doubt_ahead(self, tick: int, now: float) -> bool:
        """Return whether only a wrong clock can have published this tick before `now`."""
        interval = MAX_LEAD_SECONDS if self.every_seconds is None else self.every_seconds
        return tick - now > min(max(interval, MIN_LEAD_SECONDS), MAX_LEAD_SECONDS)

    @property
    def _zone(self) -> ZoneInfo:
        return ZoneInfo(self.timezone)

    def _ticks(self, start: datetime, *, reverse: bool = False) -> Iterator[int]:
        """Return the ticks from a local time on, for 100 years.

        A local time that does not exist is skipped. One that exists twice counts once, the first
        time. So local times go without a zone into the library, which would follow Debian's cron.
        """
        assert self.cron is not None  # noqa: S101 - read_schedule has seen to it
        zone = self._zone
        near = takewhile(
            lambda local: abs(local.year - start.year) <= MAX_TICK_YEARS,
            islice(CronSim(self.cron, start, reverse=reverse), MAX_SKIPPED_TIMES),
        )
        return (
            int(moment.timestamp())
            for local in near
            for moment in (local.replace(tzinfo=zone).astimezone(UTC),)
            if moment.astimezone(zone).replace(tzinfo=None) == local
        )


class BodyFormat(Enum):
    """The kinds of request bodies (TGT-8)."""

    MESSAGE = "message"  # the id and the payload
    PAYLOAD = "payload"  # the payload alone
    CLOUD_EVENT = "cloudEvent"  # the payload, with the headers of CloudEvents in binary mode
    STRUCTURED_EVENT = "cloudEventStructured"  # a CloudEvent, with the payload in it


class TargetConfig(Struct, frozen=True, kw_only=True):
    """How requests to one target are made, and how many it gets from all pools (TGT-1)."""

    name: str
    match: str  # origin and path prefix, without a slash at its end
    credentials: str | None = None  # the name of an entry of the credentials file (TGT-3)
    headers: tuple[tuple[str, str], ...] = ()
    timeout: float | None = None  # seconds; None: the pool's
    http_version: str | None = None  # None: as for all targets
    concurrency: int | None = None  # requests at once; None: no ceiling
    rate_per_minute: int | None = None
    method: str = "POST"
    format: BodyFormat = BodyFormat.MESSAGE
    event_type: str = ""  # of CloudEvents (TGT-8)
    event_source: str = ""

    @property
    def burst(self) -> int:
        """How many may be sent at once: a second's worth. Targets count for themselves (TGT-2)."""
        return max((self.rate_per_minute or 0) // 60, 1)


class RoutingConfig(Struct, frozen=True):
    queues: tuple[QueueConfig, ...] = ()
    pools: tuple[PoolConfig, ...] = ()
    reply_queues: tuple[QueueConfig, ...] = ()  # published to, never consumed (CMD-3)
    schedules: tuple[Schedule, ...] = ()  # CMD-10
    targets: tuple[TargetConfig, ...] = ()  # TGT-1


DEFAULT_POOL_CONFIG: Final = PoolConfig(code=DEFAULT_POOL, concurrency=20)  # unless named
NOTHING: Final = RoutingConfig()  # what runs before the first sync


def effective_concurrency(concurrency: int | None, rate_per_minute: int | None) -> int:
    """Return the workers of a pool (POOL-6). Zero and less mean: not given."""
    if concurrency is not None and concurrency > 0:
        return concurrency
    return min(max((rate_per_minute or 0) // 60, 1), MAX_CONCURRENCY)


def with_reply_names(
    queues: Sequence[QueueConfig], reply_queues: Sequence[QueueConfig]
) -> tuple[QueueConfig, ...]:
    """Return the queues, each with the reply queues that its database has (CMD-7)."""
    places = {}
    for each in reply_queues:
        if each.broker.place_of is not None:
            places[each.name] = each.broker.place_of(each.uri, each.name)
    named = []
    for queue in queues:
        known = queue
        if queue.envelope is not None and queue.broker.place_of is not None:
            database, _ = queue.broker.place_of(queue.uri, queue.name)
            names = tuple((name, to) for to, (place, name) in places.items() if place == database)
            known = replace(queue, reply_names=names)
        named.append(known)
    return tuple(named)


def with_ordering(
    queues: Sequence[QueueConfig], pools: Sequence[PoolConfig]
) -> tuple[QueueConfig, ...]:
    """Return the queues, strict if a pool says so and they do not say otherwise (ORD-1).

    Which pools a queue feeds is not known: its messages name them. A queue with several connections
    cannot be strict.
    """
    if not any(pool.is_strict for pool in pools):
        return tuple(queues)
    return tuple(
        replace(queue, ordering=Ordering.STRICT)
        if queue.ordering is None and queue.connections == 1
        else queue
        for queue in queues
    )
