"""The whole router on PostgreSQL: killed, and its server restarted, under load."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from tests.acceptance.load import firsts_in_order, group_of, load, publish_all, repeated
from tests.acceptance.process import eventually
from tests.acceptance.site import Site
from tests.acceptance.targets import id_of, message
from tests.acceptance.test_crash import redelivered_after
from tests.outbound.servers import Connection, listening
from tests.support.servers.postgres import PostgresServer, postgres_server

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

GROUPS = 50
PER_GROUP = 40
TOTAL = GROUPS * PER_GROUP
SECONDS_PER_REQUEST = 0.01


@dataclass
class PostgresRecorder:
    """A target that takes its time, and now and then fails or asks for a second."""

    accepted: list[str] = field(default_factory=list)
    open_groups: Counter[str] = field(default_factory=Counter)
    overlaps: list[str] = field(default_factory=list)
    asked: int = 0

    async def script(self, connection: Connection) -> None:
        while True:
            message_id = id_of(await connection.read())
            group = group_of(message_id)
            self.open_groups[group] += 1
            if self.open_groups[group] > 1:
                self.overlaps.append(message_id)
            await asyncio.sleep(SECONDS_PER_REQUEST)
            self.open_groups[group] -= 1
            await self._answer(connection, message_id)

    async def _answer(self, connection: Connection, message_id: str) -> None:
        self.asked += 1
        if self.asked % 61 == 0:
            await connection.reply(503)
        elif self.asked % 97 == 0:
            await connection.reply(200, b'{"ack": false, "delaySeconds": 1}')
        else:
            self.accepted.append(message_id)
            await connection.reply()

    async def has_accepted(self, number: int) -> None:
        await eventually(lambda: len(set(self.accepted)) >= number, within=60)


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with postgres_server() as server:
        yield server


def configure(site: Site, uri: str) -> None:
    document = site.folder / "routing.json"
    queue = {
        "queueName": "orders",
        "queueUri": uri,
        "connections": 2,
        "visibilityTimeout": 3,
        "retry": {"backoff": [1]},
    }
    pool = {"code": "LOAD", "concurrency": 20}
    document.write_text(json.dumps({"queues": [queue], "processingPools": [pool]}))
    site.settings["MESSAGE_ROUTER_CONFIG_URL"] = document.as_uri()


def in_flight(server: PostgresServer) -> set[str]:
    query = "SELECT message_id FROM message_router.queue_messages WHERE state = 'in-flight'"
    return set(server.sql(query).splitlines())


def unsettled(server: PostgresServer) -> int:
    query = "SELECT count(*) FROM message_router.queue_messages WHERE finished_at IS NULL"
    return int(server.sql(query))


@pytest.mark.rule("P1", "P2", "P3", "BRK-6", "FIFO-1", "WQ-4")
async def test_nothing_is_lost_or_out_of_order_when_routers_are_killed_and_the_server_restarts(
    site: Site, server: PostgresServer
) -> None:
    recorder = PostgresRecorder()
    configure(site, f"{server.url}?queue=orders")
    async with listening(recorder.script) as target:
        messages = load(target.url, GROUPS, PER_GROUP)
        async with site.router() as router:
            await publish_all(router, messages)
            await recorder.has_accepted(TOTAL // 5)
            await router.kill()
        maybe_twice = in_flight(server)
        recorder.open_groups.clear()  # its requests died with it
        async with site.router() as router:
            await recorder.has_accepted(TOTAL // 2)
            await asyncio.to_thread(server.stop)
            await asyncio.to_thread(server.start)
            maybe_twice |= in_flight(server)
            await recorder.has_accepted(TOTAL * 3 // 4)
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
            maybe_twice |= in_flight(server)
            await recorder.has_accepted(TOTAL)
            await eventually(lambda: not unsettled(server))
            code = await router.stop()

    twice = repeated(recorder.accepted)
    assert set(recorder.accepted) == {str(each["id"]) for each in messages}
    assert firsts_in_order(recorder.accepted, GROUPS, PER_GROUP)
    assert twice <= maybe_twice
    assert recorder.overlaps == []
    assert (code, unsettled(server)) == (0, 0)


@pytest.mark.rule("WQ-10")
async def test_after_a_kill_and_a_restart_what_was_under_way_is_delivered_again_at_once(
    site: Site, server: PostgresServer
) -> None:
    pool = {"code": "LOAD", "concurrency": 10}
    site.configure_queue(f"{server.url}?queue=killed", pool, visibilityTimeout=30)

    waited = await redelivered_after(site)

    assert waited < 1


@pytest.mark.rule("CFG-1", "WQ-1")
async def test_a_queue_is_named_by_the_environment_and_fed_by_sql(
    site: Site, server: PostgresServer
) -> None:
    document = site.folder / "routing.json"
    document.write_text(json.dumps({"queues": [{"queueName": "named"}]}))
    site.settings |= {
        "MESSAGE_ROUTER_QUEUE_TYPE": "POSTGRES",
        "MESSAGE_ROUTER_CONFIG_URL": document.as_uri(),
        "PGHOST": "127.0.0.1",
        "PGPORT": str(server.port),
        "PGUSER": "app",
        "PGPASSWORD": "hunter2",
        "PGDATABASE": "postgres",
    }
    async with listening() as target, site.router() as router:
        body = json.dumps(message("by-sql", target))
        made = "SELECT to_regclass('message_router.queue_messages') IS NOT NULL"
        await eventually(lambda: server.sql(made) == "t")  # the consumer connects after the start
        await asyncio.to_thread(
            server.sql,
            "INSERT INTO message_router.queue_messages (queue, message_id, body)"
            " VALUES ('named', 'by-sql', convert_to(:'body', 'UTF8'))",
            {"body": body},
        )
        await eventually(lambda: len(target.requests) == 1)
        code = await router.stop()

    assert code == 0
    assert "hunter2" not in router.output()
