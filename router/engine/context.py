"""What every intake needs of the router around it."""

import asyncio
from dataclasses import dataclass

from router.core.backoff import Jitter
from router.core.config import RetryPolicy
from router.core.mandate import Mandate
from router.engine.alerts import Alerts
from router.engine.bell import Bell
from router.engine.letters import Letters
from router.engine.routing import Routing
from router.ports import Brokers


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    brokers: Brokers
    routing: Routing
    letters: Letters
    alerts: Alerts
    tasks: asyncio.TaskGroup  # the owner of all tasks of intakes and pools
    bell: Bell  # rung when a pool has room again, and when an intake stops
    extended: Bell  # rung when an extension of leases has ended
    jitter: Jitter
    mandate: Mandate
    longest_delivery: float  # seconds, with all its tries
    default_retry: RetryPolicy | None = None  # for pools and queues without one
