"""Where the PostgreSQL cases have their queues: one server, a queue for each test."""

import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from msgspec.structs import replace

from router.core.config import QueueConfig
from tests.contract.cases import Case
from tests.support.servers.postgres import PostgresServer


class PostgresPlace:
    def __init__(self, server: PostgresServer, address: str | None = None) -> None:
        self.server = server
        self._address = address or server.url
        self._numbers = itertools.count(1)

    @property
    def env(self) -> Mapping[str, str]:
        return {}

    def new_uri(self, options: str = "") -> str:
        return f"{self._address}?queue=orders-{id(self)}-{next(self._numbers)}{options}"

    def prepare(self, case: Case) -> Case:
        return replace(case, uri=self.new_uri(), outage=self._stopped)

    @asynccontextmanager
    async def _stopped(self, _: QueueConfig) -> AsyncIterator[None]:
        self.server.stop()
        try:
            yield
        finally:
            self.server.start()
