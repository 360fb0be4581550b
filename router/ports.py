"""The doors to the outside world. Nothing else in the router does I/O.

An adapter implements a door without inheriting from it; mypy checks the fit where `main` wires it.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from msgspec import Struct

from router.core.config import QueueConfig
from router.core.dead_letter import DeadLetter, KeptLetter, LetterFilter
from router.core.message import Delivery, Handle, Message, Tally
from router.core.notification import Digest
from router.core.outcome import Answer
from router.core.story import Visit
from router.core.trace import Span


class BrokerError(Exception):
    """Base of everything a broker adapter may raise."""


class Disconnected(BrokerError):
    """The connection is gone, or the broker does not answer. The engine opens it again, later."""


class QueueRefused(BrokerError):
    """This queue cannot be consumed as it is set up. Trying again would not help."""


class Unsettled(Struct, frozen=True):
    """One handle that the broker did not settle or extend."""

    handle: Handle
    reason: str
    stale: bool  # the lease was lost: no use trying again. False: try again.


class Depth(Struct, frozen=True):
    waiting: int  # not handed out, due or not
    in_flight: int  # handed out and not settled
    due: int | None = None  # of the waiting ones, those that could be handed out now; if it tells
    deferred: int = 0  # of the waiting ones, those that use up a limit on unsettled messages
    deferred_limit: int | None = None  # that limit; None: there is none


class Traits(Struct, frozen=True, kw_only=True):
    """Where a broker differs in what the engine has to do for it."""

    # The broker keeps no order once a message went back: what no pool has room for waits here
    # (ROUTE-5), and what fails takes all of its group with it that is here (FIFO-1).
    ordered_here: bool = False
    keeps_tally: bool = True  # False: the engine remembers what was tried (WQ-5)
    hold_seconds: float | None = None  # BRK-5: what is queued for longer has to be given back
    answer_within: float | None = None  # the broker gives up on a hand-over after so many seconds
    acks_per_call: int | None = None  # so many fill a call and wait for no others (BRK-3)


class Publication(Struct, frozen=True):
    """One message on its way into a queue."""

    message: Message
    body: bytes
    # Taken at its word: same key, same message (WQ-1). None: only what is identical is the same.
    dedup_key: str | None = None


class Broker(Protocol):
    """One connection to one queue. Opened and closed by an `async with`."""

    @property
    def holds_groups(self) -> bool:
        """Whether the broker holds a group back while one of its messages is out (FIFO-1)."""

    @property
    def lease_seconds(self) -> float | None:
        """How long a hand-over is ours unless extended. None: as long as the connection."""

    @property
    def traits(self) -> Traits: ...

    async def receive(self, limit: int) -> Sequence[Delivery]:
        """Wait a while (up to 20 s) for messages and hand over at most `limit`, in broker order.

        Answers an empty sequence when there are none. Raises Disconnected. Must not be cancelled:
        a cancelled receive may still take messages; `interrupt` ends it instead.
        """

    def interrupt(self) -> None:
        """Let a receive under way, and every later one, return as soon as the broker allows."""

    async def ack(self, handles: Sequence[Handle], *, error: str = "") -> Sequence[Unsettled]:
        """Remove them from the queue; answer those that were not. Raises Disconnected.

        `error`: removed without having been accepted (a dead letter), and why.
        """

    async def nack(self, handle: Handle, delay: float, tally: Tally, *, error: str = "") -> None:
        """Give it back, to be handed out again no sooner than in `delay` seconds (0: at once).

        `tally` is kept with it where the broker can, and comes back in `Delivery.tally`.
        Raises StaleLease or Disconnected.
        """

    async def extend(self, handles: Sequence[Handle], seconds: float) -> Sequence[Unsettled]:
        """Keep them ours for `seconds` from now; answer those that are not ours any more."""

    async def depth(self) -> Depth | None:
        """How much is in the queue, where the broker tells."""


class StaleLease(BrokerError):
    """Settled too late: the lease was lost and the message may be someone else's (WQ-3)."""


class Publisher(Protocol):
    """The other end of a queue, where the broker has one for us."""

    async def publish(self, items: Sequence[Publication]) -> Sequence[bool]:
        """Put them in, all or none, durable on return. False: a duplicate, nothing done (WQ-1)."""


class Brokers(Protocol):
    """Opens queues. The only door that knows which brokers there are."""

    def open_queue(self, queue: QueueConfig) -> AbstractAsyncContextManager[Broker]:
        """A new connection for consuming. Raises QueueRefused or Disconnected on entering."""

    def open_publisher(self, queue: QueueConfig) -> AbstractAsyncContextManager[Publisher] | None:
        """A connection for publishing; None: this broker is only consumed."""


class Sender(Protocol):
    async def send(self, message: Message, post: int, timeout: float, span: Span) -> Answer:
        """POST it, as the `post`-th request for it, as this span, and tell what came of it.

        Every HTTP status is a Reply, everything else a NoReply; it raises only when cancelled, and
        then leaves nothing behind.
        """


class Tracer(Protocol):
    """Tells the stories of messages to a tracing system."""

    def ended(self, visit: Visit) -> None:
        """Called for every one, as it ends: takes no time, waits for nothing and never fails."""

    @property
    def counts(self) -> Mapping[str, int]:
        """Spans by what became of them."""


class StoreError(Exception):
    """The dead-letter store could not do it. The caller gives the message back (DLQ-1)."""


class DeadLetterStore(Protocol):
    async def put(self, letter: DeadLetter) -> None:
        """Keep it, durable on return. It replaces one of the same fingerprint and body."""

    async def find(
        self, wanted: LetterFilter, *, limit: int, before: int | None = None
    ) -> Sequence[KeptLetter]:
        """Newest first, ids below `before`, without their bodies: those come with `get`."""

    async def find_in_order(
        self, wanted: LetterFilter, *, limit: int, up_to: int, after: KeptLetter | None = None
    ) -> Sequence[KeptLetter]:
        """Oldest first, by `first_seen`, then id; ids to `up_to`, without their bodies."""

    async def get(self, letter_id: int) -> KeptLetter | None: ...

    async def latest_of(self, message_id: str) -> KeptLetter | None:
        """The newest letter of one message, without its body."""

    async def mark_replayed(self, letter_id: int, at: float) -> None: ...

    async def discard(self, letter_id: int) -> bool:
        """False: there is no such letter."""


class LockUnavailable(Exception):
    """The lock server did not answer, or could not do it: its text says why, without secrets."""


class Tenure(Struct, frozen=True, kw_only=True):
    """Who has the leader lock."""

    holder: str | None  # its instance; None: nobody
    is_ours: bool
    fence: int  # grows with every new holder
    age: float = 0.0  # seconds since it was last refreshed, as far as can be told


class Lock(Protocol):
    """The leader lock, for one process. Each call is one atomic step, and raises LockUnavailable.

    Whoever holds it and refreshes it no more loses it after its TTL, never before.
    """

    async def acquire(self) -> Tenure:
        """Take it if nobody has it, or keep what is ours already; tell who has it now."""

    async def renew(self, fence: int) -> bool:
        """Have it for another TTL. False: it is not ours any more, or not since that fence."""

    async def release(self) -> None:
        """Let the next one have it at once, if it is ours."""


class NotSent(Exception):
    """A notification did not get through: its text says why, for the log. Tried again later."""


class Channel(Protocol):
    """A way to reach people who do not watch."""

    @property
    def name(self) -> str:
        """For the log; without the address, which is a secret."""

    async def send(self, digest: Digest) -> None:
        """Raises NotSent. May take its time: the caller bounds it."""


class ConfigUnavailable(Exception):
    """A source gave no document: its text says why, for the log."""


class ConfigSource(Protocol):
    @property
    def name(self) -> str:
        """The URL without credentials."""

    async def fetch(self) -> bytes:
        """The document as it is now. Raises ConfigUnavailable."""
