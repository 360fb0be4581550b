"""Bounds of the whole process: start, idle, a large backlog, and the way from queue to target."""

import asyncio
import json
import sqlite3
import statistics
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Final

from bench.router_process import RouterProcess, router
from bench.sink import free_port, sink
from router.brokers import BrokerDoor
from router.core.config import QueueConfig
from router.core.message import parse
from router.ports import Publication

CHUNK: Final = 5_000
IDLE_SECONDS: Final = 10.0
BACKLOG_SECONDS: Final = 15.0


def start(rounds: int) -> None:
    seconds = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder, router(Path(folder), free_port()) as process:
            seconds.append(process.seconds_to_ready)
    print(f"start to ready: {statistics.median(seconds):.2f} s (median of {rounds}; bound 1 s)")


def idle() -> None:
    with tempfile.TemporaryDirectory() as folder, router(Path(folder), free_port()) as process:
        time.sleep(2)  # what starting still has to do
        before = process.cpu_seconds
        time.sleep(IDLE_SECONDS)
        share = (process.cpu_seconds - before) / IDLE_SECONDS
        print(f"idle: {share:.2%} of a core, {process.resident_mib:.0f} MiB (bound 1 %)")


def backlog(messages: int) -> None:
    """Memory with a long queue in front of a target that is slow to answer."""
    with tempfile.TemporaryDirectory() as name, sink(Path(name)) as url:
        folder = Path(name)
        print(f"publishing {messages} messages …", flush=True)
        asyncio.run(_publish(folder, url, messages, groups=max(messages // 10, 1)))
        with router(folder, free_port()) as process:
            time.sleep(BACKLOG_SECONDS)
            print(
                f"backlog of {messages}: peak {process.peak_mib:.0f} MiB after"
                f" {_finished(folder)} deliveries (bound 150 MiB)"
            )


def throughput(messages: int, groups: int, rounds: int) -> None:
    """Queue to target, all features on: CPU of the router per message."""
    costs, rates = [], []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as name, sink(Path(name)) as url:
            folder = Path(name)
            asyncio.run(_publish(folder, url, messages, groups))
            with router(folder, free_port()) as process:
                cost, rate = _watch(process, folder, messages)
        costs.append(cost)
        rates.append(rate)
        print(f"  {cost:.0f} µs CPU, {rate:.0f} messages/s", flush=True)
    print(
        f"SQLite queue to sink, {messages} messages in {groups} groups:"
        f" {statistics.median(costs):.0f} µs CPU per message,"
        f" {statistics.median(rates):.0f} messages/s (medians of {rounds})"
    )


def _watch(process: RouterProcess, folder: Path, messages: int) -> tuple[float, float]:
    before, done_before, started = process.cpu_seconds, _finished(folder), time.monotonic()
    while _finished(folder) < messages:
        time.sleep(0.05)
    count = messages - done_before
    spent = process.cpu_seconds - before
    return spent / count * 1e6, count / (time.monotonic() - started)


def _finished(folder: Path) -> int:
    with closing(sqlite3.connect(f"file:{folder}/queue.db?mode=ro", uri=True)) as queue:
        query = "SELECT count(*) FROM queue_messages WHERE state IN ('succeeded', 'failed')"
        finished: int = queue.execute(query).fetchone()[0]
        return finished


async def _publish(folder: Path, url: str, messages: int, groups: int) -> None:
    queue = QueueConfig(name="default", uri=f"sqlite:///{folder}/queue.db?queue=default")
    async with BrokerDoor(worker_id="bench", dedup_window=300.0) as door:
        opened = door.open_publisher(queue)
        if opened is None:
            raise SystemExit("the embedded queue cannot be published to")
        async with opened as publisher:
            for first in range(0, messages, CHUNK):
                numbers = range(first, min(first + CHUNK, messages))
                await publisher.publish([message(n, url, groups) for n in numbers])


def message(number: int, url: str, groups: int, run: int = 0) -> Publication:
    """The `number`-th message of a run."""
    body = json.dumps(
        {
            "id": f"{run}-{number:09d}",
            "mediationTarget": url,
            "authToken": "token",
            "messageGroupId": f"group-{number % groups}",
        }
    ).encode()
    parsed = parse(body)
    return Publication(parsed, body, parsed.id)
