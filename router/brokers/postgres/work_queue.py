"""One queue in PostgreSQL, both ends of it: each call is one of the functions in functions.sql."""

import secrets
from collections.abc import Collection, Sequence
from functools import partial
from hashlib import sha256
from typing import Any, Final, cast

from msgspec.structs import replace

from router.brokers.kit import loop_time
from router.brokers.kit.consuming import ClaimedBatch, LongPoll
from router.brokers.postgres.database import PostgresDatabase
from router.brokers.work_queue import (
    FREED_AT_ONCE,
    HELD_UNTIL,
    MAX_ERROR_CHARACTERS,
    Lease,
    LocalQueues,
    ResultLimit,
    cancelled,
    duplicate,
    ending_with,
    keeps_record,
    no_local_queues,
    ordered_group,
    payload_size,
    sink_for,
    stale,
    stored_failure,
)
from router.brokers.workers import PollPause
from router.core.config import QueueConfig
from router.core.message import DEFAULT_POOL, Handle, ReceivedMessage, Tally
from router.core.outcome import ACCEPTED
from router.ports import (
    Depth,
    Finish,
    Nack,
    OutgoingMessage,
    PoolFilter,
    Publication,
    Receipt,
    Traits,
    Unsettled,
)

FIRST_POLL_SECONDS: Final = 0.05  # for others' changes, after something came …
LAST_POLL_SECONDS: Final = 1.0  # … and when nothing has come for a while


def places(count: int) -> str:
    """Return the arguments of a call: `$1, $2`."""
    return ", ".join(f"${number}" for number in range(1, count + 1))


CONFIGURE: Final = "SELECT message_router.configure($1, $2, $3, $4)"
_PUBLISH: Final = f"SELECT message_router.publish({places(12)}) AS identity"
_KEPT: Final = (
    "SELECT identity, message_id FROM message_router.queue_messages"
    " WHERE queue = $1 AND identity = ANY ($2::text[])"
)
_CLAIM: Final = """
SELECT claimed.*, (
    SELECT is_cancelled FROM message_router.queue_messages AS message
    WHERE message.id = claimed.id AND is_cancelled
)
FROM message_router.claim($1, $2, $3, $4, $5, $6, $7) AS claimed
"""
# The same, and when each message was published.
_CLAIM_DATED: Final = _CLAIM.replace(
    "\n)\nFROM",
    """
), (
    SELECT extract(epoch FROM published_at)::float8
    FROM message_router.queue_messages AS message WHERE message.id = claimed.id
)
FROM""",
)
FINISH: Final = f"SELECT message_router.finish({places(22)}) AS position"
_FINISH_CANCELLED: Final = f"SELECT message_router.finish({places(23)}) AS position"
# The same, with results of messages that are kept for them. $3 and $4 are results and omissions.
_OF_KEPT: Final = """
FROM (
    SELECT array_agg(CASE WHEN message.is_kept THEN given.result END ORDER BY place) AS results,
           array_agg(message.is_kept AND given.omitted ORDER BY place) AS omitted
    FROM unnest($1::bigint[], $3::bytea[], $4::boolean[])
             WITH ORDINALITY AS given (id, result, omitted, place)
         LEFT JOIN message_router.queue_messages AS message USING (id)
) AS kept
"""
_FINISH_WITH_RESULTS: Final = FINISH.replace("$3, $4", "kept.results, kept.omitted") + _OF_KEPT
_RESULT_BYTES: Final = (
    "SELECT coalesce(sum(octet_length(result)), 0)::bigint AS size"
    " FROM message_router.queue_messages"
)
_DROP_RESULTS: Final = """
WITH oldest AS (
    SELECT id, octet_length(result) AS size,
           sum(octet_length(result)) OVER (ORDER BY id) AS size_up_to
    FROM (
        SELECT id, result FROM message_router.queue_messages
        WHERE id > $1 AND result IS NOT NULL ORDER BY id LIMIT $2
    ) AS first
), dropped AS (
    UPDATE message_router.queue_messages AS message SET result = NULL, result_omitted = true
    FROM oldest WHERE message.id = oldest.id AND oldest.size_up_to - oldest.size < $3
    RETURNING oldest.id, oldest.size
)
SELECT coalesce(sum(size), 0)::bigint AS size, coalesce(max(id), 0)::bigint AS last FROM dropped
"""
# One call of the schema's function for each message, in one transaction.
_NACK: Final = """
SELECT (place - 1)::integer AS position
FROM unnest(
         $1::bigint[], $2::bigint[], $3::float8[], $4::integer[], $5::integer[], $6::text[],
         $7::text[], $8::integer[]
     ) WITH ORDINALITY AS item (id, token, delay, attempts, posts, error, code, status, place)
WHERE NOT message_router.nack(id, token, delay, attempts, posts, error, code, status)
"""
# The token stays: `finish` ends the message by it, once someone has decided.
_HOLD: Final = f"""
WITH asked AS (
    SELECT * FROM unnest(
        $1::bigint[], $2::bigint[], $3::text[], $4::text[], $5::integer[], $6::integer[],
        $7::integer[]
    ) WITH ORDINALITY AS item (id, token, code, error, status, failures, requests, place)
), done AS (
    UPDATE message_router.queue_messages AS message
    SET state = 'ready', run_after = to_timestamp({HELD_UNTIL}), is_cancelled = NULL,
        not_before = to_timestamp({HELD_UNTIL}), lease_until = NULL, deliveries = 0,
        attempts = coalesce(failures, attempts), posts = coalesce(requests, posts),
        last_error = error, error_code = code, http_status = status
    FROM asked
    WHERE message.id = asked.id AND message.lease_token = asked.token AND finished_at IS NULL
    RETURNING message.id, queue, group_key, worker_id, error, place
), changed AS (
    INSERT INTO message_router.queue_changes (queue, group_key)
    SELECT DISTINCT queue, group_key FROM done
), noted AS (
    INSERT INTO message_router.queue_audit (id, queue, state, worker_id, error)
    SELECT done.id, done.queue, 'held', done.worker_id, done.error
    FROM done JOIN message_router.queues USING (queue) WHERE queues.audit > 0
)
SELECT (place - 1)::integer AS position FROM asked WHERE place NOT IN (SELECT place FROM done)
"""  # noqa: S608  a number
# Those whose lease was lost, and those that are to be cancelled.
_EXTEND: Final = """
SELECT message_router.extend($1, $2, $3) AS position, false AS is_cancelled
UNION ALL
SELECT (place - 1)::integer, true
FROM unnest($1::bigint[], $2::bigint[]) WITH ORDINALITY AS asked (id, token, place)
    JOIN message_router.queue_messages AS message USING (id)
WHERE is_cancelled AND lease_token = token AND state = 'in-flight'
"""
_END_LEASES: Final = "SELECT message_router.end_leases($1, $2)"
_DEPTH: Final = "SELECT * FROM message_router.depth($1, $2)"


class PostgresLease(Lease, frozen=True, gc=False):
    is_grouped: bool  # settling it may make the next message of its group claimable


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
        local_queues: LocalQueues[str] = no_local_queues,
        results: ResultLimit | None = None,
        is_dated: bool = False,
        poll_interval: float | None = None,
    ) -> None:
        """`local_queues` finds the queues of the same database.

        `is_dated`: what is received says when it was published, which costs a read.
        """
        self._database = database
        self._name = name
        self._worker_id = worker_id
        self._dedup_window = dedup_window
        self._result_retention = result_retention
        self._local_queues = local_queues
        self._results = results
        self._claim = _CLAIM_DATED if is_dated else _CLAIM
        self._pools: PoolFilter | None = None  # that claims ask for; None: all
        self.traits = Traits(finisher=self, selector=self, holds_letters=True, published_here=True)
        self._signal = database.signal(name)
        self._pause = PollPause(FIRST_POLL_SECONDS, poll_interval or LAST_POLL_SECONDS)
        self._poll = LongPoll(self._signal)
        self.stop = self._poll.stop
        self.lease_seconds = lease

    async def configure(self, *, keep: float, audit: float) -> None:
        """Set how many seconds finished messages and audit rows stay, for all who consume it."""
        keep = max(keep, self._dedup_window)
        results = max(keep, self._result_retention)
        await self._database.call(CONFIGURE, self._name, keep, audit, results)

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

    def select(self, pools: PoolFilter | None) -> None:
        if pools != self._pools:
            self._pools = pools
            self._signal.ring()

    async def receive(self, limit: int) -> Sequence[ReceivedMessage]:
        return await self._poll.receive(partial(self.claim, limit), self._database.wait)

    async def claim(self, limit: int) -> ClaimedBatch:
        """Take the next messages, if there are any now."""
        token = secrets.randbits(63)
        lease_until = loop_time() + self.lease_seconds
        pools = self._pools
        rows = await self._database.claim(
            self._claim,
            self._name,
            self._worker_id,
            token,
            limit,
            self.lease_seconds,
            None if pools is None else [text(code) for code in pools.codes],
            pools is not None and pools.excludes,
        )
        if rows[0]["id"] is None:
            until_change, pause = rows[0]["wait"], self._pause.lengthen()
            wait = pause if until_change is None else min(max(until_change, 0.0), pause)
            return ClaimedBatch((), wait)
        self._pause.reset()
        incarnation = self._database.incarnation
        messages = []
        for (
            row_id,
            is_grouped,
            receive_count,
            failures,
            requests,
            body,
            _,
            is_cancelled,
            *at,
        ) in rows:
            lease = PostgresLease(row_id, token, is_grouped)
            tally = Tally(failures, requests)
            broker_id = f"{incarnation}-{row_id}"
            message = ReceivedMessage(
                body,
                lease,
                broker_id,
                receive_count,
                lease_until,
                tally,
                is_cancelled=is_cancelled is not None,
            )
            messages.append(replace(message, published_at=at[0]) if at else message)
        return ClaimedBatch(messages, 0.0)

    async def ack(self, handles: Sequence[Handle], *, error: str = "") -> Sequence[Unsettled]:
        ending = ending_with(error)
        unsettled = await self._finish([Finish(handle, ending) for handle in handles])
        if any(cast("PostgresLease", handle).is_grouped for handle in handles):
            self._signal.ring()
        return unsettled

    def takes(self, queue: QueueConfig) -> bool:
        return self._local_queues(queue) is not None

    async def finish(self, items: Sequence[Finish]) -> Sequence[Unsettled]:
        held, ending = list[Finish](), list[Finish]()
        for item in items:
            # A message without a group holds none: it just ends.
            stays = item.is_held and cast("PostgresLease", item.handle).is_grouped
            (held if stays else ending).append(item)
        unsettled = await self._hold(held) if held else ()
        if ending:
            unsettled = [*unsettled, *await self._finish(ending)]
        self._signal.ring()
        return unsettled

    async def _hold(self, items: Sequence[Finish]) -> Sequence[Unsettled]:
        """Let messages that were given up hold their groups (ORD-11)."""
        leases = [cast("Lease", item.handle) for item in items]
        _, _, codes, errors, statuses, failures, requests = ending_columns(items)
        rows = await self._database.call(
            _HOLD, *_columns(leases), codes, errors, statuses, failures, requests
        )
        return stale(leases, [row["position"] for row in rows])

    async def nack(self, items: Sequence[Nack]) -> Sequence[Unsettled]:
        leases = [cast("Lease", item.handle) for item in items]
        rows = await self._database.call(
            _NACK,
            *_columns(leases),
            [item.delay for item in items],
            [item.tally.failures for item in items],
            [item.tally.requests for item in items],
            *failure_columns(items),
        )
        if len(rows) < len(items):
            self._signal.ring()
        return stale(leases, [row["position"] for row in rows])

    async def end_leases(self, worker_ids: Collection[str]) -> None:
        """Give back all that these dead workers hold (WQ-10)."""
        await self._database.call(_END_LEASES, self._name, list(worker_ids))
        self._signal.ring()

    async def extend(self, handles: Sequence[Handle], seconds: float) -> Sequence[Unsettled]:
        leases = cast("Sequence[Lease]", handles)
        rows = await self._database.call(_EXTEND, *_columns(leases), seconds)
        lost = [row["position"] for row in rows if not row["is_cancelled"]]
        to_end = {row["position"] for row in rows if row["is_cancelled"]}.difference(lost)
        return [*stale(leases, lost), *cancelled(leases, to_end)]

    async def depth(self) -> Depth:
        (row,) = await self._database.call(_DEPTH, self._name, self._worker_id)
        return Depth(waiting=row["waiting"], in_flight=row["in_flight"], due=row["due"])

    async def _finish(self, items: Sequence[Finish]) -> Sequence[Unsettled]:
        leases = [cast("Lease", item.handle) for item in items]
        endings = ending_columns(items)
        outgoing = outgoing_columns([item.outgoing for item in items], self._local_queues)
        has_results = any(
            item.ending.result is not None or item.ending.result_omitted for item in items
        )
        arguments = [*_columns(leases), *endings, self._dedup_window, *outgoing]
        were_cancelled = [item.ending.is_cancelled for item in items]
        if any(were_cancelled):
            rows = await self._database.call(_FINISH_CANCELLED, *arguments, were_cancelled)
        else:
            query = _FINISH_WITH_RESULTS if has_results else FINISH
            rows = await self._database.call(query, *arguments)
        for name in set(cast("Sequence[str]", outgoing[1])):
            self._database.signal(name).ring()
        if self._results is not None and self._results.is_due(items):
            await limit_results(self._database, self._results)
        return stale(leases, [row["position"] for row in rows])


async def limit_results(database: PostgresDatabase, limit: ResultLimit) -> None:
    """Drop the oldest results of a database if all of them take too much."""
    (total,) = await database.call(_RESULT_BYTES)
    excess, after = limit.excess(total["size"]), 0
    while excess > 0:
        (dropped,) = await database.call(_DROP_RESULTS, after, FREED_AT_ONCE, excess)
        excess = excess - dropped["size"] if dropped["size"] else 0
        after = dropped["last"]


def _columns(leases: Sequence[Lease]) -> tuple[Sequence[int], Sequence[int]]:
    return [lease.id for lease in leases], [lease.token for lease in leases]


def publication_columns(items: Sequence[Publication]) -> tuple[Any, ...]:
    """Return ids, identities, pools, groups, priorities, bodies, and what only some messages have.

    These last are whether it is kept, not before, correlation ids and payload sizes. Most calls
    have none of them: then they are None, which costs nothing.
    """
    messages = [item.message for item in items]
    plain = (
        [text(message.id) for message in messages],
        [_identity(item) for item in items],
        [text(message.pool or DEFAULT_POOL) for message in messages],
        [optional_text(ordered_group(message)) for message in messages],
        [message.level for message in messages],
        [item.body for item in items],
    )
    kept = [keeps_record(message) for message in messages]
    if not (
        any(kept)
        or any(item.not_before is not None for item in items)
        or any(message.correlation_id is not None for message in messages)
    ):
        return (*plain, None, None, None, None)
    return (*plain, kept, *extra_columns(items))


def extra_columns(items: Sequence[Publication]) -> tuple[Any, Any, Any]:
    """Return not before, correlation ids and payload sizes."""
    return (
        [item.not_before for item in items],
        [optional_text(item.message.correlation_id) for item in items],
        [payload_size(item.message) for item in items],
    )


def outgoing_columns(
    outgoing: Sequence[Sequence[OutgoingMessage]], local_queues: LocalQueues[str]
) -> tuple[Any, ...]:
    """Return places and queues of what goes out, and the columns of the messages."""
    flat = [(place, one) for place, several in enumerate(outgoing) for one in several]
    names = [sink_for(local_queues, one.queue) for _, one in flat]
    publications = [one.publication for _, one in flat]
    return ([place for place, _ in flat], names, *publication_columns(publications))


def ending_columns(items: Sequence[Finish]) -> tuple[Any, ...]:
    """Return results, whether they were omitted, error codes, errors, HTTP statuses and tallies.

    All are None if each message was accepted and has nothing to keep: that costs nothing.
    """
    if all(item.ending is ACCEPTED and item.tally is None for item in items):
        return (None,) * 7
    failures = [item.ending.failure for item in items]
    return (
        [item.ending.result for item in items],
        [item.ending.result_omitted for item in items],
        [None if one is None else text(one.code) for one in failures],
        [
            None
            if one is None or item.ending.is_cancelled
            else text(one.message[:MAX_ERROR_CHARACTERS])
            for one, item in zip(failures, items, strict=True)
        ],
        [None if one is None else one.http_status for one in failures],
        [None if item.tally is None else item.tally.failures for item in items],
        [None if item.tally is None else item.tally.requests for item in items],
    )


def failure_columns(items: Sequence[Nack]) -> tuple[Any, Any, Any]:
    """Return errors, their codes and HTTP statuses of failed attempts."""
    failures = [stored_failure(item.failure) for item in items]
    return (
        ["" if one is None else text(one.message) for one in failures],
        [None if one is None else text(one.code) for one in failures],
        [None if one is None else one.http_status for one in failures],
    )


def text(value: str) -> str:
    """Replace the one character that PostgreSQL cannot store."""
    return value.replace("\0", "\N{REPLACEMENT CHARACTER}")


def optional_text(value: str | None) -> str | None:
    return None if value is None else text(value)


def _identity(item: Publication) -> str:
    """Return what `dedup_key_of` does, with a digest that `identity_of` in the schema knows."""
    if item.dedup_key is not None:
        return text(f"={item.dedup_key}")
    return text(f"{sha256(item.body).hexdigest()[:32]}:{item.message.id}")
