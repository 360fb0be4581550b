"""Three routers on one queue, one of them killed now and then: order holds, nothing is lost."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.acceptance.fleet import Fleet
from tests.acceptance.load import firsts_in_order, group_of, load, publish_all
from tests.acceptance.process import eventually
from tests.acceptance.site import Site
from tests.acceptance.targets import id_of
from tests.outbound.servers import Connection, listening
from tests.support.servers import sqs
from tests.support.servers.postgres import PostgresServer, postgres_server
from tests.support.servers.sqs import SqsServer

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(240)]

POOL: dict[str, object] = {"code": "LOAD", "concurrency": 20}
GROUPS = 100
PER_GROUP = 100
TOTAL = GROUPS * PER_GROUP
KILLS = ((1000, 1), (3500, 2), (6000, 1))  # after so many are accepted; who


@dataclass
class SharedRecorder:
    """A target that notes what it accepts, and whether two of a group were ever open at once."""

    accepted: list[str] = field(default_factory=list)
    open_groups: Counter[str] = field(default_factory=Counter)
    overlaps: list[str] = field(default_factory=list)

    async def script(self, connection: Connection) -> None:
        while True:
            message_id = id_of(await connection.read())
            group = group_of(message_id)
            self.open_groups[group] += 1
            if self.open_groups[group] > 1:
                self.overlaps.append(message_id)
            await asyncio.sleep(0.002)
            self.open_groups[group] -= 1
            self.accepted.append(message_id)
            await connection.reply()

    async def has_accepted(self, number: int) -> None:
        await eventually(lambda: len(self.accepted) >= number, within=200)


async def run_and_kill(
    site: Site, recorder: SharedRecorder, is_empty: Callable[[], bool]
) -> list[int]:
    """Deliver all of it while one after the other is killed; answer how they ended."""
    async with (
        listening(recorder.script) as target,
        AsyncExitStack() as stack,
        asyncio.TaskGroup() as tasks,
    ):
        fleet = Fleet(site, stack)
        await fleet.start(0, 1, 2)
        tasks.create_task(publish_all(fleet.routers[0], load(target.url, GROUPS, PER_GROUP)))
        for enough, victim in KILLS:
            await recorder.has_accepted(enough)
            await fleet.routers[victim].kill()
            await fleet.start(victim)
        await recorder.has_accepted(TOTAL)
        await eventually(is_empty, within=120)
        return await fleet.stop()


def judge(recorder: SharedRecorder, codes: list[int]) -> None:
    assert firsts_in_order(recorder.accepted, GROUPS, PER_GROUP)
    assert recorder.overlaps == []
    assert codes == [0, 0, 0]


@pytest.mark.rule("P1", "P3")
async def test_three_routers_share_a_queue_file(site: Site) -> None:
    site.configure(POOL)
    recorder = SharedRecorder()

    codes = await run_and_kill(site, recorder, lambda: not site.unsettled())

    judge(recorder, codes)
    assert len(site.workers()) >= 3


@pytest.fixture
def postgres() -> Iterator[PostgresServer]:
    with postgres_server() as server:
        yield server


@pytest.mark.rule("P1", "P3")
async def test_three_routers_share_a_postgresql_queue(site: Site, postgres: PostgresServer) -> None:
    site.configure_queue(f"{postgres.url}?queue=orders", POOL, visibilityTimeout=3)
    left = "SELECT count(*) FROM message_router.queue_messages WHERE finished_at IS NULL"
    recorder = SharedRecorder()

    codes = await run_and_kill(site, recorder, lambda: postgres.sql(left) == "0")
    workers = postgres.sql("SELECT count(DISTINCT worker_id) FROM message_router.queue_messages")

    judge(recorder, codes)
    assert int(workers) >= 3


@pytest.mark.rule("CMD-7")
async def test_three_routers_share_a_pgmq_queue(site: Site, postgres: PostgresServer) -> None:
    postgres.install_pgmq()
    postgres.add_pgmq_queue("orders")
    uri = f"{postgres.pgmq_url}?queue=orders&fifo=true"
    site.configure_queue(uri, POOL, visibilityTimeout=3)
    recorder = SharedRecorder()

    codes = await run_and_kill(
        site, recorder, lambda: postgres.sql("SELECT count(*) FROM pgmq.q_orders") == "0"
    )

    judge(recorder, codes)


@pytest.fixture
def stand_in(tmp_path: Path) -> Iterator[SqsServer]:
    with sqs.ministack(tmp_path).running() as server:
        yield server


@pytest.mark.rule("P1", "P3")
async def test_three_routers_share_an_sqs_fifo_queue(site: Site, stand_in: SqsServer) -> None:
    url = stand_in.new_queue(fifo=True)
    site.configure_queue(url, POOL, visibilityTimeout=15, connections=2)
    site.settings |= sqs.ENV
    site.settings["MESSAGE_ROUTER_SQS_WAIT_TIME_SECONDS"] = "2"
    recorder = SharedRecorder()

    codes = await run_and_kill(site, recorder, lambda: stand_in.counts(url) == (0, 0))

    judge(recorder, codes)
