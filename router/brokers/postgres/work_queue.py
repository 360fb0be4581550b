"""One queue in PostgreSQL, both ends of it: each call is one of the functions in schema.sql."""

import secrets
from collections.abc import Collection, Sequence
from functools import partial
from typing import Final, cast

from router.brokers.kit import loop_time
from router.brokers.kit.long_poll import LongPoll
from router.brokers.postgres.database import PostgresDatabase
from router.brokers.postgres.rows import (
    ending_columns,
    outgoing_columns,
    places,
    publication_columns,
    text,
)
from router.brokers.work_queue import (
    MAX_ERROR_CHARACTERS,
    ClaimedBatch,
    Lease,
    Sinks,
    duplicate,
    ending_with,
    no_sinks,
    receive_by_claims,
    stale,
)
from router.core.config import QueueConfig
from router.core.message import Handle, ReceivedMessage, Tally
from router.ports import Depth, Finish, Publication, Receipt, StaleLease, Traits, Unsettled

FIRST_POLL_SECONDS: Final = 0.05  # for others' changes, after something came …
LAST_POLL_SECONDS: Final = 1.0  # … and when nothing has come for a while

_CONFIGURE: Final = "SELECT message_router.configure($1, $2, $3, $4)"
_PUBLISH: Final = f"SELECT message_router.publish({places(12)}) AS identity"
_KEPT: Final = (
    "SELECT identity, message_id FROM message_router.queue_messages"
    " WHERE queue = $1 AND identity = ANY ($2::text[])"
)
_CLAIM: Final = "SELECT * FROM message_router.claim($1, $2, $3, $4, $5)"
_FINISH: Final = f"SELECT message_router.finish({places(22)}) AS position"
_NACK: Final = "SELECT message_router.nack($1, $2, $3, $4, $5, $6) AS is_ours"
_EXTEND: Final = "SELECT message_router.extend($1, $2, $3) AS position"
_END_LEASES: Final = "SELECT message_router.end_leases($1, $2)"
_DEPTH: Final = "SELECT * FROM message_router.depth($1, $2)"


class PostgresQueue:
    """One connection to one queue. Its leases are good on any other connection as well."""

    holds_groups: Final = True

    def __init__(
        self,
        database: PostgresDatabase,
        name: str,
        *,
        worker_id: str,
        dedup_window: float,
        lease: float,
        result_retention: float = 0.0,
        sinks: Sinks[str] = no_sinks,
    ) -> None:
        """`sinks` finds the queues of the same database."""
        self._database = database
        self._name = name
        self._worker_id = worker_id
        self._dedup_window = dedup_window
        self._result_retention = result_retention
        self._sinks = sinks
        self.traits = Traits(ordered_here=False, finisher=self)
        self._signal = database.signal(name)
        self._pause = FIRST_POLL_SECONDS
        self._poll = LongPoll(self._signal)
        self.interrupt = self._poll.interrupt
        self.lease_seconds = lease

    async def configure(self, *, keep: float, audit: float) -> None:
        """Set how many seconds finished messages and audit rows stay, for all who consume it."""
        keep = max(keep, self._dedup_window)
        results = max(keep, self._result_retention)
        await self._database.call(_CONFIGURE, self._name, keep, audit, results)

    async def publish(self, items: Sequence[Publication]) -> Sequence[Receipt]:
        """Answer when the database has committed them."""
        columns = publication_columns(items)
        keys = columns[1]
        queues = [self._name] * len(items)
        rows = await self._database.call(_PUBLISH, self._dedup_window, queues, *columns)
        if rows:
            self._signal.ring()
        new = {row["identity"] for row in rows}
        kept: dict[str, str] = {}
        if len(rows) < len(items):
            known = await self._database.call(_KEPT, self._name, keys)
            kept = {row["identity"]: row["message_id"] for row in known}
        receipts: list[Receipt] = []
        for key, item in zip(keys, items, strict=True):
            receipts.append(key in new or duplicate(item, kept.get(key)))
            new.discard(key)  # of a key that comes twice, only the first was added
        return receipts

    async def receive(self, limit: int) -> Sequence[ReceivedMessage]:
        return await receive_by_claims(self._poll, partial(self.claim, limit), self._database.wait)

    async def claim(self, limit: int) -> ClaimedBatch:
        """Take the next messages, if there are any now."""
        token = secrets.randbits(63)
        lease_until = loop_time() + self.lease_seconds
        rows = await self._database.claim(
            _CLAIM, self._name, self._worker_id, token, limit, self.lease_seconds
        )
        if rows[0]["id"] is None:
            until_change, pause = rows[0]["wait"], self._pause
            self._pause = min(2 * pause, LAST_POLL_SECONDS)
            wait = pause if until_change is None else min(max(until_change, 0.0), pause)
            return ClaimedBatch((), wait)
        self._pause = FIRST_POLL_SECONDS
        incarnation = self._database.incarnation
        messages = []
        for row_id, is_grouped, deliveries, failures, requests, body, _ in rows:
            lease = Lease(row_id, token, is_grouped)
            tally = Tally(failures, requests)
            broker_id = f"{incarnation}-{row_id}"
            messages.append(ReceivedMessage(body, lease, broker_id, deliveries, lease_until, tally))
        return ClaimedBatch(messages, 0.0)

    async def ack(self, handles: Sequence[Handle], *, error: str = "") -> Sequence[Unsettled]:
        ending = ending_with(error)
        unsettled = await self._finish([Finish(handle, ending) for handle in handles])
        if any(cast("Lease", handle).is_grouped for handle in handles):
            self._signal.ring()
        return unsettled

    def takes(self, queue: QueueConfig) -> bool:
        return self._sinks(queue) is not None

    async def finish(self, items: Sequence[Finish]) -> Sequence[Unsettled]:
        unsettled = await self._finish(items)
        self._signal.ring()
        return unsettled

    async def nack(self, handle: Handle, delay: float, tally: Tally, *, error: str = "") -> None:
        lease = cast("Lease", handle)
        (row,) = await self._database.call(
            _NACK,
            lease.id,
            lease.token,
            delay,
            tally.failures,
            tally.requests,
            text(error[:MAX_ERROR_CHARACTERS]),
        )
        if not row["is_ours"]:
            raise StaleLease(f"message {lease.id} is not ours any more")
        self._signal.ring()

    async def end_leases(self, worker_ids: Collection[str]) -> None:
        """Give back all that these dead workers hold (WQ-10)."""
        await self._database.call(_END_LEASES, self._name, list(worker_ids))
        self._signal.ring()

    async def extend(self, handles: Sequence[Handle], seconds: float) -> Sequence[Unsettled]:
        leases = cast("Sequence[Lease]", handles)
        rows = await self._database.call(_EXTEND, *_columns(leases), seconds)
        return stale(leases, [row["position"] for row in rows])

    async def depth(self) -> Depth:
        (row,) = await self._database.call(_DEPTH, self._name, self._worker_id)
        return Depth(waiting=row["waiting"], in_flight=row["in_flight"], due=row["due"])

    async def _finish(self, items: Sequence[Finish]) -> Sequence[Unsettled]:
        leases = [cast("Lease", item.handle) for item in items]
        endings = ending_columns(items)
        outgoing = outgoing_columns([item.outgoing for item in items], self._sinks)
        rows = await self._database.call(
            _FINISH, *_columns(leases), *endings, self._dedup_window, *outgoing
        )
        for name in set(cast("Sequence[str]", outgoing[1])):
            self._database.signal(name).ring()
        return stale(leases, [row["position"] for row in rows])


def _columns(leases: Sequence[Lease]) -> tuple[Sequence[int], Sequence[int]]:
    return [lease.id for lease in leases], [lease.token for lease in leases]
