"""ActiveMQ Classic, spoken to over STOMP 1.2."""

import itertools
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from router.brokers.activemq_address import read_place
from router.brokers.activemq_consumer import ActiveMqBroker, ActiveMqPublisher
from router.brokers.activemq_link import open_link
from router.brokers.activemq_retry import open_outlet
from router.brokers.comebacks import Comebacks
from router.brokers.worker import Worker
from router.core.config import QueueConfig
from router.core.remembered import RememberedAcks


class ActiveMqQueues:
    """`activemq://[user:password@]host:61613[,host2:61613]/queue`, or `stomp://…`.

    `activemq://queue` is at the broker of the settings. Also `prefetch=1000`, `heartbeat=5`,
    `tls=true`, `cafile=…`.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._lines = itertools.count(1)
        self._copied = RememberedAcks()
        self._comebacks: defaultdict[str, Comebacks] = defaultdict(Comebacks)  # by the queue's URI
        self._told: set[tuple[str, str]] = set()

    async def close(self) -> None:
        """Nothing is shared between connections that has to be closed."""

    @asynccontextmanager
    async def open_queue(self, queue: QueueConfig) -> AsyncIterator[ActiveMqBroker]:
        place = read_place(queue, self._worker.settings.activemq)
        async with (
            open_link(place.servers, place.login, place.heartbeat) as link,
            open_outlet(link, place, partial(self._alarm, queue.name)) as outlet,
        ):
            broker = ActiveMqBroker(
                link,
                outlet,
                place,
                line=next(self._lines),
                copied=self._copied,
                comebacks=self._comebacks[queue.uri],
                clock=self._worker.clock,
            )
            try:
                yield broker
            finally:
                broker.interrupt()

    @asynccontextmanager
    async def open_publisher(self, queue: QueueConfig) -> AsyncIterator[ActiveMqPublisher]:
        place = read_place(queue, self._worker.settings.activemq)
        async with open_link(place.servers, place.login, place.heartbeat) as link:
            yield ActiveMqPublisher(link, place)

    def _alarm(self, queue: str, text: str) -> None:
        """Once: every connection would find out the same."""
        if (queue, text) not in self._told:
            self._told.add((queue, text))
            self._worker.warn(queue, text)
