"""Handles of brokers that take back what a connection holds when it ends."""

from collections.abc import Sequence
from typing import Final, Generic, TypeVar, cast

from msgspec import Struct

from router.core.message import Handle
from router.ports import StaleLease, Unsettled

T = TypeVar("T")

_STALE: Final = "it was settled already, or came over another connection"


class Ticket(Struct, frozen=True):
    """A handle that is good on its own connection only: numbers start again on the next one."""

    connection: int
    number: int


class OpenTickets(Generic[T]):
    """What one connection has handed over and nobody has settled, by ticket number.

    Each ticket can be claimed once: brokers close a connection on which a message is settled twice.
    """

    def __init__(self, connection: int) -> None:
        self._connection = connection
        self._open: dict[int, T] = {}

    def __len__(self) -> int:
        return len(self._open)

    def issue(self, number: int, item: T) -> Ticket:
        self._open[number] = item
        return Ticket(self._connection, number)

    def claim(self, handle: Handle) -> T:
        """Take what the handle stands for, to settle it. Raises StaleLease."""
        if not self._is_open(handle):
            raise StaleLease(_STALE)
        return self._open.pop(cast("Ticket", handle).number)

    def claim_all(self, handles: Sequence[Handle]) -> tuple[list[T], list[Unsettled]]:
        """Take what can still be settled; return the rest as stale."""
        claimed: list[T] = []
        stale: list[Unsettled] = []
        for handle in handles:
            if self._is_open(handle):
                claimed.append(self._open.pop(cast("Ticket", handle).number))
            else:
                stale.append(Unsettled(handle, _STALE, stale=True))
        return claimed, stale

    def stale(self, handles: Sequence[Handle]) -> list[Unsettled]:
        return [
            Unsettled(handle, _STALE, stale=True) for handle in handles if not self._is_open(handle)
        ]

    def _is_open(self, handle: Handle) -> bool:
        ticket = cast("Ticket", handle)
        return ticket.connection == self._connection and ticket.number in self._open
