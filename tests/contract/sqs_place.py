"""A stand-in for SQS, as the contract's cases use it."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from msgspec.structs import replace

from router.core.config import QueueConfig
from tests.contract.cases import Case
from tests.support.servers.sqs import ENV, SqsServer


class SqsPlace:
    def __init__(self, server: SqsServer, *, survives_a_stop: bool) -> None:
        self.server = server
        self._survives_a_stop = survives_a_stop

    @property
    def env(self) -> Mapping[str, str]:
        return ENV

    def prepare(self, case: Case) -> Case:
        url = self.server.new_queue(fifo=case.uri.endswith(".fifo"))
        return replace(case, uri=url, outage=self.stopped if self._survives_a_stop else self.frozen)

    @asynccontextmanager
    async def stopped(self, queue: QueueConfig) -> AsyncIterator[None]:
        del queue
        await asyncio.to_thread(self.server.stop)
        try:
            yield
        finally:
            await asyncio.to_thread(self.server.start)

    @asynccontextmanager
    async def frozen(self, queue: QueueConfig) -> AsyncIterator[None]:
        del queue
        self.server.freeze()
        try:
            yield
        finally:
            self.server.thaw()
