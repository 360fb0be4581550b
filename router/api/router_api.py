"""What the API asks of the router, and nothing else."""

from typing import Protocol

from router.core.config_plan import Plan
from router.core.health import Vitals
from router.core.warnings import WarningBook
from router.engine.config_sync import SyncStatus
from router.engine.dead_letters import Replays
from router.engine.publishing import Publishing
from router.ports import DeadLetterStore


class RouterApi(Protocol):
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

    def config_status(self) -> SyncStatus: ...

    async def reload(self) -> Plan:
        """Sync the configuration now, once. Raises SyncFailed."""
