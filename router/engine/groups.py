"""The groups of strict queues, as operators deal with them (ORD-11).

A dead letter that holds its group stays in front of it in a work queue: in the queue itself, or in
the order store of a queue that is none. Here it is found again, and decided about.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final, Protocol, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from router.core.config import QueueConfig, RoutingConfig
from router.core.explain import Explanation, explain_stored
from router.core.message import DEFAULT_POOL, Malformed, Message, ReceivedMessage
from router.core.order import ORDER_PREFIX, GroupKey, group_in_store, store_name
from router.core.raw import as_letter, stored_body
from router.core.warnings import Code
from router.engine.dead_letters import message_of
from router.engine.publishing import BrokeOff
from router.engine.queue_manager import QueueManager
from router.engine.settle import held_text
from router.engine.transfer import SOURCE
from router.ports import (
    BrokerError,
    Conflict,
    DeadLetterStore,
    HeldLetter,
    OrderLog,
    OrderLogs,
    Publication,
    QueueRefused,
    StoredGroup,
    StoredMessage,
    Unknown,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

STORED_ELSEWHERE: Final = (
    "the router that consumes its queue stores its group in a file of its own:"
    " decide there, or replay its letter with `to`"
)
ASK_SECONDS: Final = 10.0  # for one question to one queue: operators wait for the answer
IDS: Final = 100  # of the messages of a group that are listed
NOT_HELD: Final = "no dead letter holds this group"


class QueueGroup(Struct, frozen=True):
    """A group of a strict queue that waits."""

    queue: str
    stored: StoredGroup
    letter: int | None = None  # the id of the dead letter that holds it, if that is known
    ids: Sequence[str] = ()  # of its messages, the first ones


class _Decide(Protocol):
    async def __call__(self, store: OrderLog, group: GroupKey, *, is_store: bool) -> bool: ...


class GroupDesk:
    """Finds groups that are held or stored, and decides about them."""

    def __init__(self, manager: QueueManager, letters: DeadLetterStore) -> None:
        self._manager = manager
        self._store = manager.deps.order
        self._letters = letters
        self._alerts = manager.deps.alerts
        self._left: Mapping[str, int] = {}  # messages that no queue delivers, by its name …
        self._looked_for: RoutingConfig | None = None  # … by this configuration
        self._away = set[str]()  # queues whose groups cannot be looked at

    async def groups(
        self, queue: str | None, limit: int, *, only_held: bool
    ) -> Sequence[QueueGroup]:
        """Return the groups that wait in an order store or are held, the longest first.

        Raises Unknown, or BrokeOff if none was found and some queue could not be asked.
        """

        async def ask(order_log: OrderLog, is_store: bool) -> Sequence[StoredGroup]:
            return await order_log.groups(limit, only_held=only_held or not is_store)

        found, away = list[QueueGroup](), list[BrokeOff]()
        async for config, answers, failure in self._ask_all(self._queues(queue), ask):
            found += [QueueGroup(config.name, each) for groups in answers for each in groups]
            self._note_away(config.name, failure)
            away += [] if failure is None else [failure]
        if away and not found:
            raise away[0]
        return sorted(found, key=lambda each: each.stored.since)[:limit]

    async def show(self, queue: str, group: GroupKey) -> QueueGroup:
        """Return a group with the ids of its messages. Raises Unknown or BrokeOff."""
        config = self._queue(queue)

        async def ask(order_log: OrderLog, _: bool) -> QueueGroup | None:
            found = await order_log.find_group(group)
            if found is None:
                return None
            letter, ids = await self._letter_of(config, found), await order_log.ids_of(group, IDS)
            return QueueGroup(queue, found, letter, ids)

        found = await self._ask_until_found(config, ask)
        if found is None:
            raise Unknown("nothing of this group waits there")
        return found

    async def release(self, queue: str, group: GroupKey) -> QueueGroup:
        """Let a held group go on; its dead letter stays one. Raises Unknown, Conflict, BrokeOff."""
        return await self._release(await self._held(queue, group))

    async def discard(self, queue: str, group: GroupKey) -> QueueGroup:
        """Release a group, and delete its dead letter for good.

        The letter first: if the rest fails, it can be done again.
        """
        held = await self._held(queue, group)
        if held.letter is None:
            return await self._release(held)
        async with self._letters.replaying(held.letter) as is_ours:
            if not is_ours:
                raise Conflict("its dead letter is being replayed right now")
            await self._held(queue, group)  # it may have been replayed just before
            await self._letters.discard(held.letter)
            return await self._release(held)

    async def _held(self, queue: str, group: GroupKey) -> QueueGroup:
        """Return a group that is held, with its letter. Raises Unknown, Conflict, BrokeOff."""
        config = self._queue(queue)

        async def ask(order_log: OrderLog, _: bool) -> QueueGroup | None:
            found = await order_log.find_group(group)
            if found is None or not found.is_held:
                return None
            return QueueGroup(queue, found, await self._letter_of(config, found))

        held = await self._ask_until_found(config, ask)
        if held is None:
            raise Conflict(STORED_ELSEWHERE if self._is_elsewhere(config) else NOT_HELD)
        return held

    def _is_elsewhere(self, queue: QueueConfig) -> bool:
        """Return whether its groups are in a store that only another router reaches."""
        is_ours = self._store is None or self._store.is_shared
        return queue.is_stored and not is_ours and queue.name not in self._manager.consumers

    async def _release(self, held: QueueGroup) -> QueueGroup:
        config = self._queue(held.queue)

        async def ask(order_log: OrderLog, _: bool) -> QueueGroup | None:
            stored = held.stored
            is_free = await order_log.release((stored.pool, stored.group), stored.message_id)
            return held if is_free else None

        released = await self._ask_until_found(config, ask)
        if released is None:
            raise Conflict(NOT_HELD)
        await self.measure()
        return released

    async def explain(self, message_id: str) -> Explanation | None:
        """Explain a message that is in an order store, or whose group is held; None: neither.

        Raises BrokeOff if it was found nowhere, and some store could not be asked.
        """

        async def ask(order_log: OrderLog, is_store: bool) -> StoredGroup | None:
            group = await order_log.group_of(message_id)
            found = None if group is None else await order_log.find_group(group)
            return found if found is not None and (is_store or found.is_held) else None

        away: BrokeOff | None = None
        async for config, answers, failure in self._ask_all(self._queues(None), ask):
            away = away or failure
            for found in answers:
                return explain_stored(
                    message_id,
                    config.name,
                    (found.pool, found.group),
                    front=found.message_id,
                    since=found.since,
                    due_at=found.due_at,
                    error=found.error,
                    letter=await self._letter_of(config, found),
                    is_held=found.is_held,
                )
        if away is not None:
            raise away
        return None

    async def measure(self) -> None:
        """Look what the stores of strict queues have, and warn of what does not go on."""
        await self._look_for_left()
        for name in self._away - self._manager.consumers.keys():
            self._note_away(name, None)  # it is not for us to look at it again
        consumers = dict(self._manager.consumers)
        queues = [each.queue for each in consumers.values() if _may_hold(each.queue)]
        async for queue, held, silence in self._ask_all(queues, _count_held):
            name, source, consumer = queue.name, f"Consumer:{queue.name}", consumers[queue.name]
            failure = silence
            try:
                if consumer.stored_by is not None:
                    await consumer.stored_by.measure()
            except BrokerError as error:
                failure = BrokeOff(str(error))
            self._note_away(name, failure)
            if failure is not None:
                continue
            consumer.held_groups = sum(held)
            if consumer.held_groups:
                self._alerts.of(source)(Code.GROUP_HELD, held_text(name))
            else:
                self._alerts.withdraw(Code.GROUP_HELD, source)

    async def _look_for_left(self) -> None:
        """Warn of messages in stores whose queues are gone, or no longer store messages."""
        store, config = self._store, self._manager.applied
        if store is None or not store.exists():
            return
        if config is not self._looked_for:
            parked = [each for each in config.queues if each.may_be_stored]
            known = {store_name(each.name) for each in parked}
            any_queue = parked[0] if parked else QueueConfig(name="", uri="")
            try:
                async with store.logs.open_order_log(store.queue_of(any_queue)) as order_log:
                    stored = await order_log.count_stored()
            except BrokerError as error:
                log.info("the order store was not looked through: %s", error)
                return
            self._left = {
                name.removeprefix(ORDER_PREFIX): count
                for name, count in sorted(stored.items())
                if name not in known
            }
            self._looked_for = config
            self._alerts.withdraw(Code.ORDER_STORE, SOURCE)
        for name, count in self._left.items():
            text = (
                f"{count} messages wait in the order store of {name}, and no strict queue of this"
                f" name delivers them: configure one, or look at `message-router groups list"
                f" --queue {name}`"
            )
            self._alerts.of(SOURCE)(Code.ORDER_STORE, text)

    def _queues(self, name: str | None) -> Sequence[QueueConfig]:
        """Return the queues of which groups may wait, or those called so. Raises Unknown.

        One that is not in the configuration has nothing but what is left in its order store.
        """
        queues = self._manager.applied.queues
        names = {each.name for each in queues}
        gone = [QueueConfig(name=each, uri="") for each in self._left if each not in names]
        found = [
            each
            for each in [*filter(self._may_wait, queues), *gone]
            if name is None or each.is_called(name)
        ]
        if name is not None and not found:
            raise Unknown(f"there is no strict queue {name!r} in the configuration")
        return found

    def _queue(self, name: str) -> QueueConfig:
        """Return the queue of this very name. Raises Unknown."""
        for queue in self._queues(name):
            if queue.name == name:
                return queue
        raise Unknown(f"{name!r} has partitions: name the one that has the group")

    def _may_wait(self, queue: QueueConfig) -> bool:
        return _may_hold(queue) or queue.name in self._left

    def _places(self, queue: QueueConfig) -> Sequence[tuple[QueueConfig, OrderLogs]]:
        """Return where groups of a queue may wait: in itself, and in its order store."""
        store, places = self._store, [queue] if queue.uri else []
        if store is not None and (queue.is_strict or queue.name in self._left):
            places.append(store.queue_of(queue))
        return () if store is None else [(each, store.logs) for each in places]

    async def _ask(
        self,
        queue: QueueConfig,
        question: Callable[[OrderLog, bool], Awaitable[T | None]],
        *,
        until_found: bool = False,
    ) -> tuple[Sequence[T], BrokeOff | None]:
        """Ask the queue itself, if it is a work queue, and then its order store.

        The question is also told whether it asks the store. Return the answers, and the first
        failure.
        """
        answers = list[T]()
        failure: BrokeOff | None = None
        for place, logs in self._places(queue):
            try:
                async with asyncio.timeout(ASK_SECONDS), logs.open_order_log(place) as order_log:
                    answer = await question(order_log, place is not queue)
            except QueueRefused:  # it is no work queue
                continue
            except BrokerError as error:
                failure = failure or BrokeOff(str(error))
            except TimeoutError:
                failure = failure or BrokeOff(f"no answer within {ASK_SECONDS:.0f} s")
            else:
                answers += [] if answer is None else [answer]
            if answers and until_found:
                break
        return answers, failure

    async def _ask_all(
        self,
        queues: Sequence[QueueConfig],
        question: Callable[[OrderLog, bool], Awaitable[T | None]],
    ) -> AsyncIterator[tuple[QueueConfig, Sequence[T], BrokeOff | None]]:
        """Yield each queue with its answers and the first failure.

        Of several, one that is not strict and does not answer is left out, with all others that
        are not: nothing of them has to be held, and one database may have them all.
        """
        is_away = False
        for queue in queues:
            is_strict = queue.is_strict or queue.name in self._left
            if is_away and not is_strict:
                continue
            answers, failure = await self._ask(queue, question)
            if failure is None or is_strict or len(queues) == 1:
                yield queue, answers, failure
            else:
                is_away = True

    async def _ask_until_found(
        self, queue: QueueConfig, question: Callable[[OrderLog, bool], Awaitable[T | None]]
    ) -> T | None:
        """Return the first answer. Raises BrokeOff if there is none and a place did not answer."""
        answers, failure = await self._ask(queue, question, until_found=True)
        if failure is not None and not answers:
            raise failure
        return next(iter(answers), None)

    def _note_away(self, queue: str, failure: BrokeOff | None) -> None:
        """Warn of a queue whose groups cannot be looked at, until they can."""
        source = f"{SOURCE}:{queue}:groups"
        if failure is None:
            self._away.discard(queue)
            self._alerts.withdraw(Code.ORDER_STORE, source)
        else:
            self._away.add(queue)
            text = f"the groups of {queue} that wait cannot be seen: {failure}"
            self._alerts.of(source)(Code.ORDER_STORE, text)

    async def _letter_of(self, queue: QueueConfig, group: StoredGroup) -> int | None:
        """Return the id of the dead letter that holds a group, if it is the latest with that id.

        Ids repeat: a letter of another queue or group is not taken for it.
        """
        kept = await self._letters.latest_of(group.message_id) if group.is_held else None
        if kept is None or kept.letter.queue != queue.name:
            return None
        kept = await self._letters.get(kept.id) or kept  # with its body
        with suppress(Malformed):
            message = message_of(kept.letter.body, queue)
            key = message.pool or DEFAULT_POOL, group_in_store(message)
            return kept.id if key == (group.pool, group.group) else None
        return None

    async def retry_letter(self, queue: QueueConfig, item: Publication, letter: bytes) -> bool:
        """Deliver a dead letter once more, as it is published now, if it holds its group.

        It stands in front of it. Return False if it does not hold it. Raises BrokerError.
        """
        message, kept = item.message, self._as_stored(queue, item).body

        async def retry(store: OrderLog, group: GroupKey, *, is_store: bool) -> bool:
            return await store.retry_letter(group, message.id, kept if is_store else item.body)

        return await self._decide(queue, message, letter, retry)

    async def release_letter(
        self,
        queue: QueueConfig,
        message: Message,
        letter: bytes,
        before: Callable[[], Awaitable[object]],
    ) -> bool:
        """Let a group go on that this dead letter holds, after something else was done.

        Return False, and do neither, if it holds none. Raises BrokerError.
        """

        async def release(store: OrderLog, group: GroupKey, *, is_store: bool) -> bool:
            del is_store
            await before()
            await store.release(group, message.id)
            return True

        return await self._decide(queue, message, letter, release)

    async def put_behind(self, queue: QueueConfig, item: Publication) -> bool:
        """Store a message behind its group, if groups of the queue are stored (DLQ-2).

        Raises BrokerError or Conflict.
        """
        consumer = self._manager.consumers.get(queue.name)
        if consumer is not None:
            order = consumer.stored_by
            if order is not None:
                await order.put(self._as_stored(queue, item))
            return order is not None
        store = self._store
        if store is None or not queue.is_stored:
            return False
        if self._is_elsewhere(queue):
            raise Conflict(STORED_ELSEWHERE)
        group = group_in_store(item.message)
        async with store.logs.open_order_log(store.queue_of(queue)) as order_log:
            await order_log.append([StoredMessage(self._as_stored(queue, item), group)])
        return True

    def _as_stored(self, queue: QueueConfig, item: Publication) -> Publication:
        """Return a publication as the order store keeps it: published now (ORD-8)."""
        ages = item.source is not None or queue.max_age is not None
        published_at = self._manager.deps.publishing.wall() if ages else None
        received = ReceivedMessage(
            item.body, None, None, published_at=published_at, source=item.source
        )
        return replace(item, body=stored_body(received, item.message.id))

    async def _decide(
        self,
        queue: QueueConfig,
        message: Message,
        letter: bytes,
        decide: "_Decide",
    ) -> bool:
        """Do that where this dead letter holds its group. Return False if it does not.

        Raises BrokerError, or Conflict if only another router can know.
        """
        store, name = self._store, group_in_store(message)
        if store is None or name is None or not queue.is_strict:
            return False
        if queue.holds_letters and self._is_elsewhere(queue):
            raise Conflict(STORED_ELSEWHERE)
        group, wanted = (message.pool or DEFAULT_POOL, name), HeldLetter(message.id, letter)
        for place in (queue, store.queue_of(queue)):
            with suppress(QueueRefused):  # it is no work queue
                async with store.logs.open_order_log(place) as order_log:
                    held = await order_log.held_letter(group)
                    if held is not None and wanted == replace(held, body=as_letter(held.body)):
                        return await decide(order_log, group, is_store=place is not queue)
        return False


def _may_hold(queue: QueueConfig) -> bool:
    """Return whether groups of it may be held: it is strict, or was a strict work queue once."""
    return queue.is_strict or queue.broker.holds_groups(queue.uri)


async def _count_held(order_log: OrderLog, _: bool) -> int:
    return await order_log.count_held()
