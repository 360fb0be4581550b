"""Pure rules of flow control: what a pool takes, and when a queue is searched."""

from typing import Final

from msgspec import Struct

from router.core.config import PoolConfig

HELD_LOOK_AHEAD_MESSAGES: Final = 2_000  # of a queue, for full pools (ROUTE-5)
CAPACITY_PER_WORKER: Final = 20  # messages
MIN_CAPACITY_MESSAGES: Final = 50
SOON_DELIVERED_SECONDS: Final = 10.0
FIRST_TAKE_AHEAD: Final = 2  # messages for each worker, before the first delivery
IDLE_SECONDS: Final = 60.0
SEARCH_PAUSES_SECONDS: Final = (60.0, 120.0, 240.0, 300.0)  # the last one again and again


def pool_capacity(config: PoolConfig) -> int:
    """Return how many messages a pool may hold without an open request (POOL-1)."""
    return max(config.concurrency * CAPACITY_PER_WORKER, MIN_CAPACITY_MESSAGES)


def take_ahead(config: PoolConfig, mean_seconds: float | None) -> int:
    """Return how many messages may wait in a pool that wait for no other of their group (POOL-1).

    As many as it delivers in ten seconds, by the mean time of its deliveries and its rate limit.
    `mean_seconds`: None before the first one has ended.
    """
    workers, most = config.concurrency, pool_capacity(config)
    if config.take_ahead is not None:
        return min(config.take_ahead * workers, most)
    if mean_seconds is None:
        return FIRST_TAKE_AHEAD * workers
    soon = possible_rate(config, mean_seconds) * SOON_DELIVERED_SECONDS
    return int(min(max(soon, workers), most))


def possible_rate(config: PoolConfig, mean_seconds: float) -> float:
    """Return how many messages a pool can deliver in a second if each takes this long."""
    rate = config.concurrency / max(mean_seconds, 0.001)
    return rate if config.rate_per_minute is None else min(rate, config.rate_per_minute / 60)


class Search(Struct, frozen=True):
    """When a queue whose pools are all full is searched for messages of other pools (ROUTE-5)."""

    due_at: float = float("-inf")
    in_vain: int = 0  # searches that found nothing, one after the other

    def ended(self, now: float) -> "Search":
        """Return when to search again: this one has found nothing."""
        pause = SEARCH_PAUSES_SECONDS[min(self.in_vain, len(SEARCH_PAUSES_SECONDS) - 1)]
        return Search(now + pause, self.in_vain + 1)
