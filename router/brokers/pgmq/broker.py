"""Both ends of one queue in PGMQ."""

import math
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, Final, cast

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from router.brokers.kit import DEFAULT_LEASE_SECONDS, Shared, loop_time
from router.brokers.kit.consuming import ClaimedBatch, LongPoll
from router.brokers.kit.retries import PendingRetries
from router.brokers.pgmq.database import PgmqDatabase
from router.brokers.pgmq.lister import PgmqLister
from router.brokers.pgmq.states import PgmqStates, state_ids
from router.brokers.pgmq.store import PgmqMessageStore
from router.brokers.pgmq.table import (
    GROUP_HEADER,
    TALLY_HEADER,
    PgmqAddress,
    PgmqItem,
    PgmqLease,
    PgmqTable,
    fences,
    item_columns,
    keeps_states,
    open_table,
    read_address,
)
from router.brokers.postgres.work_queue import text
from router.brokers.work_queue import (
    ResultLimit,
    Row,
    cancelled,
    ending_with,
    ordered_group,
    stale,
)
from router.brokers.workers import ConsumerIdentity, PollPause
from router.core.commands import dated_body
from router.core.config import QueueConfig
from router.core.envelope import BESIDE
from router.core.message import UNTRIED, Handle, ReceivedMessage, Source, Tally
from router.core.trace import Span, carried_in
from router.ports import (
    DataRefused,
    Depth,
    Finish,
    Nack,
    OutgoingMessage,
    Publication,
    QueueRefused,
    Traits,
    Unsettled,
)

FIRST_POLL_SECONDS: Final = 0.05  # for others' changes, after something came …
LAST_POLL_SECONDS: Final = 1.0  # … and when nothing has come for a while
GATHER_STEP_SECONDS: Final = 0.02

_JSON: Final = "json"  # a kind: a header that is no text
_NUL: Final = b"\\u0000"  # the one character that jsonb cannot store


class PgmqQueues:
    """All queues in PGMQ, and what outlives their connections."""

    def __init__(self, identity: ConsumerIdentity) -> None:
        self._identity = identity
        self._databases = Shared(PgmqDatabase)
        self._pending: dict[tuple[str, str], PendingRetries] = {}
        self._results: defaultdict[str, ResultLimit] = defaultdict(
            lambda: ResultLimit(identity.result_max_bytes, identity.on_results)
        )
        self._without_states: set[str] = set()  # databases, and that was warned of

    async def close(self) -> None:
        await self._databases.close()

    @asynccontextmanager
    async def open_queue(self, queue: QueueConfig) -> AsyncIterator["PgmqBroker"]:
        address = read_address(queue)
        async with self._databases.use(address.dsn) as database:
            table = await open_table(database, address, queue, to_consume=True, may_install=True)
            self._note_problem(queue, address, database)
            pending = self._pending.setdefault((address.dsn, address.name), PendingRetries())
            pending.reads_bodies = queue.route is None
            results = self._results[address.dsn]
            results.queues.add(queue.name)
            states = None
            if table.keeps_states:
                states = PgmqStates(database, table, queue, self._identity, results)
                await states.configure()
            broker = PgmqBroker(
                database,
                table,
                queue,
                address,
                pending,
                states=states,
                poll_interval=self._identity.poll_interval,
            )
            try:
                yield broker
            finally:
                broker.stop()

    @asynccontextmanager
    async def open_publisher(self, queue: QueueConfig) -> AsyncIterator["PgmqPublisher"]:
        address = read_address(queue)
        async with self._databases.use(address.dsn) as database:
            table = await open_table(database, address, queue, to_consume=False)
            yield PgmqPublisher(database, table, address)

    @asynccontextmanager
    async def open_lister(self, queue: QueueConfig) -> AsyncIterator[PgmqLister]:
        address = read_address(queue)
        async with self._databases.use(address.dsn) as database:
            table = await open_table(database, address, queue, to_consume=False)
            yield PgmqLister(database, table)

    def open_store(
        self, queue: QueueConfig
    ) -> AbstractAsyncContextManager[PgmqMessageStore] | None:
        """Return None if the states of its messages are not kept."""
        address = read_address(queue)
        if address.dsn in self._without_states or not keeps_states(address, queue):
            return None
        return self._open_store(queue, address)

    @asynccontextmanager
    async def _open_store(
        self, queue: QueueConfig, address: PgmqAddress
    ) -> AsyncIterator[PgmqMessageStore]:
        async with self._databases.use(address.dsn) as database:
            table = await open_table(database, address, queue, to_consume=False, may_install=True)
            self._note_problem(queue, address, database)
            if not table.keeps_states:
                raise QueueRefused("the states of its messages are not kept")
            yield PgmqMessageStore(
                database,
                table,
                dedup_window=self._identity.dedup_window,
                stored=_stored,
                takes=partial(_takes, address),
                sent=_sent,
            )

    def _note_problem(
        self, queue: QueueConfig, address: PgmqAddress, database: PgmqDatabase
    ) -> None:
        """Warn once of a database that keeps no states, with what its owner has to do."""
        if database.problem is None or database.keeps_states:
            self._without_states.discard(address.dsn)
        elif address.dsn not in self._without_states:
            self._without_states.add(address.dsn)
            text = "states, results, batches and ticks of its PGMQ queues are not kept"
            self._identity.advise(queue.name, f"{text}: {database.problem}")


class PgmqBroker:
    """One connection to one queue. Its leases are good on any other connection as well."""

    def __init__(
        self,
        database: PgmqDatabase,
        table: PgmqTable,
        queue: QueueConfig,
        address: PgmqAddress,
        pending: PendingRetries,
        *,
        states: PgmqStates | None = None,
        poll_interval: float | None = None,
    ) -> None:
        self._database = database
        self._table = table
        self._address = address
        self._pending = pending
        self._states = states
        self._is_raw = queue.route is not None
        self._signal = database.signal(table.channel)
        database.add_channel(table.channel)
        self._pause = PollPause(FIRST_POLL_SECONDS, poll_interval or LAST_POLL_SECONDS)
        self._poll = LongPoll(self._signal)
        self.stop = self._poll.stop
        self._lease = max(math.ceil(queue.visibility_timeout or DEFAULT_LEASE_SECONDS), 1)
        self.lease_seconds: float = float(self._lease)
        self.holds_groups = table.reads_groups
        self.traits = Traits(
            ordered_here=not table.reads_groups,
            keeps_tally=table.has_headers,
            finisher=self,
            defers=True,
        )

    async def receive(self, limit: int) -> Sequence[ReceivedMessage]:
        claim = partial(self.claim, limit)
        batch = [*await self._poll.receive(claim, self._database.wait)]

        async def fetch(limit: int) -> Sequence[ReceivedMessage]:
            return (await self.claim(limit)).messages

        await self._pending.fill(
            batch,
            limit,
            fetch,
            step_seconds=GATHER_STEP_SECONDS,
            lease=self.lease_seconds,
            is_stopped=self._poll.stopped.is_set,
        )
        return batch

    async def ack(self, handles: Sequence[Handle], *, error: str = "") -> Sequence[Unsettled]:
        if self._states is not None:
            ending = ending_with(error)
            return await self.finish([Finish(handle, ending) for handle in handles])
        leases = cast("Sequence[PgmqLease]", handles)
        query = self._table.archive if error else self._table.delete
        lost = (await self._settle(query, leases))["lost"]
        if self.holds_groups:  # the next message of a group may be read now
            self._signal.ring()
        return stale(leases, lost)

    async def nack(self, items: Sequence[Nack]) -> Sequence[Unsettled]:
        """Hide them until they are due. PGMQ has no place for an error."""
        leases = [cast("PgmqLease", item.handle) for item in items]
        delays = [math.ceil(item.delay) for item in items]
        more: tuple[object, ...] = (delays,)
        if self._table.has_headers:
            more += ([msgspec.json.encode(item.tally).decode() for item in items],)
        if self._states is not None:
            more += self._states.nack_columns(items)
        lost = (await self._settle(self._table.nack, leases, *more))["lost"]
        if not self.holds_groups:
            now = loop_time()
            for position, (lease, delay) in enumerate(zip(leases, delays, strict=True)):
                if position not in lost and items[position].in_order:
                    self._pending.expect(lease.msg_id, lease.body, now=now, delay=delay)
        if len(lost) < len(items):
            self._signal.ring()
        return stale(leases, lost)

    async def extend(self, handles: Sequence[Handle], seconds: float) -> Sequence[Unsettled]:
        leases = cast("Sequence[PgmqLease]", handles)
        more = () if self._states is None else (state_ids(handles),)
        row = await self._settle(self._table.hide, leases, math.ceil(seconds), *more)
        unsettled = stale(leases, row["lost"])
        if self._states is None:
            return unsettled
        return [*unsettled, *cancelled(leases, set(row["to_cancel"]).difference(row["lost"]))]

    async def depth(self) -> Depth:
        """Return the depth. PGMQ counts a retry that waits as in flight."""
        (row,) = await self._database.call(self._table.count)
        return Depth(waiting=row["waiting"], in_flight=row["in_flight"], due=row["due"])

    def takes(self, queue: QueueConfig) -> bool:
        """Return whether it is a PGMQ queue of the same database (CMD-3)."""
        return _takes(self._address, queue)

    async def finish(self, items: Sequence[Finish]) -> Sequence[Unsettled]:
        """Settle them, keep how they ended, and send what goes out, in one transaction."""
        leases = [cast("PgmqLease", item.handle) for item in items]
        states = self._states
        accepted = None if states is None else states.acceptance_columns(items)
        if accepted is not None:
            row = await self._settle(self._table.accept, leases, *accepted)
        else:
            columns = self._ending_columns(items)
            row = await self._settle(self._table.finish, leases, *columns)
        if states is not None:
            await states.limit_results(items)
        self._signal.ring()
        return [
            *stale(leases, row["lost"]),
            *(
                Unsettled(leases[position], _no_queue(items[position]), stale=False)
                for position in row["stuck"]
                if position not in row["lost"]
            ),
        ]

    def _ending_columns(self, items: Sequence[Finish]) -> tuple[object, ...]:
        """Return which of them failed, what goes out, and how they ended if that is kept."""
        failed = [
            number
            for number, item in enumerate(items, 1)
            if item.ending.failure is not None and not item.ending.is_cancelled
        ]
        outgoing = [
            _sent(each, number) for number, item in enumerate(items, 1) for each in item.outgoing
        ]
        if self._states is None:
            return (failed, *item_columns(outgoing, with_states=False))
        ends = self._states.ending_columns(items)
        return (failed, *item_columns(outgoing, with_states=True), *ends)

    async def _settle(self, query: str, leases: Sequence[PgmqLease], *more: object) -> Row:
        """Return the positions of those leases that were `lost`; the others are settled."""
        columns = (*fences(leases), *more)
        (row,) = await self._database.call(query, self._address.name, *columns)
        return cast("Row", row)

    async def claim(self, limit: int) -> ClaimedBatch:
        """Take the next messages, if there are any now."""
        asked: tuple[object, ...] = (self._address.name, self._lease, limit)
        if self._states is not None:
            await self._states.tend()  # before it reads: what was read must be handed out
            asked += self._states.claim_arguments
        lease_until = loop_time() + self._lease
        rows = await self._database.call(self._table.read, *asked)
        if not rows:
            pause = self._pause.lengthen()
            (row,) = await self._database.call(self._table.next)
            due = row["wait"]
            # What is due already is held back, by its group or by another reader.
            return ClaimedBatch((), pause if due is None or due <= 0 else min(due, pause))
        self._pause.reset()
        if self._states is not None:
            rows = self._states.came(rows)
        return ClaimedBatch([self._received(row, lease_until) for row in rows], 0.0)

    def _received(self, row: Sequence[object], lease_until: float) -> ReceivedMessage:
        msg_id, read_ct, enqueued, body, headers, *more = cast("Any", row)
        if self._pending:
            self._pending.returned(msg_id)
        tally, parent = _read_headers(headers) if headers else (UNTRIED, None)
        return ReceivedMessage(
            body,
            PgmqLease(msg_id, read_ct, enqueued, body, more[0] if more else 0),
            is_cancelled=bool(more) and more[-1],
            broker_id=f"{msg_id}@{enqueued}",
            receive_count=read_ct,
            lease_until=lease_until,
            tally=tally,
            parent=parent,
            published_at=enqueued / 1_000_000,
            source=_source_of(headers) if self._is_raw else None,
        )


class PgmqPublisher:
    def __init__(self, database: PgmqDatabase, table: PgmqTable, address: PgmqAddress) -> None:
        self._database = database
        self._table = table
        self._address = address

    async def publish(self, items: Sequence[Publication]) -> Sequence[bool]:
        """Answer when the database has committed them. PGMQ knows no duplicates."""
        if items:
            sent = [_item(self._address, item) for item in items]
            columns = item_columns(sent, with_states=self._table.keeps_states)
            await self._database.call(self._table.send, *columns)
            self._database.signal(self._table.channel).ring()
        return [True] * len(items)


def _takes(address: PgmqAddress, queue: QueueConfig) -> bool:
    if not queue.uri.lower().startswith("pgmq:"):
        return False
    try:
        return read_address(queue).database == address.database
    except QueueRefused:
        return False


def _sent(outgoing: OutgoingMessage, position: int = 0) -> PgmqItem:
    return _item(read_address(outgoing.queue), outgoing.publication, position)


def _stored(item: Publication) -> Publication:
    """Return a publication as PGMQ has it."""
    body = _as_json(dated_body(item.message, item.body, item.not_before))
    return replace(item, body=body.encode())


def _item(address: PgmqAddress, item: Publication, position: int = 0) -> PgmqItem:
    message = item.message
    if item.source is not None:
        return _raw_item(address, item.body, item.source)
    group = ordered_group(message)
    if group is None and address.is_fifo:  # else all that have none would be one group
        group = secrets.token_hex(16)
    headers = None if group is None else msgspec.json.encode({GROUP_HEADER: text(group)}).decode()
    body = _as_json(dated_body(message, item.body, item.not_before))
    return PgmqItem(
        address.name,
        body,
        headers,
        item.not_before or 0.0,
        position,
        # A reply has no target: nobody asks for its state.
        message if message.target else None,
        item.dedup_key,
    )


def _raw_item(address: PgmqAddress, body: bytes, source: Source) -> PgmqItem:
    """Return what a foreign client has sent, once more (RAW-4)."""
    given = {
        name: Raw(text.encode()) if source.kinds.get(name) == _JSON else text
        for name, text in source.attributes.items()
    }
    if source.group is not None:
        given[GROUP_HEADER] = source.group
    headers = msgspec.json.encode(given).decode() if given else None
    return PgmqItem(address.name, body.decode(errors="replace"), headers)


def _source_of(headers: str | None) -> Source:
    """Return what the sender of a message in a raw queue said (RAW-2)."""
    attributes, kinds = dict[str, str](), dict[str, str]()
    given = msgspec.json.decode(headers, type=dict[str, Raw]) if headers else {}
    for name, raw in given.items():
        if name in {TALLY_HEADER, GROUP_HEADER}:
            continue
        value = bytes(raw).decode()
        if value.startswith('"'):
            attributes[name] = msgspec.json.decode(raw, type=str)
        else:
            attributes[name], kinds[name] = value, _JSON
    group = given.get(GROUP_HEADER)
    is_text = group is not None and bytes(group).startswith(b'"')
    return Source(
        attributes=attributes,
        kinds=kinds,
        group=msgspec.json.decode(group, type=str) if group is not None and is_text else None,
        content_type=next(
            (text for name, text in attributes.items() if name.lower() == "content-type"), None
        ),
    )


def _as_json(body: bytes) -> str:
    """Return what jsonb stores: a body that is no JSON object, or that it refuses, as a string."""
    try:
        decoded = body.decode()
    except UnicodeDecodeError:
        raise DataRefused("PGMQ stores text only: the body is not UTF-8") from None
    try:
        is_object = isinstance(msgspec.json.decode(body), dict)
    except (msgspec.MsgspecError, RecursionError):
        is_object = False
    if is_object and _NUL not in body:
        return decoded
    return msgspec.json.encode(text(decoded)).decode()


def _read_headers(headers: str) -> tuple[Tally, Span | None]:
    """Read the headers. Anybody may write them, so what makes no sense is ignored."""
    try:
        given = msgspec.json.decode(headers, type=dict[str, object])
        tally = msgspec.convert(given.get(TALLY_HEADER, {}), Tally)
    except msgspec.MsgspecError:
        return UNTRIED, None
    return tally, carried_in(given)


def _no_queue(item: Finish) -> str:
    names = sorted({each.queue.name.removeprefix(BESIDE) for each in item.outgoing})
    return f"the PGMQ queue of {', '.join(names)} does not exist"
