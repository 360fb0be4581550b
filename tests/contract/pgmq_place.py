"""Where the PGMQ cases have their queues: one server with PGMQ, a queue for each test."""

import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from msgspec.structs import replace

from router.core.config import QueueConfig
from tests.contract.cases import Case
from tests.support.servers.postgres import PostgresServer


class PgmqPlace:
    def __init__(self, server: PostgresServer, address: str | None = None) -> None:
        self.server = server
        self._address = (address or server.url).replace("postgresql:", "pgmq:")
        self._numbers = itertools.count(1)

    @property
    def env(self) -> Mapping[str, str]:
        return {}

    def new_queue(self) -> str:
        """The name of a queue that nobody has used."""
        name = f"orders_{id(self)}_{next(self._numbers)}"
        self.server.add_pgmq_queue(name)
        return name

    def uri(self, name: str, options: str = "") -> str:
        return f"{self._address}?queue={name}{options}"

    def prepare(self, case: Case) -> Case:
        uri = self.uri(self.new_queue(), case.uri)
        return replace(case, uri=uri, outage=self._stopped)

    @asynccontextmanager
    async def _stopped(self, _: QueueConfig) -> AsyncIterator[None]:
        self.server.stop()
        try:
            yield
        finally:
            self.server.start()
