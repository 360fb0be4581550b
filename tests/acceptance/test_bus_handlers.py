"""The library on the queues of a command bus, whose sender is PGMQ's own client (CMD-7, CMD-9)."""

import asyncio
import itertools
import time
from collections.abc import Iterator
from typing import Any

import pgmq
import pytest

from router.core.config import RetryPolicy
from router.worker import Command, Context, Permanent, Transient, Worker
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
        self.server, self.client = server, client
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

    def waiting(self) -> list[str]:
        """The commands in its queue."""
        return self._ids_in(f"q_{self.commands}")

    def archived(self) -> list[str]:
        """What the command bus calls its troubleshooting queue."""
        return self._ids_in(f"a_{self.commands}")

    def _ids_in(self, table: str) -> list[str]:
        query = f"SELECT message ->> 'command_id' FROM pgmq.{table} ORDER BY 1"  # noqa: S608
        return self.server.sql(query).splitlines()

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


@pytest.mark.rule("CMD-7", "CMD-9", "CMD-3")
async def test_what_succeeds_is_deleted_and_what_fails_for_good_is_archived(bus: Bus) -> None:
    other = Bus(bus.server, bus.client)
    policy = RetryPolicy(max_attempts=3, schedule=(1.0, 2.0))
    worker = Worker(bus.url, domain=bus.domain, dead_letters="none", retry=policy)
    tried_at: list[float] = []

    @worker.handler("Debit")
    async def debit(*_: object) -> None: ...

    @worker.handler("Refuse")
    def refuse(*_: object) -> object:
        raise Permanent("NO_FUNDS", "there is nothing left")

    @worker.handler("Fail")
    def fail(*_: object) -> object:
        tried_at.append(time.monotonic())
        raise Transient("LOCKED", "try again")

    for command_id, kind in (("done", "Debit"), ("refused", "Refuse"), ("failed", "Fail")):
        bus.send(command_id, kind)
    other.send("theirs")
    await worker.start()
    await eventually(lambda: bus.waiting() == [])
    await worker.stop()

    assert bus.archived() == ["failed", "refused"]
    first, second, third = tried_at
    assert 0.9 <= second - first < 2.8
    assert 1.9 <= third - second < 4.5
    assert [each["error_code"] for each in bus.replied() if "error_code" in each] == [
        "LOCKED",
        "NO_FUNDS",
    ]
    assert (other.waiting(), other.archived()) == (["theirs"], [])


@pytest.mark.rule("CMD-7", "CMD-9")
async def test_many_commands_run_at_once_and_no_more_than_allowed(bus: Bus) -> None:
    allowed, total = 200, 600
    worker = Worker(bus.url, domain=bus.domain, dead_letters="none", concurrency=allowed)
    handled: list[str] = []
    most = 0

    @worker.handler("Debit")
    async def debit(command: Command, _context: Context) -> None:
        nonlocal most
        handled.append(command.id)
        most = max(most, worker.in_flight_count)
        await asyncio.sleep(0.3)

    commands = [{"command_id": f"c-{n}", "command_type": "Debit"} for n in range(total)]
    bus.client.send_batch(bus.commands, commands)
    await worker.start()
    await eventually(lambda: bus.waiting() == [])
    await worker.stop()

    assert sorted(handled) == sorted(each["command_id"] for each in commands)
    assert allowed / 2 < most <= allowed
    assert worker.in_flight_count == 0


@pytest.mark.rule("CMD-7", "CMD-9")
async def test_a_stop_waits_for_commands_in_flight_and_takes_no_more(bus: Bus) -> None:
    worker = Worker(bus.url, domain=bus.domain, dead_letters="none")
    done = asyncio.Event()

    @worker.handler("Debit")
    async def debit(*_: object) -> None:
        await done.wait()

    for command_id in ("c-1", "c-2"):
        bus.send(command_id)
    await worker.start()
    await eventually(lambda: worker.in_flight_count == 2)
    stopping = asyncio.ensure_future(worker.stop(timeout=30))
    await asyncio.sleep(0.5)
    bus.send("too late")
    was_waiting = not stopping.done()
    done.set()
    await stopping

    assert was_waiting
    assert (bus.waiting(), worker.in_flight_count) == (["too late"], 0)


@pytest.mark.rule("POOL-1", "CMD-9")
async def test_two_workers_share_commands_that_take_long(bus: Bus) -> None:
    handled: list[list[str]] = [[], []]
    workers = [
        Worker(bus.url, domain=bus.domain, dead_letters="none", concurrency=1) for _ in handled
    ]
    for worker, mine in zip(workers, handled, strict=True):

        async def debit(command: Command, _: Context, mine: list[str] = mine) -> None:
            await asyncio.sleep(0.4)
            mine.append(command.id)

        worker.handler("Debit")(debit)
    commands = [{"command_id": f"c-{n}", "command_type": "Debit"} for n in range(10)]
    bus.client.send_batch(bus.commands, commands)
    for worker in workers:
        await worker.start()
    await eventually(lambda: bus.waiting() == [])
    for worker in workers:
        await worker.stop()

    assert min(map(len, handled)) >= 3
    assert [worker.warnings for worker in workers] == [[], []]


@pytest.mark.rule("CMD-3", "CMD-9")
async def test_a_command_whose_reply_queue_is_missing_waits_for_it(bus: Bus) -> None:
    worker = Worker(bus.url, domain=bus.domain, dead_letters="none")

    @worker.handler("Debit")
    async def debit(*_: object) -> object:
        return {"left": 88}

    late = f"{bus.domain}__late"
    bus.send("c-1", reply_to=late)
    await worker.start()
    await eventually(lambda: len(worker.warnings) > 0)
    (warning,) = worker.warnings
    bus.client.create_queue(late)
    await eventually(lambda: bus.waiting() == [])
    await worker.stop()

    assert warning.code == "REPLY_FAILED"
    assert f": the PGMQ queue of {late} does not exist" in warning.message
    found: Any = bus.client.read(late, qty=10)
    (reply,) = found
    assert reply.message["result"] == {"left": 88}
