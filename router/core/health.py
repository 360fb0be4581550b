"""From the engine's figures to one word that an operator, or an orchestrator, can act on (OPS-3).

Two different questions: can the router itself do its work (`healthy`, which becomes the status
code), and does anything need a look (`status`). Failing targets touch only the second.
"""

from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from typing import Final

from msgspec import Struct

from router.core.warnings import WarningSummary

STUCK_AFTER: Final = 120.0
GOOD_RATE: Final = 0.9
TOLERATED_WARNINGS: Final = 5

NOT_INITIALIZED: Final = "not initialized yet"
SHUTTING_DOWN: Final = "shutting down"
NO_CONSUMER: Final = "every consumer is unhealthy"
ALL_STUCK: Final = "every pool that has work is stuck"


class ConsumerVitals(Struct, frozen=True, kw_only=True):
    """One connection to one queue."""

    queue: str
    connection: int
    running: bool
    healthy: bool  # reconnecting, or held back by full pools, is healthy
    restarts: int = 0
    last_poll: float | None = None  # seconds ago; None: not yet


class PoolVitals(Struct, frozen=True, kw_only=True):
    code: str
    queued: int = 0
    delivering: int = 0
    waiting_elsewhere: int = 0  # for a rate limit, a retry or a breaker
    idle_seconds: float = 0.0  # since a delivery started
    success_rate_30min: float = 1.0  # 0…1, no traffic = 1

    @property
    def has_work(self) -> bool:
        return bool(self.queued or self.delivering or self.waiting_elsewhere)

    @property
    def is_stuck(self) -> bool:
        """Work to do, nothing to wait for, and nothing is done."""
        busy = self.delivering or self.waiting_elsewhere
        return bool(self.queued and not busy and self.idle_seconds >= STUCK_AFTER)


class QueueVitals(Struct, frozen=True, kw_only=True):
    name: str
    success_rate_30min: float = 1.0  # 0…1, no traffic = 1


class Vitals(Struct, frozen=True, kw_only=True):
    """What health is judged from. A snapshot: nothing in it can change."""

    initialized: bool
    shutting_down: bool = False
    primary: bool = True
    uptime: float = 0.0  # seconds
    consumers: tuple[ConsumerVitals, ...] = ()
    pools: tuple[PoolVitals, ...] = ()  # those that have work, or fail
    idle_pools: int = 0  # the others: thousands, and nothing to say about any of them
    queues: tuple[QueueVitals, ...] = ()
    open_breakers: int = 0

    @property
    def total_pools(self) -> int:
        return len(self.pools) + self.idle_pools


class Status(Enum):
    HEALTHY = "HEALTHY"
    WARNING = "WARNING"
    DEGRADED = "DEGRADED"


class Health(Struct, frozen=True):
    healthy: bool  # whether the router can do its work
    status: Status
    issues: tuple[str, ...] = ()

    @property
    def message(self) -> str:
        return self.issues[0] if self.issues else "the router does its work"


class Probe(Struct, frozen=True):
    issues: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.issues


def assess(vitals: Vitals, warnings: WarningSummary) -> Health:
    failures = tuple(_failures(vitals))
    degradations = tuple(_degradations(vitals, warnings))
    concerns = tuple(_concerns(vitals, warnings))
    if failures or degradations:
        status = Status.DEGRADED
    else:
        status = Status.WARNING if concerns else Status.HEALTHY
    # Dead consumers fail the router and degrade it: said once.
    issues = tuple(dict.fromkeys(failures + degradations + concerns))
    return Health(healthy=not failures, status=status, issues=issues)


def readiness(vitals: Vitals) -> Probe:
    """Whether the router should be counted on. A standby is ready: it consumes nothing."""
    return Probe(tuple(_not_ready(vitals)))


def startup(vitals: Vitals) -> Probe:
    return Probe(() if vitals.initialized else (NOT_INITIALIZED,))


def _not_ready(vitals: Vitals) -> Iterator[str]:
    if not vitals.initialized:
        yield NOT_INITIALIZED
    if vitals.shutting_down:
        yield SHUTTING_DOWN
    if _all(_unhealthy_consumers(vitals), len(vitals.consumers)):
        yield NO_CONSUMER


def _failures(vitals: Vitals) -> Iterator[str]:
    """Why the router itself cannot do its work; nothing else makes it 503."""
    if not vitals.initialized:
        yield NOT_INITIALIZED
    if _all(_unhealthy_consumers(vitals), len(vitals.consumers)):
        yield NO_CONSUMER
    with_work = [pool for pool in vitals.pools if pool.has_work]
    if with_work and all(pool.is_stuck for pool in with_work):
        yield ALL_STUCK


def _degradations(vitals: Vitals, warnings: WarningSummary) -> Iterator[str]:
    if warnings.fresh_critical:
        yield f"critical warnings that need a look: {warnings.fresh_critical}"
    if vitals.open_breakers:
        yield f"open circuit breakers: {vitals.open_breakers}"
    if _all(_failing_queues(vitals), len(vitals.queues)):
        yield "every queue is below 90 % success"
    if _all(_failing_pools(vitals), vitals.total_pools):
        yield "every pool is below 90 % success"
    if _all(_unhealthy_consumers(vitals), len(vitals.consumers)):
        yield NO_CONSUMER


def _concerns(vitals: Vitals, warnings: WarningSummary) -> Iterator[str]:
    if _some(failing := _failing_queues(vitals), len(vitals.queues)):
        yield f"below 90 % success: queues {_listed(failing)}"
    if _some(failing := _failing_pools(vitals), vitals.total_pools):
        yield f"below 90 % success: pools {_listed(failing)}"
    if _some(silent := _unhealthy_consumers(vitals), len(vitals.consumers)):
        yield f"unhealthy consumers: {_listed(silent)}"
    if warnings.total > TOLERATED_WARNINGS:
        yield f"active warnings: {warnings.total}"


def _unhealthy_consumers(vitals: Vitals) -> Sequence[str]:
    return [consumer.queue for consumer in vitals.consumers if not consumer.healthy]


def _failing_queues(vitals: Vitals) -> Sequence[str]:
    return [queue.name for queue in vitals.queues if queue.success_rate_30min < GOOD_RATE]


def _failing_pools(vitals: Vitals) -> Sequence[str]:
    return [pool.code for pool in vitals.pools if pool.success_rate_30min < GOOD_RATE]


def _all(bad: Sequence[str], of: int) -> bool:
    return 0 < of == len(bad)


def _some(bad: Sequence[str], of: int) -> bool:
    return 0 < len(bad) < of


_SHOWN: Final = 10  # there may be thousands of pools


def _listed(names: Iterable[str]) -> str:
    unique = list(dict.fromkeys(names))
    more = f" and {len(unique) - _SHOWN} more" if len(unique) > _SHOWN else ""
    return ", ".join(unique[:_SHOWN]) + more
