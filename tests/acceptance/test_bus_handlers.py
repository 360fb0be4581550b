"""The library on the queues of a command bus, whose sender is PGMQ's own client (CMD-7, CMD-9)."""

import itertools
from collections.abc import Iterator
from typing import Any

import pgmq
import pytest

from router.core.config import RetryPolicy
from router.worker import Command, Context, Permanent, Worker
from tests.acceptance.process import eventually
from tests.acceptance.site import Site
from tests.support.servers.postgres import PostgresServer, postgres_server

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

numbers = itertools.count(1)


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with postgres_server() as server:
        server.install_pgmq()
        yield server


class Bus:
    """The queues of one domain, as PGMQ's client sees them."""

    def __init__(self, server: PostgresServer, client: pgmq.PGMQueue) -> None:
        self.url = server.pgmq_url
        self.domain = f"payments{next(numbers)}"
        self.commands, self.replies = f"{self.domain}__commands", f"{self.domain}__replies"
        self.client = client
        self._replied: list[Any] = []
        for name in (self.commands, self.replies):
            client.create_queue(name)

    def send(self, command_id: str, kind: str = "Debit", **fields: object) -> None:
        command = {
            "command_id": command_id,
            "command_type": kind,
            "domain": self.domain,
            "data": {"amount": 12},
            "reply_to": self.replies,
            "created_at": "2026-01-31T08:15:30+00:00",
        }
        self.client.send(self.commands, {**command, **fields})

    def replied(self) -> list[Any]:
        """Return all replies so far: the client hides what it has read."""
        found: Any = self.client.read(self.replies, qty=100) or []
        self._replied += [each.message for each in found]
        return sorted(self._replied, key=lambda reply: str(reply["command_id"]))


@pytest.fixture
def bus(server: PostgresServer) -> Iterator[Bus]:
    client = pgmq.PGMQueue(conn_string=server.url, init_extension=False)
    yield Bus(server, client)
    assert client.pool is not None
    client.pool.close()


@pytest.mark.rule("CMD-7", "CMD-9", "CMD-3")
async def test_a_worker_runs_the_commands_of_its_domain_and_answers_where_they_say(
    site: Site, bus: Bus
) -> None:
    letters = f"sqlite:///{site.folder}/letters.db"
    worker = Worker(
        bus.url,
        domain=bus.domain,
        dead_letters=letters,
        retry=RetryPolicy(max_attempts=2, schedule=(1.0,)),
    )
    seen: dict[str, tuple[object, object, object, object]] = {}

    @worker.handler("Debit")
    async def debit(command: Command, context: Context) -> object:
        seen[command.id] = (
            command.payload,
            context.command_type,
            context.domain,
            context.created_at,
        )
        return {"left": 88}

    @worker.handler("Refuse")
    def refuse(*_: object) -> object:
        raise Permanent("NO_FUNDS", "there is nothing left")

    bus.send("c-1", correlation_id="x-1")
    bus.send("c-2", "Refuse")
    await worker.start()
    await eventually(lambda: len(bus.replied()) == 2)
    await worker.stop()

    assert seen == {"c-1": ({"amount": 12}, "Debit", bus.domain, "2026-01-31T08:15:30+00:00")}
    assert bus.replied() == [
        {
            "command_id": "c-1",
            "correlation_id": "x-1",
            "outcome": "SUCCESS",
            "result": {"left": 88},
        },
        {
            "command_id": "c-2",
            "outcome": "FAILED",
            "error_code": "NO_FUNDS",
            "error_message": "there is nothing left",
        },
    ]
    assert bus.client.metrics(bus.commands).queue_length == 0
