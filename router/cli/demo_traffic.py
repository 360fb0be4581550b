"""The demo's configuration, and its stream of messages."""

import asyncio
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from router.engine.publishing import MAX_MESSAGES, BrokeOff, QueuePublisher

QUEUE: Final = "demo"
_TICK_SECONDS: Final = 0.05  # between two publications


@dataclass(frozen=True, slots=True)
class DemoPool:
    code: str
    concurrency: int
    share: int  # of the messages, in relation to the others'
    groups: int
    rate_per_minute: int | None = None


POOLS: Final = (
    DemoPool("ORDERS", concurrency=10, share=6, groups=40),
    DemoPool("MAIL", concurrency=5, share=3, groups=12, rate_per_minute=6000),
    DemoPool("REPORTS", concurrency=2, share=1, groups=3),
)


def demo_env(folder: Path, port: int) -> dict[str, str]:
    """Return the settings of the demo's router. The real environment does not matter."""
    pools = [
        {
            "code": pool.code,
            "concurrency": pool.concurrency,
            "rateLimitPerMinute": pool.rate_per_minute,
            "retry": {"backoff": [1, 2, 5]},  # the default 30 s would outlast most demos
        }
        for pool in POOLS
    ]
    document = {"queues": [{"queueName": QUEUE, "queueUri": QUEUE}], "processingPools": pools}
    routing = folder / "routing.json"
    routing.write_bytes(msgspec.json.encode(document))
    return {
        "MESSAGE_ROUTER_CONFIG_URL": routing.as_uri(),
        "MESSAGE_ROUTER_QUEUE_TYPE": "EMBEDDED",
        "MESSAGE_ROUTER_STATE_DIR": str(folder),
        "MESSAGE_ROUTER_HOST": "127.0.0.1",
        "MESSAGE_ROUTER_PORT": str(port),
        "MESSAGE_ROUTER_SHUTDOWN_TIMEOUT": "5s",
    }


class Traffic:
    """Publishes at a steady rate until told to stop, and counts what the queue accepted."""

    def __init__(self, target: str, rate: float, new_id: Callable[[], str]) -> None:
        self.published = 0
        self._rate = rate
        self._bodies = _bodies(target, new_id)

    async def flow(self, publishing: QueuePublisher, stop: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        started, done = loop.time(), 0
        while not stop.is_set():
            await asyncio.sleep(_TICK_SECONDS)
            due = int((loop.time() - started) * self._rate)
            # After a pause of the machine it continues without making up for all of it.
            bodies = list(itertools.islice(self._bodies, min(due - done, MAX_MESSAGES)))
            try:
                self.published += (await publishing.publish(QUEUE, bodies)).accepted
            except BrokeOff as error:
                self.published += len(error.accepted)
            done = due


def _bodies(target: str, new_id: Callable[[], str]) -> Iterator[bytes]:
    while True:
        (pool,) = random.choices(POOLS, [pool.share for pool in POOLS])  # noqa: S311  a demo
        yield msgspec.json.encode(
            {
                "id": new_id(),
                "poolCode": pool.code,
                "mediationTarget": target,
                "messageGroupId": f"{pool.code.lower()}-{random.randrange(pool.groups)}",  # noqa: S311  a demo
            }
        )
