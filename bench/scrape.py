"""How long `/metrics` takes with many pools, and for how long it keeps deliveries waiting.

The whole router runs here, under load, beside a clock that ticks every millisecond: what keeps it
from ticking keeps deliveries from going on. Others on this machine may do so too, hence two
figures: the time that passed between two ticks, and what of it this thread spent itself.
"""

import asyncio
import json
import sys
import tempfile
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import uvloop

from bench.measure import Spread, spread
from bench.report import ReportTable, say
from bench.sink import new_sink
from router.main import open_router, serve
from router.settings import Settings

POOLS = (100, 1_000, 10_000)
PATHS = ("/metrics", "/metrics", "/metrics", "/health", "/health")  # the first one is cold
WARM_UP = 3.0
PAUSE = 0.5  # between two calls

# Programs of their own: they must not take turns with the router.
CALL = """
import sys, time, urllib.request
started = time.perf_counter()
answer = urllib.request.urlopen(sys.argv[1]).read()
print(len(answer), (time.perf_counter() - started) * 1000)
"""
FEED = """
import json, sys, time, urllib.request
url, target, pools = sys.argv[1], sys.argv[2], int(sys.argv[3])
for start in range(0, 1_000_000, 20):
    batch = [
        {"id": f"m{n}", "mediationTarget": target, "poolCode": f"POOL-{n % pools}"}
        for n in range(start, start + 20)
    ]
    headers = {"Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(url, json.dumps(batch).encode(), headers)).read()
    time.sleep(0.05)
"""


class Ticker:
    """Remembers the longest time without a tick."""

    def __init__(self) -> None:
        self.passed = 0.0
        self.spent = 0.0

    def figures(self) -> dict[str, Spread]:
        return {
            "ms longest without a tick": spread([self.passed * 1000]),
            "ms own part": spread([self.spent * 1000]),
        }

    def reset(self) -> None:
        self.passed = self.spent = 0.0

    async def run(self) -> None:
        passed, spent = time.perf_counter(), time.thread_time()
        while True:
            await asyncio.sleep(0.001)
            now, used = time.perf_counter(), time.thread_time()
            self.passed = max(self.passed, now - passed)
            self.spent = max(self.spent, used - spent)
            passed, spent = now, used


def measure() -> ReportTable:
    table = ReportTable("scrape", "Scrapes and health checks under load", ("pools", "call"))
    for pools in POOLS:
        say(f"scrape: {pools:,} pools")
        with tempfile.TemporaryDirectory() as folder, new_sink() as sink:
            uvloop.run(_watch(table, pools, Path(folder), sink.url))
    return table


async def _watch(table: ReportTable, pools: int, folder: Path, target: str) -> None:
    ticker = Ticker()
    async with _running(pools, folder) as url:
        feed = await _start(FEED, f"{url}/messages?queue=load", target, str(pools))
        ticking = asyncio.create_task(ticker.run(), name="ticker")
        await asyncio.sleep(WARM_UP)
        ticker.reset()
        await asyncio.sleep(WARM_UP)
        table.add((f"{pools:,}", "none"), ticker.figures())
        for path in PATHS:
            await asyncio.sleep(PAUSE)
            ticker.reset()
            call = await _start(CALL, url + path)
            size, took = (await call.communicate())[0].split()
            answer = {"KiB": spread([int(size) / 1024]), "ms answered": spread([float(took)])}
            table.add((f"{pools:,}", path), answer | ticker.figures())
        feed.kill()
        await feed.wait()
        ticking.cancel()


async def _start(program: str, *words: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(sys.executable, "-c", program, *words, stdout=PIPE)


@asynccontextmanager
async def _running(pools: int, folder: Path) -> AsyncIterator[str]:
    """The URL of a router with so many pools."""
    document = folder / "routing.json"
    queue = {"queueName": "load", "queueUri": f"sqlite:///{folder}/queue.db?queue=load"}
    codes = [{"code": f"POOL-{n}", "concurrency": 5} for n in range(pools)]
    document.write_text(json.dumps({"queues": [queue], "processingPools": codes}))
    settings = Settings.from_env(
        {
            "MESSAGE_ROUTER_CONFIG_URL": document.as_uri(),
            "MESSAGE_ROUTER_PORT": "0",
            "MESSAGE_ROUTER_STATE_DIR": str(folder),
        }
    )
    stop, ready = asyncio.Event(), asyncio.Event()
    async with open_router(settings) as router, asyncio.TaskGroup() as tasks:
        tasks.create_task(serve(router, settings, stop, ready.set), name="serve")
        await ready.wait()
        yield f"http://127.0.0.1:{router.port}"
        stop.set()
