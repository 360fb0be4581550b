"""Delayed redelivery on RabbitMQ: a copy in a retry queue whose messages expire into the main one.

Retry queues are a fixed ladder, each with one time to live for all of its messages: in a queue
with a time for each message, a long one at the head would hold back the short ones behind it.
A delay between two steps is taken in several hops; the copy carries when it is due.
"""

import asyncio
from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from router.brokers.rabbitmq_link import Arrival, Link, Properties, Table, Unroutable
from router.core.message import Tally
from router.core.outcome import MAX_DELAY
from router.ports import Disconnected, QueueRefused

LADDER: Final = (1, 2, 5, 10, 30, 60, 300, 900, 3600)  # seconds
FIRST_MADE: Final = 30  # the usual delay: tells at once whether we may make such queues at all
SHORTEST_WAY: Final = LADDER[0]
ROUNDING: Final = 0.5  # a hop may end that much late, rather than take one more
PUNCTUAL: Final = 0.1  # two machines' clocks differ: so close to its time, it is due
PERSISTENT: Final = 2

_PREFIX: Final = "x-message-router-"
_ID: Final = f"{_PREFIX}id"
_ATTEMPTS: Final = f"{_PREFIX}attempts"
_POSTS: Final = f"{_PREFIX}posts"
_DELIVERIES: Final = f"{_PREFIX}deliveries"
_DUE_AT: Final = f"{_PREFIX}not-before"  # Unix time in milliseconds

# What the broker wrote on the original, or would act upon again.
_NOT_COPIED: Final = frozenset({"CC", "BCC", "x-death", "x-delivery-count"})
_NOT_COPIED_PREFIXES: Final = ("x-first-death-", "x-last-death-", _PREFIX)


def step_for(delay: float) -> int:
    """The largest step that is not too long; the first one if all are."""
    return max((step for step in LADDER if step <= delay + ROUNDING), default=SHORTEST_WAY)


class History(Struct, frozen=True):
    """What a message's copies carry along, so that it is the same message still."""

    first_id: str | None = None  # chosen by the publisher: no proof of sameness (ID-1)
    tally: Tally = Tally()
    deliveries: int = 0  # before this copy
    due_at: float = 0.0  # Unix time

    def wait(self, now: float) -> float:
        """Seconds until it may be delivered. A time that we would never have set counts not."""
        left = self.due_at - now
        return left if PUNCTUAL < left <= MAX_DELAY + ROUNDING else 0.0


def history_of(properties: Properties) -> History:
    headers = properties.headers or {}
    if _DUE_AT not in headers:
        return History(properties.message_id or None)
    first_id = headers.get(_ID)
    return History(
        first_id if isinstance(first_id, str) else None,
        Tally(_count(headers, _ATTEMPTS), _count(headers, _POSTS)),
        _count(headers, _DELIVERIES),
        _count(headers, _DUE_AT) / 1000,
    )


def copy_of(original: Properties, history: History) -> Properties:
    """Everything that the publisher said, but for what concerned the original alone.

    Not the user: it must be the one that publishes. Not the expiration: the retry queue has one.
    """
    return Properties(
        content_type=original.content_type,
        content_encoding=original.content_encoding,
        headers=_headers(original.headers or {}, history),
        delivery_mode=PERSISTENT,
        priority=original.priority,
        correlation_id=original.correlation_id,
        reply_to=original.reply_to,
        message_id=original.message_id,
        timestamp=original.timestamp,
        message_type=original.message_type,
        app_id=original.app_id,
    )


class RetryQueues:
    """The ladder of one queue. Its steps are made when first needed, and never removed."""

    def __init__(self, link: Link, queue: str, kind: str) -> None:
        self._link = link
        self._queue = queue
        self._kind = kind
        self._made: set[int] = set()
        self._making = asyncio.Lock()  # many NACKs may need a new step at once

    async def prepare(self) -> None:
        """Raises QueueRefused if we are not allowed to make them."""
        await self._make(FIRST_MADE)

    async def put(self, arrival: Arrival, delay: float, history: History) -> float:
        """Keep a copy; confirmed on return. Answers how long nobody is handed it, in seconds."""
        step = step_for(delay)
        properties = copy_of(arrival.properties, history)
        try:
            await self._make(step)
            await self._link.publish(self._name(step), arrival.body, properties)
        except (Unroutable, QueueRefused) as error:
            # A new connection returns the message, and begins by making these queues.
            raise Disconnected(f"no retry queue {self._name(step)}: {error}") from error
        return step

    async def _make(self, step: int) -> None:
        """One that is there already is taken as it is: operators may have made it for us."""
        name = self._name(step)
        async with self._making:
            if step in self._made:
                return
            if not await self._link.exists(name):
                await self._link.declare(name, self._arguments(step))
            self._made.add(step)

    def _name(self, step: int) -> str:
        return f"{self._queue}.retry.{step}s"

    def _arguments(self, step: int) -> Table:
        arguments: Table = {
            "x-queue-type": self._kind,
            "x-message-ttl": step * 1000,
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": self._queue,
        }
        if self._kind == "quorum":
            # Removed only when the main queue has it, which classic queues do not offer.
            arguments |= {
                "x-dead-letter-strategy": "at-least-once",
                "x-overflow": "reject-publish",
            }
        return arguments


def _headers(original: Table, history: History) -> Table:
    kept = {name: value for name, value in original.items() if _is_copied(name)}
    first_id: Table = {} if history.first_id is None else {_ID: history.first_id}
    return {
        **kept,
        **first_id,
        _ATTEMPTS: history.tally.attempts,
        _POSTS: history.tally.posts,
        _DELIVERIES: history.deliveries,
        _DUE_AT: round(history.due_at * 1000),
    }


def _is_copied(name: str) -> bool:
    return name not in _NOT_COPIED and not name.startswith(_NOT_COPIED_PREFIXES)


def _count(headers: Mapping[str, object], name: str) -> int:
    """Whatever stands there: anyone can publish such headers."""
    value = headers.get(name)
    return value if isinstance(value, int) and value > 0 else 0
