"""Which groups of a strict queue are in the order store, or on their way there (ORD-4)."""

from collections.abc import Collection, Iterable, Iterator
from hashlib import blake2b
from typing import Final

from router.core.message import DEFAULT_GROUP, Message, Mode

MAX_NAME_CHARACTERS: Final = 100  # that a work queue takes
ORDER_PREFIX: Final = "order:"  # of the names of work queues that are order stores
MAX_SHARED_MESSAGES: Final = 100_000  # of a queue (ORD-13)
MAX_UNSENT_MESSAGES: Final = 1_000  # of a queue that are stored although nothing was sent (ORD-6)

MAX_FIRST_REMEMBERED: Final = 1_000  # messages with which groups became stored

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


class StoredGroups:
    """A group is in here from the moment its first message is chosen for the store.

    It stays until the store was found to have nothing of it, while nothing was on its way. So it
    may be in here for a moment too long, and never too short.

    There may be hundreds of thousands, so each costs no more than its name and a number.
    """

    def __init__(self) -> None:
        # By pool, then group: how many messages are on their way.
        self._moving: dict[str, dict[str, int]] = {}
        self._first: dict[GroupKey, str] = {}  # with which they became stored, of the latest
        self._asked: set[GroupKey] = set()  # about which the store is being asked right now

    def begin(self, group: GroupKey, message_id: str) -> str:
        """Note that a message is on its way: before anything is awaited.

        Return the message with which its group became stored; "": not known.
        """
        pool, name = group
        groups = self._moving.setdefault(pool, {})
        if name not in groups:
            self._first[group] = message_id
            if len(self._first) > MAX_FIRST_REMEMBERED:
                del self._first[next(iter(self._first))]
        groups[name] = groups.get(name, 0) + 1
        self._asked.discard(group)
        return self._first.get(group, "")

    def end(self, group: GroupKey, *, forget: bool = False) -> None:
        """Note that a message has arrived, or does not go there after all.

        `forget`: no one asks whether the group is stored, because everything is.
        """
        pool, name = group
        self._moving[pool][name] -= 1
        if forget and not self._moving[pool][name]:
            self._forget(group)

    def load(self, groups: Iterable[GroupKey]) -> None:
        """Note what the store has."""
        for group in groups:
            self._moving.setdefault(group[0], {}).setdefault(group[1], 0)
            self._asked.discard(group)

    def ask(self, groups: Iterable[GroupKey]) -> Collection[GroupKey]:
        """Return those about which the store can be asked: nothing of them is on its way."""
        self._asked = {
            group for group in groups if self._moving.get(group[0], {}).get(group[1]) == 0
        }
        return tuple(self._asked)

    def answer(self, stored: Collection[GroupKey]) -> None:
        """Forget those that the store does not have, unless a message went there meanwhile."""
        for group in self._asked - set(stored):
            self._forget(group)

    def _forget(self, group: GroupKey) -> None:
        pool, name = group
        del self._moving[pool][name]
        self._first.pop(group, None)
        if not self._moving[pool]:
            del self._moving[pool]

    def __contains__(self, group: GroupKey | None) -> bool:
        return group is not None and group[1] in self._moving.get(group[0], ())

    def __iter__(self) -> Iterator[GroupKey]:
        return ((pool, name) for pool, groups in self._moving.items() for name in groups)

    def __bool__(self) -> bool:
        return bool(self._moving)
