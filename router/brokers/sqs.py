"""Queues of Amazon SQS, standard and FIFO, or of a stand-in that speaks its JSON protocol."""

import asyncio
import logging
import math
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

from router.brokers.sqs_address import SqsAddress, read_address
from router.brokers.sqs_client import Account, SqsClient
from router.brokers.sqs_publisher import SqsPublisher
from router.brokers.sqs_queue import Polling, SqsBroker, SqsQueue
from router.brokers.sqs_wire import (
    GET_QUEUE_ATTRIBUTES,
    GET_QUEUE_URL,
    GetQueueAttributes,
    GetQueueUrl,
)
from router.brokers.worker import Worker
from router.core.config import QueueConfig
from router.ports import BrokerError

log = logging.getLogger(__name__)

CALL_TIMEOUT: Final = 10.0
POLL_GRACE: Final = 5.0  # seconds that a poll may take beyond its own wait
CALLS_AT_ONCE: Final = 10
DEFAULT_LEASE: Final = 30.0

_LEASE: Final = "VisibilityTimeout"


class SqsQueues:
    """`https://host/account/name`, or `sqs://name`, whose URL is asked for."""

    def __init__(self, worker: Worker) -> None:
        self._settings = worker.settings.sqs
        self._account: Account | None = None
        self._leaving: set[asyncio.Task[None]] = set()  # closed, but for their last poll

    async def close(self) -> None:
        """Polls end by themselves; what they still bring is given back."""
        if self._leaving:
            await asyncio.wait(self._leaving)

    @asynccontextmanager
    async def open_queue(self, queue: QueueConfig) -> AsyncIterator[SqsBroker]:
        broker = await self._connect(queue)
        try:
            yield broker
        finally:
            broker.interrupt()
            await self._leave(broker)

    @asynccontextmanager
    async def open_publisher(self, queue: QueueConfig) -> AsyncIterator[SqsPublisher]:
        address = read_address(queue, self._settings)
        client = await self._client(address, 1, CALL_TIMEOUT)
        try:
            url = await _find_url(address, client)
            yield SqsPublisher(client, url, is_fifo=address.is_fifo)
        finally:
            await client.close()

    async def _connect(self, queue: QueueConfig) -> SqsBroker:
        address = read_address(queue, self._settings)
        polling = Polling(self._settings.max_messages, round(self._settings.wait))
        async with AsyncExitStack() as unless_connected:
            calls = await self._client(address, CALLS_AT_ONCE, CALL_TIMEOUT)
            unless_connected.push_async_callback(calls.close)
            polls = await self._client(address, 1, polling.wait + POLL_GRACE)
            unless_connected.push_async_callback(polls.close)
            url = await _find_url(address, calls)
            lease = max(await _find_lease(queue, url, calls), self._settings.shortest_lease)
            unless_connected.pop_all()
        return SqsBroker(SqsQueue(url, address.is_fifo, math.ceil(lease)), polling, polls, calls)

    async def _client(self, address: SqsAddress, connections: int, timeout: float) -> SqsClient:
        if self._account is None:
            self._account = await Account.find()
        client = SqsClient(
            address.endpoint,
            address.region,
            self._account,
            connections=connections,
            timeout=timeout,
        )
        await client.open()
        return client

    async def _leave(self, broker: SqsBroker) -> None:
        """At once, unless a poll is under way: nobody has to wait for that, but we do."""
        if not broker.is_polling:
            await _close(broker)
            return
        leaving = asyncio.get_running_loop().create_task(_close(broker), name="sqs last poll")
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)


async def _close(broker: SqsBroker) -> None:
    try:
        await broker.close()
    except BrokerError as error:
        log.info("what a last poll brought returns when its lease ends: %s", error)


async def _find_url(address: SqsAddress, client: SqsClient) -> str:
    if address.url is not None:
        return address.url
    request = GetQueueUrl(address.name)
    return (await client.call(GET_QUEUE_URL, request)).queue_url


async def _find_lease(queue: QueueConfig, url: str, client: SqsClient) -> float:
    """Asked for even when it is given: a queue that is not there is better known now."""
    request = GetQueueAttributes(url, (_LEASE,))
    reply = await client.call(GET_QUEUE_ATTRIBUTES, request)
    return queue.visibility_timeout or float(reply.attributes.get(_LEASE, DEFAULT_LEASE))
