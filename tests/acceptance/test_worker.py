"""The library as a program uses it: a real queue, in real time (CMD-9)."""

import asyncio
import json
import os
import re
import sqlite3
import subprocess
import sys
import threading
from collections.abc import MutableMapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from router.brokers import BrokerRegistry
from router.core.config import QueueConfig, RetryPolicy
from router.ports import StoreError
from router.worker import (
    Command,
    Conflict,
    Context,
    Permanent,
    Transient,
    Unknown,
    Worker,
)
from tests.acceptance.process import ROOT, eventually, run_command
from tests.acceptance.site import Site

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


def command(message_id: str, kind: str = "work", **fields: object) -> dict[str, object]:
    return {"id": message_id, "mediationTarget": f"handler:{kind}", **fields}


async def bodies_in(uri: str, count: int) -> list[dict[str, object]]:
    """What is in a queue, once there are so many."""
    bodies: list[bytes] = []
    queue = QueueConfig(name="replies", uri=uri)
    async with (
        BrokerRegistry(worker_id="test", dedup_window=300.0) as brokers,
        brokers.open_queue(queue) as broker,
    ):
        while len(bodies) < count:
            bodies += [received.body for received in await broker.receive(10)]
    return sorted(map(json.loads, bodies), key=lambda reply: str(reply["messageId"]))


def worker_on(site: Site, **options: object) -> Worker:
    usual = {"dead_letters": f"sqlite:///{site.folder}/letters.db", "concurrency": 4}
    uri = str(site.queue("orders")["queueUri"])
    return Worker(uri, **(usual | options))  # type: ignore[arg-type]


@pytest.mark.rule("CMD-9")
async def test_a_worker_handles_what_is_there_and_what_comes(site: Site) -> None:
    worker = worker_on(site, retry=RetryPolicy(max_attempts=2, schedule=(1.0,)))
    handled: list[tuple[str, int]] = []

    @worker.handler("work")
    async def work(command: Command, context: Context) -> object:
        handled.append((command.id, context.attempt))
        if command.id == "bad":
            raise Permanent("BAD", "it is bad")
        if command.id == "slow" and context.attempt == 1:
            raise Transient("SLOW", "not yet")
        return {"ok": True}

    await site.fill("orders", [command("a"), command("bad"), command("slow")])
    assert not worker.is_running
    await worker.start()
    assert worker.is_running
    await site.fill("orders", [command("b")])
    await eventually(lambda: site.unsettled() == set())
    await worker.stop(timeout=5)

    assert not worker.is_running
    assert sorted(handled) == [("a", 1), ("b", 1), ("bad", 1), ("slow", 1), ("slow", 2)]
    with closing(sqlite3.connect(site.folder / "letters.db")) as letters:
        assert letters.execute("SELECT message_id, reason FROM dead_letters").fetchall() == [
            ("bad", "PERMANENT")
        ]


@pytest.mark.rule("CMD-9", "CMD-3")
async def test_results_and_errors_go_to_the_reply_queue(site: Site) -> None:
    replies = f"sqlite:///{site.queue_file}?queue=replies"
    worker = worker_on(site, reply_queues={"answers": replies})

    @worker.handler("work")
    async def work(command: Command, _: Context) -> object:
        if command.payload is None:
            raise Permanent("NO_PAYLOAD", "there is nothing to do")
        return {"doubled": command.payload * 2}

    both = [command("a", payload=21, replyTo="answers"), command("b", replyTo="answers")]
    await site.fill("orders", both)
    await worker.start()
    answers = await bodies_in(replies, 2)
    await worker.stop()

    assert answers == [
        {"messageId": "a", "correlationId": None, "outcome": "SUCCESS", "result": {"doubled": 42}},
        {
            "messageId": "b",
            "correlationId": None,
            "outcome": "FAILED",
            "errorCode": "NO_PAYLOAD",
            "errorMessage": "there is nothing to do",
        },
    ]


@pytest.mark.rule("CMD-9")
async def test_no_more_handlers_run_side_by_side_than_allowed(site: Site) -> None:
    worker, most = worker_on(site, concurrency=3), 0

    @worker.handler("work")
    async def work(*_: object) -> None:
        nonlocal most
        most = max(most, worker.in_flight_count)
        await asyncio.sleep(0.05)

    await site.fill("orders", [command(str(n)) for n in range(20)])
    await worker.start()
    await eventually(lambda: site.unsettled() == set())
    await worker.stop()

    assert most == 3


@pytest.mark.rule("CMD-9")
async def test_stop_waits_for_handlers_and_stop_now_does_not(site: Site) -> None:
    worker = worker_on(site)
    release = asyncio.Event()
    ended: list[str] = []

    @worker.handler("work")
    async def work(command: Command, _: Context) -> None:
        await release.wait()
        ended.append(command.id)

    await site.fill("orders", [command("a")])
    await worker.start()
    with pytest.raises(RuntimeError):
        await worker.start()
    await eventually(lambda: worker.in_flight_count == 1)
    stopping = asyncio.ensure_future(worker.stop(timeout=30))
    await asyncio.sleep(0.2)
    assert (stopping.done(), worker.in_flight_count) == (False, 1)
    assert not worker.is_running
    release.set()
    await stopping
    assert (ended, site.unsettled()) == (["a"], set())

    release.clear()
    await site.fill("orders", [command("b")])
    await worker.start()
    await eventually(lambda: worker.in_flight_count == 1)
    stopping = asyncio.ensure_future(worker.stop(timeout=30))
    await asyncio.sleep(0.2)
    await worker.stop_now()
    await stopping
    assert (ended, worker.in_flight_count) == (["a"], 0)
    assert site.unsettled() == {"b"}
    assert site.in_flight() == set()  # returned, not left to its lease

    release.set()
    await worker.start()
    await eventually(lambda: site.unsettled() == set())
    await worker.stop_now()
    assert ended == ["a", "b"]


@pytest.mark.rule("CMD-9")
async def test_a_worker_that_never_started_can_be_stopped(site: Site) -> None:
    worker = worker_on(site)

    await worker.stop()
    await worker.stop_now()


@pytest.mark.rule("CMD-9")
async def test_dead_letters_that_cannot_be_stored_prevent_a_start(site: Site) -> None:
    worker = worker_on(site, dead_letters="sqlite:////proc/nowhere/letters.db")

    with pytest.raises(StoreError):
        await worker.start()
    assert not worker.is_running


@pytest.mark.rule("CMD-9")
async def test_a_cancelled_start_leaves_nothing_running(site: Site) -> None:
    worker = worker_on(site)
    starting = asyncio.ensure_future(worker.start())
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting

    await eventually(lambda: not worker.is_running)


@pytest.mark.rule("CMD-9")
async def test_the_settings_of_the_service_do_not_get_in_the_way(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESSAGE_ROUTER_PORT", "no port")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    monkeypatch.setenv("MESSAGE_ROUTER_DEDUP_WINDOW", "a while")

    with pytest.raises(ValueError, match="MESSAGE_ROUTER_DEDUP_WINDOW"):
        worker_on(site)
    monkeypatch.delenv("MESSAGE_ROUTER_DEDUP_WINDOW")
    worker_on(site)


@pytest.mark.rule("CMD-9")
def test_the_example_has_25_lines_and_works(tmp_path: Path) -> None:
    example = ROOT / "examples/worker.py"
    code = [line for line in example.read_text().splitlines() if line.strip()]
    assert len(code) <= 25
    uri = f"sqlite:///{tmp_path}/commands.db?queue=commands"
    env = {**os.environ, "MESSAGE_ROUTER_STATE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    commands = [command("a", "greet", payload="Ada"), command("b", "greet")]
    lines = "\n".join(map(json.dumps, commands)).encode()
    with subprocess.Popen(
        [sys.executable, str(example), uri], env=env, cwd=tmp_path, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        sent = run_command(["send", "--uri", uri], env, lines)
        assert sent.code == 0, sent.err
        assert process.stdout.readline() == b"Hello, Ada (attempt 1)\n"
        process.terminate()
        assert process.wait(30) == 0


async def ask(worker: Worker, path: str, method: str = "GET") -> tuple[int, bytes]:
    """Ask the ASGI app of a worker."""
    sent: list[MutableMapping[str, Any]] = []

    async def send(event: MutableMapping[str, Any]) -> None:
        sent.append(event)

    async def receive() -> MutableMapping[str, Any]:
        raise AssertionError("no request has a body")

    await worker.asgi({"type": "http", "path": path, "method": method}, receive, send)
    return sent[0]["status"], sent[1]["body"]


@pytest.mark.rule("CMD-9")
async def test_plain_functions_run_in_threads_and_the_worker_tells_how_it_is(site: Site) -> None:
    worker = worker_on(site, time_limit=0.2, retry=RetryPolicy(max_attempts=1))
    names: list[str] = []
    gate = threading.Event()

    @worker.handler("work")
    def work(command: Command, _context: Context) -> object:
        names.append(threading.current_thread().name)
        if command.id == "stuck":
            gate.wait(30)
        return {"ok": True}

    assert (await ask(worker, "/health"))[0] == 503
    await site.fill("orders", [command("a"), command("stuck")])
    await worker.start()
    await eventually(lambda: worker.counts.stuck == 1 and worker.counts.delivered == 1)
    status, health = await ask(worker, "/health")
    assert (status, json.loads(health)["running"]) == (200, 1)
    assert [each.code for each in worker.warnings] == ["HANDLER_STUCK"]
    _, page = await ask(worker, "/metrics")
    assert b"\nmessage_router_handlers_stuck 1\n" in page
    assert (await ask(worker, "/other"))[0] == 404
    assert (await ask(worker, "/health", "POST"))[0] == 405
    assert (await ask(worker, "/health", "HEAD")) == (200, b"")
    gate.set()
    await eventually(lambda: site.unsettled() == set())
    await worker.stop(timeout=5)

    assert set(names) <= {"handler-1", "handler-2"}
    assert (worker.counts.received, worker.counts.dead_lettered) == (2, 1)
    assert worker.counts.stuck_total == 1
    assert not worker.health.healthy


@pytest.mark.rule("CMD-9")
@pytest.mark.parametrize(
    "options",
    [
        {"concurrency": 0},
        {"concurrency": -1},
        {"threads": 0},
        {"rate_limit": 0},
        {"time_limit": 0},
        {"visibility_timeout": float("nan")},
        {"poll_interval": 0},
    ],
)
async def test_numbers_that_make_no_sense_are_refused(
    site: Site, options: dict[str, object]
) -> None:
    (name,) = options
    with pytest.raises(ValueError, match=f"{name} must be more than 0"):
        worker_on(site, **options)


@pytest.mark.rule("CMD-9")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"retry": {"maxAttempts": 3}}, "retry must be a RetryPolicy, not {'maxAttempts': 3}"),
        ({"retry": RetryPolicy(max_attempts=0)}, "retry.maxAttempts: must be above 0"),
        ({"retry": RetryPolicy(schedule=(-1.0,))}, "retry.backoff: must not be negative"),
        ({"poll_interval": 61}, "poll_interval must be 0.01 to 60, not 61"),
        ({"domain": " "}, "domain must not be blank"),
    ],
)
async def test_what_a_worker_cannot_be_given_is_refused_at_once(
    site: Site, options: dict[str, object], said: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        worker_on(site, **options)


@pytest.mark.rule("CMD-9")
async def test_a_domain_names_the_queue_of_its_commands(site: Site) -> None:
    worker = Worker(f"sqlite:///{site.folder}/bus.db", domain="payments", dead_letters="none")
    assert worker.domain == "payments"
    (queue,) = worker._config.queues
    assert queue.uri.endswith("/bus.db?queue=payments__commands")
    named = Worker(f"sqlite:///{site.folder}/bus.db?queue=own", domain="x", dead_letters="none")
    assert named._config.queues[0].uri.endswith("?queue=own")


@pytest.mark.rule("CMD-9", "CMD-13")
async def test_what_a_worker_handles_is_cancelled_by_any_worker_of_the_queue(site: Site) -> None:
    ended: list[str] = []
    let_go = threading.Event()
    one, other = worker_on(site, visibility_timeout=3), worker_on(site, visibility_timeout=3)

    async def wait(command: Command, _context: Context) -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            ended.append(command.id)

    def block(command: Command, _context: Context) -> object:
        let_go.wait(60)
        ended.append(command.id)
        return {"too": "late"}

    for each in (one, other):
        each.handler("waits")(wait)
        each.handler("blocks")(block)
    with pytest.raises(RuntimeError, match="not running"):
        await one.cancel("a")
    group = {"messageGroupId": "g"}
    await site.fill(
        "orders",
        [command("a", "waits"), command("b", "waits"), command("c", "blocks", **group)],
    )
    await site.fill("orders", [command("d", "blocks", **group)])
    await one.start()
    await eventually(lambda: one.in_flight_count == 3)
    await other.start()

    assert await one.cancel("a") is True
    await other.cancel("b")
    assert await one.cancel("c") is False
    await eventually(lambda: ended == ["a", "b"])
    assert site.in_flight() >= {"c"}  # its thread cannot be stopped
    let_go.set()
    await eventually(lambda: site.unsettled() == set())

    assert ended == ["a", "b", "c", "d"]
    assert site.ended_as("cancelled") == {"a", "b", "c"}
    assert one.counts.cancelled + other.counts.cancelled == 3
    with pytest.raises(Conflict, match="it has ended"):
        await one.cancel("d")
    with pytest.raises(Unknown):
        await one.cancel("nobody")
    await asyncio.gather(one.stop(timeout=5), other.stop(timeout=5))
