"""Which groups of a strict queue are in the order store, or on their way there (ORD-4)."""

from collections.abc import Collection, Iterable
from hashlib import blake2b
from typing import Final

from msgspec import Struct

from router.core.message import DEFAULT_GROUP, Message, Mode

MAX_NAME_CHARACTERS: Final = 100  # that a work queue takes
ORDER_PREFIX: Final = "order:"  # of the names of work queues that are order stores
MAX_SHARED_MESSAGES: Final = 100_000  # of a queue (ORD-13)
MAX_UNSENT_MESSAGES: Final = 1_000  # of a queue that are stored although nothing was sent (ORD-6)

# Of a group in the order store: the pool that messages name, and their group.
GroupKey = tuple[str, str]


def group_in_store(message: Message, *, is_parallel: bool = False) -> str | None:
    """Return the group in whose order a message is stored; None: it is stored alone (ORD-6).

    `is_parallel`: in its pool, messages without a group id depend on no other.
    """
    if message.mode is not Mode.BLOCK_ON_ERROR or (message.group is None and is_parallel):
        return None
    return message.group or DEFAULT_GROUP


def store_name(queue: str) -> str:
    """Return what the work queue is called that stores the groups of a queue."""
    name = f"{ORDER_PREFIX}{queue}"
    if len(name) <= MAX_NAME_CHARACTERS:
        return name
    digest = blake2b(queue.encode(), digest_size=16).hexdigest()
    return f"{name[: MAX_NAME_CHARACTERS - len(digest) - 1]}-{digest}"


class _Stored(Struct):
    moving: int = 0  # messages on their way to the store
    moves: int = 0  # how many ever were
    first: str = ""  # the message with which it became stored; "": not known


class StoredGroups(dict[GroupKey, _Stored]):
    """A group is in here from the moment its first message is chosen for the store.

    It stays until the store was found to have nothing of it, while nothing was on its way. So it
    may be in here for a moment too long, and never too short.
    """

    def begin(self, group: GroupKey, message_id: str) -> str:
        """Note that a message is on its way: before anything is awaited.

        Return the message with which its group became stored.
        """
        stored = self.get(group)
        if stored is None:
            stored = self[group] = _Stored(first=message_id)
        stored.moving += 1
        stored.moves += 1
        return stored.first

    def end(self, group: GroupKey, *, forget: bool = False) -> None:
        """Note that a message has arrived, or does not go there after all.

        `forget`: nobody asks whether the group is stored, because everything is.
        """
        stored = self[group]
        stored.moving -= 1
        if forget and not stored.moving:
            del self[group]

    def load(self, groups: Iterable[GroupKey]) -> None:
        """Note what the store has."""
        for group in groups:
            self.setdefault(group, _Stored())

    def ask(self, groups: Iterable[GroupKey]) -> dict[GroupKey, int]:
        """Return those about which the store can be asked: nothing of them is on its way."""
        known = [group for group in groups if group in self and not self[group].moving]
        return {group: self[group].moves for group in known}

    def answer(self, asked: dict[GroupKey, int], stored: Collection[GroupKey]) -> None:
        """Forget those that the store does not have, unless a message went there meanwhile."""
        for group in asked.keys() - set(stored):
            known = self.get(group)
            if known is not None and known.moves == asked[group]:
                del self[group]
