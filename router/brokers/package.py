"""The value that each package exports about its broker, named BROKER.

A package outside of this project does the same, and names the value as an entry point of the group
`message_router.brokers`. See README.md.
"""

from collections.abc import Callable
from typing import Any, Protocol

from router.brokers.workers import ConsumerIdentity
from router.core.broker import BrokerFacts
from router.ports import Brokers


class Adapter(Brokers, Protocol):
    """All queues of one kind of broker, and what outlives their connections."""

    async def close(self) -> None: ...


class BrokerPackage(BrokerFacts, frozen=True, kw_only=True, eq=False):
    """The facts about a broker, and how its queues are opened.

    It imports no client: every start reads it, and few installations have all clients.
    """

    make: Callable[[ConsumerIdentity], Adapter]  # imports the client
    settings: type[Any] | None = None  # a frozen dataclass of `env` and `optional` fields
