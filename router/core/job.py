"""A message that the router holds: what it is, how far it got, and its way home."""

from collections.abc import Sequence
from enum import Enum, StrEnum, auto
from typing import Final, Protocol

from msgspec import Struct

from router.core.config import RetryPolicy
from router.core.dead_letter import Reason
from router.core.identity import MessageKey
from router.core.message import DEFAULT_GROUP, Delivery, Handle, Message, Mode, Tally
from router.core.outcome import Metric

NEVER: Final = float("inf")
EXPIRED: Final = float("-inf")


class State(Enum):
    QUEUED = auto()
    WAITING = auto()  # for its next try, or for a draining pool to let go of its group
    DELIVERING = auto()  # a POST of it is open
    SETTLING = auto()  # its ACK or NACK is on its way


class Fate(StrEnum):
    """How a hand-over ended (OPS-6)."""

    DELIVERED = "delivered"  # accepted and acknowledged
    DEAD_LETTERED = "deadLettered"
    RETURNED = "returned"  # NACKed
    SUPERSEDED = "superseded"  # a redelivered or requeued copy, or a remembered ack
    FORFEITED = "forfeited"  # its lease or its connection was lost


class Death(Struct, frozen=True):
    """Why a message is given up; with its job, all of a dead letter."""

    reason: Reason
    error: str
    http_status: int | None = None
    reply: bytes = b""


class Try(Struct, frozen=True, gc=False):
    """One attempt at delivering it, as it is told later."""

    started_at: float
    seconds: float | None  # None: the request is still open
    status: int | None = None  # of the HTTP answer, if there was one
    error: str | None = None  # in the operators' words; None: it was accepted

    @property
    def ended_at(self) -> float:
        return self.started_at + (self.seconds or 0.0)


class Home(Protocol):
    """Where a job came from and reports to. A pool never sees a broker."""

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
    def retry(self) -> RetryPolicy | None:
        """The queue's retry policy, where the pool has none."""

    def ack(self, job: "Job") -> None:
        """It was accepted. Sent with others in a moment; ends the job."""

    async def bury(self, job: "Job", death: Death) -> bool:
        """Keep it as a dead letter, then remove it. False: it was not kept, nothing was done."""

    async def give_back(self, job: "Job", delay: float, error: str = "") -> None:
        """NACK it and end the job. Never fails: what cannot be returned comes back by itself."""

    def forfeit(self, job: "Job") -> None:
        """Let it go without a word: the broker has taken it back already."""

    def hold(self, jobs: Sequence["Job"]) -> None:
        """They are settled through here from now on; their leases are kept alive."""

    def release(self, job: "Job") -> None:
        """It is settled through another one from now on."""

    def discard(self, delivery: Delivery, error: str = "") -> None:
        """ACK away a copy that is not needed. `error`: why its message became a dead letter."""

    def readmit(self, delivery: Delivery) -> None:
        """Route it as if it had just arrived."""


class Keeper(Protocol):
    """Who counts a job against a capacity, until it has ended: its pool."""

    @property
    def code(self) -> str: ...

    def let_go(self, job: "Job") -> None: ...


class Batch:
    """One receive. Knows whether any of it led to a request (ROUTE-5)."""

    __slots__ = ("at", "home", "left", "requests", "run")

    def __init__(self, home: Home, at: float, run: str | None = None) -> None:
        self.home = home
        self.at = at
        self.run = run  # what of its group goes back together; None: what this batch brought
        self.left = 0
        self.requests = 0

    def end_one(self) -> bool:
        """One of it has ended undelivered. True: so have all, and none led to a request."""
        self.left -= 1
        return not self.left and not self.requests


class Job(Struct, eq=False):
    """One hand-over of one message, from routing until its ACK or NACK went through."""

    key: MessageKey
    message: Message
    group: str
    delivery: Delivery  # as it came first; of a later one, handle and lease are adopted (ROUTE-2)
    handle: Handle
    lease_until: float
    home: Home
    batch: Batch
    tracked_at: float
    started_at: float  # of its latest try
    attempts: int
    posts: int
    keeper: Keeper | None = None
    state: State = State.QUEUED
    hold_until: float = NEVER  # how long it may wait here; its broker gives up on it later
    resume_at: float = NEVER  # while it waits between two tries
    tries: tuple[Try, ...] = ()  # those that have ended
    returned_for: float | None = None  # seconds, once it is given back
    metric: Metric | None = None  # how its delivery is counted; None: it had none
    error: str = ""  # set when it is removed without having been accepted: a dead letter
    followers: tuple[tuple[Home, Delivery], ...] = ()  # arrivals that wait for this to settle
    extending: bool = False

    def adopt(self, home: Home, delivery: Delivery) -> None:
        """Settle by this hand-over from now on: it is the newest (ROUTE-2)."""
        self.home = home
        self.handle = delivery.handle
        self.lease_until = NEVER if delivery.lease_until is None else delivery.lease_until

    def recall(self, tally: Tally) -> None:
        """Its broker could not keep what was tried so far; the engine did."""
        self.attempts, self.posts = tally.attempts, tally.posts

    @property
    def tally(self) -> Tally:
        return Tally(self.attempts, self.posts)

    @property
    def run(self) -> Batch | str:
        """What of its group is of the same run goes back with it (FIFO-1)."""
        return self.batch.run or self.batch

    @property
    def blocks_on_error(self) -> bool:
        return self.message.mode is Mode.BLOCK_ON_ERROR

    def __repr__(self) -> str:
        return f"<Job {self.message.id} {self.state.name.lower()} posts={self.posts}>"


def new_job(message: Message, delivery: Delivery, batch: Batch, key: MessageKey) -> Job:
    tally, lease_until, at = delivery.tally, delivery.lease_until, batch.at
    return Job(
        key,
        message,
        message.group or DEFAULT_GROUP,
        delivery,
        delivery.handle,
        NEVER if lease_until is None else lease_until,
        batch.home,
        batch,
        at,
        at,
        tally.attempts,
        tally.posts,
    )
