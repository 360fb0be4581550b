"""One process among several on a file. Arguments: the queue's URI, worker's id, limit, lease.

Writes a line for each message when it has it, and one just before it settles it. Ends when the
queue is empty. With a limit of 0 it takes ten and settles none.
"""

import asyncio
import random
import sys
import time
from collections.abc import Sequence

from router.brokers import BrokerRegistry
from router.core.config import QueueConfig
from router.core.message import ReceivedMessage
from router.ports import Broker


def write(verb: str, worker: str, batch: Sequence[ReceivedMessage]) -> None:
    for received in batch:
        sys.stdout.write(f"{time.monotonic()} {verb} {worker} {received.body.decode()}\n")
    sys.stdout.flush()


async def consume(uri: str, worker: str, limit: int, lease: float) -> None:
    queue = QueueConfig(name="orders", uri=uri, visibility_timeout=lease)
    async with (
        BrokerRegistry(worker_id=worker, dedup_window=300.0) as brokers,
        brokers.open_queue(queue) as broker,
    ):
        while batch := await receive(broker, limit or 10):
            write("claimed", worker, batch)
            if not limit:
                await asyncio.sleep(600)
            await asyncio.sleep(random.uniform(0, 0.004))  # noqa: S311 only to vary the race
            write("settled", worker, batch)
            await broker.ack([received.handle for received in batch])


async def receive(broker: Broker, limit: int) -> Sequence[ReceivedMessage]:
    """Nothing for a second: there is nothing left."""
    end = asyncio.get_running_loop().call_later(1.0, broker.stop)
    batch = await broker.receive(limit)
    end.cancel()
    return batch


if __name__ == "__main__":
    asyncio.run(consume(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])))
