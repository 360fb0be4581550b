"""Another tenant: while somebody means harm, its messages go on as if nothing were."""

import asyncio
import json
import re
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import httpx

from tests.acceptance.process import PATIENCE, RouterProcess
from tests.outbound.servers import Connection, listening

MIB: Final = 1024 * 1024
MAX_LAG_SECONDS: Final = 0.25  # of the event loop
MAX_DELAY_SECONDS: Final = 0.1  # that an attack may add to the 99th percentile
MEMORY_LIMIT_BYTES: Final = 512 * MIB  # of the Helm chart
QUIET_SECONDS: Final = 0.6  # after which the router's figure is up to date
SAMPLES: Final = 100
PAUSE_SECONDS: Final = 0.01
POOL: Final[dict[str, object]] = {"code": "GOOD", "concurrency": 5}
QUEUE: Final = "calm"


async def worst_lag(router: RouterProcess) -> float:
    """The longest time that anything has held up the event loop, by the router's own figure."""
    await asyncio.sleep(QUIET_SECONDS)
    return float(await metric(router, "event_loop_lag_seconds"))


async def metric(router: RouterProcess, name: str) -> str:
    metrics = (await router.get("/metrics")).text
    found = re.search(rf"^message_router_{name} (\S+)$", metrics, re.MULTILINE)
    assert found is not None
    return found[1]


def memory(router: RouterProcess) -> int:
    """What it has in RAM, in bytes."""
    status = Path(f"/proc/{router.process.pid}/status").read_text()
    found = re.search(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


class Noise(threading.Thread):
    """How late this machine wakes anyone up: other programs take their share of it."""

    def __init__(self) -> None:
        super().__init__(name="noise", daemon=True)
        self.worst = 0.0  # seconds
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.is_set():
            due = time.monotonic() + PAUSE_SECONDS
            time.sleep(PAUSE_SECONDS)
            self.worst = max(self.worst, time.monotonic() - due)

    def end(self) -> None:
        self._ended.set()
        self.join()


@dataclass
class Bystander:
    """Sends one message after the other, to a pool, a queue and a target of its own."""

    router: RouterProcess
    noise: Noise
    calm: float = 0.0  # the 99th percentile without an attack, in seconds
    _url: str = ""
    _sent: int = 0
    _arrived: dict[str, asyncio.Future[float]] = field(default_factory=dict)

    async def is_undisturbed(self, memory_limit: int = MEMORY_LIMIT_BYTES) -> None:
        """Fail unless its messages take as long as before, and the router is well."""
        under_attack = await self.p99()
        lag, held, noise = await worst_lag(self.router), memory(self.router), self.noise.worst
        assert under_attack <= self.calm + MAX_DELAY_SECONDS + noise, (under_attack, self.calm)
        assert lag < MAX_LAG_SECONDS + noise
        assert held < memory_limit, held // MIB

    async def p99(self) -> float:
        """From the call of the API to the request at the target."""
        times: list[float] = []
        async with httpx.AsyncClient(timeout=PATIENCE, trust_env=False) as client:
            for _ in range(SAMPLES):
                times.append(await self._send(client))
                await asyncio.sleep(PAUSE_SECONDS)
        return sorted(times)[-2]

    async def _send(self, client: httpx.AsyncClient) -> float:
        self._sent += 1
        message_id = f"calm-{self._sent}"
        arrived: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._arrived[message_id] = arrived
        body = [{"id": message_id, "mediationTarget": self._url, "poolCode": POOL["code"]}]
        begun = time.monotonic()
        answer = await client.post(f"{self.router.url}/messages?queue={QUEUE}", json=body)
        assert answer.status_code == 202, answer.text
        async with asyncio.timeout(PATIENCE):
            return await arrived - begun

    async def serve(self, connection: Connection) -> None:
        while True:
            request = await connection.read()
            self._arrived[json.loads(request.body)["messageId"]].set_result(time.monotonic())
            await connection.reply()


@asynccontextmanager
async def bystander(router: RouterProcess) -> AsyncIterator[Bystander]:
    """One that knows how long its messages take on a calm day. It needs `POOL` and `QUEUE`."""
    other = Bystander(router, Noise())
    other.noise.start()
    try:
        async with listening(other.serve) as target:
            other._url = target.url  # known only now
            await other.p99()  # warm
            other.calm = await other.p99()
            yield other
    finally:
        other.noise.end()
