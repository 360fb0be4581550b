"""What the engine itself costs: everything but HTTP and broker calls."""

import asyncio
import statistics
import time

import uvloop

from bench.engine_rig import MadeUpQueue, OneQueue, Yes, engine

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


def report(messages: int, rounds: int) -> None:
    cases = [(groups, 1) for groups in GROUPS] + [(1_000, pools) for pools in POOLS[1:]]
    figures: dict[tuple[int, int], list[float]] = {case: [] for case in cases}
    for _ in range(rounds):
        for case in cases:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                figures[case].append(runner.run(cost(messages, *case)))
    print(f"{'groups':>8} {'pools':>6}  CPU µs per message (median, min-max of {rounds})")
    for (groups, pools), costs in figures.items():
        low, high = min(costs), max(costs)
        print(f"{groups:>8} {pools:>6}  {statistics.median(costs):6.1f}  ({low:.1f}-{high:.1f})")
