"""A message that the router holds: what it is, how far it got, and who settles it."""

from typing import TYPE_CHECKING, Final

from msgspec import Struct

from router.core.config import COMMAND_BUS, OnFailure, RetryPolicy
from router.core.history import Fate, State, Try
from router.core.identity import MessageKey
from router.core.message import DEFAULT_POOL, Handle, Message, Mode, ReceivedMessage, Tally
from router.core.order import GroupKey
from router.core.outcome import Ending, Failure, Metric
from router.core.returning import RETURNS, ReturnReason, policy_for

if TYPE_CHECKING:  # a job knows where it is, and all of these know jobs
    from router.engine.pool import ProcessPool
    from router.engine.settle import Settler
    from router.engine.targets import Line

NEVER: Final = float("inf")
EXPIRED: Final = float("-inf")


class Follower(Struct, frozen=True, eq=False):
    """A copy that waits for the end of a job."""

    settler: "Settler"
    received: ReceivedMessage
    # It came before the end was known, to a queue that records ends: a failure is its own, too.
    shares_failure: bool = False


class Batch(Struct, eq=False):
    """One receive. Knows whether any of it led to a request."""

    settler: "Settler"
    at: float
    # Which messages of a group go back when one fails; None: those of this batch (FIFO-1).
    failure_scope: str | None = None
    left: int = 0  # that have not ended; what was delivered still counts
    was_sent: bool = False  # some of it, to a target whose circuit is closed
    was_refused: bool = False  # some of it did not fit into its pool
    probe_at: float = NEVER  # when one of the circuits that stopped it lets a request through

    def probe(self, at: float) -> None:
        """Note that the circuit of a target is open, and when it lets a request through."""
        self.probe_at = min(self.probe_at, at)

    @property
    def is_dark(self) -> bool:
        """Whether all of it was returned while the circuits of its targets were open (MED-4)."""
        no_request = not self.left and not self.was_sent and not self.was_refused
        return no_request and self.probe_at < NEVER


class Job(Struct, eq=False):
    """One message in the router, from its hand-over until its ACK or NACK went through."""

    key: MessageKey
    message: Message
    group: str
    received: ReceivedMessage  # the first one; of later ones, handle and lease are adopted
    handle: Handle
    # Loop time at which its lease ends, which `extend_leases` puts off; NEVER: with its connection.
    # It has EXPIRED if the broker says so (`GuardedBroker`), if its connection ended or was silent
    # (`Settler.disconnected`, `is_cut_off`), if its id is another message's now (`Tracker`), or if
    # its task runs on after an abort (`DeliveryRunner`). `Settler.forfeit` lets it go.
    lease_until: float
    settler: "Settler"
    batch: Batch
    tracked_at: float
    started_at: float  # of its latest try
    failures: int
    requests: int
    pool: "ProcessPool | None" = None
    state: State = State.QUEUED
    expires_at: float = NEVER  # loop time: it is not sent from then on (MSG-2)
    hold_until: float = NEVER  # how long it may wait here; its broker gives up on it later
    try_until: float = NEVER  # a later request of its delivery could outlast its broker's patience
    resume_at: float = NEVER  # while it waits between two tries
    not_before: float = 0.0  # of a strict queue: it takes its place in its group, and waits there
    tries: tuple[Try, ...] = ()  # those that have ended
    returned_for: float | None = None  # seconds, once it is returned
    return_reason: ReturnReason | None = None
    metric: Metric | None = None  # how its delivery is counted; None: it had none
    error: str = ""  # why it became a dead letter, or was returned
    needs_finish: bool = False  # a plain ACK is not enough: it has a reply, next steps, a result …
    ending: Ending | None = None  # how it ended, if a plain ACK cannot express that
    is_held: bool = False  # it is a dead letter, and holds its group from now on (ORD-11)
    stored_in: GroupKey | None = None  # while it moves to the order store: its group there
    followers: tuple[Follower, ...] = ()
    extending: bool = False  # its lease, right now
    is_cancelled: bool = False  # somebody wants it to end (CMD-13)
    line: "Line" = None  # type: ignore[assignment]  # of its pool to its target, once it is in one

    def adopt(self, settler: "Settler", received: ReceivedMessage) -> None:
        """Settle by this hand-over from now on: it is the newest (ROUTE-2)."""
        self.settler = settler
        self.handle = received.handle
        self.lease_until = NEVER if received.lease_until is None else received.lease_until

    def cancel(self) -> None:
        """End it as soon as that can be: somebody wants that (CMD-13)."""
        if not self.is_cancelled:
            self.is_cancelled = True
            if self.pool is not None:
                self.pool.cancel(self)

    @property
    def fate(self) -> Fate:
        """What an ACK of it means."""
        if self.ending is not None and self.ending.is_cancelled:
            return Fate.CANCELLED
        return Fate.DEAD_LETTERED if self.error else Fate.DELIVERED

    @property
    def tally(self) -> Tally:
        return Tally(self.failures, self.requests)

    @property
    def policy(self) -> RetryPolicy | None:
        """Its retry policy: that of its pool, else of its queue (WQ-5), with its own limit."""
        policy = (None if self.pool is None else self.pool.config.retry) or self.settler.retry
        if policy is None:
            default = self.settler.default_retry
            policy = default.commands if self.message.is_command else default.others
        most = self.message.max_attempts
        return policy if most is None else policy_for(most, policy)

    @property
    def attempt(self) -> int:
        """The number of its delivery, the next one if none is under way (WQ-14)."""
        policy = self.policy
        return self.attempt_of(None if policy is None else policy.max_attempts)

    def attempt_of(self, most: int | None) -> int:
        """Return that number. A policy with a lower limit may have come since it failed."""
        return self.failures + 1 if most is None else min(self.failures + 1, most)

    @property
    def is_command(self) -> bool:
        """Whether it is a command or a task (CMD-12)."""
        return self.message.is_command or self.settler.queue.envelope == COMMAND_BUS

    @property
    def pool_code(self) -> str:
        """The pool that holds it, or the one that it asks for while none does."""
        return self.message.pool or DEFAULT_POOL if self.pool is None else self.pool.code

    @property
    def failure_scope(self) -> Batch | str:
        """Messages of its group with this scope are NACKed together (FIFO-1)."""
        return self.batch.failure_scope or self.batch

    @property
    def blocks_on_error(self) -> bool:
        if self.message.dispatch is None:
            return self.settler.failing is not OnFailure.SKIP
        return self.message.mode is Mode.BLOCK_ON_ERROR

    def __repr__(self) -> str:
        return f"<Job {self.message.id} {self.state.name.lower()} requests={self.requests}>"


class Return(Struct, frozen=True):
    """A job that goes back to its queue."""

    job: Job
    reason: ReturnReason
    own_delay: float | None = None  # seconds; None: that of its reason
    failure: Failure | None = None  # kept by its queue; None: it was no real failure
    was_sent: bool = True  # False: no request was made, so nothing can be wrong with it (ORD-6)

    @property
    def delay(self) -> float:
        return RETURNS[self.reason].delay if self.own_delay is None else self.own_delay
