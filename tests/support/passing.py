"""A broker that hands every call on to another: the base of those that watch or break calls."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from msgspec.structs import replace

from router.core.config import QueueConfig
from router.core.message import Handle, ReceivedMessage
from router.ports import Broker, Depth, Finish, Finisher, Nack, Traits, Unsettled

T = TypeVar("T")


class PassingBroker:
    def __init__(self, broker: Broker) -> None:
        self.broker = broker

    async def carry(self, call: Callable[[], Awaitable[T]]) -> T:
        """Every call that may wait goes through here."""
        return await call()

    @property
    def holds_groups(self) -> bool:
        return self.broker.holds_groups

    @property
    def lease_seconds(self) -> float | None:
        return self.broker.lease_seconds

    @property
    def traits(self) -> Traits:
        traits = self.broker.traits
        return traits if traits.finisher is None else replace(traits, finisher=self)

    def stop(self) -> None:
        self.broker.stop()

    async def receive(self, limit: int) -> Sequence[ReceivedMessage]:
        return await self.carry(lambda: self.broker.receive(limit))

    async def ack(self, handles: Sequence[Handle], *, error: str = "") -> Sequence[Unsettled]:
        return await self.carry(lambda: self.broker.ack(handles, error=error))

    async def nack(self, items: Sequence[Nack]) -> Sequence[Unsettled]:
        return await self.carry(lambda: self.broker.nack(items))

    async def extend(self, handles: Sequence[Handle], seconds: float) -> Sequence[Unsettled]:
        return await self.carry(lambda: self.broker.extend(handles, seconds))

    async def depth(self) -> Depth | None:
        return await self.carry(self.broker.depth)

    def takes(self, queue: QueueConfig) -> bool:
        return self._finisher.takes(queue)

    async def finish(self, items: Sequence[Finish]) -> Sequence[Unsettled]:
        return await self.carry(lambda: self._finisher.finish(items))

    @property
    def _finisher(self) -> Finisher:
        finisher = self.broker.traits.finisher
        assert finisher is not None
        return finisher
