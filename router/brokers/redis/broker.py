"""Both ends of one queue in Redis."""

import asyncio
import math
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, cast

import msgspec
from msgspec import Struct

from router.brokers.kit import DEFAULT_LEASE_SECONDS, loop_time
from router.brokers.kit.consuming import ClaimedBatch, LongPoll
from router.brokers.kit.retries import (
    PREFIX,
    PendingRetries,
    RetryHistory,
    history_headers,
    read_history,
)
from router.brokers.redis import RedisAddress, RedisSettings, read_address
from router.brokers.redis.connection import RedisConnection, RedisRefused
from router.brokers.redis.scripts import (
    ACK,
    CLAIM,
    DEPTH,
    EXTEND,
    NACK,
    PENDING,
    PUBLISH,
    RELEASE,
    TIDY,
)
from router.brokers.workers import ConsumerIdentity
from router.core.commands import dated_body
from router.core.config import QueueConfig
from router.core.message import Handle, ReceivedMessage, Source, Tally
from router.core.trace import carried_in
from router.ports import BrokerError, Depth, Nack, Publication, QueueRefused, Traits, Unsettled

LOOK_SECONDS: Final = 1.0  # between two looks for ended leases, and for what others gave back
GATHER_STEP_SECONDS: Final = 0.005
FORGOTTEN_CONSUMER_MS: Final = 24 * 3600 * 1000
MIN_VERSION: Final = (6, 2)  # it knows XAUTOCLAIM
PENDING_AT_ONCE_MESSAGES: Final = 1000
PUBLISHED_AT_ONCE_MESSAGES: Final = 500  # Lua holds a few thousand arguments

_NO_BODY: Final = "missing"  # a kind: the entry has no field of that name
LOST: Final = "the lease was lost"


class RedisQueues:
    """All queues in Redis, and what outlives their connections."""

    def __init__(self, identity: ConsumerIdentity) -> None:
        self._identity = identity
        self._settings = identity.settings.of(RedisSettings)
        # By queue URI:
        self._pending_retries: defaultdict[str, PendingRetries] = defaultdict(PendingRetries)
        self._held: defaultdict[str, HeldLeases] = defaultdict(HeldLeases)

    async def close(self) -> None:
        """Do nothing: connections share nothing that has to be closed."""

    @asynccontextmanager
    async def open_queue(self, queue: QueueConfig) -> AsyncIterator["RedisBroker"]:
        address = read_address(queue, self._settings)
        async with _connected(queue, address) as connection:
            advice = await _advice(connection)
            await _make_group(connection, address)
            broker = RedisBroker(
                connection,
                address,
                self._identity.id,
                lease=queue.visibility_timeout or DEFAULT_LEASE_SECONDS,
                advice=advice,
                pending_retries=self._pending_retries[queue.uri],
                held=self._held[queue.uri],
                clock=self._identity.clock,
                is_raw=queue.route is not None,
                is_strict=queue.is_strict,
            )
            self._pending_retries[queue.uri].reads_bodies = queue.route is None
            if queue.connections == 1:  # others may be receiving just now
                await broker.release_unknown()
            try:
                yield broker
            finally:
                await broker.close()

    @asynccontextmanager
    async def open_publisher(self, queue: QueueConfig) -> AsyncIterator["RedisPublisher"]:
        address = read_address(queue, self._settings)
        async with _connected(queue, address) as connection:
            yield RedisPublisher(connection, address, self._identity.clock)


@asynccontextmanager
async def _connected(queue: QueueConfig, address: RedisAddress) -> AsyncIterator[RedisConnection]:
    try:
        connection = RedisConnection(address.url, cafile=address.cafile)
    except ValueError:  # without its text: the URL may hold a password
        raise QueueRefused(f"the URI of queue {queue.name!r} cannot be used to connect") from None
    try:
        yield connection
    finally:
        await connection.close()


async def _advice(connection: RedisConnection) -> str | None:
    """Return what to change at the server, so that it loses nothing. Raises QueueRefused."""
    server = await connection.info("server")
    version = str(server.get("redis_version", ""))
    if version and tuple(int(part) for part in version.split(".")[:2]) < MIN_VERSION:
        raise QueueRefused(f"Redis {version} is too old: streams need 6.2 or newer here")
    persistence, memory = await connection.info("persistence"), await connection.info("memory")
    advice = []
    if not persistence.get("aof_enabled"):
        advice.append("a restart loses messages: set appendonly yes (and appendfsync always)")
    policy = str(memory.get("maxmemory_policy", "noeviction"))
    if memory.get("maxmemory") and policy.startswith("allkeys"):
        advice.append(f"the stream may be evicted: set maxmemory-policy noeviction, not {policy}")
    return f"Redis: {'; '.join(advice)}" if advice else None


async def _make_group(connection: RedisConnection, address: RedisAddress) -> None:
    """Make the group, and the stream, unless they are there."""
    try:
        await connection.call("XGROUP", "CREATE", address.stream, address.group, "0", "MKSTREAM")
    except RedisRefused as error:
        if "BUSYGROUP" not in str(error):
            raise


class RedisLease(Struct, eq=False):
    """One hand-over, and the handle to settle it. Equal to no other one."""

    id: str  # of the stream entry
    count: int  # of its deliveries, this one included: the fence
    body: bytes
    history: RetryHistory
    until: float  # loop time; changed only by an extension

    @property
    def name(self) -> str:
        """The name that a message shares with its copies."""
        return self.history.first_id or self.id

    @property
    def published_at(self) -> float:
        """When it was published: an id begins with the server's time, in milliseconds."""
        return self.history.published_at or int(self.id.partition("-")[0]) / 1000


class HeldLeases(dict[str, RedisLease]):
    """The entries of one queue that this process holds, over all connections."""

    def __init__(self) -> None:
        super().__init__()
        self._next_sweep = 0.0

    def take(self, lease: RedisLease) -> None:
        self[lease.id] = lease

    def finish(self, lease: RedisLease) -> None:
        if self.get(lease.id) is lease:
            del self[lease.id]

    def sweep(self, now: float, every: float) -> None:
        """Forget expired leases, now and then."""
        if now >= self._next_sweep:
            self._next_sweep = now + every
            for lease in [each for each in self.values() if each.until <= now]:
                del self[lease.id]


class RedisBroker:
    """One connection. Its leases are good on the next one too, so an outage costs none of them."""

    holds_groups: Final = False

    def __init__(
        self,
        connection: RedisConnection,
        address: RedisAddress,
        consumer: str,
        *,
        lease: float,
        advice: str | None,
        pending_retries: PendingRetries,
        held: HeldLeases,
        clock: Callable[[], float],
        is_raw: bool = False,
        is_strict: bool = False,
    ) -> None:
        self._is_raw = is_raw
        self._is_strict = is_strict
        self._connection = connection
        self._address = address
        self._consumer = consumer
        self._keys = _keys(address)
        self._pending_retries = pending_retries
        self._held = held
        self._clock = clock  # the machine's
        self.lease_seconds = lease
        self.traits = Traits(ordered_here=True, advice=advice)
        self._poll = LongPoll()
        self.stop = self._poll.stop
        self._last_id = "0-0"
        self._next_look = 0.0  # for ended leases, loop time
        self._watch: asyncio.Task[None] | None = None
        self._claiming = asyncio.Lock()

    async def release_unknown(self) -> None:
        """Give back what the server has handed to us and we never got: its answer was lost.

        Else it would come back when its lease ends, behind newer messages of its group.
        """
        start, pending = "-", None
        while pending is None or len(pending) == PENDING_AT_ONCE_MESSAGES:
            pending = await self._run(PENDING, start, PENDING_AT_ONCE_MESSAGES)
            unknown: list[str | int] = []
            for entry, _, _, count in pending:
                name = entry.decode()
                known = self._held.get(name)
                if known is None or known.count != count:
                    unknown += [name, count]
                start = f"({name}"
            if unknown:
                await self._run(RELEASE, *unknown)

    async def close(self) -> None:
        self.stop()
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait((self._watch,))
        async with self._claiming:  # a receive under way ends before its connection is closed
            with suppress(BrokerError):
                await self._run(TIDY, FORGOTTEN_CONSUMER_MS)

    async def receive(self, limit: int) -> Sequence[ReceivedMessage]:
        async def look() -> ClaimedBatch:
            return await self._claim(limit)

        async def fetch(more: int) -> Sequence[ReceivedMessage]:
            return (await self._claim(more)).messages

        batch = [*await self._poll.receive(look, self._wait)]
        await self._pending_retries.fill(
            batch,
            limit,
            fetch,
            step_seconds=GATHER_STEP_SECONDS,
            lease=self.lease_seconds,
            is_stopped=self._poll.stopped.is_set,
        )
        return batch

    async def ack(self, handles: Sequence[Handle], *, error: str = "") -> Sequence[Unsettled]:
        del error  # nothing is kept of a message that is gone
        leases = cast("Sequence[RedisLease]", handles)
        lost = await self._run(ACK, *_fences(leases))
        for lease in leases:
            self._held.finish(lease)
        return _unsettled(leases, lost)

    async def nack(self, items: Sequence[Nack]) -> Sequence[Unsettled]:
        leases = [cast("RedisLease", item.handle) for item in items]
        arguments: list[str | int] = []
        for lease, item in zip(leases, items, strict=True):
            history = RetryHistory(
                first_id=lease.name,
                tally=item.tally,
                receive_count=lease.history.receive_count + lease.count,
                due_at=self._clock() + item.delay,
                published_at=lease.published_at,
            )
            headers = [str(part) for pair in history_headers(history).items() for part in pair]
            tally = f"{item.tally.failures} {item.tally.requests}"
            delay = math.ceil(item.delay * 1000)
            arguments += [lease.id, lease.count, delay, tally, len(headers), *headers]
        now, field = loop_time(), self._address.field
        lost = _unsettled(leases, await self._run(NACK, field, int(self._is_raw), *arguments))
        gone = {each.handle for each in lost}
        for lease, item in zip(leases, items, strict=True):
            self._held.finish(lease)
            if item.delay > 0 and item.in_order and lease not in gone:
                self._pending_retries.expect(lease.name, lease.body, now=now, delay=item.delay)
        self._poll.news.ring()
        return lost

    async def extend(self, handles: Sequence[Handle], seconds: float) -> Sequence[Unsettled]:
        """Extend to `seconds` from now, or by a lease: Redis knows no time in the future."""
        leases = cast("Sequence[RedisLease]", handles)
        until = loop_time() + min(seconds, self.lease_seconds)
        idle = max(round((self.lease_seconds - seconds) * 1000), 0)
        lost = _unsettled(leases, await self._run(EXTEND, idle, *_fences(leases)))
        for lease in leases:
            lease.until = until
        for each in lost:
            self._held.finish(cast("RedisLease", each.handle))
        return lost

    async def depth(self) -> Depth | None:
        stored, out, returned, delayed = await self._run(DEPTH)
        due = max(stored - out, 0) + returned
        return Depth(waiting=due + delayed, in_flight=out - returned, due=due)

    async def _claim(self, limit: int) -> ClaimedBatch:
        async with self._claiming:
            if self._poll.stopped.is_set():
                return ClaimedBatch(())
            asked_at = loop_time()
            self._held.sweep(asked_at, self.lease_seconds)
            looks = asked_at >= self._next_look
            lease_ms = math.ceil(self.lease_seconds * 1000)
            rows, last, wait_ms = await self._run(
                CLAIM, lease_ms, limit, int(looks), int(self._is_strict)
            )
            if looks and len(rows) < limit:  # else there may be more whose lease has ended
                self._next_look = asked_at + min(LOOK_SECONDS, self.lease_seconds / 4)
            self._last_id = last.decode()
            messages = [self._received(row, asked_at) for row in rows]
        wait = self._next_look - loop_time()
        return ClaimedBatch(messages, wait if wait_ms < 0 else min(wait, wait_ms / 1000))

    def _received(self, row: Sequence[Any], asked_at: float) -> ReceivedMessage:
        entry, count, tally, fields = row
        headers = {
            name.decode(errors="replace"): value
            for name, value in zip(fields[::2], fields[1::2], strict=True)
        }
        texts = _texts(headers)
        history = read_history(texts) or RetryHistory()
        body, flaw = headers.get(self._address.field), None
        if body is None:
            body, flaw = msgspec.json.encode({"fields": texts}), self._flaw()
        source = self._source_of(headers) if self._is_raw else None
        until = asked_at + self.lease_seconds
        lease = RedisLease(entry.decode(), count, body, history, until)
        self._held.take(lease)
        self._pending_retries.returned(lease.name)
        return ReceivedMessage(
            body,
            lease,
            broker_id=lease.id,
            receive_count=history.receive_count + count,
            lease_until=until,
            tally=_tally(tally.decode()) or history.tally,
            parent=carried_in(texts),
            published_at=lease.published_at,
            claimed_id=history.first_id,
            flaw=flaw,
            source=source,
        )

    def _source_of(self, fields: Mapping[str, bytes]) -> Source:
        """Return all fields but the body and ours. Without a body, a replay must not make one."""
        field = self._address.field
        attributes, binary = dict[str, str](), dict[str, bytes]()
        for name, value in fields.items():
            if name == field or name.startswith(PREFIX):
                continue
            try:
                attributes[name] = value.decode()
            except UnicodeDecodeError:
                binary[name] = value
        kinds = {} if field in fields else {"": _NO_BODY}
        return Source(attributes=attributes, binary=binary, kinds=kinds)

    def _flaw(self) -> str:
        return f"the stream entry has no field {self._address.field!r}"

    async def _wait(self, rung: asyncio.Event, at_most: float) -> None:
        """Wait for a message to be published, or for news from this router."""
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._until_published(), name="redis watch")
        ringing = asyncio.create_task(rung.wait(), name="redis news")
        await asyncio.wait(
            (self._watch, ringing), timeout=at_most, return_when=asyncio.FIRST_COMPLETED
        )
        ringing.cancel()
        if self._watch.done() and not self._watch.cancelled():
            self._watch.result()  # Disconnected

    async def _until_published(self) -> None:
        milliseconds = round(LOOK_SECONDS * 1000)
        await self._connection.call(
            *("XREAD", "COUNT", 1, "BLOCK", milliseconds),
            *("STREAMS", self._address.stream, self._last_id),
        )

    async def _run(self, script: str, *arguments: str | int) -> Any:
        given = (self._address.group, self._consumer, *arguments)
        return await self._connection.run(script, self._keys, given)


class RedisPublisher:
    def __init__(
        self, connection: RedisConnection, address: RedisAddress, clock: Callable[[], float]
    ) -> None:
        self._connection = connection
        self._address = address
        self._clock = clock

    async def publish(self, items: Sequence[Publication]) -> Sequence[bool]:
        now = self._clock()
        arguments: list[str | bytes | int] = []
        for item in items:
            if item.source is not None:
                await self._publish_raw(item.source, item.body)
                continue
            left = 0.0 if item.not_before is None else max(item.not_before - now, 0.0)
            body = dated_body(item.message, item.body, item.not_before)
            arguments += [math.ceil(left * 1000), body]
        for at in range(0, len(arguments), 2 * PUBLISHED_AT_ONCE_MESSAGES):
            some = arguments[at : at + 2 * PUBLISHED_AT_ONCE_MESSAGES]
            given = (self._address.group, "", self._address.field, *some)
            await self._connection.run(PUBLISH, _keys(self._address), given)
        return [True] * len(items)

    async def _publish_raw(self, source: Source, body: bytes) -> None:
        """Add the entry that a foreign client has added, once more (RAW-4)."""
        own = {} if source.kinds.get("") == _NO_BODY else {self._address.field: body}
        entry: dict[str, str | bytes] = {**source.attributes, **source.binary, **own}
        flat = [part for pair in entry.items() for part in pair]
        await self._connection.call("XADD", self._address.stream, "*", *flat)


def _keys(address: RedisAddress) -> tuple[str, ...]:
    return (address.stream, *(address.key(name) for name in ("delayed", "copies", "tallies")))


def _fences(leases: Sequence[RedisLease]) -> list[str | int]:
    return [part for lease in leases for part in (lease.id, lease.count)]


def _unsettled(leases: Sequence[RedisLease], lost: Sequence[int]) -> list[Unsettled]:
    return [Unsettled(leases[position], LOST, stale=True) for position in lost]


def _tally(text: str) -> Tally | None:
    """Return what was tried before a message was given back without a delay, if it was."""
    failures, _, requests = text.partition(" ")
    return Tally(int(failures), int(requests)) if requests else None


def _texts(headers: Mapping[str, bytes]) -> dict[str, str]:
    return {name: value.decode(errors="replace") for name, value in headers.items()}
