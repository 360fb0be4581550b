"""What a broker's adapter costs: receive and ACK, CPU of our process per message, real servers."""

import time
from collections.abc import Sequence
from typing import Final

import uvloop

from bench import brokers
from bench.brokers import SETTINGS, Unavailable
from bench.load import Load
from bench.measure import spread
from bench.report import ReportTable, say
from bench.trial import fill
from router.brokers import BrokerRegistry
from router.core.config import QueueConfig

BATCH: Final = 50  # what the router asks for at most
GROUPS: Final = 1_000


def measure(names: Sequence[str], messages: int, rounds: int) -> ReportTable:
    table = ReportTable("adapters", "A broker's adapter alone: receive and ACK", ("broker",))
    for name in names:
        say(f"adapters: {name}")
        try:
            with brokers.running(name) as place:
                if place.lives_in_router:
                    continue
                costs = [uvloop.run(_cost(place.new_queue(), messages)) for _ in range(rounds)]
        except Unavailable as reason:
            say(f"{name}: left out, {reason}")
            continue
        table.add((name,), {"CPU µs": spread(costs)})
    return table


async def _cost(queue: QueueConfig, messages: int) -> float:
    await fill(queue, Load(messages=messages, groups=GROUPS, targets=["http://127.0.0.1/hook"]))
    async with (
        BrokerRegistry(worker_id="bench", dedup_window=0.0, settings=SETTINGS) as registry,
        registry.open_queue(queue) as broker,
    ):
        before, received = time.process_time(), 0
        while received < messages:
            batch = await broker.receive(BATCH)
            received += len(batch)
            if batch:
                await broker.ack([received.handle for received in batch])
        return (time.process_time() - before) / messages * 1e6
