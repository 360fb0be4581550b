"""What the API asks of the router, and nothing else."""

from collections.abc import Sequence
from typing import Protocol

from router.core.config_plan import Plan
from router.core.state import RouterState
from router.core.warnings import WarningBook
from router.engine.batches import Batches
from router.engine.beat import ScheduleState
from router.engine.config_sync import SyncStatus
from router.engine.controls import Controls
from router.engine.message_states import MessageStates
from router.engine.publishing import QueuePublisher
from router.engine.replay import DeadLetterReplay
from router.engine.state import MessageLookup
from router.ports import DeadLetterStore


class RouterApi(Protocol):
    @property
    def controls(self) -> Controls: ...

    @property
    def lookup(self) -> MessageLookup: ...

    @property
    def warnings(self) -> WarningBook: ...

    @property
    def publishing(self) -> QueuePublisher: ...

    @property
    def messages(self) -> MessageStates: ...

    @property
    def batches(self) -> Batches: ...

    @property
    def letters(self) -> DeadLetterStore: ...

    @property
    def replays(self) -> DeadLetterReplay: ...

    def now(self) -> float:
        """Return the time in Unix seconds."""

    def state(self) -> RouterState: ...

    def schedules(self) -> Sequence[ScheduleState]: ...

    def config_status(self) -> SyncStatus: ...

    async def reload(self) -> Plan:
        """Sync the configuration now, once. Raises SyncFailed."""
