"""Moves messages of a strict queue to its order store, and knows which groups are there.

A group is direct or stored (ORD-4). What has to be tried again moves to the store with all of its
group that is here, and so does what comes behind it. The store is a work queue, which holds groups
back: from there messages are received, delivered and retried like those of any other work queue.

All moves of a queue go one after the other, in the order in which they were asked for.

Of a shared queue, everything moves there as soon as it is received (ORD-13). Then no one has to
know which groups are stored.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from itertools import groupby, takewhile
from typing import TYPE_CHECKING, Final

from msgspec import Struct
from msgspec.structs import replace

from router.core.config import QueueConfig
from router.core.envelope import Reader
from router.core.history import State
from router.core.message import DEFAULT_GROUP, DEFAULT_POOL, Malformed, ReceivedMessage
from router.core.order import (
    MAX_SHARED_MESSAGES,
    MAX_UNSENT_MESSAGES,
    GroupKey,
    StoredGroups,
    group_in_store,
    store_name,
)
from router.core.raw import read_raw, stored_body
from router.core.returning import Jitter, ReturnReason, reconnect_delays
from router.core.warnings import Code
from router.engine.alerts import Alerts
from router.engine.job import NEVER, Job, Return
from router.engine.lanes import ordering_group
from router.engine.targets import Targets
from router.ports import BrokerError, OrderLog, OrderLogs, Publication, StoredMessage, StoreSize
from router.signal import Signal

if TYPE_CHECKING:  # pools know settlers, which have one of these
    from router.engine.pool import Pools

log = logging.getLogger(__name__)

MOVED_AT_ONCE: Final = 200  # messages in one transaction
MEASURE_SECONDS: Final = 10.0  # between two looks at the size of a store, at least …
MEASURE_PAUSE: Final = 100  # … and so many times as long as the last look has taken
WAIT_SECONDS: Final = 1.0  # until a receiver looks again whether it may go on
FULL: Final = "it is full: MESSAGE_ROUTER_ORDER_STORE_MAX_BYTES is reached"
FOR_ALL: Final = "for all routers; another one may have delivered it since"
SOURCE: Final = "OrderStore"


class OrderStore(Struct, frozen=True, kw_only=True):
    """Where strict queues store groups."""

    logs: OrderLogs
    uri_of: Callable[[str], str]  # of the work queue with that name
    new_key: Callable[[], str]  # of a message whose broker makes no ids: random
    is_shared: bool = False  # other routers use it, too
    max_bytes: int = 1024**3
    max_shared: int = MAX_SHARED_MESSAGES  # unsettled, of a shared queue: then its carrier pauses
    exists: Callable[[], bool] = lambda: True  # else nothing was ever stored

    def queue_of(self, queue: QueueConfig) -> QueueConfig:
        """Return the work queue that stores the groups of a queue."""
        uri = self.uri_of(store_name(queue.name))
        return _as_source(QueueConfig(name=queue.name, uri=uri), queue)


class QueueOrder:
    """The order of one strict queue. It outlives the consumers of the queue."""

    def __init__(
        self,
        queue: QueueConfig,
        store: OrderStore,
        pools: "Pools",
        tasks: asyncio.TaskGroup,
        *,
        targets: Targets,
        alerts: Alerts,
        jitter: Jitter,
    ) -> None:
        self.source = queue
        self.queue = store.queue_of(queue)
        self.groups = StoredGroups()
        self.size = StoreSize()  # at the last look
        self.is_stuck = False  # the store is away, or full
        self.moved = Signal()  # rung when nothing is left to move, and at a stop
        self._store = store
        self._pools = pools
        self._targets = targets
        self._tasks = tasks
        self._alerts = alerts
        self._jitter = jitter
        self._loop = asyncio.get_running_loop()
        self._pending: deque[Sequence[Return]] = deque()
        # What waits until the reply of the letter in front of it is published, by group.
        self._unanswered: dict[GroupKey | None, list[Return]] = {}
        # Stored by others than the receiver: of these groups, something may still be direct here.
        self._mixed: set[GroupKey | None] = set()
        self._is_moving = False
        self._unsent = 0  # stored although nothing was sent, at most
        self._added = self._added_bytes = 0  # since the last look
        self._measured_at = -NEVER
        self._pause = MEASURE_SECONDS
        self._to_check: set[GroupKey] = set()  # of which a stored message has ended
        self._is_checking = False
        self._is_loaded = self._is_stopped = False

    def change(self, queue: QueueConfig) -> None:
        """Take over what the configuration says of the queue now."""
        self.source = queue
        self.queue = _as_source(self.queue, queue)

    @property
    def carries(self) -> bool:
        """Whether all of it moves to the store (ORD-13)."""
        return self.source.is_shared

    @property
    def messages(self) -> int:
        """How many messages the store has, about."""
        return max(self.size.messages + self._added, 0)

    @property
    def stores_no_more_unsent(self) -> bool:
        """Whether what was not even sent has to wait here (ORD-6)."""
        self._unsent = min(self._unsent, self.messages)
        return self._unsent >= MAX_UNSENT_MESSAGES

    def connected(self) -> None:
        """Look again what is stored: another router may have had the queue."""
        self._is_loaded = self._is_stopped = False

    @property
    def is_ready(self) -> bool:
        """Whether messages may be received: nothing waits for the store (ORD-7)."""
        waiting = sum(map(len, self._unanswered.values()))
        is_free = self._is_loaded and not self._is_moving and not self._looks_first
        return is_free and waiting < MOVED_AT_ONCE

    async def get_ready(self) -> None:
        """Find out what is stored, and let what is on its way arrive; for a second at most."""
        if not self._is_loaded or self._looks_first:
            try:
                async with self._open() as order_log:
                    if not self.carries:
                        await self._load(order_log)
                    await self._measure(order_log)
            except BrokerError as error:
                self._report(str(error))
            else:
                self._is_loaded = True
                if not self._has_enough:
                    self._recover()
                    return
                self._report(FULL if self._is_full else f"it has {self._store.max_shared} of them")
        await self.moved.wait(WAIT_SECONDS)

    async def _load(self, order_log: OrderLog) -> None:
        """Note which groups are stored, some thousand at a time."""
        after: GroupKey | None = None
        while groups := await order_log.unsettled_groups(after):
            self.groups.load(groups)
            after = groups[-1]

    @property
    def _is_full(self) -> bool:
        return self.size.bytes + self._added_bytes >= self._store.max_bytes

    @property
    def _has_enough(self) -> bool:
        """Whether the carrier of a shared queue pauses (ORD-13)."""
        return self.carries and (self._is_full or self.messages >= self._store.max_shared)

    @property
    def _looks_first(self) -> bool:
        """Whether the carrier asks the store before it receives: others make room in it, too."""
        return self._has_enough or (self.carries and self.is_stuck)

    @property
    def asks_first(self) -> bool:
        """Whether another router may have stored groups of what comes now."""
        return self._store.is_shared and not self.carries

    async def look(self, messages: Sequence[ReceivedMessage], read: Reader) -> None:
        """Ask about the groups of a batch that seem to be direct. Raises BrokerError."""
        groups = set[GroupKey]()
        for received in messages:
            with suppress(Malformed):
                message = (
                    read(received.body)
                    if received.source is None
                    else read_raw(self.queue.route, received)
                )
                groups.add((message.pool or DEFAULT_POOL, message.group or DEFAULT_GROUP))
        unknown = {group for group in groups if group not in self.groups}
        if unknown:
            async with self._open() as order_log:
                stored = await order_log.which_are_stored(unknown)
            self._mixed.update(group for group in stored if group not in self.groups)
            self.groups.load(stored)

    def stop(self) -> None:
        """Wait for the store no longer."""
        self._is_stopped = True
        self.moved.ring()

    def key_of(self, job: Job) -> GroupKey | None:
        """Return the group whose order it keeps."""
        code = job.message.pool or DEFAULT_POOL
        pool = self._pools.find(code)
        if pool is not None and ordering_group(job, pool.config) is None:
            return None
        return code, job.group

    def takes(self, job: Job) -> bool:
        """Return whether a message has to go to the store, because its group is there (ORD-5)."""
        if self.carries:
            return True
        key = self.key_of(job) if self.groups else None
        if key not in self.groups or (key in self._mixed and self._is_behind_direct(job, key)):
            return False
        self._mixed.discard(key)
        away_until = self._targets.away_until(job.message.target, self._loop.time())
        if away_until is not None:  # stored counts as returned (MED-4)
            job.batch.probe(away_until)
        return True

    def _is_behind_direct(self, job: Job, key: GroupKey | None) -> bool:
        """Return whether its group has earlier messages here that are not on their way there."""
        before = takewhile(lambda each: each is not job, job.settler.held)
        return any(each.state is not State.SETTLING and self.key_of(each) == key for each in before)

    def add(self, returns: Sequence[Return]) -> None:
        """Move messages, in this order and together. Their groups are stored from now on."""
        self._choose(returns)
        for each in returns if self._unanswered else ():
            self._unanswered.get(each.job.stored_in, []).append(each)
        self._enqueue([each for each in returns if each.job.stored_in not in self._unanswered])

    def hold(
        self, letter: Return, behind: Sequence[Return], answered: Coroutine[object, object, None]
    ) -> None:
        """Move a letter once it is answered, and what is behind it in its group (ORD-11)."""
        returns = [letter, *behind]
        self._choose(returns)
        group = letter.job.stored_in
        self._unanswered.setdefault(group, []).extend(returns)
        moving = self._move_answered(group, answered)
        self._tasks.create_task(moving, name=f"answer {self.queue.name}")

    async def _move_answered(
        self, group: GroupKey | None, answered: Coroutine[object, object, None]
    ) -> None:
        await answered
        self._enqueue(self._unanswered.pop(group, ()))

    def _choose(self, returns: Sequence[Return]) -> None:
        now = self._loop.time()
        for each in returns:
            job = each.job
            job.state, job.resume_at = State.SETTLING, now  # that keeps its lease alive
            if not job.is_held:  # else it is a dead letter, and ends as one
                job.returned_for, job.return_reason = each.delay, each.reason
                job.ending, job.needs_finish = None, False
            job.stored_in = self._group_in_store(job)
            if job.stored_in is not None:
                first = self.groups.begin(job.stored_in, job.message.id)
                if self.carries:
                    job.error = FOR_ALL
                elif each.reason is ReturnReason.BEHIND and not job.is_held:
                    job.error = f"behind {first}" if first else "behind others of its group"
            self._unsent += not each.was_sent

    def _enqueue(self, returns: Sequence[Return]) -> None:
        self._pending.append(returns)
        if not self._is_moving:
            self._is_moving = True
            self._tasks.create_task(self._move_all(), name=f"store {self.queue.name}")

    def _group_in_store(self, job: Job) -> GroupKey | None:
        """Return the group in whose order it is stored; None: it is stored alone (ORD-6)."""
        if job.is_held:  # its pool may have become `ungrouped: parallel` since it died
            return job.message.pool or DEFAULT_POOL, job.group
        key = self.key_of(job)
        follows = not self.carries and key in self.groups
        return key if job.blocks_on_error or follows else None

    async def put(self, item: Publication) -> None:
        """Store a message behind its group: a dead letter is replayed. Raises BrokerError."""
        message = item.message
        pool = self._pools.find(message.pool or DEFAULT_POOL)
        is_parallel = pool is not None and pool.config.parallel_ungrouped
        group = group_in_store(message, is_parallel=is_parallel)
        key = None if group is None else (message.pool or DEFAULT_POOL, group)
        if key is not None:
            if key not in self.groups:
                self._mixed.add(key)
            self.groups.begin(key, message.id)
        try:
            async with self._open() as order_log:
                await self._make_sure_of_room(order_log)
                self._added += await order_log.append([StoredMessage(item, group)])
        finally:
            if key is not None:
                self.groups.end(key, forget=self.carries)
                self._check({key})

    def note_ended(self, jobs: Sequence[Job]) -> None:
        """Note that these messages have left the store: accepted, or dead letters."""
        self._added -= len(jobs)
        keys = {(job.message.pool or DEFAULT_POOL, job.group) for job in jobs}
        self._check(keys)

    def _check(self, groups: Iterable[GroupKey]) -> None:
        """Ask whether anything is left of these groups, which may be direct again."""
        self._to_check.update(group for group in groups if group in self.groups)
        if self._to_check and not self._is_checking:
            self._is_checking = True
            self._tasks.create_task(self._check_all(), name=f"check {self.queue.name}")

    async def _check_all(self) -> None:
        delays = reconnect_delays(self._jitter)
        while self._to_check and not self._is_stopped:
            asked, self._to_check = self.groups.ask(self._to_check), set()
            try:
                async with self._open() as order_log:
                    stored = await order_log.which_are_stored(asked) if asked else ()
            except BrokerError as error:
                log.info("stored groups could not be checked: %s", error)
                self._to_check.update(asked)
                await self.moved.wait(next(delays))
            else:
                self.groups.answer(stored)
                self._mixed = {group for group in self._mixed if group in self.groups}
        self._is_checking = False

    async def _move_all(self) -> None:
        while self._pending:
            returns = list(self._pending.popleft())
            while self._pending and len(returns) + len(self._pending[0]) <= MOVED_AT_ONCE:
                returns += self._pending.popleft()
            try:
                await self._move(returns)
            except Exception:  # the bulkhead: a bug costs these messages a return
                log.exception("messages could not be moved to the order store")
                await self._give_back(returns, ReturnReason.CRASHED)
        self._is_moving = False
        self.moved.ring()

    async def _move(self, returns: Sequence[Return]) -> None:
        """Store messages, however long that takes; then remove them from their queue (ORD-7)."""
        delays = reconnect_delays(self._jitter)
        while True:
            returns = self._without_lost(returns)
            if not returns or any(each.job.settler.returns_all for each in returns):
                await self._give_back(returns, ReturnReason.STOPPED)
                return
            try:
                async with self._open() as order_log:
                    await self._make_sure_of_room(order_log)
                    added = await order_log.append([self._item(each) for each in returns])
            except BrokerError as error:
                self._report(str(error))
                await self.moved.wait(next(delays))
            else:
                self._recover()
                self._added += added
                self._added_bytes += sum(len(each.job.received.body) for each in returns)
                self._arrived([each.job for each in returns])
                return

    async def _make_sure_of_room(self, order_log: OrderLog) -> None:
        """Raise _Full if the store has as much as it may have."""
        if self._loop.time() >= self._measured_at + self._pause or self.is_stuck:
            await self._measure(order_log)
        if self._is_full:
            raise _Full(FULL)

    async def measure(self) -> None:
        """Look how much is stored, unless the last look took too long for that."""
        if self._loop.time() >= self._measured_at + self._pause:
            async with self._open() as order_log:
                await self._measure(order_log)

    async def _measure(self, order_log: OrderLog) -> None:
        began = self._loop.time()
        self.size = await order_log.size()
        self._added = self._added_bytes = 0
        self._measured_at = self._loop.time()
        self._pause = max(MEASURE_SECONDS, (self._measured_at - began) * MEASURE_PAUSE)

    def _item(self, each: Return) -> StoredMessage:
        job, received, message = each.job, each.job.received, each.job.message
        has_id = received.broker_id is not None
        key = job.key.fingerprint(received.body) if has_id else self._store.new_key()  # ORD-8
        is_early = job.not_before > self._loop.time() or each.reason is ReturnReason.EARLY
        not_before = message.not_before if is_early else None
        body = stored_body(received, message.id)
        publication = Publication(
            message, body, key, None if not_before is None else not_before.timestamp()
        )
        waits = not is_early and each.reason is not ReturnReason.BEHIND  # the others follow it
        delay = each.delay if waits else 0.0
        group = None if job.stored_in is None else job.stored_in[1]
        given_up = job.ending.failure if job.is_held and job.ending is not None else None
        error = job.error
        if given_up is None:
            error = "" if each.failure is None else each.failure.message
        return StoredMessage(publication, group, job.tally, delay, error, given_up)

    def _arrived(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            job.resume_at = NEVER
            self._end_move(job)
        letters = [job for job in jobs if job.is_held]
        moved = [job for job in jobs if not job.is_held]
        for job in letters:  # the store holds its group: for its queue, it has ended
            job.is_held = False
            job.settler.ack_held(job)
        for settler, together in groupby(moved, key=lambda job: job.settler):
            settler.ack_stored(list(together))

    def _without_lost(self, returns: Sequence[Return]) -> Sequence[Return]:
        """Let go what was lost meanwhile, and all behind it in its group (ORD-7)."""
        now, lost, kept = self._loop.time(), set[GroupKey | None](), list[Return]()
        dropped: list[Job] = []
        for each in returns:
            job, group = each.job, each.job.stored_in
            is_lost = job not in job.settler.held or job.lease_until <= now
            if not is_lost and (group is None or group not in lost):
                kept.append(each)
                continue
            lost.add(group)
            dropped.append(job)
            self._end_move(job)
        self._check(group for group in lost if group is not None)
        for job in [each for each in dropped if each in each.settler.held]:
            job.settler.forfeit(job)
        return kept

    async def _give_back(self, returns: Sequence[Return], reason: ReturnReason) -> None:
        """Return messages to their queue, in order (ORD-10)."""
        for each in returns:
            each.job.resume_at, each.job.is_held = NEVER, False
            self._end_move(each.job)
        for settler, together in groupby(returns, key=lambda each: each.job.settler):
            await settler.give_back([Return(each.job, reason) for each in together])

    def _end_move(self, job: Job) -> None:
        group, job.stored_in = job.stored_in, None
        if group is not None:
            self.groups.end(group, forget=self.carries)

    def _open(self) -> AbstractAsyncContextManager[OrderLog]:
        return self._store.logs.open_order_log(self.queue)

    def _report(self, problem: str) -> None:
        self.is_stuck = True
        text = f"messages of {self.queue.name} wait for the order store: {problem}"
        self._alerts.of(f"{SOURCE}:{self.queue.name}")(Code.ORDER_STORE, text)

    def _recover(self) -> None:
        if self.is_stuck:
            self.is_stuck = False
            self._alerts.withdraw(Code.ORDER_STORE, f"{SOURCE}:{self.queue.name}")


def _as_source(stored: QueueConfig, queue: QueueConfig) -> QueueConfig:
    """Return the queue in the store, with what holds for messages wherever they are."""
    return replace(
        stored,
        visibility_timeout=queue.visibility_timeout,
        retry=queue.retry,
        holds_letters=queue.holds_letters,
        envelope=queue.envelope,
        routes=queue.routes,
        route=queue.route,
        max_age=queue.max_age,
        reply_names=queue.reply_names,
        has_handlers=queue.has_handlers,
    )


class _Full(BrokerError):
    """The order store has as much as it may have."""
