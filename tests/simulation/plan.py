"""What will happen in a world: known before anything runs, so it can be shrunk."""

import json
from datetime import UTC, datetime
from enum import StrEnum
from typing import Final

from msgspec import Struct

from router.core.config import OnFailure

DAY: Final = 86_400.0
YEAR: Final = 365 * DAY
DEDUP_WINDOW: Final = 300.0
# A copy that arrives while the first is held is a proven duplicate: also for a while after the
# first was accepted, as long as its ACK is on its way or its router stands still.
SETTLED_WITHIN: Final = 200.0
MAX_PAUSE: Final = 100.0
START: Final = 1_800_000_000.0  # the wall clock, when a world begins
HIGH: Final = 9  # the priority that passes the rest of a group
REPLIES: Final = "replies"  # the queue that replies go to
HOSTS: Final = 3
RETRY_SCHEDULE: Final = (1.0, 5.0, 12.0)  # seconds
DROPPED_POOL: Final = "P"  # by most changes of the pools
POOLS: Final = {"P": 1, "Q": 3, "R": 20}  # concurrency; R has a rate limit


class Kind(StrEnum):
    """Which broker."""

    SQLITE = "sqlite"
    POSTGRES = "postgres"  # the same table behind a network, several routers
    RABBITMQ = "rabbitmq"
    SQS = "sqs"
    SQS_FIFO = "sqs-fifo"
    NATS = "nats"
    ACTIVEMQ = "activemq"


WORK_QUEUES: Final = frozenset({Kind.SQLITE, Kind.POSTGRES})


class Mood(StrEnum):
    """How a target answers."""

    OK = "ok"
    SLOW = "slow"  # accepts after half a minute
    REFUSES = "refuses"  # the connection
    HANGS = "hangs"  # never answers, and does nothing
    CUTS = "cuts off"  # accepts, and the answer is lost
    DENIES = "404"
    UNAUTHORIZED = "slow 401"
    FAILS = "500"
    BUSY = "503 with Retry-After"
    LIMITS = "429"
    DEFERS = "ack:false"
    CAPACITY = "503 above so many at once"
    SILENCE = "asks for silence"  # by 429 or 503 with Retry-After


class Act(StrEnum):
    PUBLISH = "publish"  # straight into the broker
    SEND = "send"  # by a router
    BATCH = "open a batch"
    ADD = "add to a batch"
    CANCEL = "cancel"
    FOLLOW = "published by the router itself"  # a next step, a callback or a tick
    REPLAY = "replay"  # all dead letters
    RELEASE = "release held groups"
    KILL = "kill"
    PAUSE = "pause"
    STALL = "stall while settling"
    OUTAGE = "outage"
    BREAK = "break"  # all connections, once
    LOSSES = "losses"
    HANGS = "hangs"
    SLOW = "slow network"
    CLOCK = "clock"
    STORE = "store fails"
    RECREATE = "recreate the queue"
    REBOOT = "reboot"
    POOLS = "change the pools"


class Wish(Struct, frozen=True):
    """What a message asks for beside its delivery (CMD-1 to CMD-6, CMD-11)."""

    payload: int | None = None
    reply: bool = False
    delay: float | None = None  # seconds from when it is published
    due: float | None = None  # seconds from the start of the world
    priority: int | None = None
    by_content: bool = False  # what has the same content is the same message
    pass_result: bool = False  # of a step: it gets the result of the one before it


PLAIN: Final = Wish()


class Body(Struct, frozen=True):
    """One message as published. Its number is in its token, and so in what a target is sent."""

    number: int
    id: str
    host: int
    pool: str | None = None
    group: str | None = None
    dispatch: str | None = None
    high: bool = False
    malformed: bool = False
    wish: Wish = PLAIN
    then: tuple["Body", ...] = ()

    @property
    def target(self) -> str:
        return f"http://t{self.host}.test/hook"

    @property
    def token(self) -> str:
        return f"tok-{self.number}"

    @property
    def correlation(self) -> str:
        return f"c{self.number}"

    @property
    def level(self) -> int:
        return HIGH if self.high else self.wish.priority or 0

    @property
    def is_alone(self) -> bool:
        """Whether no group holds it back."""
        return self.group is None or self.dispatch == "IMMEDIATE"

    @property
    def sort(self) -> object:
        """What it shares with messages that a queue takes for the same."""
        wish = self.wish
        if not wish.by_content:
            return self.number
        return self.host, self.pool, self.group, wish.reply, wish.payload

    @property
    def content(self) -> bytes:
        if self.malformed:
            return b'{"malformed": %d' % self.number
        return json.dumps(self.fields).encode()

    @property
    def callback(self) -> bytes:
        """As a batch takes it, which gives it an id."""
        fields = self.fields
        del fields["id"]
        return json.dumps(fields).encode()

    @property
    def fields(self) -> dict[str, object]:
        wish = self.wish
        fields: dict[str, object] = {
            "id": self.id,
            "mediationTarget": self.target,
            "authToken": self.token,
        }
        optional: dict[str, object] = {
            "poolCode": self.pool,
            "messageGroupId": self.group,
            "dispatchMode": self.dispatch,
            "highPriority": self.high or None,
        }
        if wish != PLAIN:
            due = None if wish.due is None else datetime.fromtimestamp(START + wish.due, UTC)
            optional |= {
                "payload": None if wish.payload is None else {"n": wish.payload},
                "correlationId": self.correlation,
                "replyTo": REPLIES if wish.reply else None,
                "delaySeconds": wish.delay,
                "notBefore": None if due is None else due.isoformat(),
                "priority": wish.priority,
                "dedup": "content" if wish.by_content else None,
                "passResult": wish.pass_result or None,
            }
        if self.then:
            optional["then"] = [step.fields for step in self.then]
        return fields | {name: value for name, value in optional.items() if value is not None}


class PlannedBatch(Struct, frozen=True):
    """Messages that are told of together (CMD-4)."""

    id: str
    queue: int
    members: tuple[int, ...]
    callback: int
    is_sized: bool  # more members are added later


class Beats(Struct, frozen=True):
    """A message that is published again and again (CMD-10)."""

    name: str
    queue: int
    every: int  # seconds
    host: int
    pool: str | None

    @property
    def token(self) -> str:
        return f"tick-{self.name}"

    @property
    def fields(self) -> dict[str, object]:
        target = f"http://t{self.host}.test/hook"
        pool = {} if self.pool is None else {"poolCode": self.pool}
        return {"mediationTarget": target, "authToken": self.token, **pool}


_OF_PRODUCERS: Final = frozenset({Act.PUBLISH, Act.SEND, Act.BATCH, Act.ADD, Act.CANCEL})


class Step(Struct, frozen=True):
    """Something that happens at an instant."""

    at: float
    act: Act
    bodies: tuple[int, ...] = ()
    queue: int = 0
    router: int = 0
    seconds: float = 0.0
    share: float = 0.0
    batch: int = 0
    pool: str = DROPPED_POOL  # that a change of the pools drops
    running: bool = False  # of a cancel: also what is in flight

    @property
    def is_of_a_producer(self) -> bool:
        return self.act in _OF_PRODUCERS


class Phase(Struct, frozen=True):
    """How one target is from an instant on."""

    at: float
    mood: Mood
    share: float = 1.0  # of the requests; the others are accepted
    most: int = 0  # requests at once that CAPACITY takes, or seconds of SILENCE
    takes: float = 0.0  # seconds more until a good answer


class Strict(Struct, frozen=True):
    """That all queues are strict, and how (ORD-1)."""

    on_failure: OnFailure
    holds: bool  # a dead letter holds its group (ORD-11)


class WorldPlan(Struct, frozen=True):
    seed: int
    kind: Kind
    routers: int
    connections: int
    queues: int
    attempts: int | None  # that a message may fail
    lease: float
    rate: int | None  # of the pool R, per minute
    bodies: tuple[Body, ...]
    steps: tuple[Step, ...]
    phases: tuple[tuple[Phase, ...], ...]  # by target
    batches: tuple[PlannedBatch, ...] = ()
    beats: tuple[Beats, ...] = ()
    replies_elsewhere: bool = False  # the work queue's replies go to another file
    strict: Strict | None = None
