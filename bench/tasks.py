"""What tasks on this machine cost: processes and handlers, from an SQLite queue to their ACK."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
import uvloop
from msgspec.structs import replace

from bench.engine import drain
from bench.measure import TICKS, spread
from bench.report import ReportTable, say
from router.core.config import PoolConfig, QueueConfig, RoutingConfig
from router.core.message import DEFAULT_POOL, parse
from router.core.warnings import WarningBook
from router.engine.alerts import Alerts
from router.engine.delivery import TaskMediator
from router.outbound.process import Executor, ExecutorMode
from router.outbound.process.tasks import open_tasks
from router.ports import Publication, TaskRunner
from router.settings import Settings
from router.wiring import open_brokers
from router.worker import Command, Context, Worker

CHUNK: Final = 500  # messages
PROCESSES: Final = 4
ECHO: Final = """
import sys
for line in sys.stdin:
    print(line, end="", flush=True)
"""
EXECUTORS: Final = {
    "once": ["/bin/true"],
    "serve": [sys.executable, "-I", "-S", "-c", ECHO],
}


PROCESS_POOL: Final = PoolConfig(
    code=DEFAULT_POOL, concurrency=8 * PROCESSES, parallel_ungrouped=True
)
HANDLER_POOL: Final = PoolConfig(code=DEFAULT_POOL, concurrency=10, parallel_ungrouped=True)
# By what they take ahead: messages that wait for each of 10 handlers.
HANDLERS: Final = {
    "handler": 5,
    "handler in a thread": 5,
    "handler, none ahead": 0,
    "handler in a thread, none ahead": 0,
}


def measure(messages: int, rounds: int) -> ReportTable:
    once = messages // 20  # a process each
    cases = {"process, once": once, "process, serve": messages, **dict.fromkeys(HANDLERS, messages)}
    found: dict[str, list[tuple[float, float]]] = {case: [] for case in cases}
    for number in range(rounds):
        say(f"processes, round {number + 1} of {rounds}")
        for case, total in cases.items():
            found[case].append(uvloop.run(_cost(case, total)))
    table = ReportTable("processes", "Tasks on this machine (SQLite queue)", ("task",))
    for case, figures in found.items():
        costs, rates = zip(*figures, strict=True)
        table.add((case,), {"CPU µs": spread(costs), "tasks/s": spread(rates)})
    bare = [_bare(once) for _ in range(rounds)]
    table.add(("a process by itself",), {"CPU µs": spread(bare)})
    return table


async def _cost(case: str, total: int) -> tuple[float, float]:
    """Return our CPU microseconds per task, without those of the tasks, and tasks per second."""
    with tempfile.TemporaryDirectory() as folder:
        if case in HANDLERS:
            worker = Worker("memory://unused", dead_letters="none")

            if "thread" in case:

                @worker.handler("nothing")
                def nothing(_command: Command, _context: Context) -> None: ...

            else:

                @worker.handler("nothing")
                async def nothing_async(_command: Command, _context: Context) -> None: ...

            target: Mapping[str, str] = {"mediationTarget": "handler:nothing"}
            runner = worker._tasks  # noqa: SLF001 - on a queue of ours
            pool = replace(HANDLER_POOL, take_ahead=HANDLERS[case])
            return await _drain(Path(folder), total, runner, target, pool=pool)
        mode = ExecutorMode(case.partition(", ")[2])
        executor = Executor(
            name="x",
            queues=["q"],
            command=EXECUTORS[mode],
            timeout_ms=60_000,
            mode=mode,
            max_processes=PROCESSES,
        )
        target = {"mediationType": "PROCESS", "mediationTarget": "process:x"}
        async with open_tasks({"x": executor}) as tasks:
            return await _drain(Path(folder), total, tasks, target, tasks.spawner_pid)


async def _drain(
    folder: Path,
    total: int,
    runner: TaskRunner,
    target: Mapping[str, str],
    helper: int = 0,
    *,
    pool: PoolConfig = PROCESS_POOL,
) -> tuple[float, float]:
    queue = QueueConfig(name="q", uri=f"sqlite:///{folder}/queue.db?queue=q")
    alerts = Alerts(WarningBook(), time.time)
    async with open_brokers(Settings(), alerts) as brokers:
        async with brokers.open_publisher(queue) as publisher:
            for start in range(0, total, CHUNK):
                bodies = [
                    msgspec.json.encode({"id": str(n), **target})
                    for n in range(start, min(start + CHUNK, total))
                ]
                await publisher.publish([Publication(parse(each), each) for each in bodies])
        config = RoutingConfig((queue,), (pool,))
        mediator = TaskMediator(runner, alerts, time.time)
        spent, seconds = await drain(
            brokers, mediator, alerts, config, total, cpu=lambda: _cpu(helper)
        )
    return spent / total * 1e6, total / seconds


def _cpu(helper: int) -> float:
    """Return the seconds of this process and of the spawner, without their children."""
    spent = time.process_time()
    if helper:
        fields = Path(f"/proc/{helper}/stat").read_text().rpartition(")")[2].split()
        spent += (int(fields[11]) + int(fields[12])) / TICKS
    return spent


def _bare(total: int) -> float:
    """Return what it costs to start a process and wait for it, by the standard library."""
    before = time.process_time()
    for _ in range(total):
        subprocess.run(EXECUTORS["once"], check=True)
    return (time.process_time() - before) / total * 1e6
