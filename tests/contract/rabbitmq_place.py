"""A RabbitMQ of our own, as the contract's cases use it."""

import itertools
from collections.abc import Mapping

from msgspec.structs import replace

from tests.contract.cases import Case
from tests.support.servers.rabbitmq import RabbitServer


class RabbitPlace:
    def __init__(self, server: RabbitServer) -> None:
        self.server = server
        self._numbers = itertools.count(1)

    @property
    def env(self) -> Mapping[str, str]:
        return {}

    def new_queue(self) -> str:
        return f"orders-{next(self._numbers)}"

    def prepare(self, case: Case) -> Case:
        """No outage in the contract's sense: with its connection a hand-over is gone."""
        uri = case.uri.format(url=self.server.url, queue=self.new_queue())
        return replace(case, uri=uri)
