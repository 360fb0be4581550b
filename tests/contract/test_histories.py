"""Generated histories on the real databases, judged by the oracle of the simulator (SIM-2).

The simulator's work queue is the embedded one. What PostgreSQL's statements and PGMQ do with the
same producers, groups, copies and failures is seen here, with two routers in real time.
`HISTORY_SEED` makes one again, and `HISTORY_BUG` puts a deliberate bug into the server.
"""

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from router.brokers import BrokerRegistry
from router.brokers.postgres import database
from router.brokers.workers import THIS_MACHINE, Liveness, Machine, WorkerLocks
from router.core.config import PoolConfig, QueueConfig, RetryPolicy, RoutingConfig
from router.core.dead_letter import DeadLetter
from router.ports import Sender
from tests.contract.cases import CASES, BrokerPlace, Case
from tests.contract.history_bugs import SERVER_BUGS, planted
from tests.simulation.drawing import Drawer
from tests.simulation.fence import Fence
from tests.simulation.loop import Process
from tests.simulation.models import BrokerModel
from tests.simulation.networked import NoServer, Opener
from tests.simulation.oracle import Oracle
from tests.simulation.plan import HOSTS, POOLS, Act, Kind, Mood, Phase, WorldPlan
from tests.simulation.process import SimRouter
from tests.simulation.producers import Producers
from tests.simulation.targets import SimSender, Targets

BUG = os.environ.get("HISTORY_BUG")
SEED = int(os.environ.get("HISTORY_SEED", random.SystemRandom().randrange(2**32)))
ROUTERS = 2
SPAN = 2.0  # seconds in which everything is published
ENDS_WITHIN = 90.0
RETRY_AFTER = (1.0,)
MOODS = (Mood.OK, Mood.FAILS, Mood.DENIES, Mood.CUTS)
# Which queue of the simulator promises the same.
KINDS = {"postgres": Kind.POSTGRES, "pgmq-fifo": Kind.SQS_FIFO, "pgmq": Kind.SQS}

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.clock("real")]


def draw_history(seed: int, kind: Kind) -> WorldPlan:
    rng = random.Random(seed)  # noqa: S311  repeatable, not secret
    drawing = Drawer(rng, Kind.POSTGRES, ROUTERS, 1)
    for _ in range(25):
        drawing.produce(round(rng.random() * SPAN, 3))
    soon = [step for step in drawing.steps if step.at <= SPAN + 1]
    phases = tuple((Phase(0.0, rng.choice(MOODS), 0.3),) for _ in range(HOSTS))
    return WorldPlan(
        seed=seed,
        kind=kind,
        routers=ROUTERS,
        connections=1,
        queues=1,
        attempts=2,
        lease=15.0,
        rate=None,
        bodies=tuple(replace(body, malformed=False) for body in drawing.bodies),
        steps=tuple(sorted(soon, key=lambda step: step.at)),
        phases=phases,
    )


class RealSite:
    """Two routers of this process on one queue of a real server."""

    store_fails = False
    is_strict = shares_order = False
    machine: Machine = THIS_MACHINE
    server: BrokerModel = NoServer()

    def __init__(self, plan: WorldPlan, queue: QueueConfig, directory: Path) -> None:
        self.plan = plan
        self._rng = random.Random(plan.seed)  # noqa: S311  likewise
        queue = replace(queue, retry=RetryPolicy(plan.attempts, RETRY_AFTER))
        self.queues: tuple[QueueConfig, ...] = (queue,)
        pools = tuple(PoolConfig(code=code, concurrency=most) for code, most in POOLS.items())
        self.config = RoutingConfig(self.queues, pools, (), ())
        self._now = asyncio.get_running_loop().time
        self.oracle = Oracle(plan, self._now, self.wall)
        self._fence = Fence(self.oracle)
        self._targets = Targets(self._rng, plan.phases)
        self.kept: list[bytes] = []
        self.routers: list[SimRouter] = []
        for index in range(ROUTERS):
            home = directory / f"r{index}"
            home.mkdir()
            self.routers.append(SimRouter(f"r{index}.{index}", self, home))

    def wall(self) -> float:
        return time.time()

    def jitter(self, low: float, high: float) -> float:
        return self._rng.uniform(low, high)

    def new_id(self) -> str:
        return f"new-{self._rng.getrandbits(60)}"

    def liveness(self, prefix: Path) -> Liveness:
        return WorkerLocks(prefix)

    def brokers(self, registered: BrokerRegistry, process: Process) -> Opener:
        return self._fence.around(registered, process)

    def sender(self, process: Process) -> Sender:
        return SimSender(self._targets, self.oracle, process)

    async def stored(self, process: Process, queue: str, bodies: Sequence[bytes]) -> None:
        raise NotImplementedError  # none of these queues is strict

    def letter_kept(self, letter: DeadLetter) -> None:
        self.kept.append(letter.body)
        self.oracle.letter_kept(letter.body, letter.reason)

    def router(self, index: int) -> SimRouter | None:
        return self.routers[index] if self.routers[index].is_ready else None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(router._run()) for router in self.routers]
        try:
            await until(lambda: all(router.is_ready for router in self.routers))
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def happen(self) -> None:
        works, began = Producers(self).works, self._now()
        async with asyncio.TaskGroup() as doing:
            for step in self.plan.steps:
                await asyncio.sleep(max(began + step.at - self._now(), 0.0))
                assert step.act is Act.SEND
                doing.create_task(works[step.act](step))  # type: ignore[arg-type]

    def has_ended(self) -> bool:
        bodies = {sent.body.number for sent in self.oracle.sent}
        is_known = all(self.oracle.may_have_ended(number) for number in bodies)
        return is_known and not any(router.held for router in self.routers)

    def judge(self) -> Sequence[str]:
        self.oracle.judge(self.kept, [])
        return [str(violation) for violation in self.oracle.violations]


def address_of(case: Case) -> str:
    """The server that the queue of a case is on."""
    return case.uri.partition("?")[0].replace("pgmq:", "postgresql:")


async def until(holds: Callable[[], bool], seconds: float = ENDS_WITHIN) -> None:
    async with asyncio.timeout(seconds):
        while not holds():  # noqa: ASYNC110  what is awaited are other routers and a server
            await asyncio.sleep(0.05)


@pytest.mark.rule("SIM-2", "P1", "P2", "P3", "FIFO-1", "WQ-1", "WQ-5")
@pytest.mark.parametrize("name", sorted(KINDS))
async def test_a_generated_history_on_the_real_server_breaks_no_rule(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    found = next(each for each in CASES if each.name == name)
    assert found.server is not None
    place: BrokerPlace = request.getfixturevalue(found.server)
    case: Case = place.prepare(found)
    plan = draw_history(SEED, KINDS[name])
    site = RealSite(plan, case.queue(tmp_path, lease=plan.lease), tmp_path)
    async with site.running(), AsyncExitStack() as stack:
        if BUG is not None:
            await stack.enter_async_context(planted(SERVER_BUGS[BUG], address_of(case)))
        await site.happen()
        await until(site.has_ended)

    problems = site.judge()
    story = "\n".join(site.oracle.history)
    assert not problems, f"HISTORY_SEED={SEED}\n{story}\n" + "\n".join(problems)


@pytest.mark.rule("SIM-2")
@pytest.mark.parametrize("name", SERVER_BUGS)
def test_each_bug_of_the_server_is_one_of_the_code_as_it_is(name: str) -> None:
    bug = SERVER_BUGS[name]
    script = Path(database.__file__).with_name("functions.sql").read_text()
    _, begin, rest = script.partition(f"CREATE OR REPLACE FUNCTION {bug.function}(")
    definition, _, _ = rest.partition("\n$$;")

    assert begin
    assert bug.planted_in(definition) != definition
    assert bug.queue in KINDS
