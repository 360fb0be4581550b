"""The dependencies that `main` gives the engine, shared among its parts."""

import asyncio
from dataclasses import dataclass, field

from router.core.config import DefaultRetry
from router.core.leadership import Leadership
from router.core.returning import Jitter
from router.engine.alerts import Alerts
from router.engine.dead_letters import DeadLetterWriter
from router.engine.delivery import Deliverer
from router.engine.flow import ByteBudget
from router.engine.publishing import QueuePublisher
from router.engine.registry import InFlightRegistry
from router.engine.shared_limits import SharedLimits
from router.engine.targets import Targets
from router.engine.transfer import OrderStore
from router.ports import Brokers
from router.signal import Signal


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDeps:
    brokers: Brokers
    mediator: Deliverer
    letters: DeadLetterWriter
    alerts: Alerts
    publishing: QueuePublisher  # for replies and next steps (CMD-3, CMD-11)
    tasks: asyncio.TaskGroup  # the owner of all tasks of consumers and pools
    jitter: Jitter
    registry: InFlightRegistry
    targets: Targets
    leadership: Leadership
    longest_request: float  # seconds that one request or task may take
    default_retry: DefaultRetry  # for pools and queues without a policy
    max_pools: int
    pool_warning_threshold: int
    look_ahead_bytes: ByteBudget  # of all queues together (ROUTE-5)
    order: OrderStore | None = None  # where strict queues store groups; None: they block
    limits: SharedLimits | None = None  # of all routers together; None: of this one
    room: Signal = field(default_factory=Signal)  # a pool has room again, or a consumer stops
    extended: Signal = field(default_factory=Signal)  # an extension of leases has ended
