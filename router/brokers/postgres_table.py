"""The work queue as a table of PostgreSQL: each call is one of the functions in the database."""

import asyncio
import secrets
from collections.abc import Collection, Sequence
from hashlib import sha256
from typing import Any, Final

from router.brokers.bell import wait_for_ring
from router.brokers.postgres_database import PostgresDatabase
from router.brokers.work_queue import MAX_ERROR, Claim, Claimed, Lease
from router.core.message import DEFAULT_POOL, UNTRIED, Message, Mode, Tally
from router.ports import Depth, Publication

FIRST_POLL: Final = 0.05  # seconds between two looks for others' changes, after something came …
LAST_POLL: Final = 1.0  # … and when nothing has come for a while

_CONFIGURE: Final = "SELECT message_router.configure($1, $2, $3)"
_PUBLISH: Final = "SELECT message_router.publish($1, $2, $3, $4, $5, $6, $7, $8) AS identity"
_CLAIM: Final = "SELECT * FROM message_router.claim($1, $2, $3, $4, $5)"
_FINISH: Final = "SELECT message_router.finish($1, $2, $3) AS place"
_GIVE_BACK: Final = "SELECT message_router.give_back($1, $2, $3, $4, $5, $6) AS is_ours"
_EXTEND: Final = "SELECT message_router.extend($1, $2, $3) AS place"
_END_LEASES: Final = "SELECT message_router.end_leases($1, $2)"
_DEPTH: Final = "SELECT * FROM message_router.depth($1, $2)"


class PostgresTable:
    """One queue, as one worker sees it."""

    holds_groups: Final = True

    def __init__(
        self, database: PostgresDatabase, name: str, *, worker_id: str, dedup_window: float
    ) -> None:
        self.bell = database.bell(name)
        self._database = database
        self._name = name
        self._worker_id = worker_id
        self._dedup_window = dedup_window
        self._pause = FIRST_POLL

    @property
    def incarnation(self) -> str:
        return self._database.incarnation

    async def configure(self, *, keep: float, audit: float) -> None:
        """How long finished messages stay, and their story: seconds, for all who consume it."""
        await self._database.call(_CONFIGURE, self._name, max(keep, self._dedup_window), audit)

    async def publish(self, items: Sequence[Publication]) -> Sequence[bool]:
        messages = [item.message for item in items]
        keys = [_identity(item) for item in items]
        rows = await self._database.call(
            _PUBLISH,
            self._name,
            self._dedup_window,
            [_text(message.id) for message in messages],
            keys,
            [_text(message.pool or DEFAULT_POOL) for message in messages],
            [_group(message) for message in messages],
            [bool(message.high_priority) for message in messages],
            [item.body for item in items],
        )
        if rows:
            self.bell.ring()
        return _first_of_each(keys, {row["identity"] for row in rows})

    async def keep(self) -> None:
        """It is: the database commits to its disk."""

    async def claim(self, limit: int, lease: float) -> Claim:
        token = secrets.randbits(63)
        rows = await self._database.claim(_CLAIM, self._name, self._worker_id, token, limit, lease)
        if rows[0]["id"] is None:
            return Claim((), wait=self._time_to_look_again(rows[0]["wait"]))
        self._pause = FIRST_POLL
        return Claim([_claimed(row, token) for row in rows], wait=0.0)

    async def finish(self, leases: Sequence[Lease], error: str) -> Sequence[int]:
        rows = await self._database.call(_FINISH, *_columns(leases), _text(error[:MAX_ERROR]))
        if any(lease.lane for lease in leases):
            self.bell.ring()
        return [row["place"] for row in rows]

    async def give_back(self, lease: Lease, delay: float, tally: Tally, error: str) -> bool:
        (row,) = await self._database.call(
            _GIVE_BACK,
            lease.id,
            lease.token,
            delay,
            tally.attempts,
            tally.posts,
            _text(error[:MAX_ERROR]),
        )
        is_ours: bool = row["is_ours"]
        if is_ours:
            self.bell.ring()
        return is_ours

    async def end_leases(self, worker_ids: Collection[str]) -> None:
        """Give back all that these dead workers hold (WQ-10)."""
        await self._database.call(_END_LEASES, self._name, list(worker_ids))
        self.bell.ring()

    async def extend(self, leases: Sequence[Lease], seconds: float) -> Sequence[int]:
        rows = await self._database.call(_EXTEND, *_columns(leases), seconds)
        return [row["place"] for row in rows]

    async def depth(self) -> Depth:
        (row,) = await self._database.call(_DEPTH, self._name, self._worker_id)
        return Depth(waiting=row["waiting"], in_flight=row["in_flight"], due=row["due"])

    async def wait(self, rung: asyncio.Event, seconds: float) -> None:
        await self._database.listen()
        await wait_for_ring(rung, seconds)

    def _time_to_look_again(self, until_change: float | None) -> float:
        pause, self._pause = self._pause, min(2 * self._pause, LAST_POLL)
        return pause if until_change is None else min(max(until_change, 0.0), pause)


def _first_of_each(keys: Sequence[str], fresh: set[str]) -> Sequence[bool]:
    """Which of them were put in: of a key that comes twice, the first."""
    added = []
    for key in keys:
        added.append(key in fresh)
        fresh.discard(key)
    return added


def _identity(item: Publication) -> str:
    """What `dedup_key_of` says, with a digest that the database can make too: `identity_of`."""
    if item.dedup_key is not None:
        return _text(f"={item.dedup_key}")
    return _text(f"{sha256(item.body).hexdigest()[:32]}:{item.message.id}")


def _claimed(row: Any, token: int) -> Claimed:
    message_id, grouped, _, deliveries, attempts, posts, body, _ = row
    return Claimed(
        Lease(message_id, token, grouped),
        deliveries,
        Tally(attempts, posts) if posts or attempts else UNTRIED,
        body,
    )


def _group(message: Message) -> str | None:
    if message.group is None or message.mode is Mode.IMMEDIATE:
        return None
    return _text(message.group)


def _columns(leases: Sequence[Lease]) -> tuple[Sequence[int], Sequence[int]]:
    return [lease.id for lease in leases], [lease.token for lease in leases]


def _text(text: str) -> str:
    """As PostgreSQL can store it: any character but one."""
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}")
