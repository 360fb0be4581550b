"""The ports to the outside world. Nothing else in the router does I/O.

An adapter implements a port without inheriting from it; mypy checks the fit where `main` wires it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from enum import Enum, StrEnum, auto
from typing import Any, Protocol, runtime_checkable

from msgspec import Struct

from router.core.config import QueueConfig
from router.core.dead_letter import DeadLetter, KeptLetter, LetterFilter
from router.core.history import HandOver
from router.core.message import UNTRIED, Handle, Message, ReceivedMessage, Source, Tally
from router.core.notification import Digest
from router.core.order import GroupKey
from router.core.outcome import Answer, Ending, Failure
from router.core.sharing import RateTerms
from router.core.trace import Span


class BrokerError(Exception):
    """Base of everything a broker adapter may raise."""


class Disconnected(BrokerError):
    """The connection is gone, or the broker does not answer. The engine opens it again, later."""


class QueueRefused(BrokerError):
    """This queue cannot be consumed as it is set up. Trying again would not help."""


class DataRefused(BrokerError):
    """The broker refuses what a call would store, and would again. The connection is still good.

    `stored` are the positions of those publications that it took all the same. The caller finds out
    by smaller calls which of the others is to blame.
    """

    def __init__(self, reason: str, stored: Collection[int] = ()) -> None:
        super().__init__(reason)
        self.stored = stored


class Unsettled(Struct, frozen=True):
    """One handle that the broker did not settle or extend."""

    handle: Handle
    reason: str
    stale: bool  # the lease was lost: no use trying again. False: try again.
    # Only of `extend`, which did extend it: somebody wants this message to end (CMD-13).
    is_cancelled: bool = False


class Nack(Struct, frozen=True):
    """One message on its way back to its queue."""

    handle: Handle
    delay: float = 0.0  # seconds: it is handed out again no sooner
    tally: Tally = UNTRIED  # stored with it where the broker can, for `ReceivedMessage.tally`
    failure: Failure | None = None  # why its delivery failed; None: it was no real failure
    in_order: bool = True  # False: its pool gives it no order, so no other has to wait for it


class Depth(Struct, frozen=True):
    waiting: int  # not handed out, due or not
    in_flight: int  # handed out and not settled
    due: int | None = None  # of the waiting ones, those that could be handed out now
    delayed: int = 0  # of the waiting ones, those that use up a limit on unsettled messages
    delayed_limit: int | None = None  # that limit; None: there is none


class Publication(Struct, frozen=True):
    """One message on its way into a queue."""

    message: Message
    body: bytes
    # Trusted: same key, same message (WQ-1). None: only identical messages are the same.
    dedup_key: str | None = None
    not_before: float | None = None  # Unix seconds: it is delivered no sooner (CMD-5)
    source: Source | None = None  # for a raw queue: published as a foreign client would (RAW-4)


class OutgoingMessage(Struct, frozen=True):
    """A reply or a next step that is published when a message ends."""

    queue: QueueConfig
    publication: Publication


class Finish(Struct, frozen=True):
    """The end of one message, with what its queue keeps of it and what goes out with it."""

    handle: Handle
    ending: Ending
    outgoing: tuple[OutgoingMessage, ...] = ()  # only to queues that the finisher takes
    tally: Tally | None = None  # of all its deliveries; None: one request more than before
    # It was given up, and stays in front of its group until someone decides (ORD-11). Only where
    # `Traits.holds_letters`; then nothing goes out with it.
    is_held: bool = False


class Finisher(Protocol):
    """A queue that keeps results, and publishes what goes out in the transaction of the ACK."""

    def takes(self, queue: QueueConfig) -> bool:
        """Return whether it can publish to that queue in the same transaction."""

    async def finish(self, items: Sequence[Finish]) -> Sequence[Unsettled]:
        """Remove them as `ack` does, and keep how they ended; all or none.

        Raises Disconnected, or DataRefused if the end of one of them cannot be stored.
        One that is unsettled and not stale has something that could not be published.
        """


class PoolFilter(Struct, frozen=True):
    """The pools that a receive asks for, by the code that messages name (none: DEFAULT-POOL)."""

    codes: frozenset[str]
    excludes: bool = False  # True: every pool but these


class PoolSelector(Protocol):
    """A queue that can hand over messages of some pools only."""

    def select(self, pools: PoolFilter | None) -> None:
        """Hand over only messages of these pools from now on, in an open receive too. None: all."""


class PrefetchWindow(Protocol):
    """A broker that pushes messages, as many as fit into a window."""

    def widen(self, messages: int) -> None:
        """Let up to so many more be pushed, from the next receive on: they wait for full pools."""


class Pulse(Protocol):
    """Shows whether what a connection has brought may have gone to somebody else (ORD-9)."""

    def is_silent(self) -> bool:
        """Return whether it may: for too long nothing has proved that the broker still has us.

        Once it has returned True, it always does.
        """


class Traits(Struct, frozen=True, kw_only=True):
    """Where a broker differs in what the engine has to do for it."""

    # The broker keeps no order once a message went back: what fails takes all of its group with
    # it that is here (FIFO-1).
    ordered_here: bool = False
    keeps_tally: bool = True  # False: the engine remembers what was tried (WQ-5)
    hold_seconds: float | None = None  # BRK-5: what is queued for longer has to be returned
    held_lease_seconds: float | None = None  # of what waits for room; None: as for all others
    answer_within: float | None = None  # seconds after which the broker gives up on a hand-over
    advice: str | None = None  # what to change at the broker, so that a limit of it does no harm
    acks_per_call: int | None = None  # this many fill a call and wait for no others (BRK-3)
    finisher: Finisher | None = None  # what keeps results; None: the queue keeps nothing (CMD-2)
    holds_letters: bool = False  # and keeps what was given up in front of its group (`is_held`)
    # Told what the router lets go though its lease lives: the broker does not hold it back as ours
    # when it settles first (ORD-3).
    forget: Callable[[Sequence[Handle]], None] | None = None
    # What does not fit into its pool (ROUTE-5) is not asked for if there is a selector. It is
    # returned for a while if that costs it nothing, else it waits here.
    selector: PoolSelector | None = None
    # Only routers publish to it: what it hands over is due (CMD-5).
    published_here: bool = False
    defers: bool = False  # False: the broker has no delays, or counts returns against a limit
    defer_limit: int | None = None  # of the messages that may be deferred at once
    window: PrefetchWindow | None = None  # None: it pushes nothing
    pulse: Pulse | None = None  # None: leases say what is still ours


class Broker(Protocol):
    """One connection to one queue. Opened and closed by an `async with`."""

    @property
    def holds_groups(self) -> bool:
        """Whether the broker holds a group back while one of its messages is out (FIFO-1)."""

    @property
    def lease_seconds(self) -> float | None:
        """How long we hold a lease unless it is extended. None: as long as the connection."""

    @property
    def traits(self) -> Traits: ...

    async def receive(self, limit: int) -> Sequence[ReceivedMessage]:
        """Wait a while (up to 20 s) for messages and hand over at most `limit`, in broker order.

        Return an empty sequence when there are none. Raises Disconnected. Must not be cancelled:
        a cancelled receive may still take messages; `stop` ends it instead.
        """

    def stop(self) -> None:
        """Receive no more: an open receive, and every later one, returns as soon as it can."""

    async def ack(self, handles: Sequence[Handle], *, error: str = "") -> Sequence[Unsettled]:
        """Remove them from the queue; return those that were not. Raises Disconnected.

        `error`: removed without having been accepted (a dead letter), and why.
        """

    async def nack(self, items: Sequence[Nack]) -> Sequence[Unsettled]:
        """Return them to the queue, in this order; return those that were not. Raises Disconnected.

        In one call where the broker has one. After a Disconnected, some may have gone back.
        """

    async def extend(self, handles: Sequence[Handle], seconds: float) -> Sequence[Unsettled]:
        """Extend their leases to `seconds` from now; return those whose lease was lost.

        And those that somebody wants to end, marked as such (CMD-13).
        """

    async def depth(self) -> Depth | None:
        """Return how much is in the queue; None: the broker does not report it."""


class MessageStatus(StrEnum):
    READY = "READY"
    SCHEDULED = "SCHEDULED"
    IN_FLIGHT = "IN_FLIGHT"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


class MessageRecord(Struct, frozen=True, kw_only=True):
    """A message as its work queue knows it. Times are Unix seconds (CMD-2)."""

    id: str
    status: MessageStatus
    failures: int
    requests: int
    created_at: float
    pool: str | None = None  # that it names; None: the store does not say
    group: str | None = None  # None: it depends on no other message
    not_before: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    worker_id: str | None = None
    correlation_id: str | None = None
    batch_id: str | None = None
    payload_bytes: int = 0
    last_failure: Failure | None = None  # of its last failed attempt
    next_attempt_at: float | None = None  # while it waits for a time
    updated_at: float | None = None  # when its state last changed
    ending: Ending | None = None  # of what succeeded or failed


class MessageFilter(Struct, frozen=True, kw_only=True):
    """Which messages of a queue to list; None: any."""

    status: MessageStatus | None = None
    group: str | None = None
    since: float | None = None  # published then or later, Unix seconds


class MessagePage(Struct, frozen=True):
    """Some messages of a queue, the newest first."""

    records: Sequence[MessageRecord]  # without results
    next: int | None  # the page after this one is before this position; None: it is the last


class MessageLister(Protocol):
    """A queue whose messages can be looked through."""

    async def page(
        self, wanted: MessageFilter, *, limit: int, before: int | None = None
    ) -> MessagePage:
        """Return the newest that fit, before that position.

        It reads a bounded number of rows. So a page may have few messages, or none, and not be the
        last.
        """


class Cancellation(Enum):
    CANCELLED = auto()
    ASKED = auto()  # it is in flight: who holds it will end it
    IN_FLIGHT = auto()  # and it was not to be stopped
    TOO_LATE = auto()  # it has ended
    AMBIGUOUS = auto()  # several unsettled messages have this id
    UNKNOWN = auto()


# Broker id and body of a message that is about to be cancelled, and what to publish then (CMD-3).
CancelReply = Callable[[str, bytes], Sequence[OutgoingMessage]]


def no_reply(_broker_id: str, _body: bytes) -> Sequence[OutgoingMessage]:
    return ()


class BatchRecord(Struct, frozen=True, kw_only=True):
    """How far a batch of messages has come (CMD-4)."""

    id: str
    size: int  # it is complete when this many have ended
    total: int  # members so far
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    callback_published_at: float | None = None


class Unknown(Exception):
    """There is nothing of this name or id."""


class Conflict(Exception):
    """It cannot be done as things are now. The text says why."""


class MessageStore(MessageLister, Protocol):
    """The operations of a work queue besides consuming and publishing."""

    async def find(self, message_id: str) -> MessageRecord | None:
        """Return the newest publication under that id."""

    def takes(self, queue: QueueConfig) -> bool:
        """Return whether it can publish to that queue in the same transaction."""

    async def cancel(
        self, message_id: str, reply: CancelReply = no_reply, *, running: bool = False
    ) -> Cancellation:
        """Cancel what is neither in flight nor ended.

        `running`: if it is in flight, note that it is to end. `Broker.extend` tells who holds it,
        and `ReceivedMessage.is_cancelled` who gets it next.

        What `reply` returns is published in the same transaction. It is asked once or more, and all
        that it returns must be for queues that the store takes.
        """

    async def open_batch(
        self, batch_id: str, size: int | None, callback: Publication, items: Sequence[Publication]
    ) -> int:
        """Publish members and remember the batch. Return how many were new. Raises Conflict.

        Without a size, the batch closes with this call.
        """

    async def add_to_batch(self, batch_id: str, items: Sequence[Publication]) -> int:
        """Publish more members. Return how many were new. Raises Conflict."""

    async def find_batch(self, batch_id: str) -> BatchRecord | None: ...

    async def publish_tick(self, schedule: str, tick: int, item: Publication) -> bool:
        """Publish a tick and remember it, unless it is not newer than the last one (CMD-10)."""

    async def last_tick(self, schedule: str) -> int | None: ...

    async def forget_tick(self, schedule: str, tick: int) -> None:
        """Forget the last tick if it is this one: a clock was wrong."""


# True: added. False: a duplicate, ignored. A text: a duplicate of the message with this id.
Receipt = bool | str


class Publisher(Protocol):
    """The other end of a queue."""

    async def publish(self, items: Sequence[Publication]) -> Sequence[Receipt]:
        """Put them in, all or none, durable on return (WQ-1).

        Raises Disconnected, or QueueRefused if the queue takes nothing, or DataRefused if it does
        not take one of them.
        """


class StoredMessage(Struct, frozen=True):
    """One message on its way into the order store (ORD-6)."""

    publication: Publication  # its dedup key: what it is known by in the store
    group: str | None  # None: it depends on no other message
    tally: Tally = UNTRIED
    delay: float = 0.0  # seconds: it is delivered no sooner
    error: str = ""  # why its delivery failed; "": it was no real failure
    given_up: Failure | None = None  # it is a dead letter, and holds its group (ORD-11)


class HeldLetter(Struct, frozen=True):
    """The message that was given up and holds its group (ORD-11)."""

    message_id: str
    body: bytes


class StoreSize(Struct, frozen=True):
    """The messages of one queue that wait in the order store."""

    messages: int = 0
    bytes: int = 0  # of their bodies
    oldest_seconds: float = 0.0  # since the first of them was stored


class StoredGroup(Struct, frozen=True, kw_only=True):
    """A group that waits in a work queue, and what is in front of it. Times are Unix seconds."""

    pool: str  # that messages name
    group: str
    messages: int
    message_id: str  # the one in front
    since: float  # when that was stored
    is_held: bool = False  # it is a dead letter
    is_out: bool = False  # it is handed out right now
    due_at: float | None = None  # its next try; None: it is due, out or held
    failures: int = 0
    error: str | None = None  # of its last try


class OrderLog(Protocol):
    """The order store of one queue: a work queue, to which the router appends (ORD-4)."""

    async def append(self, items: Sequence[StoredMessage]) -> int:
        """Put them in behind what is there, all or none, durable on return.

        Leave out what is there already, or was lately. Return how many are new. Raises
        Disconnected, QueueRefused or DataRefused.
        """

    async def unsettled_groups(self, after: GroupKey | None = None) -> Sequence[GroupKey]:
        """Return groups of which it has a message, in an order of its own, some thousand at most.

        The first ones, or those after this one.
        """

    async def which_are_stored(self, groups: Collection[GroupKey]) -> Collection[GroupKey]:
        """Return those of the groups of which it has a message."""

    async def size(self) -> StoreSize: ...

    async def groups(self, limit: int, *, only_held: bool = False) -> Sequence[StoredGroup]:
        """Return the groups that wait, the longest first."""

    async def count_stored(self) -> Mapping[str, int]:
        """Return how many messages all order stores of this database have, by their names."""

    async def count_held(self) -> int:
        """Return how many groups are held by dead letters."""

    async def find_group(self, group: GroupKey) -> StoredGroup | None: ...

    async def ids_of(self, group: GroupKey, limit: int) -> Sequence[str]:
        """Return the ids of the messages of a group, in their order."""

    async def group_of(self, message_id: str) -> GroupKey | None:
        """Return the group of which it has this message; None: none, or it depends on no other."""

    async def held_letter(self, group: GroupKey) -> HeldLetter | None:
        """Return what holds the group back; None: nothing does."""

    async def retry_letter(self, group: GroupKey, message_id: str, body: bytes) -> bool:
        """Deliver the message that holds the group, as if it were new, with this body.

        Return False if it does not hold the group (any longer).
        """

    async def release(self, group: GroupKey, message_id: str) -> bool:
        """Remove the message that holds the group. Return False if it does not (any longer)."""


@runtime_checkable
class OrderLogs(Protocol):
    """Opens order stores: brokers that keep work queues can."""

    def open_order_log(self, queue: QueueConfig) -> AbstractAsyncContextManager[OrderLog]:
        """Entering raises QueueRefused or Disconnected."""


class Brokers(Protocol):
    """Opens queues. The only port that knows which brokers there are."""

    def open_queue(self, queue: QueueConfig) -> AbstractAsyncContextManager[Broker]:
        """Return a new connection for consuming. Entering raises QueueRefused or Disconnected."""

    def open_publisher(self, queue: QueueConfig) -> AbstractAsyncContextManager[Publisher]:
        """Return a new connection for publishing. Raises QueueRefused, also on entering."""


@runtime_checkable
class MessageStores(Protocol):
    """Opens what work queues offer besides consuming and publishing."""

    def open_store(self, queue: QueueConfig) -> AbstractAsyncContextManager[MessageStore] | None:
        """Return None if it is no work queue."""


@runtime_checkable
class MessageListers(Protocol):
    """Opens queues to look through their messages."""

    def open_lister(self, queue: QueueConfig) -> AbstractAsyncContextManager[MessageLister] | None:
        """Return None if its broker cannot list messages."""


class Task(Struct, frozen=True):
    """One run of what a message asks for on this machine."""

    message: Message
    queue: str  # that it came from
    attempt: int  # from 1: failures so far plus one
    max_attempts: int | None  # None: there is no limit
    extend: Callable[[], Awaitable[bool]]  # its lease, now; False: it was lost


class StillRunning(asyncio.CancelledError):
    """A task was cancelled, and has not ended yet."""

    def __init__(self, ended: asyncio.Future[Any], *, is_ending: bool = False) -> None:
        """`ended` is done once it has. `is_ending`: it was told to, and will soon be killed.

        Else it cannot be stopped, and its message must not be handed out before.
        """
        super().__init__()
        self.ended = ended
        self.is_ending = is_ending


class TaskRunner(Protocol):
    async def run(self, task: Task) -> Answer:
        """Run it once and return what it answered, as a Reply with status 200 if it ended well.

        Raises only when cancelled, and then leaves nothing behind: else it raises StillRunning.
        """


class Sender(Protocol):
    async def send(
        self,
        message: Message,
        attempt: int,
        timeout: float,
        span: Span,
        *,
        max_attempts: int | None = None,
        request: int = 1,
    ) -> Answer:
        """Send a request for a message, as this span, and return the answer.

        `attempt`: the number of the delivery, at most `max_attempts`, after which the message is
        given up; None: there is no limit. `request`: its number within the delivery, from 1.

        Every HTTP status is a Reply, everything else a NoReply; it raises only when cancelled, and
        then leaves nothing behind.
        """


class Tracer(Protocol):
    """Reports the history of messages to a tracing system."""

    def ended(self, hand_over: HandOver) -> None:
        """Report one that has just ended. Never blocks, never fails."""

    @property
    def counts(self) -> Mapping[str, int]:
        """Spans by what became of them."""


class StoreError(Exception):
    """The dead-letter store failed. The caller returns the message to its queue (DLQ-1)."""


class DeadLetterStore(Protocol):
    async def put(self, letter: DeadLetter) -> None:
        """Store it, durable on return. It replaces one of the same fingerprint and body."""

    async def find(
        self, wanted: LetterFilter, *, limit: int, before: int | None = None
    ) -> Sequence[KeptLetter]:
        """Return the newest first, ids below `before`, without bodies: those come with `get`."""

    async def find_in_order(
        self, wanted: LetterFilter, *, limit: int, up_to: int, after: KeptLetter | None = None
    ) -> Sequence[KeptLetter]:
        """Return the oldest first, by `first_seen`, then id, up to an id, without bodies."""

    async def get(self, letter_id: int) -> KeptLetter | None: ...

    async def latest_of(self, message_id: str) -> KeptLetter | None:
        """Return the newest letter of one message, without its body."""

    def replaying(self, letter_id: int) -> AbstractAsyncContextManager[bool]:
        """Claim a letter. False: another replay has it, here or in another replica."""

    async def mark_replayed(self, letter_id: int, at: float) -> None: ...

    async def discard(self, letter_id: int) -> bool:
        """Return False if there is no such letter."""


class LockUnavailable(Exception):
    """The lock server did not answer, or could not do it: its text says why, without secrets."""


class LockState(Struct, frozen=True, kw_only=True):
    """Which router has the leader lock."""

    holder: str | None  # its instance; None: none
    is_ours: bool
    fence: int  # grows with every new holder
    age: float = 0.0  # seconds since it was last refreshed, as far as is known


class Lock(Protocol):
    """The leader lock, for one process. Each call is atomic, and raises LockUnavailable.

    A holder that stops refreshing it loses it after the TTL, never before.
    """

    async def acquire(self) -> LockState:
        """Take the lock if it is free, or keep it. Return who has it now."""

    async def renew(self, fence: int) -> bool:
        """Keep it for another TTL. Return False if it was lost since that fence."""

    async def release(self) -> None:
        """Release it, if this process has it."""


class Locks(Protocol):
    """Locks on one server, over one connection."""

    def lock(self, name: str) -> Lock:
        """Return the lock of this name, for this process. It is not asked for yet."""


class SharedNumbers(Protocol):
    """Numbers that all routers of an installation see."""

    async def number(self, name: str) -> int:
        """Return the number of this name; 0: none was kept. Raises LockUnavailable."""

    async def keep_number(self, name: str, number: int) -> None:
        """Raises LockUnavailable."""


class LockServer(Locks, SharedNumbers, Protocol): ...


class LimitsUnavailable(Exception):
    """The limits server did not answer, or could not do it: its text says why, without secrets."""


class Reserved(Struct, frozen=True):
    """Slots of a rate, for one router."""

    count: int
    delay: float  # seconds from the answer to the first of them; negative: it is over already


class LimitsServer(Protocol):
    """Where several routers share limits. Each call is atomic, and raises LimitsUnavailable."""

    async def reserve(self, name: str, terms: RateTerms, wanted: int) -> Reserved:
        """Reserve the next slots of a rate, `terms.portion` of them.

        Or up to `wanted`, if more have begun already. If the rate was another one before, what was
        used of it stays used.
        """

    async def count_routers(self) -> int:
        """Note that this router is there. Return how many were there lately."""


class NotSent(Exception):
    """A notification could not be sent: the text says why, for the log. Tried again later."""


class Channel(Protocol):
    """A way to notify people."""

    @property
    def name(self) -> str:
        """For the log; without the address, which is a secret."""

    async def send(self, digest: Digest) -> None:
        """Send it. Raises NotSent. The caller sets a time limit."""


class ConfigUnavailable(Exception):
    """A source gave no document: the text says why, for the log."""


class ConfigSource(Protocol):
    @property
    def name(self) -> str:
        """The URL without credentials."""

    async def fetch(self) -> bytes:
        """Return the current document. Raises ConfigUnavailable."""
