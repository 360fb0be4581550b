"""Where the NATS cases have their queues: a stream for each test."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from msgspec.structs import replace

from router.core.config import QueueConfig
from tests.contract.cases import Case
from tests.support.servers.nats import NatsServer, add_stream


class NatsPlace:
    def __init__(self, server: NatsServer) -> None:
        self._server = server
        self._numbers = itertools.count(1)

    @property
    def env(self) -> Mapping[str, str]:
        return {}

    def prepare(self, case: Case) -> Case:
        stream = f"S{next(self._numbers)}"
        asyncio.run(add_stream(self._server.port, stream))
        return replace(
            case, uri=f"nats://{self._server.address}/?stream={stream}", outage=self._frozen
        )

    @asynccontextmanager
    async def _frozen(self, _: QueueConfig) -> AsyncIterator[None]:
        self._server.freeze()
        try:
            yield
        finally:
            self._server.thaw()
