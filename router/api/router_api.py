"""What the API asks of the router, and nothing else."""

from collections.abc import Iterable
from typing import Protocol

from router.core.config_plan import Plan
from router.core.explain import Explanation
from router.core.figures import (
    BreakerFigures,
    PoolFigures,
    PoolMeters,
    QueueFigures,
    QueueMeters,
    RouterMeters,
    StandbyStatus,
)
from router.core.health import Vitals
from router.core.warnings import WarningBook
from router.engine.config_sync import SyncCounts, SyncStatus
from router.engine.controls import PoolChange
from router.engine.dead_letters import Replays
from router.engine.explaining import Story
from router.engine.in_flight import InFlight
from router.engine.publishing import Publishing
from router.engine.snapshot import Snapshot
from router.ports import DeadLetterStore


class Statistics(Protocol):
    """Figures, read as they are iterated over."""

    def pools(self) -> Iterable[PoolFigures]: ...

    def pool_meters(self) -> Iterable[PoolMeters]: ...

    def queues(self) -> Iterable[QueueFigures]: ...

    def queue_meters(self) -> Iterable[QueueMeters]: ...

    def breakers(self) -> Iterable[BreakerFigures]: ...

    def router_meters(self) -> RouterMeters: ...


class Controls(Protocol):
    def change_pool(self, code: str, change: PoolChange) -> PoolFigures:
        """Raises UnknownPool."""

    def reset_breaker(self, name: str) -> None:
        """Raises UnknownBreaker."""

    def reset_breakers(self) -> int: ...


class Explaining(Protocol):
    async def story(self, message_id: str) -> Story: ...

    async def message(self, message_id: str) -> Explanation: ...

    def group(self, group: str | None, pool: str | None) -> Explanation: ...

    def target(self, url: str) -> Explanation:
        """Raises BadTarget."""


class RouterApi(Protocol):
    @property
    def statistics(self) -> Statistics: ...

    @property
    def controls(self) -> Controls: ...

    @property
    def in_flight(self) -> InFlight: ...

    @property
    def explaining(self) -> Explaining: ...

    @property
    def warnings(self) -> WarningBook: ...

    @property
    def publishing(self) -> Publishing: ...

    @property
    def letters(self) -> DeadLetterStore: ...

    @property
    def replays(self) -> Replays: ...

    def now(self) -> float:
        """Unix seconds."""

    def vitals(self) -> Vitals: ...

    def snapshot(self) -> Snapshot: ...

    def config_status(self) -> SyncStatus: ...

    def sync_counts(self) -> SyncCounts: ...

    def standby_status(self) -> StandbyStatus: ...

    async def reload(self) -> Plan:
        """Sync the configuration now, once. Raises SyncFailed."""
