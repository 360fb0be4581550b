"""A message that the router holds: what it is, how far it got, and its way home."""

from enum import Enum, StrEnum, auto
from typing import Final, Protocol

from msgspec import Struct

from router.core.config import RetryPolicy
from router.core.dead_letter import Reason
from router.core.message import DEFAULT_GROUP, Delivery, Handle, Message, Mode, Tally
from router.core.outcome import Metric

Key = tuple[str, str | None, str]  # ROUTE-1: (queue, broker id, ""), else (queue, None, id)
NEVER: Final = float("inf")


class State(Enum):
    QUEUED = auto()
    WAITING = auto()  # for its next try, or for a draining pool to let go of its group
    DELIVERING = auto()  # a POST of it is open
    SETTLING = auto()  # its ACK or NACK is on its way
    ENDED = auto()


class Fate(StrEnum):
    """How a hand-over ended (OPS-6)."""

    DELIVERED = "delivered"  # accepted and acknowledged
    DEAD_LETTERED = "deadLettered"
    RETURNED = "returned"  # NACKed
    SUPERSEDED = "superseded"  # a redelivered or requeued copy, or a remembered delete
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

    def hold(self, job: "Job") -> None:
        """It is settled through here from now on; its lease is kept alive."""

    def release(self, job: "Job") -> None:
        """It is settled through another one from now on."""

    def discard(self, delivery: Delivery) -> None:
        """ACK away a copy that is not needed."""

    def readmit(self, delivery: Delivery) -> None:
        """Route it as if it had just arrived."""


class Keeper(Protocol):
    """Who counts a job against a capacity, until it has ended: its pool."""

    @property
    def code(self) -> str: ...

    def let_go(self, job: "Job") -> None: ...


class Batch:
    """One receive. Tells whether any of it led to a request (ROUTE-5)."""

    __slots__ = ("left", "requests")

    def __init__(self) -> None:
        self.left = 0
        self.requests = 0

    @property
    def was_fruitless(self) -> bool:
        return self.left == 0 and self.requests == 0


class Job:
    """One hand-over of one message, from routing until its ACK or NACK went through."""

    __slots__ = (
        "attempts",
        "attempts_before",
        "batch",
        "body",
        "broker_id",
        "error",
        "extending",
        "fate",
        "followers",
        "group",
        "handle",
        "hold_until",
        "home",
        "is_last",
        "keeper",
        "key",
        "lease_until",
        "message",
        "metric",
        "posts",
        "resume_at",
        "returned_for",
        "run",
        "started_at",
        "state",
        "tracked_at",
        "tries",
    )

    def __init__(
        self,
        message: Message,
        delivery: Delivery,
        home: Home,
        batch: Batch,
        *,
        run: Batch | str,
        key: Key,
        now: float,
    ) -> None:
        self.key = key
        self.message = message
        self.group = message.group or DEFAULT_GROUP
        self.body = delivery.body
        self.broker_id = delivery.broker_id
        self.home = home
        self.batch = batch
        self.run = run  # what of its group is of the same run goes back with it (FIFO-1)
        self.keeper: Keeper | None = None
        self.state = State.QUEUED
        self.tracked_at = now
        self.attempts = delivery.tally.attempts
        self.attempts_before = self.attempts  # as its broker knows them (BRK-3)
        self.posts = delivery.tally.posts
        self.hold_until = NEVER  # how long it may wait here; its broker gives up on it later
        self.is_last = delivery.is_last  # given back, it would never come again
        self.started_at = now  # of its latest try
        self.resume_at = NEVER  # while it waits between two tries
        self.tries: tuple[Try, ...] = ()  # those that have ended
        self.returned_for: float | None = None  # seconds, once it is given back
        self.metric: Metric | None = None  # how its delivery is counted; None: it had none
        self.error = ""  # set when it is removed without having been accepted
        self.fate = Fate.DELIVERED  # what it will have been once its ACK went through
        self.followers: list[tuple[Home, Delivery]] = []  # arrivals that wait for this to settle
        self.extending = False
        self.adopt(home, delivery)

    def adopt(self, home: Home, delivery: Delivery) -> None:
        """Settle by this hand-over from now on: it is the newest (ROUTE-2)."""
        self.home = home
        self.handle: Handle = delivery.handle
        self.lease_until = NEVER if delivery.lease_until is None else delivery.lease_until

    def recall(self, tally: Tally) -> None:
        """Its broker could not keep what was tried so far; the engine did."""
        self.attempts, self.posts = tally.attempts, tally.posts

    @property
    def tally(self) -> Tally:
        return Tally(self.attempts, self.posts)

    @property
    def is_tried(self) -> bool:
        """A high-priority message never passes one that has been tried (POOL-3)."""
        return self.posts > 0

    @property
    def blocks_on_error(self) -> bool:
        return self.message.mode is Mode.BLOCK_ON_ERROR

    def __repr__(self) -> str:
        return f"<Job {self.message.id} {self.state.name.lower()} posts={self.posts}>"
