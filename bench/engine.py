"""What the engine itself costs: everything but HTTP and broker calls."""

import asyncio
import time

import uvloop

from bench.engine_rig import Accepting, MadeUpQueue, OneQueue, engine
from bench.measure import spread
from bench.progress import say
from bench.report import Table

GROUPS = (1, 100, 1_000, 10_000, 100_000)
LOOK_EVERY = 0.001  # seconds
POOLS = (1, 100, 1_000, 10_000)


async def cost(total: int, groups: int, pools: int) -> float:
    """CPU microseconds per message, once every pool has had one: the first of each builds it up."""
    warm_up = max(pools, total // 10)
    total += warm_up
    queue = MadeUpQueue(total, groups, pools)
    async with engine(OneQueue(queue), Accepting(), pools):
        while queue.acked < warm_up:  # noqa: ASYNC110  an event would be looked at for each message
            await asyncio.sleep(LOOK_EVERY)
        before, done = time.process_time(), queue.acked
        await queue.done.wait()
        spent = time.process_time() - before
    if queue.acked != total:
        raise SystemExit("messages were lost: the figures mean nothing")
    return spent / (total - done) * 1e6


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
