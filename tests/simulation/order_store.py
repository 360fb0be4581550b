"""The order store of a world: the real one, which can be away, and tells what is put into it."""

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

from router.core.config import QueueConfig
from router.core.order import GroupKey
from router.engine.transfer import OrderStore
from router.ports import (
    Disconnected,
    HeldLetter,
    OrderLog,
    OrderLogs,
    StoredGroup,
    StoredMessage,
    StoreSize,
)
from tests.simulation.loop import Process


class StoreSite(Protocol):
    """What the store needs of its world."""

    store_fails: bool

    async def stored(self, process: Process, queue: str, bodies: Sequence[bytes]) -> None: ...


def order_store(
    logs: OrderLogs,
    site: StoreSite,
    process: Process,
    directory: Path,
    new_key: Callable[[], str],
    *,
    is_shared: bool,
) -> OrderStore:
    """Return the order store of a process: a file in this directory."""

    def uri_of(name: str) -> str:
        return f"sqlite:///{directory}/order.db?queue={quote(name, safe='')}&audit=0"

    logs = _SimLogs(logs, site, process)
    return OrderStore(logs=logs, uri_of=uri_of, new_key=new_key, is_shared=is_shared)


class _SimLogs:
    def __init__(self, logs: OrderLogs, site: StoreSite, process: Process) -> None:
        self._logs = logs
        self._site = site
        self._process = process

    @asynccontextmanager
    async def open_order_log(self, queue: QueueConfig) -> AsyncIterator[OrderLog]:
        async with self._logs.open_order_log(queue) as order_log:
            yield _SimLog(order_log, self._site, self._process, queue.name)


class _SimLog:
    def __init__(self, log: OrderLog, site: StoreSite, process: Process, queue: str) -> None:
        self._log = log
        self._site = site
        self._process = process
        self._queue = queue

    async def append(self, items: Sequence[StoredMessage]) -> int:
        if self._site.store_fails:
            raise Disconnected("the disk is full")
        added = await self._log.append(items)
        bodies = [item.publication.body for item in items]
        await self._site.stored(self._process, self._queue, bodies)
        return added

    async def unsettled_groups(self, after: GroupKey | None = None) -> Sequence[GroupKey]:
        return await self._log.unsettled_groups(after)

    async def which_are_stored(self, groups: Collection[GroupKey]) -> Collection[GroupKey]:
        return await self._log.which_are_stored(groups)

    async def size(self) -> StoreSize:
        return await self._log.size()

    async def groups(self, limit: int, *, only_held: bool = False) -> Sequence[StoredGroup]:
        return await self._log.groups(limit, only_held=only_held)

    async def count_stored(self) -> Mapping[str, int]:
        return await self._log.count_stored()

    async def count_held(self) -> int:
        return await self._log.count_held()

    async def find_group(self, group: GroupKey) -> StoredGroup | None:
        return await self._log.find_group(group)

    async def ids_of(self, group: GroupKey, limit: int) -> Sequence[str]:
        return await self._log.ids_of(group, limit)

    async def group_of(self, message_id: str) -> GroupKey | None:
        return await self._log.group_of(message_id)

    async def held_letter(self, group: GroupKey) -> HeldLetter | None:
        return await self._log.held_letter(group)

    async def retry_letter(self, group: GroupKey, message_id: str, body: bytes) -> bool:
        return await self._log.retry_letter(group, message_id, body)

    async def release(self, group: GroupKey, message_id: str) -> bool:
        return await self._log.release(group, message_id)
