"""Where the Redis cases have their queues: a stream for each test."""

import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from msgspec.structs import replace

from router.core.config import QueueConfig
from tests.contract.cases import Case
from tests.support.servers.redis import RedisServer


class RedisPlace:
    def __init__(self, server: RedisServer) -> None:
        self.server = server
        self._numbers = itertools.count(1)

    @property
    def env(self) -> Mapping[str, str]:
        return {}

    def prepare(self, case: Case) -> Case:
        uri = f"{self.server.url}?stream=orders-{next(self._numbers)}"
        return replace(case, uri=uri, outage=self._frozen)

    @asynccontextmanager
    async def _frozen(self, _: QueueConfig) -> AsyncIterator[None]:
        self.server.freeze()
        try:
            yield
        finally:
            self.server.thaw()
