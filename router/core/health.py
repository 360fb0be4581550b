"""From the router's state to a status that an operator, or an orchestrator, can act on (OPS-3).

Two different questions: can the router itself work (`healthy`, which becomes the HTTP status), and
does anything need attention (`status`). Failing targets affect only the second.
"""

from collections.abc import Iterable
from enum import Enum
from typing import Final

from msgspec import Struct

from router.core.state import GOOD_RATE, RouterState

TOLERATED_WARNINGS: Final = 5
NAMES_SHOWN: Final = 10  # there may be thousands of pools

NOT_INITIALIZED: Final = "not initialized yet"
SHUTTING_DOWN: Final = "shutting down"
NO_CONSUMER: Final = "every consumer is unhealthy"
ALL_STUCK: Final = "every pool that has work is stuck"


class Status(Enum):
    HEALTHY = "HEALTHY"
    WARNING = "WARNING"
    DEGRADED = "DEGRADED"


class Health(Struct, frozen=True):
    healthy: bool  # whether the router itself can work
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


def assess(state: RouterState) -> Health:
    """Judge the router: can it work, and does anything need attention."""
    warnings, active_pools = state.warnings, list(state.active_pools)
    queues = [queue for queue in state.queues if not queue.stopping]
    consumers = list(state.consumers)
    failing_queues = [queue.name for queue in queues if queue.success_rate < GOOD_RATE]
    failing_pools = [pool.code for pool in active_pools if pool.success_rate < GOOD_RATE]
    unhealthy = [consumer.queue for consumer in consumers if not consumer.healthy]
    all_unhealthy = 0 < len(consumers) == len(unhealthy)
    with_work = [pool for pool in active_pools if pool.has_work]

    failures = _said(
        (not state.initialized, NOT_INITIALIZED),
        (all_unhealthy, NO_CONSUMER),
        (with_work and all(pool.is_stuck(state.uptime) for pool in with_work), ALL_STUCK),
    )
    degradations = _said(
        (warnings.fresh_critical, f"critical warnings that need a look: {warnings.fresh_critical}"),
        (state.open_breakers, f"open circuit breakers: {state.open_breakers}"),
        (0 < len(queues) == len(failing_queues), "every queue is below 90 % success"),
        (0 < state.pool_count == len(failing_pools), "every pool is below 90 % success"),
    )
    concerns = _said(
        (
            0 < len(failing_queues) < len(queues),
            f"below 90 % success: queues {_listed(failing_queues)}",
        ),
        (
            0 < len(failing_pools) < state.pool_count,
            f"below 90 % success: pools {_listed(failing_pools)}",
        ),
        (0 < len(unhealthy) < len(consumers), f"unhealthy consumers: {_listed(unhealthy)}"),
        (warnings.total > TOLERATED_WARNINGS, f"active warnings: {warnings.total}"),
    )
    if failures or degradations:
        status = Status.DEGRADED
    else:
        status = Status.WARNING if concerns else Status.HEALTHY
    return Health(healthy=not failures, status=status, issues=(*failures, *degradations, *concerns))


def readiness(state: RouterState) -> Probe:
    """Judge whether to count on this router. A standby is ready, although it consumes nothing."""
    consumers = list(state.consumers)
    return Probe(
        _said(
            (not state.initialized, NOT_INITIALIZED),
            (state.shutting_down, SHUTTING_DOWN),
            (consumers and not any(consumer.healthy for consumer in consumers), NO_CONSUMER),
        )
    )


def startup(state: RouterState) -> Probe:
    return Probe(_said((not state.initialized, NOT_INITIALIZED)))


def _said(*issues: tuple[object, str]) -> tuple[str, ...]:
    return tuple(text for is_so, text in issues if is_so)


def _listed(names: Iterable[str]) -> str:
    unique = list(dict.fromkeys(names))
    more = f" and {len(unique) - NAMES_SHOWN} more" if len(unique) > NAMES_SHOWN else ""
    return ", ".join(unique[:NAMES_SHOWN]) + more
