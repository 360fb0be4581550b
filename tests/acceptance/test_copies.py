"""Identical messages in the work queues of the real process: none ends before it has ended."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.acceptance.process import RouterProcess, eventually
from tests.acceptance.site import ANY, Site
from tests.acceptance.targets import Gate, id_of, ids
from tests.acceptance.test_processes import shell, task, write_executors
from tests.outbound.servers import Connection, listening
from tests.support.servers.postgres import PostgresServer, postgres_server

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

PARALLEL: dict[str, object] = {
    "code": "DEFAULT-POOL",
    "concurrency": 10,
    "ungrouped": "parallel",
}
BATCHES = ("a", "b")
WHILE_OPEN = 1.0  # seconds: ample for a copy to be claimed, and for an early end to show


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with postgres_server() as server:
        yield server


@dataclass
class Refusing:
    """Refuses the member once it is told to, and accepts the callbacks."""

    refuses: asyncio.Event = field(default_factory=asyncio.Event)

    async def script(self, connection: Connection) -> None:
        while True:
            if id_of(await connection.read()) == "m":
                await self.refuses.wait()
                await connection.reply(404)
            else:
                await connection.reply()


async def shown(router: RouterProcess, batch: str) -> dict[str, Any]:
    found: dict[str, Any] = (await router.get(f"/batches/{batch}?queue=orders")).json()
    return found


@pytest.mark.rule("ROUTE-3", "CMD-4", "P1")
@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
async def test_batches_with_the_same_member_fail_with_it_and_call_back_then(
    site: Site, request: pytest.FixtureRequest, database: str
) -> None:
    if database == "sqlite":
        site.configure(PARALLEL)
    else:
        server: PostgresServer = request.getfixturevalue("server")
        site.configure_queue(f"{server.url}?queue=orders", PARALLEL, visibilityTimeout=30)
    refusing = Refusing()
    async with listening(refusing.script) as target, site.router() as router:
        here = {"mediationTarget": target.url}
        for name in BATCHES:
            batch = {"id": name, "messages": [{"id": "m", **here}], "callback": here}
            answer = await router.post("/batches?queue=orders", batch)
            assert answer.json() == {"id": name, "accepted": 1, "duplicates": 0}
        await eventually(lambda: ids(target) == ["m"])
        await asyncio.sleep(WHILE_OPEN)
        before = [await shown(router, name) for name in BATCHES]
        called_before = ids(target)
        refusing.refuses.set()
        await eventually(lambda: len(ids(target)) >= 1 + len(BATCHES))
        after = [await shown(router, name) for name in BATCHES]
        record = (await router.get("/messages/m?queue=orders")).json()

    assert called_before == ["m"]
    assert [(each["succeeded"], each["failed"]) for each in before] == [(0, 0)] * 2
    assert [(each["succeeded"], each["failed"]) for each in after] == [(0, 1)] * 2
    assert ids(target).count("m") == 1
    assert (record["state"], record["error"]["code"]) == ("FAILED", "HTTP_404")


@pytest.mark.rule("ROUTE-3", "P1")
async def test_the_same_body_in_two_queues_is_delivered_from_each(site: Site) -> None:
    site.configure(PARALLEL, queues=("orders", "copies"))
    gate = Gate()
    async with listening(gate.script) as target, site.router() as router:
        same = {"id": "m", "mediationTarget": target.url}
        await router.publish([same], queue="orders")
        await eventually(lambda: ids(target) == ["m"])
        await router.publish([same], queue="copies")
        await eventually(lambda: ids(target) == ["m", "m"])  # before the first has its answer
        gate.open()
        await eventually(lambda: not site.unsettled())


@pytest.mark.rule("ROUTE-3", "CMD-8", "P1")
async def test_a_task_runs_although_its_copy_in_another_queue_is_refused(site: Site) -> None:
    """The pool is busy when both come, so that both are held at the same moment."""
    out = site.folder / "out.txt"
    write_executors(site, shell("slow", "sleep 2"), shell("x", f"echo ran >> {out}"))
    site.configure({**PARALLEL, "concurrency": 1}, queues=("orders", "copies"))
    async with site.router() as router:
        same = json.dumps(task("m", "x")).encode()
        await router.publish([task("busy", "slow")], queue="orders")
        await site.publish_raw("copies", same)  # the API would refuse it
        await eventually(lambda: site.in_flight() == {"busy", ANY.id})
        await site.publish_raw("orders", same)  # byte for byte
        await eventually(lambda: not site.unsettled())

    assert out.exists(), "the task was dropped"
    assert out.read_text() == "ran\n"
