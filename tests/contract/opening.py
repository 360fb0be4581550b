"""Opens the queue of the URI that is its argument, and closes it."""

import asyncio
import sys

from router.brokers import BrokerRegistry
from router.core.config import QueueConfig


async def main() -> None:
    queue = QueueConfig(name="many", uri=sys.argv[1])
    async with (
        BrokerRegistry(worker_id="opener", dedup_window=300.0) as brokers,
        brokers.open_queue(queue),
    ):
        pass


if __name__ == "__main__":
    asyncio.run(main())
