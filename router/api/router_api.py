"""What the API asks of the router, and nothing else. Handlers get it as a dependency."""

from collections.abc import Sequence
from typing import Annotated, Protocol

from fastapi import Depends, Request

from router.core.config_plan import Plan
from router.core.state import RouterState
from router.core.warnings import WarningBook
from router.engine.beat import ScheduleState
from router.engine.config_sync import SyncStatus
from router.engine.controls import Controls
from router.engine.publishing import QueuePublisher
from router.engine.replay import DeadLetterReplay
from router.engine.state import MessageLookup
from router.engine.stores import Batches, MessageStates
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


async def current_router(request: Request) -> RouterApi:
    router: RouterApi = request.app.state.router
    return router


# Handlers and dependencies are async even if they do not wait: FastAPI runs a plain `def` in a
# thread, where it would read the router's state while the event loop changes it.
CurrentRouter = Annotated[RouterApi, Depends(current_router)]
