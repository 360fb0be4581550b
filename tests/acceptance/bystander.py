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
from tests.acceptance.site import Site
from tests.outbound.servers import Connection, listening
from tests.support.pace import slowdown

MIB: Final = 1024 * 1024
MAX_LAG_SECONDS: Final = 0.25  # of the event loop
MAX_DELAY_SECONDS: Final = 0.1  # that an attack may add to the 99th percentile
MEMORY_LIMIT_BYTES: Final = 512 * MIB  # of the Helm chart
QUIET_SECONDS: Final = 0.6  # after which the router's figure is up to date
SAMPLES: Final = 100
WARM_UP: Final = 20  # messages
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


def memory(router: RouterProcess, *, peak: bool = False) -> int:
    """What it has in RAM, in bytes. `peak`: what it had at most."""
    status = Path(f"/proc/{router.process.pid}/status").read_text()
    name = "VmHWM" if peak else "VmRSS"
    found = re.search(rf"^{name}:\s+(\d+) kB$", status, re.MULTILINE)
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
class Tenant:
    """Sends one message after the other, to a pool, a queue and a target of its own."""

    router: RouterProcess
    url: str = ""  # of its target
    _sent: int = 0
    _arrived: dict[str, asyncio.Future[float]] = field(default_factory=dict)

    async def send(self, client: httpx.AsyncClient) -> float:
        """Return the seconds from the call of the API to the request at the target."""
        self._sent += 1
        message_id = f"calm-{self._sent}"
        arrived: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._arrived[message_id] = arrived
        body = [{"id": message_id, "mediationTarget": self.url, "poolCode": POOL["code"]}]
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


@dataclass
class Bystander:
    """One tenant on the router under attack, and one on a router that nobody attacks.

    What delays both is the machine, not the attack.
    """

    tenant: Tenant
    control: Tenant
    noise: Noise

    async def is_undisturbed(self, memory_limit: int = MEMORY_LIMIT_BYTES) -> None:
        """Fail unless its messages take as long as elsewhere, and the router is well."""
        before = slowdown()  # of the machine, with the attack on it: its processors are shared
        attacked, calm = await self.p99()
        machine = await self.has_not_waited(before)
        held, slow = memory(self.tenant.router), _slow(before)
        assert attacked <= calm + MAX_DELAY_SECONDS * slow + machine, (attacked, calm, machine)
        assert held < memory_limit, held // MIB

    async def has_not_waited(self, slowness: float = 1.0) -> float:
        """Fail if anything has held up its event loop. Return how long the machine did.

        `slowness`: of the machine, at an earlier moment. A processor that others use is not slow by
        that measure: how late it wakes anyone up is added to the bound.
        """
        lag, calm_lag = await worst_lag(self.tenant.router), await worst_lag(self.control.router)
        machine = max(self.noise.worst, calm_lag)
        assert lag < MAX_LAG_SECONDS * _slow(slowness) + machine, (lag, machine)
        return machine

    async def p99(self, samples: int = SAMPLES) -> tuple[float, float]:
        """Return the 99th percentile of its messages, and that of the other router's."""
        times: list[tuple[float, float]] = []
        async with httpx.AsyncClient(timeout=PATIENCE, trust_env=False) as client:
            for _ in range(samples):
                times.append((await self.tenant.send(client), await self.control.send(client)))
                await asyncio.sleep(PAUSE_SECONDS)
        attacked, calm = zip(*times, strict=True)
        return sorted(attacked)[-2], sorted(calm)[-2]


def _slow(before: float) -> float:
    """Return how much longer a bound is: what waits for one slow turn waits for several."""
    longer: float = max(before, slowdown()) ** 1.5
    return longer


@asynccontextmanager
async def bystander(router: RouterProcess) -> AsyncIterator[Bystander]:
    """The router needs `POOL` and `QUEUE`."""
    elsewhere = Site(router.stdout.parent / "elsewhere")
    elsewhere.folder.mkdir()
    elsewhere.configure(POOL, queues=[QUEUE])
    async with elsewhere.router() as untouched:
        other = Bystander(Tenant(router), Tenant(untouched), Noise())
        async with listening(other.tenant.serve) as one, listening(other.control.serve) as two:
            other.tenant.url, other.control.url = one.url, two.url
            await other.p99(WARM_UP)
            other.noise.start()
            try:
                yield other
            finally:
                other.noise.end()
