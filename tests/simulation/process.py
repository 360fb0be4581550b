"""A router in a world: wired as `router.main` does, with the world's ports."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Any, Protocol

from router.brokers import BrokerRegistry
from router.brokers.sqlite.broker import SqliteQueues
from router.brokers.workers import Liveness, Machine
from router.core.config import RoutingConfig
from router.core.dead_letter import DeadLetter, KeptLetter, LetterFilter
from router.core.warnings import WarningBook
from router.engine.alerts import Alerts
from router.engine.beat import Beat
from router.engine.breaker import Breakers
from router.engine.chores import Chores
from router.engine.dead_letters import DeadLetterReplay
from router.engine.delivery import Mediator
from router.engine.groups import GroupDesk
from router.engine.publishing import QueuePublisher
from router.engine.queue_manager import QueueManager
from router.engine.state import MessageLookup
from router.engine.stores import Batches, MessageStates, QueueStores
from router.ports import DeadLetterStore, Sender, StoreError
from router.settings import Settings
from router.storage import FileTicks
from router.storage.dead_letters import open_store
from router.wiring import open_engine
from tests.simulation.loop import Process
from tests.simulation.networked import Opener
from tests.simulation.order_store import StoreSite, order_store
from tests.simulation.plan import DEDUP_WINDOW

TIMEOUT = 60.0  # of a request


class SimSurroundings(StoreSite, Protocol):
    """What a router needs of its world."""

    config: RoutingConfig
    is_strict: bool
    shares_order: bool

    @property
    def machine(self) -> Machine: ...

    def wall(self) -> float: ...
    def liveness(self, prefix: Path) -> Liveness: ...
    def jitter(self, low: float, high: float) -> float: ...
    def new_id(self) -> str: ...
    def brokers(self, registered: BrokerRegistry, process: Process) -> Opener: ...
    def sender(self, process: Process) -> Sender: ...
    def letter_kept(self, letter: DeadLetter) -> None: ...


class SimStore:
    """The real store, which fails when the world says so, and reports what it has kept."""

    def __init__(self, store: DeadLetterStore, world: SimSurroundings) -> None:
        self._store = store
        self._world = world

    async def put(self, letter: DeadLetter) -> None:
        if self._world.store_fails:
            raise StoreError("the disk is full")
        await self._store.put(letter)
        self._world.letter_kept(letter)

    async def find(
        self, wanted: LetterFilter, *, limit: int, before: int | None = None
    ) -> Sequence[KeptLetter]:
        return await self._store.find(wanted, limit=limit, before=before)

    async def find_in_order(
        self, wanted: LetterFilter, *, limit: int, up_to: int, after: KeptLetter | None = None
    ) -> Sequence[KeptLetter]:
        return await self._store.find_in_order(wanted, limit=limit, up_to=up_to, after=after)

    async def get(self, letter_id: int) -> KeptLetter | None:
        return await self._store.get(letter_id)

    async def latest_of(self, message_id: str) -> KeptLetter | None:
        return await self._store.latest_of(message_id)

    def replaying(self, letter_id: int) -> AbstractAsyncContextManager[bool]:
        return self._store.replaying(letter_id)

    async def mark_replayed(self, letter_id: int, at: float) -> None:
        await self._store.mark_replayed(letter_id, at)

    async def discard(self, letter_id: int) -> bool:
        return await self._store.discard(letter_id)


class SimRouter:
    """One incarnation: from its start until it is killed."""

    manager: QueueManager
    publishing: QueuePublisher
    replays: DeadLetterReplay
    store: SimStore
    batches: Batches
    messages: MessageStates
    groups: GroupDesk | None = None  # in strict worlds

    def __init__(self, name: str, world: SimSurroundings, directory: Path) -> None:
        self.process = Process(name)
        self.is_ready = False
        self._world = world
        self._directory = directory
        self._brokers: BrokerRegistry | None = None
        self._file: Any = None  # the store under its port

    def start(self) -> None:
        asyncio.get_running_loop().create_task(
            self._run(), name=self.process.name, context=self.process.context
        )

    def kill(self) -> None:
        """As SIGKILL does: nothing of it runs any more, and what it had open is closed."""
        self.process.is_alive = False
        self.is_ready = False
        if self._file is not None:
            self._file._connection.close()
        adapters = [] if self._brokers is None else self._brokers._adapters.values()
        for adapter in adapters:
            if isinstance(adapter, SqliteQueues):
                for file in adapter._files._open.values():
                    release(file)

    def do(self, work: Callable[[], Any]) -> asyncio.Future[Any]:
        """Have the process do it; the answer never comes if it ends meanwhile."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()

        def tell(task: asyncio.Task[Any]) -> None:
            if answer.done() or task.cancelled():
                return
            if (error := task.exception()) is not None:
                answer.set_exception(error)
            else:
                answer.set_result(task.result())

        task = loop.create_task(work(), context=self.process.context)
        task.add_done_callback(tell)
        return answer

    @property
    def held(self) -> int:
        return self.manager.registry.held if self.is_ready else 0

    async def _run(self) -> None:
        world = self._world
        alerts = Alerts(WarningBook(), world.wall)
        breakers = Breakers(lambda _: None)
        async with AsyncExitStack() as stack:
            file = await stack.enter_async_context(
                open_store(f"sqlite:///{self._directory}/dead-letters.db", wall=world.wall)
            )
            self._file = file
            self.store = SimStore(file, world)
            registered = self._brokers = BrokerRegistry(
                worker_id=self.process.name,
                dedup_window=DEDUP_WINDOW,
                machine=world.machine,
                liveness=world.liveness,
            )
            await stack.enter_async_context(registered)
            brokers = world.brokers(registered, self.process)
            mediator = Mediator(
                world.sender(self.process),
                alerts,
                timeout=TIMEOUT,
                jitter=world.jitter,
                wall=world.wall,
            )
            order = order_store(
                registered,
                world,
                self.process,
                self._directory.parent if world.shares_order else self._directory,
                world.new_id,
                is_shared=world.shares_order,
            )
            self.manager = await stack.enter_async_context(
                open_engine(
                    Settings(),
                    mediator,
                    alerts,
                    brokers=brokers,
                    store=self.store,
                    new_id=world.new_id,
                    breakers=breakers,
                    wall=world.wall,
                    jitter=world.jitter,
                    order=order if world.is_strict else None,
                )
            )
            if world.is_strict:
                self.groups = GroupDesk(self.manager, self.store)
            self.publishing, tasks = self.manager.deps.publishing, self.manager.deps.tasks
            self.replays = DeadLetterReplay(
                self.store,
                self.publishing,
                wall=world.wall,
                new_id=world.new_id,
                groups=self.groups,
            )
            self._offer_commands(brokers, breakers, alerts, tasks)
            await self.manager.apply(world.config)
            Chores(self.manager, breakers, alerts, self.groups).start(tasks)
            self.is_ready = True
            await asyncio.Event().wait()

    def _offer_commands(
        self, brokers: Opener, breakers: Breakers, alerts: Alerts, tasks: asyncio.TaskGroup
    ) -> None:
        world, manager, publishing = self._world, self.manager, self.publishing
        stores = QueueStores(brokers, lambda: manager.applied)
        lookup = MessageLookup(manager, breakers, self.store, world.wall)
        self.batches = Batches(stores, publishing, world.new_id)
        self.messages = MessageStates(stores, lookup, publishing)
        if world.config.schedules:
            ticks = FileTicks(self._directory / "schedules.json")
            beat = Beat(
                lambda: manager.applied,
                publishing,
                brokers,
                ticks,
                alerts,
                wall=world.wall,
                is_alone=True,
            )
            tasks.create_task(beat.run(lambda _: True), name="beat")


def release(file: Any) -> None:
    """Close what the kernel would close of a dead process."""
    file._connection.close()
