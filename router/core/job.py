"""A message that the router holds: what it is, how far it got, and who settles it."""

from collections.abc import Sequence
from enum import Enum, StrEnum, auto
from typing import Any, Final, Protocol

from msgspec import Struct

from router.core.config import QueueConfig, RetryPolicy
from router.core.identity import MessageKey
from router.core.message import DEFAULT_POOL, Handle, Message, Mode, ReceivedMessage, Tally
from router.core.outcome import Ending, Metric
from router.core.returning import RETURNS, GiveUp, ReturnReason
from router.core.stats import Deliveries

NEVER: Final = float("inf")
EXPIRED: Final = float("-inf")


class State(Enum):
    QUEUED = auto()
    WAITING = auto()  # for its next try, for room in a pool, or for a draining pool to let go
    DELIVERING = auto()  # a POST of it is open
    SETTLING = auto()  # its ACK or NACK is on its way


class Fate(StrEnum):
    """How a hand-over ended (OPS-6)."""

    DELIVERED = "delivered"  # accepted and acknowledged
    DEAD_LETTERED = "deadLettered"
    RETURNED = "returned"  # NACKed
    SUPERSEDED = "superseded"  # a redelivered or requeued copy, or a remembered ack
    FORFEITED = "forfeited"  # its lease or its connection was lost


class Try(Struct, frozen=True, gc=False):
    """One request of a delivery, as the history shows it."""

    started_at: float
    seconds: float | None  # None: the request is still open
    status: int | None = None  # of the HTTP answer, if there was one
    error: str | None = None  # in the operators' words; None: it was accepted

    @property
    def ended_at(self) -> float:
        return self.started_at + (self.seconds or 0.0)


class Settler(Protocol):
    """Settles the messages of one connection. A pool never sees a broker.

    The engine's QueueSettler, seen from here: core must not import the engine.
    """

    @property
    def queue(self) -> QueueConfig: ...

    @property
    def queue_name(self) -> str:
        """The queue's identity, as shown everywhere."""

    @property
    def holds_groups(self) -> bool:
        """Whether the broker holds a group back while one of its messages is out."""

    @property
    def is_ordered_here(self) -> bool:
        """Whether the broker leaves the order within a group to us."""

    @property
    def keeps_endings(self) -> bool:
        """Whether its queue keeps how each message ended, and tells others of it."""

    @property
    def retry(self) -> RetryPolicy | None:
        """The queue's retry policy, where the pool has none."""

    def ack(self, job: "Job") -> None:
        """Remove it from its queue. Sent with others in a moment; ends the job."""

    async def dead_letter(self, job: "Job", why: GiveUp) -> bool:
        """Store it, then remove it. Return False if it could not be stored: nothing was done."""

    async def nack(self, returns: Sequence["Return"]) -> None:
        """Return them in order and end the jobs. Never fails: what stays out comes back later."""

    async def extend(self, job: "Job") -> bool:
        """Extend its lease now, not only when it is due. Return False if the lease was lost."""

    def forfeit(self, job: "Job") -> None:
        """Let it go: its lease was lost, so the broker hands it out again."""

    def hold(self, jobs: Sequence["Job"]) -> None:
        """Settle these jobs from now on, and keep their leases alive."""

    def release(self, job: "Job") -> None:
        """Stop holding it: another settler does."""

    def discard(
        self, received: ReceivedMessage, error: str = "", ending: Ending | None = None
    ) -> None:
        """ACK a superfluous copy. `error`: why its message became a dead letter.

        `ending`: how its message ended, if a plain ACK cannot express it.
        """

    def readmit(self, received: ReceivedMessage) -> None:
        """Dispatch it as if it had just arrived."""

    def note_batch(self, batch: "Batch") -> None:
        """Note what a receive has brought."""

    def place(self, job: "Job") -> bool:
        """Submit it to its pool. Return False if it has to wait."""

    async def refuse(self, jobs: Sequence["Job"]) -> None:
        """Hold jobs for which there is no room, or return them, as the broker can (ROUTE-5)."""

    def take_waiting(self, head: "Job") -> Sequence["Job"]:
        """Take out what is held of its group, which must not overtake it."""


class Follower(Struct, frozen=True, eq=False):
    """A copy that waits for the end of a job."""

    settler: Settler
    received: ReceivedMessage
    # It came before the end was known, to a queue that records ends: a failure is its own, too.
    shares_failure: bool = False


class JobPool(Protocol):
    """The pool that a job counts against until it has ended: the engine's ProcessPool, likewise."""

    @property
    def code(self) -> str: ...

    @property
    def deliveries(self) -> Deliveries: ...

    def release(self) -> None:
        """Stop counting a job: it has ended, or goes elsewhere."""


class Batch(Struct, eq=False):
    """One receive. Knows whether any of it led to a request."""

    settler: Settler
    at: float
    # What of a group goes back when one of it fails; None: what this batch brought (FIFO-1).
    failure_scope: str | None = None
    left: int = 0  # that have not ended; what was delivered still counts
    requests: int = 0  # to targets whose circuit is closed
    was_refused: bool = False  # some of it did not fit into its pool
    probe_at: float = NEVER  # when one of the circuits that stopped it lets a request through

    def probe(self, at: float) -> None:
        """Note that the circuit of a target is open, and when it lets a request through."""
        self.probe_at = min(self.probe_at, at)

    @property
    def is_dark(self) -> bool:
        """Whether all of it was returned while the circuits of its targets were open (MED-4)."""
        no_request = not self.left and not self.requests and not self.was_refused
        return no_request and self.probe_at < NEVER


class Job(Struct, eq=False):
    """One message in the router, from its hand-over until its ACK or NACK went through."""

    key: MessageKey
    message: Message
    group: str
    received: ReceivedMessage  # the first one; of later ones, handle and lease are adopted
    handle: Handle
    lease_until: float
    settler: Settler
    batch: Batch
    tracked_at: float
    started_at: float  # of its latest try
    failures: int
    requests: int
    pool: JobPool | None = None
    state: State = State.QUEUED
    hold_until: float = NEVER  # how long it may wait here; its broker gives up on it later
    resume_at: float = NEVER  # while it waits between two tries
    tries: tuple[Try, ...] = ()  # those that have ended
    returned_for: float | None = None  # seconds, once it is returned
    return_reason: ReturnReason | None = None  # likewise
    metric: Metric | None = None  # how its delivery is counted; None: it had none
    error: str = ""  # why it became a dead letter, or was returned
    ending: Ending | None = None  # set when it ends in a way that a plain ACK cannot express
    followers: tuple[Follower, ...] = ()
    extending: bool = False  # its lease, right now
    # The engine's Line of its pool to its target, once it is in a pool; core must not import it.
    line: Any = None

    def adopt(self, settler: Settler, received: ReceivedMessage) -> None:
        """Settle by this hand-over from now on: it is the newest (ROUTE-2)."""
        self.settler = settler
        self.handle = received.handle
        self.lease_until = NEVER if received.lease_until is None else received.lease_until

    @property
    def tally(self) -> Tally:
        return Tally(self.failures, self.requests)

    @property
    def pool_code(self) -> str:
        """The pool that holds it, or the one that it asks for while none does."""
        return self.message.pool or DEFAULT_POOL if self.pool is None else self.pool.code

    @property
    def failure_scope(self) -> Batch | str:
        """What of its group has the same scope goes back with it (FIFO-1)."""
        return self.batch.failure_scope or self.batch

    @property
    def blocks_on_error(self) -> bool:
        return self.message.mode is Mode.BLOCK_ON_ERROR

    def __repr__(self) -> str:
        return f"<Job {self.message.id} {self.state.name.lower()} requests={self.requests}>"


class Return(Struct, frozen=True):
    """A job that goes back to its queue."""

    job: Job
    reason: ReturnReason
    own_delay: float | None = None  # seconds; None: that of its reason
    error: str = ""  # kept by its queue; "": it was no real failure

    @property
    def delay(self) -> float:
        return RETURNS[self.reason].delay if self.own_delay is None else self.own_delay
