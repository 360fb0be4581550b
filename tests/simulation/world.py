"""One world: routers, a broker, targets, and what happens to them."""

import asyncio
import gc
import hashlib
import json
import logging
import random
import shutil
import sqlite3
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from router.brokers import BrokerRegistry, catalog
from router.brokers.sqlite.queue_table import FileLease
from router.brokers.workers import Liveness, Machine
from router.core.config import (
    Ordering,
    PoolConfig,
    QueueConfig,
    RetryPolicy,
    RoutingConfig,
    Schedule,
)
from router.core.dead_letter import DeadLetter
from router.engine.queue_manager import shut_down
from router.ports import Sender
from tests.simulation.command_check import is_reply
from tests.simulation.events import Violation
from tests.simulation.fence import Fence
from tests.simulation.liveness import NOBODY, SimWorkers
from tests.simulation.loop import Process, SimLoop
from tests.simulation.models import BrokerModel, installed, make_server, place_of, uri_of
from tests.simulation.network import Mishap, Weather
from tests.simulation.networked import NetworkedServer, Opener
from tests.simulation.oracle import Oracle
from tests.simulation.plan import (
    POOLS,
    REPLIES,
    RETRY_SCHEDULE,
    START,
    WORK_QUEUES,
    Act,
    Kind,
    Step,
    WorldPlan,
)
from tests.simulation.process import SimRouter
from tests.simulation.producers import ANSWER_WITHIN, Producers
from tests.simulation.targets import SimSender, Targets

PEACE: Final = 3 * 3600.0
LOOK_EVERY: Final = 5.0
SILENCE: Final = 30.0  # a server cuts off who stands still for longer
STALLS_WITHIN: Final = 300.0
ENDS_BELOW: Final = 0.5  # of the shares of stalls in strict worlds
STOPS_BELOW: Final = 0.2  # of the shares of kills there: the router stops in peace
GRACE: Final = 30.0  # for its open requests
STOPS_WITHIN: Final = 60.0
RESTARTS: Final = 0.2  # below that share, the broker itself was restarted


class WorldResult(Struct, frozen=True):
    plan: WorldPlan
    violations: Sequence[Violation]
    history: Sequence[str]
    seconds: float  # of virtual time
    faults: int

    @property
    def digest(self) -> str:
        return hashlib.sha256("\n".join(self.history).encode()).hexdigest()


def run(plan: WorldPlan) -> WorldResult:
    """Run a world to its end."""
    settler = "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108  no secrets are in it
    directory = Path(tempfile.mkdtemp(prefix="simulation-", dir=settler))
    loop = SimLoop()
    with _quiet():
        try:
            world = World(plan, directory)
            return loop.run_until_complete(world.run())
        finally:
            _close(loop)
            shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """Nothing is logged, and nobody hears of what killed processes left undone."""
    _freeze()
    gc.disable()
    logging.disable(logging.CRITICAL)
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        with warnings.catch_warnings():
            yield
    finally:
        gc.collect()
        sys.unraisablehook = hook
        logging.disable(logging.NOTSET)
        gc.enable()


@cache
def _freeze() -> None:
    """What is here by now stays: it need not be looked at after every world."""
    gc.collect()
    gc.freeze()


def _close(loop: SimLoop) -> None:
    """End what the killed processes left: coroutines that will never go on."""
    loop.close()
    warnings.simplefilter("ignore", RuntimeWarning)  # what they begin at their end never runs
    for task in loop.tasks:
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        coroutine = task.get_coro()
        with suppress(BaseException):
            if coroutine is not None:  # some Pythons say that a task may have none
                coroutine.close()
    loop.tasks.clear()


class World:
    def __init__(self, plan: WorldPlan, directory: Path) -> None:
        self.plan = plan
        self.config = _config(plan, directory)
        self.is_strict = plan.strict is not None
        # Of strict queues that routers take over from each other, all know what is stored.
        self.shares_order = plan.routers > 1 and plan.kind not in WORK_QUEUES
        self.store_fails = False
        self._directory = directory
        self._rng = random.Random(plan.seed ^ 0x5EED)  # noqa: S311  repeatable, not secret
        self._offset = self._booted_at = 0.0
        self._boots = 1
        self._workers = SimWorkers()
        self._ids = 0
        self._faults = 0
        self._incarnations = 0
        self._routers: list[SimRouter | None] = [None] * plan.routers
        self._doing: set[asyncio.Task[None]] = set()
        self.weather = Weather(random.Random(plan.seed ^ 0xBAD))  # noqa: S311  likewise
        answers = random.Random(plan.seed ^ 0x7A26E7)  # noqa: S311  likewise
        self._targets = Targets(answers, plan.phases)
        self._works: dict[Act, Callable[[Step], Awaitable[None]]] = {
            Act.KILL: self._restart,
            Act.PAUSE: self._pause,
            Act.STALL: self._stall,
            Act.RECREATE: self._recreate,
            Act.REBOOT: self._reboot,
            Act.POOLS: self._change_pools,
            Act.CLOCK: self._set_clock,
            Act.BREAK: self._break_connections,
        }
        self.queues = self.config.queues
        self._old_replies: list[bytes] = []  # of queues that were deleted
        self.server: BrokerModel
        self._loop: SimLoop
        self.oracle: Oracle
        self._fence: Fence
        self._producers: Producers

    # What routers ask.

    def wall(self) -> float:
        return START + self._loop.now + self._offset

    @property
    def machine(self) -> Machine:
        return Machine(
            wall=self.wall,
            uptime=lambda: self._loop.now - self._booted_at,
            boot_id=f"boot-{self._boots}",
            new_id=self.new_id,
        )

    def liveness(self, prefix: Path) -> Liveness:
        """Who died is seen on the machine itself only."""
        return NOBODY if self.plan.kind is Kind.POSTGRES else self._workers.at(prefix)

    def jitter(self, low: float, high: float) -> float:
        return self._rng.uniform(low, high)

    def new_id(self) -> str:
        self._ids += 1
        return f"new-{self._ids}"

    def brokers(self, registered: BrokerRegistry, process: Process) -> Opener:
        if isinstance(self.server, NetworkedServer):
            return self.server.brokers(self._fence.around(registered, process))
        return self._fence.around(registered, process)

    def sender(self, process: Process) -> Sender:
        return SimSender(self._targets, self.oracle, process)

    async def stored(self, process: Process, queue: str, bodies: Sequence[bytes]) -> None:
        self.oracle.stored(process.name, queue, bodies)
        await self._fence.settling(process, has_stored=True)

    def letter_kept(self, letter: DeadLetter) -> None:
        self.oracle.letter_kept(letter.body, letter.reason)

    # The course of the world.

    async def run(self) -> WorldResult:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        self._loop = loop
        loop.thread_takes = self.weather.latency
        self.oracle = Oracle(self.plan, loop.time, self.wall)
        self._producers = Producers(self)
        self._works |= self._producers.works
        stores = self.is_strict and self.plan.kind not in WORK_QUEUES
        self._fence = Fence(self.oracle, stalls_when_stored=stores)
        self.server = make_server(self.plan.kind, self.weather)
        self.server.on_put = self._put
        with installed(self.server, self._claimed):
            for queue in (*self.config.queues, *self.config.reply_queues):
                self.server.make(place_of(queue))
            for index in range(self.plan.routers):
                self._start(index)
            await self._happen()
            await self._make_peace()
            self.oracle.judge(self._stored(), await self._still_held())
            self._judge_commands()
            for index in range(self.plan.routers):
                self._kill(index)
        return WorldResult(
            self.plan,
            tuple(self.oracle.violations),
            tuple(self.oracle.history),
            loop.now,
            self._faults + sum(self.weather.counts.values()) - self.weather.counts[Mishap.NONE],
        )

    async def _happen(self) -> None:
        checking = self._loop.create_task(self._check_books())
        for step in self.plan.steps:
            await asyncio.sleep(max(step.at - self._loop.now, 0.0))
            doing = self._loop.create_task(self._do(step))
            self._doing.add(doing)
            doing.add_done_callback(self._doing.discard)
        while self._doing:
            await asyncio.wait(set(self._doing))
        checking.cancel()

    async def _make_peace(self) -> None:
        self.oracle.note("peace")
        self._targets.is_peaceful = True
        began = self._loop.now
        if self.plan.beats:  # each is due once more
            await asyncio.sleep(max(beats.every for beats in self.plan.beats) + LOOK_EVERY)
        while self._loop.now < began + PEACE:
            await asyncio.sleep(LOOK_EVERY)
            if self.plan.strict is not None and self.plan.strict.holds:
                await self._producers.release_all()
            if not await self._still_held():
                return

    async def _check_books(self) -> None:
        while True:
            await asyncio.sleep(0.7)
            living = self._living()
            for router in living:
                self._check_book(router)
                if not router.process.is_frozen:
                    self.oracle.traffic.look(router.process.name, router.manager)
                    self.oracle.order.look(router.process.name, router.manager)
            if len(living) == self.plan.routers:
                self.oracle.traffic.reach([router.manager for router in living])

    def _check_book(self, router: SimRouter) -> None:
        manager = router.manager
        if manager.registry.unaccounted:
            self.oracle.violate(
                "OPS-6", f"{manager.registry.unaccounted} hand-overs unaccounted for"
            )
        held = Counter(job.pool for job in manager.registry.tracker)
        for pool in (*manager.pools.values(), *manager.pools.draining.values()):
            if pool.held != held[pool]:
                text = f"pool {pool.code} counts {pool.held} jobs, not {held[pool]}"
                self.oracle.violate("POOL-1", text)
            if pool.queued > pool.capacity + pool.config.concurrency:  # whose POSTs just ended
                self.oracle.violate("POOL-1", f"pool {pool.code} holds {pool.queued}")

    async def _still_held(self) -> list[str]:
        contents = [each for each in self.server.contents() if b'"outcome"' not in each]
        held = [f"{content!r} is in the queue" for content in contents]
        for router in self._living():
            if router.held:
                held.append(f"{router.process.name} holds {router.held} messages")
            if router.manager.registry.unaccounted:
                held.append(f"{router.process.name}: the ledger does not add up")
        return held + self._rows()

    def _rows(self) -> list[str]:
        """What waits in the work queue's file."""
        orders = (f"r{index}/order.db" for index in range(self.plan.routers))
        files = ["queue.db", "order.db", *orders]
        rows = [row for file in files for row in self._look(file, _UNSETTLED)]
        return [f"row {row[0]} ({row[1]}) is {row[2]}" for row in rows]

    def _replies(self) -> list[bytes]:
        """What the reply queue of a work queue holds."""
        rows = self._look("replies.db" if self.plan.replies_elsewhere else "queue.db", _REPLIES)
        return [bytes(row[0]) for row in rows]

    def _look(self, file: str, query: str) -> list[Any]:
        path = self._directory / file
        if not path.exists():
            return []
        with suppress(sqlite3.Error), closing(_read_only(path)) as db:
            return db.execute(query).fetchall()
        return []

    def _put(self, queue: str, content: bytes) -> None:
        self.oracle.commands.put(queue, content, is_reply=is_reply(queue))

    def _claimed(self, leases: Sequence[FileLease]) -> None:
        self._fence.claimed(leases)  # of the queue as it is now

    def _judge_commands(self) -> None:
        is_work_queue = self.plan.kind in WORK_QUEUES
        self.oracle.commands.judge(self._replies() + self._old_replies if is_work_queue else None)
        ticks = dict(self._look("queue.db", _TICKS))
        for beats in self.plan.beats:
            self.oracle.commands.judge_beats(beats, ticks.get(beats.name))

    def _stored(self) -> Iterator[bytes]:
        for path in sorted(self._directory.glob("r*/dead-letters.db")):
            with closing(_read_only(path)) as db:
                yield from (bytes(row[0]) for row in db.execute("SELECT body FROM dead_letters"))

    def router(self, index: int) -> SimRouter | None:
        found = self._routers[index]
        return found if found is not None and found.is_ready else None

    def _living(self) -> list[SimRouter]:
        return [router for router in self._routers if router is not None and router.is_ready]

    # What happens.

    async def _do(self, step: Step) -> None:
        if not step.is_of_a_producer:
            self._faults += 1
            self.oracle.note(step.act, f"r{step.router}", f"{step.seconds:g}", f"{step.share:g}")
        work = self._works.get(step.act)
        if work is not None:
            await work(step)
            return
        with self._bad_weather(step):
            await asyncio.sleep(step.seconds)

    async def _restart(self, step: Step) -> None:
        if self.is_strict and step.share < STOPS_BELOW:
            await self._stop(step.router)
        self._kill(step.router)
        await asyncio.sleep(step.seconds)
        self._start(step.router)

    async def _set_clock(self, step: Step) -> None:
        self.oracle.commands.clock_steps += abs(step.seconds)
        self._offset += step.seconds

    async def _break_connections(self, step: Step) -> None:
        self.server.drop(restarted=step.share < RESTARTS)

    def _start(self, index: int) -> None:
        if self._routers[index] is not None:
            return  # two faults met
        self._incarnations += 1
        directory = self._directory / f"r{index}"
        directory.mkdir(exist_ok=True)
        router = SimRouter(f"r{index}.{self._incarnations}", self, directory)
        self._routers[index] = router
        router.start()

    def _kill(self, index: int) -> None:
        router = self._routers[index]
        if router is not None:
            self._routers[index] = None
            router.kill()
            self.server.drop(router.process)

    async def _stop(self, index: int) -> None:
        """Stop a router in peace. It may be killed before it has ended."""
        router = self._routers[index]
        if router is not None and router.is_ready and not router.process.is_frozen:
            stopping = router.do(lambda: shut_down(router.manager, GRACE))
            await asyncio.wait([stopping], timeout=STOPS_WITHIN)

    async def _pause(self, step: Step) -> None:
        router = self._routers[step.router]
        if router is None or router.process.is_frozen:
            return
        router.process.is_frozen = True
        await self._thaw(router.process, step.seconds)

    async def _thaw(self, process: Process, seconds: float) -> None:
        if seconds > SILENCE:
            await asyncio.sleep(SILENCE)
            if process.is_alive:
                self.server.drop(process)
        await asyncio.sleep(max(seconds - SILENCE, 0.0) or seconds)
        if process.is_alive:
            self._loop.resume(process)

    async def _reboot(self, step: Step) -> None:
        """The machine: all routers end, and what counts since its start starts again."""
        for index in range(self.plan.routers):
            self._kill(index)
        self._boots += 1
        self._booted_at = self._loop.now
        self._workers.forget()
        await asyncio.sleep(step.seconds)
        for index in range(self.plan.routers):
            self._start(index)

    async def _stall(self, step: Step) -> None:
        """Stand still at the next ACK or NACK: after it was decided, before it is carried out.

        Where groups move to an order store, between the two halves of that; it may end there, too.
        """
        router = self._routers[step.router]
        if router is None:
            return
        if self.plan.kind not in WORK_QUEUES and not self.is_strict:
            await self._pause(step)
            return
        self._fence.stalls[router.process] = self._loop.create_future()
        await asyncio.wait([self._fence.stalls[router.process]], timeout=STALLS_WITHIN)
        self._fence.stalls.pop(router.process, None)
        if router.process.is_frozen and self.is_strict and step.share < ENDS_BELOW:
            await self._restart(step)
        elif router.process.is_frozen:
            await self._thaw(router.process, step.seconds)

    async def _recreate(self, step: Step) -> None:
        """Someone deletes the file of an empty queue, and all routers start again."""
        for index in range(self.plan.routers):
            self._kill(index)
        if not self._rows():
            self._old_replies += [] if self.plan.replies_elsewhere else self._replies()
            self.oracle.commands.queue_is_new()
            for path in self._directory.glob("queue.db*"):
                path.unlink()
            self._fence = Fence(self.oracle)  # rows are counted from one again
        await asyncio.sleep(step.seconds)
        for index in range(self.plan.routers):
            self._start(index)

    async def _change_pools(self, step: Step) -> None:
        """A pool is taken out of the configuration, and comes back."""
        without = replace(
            self.config,
            pools=tuple(pool for pool in self.config.pools if pool.code != step.pool),
        )
        self.oracle.changed_pools.setdefault(step.pool, self._loop.now)
        for config in (without, self.config):
            if config is self.config:
                self.oracle.pools_back.add(step.pool)
            router = self._routers[step.router]
            if router is not None and router.is_ready and not router.process.is_frozen:
                with suppress(TimeoutError):
                    async with asyncio.timeout(ANSWER_WITHIN):
                        await router.do(partial(router.manager.apply, config))
            await asyncio.sleep(step.seconds if config is without else 0.0)

    @contextmanager
    def _bad_weather(self, step: Step) -> Iterator[None]:
        """Something is wrong for a while."""
        weather = self.weather
        changed: dict[Act, tuple[object, str, object]] = {
            Act.OUTAGE: (weather, "is_down", True),
            Act.LOSSES: (weather, "loss", step.share),
            Act.HANGS: (weather, "hang", step.share),
            Act.SLOW: (weather, "is_slow", True),
            Act.STORE: (self, "store_fails", True),
        }
        place, name, value = changed[step.act]
        setattr(place, name, value)
        if step.act is Act.OUTAGE:
            self.server.drop()
        yield
        setattr(place, name, type(value)())


def _config(plan: WorldPlan, directory: Path) -> RoutingConfig:
    retry = None if plan.attempts is None else RetryPolicy(plan.attempts, RETRY_SCHEDULE)
    queues = tuple(
        QueueConfig(
            name=f"q{number}",
            uri=uri_of(plan.kind, f"q{number}", directory),
            connections=plan.connections,
            visibility_timeout=plan.lease,
            retry=retry,
        )
        for number in range(plan.queues)
    )
    if plan.strict is not None:
        queues = tuple(
            replace(
                queue,
                ordering=Ordering.STRICT,
                on_failure=plan.strict.on_failure,
                holds_letters=plan.strict.holds,
                broker=catalog.installed().broker_of(queue.uri),
            )
            for queue in queues
        )
    pools = tuple(
        PoolConfig(code=code, concurrency=most, rate_per_minute=plan.rate if code == "R" else None)
        for code, most in POOLS.items()
    )
    return RoutingConfig(queues, pools, _reply_queues(plan, directory), _schedules(plan))


def _reply_queues(plan: WorldPlan, directory: Path) -> tuple[QueueConfig, ...]:
    if not any(body.wish.reply for body in plan.bodies):
        return ()
    uri = uri_of(plan.kind, REPLIES, directory)
    if plan.replies_elsewhere:
        uri = uri.replace("queue.db", "replies.db")
    return (QueueConfig(name=REPLIES, uri=uri),)


def _schedules(plan: WorldPlan) -> tuple[Schedule, ...]:
    return tuple(
        Schedule(
            name=beats.name,
            queue=f"q{beats.queue}",
            message=json.dumps(beats.fields).encode(),
            every_seconds=beats.every,
        )
        for beats in plan.beats
    )


def _read_only(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"file:{path}?mode=ro", uri=True)


_UNSETTLED: Final = """
    SELECT id, message_id, state FROM queue_messages
    WHERE finished_at IS NULL AND queue <> 'replies'
"""
_REPLIES: Final = """
    SELECT body FROM queue_messages JOIN queue_bodies USING (id) WHERE queue = 'replies'
"""
_TICKS: Final = "SELECT schedule, tick FROM queue_ticks"
