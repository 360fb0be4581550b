"""One queue of a SQLite database, on disk or in memory: both ends of it (WQ-1 to WQ-10)."""

import asyncio
import sqlite3
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Final, Protocol, cast

import msgspec
from msgspec.structs import replace

from router.brokers.kit import loop_time
from router.brokers.kit.consuming import ClaimedBatch, LongPoll
from router.brokers.sqlite.connection import QUERIES, T, Work
from router.brokers.sqlite.queue_table import (
    PRUNED_AT_ONCE,
    FileLease,
    NewMessage,
    QueueTable,
    json_value,
    stays_held,
    to_json,
)
from router.brokers.work_queue import (
    FREED_AT_ONCE,
    LocalQueues,
    ResultLimit,
    cancelled,
    ending_with,
    no_local_queues,
    sink_for,
    stale,
    stored_failure,
)
from router.brokers.workers import Recovery
from router.core.config import QueueConfig
from router.core.message import Handle, ReceivedMessage, Tally
from router.ports import (
    Depth,
    Finish,
    Nack,
    PoolFilter,
    Publication,
    Receipt,
    Traits,
    Unsettled,
)
from router.signal import Signal

MANY_MESSAGES: Final = 50  # as many as a claim brings at most
MANY_OUTGOING: Final = 200  # replies and next steps: the event loop writes them in 4 ms
LARGE_BYTES: Final = 256 * 1024  # bodies that hold the event loop up
# Finished messages are forgotten twice as fast as they come. Not with each ACK: to look at a part
# of the table takes 200 µs.
PRUNE_EVERY_MESSAGES: Final = PRUNED_AT_ONCE // 2
PRUNE_PAUSE_SECONDS: Final = 1.0  # after all of the table had nothing to forget


class Database(Protocol):
    """A database with work queues in it, and those who wait for it to change."""

    @property
    def incarnation(self) -> str:
        """Random: no other database has it. Known once something was run."""

    async def run(self, work: Work[T], *, is_large: bool = False) -> T:
        """Do it in a transaction, which others may share. No end of a process can undo it then.

        Large work takes longer than the event loop should be kept waiting for.
        """

    async def sync(self) -> None:
        """Wait until no power cut can undo what was done before."""

    async def look(self, work: Work[T]) -> T:
        """Read only, beside what is being written. It may take long."""

    def signal(self, queue: str) -> Signal:
        """Return what rings when a claim of that queue may find more than before."""

    async def wait(self, rung: asyncio.Event, seconds: float) -> None:
        """Wait for the signal, at most `seconds`. Other processes' changes ring it too."""


Bodies = Mapping[int, bytes]  # by id

_tokens: Final = msgspec.json.Decoder(list[int | None])


class WorkQueue:
    """One connection to one queue. Its leases are good on any other connection as well."""

    def __init__(
        self,
        database: Database,
        table: QueueTable,
        lease: float | None = None,
        recovery: Recovery | None = None,
        *,
        local_queues: LocalQueues[QueueTable] = no_local_queues,
        results: ResultLimit | None = None,
        is_dated: bool = False,
    ) -> None:
        """`recovery` is for workers that may die while this process lives.

        `is_dated`: what is received says when it was published, which costs a read.
        """
        self._database = database
        self._table = table
        self._recovery = recovery
        self._local_queues = local_queues
        self._results = results
        self._is_dated = is_dated
        self._finished = 0  # messages, since the last pruning
        self._next_prune = 0.0  # by the table's clock
        self._pruned_to = 0  # the message with which the last pruning ended
        self._forgot_some = False  # since the beginning of the table
        self._pools: PoolFilter | None = None  # that claims ask for; None: all
        self._signal = database.signal(table.queue)
        self._poll = LongPoll(self._signal)
        self.stop = self._poll.stop
        self.lease_seconds = lease
        self.holds_groups = table.holds_groups
        self.traits = Traits(
            ordered_here=not table.holds_groups,
            finisher=self,
            selector=self,
            holds_letters=table.holds_groups,
            published_here=True,
        )

    async def publish(self, items: Sequence[Publication]) -> Sequence[Receipt]:
        """Answer when the disk has them. The first may be delivered by then."""
        is_large = len(items) > MANY_MESSAGES or sum(len(item.body) for item in items) > LARGE_BYTES
        added = await self._change(partial(self._table.publish, items=items), is_large=is_large)
        await self._database.sync()
        return added

    def select(self, pools: PoolFilter | None) -> None:
        if pools != self._pools:
            self._pools = pools
            self._signal.ring()

    async def receive(self, limit: int) -> Sequence[ReceivedMessage]:
        return await self._poll.receive(partial(self.claim, limit), self._database.wait)

    async def claim(self, limit: int) -> ClaimedBatch:
        """Take the next messages, if there are any now."""
        lease = float("inf") if self.lease_seconds is None else self.lease_seconds
        lease_until = None if self.lease_seconds is None else loop_time() + lease

        def work(db: sqlite3.Connection) -> tuple[Sequence[FileLease], Bodies | None, float]:
            table = self._table
            chosen = table.claim(db, limit, lease, self._pools)
            if not chosen:
                if table.clock() >= self._next_prune:
                    self._prune(db)
                return (), {}, max(table.next_wake(db) - table.clock(), 0.0)
            is_large = sum(message.size for message in chosen) > LARGE_BYTES
            return chosen, None if is_large else _read_bodies(db, chosen), 0.0

        chosen, bodies, wait = await self._database.run(work)
        if bodies is None:
            bodies = await self._database.look(partial(_read_bodies, chosen=chosen))
        incarnation = self._database.incarnation
        messages = [
            ReceivedMessage(
                bodies[message.id],
                message,
                f"{incarnation}-{message.id}",
                message.deliveries + 1,
                lease_until,
                Tally(message.failures, message.requests),
                is_cancelled=message.is_cancelled,
            )
            for message in chosen
            if message.id in bodies
        ]
        if self._is_dated and messages:
            unix = self._table.wall() - self._table.clock()
            asked = {"ids": to_json([message.id for message in chosen]), "unix": unix}
            times = await self._database.look(partial(_read_times, asked=asked))
            messages = [
                replace(each, published_at=times.get(cast("FileLease", each.handle).id))
                for each in messages
            ]
        if not messages and self._recovery is not None:
            if await self.recover():
                return await self.claim(limit)
            wait = self._recovery.patience(wait)
        return ClaimedBatch(messages, wait)

    async def recover(self) -> bool:
        """Give back what dead workers hold (WQ-10). Return whether there were any."""
        return self._recovery is not None and await self._recovery.run(self.end_leases)

    async def end_leases(self, worker_ids: Collection[str]) -> None:
        """Give back all that these dead workers hold, in all queues of the file (WQ-10)."""
        asked = {"worker_ids": to_json(list(worker_ids))}
        work = partial(self._table.release, query="leases_of", asked=asked, why="the worker died")
        await self._change(work, is_large=True)

    async def ack(self, handles: Sequence[Handle], *, error: str = "") -> Sequence[Unsettled]:
        ending = ending_with(error)
        return await self.finish([Finish(handle, ending) for handle in handles])

    def takes(self, queue: QueueConfig) -> bool:
        return self._local_queues(queue) is not None

    async def finish(self, items: Sequence[Finish]) -> Sequence[Unsettled]:
        leases = cast("list[FileLease]", [item.handle for item in items])
        outgoing = [one for item in items for one in item.outgoing]
        tables = {one.queue: sink_for(self._local_queues, one.queue) for one in outgoing}
        size = sum(lease.size for lease in leases) + sum(len(x.publication.body) for x in outgoing)
        is_large = size > LARGE_BYTES or len(outgoing) > MANY_OUTGOING
        for table in tables.values():
            self._database.signal(table.queue).ring()
        if any(lease.group is not None or lease.in_batch for lease in leases):
            self._signal.ring()
        work = partial(self._finish, leases=leases, items=items, tables=tables)
        lost = await self._database.run(work, is_large=is_large)
        self._finished += len(leases)
        if self._finished >= PRUNE_EVERY_MESSAGES and self._table.clock() >= self._next_prune:
            self._finished = 0
            await self._database.run(self._prune, is_large=True)
        if self._results is not None and self._results.is_due(items):
            await self._limit_results(self._results)
        return stale(leases, lost)

    async def _limit_results(self, limit: ResultLimit) -> None:
        """Drop the oldest results if all of them take too much."""
        total = await self._database.look(lambda db: db.execute(QUERIES["result_bytes"]).fetchone())
        excess, after = limit.excess(total[0]), 0
        while excess > 0:
            work = partial(_drop_results, after=after, excess=excess)
            size, after = await self._database.run(work, is_large=True)
            excess = excess - size if size else 0

    async def nack(self, items: Sequence[Nack]) -> Sequence[Unsettled]:
        leases = cast("list[FileLease]", [item.handle for item in items])
        work = partial(self._nack, leases=leases, items=items)
        return stale(leases, await self._change(work, is_large=len(items) > MANY_MESSAGES))

    async def extend(self, handles: Sequence[Handle], seconds: float) -> Sequence[Unsettled]:
        leases = cast("Sequence[FileLease]", handles)

        def work(db: sqlite3.Connection) -> tuple[Sequence[int], Collection[int]]:
            now = self._table.clock()
            tokens = _read_tokens(db, leases, now)
            ids = [
                lease.id
                for lease, token in zip(leases, tokens, strict=True)
                if token == lease.token
            ]
            asked = {"ids": to_json(ids), "now": now, "lease": seconds}
            db.execute(QUERIES["extend"], asked)
            to_end = set(msgspec.json.decode(json_value(db, "asked_to_end", asked)))
            lost = [at for at, lease in enumerate(leases) if tokens[at] != lease.token]
            return lost, [at for at, lease in enumerate(leases) if lease.id in to_end]

        lost, to_end = await self._database.run(work)
        return [*stale(leases, lost), *cancelled(leases, to_end)]

    async def depth(self) -> Depth:
        def work(db: sqlite3.Connection) -> Depth:
            table = self._table
            asked = {"queue": table.queue, "worker_id": table.worker_id, "now": table.clock()}
            return Depth(*db.execute(QUERIES["depth"], asked).fetchone())

        return await self._database.look(work)

    async def _change(self, work: Work[T], *, is_large: bool = False) -> T:
        """Ring first: receivers that wait ask now, come next and share the transaction."""
        self._signal.ring()
        return await self._database.run(work, is_large=is_large)

    def _finish(
        self,
        db: sqlite3.Connection,
        leases: Sequence[FileLease],
        items: Sequence[Finish],
        tables: Mapping[QueueConfig, QueueTable],
    ) -> Sequence[int]:
        """Return the positions of the leases that were lost."""
        # A lease that has ended is still good until another worker has claimed the message.
        tokens = _read_tokens(db, leases, now=0.0)
        ending: list[tuple[FileLease, Finish]] = []
        published: defaultdict[QueueTable, list[tuple[NewMessage, bytes]]] = defaultdict(list)
        lost = []
        for position, (lease, token) in enumerate(zip(leases, tokens, strict=True)):
            if token == lease.token:
                ending.append((lease, items[position]))
                for one in items[position].outgoing:
                    table, item = tables[one.queue], one.publication
                    published[table].append((table.row_of(item), item.body))
            elif token != -lease.token:  # else it was finished with this lease before
                lost.append(position)
        if ending:
            self._table.end(db, ending)
        for table, new in published.items():  # a message ends once, so all of it is new
            table.insert(db, new)
        members = [
            lease.id for lease, item in ending if lease.in_batch and not stays_held(lease, item)
        ]
        if members:
            self._table.count_ended(db, to_json(members))
        return lost

    def _nack(
        self, db: sqlite3.Connection, leases: Sequence[FileLease], items: Sequence[Nack]
    ) -> Sequence[int]:
        """Return the positions of the leases that were lost."""
        table, lost = self._table, list[int]()
        groups = dict[int, None]()
        for position, (lease, item) in enumerate(zip(leases, items, strict=True)):
            failure = stored_failure(item.failure)
            error = None if failure is None else failure.message
            asked = {
                "id": lease.id,
                "token": lease.token,
                "delay": item.delay,
                "attempts": item.tally.failures,
                "posts": item.tally.requests,
                "error": error,
                "now": table.clock(),
            }
            if not db.execute(QUERIES["nack"], asked).rowcount:
                lost.append(position)
                continue
            if lease.group is not None:
                groups[lease.group] = None
            if failure is not None:
                kept = {"id": lease.id, "code": failure.code, "http_status": failure.http_status}
                db.execute(QUERIES["keep_failure"], kept)
            table.audit_change(db, to_json([lease.id]), "ready", error or "")
        table.offer(db, to_json(list(groups)))
        return lost

    def _prune(self, db: sqlite3.Connection) -> None:
        """Forget what may be forgotten in the next part of the table."""
        forgot_some, self._pruned_to = self._table.prune(db, self._pruned_to)
        self._forgot_some |= forgot_some
        if not self._pruned_to:  # the table ends here
            if not self._forgot_some:
                self._next_prune = self._table.clock() + PRUNE_PAUSE_SECONDS
            self._forgot_some = False


def _read_bodies(db: sqlite3.Connection, chosen: Sequence[FileLease]) -> Bodies:
    """Return the bodies of claimed messages by id. One that was finished meanwhile is missing."""
    asked = {"ids": to_json([message.id for message in chosen])}
    return dict(db.execute(QUERIES["bodies"], asked).fetchall())


def _read_times(db: sqlite3.Connection, asked: Mapping[str, object]) -> Mapping[int, float]:
    return dict(db.execute(QUERIES["publications"], asked).fetchall())


def _drop_results(db: sqlite3.Connection, after: int, excess: int) -> tuple[int, int]:
    """Drop the oldest results after that message. Return their size, and the last message."""
    asked = {"after": after, "excess": excess, "at_most": FREED_AT_ONCE}
    ids, size, last = db.execute(QUERIES["oldest_results"], asked).fetchone()
    db.execute(QUERIES["drop_results"], {"ids": ids})
    return size, last


def _read_tokens(
    db: sqlite3.Connection, leases: Sequence[FileLease], now: float
) -> Sequence[int | None]:
    """Return the token of each message's lease, negative if it ended before `now`."""
    asked = {"ids": to_json([lease.id for lease in leases]), "now": now}
    return _tokens.decode(json_value(db, "tokens", asked))
