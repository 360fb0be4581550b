"""Three routers share the partitions of strict queues and are killed one after the other.

`.venv/bin/python -m tests.acceptance.partitions nats` tries it at full length; other brokers:
rabbitmq, activemq. With `--pause`, routers stand still until others have most of their queues.

The target judges every request, as `./dev chaos --strict` does, and fails every 37th message once.
A router that was killed is started again before the next one is killed: while all live, leases
stay where they are.
"""

import argparse
import asyncio
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.acceptance.fleet import Fleet
from tests.acceptance.process import RouterProcess, eventually
from tests.acceptance.site import Site
from tests.chaos.strict import StrictOrder, StrictResult, StrictTarget
from tests.outbound.servers import listening
from tests.support.servers import nats
from tests.support.servers.activemq import ActiveMqServer
from tests.support.servers.nats import NatsServer
from tests.support.servers.postgres import postgres_server
from tests.support.servers.rabbitmq import rabbit_server

BATCH: Final = 500
PATIENCE: Final = 240.0  # for leases that end, and for what waits behind them
ROUTERS: Final = 3
POOL: Final[dict[str, object]] = {"code": "LOAD", "concurrency": 20}


@dataclass(frozen=True)
class Scale:
    brokers: Sequence[str]
    messages: int  # of each broker
    kills: int
    ttl: int = 30  # of a lease: the default
    partitions: int = 16
    groups: int = 100
    pauses: bool = False  # instead of the kills


@dataclass
class Phase:
    """What each router that lives has done between two kills."""

    held: dict[int, int]  # partitions
    delivered: dict[int, int]

    @property
    def is_spread(self) -> bool:
        """Whether no router is below half of its even share."""
        even = sum(self.delivered.values()) / len(self.delivered)
        return min(self.delivered.values()) >= even / 2


@dataclass
class PartitionsResult:
    order: StrictResult
    phases: list[Phase] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)  # with which the routers ended
    seconds: float = 0.0

    @property
    def is_good(self) -> bool:
        """Who was paused lives on with few leases or none, so pauses do not spread the work."""
        is_spread = all(phase.is_spread for phase in self.phases) or self.order.pauses > 0
        return self.order.is_good and is_spread and set(self.codes) == {0}

    def as_json(self) -> dict[str, Any]:
        shown = {key: value for key, value in self.order.as_json().items() if key != "wanted"}
        phases = [{**asdict(phase), "spread": phase.is_spread} for phase in self.phases]
        return {**shown, "good": self.is_good, "phases": phases, "seconds": round(self.seconds)}


@contextmanager
def _running(broker: str, folder: Path) -> Iterator[str]:
    """The URI of its partitions."""
    folder.mkdir()
    match broker:
        case "nats":
            with NatsServer(nats.current(), folder).running() as server:
                asyncio.run(nats.add_stream(server.port, "ORDERS"))
                yield f"nats://{server.address}/?stream=ORDERS&subject=ORDERS.{{partition}}.>"
        case "rabbitmq":
            with rabbit_server() as rabbit:
                yield f"{rabbit.url}?queue=orders.{{partition}}&type=quorum&heartbeat=2"
        case _:
            with ActiveMqServer(folder).running() as active:
                yield f"{active.url}/orders.{{partition}}?heartbeat=2"


class PartitionsRun:
    def __init__(self, scale: Scale, site: Site, tell: Callable[[str], None]) -> None:
        kills, pauses = (0, scale.kills) if scale.pauses else (scale.kills, 0)
        order = StrictResult(StrictOrder("", kills=kills, pauses=pauses, seed=1))
        self.result = PartitionsResult(order)
        self._scale = scale
        self._site = site
        self._tell = tell
        self._target = StrictTarget(order, random.Random(1))  # noqa: S311  repeatable
        self._last = {  # of each group, the number of the last message
            (broker, number * 1000 + group): 0
            for number, broker in enumerate(scale.brokers)
            for group in range(scale.groups)
        }

    def configure(self, uris: Mapping[str, str], database: str) -> None:
        entries: list[dict[str, object]] = [
            {
                "queueName": broker,
                "queueUri": uri,
                "partitions": self._scale.partitions,
                "ordering": "strict",
                "visibilityTimeout": 5,
                "retry": {"backoff": [1]},
            }
            for broker, uri in uris.items()
        ]
        self._site.configure_queues(entries, [POOL])
        self._site.settings |= {
            "STANDBY_ENABLED": "true",
            "STANDBY_SCOPE": "queue",
            "STANDBY_LOCK_URL": database,
            "STANDBY_LOCK_TTL": f"{self._scale.ttl}s",
            "MESSAGE_ROUTER_ORDER_STORE": database,
        }

    async def run(self) -> None:
        scale, order = self._scale, self.result.order
        async with (
            listening(self._target.script) as target,
            AsyncExitStack() as stack,
        ):
            fleet = Fleet(self._site, stack)
            await fleet.start(*range(ROUTERS))
            living = list(range(ROUTERS))
            for number in range(scale.kills + 1):
                held = await self._all_held(fleet, living)
                before = await _delivered(fleet, living)
                await self._publish(fleet.routers[living[0]], target.url)
                await self._accepted(order.published)
                after = await _delivered(fleet, living)
                phase = Phase(held, {each: after[each] - before[each] for each in living})
                self.result.phases.append(phase)
                self._tell(f"{phase}, accepted {self._target.accepted}")
                if number < scale.kills:
                    living = await self._kill_one(fleet, living, target.url)
            await asyncio.sleep(1.0)
            await self._start_again(fleet, living)
            self.result.codes = await fleet.stop()
        accepted = {name: group.accepted for name, group in self._target.groups.items()}
        order.lost = [
            f"{group}/{number}"
            for (_, group), last in self._last.items()
            for number in range(1, last + 1)
            if number not in accepted.get(str(group), ())
        ]

    @property
    def _slice(self) -> int:
        """Messages of each broker that are published for each kill, and between two kills."""
        return self._scale.messages // (2 * self._scale.kills + 1)

    async def _kill_one(self, fleet: Fleet, living: list[int], url: str) -> list[int]:
        """Kill or pause the first one under load; return who works from now on."""
        victim, *others = living
        back = await self._start_again(fleet, living)
        done = self._target.accepted
        await self._publish(fleet.routers[others[0]], url)
        await self._accepted(done + self._slice * len(self._scale.brokers) // 4)
        self._target.disturbed.append(time.monotonic())
        if self._scale.pauses:
            await self._pause(fleet.routers[victim])
            back = [victim]
        else:
            await fleet.routers[victim].kill()
            self.result.order.kills += 1
        self.result.order.tracebacks += fleet.routers[victim].tracebacks()
        self._tell(f"disturbed router {victim}")
        await self._accepted(self.result.order.published)
        return [*others, *back]

    async def _start_again(self, fleet: Fleet, living: Sequence[int]) -> list[int]:
        back = [each for each in range(ROUTERS) if each not in living]
        await fleet.start(*back)
        return back

    async def _pause(self, router: RouterProcess) -> None:
        """For so long that the others have most of its queues when it goes on."""
        router.send(signal.SIGSTOP)
        await asyncio.sleep(1.5 * self._scale.ttl)
        self._target.disturbed.append(time.monotonic())
        router.send(signal.SIGCONT)
        self.result.order.pauses += 1

    async def _accepted(self, number: int) -> None:
        await eventually(lambda: self._target.accepted >= number, within=PATIENCE)

    async def _publish(self, router: RouterProcess, url: str) -> None:
        for broker in self._scale.brokers:
            groups = [group for each, group in self._last if each == broker]
            bodies = []
            for n in range(self._slice):
                group = groups[n % len(groups)]
                self._last[broker, group] += 1
                bodies.append(
                    {
                        "id": f"{group}-{self._last[broker, group]}",
                        "messageGroupId": f"group-{group}",
                        "poolCode": POOL["code"],
                        "mediationTarget": f"{url}/{group}/{self._last[broker, group]}",
                    }
                )
            for start in range(0, len(bodies), BATCH):
                await router.publish(bodies[start : start + BATCH], queue=broker)
            self.result.order.published += len(bodies)

    async def _all_held(self, fleet: Fleet, living: Sequence[int]) -> dict[int, int]:
        """How many partitions each has, once all of them have a router."""
        wanted = self._scale.partitions * len(self._scale.brokers)
        async with asyncio.timeout(PATIENCE):
            while True:
                held = {each: await _held_by(fleet.routers[each]) for each in living}
                if sum(held.values()) == wanted:
                    return held
                await asyncio.sleep(0.2)


async def _held_by(router: RouterProcess) -> int:
    leases: list[dict[str, Any]] = (await router.get("/monitoring/leases")).json()
    return sum(each["phase"] == "HELD" for each in leases)


async def _delivered(fleet: Fleet, living: Sequence[int]) -> dict[int, int]:
    found = {}
    for each in living:
        stats = (await fleet.routers[each].get("/monitoring/queue-stats")).json()
        found[each] = sum(queue["totalConsumed"] for queue in stats.values())
    return found


async def run_partitions(
    scale: Scale, folder: Path, uris: Mapping[str, str], tell: Callable[[str], None]
) -> PartitionsResult:
    began = time.monotonic()
    with postgres_server() as database:
        partitions = PartitionsRun(scale, Site(folder), tell)
        partitions.configure(uris, database.url)
        await partitions.run()
    partitions.result.seconds = time.monotonic() - began
    return partitions.result


@contextmanager
def running_brokers(brokers: Sequence[str], folder: Path) -> Iterator[Mapping[str, str]]:
    """By broker, the URI of its partitions. They start side by side."""
    with ExitStack() as stack, ThreadPoolExecutor() as starters:
        started = {
            broker: starters.submit(stack.enter_context, _running(broker, folder / broker))
            for broker in brokers
        }
        yield {broker: starting.result() for broker, starting in started.items()}


def main() -> int:
    reader = argparse.ArgumentParser(description=__doc__)
    reader.add_argument("broker", choices=("nats", "rabbitmq", "activemq"))
    reader.add_argument("--messages", type=int, default=20_000)
    reader.add_argument("--kills", type=int, default=4)
    reader.add_argument("--pause", action="store_true", help="pause them instead")
    reader.add_argument("--ttl", type=int, default=Scale.ttl)
    given = reader.parse_args()
    ttl, pauses = given.ttl, given.pause
    scale = Scale([given.broker], given.messages, given.kills, ttl=ttl, pauses=pauses)
    with (
        tempfile.TemporaryDirectory(prefix="partitions-") as folder,
        running_brokers(scale.brokers, Path(folder)) as uris,
    ):
        result = asyncio.run(run_partitions(scale, Path(folder), uris, print))
    sys.stdout.write(f"{json.dumps(result.as_json(), indent=2)}\n")
    return 0 if result.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
