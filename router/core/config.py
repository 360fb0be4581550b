"""The routing configuration: reading a document, uniting several, and what a new one changes."""

from typing import Final

from msgspec import Struct

MAX_BATCH: Final = 50  # BRK-1: a batch always fits the smallest pool


class RetryPolicy(Struct, frozen=True):
    """WQ-5. An empty schedule means exponential with full jitter."""

    max_attempts: int | None = None  # None: for ever
    schedule: tuple[float, ...] | None = None  # None: exponential


class QueueConfig(Struct, frozen=True, kw_only=True):
    name: str  # the identity shown everywhere
    uri: str  # always with a scheme
    connections: int = 1
    visibility_timeout: float | None = None  # None: the broker queue's own, else 30 s
    max_messages: int | None = None
    retry: RetryPolicy | None = None


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
