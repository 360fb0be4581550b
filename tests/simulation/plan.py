"""What will happen in a world: drawn from its seed before anything runs, so it can be shrunk."""

import json
import random
from enum import StrEnum
from typing import Final

from msgspec import Struct, field

DAY: Final = 86_400.0
YEAR: Final = 365 * DAY
DEDUP_WINDOW: Final = 300.0
# A copy that arrives while the first is held is a proven duplicate: also for a while after the
# first was accepted, as long as its ACK is on its way or its router stands still.
SETTLED_WITHIN: Final = 200.0
LONGEST_PAUSE: Final = 100.0


class Kind(StrEnum):
    """Which broker."""

    SQLITE = "sqlite"
    POSTGRES = "postgres"  # the same table behind a network, several routers
    RABBITMQ = "rabbitmq"
    SQS = "sqs"
    SQS_FIFO = "sqs-fifo"
    NATS = "nats"
    ACTIVEMQ = "activemq"


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


class Act(StrEnum):
    PUBLISH = "publish"  # straight into the broker
    SEND = "send"  # by a router
    REPLAY = "replay"  # all dead letters
    KILL = "kill"
    PAUSE = "pause"
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

    @property
    def target(self) -> str:
        return f"http://t{self.host}.test/hook"

    @property
    def token(self) -> str:
        return f"tok-{self.number}"

    @property
    def content(self) -> bytes:
        if self.malformed:
            return b'{"malformed": %d' % self.number
        fields: dict[str, object] = {
            "id": self.id,
            "mediationTarget": self.target,
            "authToken": self.token,
        }
        if self.pool is not None:
            fields["poolCode"] = self.pool
        if self.group is not None:
            fields["messageGroupId"] = self.group
        if self.dispatch is not None:
            fields["dispatchMode"] = self.dispatch
        if self.high:
            fields["highPriority"] = True
        return json.dumps(fields).encode()


class Step(Struct, frozen=True):
    """Something that happens at an instant."""

    at: float
    act: Act
    bodies: tuple[int, ...] = ()
    queue: int = 0
    router: int = 0
    seconds: float = 0.0
    share: float = 0.0

    @property
    def is_publication(self) -> bool:
        return self.act in {Act.PUBLISH, Act.SEND}


class Phase(Struct, frozen=True):
    """How one target is from an instant on."""

    at: float
    mood: Mood
    share: float = 1.0  # of the requests; the others are accepted


class Plan(Struct, frozen=True):
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

    @property
    def faults(self) -> int:
        return sum(not step.is_publication for step in self.steps)


KINDS: Final = tuple(Kind)
HOSTS: Final = 3
POOLS: Final = {"P": 1, "Q": 3, "R": 20}  # concurrency; R has a rate limit
GOOD_MOODS: Final = (Mood.OK, Mood.OK, Mood.OK, Mood.SLOW, Mood.CUTS)
BAD_MOODS: Final = (
    Mood.REFUSES,
    Mood.HANGS,
    Mood.DENIES,
    Mood.DENIES,
    Mood.UNAUTHORIZED,
    Mood.FAILS,
    Mood.BUSY,
    Mood.LIMITS,
    Mood.DEFERS,
)
FAULTS: Final = (
    Act.KILL,
    Act.KILL,
    Act.KILL,
    Act.PAUSE,
    Act.OUTAGE,
    Act.BREAK,
    Act.LOSSES,
    Act.LOSSES,
    Act.HANGS,
    Act.SLOW,
    Act.CLOCK,
    Act.STORE,
    Act.REPLAY,
    Act.POOLS,
)
LATER: Final = (SETTLED_WITHIN + 5,) * 3 + (DEDUP_WINDOW - 10, 900.0)
FLOODS: Final = 0.03  # of all worlds
FLOOD: Final = 40  # messages of one call
CLOCK_STEPS: Final = (-YEAR, -3600.0, -40.0, 40.0, 3600.0, YEAR)


class _Drawing(Struct):
    rng: random.Random
    kind: Kind
    routers: int
    queues: int
    bodies: list[Body] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    def publish(self, at: float, *bodies: Body, queue: int | None = None) -> None:
        by_router = self.kind in {Kind.SQLITE, Kind.POSTGRES} or self.rng.random() < 0.5
        self.steps.append(
            Step(
                at,
                Act.SEND if by_router else Act.PUBLISH,
                tuple(body.number for body in bodies),
                queue=self.rng.randrange(self.queues) if queue is None else queue,
                router=self.rng.randrange(self.routers),
            )
        )

    def body(self, message_id: str, *, like: Body | None = None) -> Body:
        """A new one; `like`: it belongs to the same place as that."""
        rng = self.rng
        number = len(self.bodies)
        if like is not None and rng.random() < 0.7:
            drawn = Body(number, message_id, like.host, like.pool, like.group, like.dispatch)
        else:
            mode = rng.choice((None, None, None, "NEXT_ON_ERROR", "IMMEDIATE"))
            group = rng.choice((None, "g", "g", "h"))
            drawn = Body(
                number,
                message_id,
                rng.randrange(HOSTS),
                rng.choice((None, "P", "P", "Q", "Q", "R", "unknown")),
                None if mode == "IMMEDIATE" else group,
                mode,
                high=rng.random() < 0.15,
                malformed=rng.random() < 0.05,
            )
        self.bodies.append(drawn)
        return drawn

    def produce(self, at: float) -> None:
        """One producer does something, and maybe something about it later."""
        rng = self.rng
        body = self.body(f"m{len(self.bodies)}")
        pick = rng.random()
        queue = rng.randrange(self.queues)
        if pick < 0.35:
            self.publish(at, body, queue=queue)
        elif pick < 0.55:  # the id again, for another content: an order created, an order paid
            self.publish(at, body, queue=queue)
            again = self.body(body.id, like=body)
            self.publish(at + rng.choice((0.0, 0.5, 5.0, 40.0)), again)
        elif pick < 0.7:  # a true duplicate
            self.publish(at, body, queue=queue)
            self.publish(at + rng.choice((0.0, 0.01, 1.0, 31.0)), body)
        elif pick < 0.88:  # the same once more, much later, as after a death
            self.publish(at, body, queue=queue)
            later = rng.choice(LATER)
            self.publish(at + later, body, queue=queue)
        else:  # one call, one id, two targets
            other = self.body(body.id)
            self.publish(at, body, other, queue=queue)

    def flood(self, at: float) -> None:
        """More than a pool holds, in a few calls."""
        pool = self.rng.choice(("P", "R", "R"))
        for _ in range(3):
            first = len(self.bodies)
            group = self.rng.choice((None, "g"))
            for number in range(first, first + FLOOD):
                mode = None if group else "IMMEDIATE"
                self.bodies.append(Body(number, f"m{number}", 0, pool, group, mode))
            self.publish(at, *self.bodies[first:])

    def fault(self, at: float) -> None:
        rng = self.rng
        act = rng.choice(FAULTS)
        seconds = rng.choice((0.5, 3.0, 12.0, 35.0))
        if act is Act.CLOCK:
            seconds = rng.choice(CLOCK_STEPS)
        elif act is Act.PAUSE:
            seconds = rng.choice((2.0, 31.0, 65.0, LONGEST_PAUSE))
        if act is Act.KILL and self.kind is Kind.SQLITE and rng.random() < 0.4:
            act = rng.choice((Act.RECREATE, Act.REBOOT))
        share = rng.choice((0.1, 0.3, 0.6))
        router = rng.randrange(self.routers)
        self.steps.append(Step(at, act, router=router, seconds=seconds, share=share))


def draw(seed: int, kind: Kind | None = None) -> Plan:
    rng = random.Random(seed)  # noqa: S311  repeatable, not secret
    drawn = kind or rng.choice(KINDS)
    routers = rng.choice((1, 1, 1, 2, 3))
    drawing = _Drawing(rng, drawn, routers, rng.choice((1, 1, 2)))
    span = rng.choice((2.0, 20.0, 60.0))
    for _ in range(rng.choice((1, 2, 3, 5, 8, 12))):
        drawing.produce(round(rng.random() * span, 3))
    if rng.random() < FLOODS:
        drawing.flood(round(rng.random() * span, 3))
    published = [step.at for step in drawing.steps]
    for _ in range(rng.choice((0, 1, 1, 2, 3, 5))):
        if rng.random() < 0.5:  # while something is on its way
            at = rng.choice(published) + rng.choice((-0.2, 0.0, 0.01, 0.1, 1.0)) + rng.random() / 50
        else:
            at = rng.random() * (span + 40)
        drawing.fault(round(max(at, 0.0), 3))
    return Plan(
        seed=seed,
        kind=drawn,
        routers=routers,
        connections=rng.choice((1, 1, 2)),
        queues=drawing.queues,
        attempts=rng.choice((None, 1, 2, 3)),
        lease=rng.choice((30.0, 30.0, 15.0, 60.0)),
        rate=rng.choice((None, 30, 120)),
        bodies=tuple(drawing.bodies),
        steps=tuple(sorted(drawing.steps, key=lambda step: step.at)),
        phases=tuple(_phases(rng, span) for _ in range(HOSTS)),
    )


def _phases(rng: random.Random, span: float) -> tuple[Phase, ...]:
    phases = [Phase(0.0, rng.choice((*GOOD_MOODS, *BAD_MOODS)), rng.choice((0.3, 1.0)))]
    for _ in range(rng.choice((0, 1, 2))):
        at = round(rng.random() * (span + 60), 3)
        phases.append(Phase(at, rng.choice((*GOOD_MOODS, *BAD_MOODS)), rng.choice((0.3, 1.0))))
    return tuple(sorted(phases, key=lambda phase: phase.at))
