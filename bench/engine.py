"""What the engine itself costs: everything but HTTP and broker calls."""

import asyncio
import time

import uvloop

from bench.engine_rig import MadeUpQueue, OneQueue, Yes, engine
from bench.measure import spread
from bench.progress import say
from bench.report import Table

GROUPS = (1, 100, 1_000, 10_000, 100_000)
POOLS = (1, 100, 1_000, 10_000)


async def cost(total: int, groups: int, pools: int) -> float:
    """CPU microseconds per message."""
    queue = MadeUpQueue(total, groups, pools)
    async with engine(OneQueue(queue), Yes(), pools):
        before = time.process_time()
        await queue.done.wait()
        spent = time.process_time() - before
    if queue.acked != total:
        raise SystemExit("messages were lost: the figures mean nothing")
    return spent / total * 1e6


def measure(messages: int, rounds: int) -> Table:
    cases = [(groups, 1) for groups in GROUPS] + [(1_000, pools) for pools in POOLS[1:]]
    found: dict[tuple[int, int], list[float]] = {case: [] for case in cases}
    for number in range(rounds):
        say(f"engine, round {number + 1} of {rounds}")
        for case in cases:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                found[case].append(runner.run(cost(messages, *case)))
    table = Table("engine", "The engine alone: no HTTP, no broker", ("groups", "pools"))
    for (groups, pools), costs in found.items():
        table.add((f"{groups:,}", f"{pools:,}"), {"CPU µs": spread(costs)})
    return table
