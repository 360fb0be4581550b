"""The router as the worker of a command bus on PGMQ: its acceptance criteria WK-1 to WK-11."""

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import pytest

from tests.acceptance.process import RouterProcess, eventually
from tests.acceptance.site import Site
from tests.acceptance.targets import Gate, id_of, ids
from tests.outbound.servers import Connection, LoopbackTarget, Script, listening
from tests.support.servers.postgres import PostgresServer, postgres_server

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

POOL = {"code": "PAYMENTS", "concurrency": 4, "ungrouped": "parallel"}
LOCKED = (423, b"")  # an error that passes
numbers = itertools.count(1)


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with postgres_server() as server:
        server.install_pgmq()
        yield server


@dataclass
class Bus:
    """The command queue of one domain, and whoever sends to it."""

    site: Site
    server: PostgresServer
    domain: str = field(default_factory=lambda: f"payments{next(numbers)}")

    def __post_init__(self) -> None:
        for name in (self.queue, self.replies):
            self.server.add_pgmq_queue(name)

    @property
    def queue(self) -> str:
        return f"{self.domain}__commands"

    @property
    def replies(self) -> str:
        return f"{self.domain}__replies"

    def configure(
        self, target: LoopbackTarget, pool: dict[str, object] = POOL, **options: object
    ) -> None:
        document = self.site.folder / "routing.json"
        document.write_bytes(self.document(target.url, pool, **options))
        self.site.settings["MESSAGE_ROUTER_CONFIG_URL"] = document.as_uri()

    def document(self, target: str, pool: dict[str, object] = POOL, **options: object) -> bytes:
        queue = {
            "queueName": "payments",
            "queueUri": f"{self.server.pgmq_url}?queue={self.queue}",
            "visibilityTimeout": 5,
            "envelope": "command-bus",
            "routes": {
                "Debit": {
                    "mediationTarget": target,
                    "poolCode": pool["code"],
                    "authToken": "tok",
                }
            },
            **options,
        }
        replies = {
            "queueName": "replies",
            "queueUri": f"{self.server.pgmq_url}?queue={self.replies}",
        }
        content = {"queues": [queue], "processingPools": [pool], "replyQueues": [replies]}
        return json.dumps(content).encode()

    def send(self, *commands: dict[str, object]) -> None:
        query = "SELECT pgmq.send_batch(:'queue', ARRAY(SELECT jsonb_array_elements(:'some')))"
        for first in range(0, len(commands), 200):
            some = json.dumps(commands[first : first + 200])
            self.server.sql(query, {"queue": self.queue, "some": some})

    def waiting(self) -> list[dict[str, Any]]:
        """The rows of its queue."""
        return self._rows(f"q_{self.queue}")

    def archived(self) -> list[dict[str, Any]]:
        """What the command bus calls its troubleshooting queue."""
        return self._rows(f"a_{self.queue}")

    def replied(self) -> list[dict[str, Any]]:
        return [row["message"] for row in self._rows(f"q_{self.replies}")]

    def succeeded(self) -> set[str]:
        """The commands whose success is recorded."""
        query = (
            "SELECT message_id FROM message_router.queue_messages"
            " WHERE queue = 'pgmq:' || :'queue' AND state = 'succeeded'"
        )
        return set(self.server.sql(query, {"queue": self.queue}).splitlines())

    def count(self, table: str) -> int:
        return int(self.server.sql(f"SELECT count(*) FROM pgmq.{table}"))  # noqa: S608

    def _rows(self, table: str) -> list[dict[str, Any]]:
        found = self.server.sql(f"SELECT to_jsonb(row) FROM pgmq.{table} AS row ORDER BY msg_id")  # noqa: S608
        return [json.loads(line) for line in found.splitlines()]


@pytest.fixture
def bus(site: Site, server: PostgresServer) -> Bus:
    return Bus(site, server)


def command(command_id: str, **fields: object) -> dict[str, object]:
    return {
        "command_id": command_id,
        "command_type": "Debit",
        "domain": "payments",
        "data": {"amount": 12},
        **fields,
    }


@asynccontextmanager
async def worker(
    bus: Bus, script: Script | None = None, pool: dict[str, object] = POOL, **options: object
) -> AsyncIterator[tuple[RouterProcess, LoopbackTarget]]:
    """A router that takes commands of this bus to a target."""
    async with listening(script) if script else listening() as target:
        bus.configure(target, pool, **options)
        async with bus.site.router() as router:
            yield router, target


@dataclass
class Busy:
    """A target that takes its time, and counts how many requests it has at once."""

    seconds: float
    open: int = 0
    most: int = 0

    async def script(self, connection: Connection) -> None:
        while True:
            await connection.read()
            self.open += 1
            self.most = max(self.most, self.open)
            await asyncio.sleep(self.seconds)
            self.open -= 1
            await connection.reply()


@dataclass
class Answers:
    """A target with an answer for each request, and the last one for all others."""

    bodies: Sequence[tuple[int, bytes]]
    at: list[float] = field(default_factory=list)

    async def script(self, connection: Connection) -> None:
        while True:
            await connection.read()
            status, body = self.bodies[min(len(self.at), len(self.bodies) - 1)]
            self.at.append(time.monotonic())
            await connection.reply(status, body)


@pytest.mark.rule("CMD-7")
async def test_wk_1_worker_reads_messages_from_correct_queue(bus: Bus) -> None:
    other = Bus(bus.site, bus.server)
    bus.send(command("ours"))
    other.send(command("theirs"))

    async with worker(bus) as (_, target):
        await eventually(lambda: not bus.waiting())

    assert ids(target) == ["ours"]
    assert [row["read_ct"] for row in other.waiting()] == [0]


@pytest.mark.rule("CMD-7")
async def test_wk_2_worker_respects_concurrency_limit(bus: Bus) -> None:
    busy = Busy(0.2)
    bus.send(*(command(f"c-{n}") for n in range(16)))

    async with worker(bus, busy.script):
        await eventually(lambda: not bus.waiting())

    assert busy.most == POOL["concurrency"]


@pytest.mark.rule("CMD-7")
async def test_wk_3_handler_invoked_with_correct_command_and_context(bus: Bus) -> None:
    bus.send(command("c-1", correlation_id="k-1", data={"account": "A-1", "amount": 1.50}))

    async with worker(bus, retry={"maxAttempts": 3, "backoff": [1]}) as (_, target):
        await eventually(lambda: not bus.waiting())

    (request,) = target.requests
    assert json.loads(request.body) == {
        "messageId": "c-1",
        "payload": {"account": "A-1", "amount": 1.5},
    }
    assert request.headers["x-message-id"] == "c-1"
    assert request.headers["x-correlation-id"] == "k-1"
    assert request.headers["x-message-attempt"] == "1"
    assert request.headers["x-message-max-attempts"] == "3"
    assert request.headers["authorization"] == "Bearer tok"


@pytest.mark.rule("CMD-7")
async def test_wk_4_successful_completion_deletes_pgmq_message(bus: Bus) -> None:
    bus.send(command("c-1"))

    async with worker(bus) as (_, target):
        await eventually(lambda: not bus.waiting())

    assert ids(target) == ["c-1"]
    assert bus.archived() == []


@pytest.mark.rule("CMD-7")
async def test_wk_5_transient_error_triggers_retry_with_backoff(bus: Bus) -> None:
    answers = Answers([LOCKED, LOCKED, (200, b"")])
    bus.send(command("c-1"))
    retry = {"maxAttempts": 5, "backoff": [1, 3], "statuses": [423]}

    async with worker(bus, answers.script, retry=retry):
        await eventually(lambda: not bus.waiting())

    first, second, third = answers.at
    assert 0.9 <= second - first < 2.8
    assert 2.9 <= third - second < 5.5
    assert bus.archived() == []


@pytest.mark.rule("CMD-7")
@pytest.mark.parametrize("answer", [(422, b"{}"), (503, b'{"permanent": true}')])
async def test_wk_6_permanent_error_moves_to_tsq_immediately(
    bus: Bus, answer: tuple[int, bytes]
) -> None:
    answers = Answers([answer])
    bus.send(command("c-1"))

    async with worker(bus, answers.script, retry={"maxAttempts": 5, "backoff": [1]}) as (router, _):
        await eventually(lambda: not bus.waiting())
        letters = (await router.get("/dead-letters")).json()["items"]

    (archived,) = bus.archived()
    assert archived["message"] == command("c-1")
    assert len(answers.at) == 1
    assert [letter["messageId"] for letter in letters] == ["c-1"]


@pytest.mark.rule("CMD-7")
async def test_wk_7_retries_exhausted_moves_to_tsq(bus: Bus) -> None:
    answers = Answers([LOCKED])
    bus.send(command("c-1"))
    retry = {"maxAttempts": 3, "backoff": [1], "statuses": [423]}

    async with worker(bus, answers.script, retry=retry):
        await eventually(lambda: not bus.waiting())

    (archived,) = bus.archived()
    assert archived["read_ct"] == len(answers.at) == 3
    assert archived["headers"]["x-message-router"] == {"failures": 2, "requests": 2}


@pytest.mark.rule("CMD-3")
async def test_wk_8_reply_sent_if_reply_to_configured(bus: Bus) -> None:
    answers = Answers(
        [
            (200, b'{"ack": true, "result": {"n": 1}}'),
            (422, b'{"error": {"code": "NO_FUNDS", "message": "none left"}}'),
            (200, b""),
        ]
    )
    pool = {**POOL, "concurrency": 1, "ungrouped": "serial"}
    asking = {"reply_to": bus.replies, "correlation_id": "k-1"}
    bus.send(command("c-1", **asking), command("c-2", **asking), command("c-3"))

    async with worker(bus, answers.script, pool) as (router, _):
        await eventually(lambda: not bus.waiting())
        assert await router.stop() == 0

    # A success and a failure are settled on their own: their replies may change places.
    assert sorted(bus.replied(), key=itemgetter("command_id")) == [
        {"command_id": "c-1", "correlation_id": "k-1", "outcome": "SUCCESS", "result": {"n": 1}},
        {
            "command_id": "c-2",
            "correlation_id": "k-1",
            "outcome": "FAILED",
            "error_code": "NO_FUNDS",
            "error_message": "none left",
        },
    ]
    assert [row["message"]["command_id"] for row in bus.archived()] == ["c-2"]


@pytest.mark.rule("CMD-7")
async def test_wk_9_graceful_shutdown_waits_for_in_flight(bus: Bus) -> None:
    gate = Gate()
    bus.send(command("c-1"), command("c-2"))

    async with worker(bus, gate.script) as (router, target):
        await eventually(lambda: len(target.requests) == 2)
        stopping = asyncio.ensure_future(router.stop())
        await asyncio.sleep(0.5)
        bus.send(command("too late"))
        was_waiting = not stopping.done()
        gate.open()
        code = await stopping

    assert was_waiting
    assert (code, sorted(gate.answered)) == (0, ["c-1", "c-2"])
    assert [row["message"]["command_id"] for row in bus.waiting()] == ["too late"]


@pytest.mark.rule("CMD-7")
async def test_wk_10_in_flight_count_returns_correct_value(bus: Bus) -> None:
    gate = Gate()
    bus.send(*(command(f"c-{n}") for n in range(3)))

    async with worker(bus, gate.script) as (router, target):
        await eventually(lambda: len(target.requests) == 3)
        during = (await router.get("/monitoring/in-flight-messages")).json()
        gate.open()
        await eventually(lambda: not bus.waiting())
        after = (await router.get("/monitoring/in-flight-messages")).json()

    assert sorted(each["messageId"] for each in during) == ["c-0", "c-1", "c-2"]
    assert after == []


@pytest.mark.rule("CMD-7")
async def test_wk_11_high_concurrency_is_handled(bus: Bus) -> None:
    busy, total = Busy(0.5), 2_000
    pool = {**POOL, "concurrency": 500}
    bus.send(*(command(f"c-{n}") for n in range(total)))

    async with worker(bus, busy.script, pool, visibilityTimeout=30) as (_, target):
        await eventually(lambda: not bus.waiting(), within=60)

    assert sorted(ids(target)) == sorted(f"c-{n}" for n in range(total))
    assert busy.most > 200


# What can go wrong.


@pytest.mark.rule("DLQ-1", "BRK-2")
async def test_a_command_without_a_route_is_archived_and_kept_with_the_reason(bus: Bus) -> None:
    unheard = command("c-1", command_type="Unheard")
    bus.send(unheard, command("c-2"))

    async with worker(bus) as (router, target):
        (letter,) = await router.letters("MALFORMED")
        await eventually(lambda: not bus.waiting())

    assert "no route for commands of type 'Unheard'" in letter["error"]
    assert [row["message"] for row in bus.archived()] == [unheard]
    assert ids(target) == ["c-2"]


@pytest.mark.rule("CFG-5")
async def test_a_queue_that_does_not_exist_is_told_and_stops_no_other(
    bus: Bus, target: LoopbackTarget
) -> None:
    bus.configure(target)
    document = bus.site.folder / "routing.json"
    content = json.loads(document.read_text())
    nowhere = {"queueName": "nowhere", "queueUri": f"{bus.server.pgmq_url}?queue=nowhere"}
    document.write_text(json.dumps({**content, "queues": [nowhere, *content["queues"]]}))
    bus.send(command("c-1"))

    async with bus.site.router() as router:
        await eventually(lambda: not bus.waiting())
        warnings = await router.warnings("QUEUE_VALIDATION")

    assert any("there is no PGMQ queue 'nowhere'" in each["message"] for each in warnings)


@pytest.mark.rule("OPS-5")
async def test_the_token_of_a_route_is_never_shown(bus: Bus, target: LoopbackTarget) -> None:
    bus.configure(target)

    async with bus.site.router() as router:
        shown = (await router.get("/config")).json()
        routes = shown["queues"][0]["routes"]
        output = router.output()

    assert routes["Debit"]["authToken"] == "***"
    assert '"tok"' not in json.dumps(shown) + output


@pytest.mark.rule("CMD-3")
async def test_a_command_whose_reply_queue_the_document_does_not_name_is_delivered_with_a_warning(
    bus: Bus,
) -> None:
    bus.send(command("c-1", reply_to="elsewhere"))

    async with worker(bus) as (router, target):
        await eventually(lambda: not bus.waiting())
        warnings = await router.warnings("CONFIGURATION")

    assert ids(target) == ["c-1"]
    assert any("replyTo ignored" in each["message"] for each in warnings)


@pytest.mark.rule("CMD-3", "P1")
async def test_a_reply_queue_that_is_missing_loses_no_reply_once_it_is_there(bus: Bus) -> None:
    bus.server.sql("SELECT pgmq.drop_queue(:'name')", {"name": bus.replies})
    bus.send(command("c-1", reply_to=bus.replies))

    async with worker(bus) as (router, target):
        await eventually(lambda: len(target.requests) > 0)
        await asyncio.sleep(1)
        was_kept = len(bus.waiting()) == 1
        (warning,) = await router.warnings("REPLY_FAILED")
        bus.server.add_pgmq_queue(bus.replies)
        await eventually(lambda: not bus.waiting())

    assert was_kept
    assert "the PGMQ queue of replies does not exist" in warning["message"]
    assert [reply["command_id"] for reply in bus.replied()] == ["c-1"]


@pytest.mark.rule("P1", "BRK-6", "CMD-3")
@pytest.mark.timeout(240)
async def test_a_worker_that_is_killed_again_and_again_loses_no_command_and_no_reply(
    bus: Bus,
) -> None:
    total, kills = 20_000, 5
    busy, pool = Busy(0.001), {**POOL, "concurrency": 50}
    bus.send(*(command(f"c-{n}", reply_to=bus.replies) for n in range(total)))
    async with listening(busy.script) as target:
        bus.configure(target, pool, visibilityTimeout=2)
        for kill in range(1, kills + 1):
            async with bus.site.router() as router:
                enough = kill * total // (kills + 1)
                await eventually(lambda enough=enough: len(target.requests) > enough, within=60)  # type: ignore[misc]
                await router.kill()
        async with bus.site.router():
            await eventually(lambda: not bus.count(f"q_{bus.queue}"), within=60)

    sent = sorted(f"c-{n}" for n in range(total))
    assert sorted({id_of(request) for request in target.requests}) == sent
    # Reply and end of the command are one transaction: no reply is missing, none is there twice.
    assert sorted(reply["command_id"] for reply in bus.replied()) == sent
    assert bus.archived() == []


@pytest.mark.rule("CMD-3", "CMD-14")
async def test_a_command_that_cannot_run_is_answered_and_has_failed(bus: Bus) -> None:
    asking = {"reply_to": bus.replies, "correlation_id": "k-1"}
    bus.send(
        command("no-route", command_type="Unheard", **asking),
        {"command_id": "odd", "command_type": {"not": "text"}, **asking},
    )

    async with worker(bus) as (router, _):
        await eventually(lambda: not bus.waiting())
        states = [(await router.get(f"/messages/{each}")).json() for each in ("no-route", "odd")]

    failed = {"correlation_id": "k-1", "outcome": "FAILED", "error_code": "MALFORMED"}
    replies = sorted(bus.replied(), key=itemgetter("command_id"))
    assert [each.pop("error_message") != "" for each in replies] == [True, True]
    assert replies == [{"command_id": each, **failed} for each in ("no-route", "odd")]
    assert [state["state"] for state in states] == ["FAILED", "FAILED"]


@pytest.mark.rule("CMD-14")
async def test_the_state_of_a_command_is_known_after_a_restart(bus: Bus) -> None:
    answers = Answers([(200, b'{"result": {"n": 1}}')])
    bus.send(command("c-1"))
    async with worker(bus, answers.script) as (router, _):
        await eventually(lambda: not bus.waiting())
        assert await router.stop() == 0

    async with worker(bus) as (router, _):
        state = (await router.get("/messages/c-1")).json()
        listed = (await router.get("/messages?state=SUCCEEDED")).json()["items"]

    assert (state["state"], state["result"], state["pool"]) == ("SUCCEEDED", {"n": 1}, "PAYMENTS")
    assert [each["id"] for each in listed] == ["c-1"]


@pytest.mark.rule("CMD-14", "CMD-4")
async def test_a_batch_on_pgmq_calls_back_and_what_waits_is_cancelled(bus: Bus) -> None:
    message = {"poolCode": "PAYMENTS", "payload": {"n": 1}}
    async with worker(bus) as (router, target):
        to = {**message, "mediationTarget": target.url}
        members = [{"id": "a", **to}, {"id": "later", "delaySeconds": 3600, **to}]
        callback = {"mediationTarget": target.url, "poolCode": "PAYMENTS"}
        batch = {"id": "b-1", "messages": members, "callback": callback}
        answer = await router.post("/batches", batch)
        await eventually(lambda: len(target.requests) == 1)
        cancelled = await router.delete("/messages/later")
        await eventually(lambda: not bus.waiting())
        batch = (await router.get("/batches/b-1")).json()

    assert (answer.status_code, cancelled.status_code) == (202, 204)
    assert ids(target) == ["a", "b-1-callback"]
    assert (batch["state"], batch["succeeded"], batch["cancelled"]) == ("COMPLETE", 1, 1)


@pytest.mark.rule("CMD-14", "CMD-13", "CMD-3")
async def test_a_command_that_runs_is_stopped(bus: Bus) -> None:
    gate = Gate()
    bus.send(command("c-1", reply_to=bus.replies))
    async with worker(bus, gate.script) as (router, target):
        await eventually(lambda: len(target.requests) == 1)
        refused = await router.delete("/messages/c-1")
        cancelled = await router.delete("/messages/c-1?running=true")
        state = (await router.get("/messages/c-1")).json()["state"]
        gate.open()

    (reply,) = bus.replied()
    assert (refused.status_code, cancelled.status_code, state) == (409, 204, "CANCELLED")
    assert (reply["outcome"], reply["error_code"]) == ("FAILED", "CANCELLED")
    assert (bus.waiting(), bus.archived()) == ([], [])


@pytest.mark.rule("P1", "CMD-14", "CMD-4")
async def test_a_worker_that_is_killed_runs_no_command_again_that_it_has_recorded(
    bus: Bus,
) -> None:
    total, kills = 1_000, 3
    busy, pool = Busy(0.001), {**POOL, "concurrency": 20}
    sent = [command(f"c-{n}", reply_to=bus.replies) for n in range(total)]
    bus.send(*sent)
    recorded_at: dict[str, int] = {}  # how many requests there had been when it was recorded
    async with listening(busy.script) as target:
        bus.configure(target, pool, visibilityTimeout=2)
        for kill in range(1, kills + 1):
            async with bus.site.router() as router:
                enough = kill * total // (kills + 1)
                await eventually(lambda enough=enough: len(target.requests) > enough, within=60)  # type: ignore[misc]
                await router.kill()
            recorded = bus.succeeded() - recorded_at.keys()
            recorded_at |= dict.fromkeys(recorded, len(target.requests))
            bus.send(*(each for each in sent if each["command_id"] in recorded))  # once more
        async with bus.site.router():
            await eventually(lambda: not bus.waiting(), within=60)

    assert len(recorded_at) > total // 2
    all_ids = sorted(f"c-{n}" for n in range(total))
    requested = [id_of(request) for request in target.requests]
    assert sorted(set(requested)) == all_ids
    again = [each for each, at in recorded_at.items() if each in requested[at:]]
    assert again == []
    assert bus.succeeded() == set(all_ids)
    assert sorted(reply["command_id"] for reply in bus.replied()) == all_ids
    assert bus.archived() == []
