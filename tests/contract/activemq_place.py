"""An ActiveMQ of our own, as the contract's cases use it."""

import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from msgspec.structs import replace

from router.core.config import QueueConfig
from tests.contract.cases import Case
from tests.support.servers.activemq import ActiveMqServer


class ActiveMqPlace:
    def __init__(self, server: ActiveMqServer) -> None:
        self.server = server
        self._numbers = itertools.count(1)

    @property
    def env(self) -> Mapping[str, str]:
        return {}

    def new_queue(self) -> str:
        return f"orders-{next(self._numbers)}"

    def prepare(self, case: Case) -> Case:
        uri = case.uri.format(url=self.server.url, queue=self.new_queue())
        return replace(case, uri=uri, outage=self._frozen)

    @asynccontextmanager
    async def _frozen(self, _: QueueConfig) -> AsyncIterator[None]:
        """Shorter than it may be silent: with its connection a hand-over would be gone."""
        self.server.freeze()
        try:
            yield
        finally:
            self.server.thaw()
